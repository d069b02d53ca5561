"""Search with a finished retriever: an index of encoded passages, and the passages nearest to a question."""
