"""One contrastive call: checked as a problem, planned once, run as one autograd operation."""
