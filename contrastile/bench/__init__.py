"""The bench: time and memory of losses and whole steps beside public packages, after a check against float64."""
