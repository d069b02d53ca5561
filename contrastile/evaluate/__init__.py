"""Measures of trained encoders: retrieval both ways, zero-shot classification, rankings; all in tiles."""
