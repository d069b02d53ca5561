"""The story of a run, from a recipe to its report: config, recipe, loop, optim, checkpoint, log, report, compare.

Above everything but `cli`. Importing this package, or its `config` and `recipe`, loads neither torch nor transformers,
so that a mistake in a recipe is answered at once.
"""
