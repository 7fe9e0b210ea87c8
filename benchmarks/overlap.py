"""Does it pay to add up a product in pieces while it is computed? ``python -m benchmarks.overlap``.

Two gloo ranks on this machine, one thread each. In every round each rank multiplies on its own,
then with one sum over the ranks after the product, then with sums that begin during its last
backward pass. Times are in units of the first and, for the last, of the sum after it: medians of
the rounds' ratios, with 20 % and 80 % quantiles of the latter. Two problems: the
vision transformer of 12.5 M parameters, where the sums take the cores that the backward pass wants;
and one of as many parameters whose layers only wait, as a host waits for its GPU, where they are
free. The results of both ways must be the same bits.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.measure import Row, format_table, row, write_rows
from curvlab.bench.timing import per_round_ratio, quantiles
from curvlab.distributed import DataParallel, Group, Sharded, launch
from curvlab.nets import vit_cifar
from curvlab.operators import Curvature, Hessian

LAYERS, ELEMENTS = 12, 1 << 20  # of the problem that waits
Call = Callable[[], Tensor]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overlap", description=__doc__)
    parser.add_argument("--samples", type=int, default=4, help="of the transformer, per rank")
    parser.add_argument("--pause", type=float, default=0.01, help="seconds that a layer waits")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    arguments = (options.samples, options.pause, options.rounds)
    found = launch(measure, 2, *arguments, timeout=900.0)[0]
    lines, rows = [], list[Row]()
    for problem, ways in found.items():
        for way, seconds in ways.items():
            ratio = quantiles(per_round_ratio(seconds, ways["alone"]))
            rows.append(row("overlap", way, "time", "products", problem, ratio, threads=1))
            line = [problem, way, f"{1e3 * quantiles(seconds).p50:.0f}", f"{ratio.p50:.2f}"]
            after = way.replace("sums during", "one sum after")
            if after != way:
                gain = quantiles(per_round_ratio(seconds, ways[after]))
                rows.append(row("overlap", way, "time", "one sum", problem, gain, threads=1))
                line.append(f"{gain.p50:.2f} ({gain.p20:.2f} to {gain.p80:.2f})")
            lines.append([*line, ""][:5])
    print(format_table(["problem", "way", "ms", "x alone", "x one sum after it"], lines))
    if options.out is not None:
        write_rows(options.out, rows)
    return 0


def measure(
    group: Group, samples: int, pause: float, rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Seconds of every way to multiply, on one rank."""
    generator = torch.Generator().manual_seed(group.rank)
    images = torch.randn(samples, 3, 32, 32, generator=generator)
    targets = torch.randint(10, (samples,), generator=generator)
    transformer = Hessian(vit_cifar(10, seed=0), cross_entropy, (images, targets), check=False)
    waiting = Hessian(
        Waiting(pause), _mean_square, (torch.ones(2, 1) + group.rank, torch.zeros(2, 1)),
        engine="retained", check=False,
    )  # fmt: skip
    return {
        "transformer, 12.5 M": _compared(transformer, rounds),
        "layers that wait, 12.6 M": _compared(waiting, rounds),
    }


def _compared(part: Curvature, rounds: int) -> dict[str, list[float]]:
    whole, pieces = DataParallel(part, overlap=None), DataParallel(part)
    if pieces.piece is None:
        raise RuntimeError("nothing to compare: the product is too short to go out in pieces")
    vector = torch.randn(part.n, generator=torch.Generator().manual_seed(9))
    apart, together = Sharded(pieces), Sharded(whole)
    shard = together.vector_space.take(vector)
    ways: dict[str, Call] = {
        "alone": lambda: part @ vector,
        "one sum after it": lambda: whole @ vector,
        "sums during it": lambda: pieces @ vector,
        "shards, one sum after it": lambda: together @ shard,
        "shards, sums during it": lambda: apart @ shard,
    }
    if not torch.equal(whole @ vector, pieces @ vector):
        raise RuntimeError("the sums in pieces gave other bits")
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way, call in ways.items():
            dist.barrier()
            began = time.perf_counter()
            call()
            if number:  # the first round warms up
                seconds[way].append(time.perf_counter() - began)
    return seconds


class Pause(torch.autograd.Function):
    """The identity; every backward pass through it waits, and so does the one through that."""

    @staticmethod
    def forward(context: Any, value: Tensor, seconds: float) -> Tensor:
        context.seconds = seconds
        return value.clone()

    @staticmethod
    def backward(context: Any, slope: Tensor) -> tuple[Tensor, None]:
        time.sleep(context.seconds)
        paused: Tensor = Pause.apply(slope, context.seconds)  # type: ignore[no-untyped-call]
        return paused, None


class Waiting(nn.Module):
    """Layers with many parameters and next to no arithmetic, that wait in the backward pass."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.layers = nn.ParameterList(torch.full((ELEMENTS,), 0.5) for _ in range(LAYERS))

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            paused: Tensor = Pause.apply(inputs, self.seconds)  # type: ignore[no-untyped-call]
            inputs = torch.tanh(paused * layer.square().mean())
        return inputs


def _mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


if __name__ == "__main__":
    sys.exit(main())
