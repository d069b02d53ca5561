"""Where pairs come from: the built-in glyphs, one's own pictures, and the batches drawn from them."""
