"""HOW one block of rows × columns is computed."""
