"""What the towers have learned: retrieval both ways, zero-shot classification, the best answers; all in tiles."""
