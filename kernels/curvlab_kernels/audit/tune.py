"""Launch shapes measured on a GPU: ``python -m curvlab_kernels.audit.tune --out shapes.json``.

The shapes in ``_triton/shapes.py`` were chosen without a GPU, from compiled code and a model. Here
every pass takes in turn each tile that a thread's registers can hold, the others staying as they
are; a tile that gives other numbers than float64 does, within the checks' tolerance, is not timed.
The fastest stay, and go into a file for ``curvlab_kernels.use_shapes(file)``.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from triton.runtime.errors import OutOfResources

from curvlab_kernels import _triton
from curvlab_kernels._triton.shapes import SHORT, Shapes, Tile, Use, architecture, save, using
from curvlab_kernels.audit import agreement
from curvlab_kernels.audit.gpu_checks import problem, seconds

LONG, BRIEF, ROWS = 4_000_003, 18_010, 20
BETTER = 0.97  # of the time before: a tile that gains less is noise
DTYPES = {1: torch.int8, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
Timer = Callable[[Callable[[], object], torch.device], float]


def candidates(use: Use) -> list[Tile]:
    """Tiles whose threads load 16 bytes of a row at once and hold 16 to 128 elements."""
    found = []
    for rows in (1, 2, 4, 8, 16, 32):
        for columns in (128, 256, 512, 1024, 2048):
            for warps in (1, 2, 4, 8):
                elements = rows * columns // (32 * warps)
                if 16 // use.stored <= elements and 16 <= elements <= 128:
                    found.append(Tile(rows, columns, warps))
    return found


def operation(use: Use, device: torch.device) -> Callable[[], object]:
    """An operation in which the pass ``use`` takes much of the time."""
    dtype, work = DTYPES[use.stored], torch.float64 if use.work == 8 else torch.float32
    n = BRIEF if use.name.endswith("short") else LONG
    rows, scales, vector = problem(n, ROWS, dtype, device)
    vector = vector.to(work)
    if use.name == "list":
        pieces = [each.clone() for each in torch.split(vector, -(-n // 150))]
        return lambda: _triton.project_list_(rows, pieces, None, scales)
    block = vector.expand(4, -1).contiguous() if use.name.endswith("s") else vector
    return lambda: _triton.project_(rows, block, None, scales)


def agrees(use: Use, device: torch.device) -> bool:
    """Whether the GPU can run the pass ``use`` with the present shapes, and gives right numbers."""
    dtype, vectors = DTYPES[use.stored], torch.float64 if use.work == 8 else torch.float32
    n = 1025 if use.name.endswith("short") else SHORT + 1
    try:
        if use.name == "list":
            agreement.project_list(9, n, dtype, device)
        elif use.name.endswith("s"):
            agreement.project(9, n, dtype, device, count=4, vectors=vectors)
        else:
            agreement.project(9, n, dtype, device, vectors=vectors)
    except (AssertionError, OutOfResources):
        return False
    return True


def tune(
    device: torch.device,
    uses: Iterable[Use],
    time: Timer = seconds,
    tiles: Callable[[Use], Sequence[Tile]] = candidates,
) -> tuple[Shapes, list[str]]:
    """The fastest shapes, pass by pass, and a line about each."""
    best, lines = Shapes(), []
    for use in uses:
        run = operation(use, device)
        with using(best):
            least = first = time(run, device)
        for tile in tiles(use):
            attempt = replace(best, tiles={**best.tiles, use: tile})
            with using(attempt):
                found = time(run, device) if agrees(use, device) else float("inf")
            if found < BETTER * least:
                best, least = attempt, found
        name = f"{use.name}, {use.stored} bytes, work in {8 * use.work} bits"
        lines.append(f"{name:38} {tuple(best.tiles[use])}: {least / first:.2f} of the time before")
    return best, lines


def _uses() -> list[Use]:
    """Those of float64 are left out unless rows are: hardly anyone waits for them."""
    return [use for use in Shapes().tiles if use.work == (8 if use.stored == 8 else 4)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write; returns the exit code."""
    parser = argparse.ArgumentParser(prog="curvlab_kernels.audit.tune", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, default=Path("shapes.json"))
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no CUDA device is present: nothing can be measured, and nothing was written")
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    best, lines = tune(device, _uses(), partial(seconds, repeats=50))
    for line in lines:
        print(line)
    save(options.out, architecture(device), best)
    print(f"{options.out}: take it with curvlab_kernels.use_shapes({str(options.out)!r})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
