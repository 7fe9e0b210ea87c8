"""No whole vector hides in sharded code: what a rank holds at its worst falls with the ranks.

The operator here takes and gives shards without ever making a vector whole, so what is seen is what
solvers and estimates hold themselves. On four ranks each may hold as many shards as one rank alone
holds vectors, and one more: a tensor as long as a whole vector is four shards.
"""

import functools
import traceback
from typing import Any

import pytest
import torch
from curvlab_kernels.block import CONVERTED
from torch import Tensor

from curvlab.basis import Basis
from curvlab.distributed import Shards, launch
from curvlab.eigen import (
    block_lanczos,
    diagonal,
    lanczos,
    power_iteration,
    solve,
    spectral_density,
    spectral_energy,
    trace,
)
from curvlab.eigen.room import Room
from curvlab.operators.products.sizing import LiveBytes
from curvlab.probe import probe

pytestmark = pytest.mark.distributed

N, RANKS = 1 << 21, 4


class Diagonal:
    """``A = diag(values)`` on shards; nothing is sent for a product."""

    dtype, device, n = torch.float32, torch.device("cpu"), N

    def __init__(self) -> None:
        self.vector_space = Shards(N)
        space = self.vector_space
        place = torch.arange(space.start, space.start + space.width)
        # 24 large values and a far smaller rest: solvers need few rows
        self.values = torch.where(place < 24, 2.0 * 0.7**place, 1e-4 * (place % 7))
        self.values[space.held :] = 0.0

    def __matmul__(self, vectors: Tensor) -> Tensor:
        return self.values * vectors


def rows(group: Any) -> Tensor:
    """Two orthonormal vectors in shards."""
    space = Shards(N)
    made = torch.zeros(2, space.width)
    if group.rank == 0:
        made[0, 3], made[1, 5] = 1.0, 1.0
    return made


FEW = Room(rows=24)
CALLS: dict[str, Any] = {
    "probe": lambda op, _: probe(op),
    "lanczos": lambda op, _: lanczos(op, 3, tol=1e-2, room=FEW, progress=False),
    "block": lambda op, _: block_lanczos(op, 3, block=2, tol=1e-2, room=FEW, progress=False),
    "power": lambda op, _: power_iteration(op, 2, tol=1e-1, progress=False),
    "energy": lambda op, _: spectral_energy(op, 0.5, tol=1e-1, progress=False),
    "density": lambda op, _: spectral_density(op, probes=1, steps=8, progress=False),
    "trace": lambda op, _: trace(op, probes=4),
    "diagonal": lambda op, _: diagonal(op, probes=4),
    "solve": lambda op, _: solve(op, op.values.clone(), damping=1.0, tol=1e-2),
    "basis": lambda _, group: Basis(Shards(N), 4).extend(rows(group)),
    "signs": lambda op, _: op.vector_space.signs(torch.Generator(), 2),
    "normal": lambda op, _: op.vector_space.normal(torch.Generator(), torch.float32),
}


def measure(group: Any) -> dict[str, float] | str:
    """The peak of each, in shards."""
    try:
        operator = Diagonal()
        shard = operator.values.nbytes
        found = {}
        for name, run in CALLS.items():
            with LiveBytes() as live:
                run(operator, group)
            found[name] = live.peak / shard
        return found
    except Exception:
        return traceback.format_exc()


@functools.cache
def everyone(ranks: int) -> Any:
    return launch(measure, ranks, timeout=240, patience=60)


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_a_rank_holds_as_many_shards_as_one_alone_holds_vectors(name: str) -> None:
    (alone,) = everyone(1)
    # Long vectors are taken to float64 in pieces of one size, a larger part of a shard: 1.5 of
    # them here. A whole vector in the place of a shard would be 3 more.
    pieces = 8 * CONVERTED * (RANKS - 1) / (4 * N)
    for rank, found in enumerate(everyone(RANKS)):
        assert not isinstance(found, str), f"rank {rank}: {found}"
        assert found[name] <= alone[name] + 1.0 + pieces, (
            f"rank {rank} holds {found[name]:.1f} shards"
        )
