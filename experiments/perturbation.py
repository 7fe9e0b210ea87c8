"""The perturbation score s(r) around task solutions (fig:PTBRM, fig:PTBRN, fig:PTBvit).

How much more a step of length r along a leading Hessian eigenvector changes the loss than one along
a random direction. The paper's curves fall to 1 outside a ball. In cross-entropy they need not
(:mod:`curvlab.metrics.perturbation` says why), in the error rate they do: both are measured.

:func:`experiment` makes the experiment for any network; this module's own is the MLP's.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from curvlab.eigen import lanczos
from curvlab.learners.seeds import derived_generator, derived_seed
from curvlab.metrics import Perturbation, error_at, loss_at, perturb
from curvlab.training import Run
from experiments.experiment import BySeed, Experiment, rounded
from experiments.figures import curve, panels, save
from experiments.paper import HIGH
from experiments.rotated import DEMO, FULL, SMALL, learned, lower_rows
from experiments.shelf import Shelf, Training
from experiments.tables import Claim, Metrics, Table, claim

MEASURES = {"loss": "loss", "error": "error rate"}


@dataclass(frozen=True)
class Config:
    training: Training
    tasks: int | None = None  # look at the first so many solutions; None at all
    directions: int = 10  # leading eigenvectors
    random: int = 10
    per_decade: int = 4  # radii from 1e-3 to 1e4
    tol: float = 1e-3  # relative residual of the eigenvectors

    @property
    def radii(self) -> tuple[float, ...]:
        return tuple(10 ** (-3 + i / self.per_decade) for i in range(7 * self.per_decade + 1))


def run(config: Config, seeds: Sequence[int], shelf: Shelf) -> dict[int, Metrics]:
    found: dict[int, Metrics] = {}
    for one in shelf.runs(config.training, seeds):
        tasks = range(len(one.tasks) if config.tasks is None else config.tasks)
        found[one.seed] = {
            "accuracy": lower_rows(one.test_accuracy),
            "parameters": one.initial.numel(),
            "radii": rounded(list(config.radii)),
            "tasks": [_around(config, shelf, one, task) for task in tasks],
        }
    return found


def _around(config: Config, shelf: Shelf, one: Run, task: int) -> Metrics:
    """Scores around one solution, on the samples of its Hessian."""
    seed = derived_seed(one.seed, "perturbation", task)
    operator = shelf.hessian(config.training, one, task)
    pairs = lanczos(operator, config.directions, tol=config.tol, seed=seed, progress=False)
    pairs.require_converged()
    samples = shelf.hessian_samples(config.training, one.seed, task)
    model = shelf.model_after(config.training, one, task)
    found: Metrics = {"values": rounded(pairs.values.tolist())}
    for name, measure in (("loss", loss_at), ("error", error_at)):
        moved = perturb(
            measure(model, samples), one.snapshots[task].to(shelf.device), pairs.vectors,
            generator=derived_generator(one.seed, "perturbation", task), random=config.random,
            radii=config.radii,
        )  # fmt: skip
        found[name] = _scores(moved)
    return found


def _scores(moved: Perturbation) -> Metrics:
    """s(r) of the first eigenvector and the mean over all; ``reach`` is where the mean is 1."""
    score = moved.score()
    mean = Perturbation(
        moved.radii, moved.changes.mean(0, keepdim=True), moved.random_changes, moved.loss
    )
    return {
        "first": _finite(score[0]),
        "mean": _finite(mean.score()[0]),
        "reach": _number(float(mean.reach()[0])),
    }


def _finite(values: Tensor) -> list[float | None]:
    return [_number(value) for value in values.tolist()]


def _number(value: float) -> float | None:
    """JSON has neither NaN nor infinity."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


def floats(values: Sequence[float | None]) -> list[float]:
    """Numbers of a results file, NaN where there is none."""
    return [math.nan if value is None else value for value in values]


def tables(config: Config, metrics: BySeed) -> list[Table]:
    one = config.training
    top = f"mean over the top {config.directions} eigenvectors"
    title = f"perturbation score, {one.network} on {one.stream}; {top}"
    columns = tuple(
        f"{what}, {name}" for name in MEASURES.values()
        for what in ("s(0.001)", "s(0.1)", "largest s", "s(10000)", "reach")
    ) + ("a_tt",)  # fmt: skip
    label = "fig:PTBRM" if one.network.startswith("mlp") else f"perturbation, {one.network}"
    table = Table(label, title, columns)
    count = min((len(found["tasks"]) for found in metrics.values()), default=0)
    for task in range(count):
        row = f"task {task + 1}"
        for key, name in MEASURES.items():
            group = [(found["radii"], found["tasks"][task][key]) for found in metrics.values()]
            curves = [floats(scores["mean"]) for _, scores in group]
            near = [_at(radii, floats(scores["mean"]), 0.1) for radii, scores in group]
            _add(table, row, f"s(0.001), {name}", [scores[0] for scores in curves])
            _add(table, row, f"s(0.1), {name}", near)
            _add(table, row, f"largest s, {name}", [_largest(scores) for scores in curves])
            _add(table, row, f"s(10000), {name}", [scores[-1] for scores in curves])
            _add(table, row, f"reach, {name}", floats([scores["reach"] for _, scores in group]))
        table.add(row, "a_tt", [learned(found) for found in metrics.values()])
    return [table]


def _add(table: Table, row: str, column: str, samples: list[float]) -> None:
    """Only what was measured: not a radius below rounding, nor a curve that never falls to 1."""
    table.add(row, column, [value for value in samples if not math.isnan(value)])


def _at(radii: Sequence[float], scores: Sequence[float], radius: float) -> float:
    nearest = min(range(len(radii)), key=lambda i: abs(math.log(radii[i] / radius)))
    return scores[nearest]


def _largest(scores: Sequence[float]) -> float:
    return max((value for value in scores if not math.isnan(value)), default=math.nan)


def claims(config: Config, metrics: BySeed) -> list[Claim]:
    [table] = tables(config, metrics)
    found: list[Claim] = []
    for key, name in MEASURES.items():
        largest = [table.mean(row, f"largest s, {name}") for row in table.rows]
        far = [table.mean(row, f"s(10000), {name}") for row in table.rows]
        reaches = [
            floats([task[key]["reach"]])[0] for one in metrics.values() for task in one["tasks"]
        ]
        least, most = min(reaches, default=math.nan), max(reaches, default=math.nan)
        never, ours = sum(map(math.isnan, reaches)), key != "loss"  # the paper's is of the loss
        found += [
            claim(f"{name}: inside a ball eigenvectors are steeper than random directions (s > 2)",
                  largest, lambda *s: min(s) > 2.0, ours=ours),
            claim(f"{name}: outside of it the score is 1 (between 0.5 and 2 at r = 10,000)", far,
                  lambda *s: all(0.5 < value < 2.0 for value in s), ours=ours),
            Claim(f"{name}: the ball's size is stable over tasks and seeds", "disagree",
                  f"{never} of {len(reaches)} curves never come down to 1", ours)
            if never
            else claim(f"{name}: the ball's size is stable over tasks and seeds (within a factor "
                       "10)", [least, most], lambda low, high: high <= 10 * low, ours=ours),
        ]  # fmt: skip
    return found


def figure(config: Config, metrics: BySeed, path: Path) -> None:
    del config
    tasks = min(len(one["tasks"]) for one in metrics.values())
    plots, axes = panels(2, width=5.2)
    radii = next(iter(metrics.values()))["radii"]
    for axis, (key, name) in zip(axes, MEASURES.items(), strict=True):
        reaches = []
        for task in range(tasks):
            curves = [floats(one["tasks"][task][key]["mean"]) for one in metrics.values()]
            reaches += [floats([one["tasks"][task][key]["reach"]])[0] for one in metrics.values()]
            curve(axis, radii, curves, task, f"task {task + 1}")
        known = torch.tensor([reach for reach in reaches if not math.isnan(reach)])
        if len(known):
            axis.axvline(float(known.median()), color="#009E73", ls="--", lw=1)  # where s is 1
        axis.axhline(1.0, color="#8c510a", ls="--", lw=1)
        axis.set(xscale="log", yscale="log", xlabel="radius r", ylabel="s(r)")
        axis.set(title=f"change of the {name}")
    if tasks <= 7:
        axes[0].legend(fontsize=8)
    save(plots, path)


def experiment(
    label: str, what: str, data: str, sizes: Mapping[str, Config], cost: Mapping[str, str]
) -> Experiment:
    """The perturbation experiment of one network and stream."""
    return Experiment(
        label=label,
        what=what,
        data=data,
        sizes=sizes,
        run=run,
        tables=tables,
        claims=claims,
        figure=figure,
        trainings=lambda config: [config.training],
        cost=cost,
    )


EXPERIMENT = experiment(
    "fig:PTBRM",
    "perturbation score around the solutions of Rotated-MNIST, MLP, in loss and in error rate",
    "mnist",
    {
        "demo": Config(DEMO.training(HIGH), tasks=2, per_decade=2),
        "scaled": Config(SMALL.training(HIGH)),
        "full": Config(FULL.training(HIGH)),
    },
    {"demo": "20 s", "scaled": "2 min", "full": "4 min"},
)
