"""The towers and their tokenizers: the small ones of the demos, and those of transformers, timm and open_clip."""
