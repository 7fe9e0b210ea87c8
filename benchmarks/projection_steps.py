"""The projection in its place: its share of a training step, and the paper's largest memory."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from curvlab_kernels import _cpu
from curvlab_kernels.formats import BLOCK, padded
from torch import nn

from benchmarks.measure import read
from benchmarks.networks import SIZES, Network
from curvlab.basis import Basis, MappedFile, Tier
from curvlab.bench.timing import Quantiles, interleave, per_round_ratio, quantiles
from curvlab.rows.sizes import row_bytes

BATCH = 10  # the paper's
SMALL = ((1_000, 10), (18_010, 20))  # where a call costs as much as what it computes


def step_overheads(
    size: str, directions: int, rounds: int, threads: int, shortest: float
) -> Iterator[tuple[str, str, Quantiles]]:
    """Network, dtype, and the time of a projection in units of one training step without it."""
    for make in SIZES[size].values():
        network = make(0)
        for dtype in (torch.float32, torch.int8):
            basis = random_basis(network.n, directions, dtype, None)
            parameters = list(network.model.parameters())
            step = _step(network, parameters)
            step()
            seconds = interleave(
                {
                    "step": step,
                    "projection": partial(basis.project_gradients_, parameters),
                },
                rounds=rounds,
                threads=threads,
                shortest=shortest,
            )
            share = per_round_ratio(seconds["projection"], seconds["step"])
            yield network.shown, str(dtype).removeprefix("torch."), quantiles(share)


def around_the_kernel(
    rounds: int, threads: int, shortest: float
) -> Iterator[tuple[str, Quantiles]]:
    """Size, and the time of ``Basis.project_out_`` in units of the bare kernel on the same rows."""
    for n, m in SMALL:
        # Orthonormal: against others a vector projected again and again ends in denormal numbers.
        generator = torch.Generator().manual_seed(2)
        basis, vector = Basis(n, m), torch.randn(n, generator=generator)
        basis.extend(torch.randn(m, n, generator=generator))
        assert basis.whole is not None
        rows = basis.whole[0]
        seconds = interleave(
            {
                "kernel": partial(_cpu.project_, rows, vector),
                "basis": partial(basis.project_out_, vector),
            },
            rounds=4 * rounds,
            warmup=10,
            threads=threads,
            shortest=shortest,
            clock=time.process_time,  # one thread at these sizes, and no neighbours
        )
        yield f"P={n} m={m}", quantiles(per_round_ratio(seconds["basis"], seconds["kernel"]))


def _step(network: Network, parameters: list[nn.Parameter]) -> Callable[[], None]:
    optimiser = torch.optim.SGD(parameters, lr=1e-6, momentum=0.9)
    inputs, targets = network.inputs[:BATCH], network.targets[:BATCH]

    def step() -> None:
        optimiser.zero_grad(set_to_none=False)
        network.loss(network.model(inputs), targets).backward()
        optimiser.step()

    return step


def vit_projection(
    n: int, m: int, rounds: int, threads: int, folder: Path
) -> Iterator[tuple[str, int, list[float], list[float]]]:
    """The ViT's memory at 20 tasks of 20 vectors, int8.

    Yields:
        Where it is kept, bytes moved, seconds per projection, and the bytes per second of one
        reading in the same rounds.
    """
    stream = torch.ones(1 << 26 if n > 1_000_000 else 1 << 22)
    for where, tier in (("in memory", None), ("in a file", MappedFile(folder))):
        basis = random_basis(n, m, torch.int8, tier)
        vector = torch.randn(n, generator=torch.Generator().manual_seed(2))
        seconds = interleave(
            {
                "projection": partial(basis.project_out_, vector),
                "stream": lambda: read(stream),
            },
            rounds=rounds,
            threads=threads,
        )
        moved = 2 * m * row_bytes(n, torch.int8) + 12 * n
        bandwidth = [stream.nbytes / one for one in seconds["stream"]]
        yield where, moved, seconds["projection"], bandwidth


def random_basis(n: int, m: int, dtype: torch.dtype, tier: Tier | None) -> Basis:
    """Rows of random numbers of norm one: what they hold does not change the time."""
    basis = Basis(n, m, dtype=dtype, tier=tier)
    generator = torch.Generator().manual_seed(0)
    ld = padded(n)
    for i in range(m):
        codes = torch.zeros(1, ld, dtype=dtype)
        if dtype == torch.int8:
            codes[0, :n] = torch.randint(-127, 128, (n,), generator=generator, dtype=torch.int8)
            basis.store.write_rows(i, codes)
            scales = torch.full((1, -(-ld // BLOCK)), 1.0 / (73.3 * n**0.5))
            basis.store.write_scales(i, scales)
        else:
            codes[0, :n] = torch.randn(n, generator=generator) / n**0.5
            basis.store.write_rows(i, codes)
    # Nearly orthonormal (to n^-1/2), which is enough to time: the Gram matrix is taken as I.
    basis.restore(torch.eye(m, dtype=torch.float64))
    return basis
