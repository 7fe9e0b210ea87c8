"""``python -m curvlab_kernels.audit``."""

import sys

from curvlab_kernels.audit.report import main

sys.exit(1 if main() else 0)
