"""The ranks of a process group: collectives, agreement on arguments, failures of other ranks."""
