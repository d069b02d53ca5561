"""Blocks in fused Triton kernels; docs/kernels.md says which files have kernels, and which launch them."""
