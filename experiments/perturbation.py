"""The perturbation score s(r) around task solutions (fig:PTBRM, fig:PTBRN, fig:PTBvit).

How much more a step of length r along a leading Hessian eigenvector changes the loss than one along
a random direction. The paper's curves fall to 1 outside a ball. Cross-entropy without a bound need
not do that (:mod:`curvlab.metrics.perturbation` says why), so the paper's figure is read with a
bounded loss; the unbounded one and the error rate stand beside it.

:func:`experiment` makes the experiment for any network; this module's own is the MLP's.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from curvlab.eigen import lanczos
from curvlab.learners.seeds import derived_generator, derived_seed
from curvlab.metrics import Perturbation, measures_at, perturb
from curvlab.training import Run
from experiments.experiment import BySeed, Experiment, rounded
from experiments.figures import curve, legend, panels, save
from experiments.paper import HIGH
from experiments.rotated import DEMO, FULL, RAW, SMALL, learned, lower_rows
from experiments.shelf import Shelf, Training
from experiments.tables import Metrics, Table
from experiments.verdicts import Claim, Quote, holds, untested

MEASURES = {"bounded": "bounded loss", "loss": "loss", "error": "error rate"}

STEEPER = Quote("Section 5.1", "in a ball around the optimum the loss Hessian principal "
                "eigenvectors represent the directions where the loss landscape is "
                "steeper")  # fmt: skip
OUTSIDE = Quote("caption of fig:PTBRM", "the value of r for which the score converges to 1")
STABLE = Quote("Section 5.1", "across tasks and random seeds the size of the ball B appears to be "
               "stable")  # fmt: skip
READING = "with a bounded loss (probabilities of at least 1e-7), mean over the eigenvectors"


@dataclass(frozen=True)
class Config:
    training: Training
    tasks: int | None = None  # how many solutions to look at, from the first on; None is all
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
    samples = shelf.hessian_samples(config.training, one.seed, task)
    model = shelf.model_after(config.training, one, task)
    moved = perturb(
        measures_at(model, samples), one.snapshots[task].to(shelf.device), pairs.vectors,
        generator=derived_generator(one.seed, "perturbation", task), random=config.random,
        radii=config.radii,
    )  # fmt: skip
    return {
        "values": rounded(pairs.values.tolist()),
        "residual": rounded(float((pairs.residuals / pairs.values.abs()).max())),
        **{name: _scores(one) for name, one in moved.items()},
    }


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
        for what in ("s(0.1)", "s(10000)", "reach")
    ) + ("a_tt",)  # fmt: skip
    label = "fig:PTBRM" if one.network.startswith("mlp") else f"perturbation, {one.network}"
    table = Table(label, title, columns)
    count = min((len(found["tasks"]) for found in metrics.values()), default=0)
    for task in range(count):
        row = f"task {task + 1}"
        for key, name in MEASURES.items():
            group = [(found["radii"], found["tasks"][task][key]) for found in metrics.values()
                     if key in found["tasks"][task]]  # fmt: skip
            curves = [floats(scores["mean"]) for _, scores in group]
            near = [_at(radii, floats(scores["mean"]), 0.1) for radii, scores in group]
            _add(table, row, f"s(0.1), {name}", near)
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


def claims(
    quotes: Sequence[Quote], config: Config, metrics: BySeed, tables: list[Table]
) -> list[Claim]:
    """Verdicts on those of the paper's statements that are made of this network."""
    del config, tables
    curves = [(one["radii"], task["bounded"]) for one in metrics.values() for task in one["tasks"]
              if "bounded" in task]  # fmt: skip
    if not curves:
        return [untested(quote, "measured without a bound on the loss only") for quote in quotes]
    near = [_at(radii, floats(scores["mean"]), 0.1) for radii, scores in curves]
    far = [floats(scores["mean"])[-1] for _, scores in curves]
    reaches = floats([scores["reach"] for _, scores in curves])

    def span(quote: Quote, values: Sequence[float], test: Callable[[float, float], bool],
             what: str) -> Claim:  # fmt: skip
        """A test of the least and the largest, so of all curves."""
        ends = [math.nan] if any(map(math.isnan, values)) else [min(values), max(values)]
        found = holds(quote, ends, test, reading=f"{what}, {READING}")
        return replace(found, measured=f"{found.measured} over {len(values)} curves")

    def steeper(quote: Quote) -> Claim:
        return span(quote, near, lambda least, _: least > 2.0, "s(0.1) above 2")

    def outside(quote: Quote) -> Claim:
        return span(quote, far, lambda low, high: low > 0.5 and high < 2.0,
                    "s(10,000) between 0.5 and 2")  # fmt: skip

    def stable(quote: Quote) -> Claim:
        return span(quote, reaches, lambda low, high: high <= 10.0 * low,
                    "the radius from which s is 1, within a factor 10")  # fmt: skip

    def extends(quote: Quote) -> Claim:
        parts = [steeper(quote), outside(quote)]
        verdict = "agree" if all(one.verdict == "agree" for one in parts) else (
            "not tested" if any(one.verdict == "not tested" for one in parts) else "disagree"
        )  # fmt: skip
        return Claim(quote, verdict, "; ".join(one.measured for one in parts),
                     "; ".join(one.reading for one in parts))  # fmt: skip

    judges = {STEEPER: steeper, OUTSIDE: outside, STABLE: stable}
    return [judges.get(quote, extends)(quote) for quote in quotes]


def figure(config: Config, metrics: BySeed, path: Path) -> None:
    del config
    tasks = min(len(one["tasks"]) for one in metrics.values())
    plots, axes = panels(len(MEASURES), width=4.4)
    radii = next(iter(metrics.values()))["radii"]
    for axis, (key, name) in zip(axes, MEASURES.items(), strict=True):
        reaches = []
        for task in range(tasks):
            found = [one["tasks"][task] for one in metrics.values() if key in one["tasks"][task]]
            reaches += floats([one[key]["reach"] for one in found])
            if found:
                curves = [floats(one[key]["mean"]) for one in found]
                curve(axis, radii, curves, task, f"task {task + 1}")
        known = torch.tensor([reach for reach in reaches if not math.isnan(reach)])
        if len(known):
            axis.axvline(float(known.median()), color="#009E73", ls="--", lw=1)  # where s is 1
        axis.axhline(1.0, color="#8c510a", ls="--", lw=1)
        axis.set(xscale="log", yscale="log", xlabel="radius r", ylabel="s(r)")
        axis.set(title=f"change of the {name}")
    legend(axes[-1])
    save(plots, path)


def experiment(
    label: str,
    what: str,
    data: str,
    sizes: Mapping[str, Config],
    cost: Mapping[str, str],
    quotes: tuple[Quote, ...],
) -> Experiment:
    """The perturbation experiment of one network and stream."""
    return Experiment(
        label=label,
        what=what,
        data=data,
        sizes=sizes,
        run=run,
        tables=tables,
        claims=lambda config, metrics, tables: claims(quotes, config, metrics, tables),
        figure=figure,
        quotes=quotes,
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
        "raw": Config(RAW.training(HIGH)),
        "full": Config(FULL.training(HIGH)),
    },
    {"demo": "20 s", "scaled": "2 min", "raw": "4 min", "full": "4 min"},
    (STEEPER, OUTSIDE, STABLE),
)
