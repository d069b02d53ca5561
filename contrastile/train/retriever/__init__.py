"""The task of retrievers, beside that of pictures and texts: recipe, batches, run, job, evaluation."""
