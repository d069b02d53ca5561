"""The towers and their tokenizers: the small ones of the demo, and any that transformers can build."""
