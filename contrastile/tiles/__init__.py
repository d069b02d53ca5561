"""Tiles: the computation of one block of rows × columns, in PyTorch or in fused kernels."""
