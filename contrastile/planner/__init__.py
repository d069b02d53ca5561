"""What a training step needs, without running it: bytes of each part, seconds, and the largest batch that fits."""
