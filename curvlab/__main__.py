"""``python -m curvlab``: the same as the command ``curvlab``."""

import sys

from curvlab.cli import main

if __name__ == "__main__":
    sys.exit(main())
