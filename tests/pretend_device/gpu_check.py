"""One check of ``gpu_check`` on the pretend device: ``python gpu_check.py NAME``."""

import os
import signal
import sys

import torch
from curvlab_kernels.audit.gpu_check import run_here
from curvlab_kernels.audit.ptx import executed

from tests import pretend_device


def main(name):
    if os.environ.get("DIE_IN") == name:
        os.kill(os.getpid(), signal.SIGKILL)
    place = pretend_device.device()
    pretend_device.treat_as_gpu()
    torch.set_num_threads(1)
    if os.environ.get("BREAK"):
        from curvlab_kernels import _triton

        _triton.norm = lambda vectors: torch.zeros(vectors.shape[:-1], dtype=torch.float64)
    with executed(90, races=False):
        return run_here(name, place)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
