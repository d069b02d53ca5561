"""The bench: what the losses cost in time and memory, beside what people run today, after a check against float64."""
