"""Late interaction in fused kernels."""
