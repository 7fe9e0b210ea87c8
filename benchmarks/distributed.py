"""Bytes, messages and memory per rank: ``python -m benchmarks.distributed --ranks 1 2 4 8``.

For every number of ranks, on this machine (gloo): a product of a Hessian whose samples are divided
over the ranks, with whole vectors and with shards; a step of a sharded Lanczos; a projection and a
step of SGD-dagger with a sharded memory; and the peak memory of a rank that finds eigenvectors of a
million elements. Counted: collective calls, and bytes that a rank sends. The share of its time that
a rank spends in collectives says little here: with more ranks than processor cores they wait for
each other.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from benchmarks.growth import exponent
from benchmarks.measure import Row, peak_memory, row, write_rows
from curvlab.basis import Basis
from curvlab.bench.timing import Quantiles
from curvlab.distributed import DataParallel, Group, Sharded, Shards, launch
from curvlab.eigen import Room, lanczos
from curvlab.nets import mlp
from curvlab.operators import FromFunction, Hessian
from curvlab.tasks import rotated_mnist

PEAK = "Lanczos, a million elements"
# A rank of R holds 1/R of the vectors; a ring sends 2 (R - 1) / R of a whole vector, a gather and a
# scatter of shards (R - 1) / R each: constant for many ranks, still growing at few.
EXPECTED = {PEAK: -1.0, "product, whole vectors": 0.0, "product, shards": 0.0}
LIMIT = 1e-6  # relative, in float32, of a product over ranks against one rank


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.distributed", description=__doc__)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--rows", type=int, default=40, help="of the memory")
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    rows: list[Row] = []
    truth: list[float] | None = None
    print(f"{'ranks':>5} {'what':<28} {'messages':>8} {'bytes sent':>12} {'communication':>13}")
    for ranks in options.ranks:
        arguments = (options.samples, options.rows, options.repeat)
        found = launch(measure, ranks, *arguments, timeout=600.0)
        first = found[0]
        truth = first["product"] if truth is None else truth
        error = _distance(first["product"], truth)
        if error > LIMIT:
            print(f"{ranks} ranks: the product differs by {error:.1e}", file=sys.stderr)
            return 1
        for name, cost in first["costs"].items():
            share = max(one["costs"][name]["share"] for one in found)
            sent = f"{cost['messages']:>8g} {cost['bytes']:>12,.0f} {share:>12.0%}"
            print(f"{ranks:>5} {name:<28} {sent}")
            rows += [_row(name, metric, ranks, cost[metric]) for metric in ("messages", "bytes")]
            rows.append(_row(name, "share of communication", ranks, share))
        held = max(one["peak"] for one in found)
        print(f"{ranks:>5} {PEAK:<28} {'':>8} {held:>12,.0f} bytes held")
        rows.append(_row(PEAK, "bytes", ranks, held))
    rows += exponents(rows)
    if options.out is not None:
        write_rows(options.out, rows)
    return 0


def exponents(rows: Sequence[Row]) -> list[Row]:
    """How bytes grow with ranks, from two ranks on: one rank sends nothing."""
    found: list[Row] = []
    for name, expected in EXPECTED.items():
        points = {float(e.x): e.p50 for e in rows if (e.contender, e.metric) == (name, "bytes")}
        sizes = [ranks for ranks in sorted(points) if name == PEAK or ranks > 1]
        if len(sizes) < 2 or not all(points[ranks] > 0 for ranks in sizes):
            continue
        slope, error = exponent(sizes, [points[ranks] for ranks in sizes])
        error = 0.0 if len(sizes) == 2 else error  # two points: a line through both
        spread = Quantiles(slope - error, slope, slope + error, len(sizes))
        metric = "exponent of bytes against ranks"
        found.append(row("distributed", name, metric, "fitted", "all", spread, threads=1))
        found.append(row("distributed", name, metric, "expected", "all", expected, threads=1))
        print(f"{name}: exponent of bytes against ranks {slope:.2f}, by count {expected:g}")
    return found


def measure(group: Group, samples: int, size: int, repeat: int) -> dict[str, Any]:
    """What one rank sends, waits for and holds."""
    model, task = mlp(seed=0), rotated_mnist()[0]
    mine = slice(group.rank * samples // group.size, (group.rank + 1) * samples // group.size)
    part = Hessian(
        model,
        cross_entropy,
        (task.train.inputs[:samples][mine], task.train.targets[:samples][mine]),
    )
    parallel = DataParallel(part)
    sharded = Sharded(parallel)
    space = sharded.vector_space
    vector = torch.randn(parallel.n, generator=torch.Generator().manual_seed(0))
    shard = space.take(vector)
    memory = Basis(Shards(parallel.n), size)
    vectors = torch.randn(size, parallel.n, generator=torch.Generator().manual_seed(1))
    memory.extend(space.take(vectors))
    parameters = [p.detach().clone() for p in model.parameters()]
    gradients = [torch.ones_like(p) for p in parameters]

    def step() -> None:
        memory.lanczos_step_(shard.clone(), 0.5)

    def train() -> None:
        mean = space.sum_list(gradients, 1.0 / group.size)
        memory.sgd_step_(parameters, [mean], [], 1e-4)

    calls: dict[str, Callable[[], object]] = {
        "product, whole vectors": lambda: parallel @ vector,
        "product, shards": lambda: sharded @ shard,
        f"Lanczos step, {size} rows": step,
        f"projection, {size} rows": lambda: memory.project_out_(shard.clone()),
        f"SGD-dagger step, {size} rows": train,
    }
    costs = {name: _cost(group, call, repeat) for name, call in calls.items()}
    before = group.traffic.messages, group.traffic.bytes
    pairs = lanczos(sharded, 10, tol=1e-2)
    costs["Lanczos, 10 pairs, per product"] = {
        "messages": round((group.traffic.messages - before[0]) / pairs.matvecs, 2),
        "bytes": (group.traffic.bytes - before[1]) / pairs.matvecs,
        "share": 0.0,
    }
    return {"product": (parallel @ vector).tolist(), "costs": costs, "peak": _peak(group)}


def _peak(group: Group) -> int:
    """Bytes that a rank takes to find and keep vectors of a million elements, measured."""
    spectrum = torch.cat([10.0 * 0.7 ** torch.arange(64.0), torch.zeros((1 << 20) - 64)])
    operator = Sharded(FromFunction(lambda vector: spectrum * vector, 1 << 20), group)

    def find() -> None:
        memory = Basis(Shards(operator.n), 32)
        pairs = lanczos(operator, 8, tol=1e-2, room=Room(rows=66), certify=False)
        memory.extend(pairs.vectors)

    find()  # libraries take their buffers
    return peak_memory(find, threads=1)


def _cost(group: Group, call: Callable[[], object], repeat: int) -> dict[str, float]:
    call()
    waited = Stopwatch(group)
    messages, sent, began = group.traffic.messages, group.traffic.bytes, time.perf_counter()
    for _ in range(repeat):
        call()
    seconds = time.perf_counter() - began
    return {
        "messages": (group.traffic.messages - messages) / repeat,
        "bytes": (group.traffic.bytes - sent) / repeat,
        "share": waited.stop() / seconds,
    }


class Stopwatch:
    """Seconds that a group spends in collectives, waiting for other ranks included."""

    def __init__(self, group: Group) -> None:
        self.seconds = 0.0
        self._group, self._guarded = group, group._guarded
        group._guarded = self._timed  # type: ignore[method-assign]

    def _timed(self, what: str, number: int, wait: Callable[[], object]) -> None:
        began = time.perf_counter()
        self._guarded(what, number, wait)
        self.seconds += time.perf_counter() - began

    def stop(self) -> float:
        self._group._guarded = self._guarded  # type: ignore[method-assign]
        return self.seconds


def _distance(product: list[float], truth: list[float]) -> float:
    a, b = torch.tensor(product, dtype=torch.float64), torch.tensor(truth, dtype=torch.float64)
    return float((a - b).norm() / b.norm())


def _row(name: str, metric: str, ranks: int, value: float) -> Row:
    units = {"messages": "calls", "bytes": "bytes"}
    return row("distributed", name, metric, units.get(metric, "share"), ranks, value, threads=1)


if __name__ == "__main__":
    sys.exit(main())
