"""Flows: solvers and estimates, with the number of times that the host waits."""

import tempfile
from pathlib import Path

import torch

import curvlab
from curvlab import metrics
from tests import pretend_device
from tests.pretend_device.flow import HERE, both, error, flow, operator, random


def counted(run):
    """Waits of the host beyond those of the operator's own checks, which come once."""
    made = operator(HERE.device)
    made @ random(made.n).to(HERE.device)
    _ = made.certificate
    pretend_device.reset()
    result = run(made)
    return result, sum(pretend_device.waits().values())


STRIDE = 4  # products between two looks of a solve on a GPU


@flow
def lanczos():
    options = {"k": 3, "tol": 1e-3, "dense": False}
    expected = curvlab.lanczos(operator(torch.device("cpu")), **options)
    pairs, waits = counted(lambda made: curvlab.lanczos(made, **options))
    assert bool(pairs.converged.all())
    return {
        "error": error(pairs.values, expected.values),
        "waits": waits,
        # a look every few products, the first after k; a read for the start vector, one for that of
        # the chain that certifies, one for the result
        "most": -(-pairs.matvecs // STRIDE) + 3,
    }


@flow
def lanczos_without_certification():
    options = {"k": 3, "tol": 1e-3, "dense": False, "certify": False}
    expected = curvlab.lanczos(operator(torch.device("cpu")), **options)
    pairs, waits = counted(lambda made: curvlab.lanczos(made, **options))
    return {
        "error": error(pairs.values, expected.values),
        "waits": waits,
        "most": -(-pairs.matvecs // STRIDE) + 3,
    }


@flow
def lanczos_by_the_dense_path():
    def run(device):
        return [curvlab.lanczos(operator(device), k=3, tol=1e-3).values]

    return both(run)


@flow
def lanczos_deflated():
    def run(device):
        made = operator(device)
        basis = curvlab.Basis(made.n, 6, device=device)
        basis.extend(curvlab.lanczos(made, k=2, tol=1e-4, dense=False).vectors)
        return [curvlab.lanczos(made, k=2, tol=1e-3, dense=False, deflate=basis).values]

    return both(run)


@flow
def lanczos_with_a_checkpoint():
    def run(device):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "solve.safetensors"
            options = {"k": 2, "tol": 1e-3, "dense": False}
            pairs = curvlab.lanczos(operator(device), **options, checkpoint=path)
            again = curvlab.lanczos(operator(device), **options, v0=pairs.vectors)
        return [pairs.values, again.values]

    return both(run)


@flow
def block_lanczos():
    def run(device):
        return [curvlab.block_lanczos(operator(device), k=3, tol=1e-3).values]

    return both(run)


@flow
def density():
    options = {"probes": 2, "steps": 10, "seed": 0}
    expected = curvlab.spectral_density(operator(torch.device("cpu")), **options)
    result, waits = counted(lambda made: curvlab.spectral_density(made, **options))

    def moments(density):  # what a quadrature is for; single nodes move with rounding
        return torch.stack([(density.weights * density.nodes**power).sum(1) for power in (1, 2, 3)])

    # for each random vector two looks: after eight steps and after the last two
    return {"error": error(moments(result), moments(expected)), "waits": waits, "most": 4}


@flow
def power_iteration():
    options = {"k": 1, "tol": 1e-2, "seed": 0}
    expected = curvlab.power_iteration(operator(torch.device("cpu")), **options)
    pairs, waits = counted(lambda made: curvlab.power_iteration(made, **options))
    return {
        "error": error(pairs.values, expected.values),
        "waits": waits,
        "most": pairs.matvecs + 3,  # the result: pairs mixed, their residuals, their orthogonality
    }


@flow
def energy():
    def run(device):
        found = curvlab.spectral_energy(operator(device), 0.3)
        return [torch.tensor([float(found.k)]), found.pairs.values]

    return both(run)


@flow
def trace_and_diagonal():
    def run(device):
        made = operator(device)
        return [curvlab.trace(made, seed=0).value, *curvlab.diagonal(made, seed=0)]

    return both(run)


@flow
def tracker_and_metrics():
    def run(device):
        made = operator(device)
        tracker = curvlab.SpectrumTracker(k=2, tol=1e-5)
        pairs = tracker.update(made, step=0)
        shares = metrics.block_diagonality(made, torch.arange(made.n) % 3)
        return [pairs.values, shares.value, curvlab.to_scipy(made) @ random(made.n).numpy()]

    return both(run)
