"""Training: recipes, the loop and its two tasks, checkpoints, reports.

Neither this import nor that of `config` and `recipe` loads torch: a mistake in a recipe is answered at once.
"""
