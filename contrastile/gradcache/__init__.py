"""The gradient cache: encoders forward and backward in sub-batches, with the gradient of the whole batch."""
