"""Needs of a training step, without running it: bytes of each part, seconds, and the largest batch that fits."""
