"""WHAT is accumulated over the pairs of a row, how it ends, and what the gradient of one pair is."""
