"""One check of ``gpu_check`` on the pretend device: ``python gpu_check.py NAME``."""

import json
import os
import signal
import sys

import torch
from curvlab_kernels._triton import shapes
from curvlab_kernels._triton.launch import recorded
from curvlab_kernels.audit import gpu_grid, tune
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
        if name in ("--grid", "--tune"):
            return {"--grid": grid, "--tune": tuned}[name](place)
        return run_here(name, place)


def tuned(place):
    """Tiles measured by a clock that counts programs, with a candidate that is out of the way."""
    Use, Tile = shapes.Use, shapes.Tile
    tune.LONG = shapes.SHORT + 1
    dot, brief = Use("dot", 4, 4), Use("sum short", 1, 4)

    def count(run, _device):
        with recorded() as launches:
            run()
        return float(sum(launch.programs for launch in launches))

    offered = {dot: [Tile(8, 128, 4), Tile(32, 512, 8)], brief: [Tile(16, 256, 4)]}
    best, lines = tune.tune(place, offered, count, offered.__getitem__)
    changed = {use: tile for use, tile in best.tiles.items() if tile != shapes.Shapes().tiles[use]}
    print(json.dumps({"changed": [[*use, *tile] for use, tile in changed.items()], "lines": lines}))
    return 0


def grid(place):
    """Every operation once, at a small size: times mean nothing here, all else is as on a GPU."""
    generous = lambda run, _device: run() is None or 1.0  # noqa: E731
    for operation, (dtypes, make) in gpu_grid.OPERATIONS.items():
        case = gpu_grid.data(1003, 5, dtypes[-1], place)
        line, good = gpu_grid.judged(make(case), case, place, generous)
        found = {"operation": operation, "line": line, "good": good}
        if operation == "mix rows":
            case.plain.mul_(2.0)
            found["broken"] = gpu_grid.judged(make(case), case, place, generous)[0]
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
