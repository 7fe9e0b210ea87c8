"""Estimates and power iteration on vectors in shards: the numbers of one process, to rounding."""

import functools
import tempfile
import traceback
from pathlib import Path

import pytest
import torch

from curvlab.distributed import Sharded, launch
from curvlab.eigen import diagonal, power_iteration, solve, spectral_density, trace
from curvlab.operators import Dense

pytestmark = pytest.mark.distributed

RANKS = [2, pytest.param(4, marks=pytest.mark.slow)]
SIZES = (97, 300)  # the first leaves a rank's shard mostly padding
AT = {"density": 20, "diagonal": 5}  # product or block of them that is stopped


def matrix(n):
    generator = torch.Generator().manual_seed(n)
    q = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64)).Q
    values = 5.0 * 0.8 ** torch.arange(n, dtype=torch.float64)
    values[1::3] *= -1
    return (q * values) @ q.T


def ones(operator):
    """A right-hand side, in shards where the operator's vectors are."""
    whole = torch.ones(operator.n, dtype=torch.float64)
    return operator.vector_space.take(whole) if hasattr(operator, "vector_space") else whole


COMPUTATIONS = {
    "density": lambda operator, **keep: spectral_density(operator, probes=4, steps=9, **keep),
    "trace": lambda operator, **keep: trace(operator, probes=40, **keep),
    "diagonal": lambda operator, **keep: diagonal(operator, probes=40, **keep),
    "power": lambda operator, **keep: power_iteration(operator, 3, tol=1e-4, **keep),
    "solve": lambda operator, **keep: solve(operator, ones(operator), damping=6.0, **keep),
    "power by value": lambda operator, **keep: power_iteration(operator, 3, stop="value", **keep),
}


def numbers(name, result, space=None):
    """What a result says, as one float64 vector; shards are put together."""
    whole = (lambda tensor: tensor) if space is None else space.gather
    if name == "density":
        return torch.cat([result.nodes, result.weights]).flatten()
    if name == "trace":
        return torch.tensor([result.value, result.error], dtype=torch.float64)
    if name == "solve":
        return torch.cat([whole(result.x), torch.tensor([result.residual])])
    if name == "diagonal":
        return torch.cat([whole(part) for part in result])
    return torch.cat([result.values, whole(result.vectors).flatten(), result.residuals])


class Stopping:
    """A sharded operator that every rank stops at the same product."""

    def __init__(self, inner, at):
        self.inner, self.left = inner, at
        self.n, self.dtype, self.device = inner.n, inner.dtype, inner.device
        self.vector_space, self.certificate = inner.vector_space, inner.certificate

    def __matmul__(self, vectors):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return self.inner @ vectors


def compare(group, folder):
    """Distance of every sharded result, and of one that was stopped and resumed, from the whole."""
    found = {}
    for n in SIZES:
        sharded = Sharded(Dense(matrix(n)), group)
        space = sharded.vector_space
        for name, compute in COMPUTATIONS.items():
            wanted = numbers(name, compute(Dense(matrix(n))))
            straight = numbers(name, compute(sharded), space)
            path = Path(folder) / f"{name}{n}"
            stopped = False
            try:
                compute(Stopping(sharded, AT.get(name, 7)), checkpoint=path)
            except KeyboardInterrupt:
                stopped = True
            resumed = numbers(name, compute(sharded, checkpoint=path), space)
            found[name, n] = {
                "whole": float((straight - wanted).norm() / wanted.norm()),
                "stopped": stopped,
                "resumed": torch.equal(resumed, straight),
            }
    return found


def reported(group, folder):
    try:
        return compare(group, folder)
    except Exception:
        return traceback.format_exc()


@functools.cache
def everyone(ranks):
    with tempfile.TemporaryDirectory() as folder:
        task = functools.partial(reported, folder=folder)
        return launch(task, ranks, timeout=120, patience=30)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", COMPUTATIONS)
def test_a_sharded_estimate_is_that_of_whole_vectors(name, n, ranks):
    for rank, found in enumerate(everyone(ranks)):
        assert not isinstance(found, str), f"rank {rank}: {found}"
        # stopped before it has converged, power iteration carries rounding on from step to step
        assert found[name, n]["whole"] <= (1e-8 if name.startswith("power") else 1e-10)
        assert found[name, n]["stopped"]
        assert found[name, n]["resumed"]
