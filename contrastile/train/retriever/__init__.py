"""The task of retrievers, beside that of images and texts: recipe, batches, run, job, evaluation."""
