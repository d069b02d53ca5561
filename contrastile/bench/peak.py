"""`python -m contrastile.bench.peak QUESTION`: the memory of one step on the CPU, in a process of its own.

Called by `loss.peak_apart`, which reads the number from the output.
"""

from __future__ import annotations

import sys

from contrastile.bench.loss import peak_here

if __name__ == "__main__":
    sys.stdout.write(f"{peak_here(sys.argv[1])}\n")
