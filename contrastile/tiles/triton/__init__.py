"""Blocks in fused Triton kernels."""
