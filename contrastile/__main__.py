"""`python -m contrastile train recipes/glyphs.toml`: the same as the command `contrastile`."""

import sys

from contrastile.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
