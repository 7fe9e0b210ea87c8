"""The long computations that are struck: each runs in a folder, goes on there, and can be compared.

A subject's ``run(folder)`` computes with a file to resume from and leaves its result in the folder;
``same(folder, other)`` says whether two folders hold the same result, bit for bit. What a subject
says when it is interrupted is checked where it is said: a partial result must be right as well.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from curvlab.eigen import (
    Checkpoint,
    Density,
    Eigenpairs,
    Interrupted,
    Room,
    lanczos,
    spectral_density as density,
)
from curvlab.learners import SGDDagger
from curvlab.nets import mlp
from curvlab.operators import Dense
from curvlab.training import Run, Schedule, learn
from experiments import __main__ as command, registry
from experiments.shelf import Shelf
from experiments.store import Store
from tests.small_problems import make_tasks
from tests.test_experiments_command import TINY, experiment

SEEDS = (11, 13)


class WrongError(Exception):
    """A subject came to a result that is not right."""


@dataclass(frozen=True)
class Subject:
    """One long computation; see the file's header."""

    run: Callable[[Path], None]
    same: Callable[[Path, Path], bool]


def matrix(n: int = 160) -> torch.Tensor:
    """Symmetric, with a copy that makes a solve look twice."""
    generator = torch.Generator().manual_seed(0)
    values = torch.cat([torch.tensor([6.0, 4.0, 4.0, -3.0]), torch.linspace(-1, 1, n - 4)])
    q = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64)).Q
    return (q * values.double()) @ q.T


def eigensolve(folder: Path) -> None:
    """By a search that restarts: a matrix of this size would be decomposed whole."""
    keeping = Checkpoint(folder / "state", every=3)
    options = {"tol": 1e-8, "room": Room(rows=22), "dense": False}
    try:
        pairs = lanczos(Dense(matrix()), 4, checkpoint=keeping, **options)
    except Interrupted as stop:
        if stop.partial is not None:
            v = stop.partial.vectors
            true = (v @ matrix() - stop.partial.values[:, None] * v).norm(dim=1)
            if not bool((true <= stop.partial.residuals + 1e-12).all()):
                raise WrongError(f"claimed {stop.partial.residuals}, true {true}") from stop
        raise
    pairs.save(folder / "result.safetensors")


def same_pairs(folder: Path, other: Path) -> bool:
    first, second = (Eigenpairs.load(one / "result.safetensors") for one in (folder, other))
    names = ("values", "vectors", "residuals", "converged")
    return all(torch.equal(getattr(first, n), getattr(second, n)) for n in names)


@cache
def undisturbed() -> Density:
    return density(Dense(matrix()), probes=8, steps=12)


def spectral_density(folder: Path) -> None:
    try:
        found = density(Dense(matrix()), probes=8, steps=12, checkpoint=folder / "state")
    except Interrupted as stop:
        if stop.partial is not None:
            done, truth = len(stop.partial.nodes), undisturbed()
            right = torch.equal(stop.partial.nodes, truth.nodes[:done])
            if not right or not torch.equal(stop.partial.weights, truth.weights[:done]):
                raise WrongError(f"the first {done} vectors' densities are others") from stop
        raise
    found.save(folder / "result.safetensors")


def same_density(folder: Path, other: Path) -> bool:
    first, second = (Density.load(one / "result.safetensors") for one in (folder, other))
    return torch.equal(first.nodes, second.nodes) and torch.equal(first.weights, second.weights)


def training(folder: Path) -> None:
    runs = learn(
        lambda seed: mlp((6, 8, 3), seed=seed), make_tasks(2, train=36),
        SGDDagger(k=3, samples=20), Schedule(0.1, 0.05, epochs=2), seeds=SEEDS, momentum=0.5,
        checkpoint=folder / "state", checkpoint_every=6,
    )  # fmt: skip
    for run in runs:
        run.save(folder / f"result-{run.seed}.safetensors")


def same_runs(folder: Path, other: Path) -> bool:
    pairs = [
        [Run.load(one / f"result-{seed}.safetensors") for one in (folder, other)] for seed in SEEDS
    ]
    return all(
        torch.equal(first.snapshots, second.snapshots)
        and torch.equal(first.test_loss.nan_to_num(), second.test_loss.nan_to_num())
        for first, second in pairs
    )


MEASURED = experiment("tab:struck", replace(TINY, train=200, epochs="6"))


def experiments(folder: Path) -> None:
    known = registry.EXPERIMENTS
    registry.EXPERIMENTS = command.EXPERIMENTS = (MEASURED,)
    try:
        code = command.main(["run", "tab:struck", "--seeds", "1", "--results", str(folder)])
    finally:
        registry.EXPERIMENTS = command.EXPERIMENTS = known
    if code == 130:
        raise KeyboardInterrupt
    if code:
        raise OSError(f"exit code {code}")  # the command has said why


def same_results(folder: Path, other: Path) -> bool:
    stores = [Store(one) for one in (folder, other)]
    for store in stores:
        store.repair()  # a line that was half written when the process was killed
    lines = [sorted((r.key, str(r.metrics.get("accuracy"))) for r in s.results()) for s in stores]
    training = MEASURED.sizes["demo"].training
    first, second = (Shelf(store).runs(training, [1])[0] for store in stores)
    once = len(set(lines[0])) == len(lines[0])
    return once and lines[0] == lines[1] and torch.equal(first.snapshots, second.snapshots)


SUBJECTS = {
    "eigensolve": Subject(eigensolve, same_pairs),
    "density": Subject(spectral_density, same_density),
    "learn": Subject(training, same_runs),
    "experiments": Subject(experiments, same_results),
}
