"""Where pairs and texts come from: what is built in, one's own files and collections, the batches drawn from them."""
