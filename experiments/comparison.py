"""SGD, SGD-dagger, OGD and GPM at two learning rates (fig:comparisonRM)."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from curvlab.metrics import NORMS, accuracy_forgetting, average_accuracy, average_forgetting
from experiments.experiment import BySeed, Experiment
from experiments.figures import curve, legend, panels, save
from experiments.paper import HIGH, LOW
from experiments.rotated import (
    COMPARISON_COST,
    COMPARISONS,
    RATES,
    Comparison,
    forgotten,
    frozen,
    learned,
    outcome,
    seeds_of,
    square,
)
from experiments.shelf import Shelf
from experiments.tables import Metrics, Table
from experiments.verdicts import (
    Claim,
    Quote,
    Values,
    first_reason,
    holds,
    ordered,
    unlearned,
    untested,
)

LEARNERS = ("SGD", "SGD-dagger", "OGD", "GPM")
LIKE = 0.1  # curves are "similar" when at no t they differ by more than this share of SGD's E(T)

SIMILAR = tuple(
    Quote("Section 5.2", "When the learning rate is high, OGD and SGD†, which rely on Assumption "
          "[2], perform similarly to SGD", learner)
    for learner in ("SGD-dagger", "OGD")
)  # fmt: skip
GPM_LOW = tuple(
    Quote("Section 5.2", "we observe low forgetting for GPM in both regimes", rate)
    for rate in ("high rate", "low rate")
)
EQUIVALENT = Quote("Section 5.2", "When the learning rate is low the three methods are equivalent")
LOWER = Quote("caption of fig:comparisonRM", "the levels of forgetting are overall lower in the "
              "low learning rate setting")  # fmt: skip


def run(config: Comparison, seeds: Sequence[int], shelf: Shelf) -> dict[int, Metrics]:
    found: dict[int, Metrics] = {seed: {rate: {} for rate in RATES} for seed in seeds}
    for rate in reversed(RATES):
        for learner in LEARNERS:
            training = config.stream.training(rate, learner)
            for one in shelf.runs(training, seeds_of(learner, rate, seeds, config.few)):
                before = one.notes[-2]  # nothing is added after the last task
                kept = before.get("directions") or before.get("ranks") or 0
                found[one.seed][rate][learner] = outcome(one) | {
                    "kept": kept, "frozen": frozen(shelf, training, one),
                }  # fmt: skip
    return found


def tables(config: Comparison, metrics: BySeed) -> list[Table]:
    columns = ("E(T)", "E(T) with 1/t", "E over pairs", "a(T)", "a_tt", "kept")
    title = f"forgetting in accuracy, {config.caption}"
    table = Table("fig:comparisonRM", title, columns)
    for rate in RATES:
        for learner in LEARNERS:
            group = [one[rate][learner] for one in metrics.values() if learner in one[rate]]
            accuracy = [square(one["accuracy"]) for one in group]
            row = f"{rate}, {learner}"
            for column, norm in zip(("E(T) with 1/t", "E(T)", "E over pairs"), NORMS, strict=True):
                averages = [average_forgetting(accuracy_forgetting(a), norm) for a in accuracy]
                table.add(row, column, [float(average[-1]) for average in averages])
            table.add(row, "a(T)", [float(average_accuracy(a)[-1]) for a in accuracy])
            table.add(row, "a_tt", [learned(one) for one in group])
            table.add(row, "kept", [_total(one["kept"]) for one in group])
    return [table]


def _total(kept: int | list[int]) -> float:
    """Directions in memory; for GPM the ranks of its layers together."""
    return float(sum(kept) if isinstance(kept, list) else kept)


def claims(config: Comparison, metrics: BySeed, tables: list[Table]) -> list[Claim]:
    del config, tables

    def runs(rate: str, learner: str) -> dict[int, Metrics]:
        return {s: one[rate][learner] for s, one in metrics.items() if learner in one[rate]}

    def at_end(rate: str, learner: str) -> Values:
        return {seed: float(forgotten(one)[-1]) for seed, one in runs(rate, learner).items()}

    def guard(rate: str, *learners: str) -> str:
        reasons = [unlearned(name, list(runs(rate, name).values())) for name in learners]
        return first_reason(*reasons)

    def low_for_gpm(quote: Quote, rate: str) -> Claim:
        pairs = [(at_end(rate, "GPM"), at_end(rate, name)) for name in LEARNERS if name != "GPM"]
        return ordered(quote, pairs, guard=guard(rate, "GPM"),
                       reading="E(T) of GPM below that of each of the others")  # fmt: skip

    return [
        *(_alike(quote, runs(HIGH, "SGD"), runs(HIGH, quote.about), guard(HIGH, quote.about))
          for quote in SIMILAR),
        low_for_gpm(GPM_LOW[0], HIGH),
        low_for_gpm(GPM_LOW[1], LOW),
        _equivalent(runs, guard(LOW, *LEARNERS[1:])),
        ordered(LOWER, [(at_end(LOW, name), at_end(HIGH, name)) for name in LEARNERS],
                guard=guard(LOW, *LEARNERS), reading="E(T) of every learner"),
    ]  # fmt: skip


def _alike(
    quote: Quote, plain: Mapping[int, Metrics], other: Mapping[int, Metrics], guard: str
) -> Claim:
    """Whether two curves E(t) agree at every t, to ``LIKE`` or to their spread over seeds.

    On the scale of the figure, so as shares of SGD's last E(t): early ones are nearly 0.
    """
    seeds = [seed for seed in plain if seed in other]
    if guard or len(seeds) < 2:
        return untested(quote, guard or f"{len(seeds)} seeds")
    first, second = (torch.stack([forgotten(one[s])[1:] for s in seeds]) for one in (plain, other))
    scale = first[:, -1].mean().abs()
    apart = ((first - second).mean(0) / scale).tolist()
    noise = ((first - second).std(0) / scale).tolist()
    own = ((first - second).mean(0) / first.mean(0)).tolist()
    far = [abs(share) > max(LIKE, spread) for share, spread in zip(apart, noise, strict=True)]
    of_last, of_each = (", ".join(f"{share:.0%}" for share in some) for some in (apart, own))
    measured = f"below SGD by {of_last} of its E(T), which is {of_each} of its E(t)"
    return Claim(quote, "disagree" if any(far) else "agree", measured,
                 f"alike when at no t they differ by more than {LIKE:.0%} of SGD's E(T) and by "
                 "more than the difference varies over seeds")  # fmt: skip


def _equivalent(runs: Callable[[str, str], Mapping[int, Metrics]], guard: str) -> Claim:
    """Of the three: E(T) within 0.05, and what they learned within 0.05 too."""
    if guard:
        return untested(EQUIVALENT, guard)
    groups = [list(runs(LOW, name).values()) for name in LEARNERS[1:]]
    lost = [statistics.fmean(float(forgotten(one)[-1]) for one in group) for group in groups]
    got = [statistics.fmean(learned(one) for one in group) for group in groups]
    return holds(EQUIVALENT, [*lost, *got],
                 lambda *v: max(v[:3]) - min(v[:3]) < 0.05 and max(v[3:]) - min(v[3:]) < 0.05,
                 reading="E(T) and a_tt of SGD†, OGD, GPM, each within 0.05")  # fmt: skip


def figure(config: Comparison, metrics: BySeed, path: Path) -> None:
    del config
    plots, axes = panels(2)
    for axis, rate in zip(axes, reversed(RATES), strict=True):
        for style, learner in enumerate(LEARNERS):
            group = [one[rate][learner] for one in metrics.values() if learner in one[rate]]
            curves = [forgotten(one).tolist() for one in group]
            if curves:
                steps = range(1, len(curves[0]) + 1)
                curve(axis, steps, curves, style, learner.replace("-dagger", "†"))
        axis.axhline(0.0, color="0.7", lw=0.8)
        axis.set(title=f"{'high' if rate == HIGH else 'low'} learning rate", xlabel="task t")
        axis.set(xticks=list(steps), ylabel="average forgetting E(t), accuracy")
    ends = [end for axis in axes for end in axis.get_ylim()]
    for axis in axes:  # one scale: the rates are to be compared
        axis.set_ylim(min(ends), max(ends))
    legend(axes[-1])
    save(plots, path)


EXPERIMENT = Experiment(
    label="fig:comparisonRM",
    what="average forgetting of SGD, SGD-dagger, OGD and GPM at two learning rates",
    data="mnist",
    sizes=COMPARISONS,
    run=run,
    tables=tables,
    claims=claims,
    quotes=(*SIMILAR, *GPM_LOW, EQUIVALENT, LOWER),
    figure=figure,
    trainings=lambda config: config.stream.trainings(LEARNERS, config.few),
    cost=COMPARISON_COST,
)
