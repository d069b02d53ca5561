"""Data: sources of pairs and texts, built in or the user's own, and the batches drawn from them."""
