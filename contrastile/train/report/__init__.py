"""The report of a run of either task: one HTML page with results, curves, memory and samples."""
