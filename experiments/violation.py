"""How far updates violate the null-forgetting constraint (tab:VOC).

VNC(t) = D_t' (1/t sum of past Hessians) D_t, signed: Hessians are indefinite in practice. That is
the definition; the published numbers have 1/(t-1), as the column beside them here. For OGD it
matters on which samples the Hessians are taken, which the paper does not say: on those whose
gradients it stores (own) or on others (independent, as for all other learners).
"""

import statistics
from collections.abc import Callable, Sequence

from experiments.curvature import expansion
from experiments.experiment import BySeed, Experiment, rounded
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
)
from experiments.shelf import Shelf
from experiments.tables import Metrics, Table
from experiments.verdicts import Claim, Quote, Values, depends, ordered, unlearned, untested

SAMPLES = (("violation", "hessian"), ("violation on own", "ogd"))
LOWER = {
    (learner, rate): Quote("Appendix C", "GPM and OGD [consistently] achieve lower degrees of "
                           "violation of the null-forgetting constraint", f"{learner}, {words}")
    for learner in ("GPM", "OGD") for rate, words in ((HIGH, "high rate"), (LOW, "low rate"))
}  # fmt: skip
BOLD = {
    LOW: Quote("tab:VOC, bold", "0.0001, OGD's, is the lowest at 1e-5"),
    HIGH: Quote("tab:VOC, bold", "0.14, GPM's, is the lowest at 1e-2"),
}

LEARNERS = ("GPM", "OGD", "SGD", "SGD-dagger")  # the paper's table has the first three


def run(config: Comparison, seeds: Sequence[int], shelf: Shelf) -> dict[int, Metrics]:
    found: dict[int, Metrics] = {seed: {rate: {} for rate in RATES} for seed in seeds}
    for rate in RATES:
        for learner in LEARNERS:
            training = config.stream.training(rate, learner)
            for one in shelf.runs(training, seeds_of(learner, rate, seeds, config.few)):
                entry = outcome(one) | {"frozen": frozen(shelf, training, one)}
                for key, drawn_for in SAMPLES[: 2 if learner == "OGD" else 1]:
                    terms = expansion(shelf, training, one.seed, drawn_for)
                    entry[key] = rounded(terms.violation("t")[1:].tolist())
                found[one.seed][rate][learner] = entry
    return found


def tables(config: Comparison, metrics: BySeed) -> list[Table]:
    title = f"violation of the null-forgetting constraint, {config.caption}"
    table = Table("tab:VOC", title, ("VNC", "VNC with 1/t", "E(T)", "a_tt"))
    for rate in RATES:
        for learner in LEARNERS:
            group = [one[rate][learner] for one in metrics.values() if learner in one[rate]]
            for key, where in zip(dict(SAMPLES), ("", ", own samples"), strict=True):
                some = [one for one in group if key in one]
                if not some and where:
                    continue
                row = f"{rate}, {learner}{where}"
                table.add(row, "VNC with 1/t", [value for one in some for value in one[key]])
                table.add(row, "VNC", [value for one in some for value in published(one[key])])
                table.add(row, "E(T)", [float(forgotten(one)[-1]) for one in some])
                table.add(row, "a_tt", [learned(one) for one in some])
    return [table]


def published(violation: Sequence[float]) -> list[float]:
    """VNC(2), VNC(3), ... divided by t - 1 in place of t."""
    return [value * t / (t - 1) for t, value in enumerate(violation, start=2)]


def claims(config: Comparison, metrics: BySeed, tables: list[Table]) -> list[Claim]:
    del config, tables

    def runs(rate: str, learner: str) -> dict[int, Metrics]:
        return {s: one[rate][learner] for s, one in metrics.items() if learner in one[rate]}

    def size(rate: str, learner: str, key: str = "violation") -> Values:
        """Mean over t of what is published; of its magnitude, for the score may be negative."""
        return {s: abs(statistics.fmean(published(one[key])))
                for s, one in runs(rate, learner).items() if key in one}  # fmt: skip

    def guard(rate: str, learner: str) -> str:
        return unlearned(learner, list(runs(rate, learner).values()))

    def both(quote: Quote, rate: str, order: Callable[[Values], list[tuple[Values, Values]]],
             why: str) -> Claim:  # fmt: skip
        """A claim about OGD under both choices of samples."""
        if why:
            return untested(quote, why)
        found = {name: ordered(quote, order(size(rate, "OGD", key)))
                 for name, key in (("independent samples", "violation"),
                                   ("own samples", "violation on own"))}  # fmt: skip
        return depends(quote, found, "the text does not say on which samples OGD is scored")

    def below_sgd(quote: Quote, learner: str, rate: str) -> Claim:
        sgd = size(rate, "SGD")
        if learner == "OGD":
            return both(quote, rate, lambda ogd: [(ogd, sgd)], guard(rate, "OGD"))
        return ordered(quote, [(size(rate, "GPM"), sgd)], guard=guard(rate, "GPM"))

    def lowest(quote: Quote, rate: str) -> Claim:
        gpm, why = size(rate, "GPM"), guard(rate, "GPM") or guard(rate, "OGD")
        return both(quote, rate, lambda ogd: [(ogd, gpm) if rate == LOW else (gpm, ogd)], why)

    return [
        *(below_sgd(quote, learner, rate) for (learner, rate), quote in LOWER.items()),
        *(lowest(quote, rate) for rate, quote in BOLD.items()),
    ]


EXPERIMENT = Experiment(
    label="tab:VOC",
    what="violation of the null-forgetting constraint by GPM, OGD and SGD (and SGD-dagger)",
    data="mnist",
    sizes=COMPARISONS,
    run=run,
    tables=tables,
    claims=claims,
    quotes=(*LOWER.values(), *BOLD.values()),
    trainings=lambda config: config.stream.trainings(LEARNERS, config.few),
    cost=COMPARISON_COST,
)
