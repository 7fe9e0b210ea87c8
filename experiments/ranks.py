"""How many directions the past takes: ranks of the mean Hessian of past tasks (fig:HRRM).

Three counts for every t, of the mean of H_1 .. H_t along SGD's run:

* rank: magnitudes above n x eps(float32) x the largest, what ``torch.linalg.matrix_rank`` counts
  on a float32 Hessian;
* effective rank at a relative threshold lambda (times the largest magnitude);
* effective rank at an absolute lambda.

The largest eigenvalues are enumerated by Lanczos, none missing; what lies below them is estimated
by stochastic quadrature outside their span, with its error. The paper does not say which of the
last two its lambda is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from curvlab.metrics import counts_above, spectrum_above
from curvlab.operators import average
from experiments.experiment import BySeed, Experiment, rounded
from experiments.figures import STYLES, curve, legend, panels, save
from experiments.paper import HIGH
from experiments.rotated import DEMO, FULL, RAW, SMALL, Rotated, learned, outcome
from experiments.shelf import Shelf
from experiments.tables import Metrics, Table
from experiments.verdicts import Claim, Quote, Values, brief, holds, ordered

GROWTH = Quote("Section 3", "an empirical assessment of the growth of [the rank of the average "
               "Hessian] as a function of t")  # fmt: skip

RELATIVE = (0.1, 0.01, 0.005)
ABSOLUTE = (1.0, 0.1, 0.01, 0.001)


@dataclass(frozen=True)
class Config:
    stream: Rotated = FULL
    rate: str = HIGH  # the paper's caption says SGD and no more
    most: int = 224  # eigenvalues enumerated; the rest is estimated
    probes: int = 4
    steps: int = 80  # of each probe


def run(config: Config, seeds: Sequence[int], shelf: Shelf) -> dict[int, Metrics]:
    training = config.stream.training(config.rate)
    found: dict[int, Metrics] = {}
    for one in shelf.runs(training, seeds):
        tasks = range(len(one.tasks))
        hessians = [shelf.hessian(training, one, task) for task in tasks]
        n = hessians[0].n
        rounding = n * float(torch.finfo(torch.float32).eps)
        rows = []
        for t in tasks:
            mean = average(hessians[: t + 1])
            outer = spectrum_above(mean, rounding, relative=True, most=min(config.most, n))
            largest = abs(float(outer.values[0]))
            cuts = {"rank": rounding * largest}
            cuts |= {f"> {cut:g} max": cut * largest for cut in RELATIVE}
            cuts |= {f"> {cut:g}": cut for cut in ABSOLUTE}
            counts = counts_above(
                mean, outer, list(cuts.values()), probes=config.probes, steps=config.steps,
                seed=one.seed,
            )  # fmt: skip
            rows.append({
                "largest": largest,
                "complete": outer.complete,
                "counts": {name: c.value for name, c in zip(cuts, counts, strict=True)},
                "errors": {name: c.error for name, c in zip(cuts, counts, strict=True)},
            })  # fmt: skip
        found[one.seed] = outcome(one) | rounded({"n": n, "past": rows})
    return found


def tables(config: Config, metrics: BySeed) -> list[Table]:
    cuts = [f"> {cut:g} max" for cut in RELATIVE] + [f"> {cut:g}" for cut in ABSOLUTE]
    title = f"ranks of the mean Hessian of t tasks, SGD, {config.rate}, {config.stream.caption}"
    table = Table("fig:HRRM", title, ("rank", *cuts, "largest", "a_tt"))
    for t in range(min((len(one["past"]) for one in metrics.values()), default=0)):
        rows, row = [one["past"][t] for one in metrics.values()], f"t = {t + 1}"
        table.add(row, "largest", [one["largest"] for one in rows])
        for name in ("rank", *cuts):
            table.add(row, name, [one["counts"][name] for one in rows])
        table.add(row, "a_tt", [learned(one) for one in metrics.values()])
    return [table]


def claims(config: Config, metrics: BySeed, tables: list[Table]) -> list[Claim]:
    del config
    [table] = tables
    rows = list(table.rows)
    n = max((one["n"] for one in metrics.values()), default=float("nan"))
    past = [row for one in metrics.values() for row in one["past"]]
    complete = [float(row["complete"]) for row in past]
    blur = [row["errors"]["rank"] / max(row["counts"]["rank"], 1) for row in past]

    def count(name: str, t: int, sign: float) -> Values:
        """Shifted by its own standard error: growth is claimed beyond both error bars."""
        found = {seed: one["past"][t] for seed, one in metrics.items()}
        return {s: row["counts"][name] + sign * row["errors"][name] for s, row in found.items()}

    def grows(name: str) -> str:
        up = ordered("", [(count(name, 0, 1.0), count(name, -1, -1.0))]).verdict
        down = ordered("", [(count(name, -1, 1.0), count(name, 0, -1.0))]).verdict
        return "agree" if up == "agree" else "disagree" if down == "agree" else "undecided"

    cuts = ("rank", *(f"> {cut:g} max" for cut in RELATIVE), *(f"> {cut:g}" for cut in ABSOLUTE))
    judged = {name: grows(name) for name in cuts}
    ends = {name: [brief(table.mean(row, name)) for row in (rows[0], rows[-1])] for name in cuts}
    one = next(iter(judged.values())) if len(set(judged.values())) == 1 else "undecided"
    return [
        Claim(GROWTH, one,
              "; ".join(f"{name}: {first} to {last}, {judged[name]}"
                        for name, (first, last) in ends.items()),
              "from the first task to the last, beyond the error bars of the counts; the text "
              "names no threshold"),
        holds("the rank stays far below P (a tenth)", [table.mean(rows[-1], "rank"), n],
              lambda rank, n: rank < n / 10),
        holds("of the largest eigenvalues none was missed", [min(complete)],
              lambda least: least == 1.0),
        holds("the rank is known to a tenth", [max(blur)], lambda most: most < 0.1),
    ]  # fmt: skip


def figure(config: Config, metrics: BySeed, path: Path) -> None:
    del config
    plots, axes = panels(2)
    count = min(len(one["past"]) for one in metrics.values())
    steps = range(1, count + 1)

    def draw(axis: Any, style: int, label: str, name: str) -> None:
        curves = [[row["counts"][name] for row in one["past"][:count]] for one in metrics.values()]
        curve(axis, steps, curves, style, label)
        # the band is the spread over seeds; bars are the standard errors of the counts themselves
        every = torch.tensor([[row["errors"][name] for row in one["past"][:count]]
                              for one in metrics.values()])  # fmt: skip
        bars = (every**2).mean(0).sqrt().tolist()
        middle = torch.tensor(curves, dtype=torch.float64).mean(0).tolist()
        colour = STYLES[style % len(STYLES)]["color"]
        axis.errorbar(steps, middle, yerr=bars, fmt="none", capsize=3, color=colour)

    draw(axes[0], 0, "rank (float32)", "rank")
    for style, cut in enumerate(RELATIVE, start=1):
        draw(axes[0], style, f"λ = {cut:g} max", f"> {cut:g} max")
    for style, cut in enumerate(ABSOLUTE):
        draw(axes[1], style, f"λ = {cut:g}", f"> {cut:g}")
    for axis, title in zip(axes, ("relative thresholds", "absolute thresholds"), strict=True):
        axis.set(title=title, xlabel="tasks t", ylabel="eigenvalues above λ", xticks=list(steps))
        axis.set_yscale("log")
        legend(axis)
    save(plots, path)


EXPERIMENT = Experiment(
    label="fig:HRRM",
    what="rank and effective rank of the mean Hessian of past tasks, SGD",
    data="mnist",
    sizes={
        "demo": Config(DEMO, most=128, probes=2, steps=30),
        "scaled": Config(SMALL),
        "raw": Config(RAW),
        "full": Config(),
    },
    run=run,
    tables=tables,
    claims=claims,
    quotes=(GROWTH,),
    figure=figure,
    trainings=lambda config: [config.stream.training(config.rate)],
    cost={"demo": "1 min", "scaled": "5 min", "raw": "40 min", "full": "40 min"},
    version="2",
)
