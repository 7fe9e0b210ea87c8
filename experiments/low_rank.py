"""Forgetting predicted from r eigenpairs of each Hessian (tab:RNC100TAYLOR, tab:RNC100EQ3).

The Hessian itself costs one product per pair of tasks, so the exact prediction stands beside: row
``r = inf``. The paper has Split CIFAR-100; the smaller sizes here take Split CIFAR-10, and say so.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from curvlab.eigen import lanczos
from curvlab.learners.seeds import derived_seed
from curvlab.metrics import (
    Expansion,
    LowRank,
    average_forgetting,
    current_accuracy,
    distances,
    expand,
    loss_forgetting,
    old_pairs,
)
from curvlab.training import Run
from experiments import cifar10
from experiments.cifar import RESNET_10, RESNET_100
from experiments.experiment import BySeed, Experiment, rounded
from experiments.shelf import Shelf, Training
from experiments.tables import Metrics, Table
from experiments.verdicts import Claim, Quote, Values, holds, ordered

QUALITY = {
    name: Quote("Appendix C", "Overall, the forgetting approximation quality increases with the "
                "rank", name)
    for name in ("taylor", "recursion")
}  # fmt: skip
HELD = 0.8  # of d'Hd: where the smallest rank holds more, larger ones cannot show anything


@dataclass(frozen=True)
class Config:
    training: Training
    ranks: tuple[int, ...] = (10, 20, 30, 40)
    tol: float = 1e-2  # of the eigenpairs: the paper's power iteration is no closer


DEMO = Config(cifar10.DEMO.networks[0].training)
FEW = Config(RESNET_10.training)  # the paper's network on a stream whose images are at hand
SCALED = Config(cifar10.SCALED.networks[0].training)
FULL = Config(RESNET_100.training)

TAYLOR = ("first", "second", "taylor")


def run(config: Config, seeds: Sequence[int], shelf: Shelf) -> dict[int, Metrics]:
    found = shelf.runs(config.training, seeds)
    return {one.seed: rounded(_predictions(config, one, shelf)) for one in found}


def _predictions(config: Config, run: Run, shelf: Shelf) -> Metrics:
    """Absolute errors over the pairs o < t, and of the recursion over t, by rank."""
    forgotten = loss_forgetting(run.test_loss)
    measured = average_forgetting(forgotten, "t-1")
    errors: dict[str, Metrics] = {}
    found = expansions(config, run, shelf)
    exact = old_pairs(found["r = inf"].second_order())
    for name, one in found.items():
        terms = zip(TAYLOR, (one.first_order(), one.second_order(), one.taylor()), strict=True)
        errors[name] = {
            term: old_pairs((guess - forgotten).abs()).tolist() for term, guess in terms
        }
        guess = one.recursion(forgotten, "t-1")
        errors[name]["recursion"] = (guess - measured)[1:].abs().tolist()
        errors[name]["held"] = float(old_pairs(one.second_order()).sum() / exact.sum())
    return {
        "errors": errors,
        "E_o": old_pairs(forgotten).tolist(),
        "E": measured[1:].tolist(),
        "distance": old_pairs(distances(run.snapshots)).tolist(),
        "a_tt": current_accuracy(run.test_accuracy).tolist(),
        "parameters": run.initial.numel(),
    }


def expansions(config: Config, run: Run, shelf: Shelf) -> dict[str, Expansion]:
    """One per rank, and the exact one. Each Hessian is decomposed once, for the largest rank."""
    operators = [shelf.hessian(config.training, run, o) for o in range(len(run.tasks) - 1)]
    gradients = [one.gradient() for one in operators]
    pairs = [
        lanczos(one, max(config.ranks), tol=config.tol, seed=derived_seed(run.seed, "rank", o),
                progress=False)
        for o, one in enumerate(operators)
    ]  # fmt: skip
    found = {
        f"r = {r}": expand(
            run.snapshots, gradients, [LowRank(p.values[:r], p.vectors[:r]) for p in pairs]
        )
        for r in config.ranks
    }
    return found | {"r = inf": expand(run.snapshots, gradients, operators)}


def tables(config: Config, metrics: BySeed) -> list[Table]:
    where = "Split CIFAR-100" if config.training.stream == "split_cifar100" else (
        "Split CIFAR-10, where the paper has CIFAR-100"
    )  # fmt: skip
    where = f"ResNet of {next(iter(metrics.values()))['parameters']:,} parameters on {where}"
    taylor = Table(
        "tab:RNC100TAYLOR", f"error of the predicted E_o(t), {where}",
        (*TAYLOR, "E_o", "distance", "a_tt"),
    )  # fmt: skip
    recursion = Table(
        "tab:RNC100EQ3", f"error of the recursion for E(t), {where}", ("error", "E", "a_tt")
    )
    every = list(metrics.values())
    for row in every[0]["errors"]:
        for term in TAYLOR:
            taylor.add(row, term, [x for one in every for x in one["errors"][row][term]])
        for column in ("E_o", "distance", "a_tt"):
            taylor.add(row, column, [x for one in every for x in one[column]])
        recursion.add(row, "error", [x for one in every for x in one["errors"][row]["recursion"]])
        for column in ("E", "a_tt"):
            recursion.add(row, column, [x for one in every for x in one[column]])
    return [taylor, recursion]


def claims(config: Config, metrics: BySeed, tables: list[Table]) -> list[Claim]:
    taylor, _ = tables
    first, last = (f"r = {r}" for r in (config.ranks[0], config.ranks[-1]))
    held = [one["errors"][first].get("held", math.nan) for one in metrics.values()]
    share = statistics.fmean(held)
    if math.isnan(share):
        guard = f"it was not measured what {first} holds of d'Hd"
    else:
        guard = f"{first} already holds {share:.0%} of d'Hd" if share > HELD else ""

    def error(row: str, term: str) -> Values:
        return {s: statistics.fmean(one["errors"][row][term]) for s, one in metrics.items()}

    exact = [taylor.mean(row, "taylor") for row in (last, "r = inf")]
    return [
        *(ordered(quote, [(error(last, term), error(first, term))], guard=guard,
                  reading=f"the error at {last} against {first}")
          for term, quote in QUALITY.items()),
        holds(f"the exact Hessian predicts no worse than {last}", exact,
              lambda low, full: full <= low),
    ]  # fmt: skip


EXPERIMENT = Experiment(
    label="tab:RNC100TAYLOR",
    also=("tab:RNC100EQ3",),
    what="Forgetting of a ResNet predicted from Hessians of rank r, and from exact ones",
    data="cifar100",
    sizes={"demo": DEMO, "scaled": SCALED, "few": FEW, "full": FULL},
    run=run,
    tables=tables,
    claims=claims,
    quotes=tuple(QUALITY.values()),
    trainings=lambda config: [config.training],
    cost={
        "demo": "1 min",
        "scaled": "10 min on 2 cores",
        "few": "about 30 min a seed on one core, after Table:forg-C10-extended",
        "full": "about 2 h on one A100, --device cuda (estimate, not run)",
    },
)
