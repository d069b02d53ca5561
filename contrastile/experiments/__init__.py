"""`contrastile compare`: many runs of one recipe, and tables of what they gave."""
