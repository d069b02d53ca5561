"""The story of a retriever, beside that of pictures and texts: config, feed, run, loop, evaluation, report, index."""
