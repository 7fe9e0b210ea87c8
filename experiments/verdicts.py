"""Claims and what results say to them: ``agree``, ``disagree``, ``undecided`` or ``not tested``.

A claim is a sentence of the paper, quoted with its place, or a check of our own; the two are never
counted together. Rules that keep a verdict honest:

* A claim of an order is taken seed by seed. It is ``undecided`` when the mean difference is no
  larger than its standard deviation over the seeds, and with a single seed.
* A claim about forgetting is ``not tested`` where a learner in it learned no more of a task than
  the network knew that was left as it was after the first (:func:`unlearned`): such a learner has
  nothing to forget.
* Where the paper leaves a choice and the choices disagree, the claim is ``undecided``.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

VERDICTS = ("agree", "disagree", "undecided", "not tested")
LEARNED = 0.1  # of what a frozen network has left to learn of a task, at least


@dataclass(frozen=True, slots=True)
class Quote:
    """A statement of the paper.

    Args:
        place: Section, caption or table.
        words: As the paper has them, what is ours in brackets; for a figure printed bold, what it
            says.
        about: The network, learner or rate of which it is judged here, where it has several.
    """

    place: str
    words: str
    about: str = ""

    def __str__(self) -> str:
        return f"“{self.words}” ({self.place})" + (f": {self.about}" if self.about else "")


@dataclass(frozen=True, slots=True)
class Claim:
    """What the results say to a statement.

    Args:
        says: The paper's statement, or a check of our own in our words.
        verdict: One of ``VERDICTS``.
        measured: The figures behind it.
        reading: How the statement was read, and what would decide it.
    """

    says: Quote | str
    verdict: str
    measured: str
    reading: str = ""

    @property
    def ours(self) -> bool:
        return isinstance(self.says, str)

    def __str__(self) -> str:
        reading = f" [{self.reading}]" if self.reading else ""
        return f"  {self.verdict:<10} {self.says} ({self.measured}){reading}"


Values = Mapping[int, float]  # by seed


def holds(
    says: Quote | str,
    values: Sequence[float],
    test: Callable[..., bool],
    *,
    reading: str = "",
    guard: str = "",
) -> Claim:
    """Judge ``test(*values)``; a missing (NaN) value or a ``guard`` makes it ``not tested``."""
    measured = ", ".join(map(brief, values))
    if guard or not values or any(math.isnan(value) for value in values):
        return Claim(says, "not tested", guard or measured or "nothing measured", reading)
    return Claim(says, "agree" if test(*values) else "disagree", measured, reading)


def ordered(
    says: Quote | str,
    pairs: Sequence[tuple[Values, Values]],
    *,
    reading: str = "",
    guard: str = "",
) -> Claim:
    """The claim that in every pair the first is below the second, seed by seed.

    Args:
        says: The claim.
        pairs: Each of two quantities by seed; seeds that one of them lacks are left out.
        reading: As in :class:`Claim`.
        guard: Why the order would say nothing, if it would.
    """
    rows = [_differences(lower, higher) for lower, higher in pairs]
    seeds = set.intersection(*(set(row) for row in rows)) if rows else set()
    shown = "; ".join(
        _compared(_mean(lower, row), _mean(higher, row)) if row else "none"
        for (lower, higher), row in zip(pairs, rows, strict=True)
    )
    if guard or not seeds:
        return Claim(says, "not tested", guard or shown or "nothing measured", reading)
    agreeing = sum(all(row[seed] > 0.0 for row in rows) for seed in seeds)
    measured = f"{shown}; the order claimed in {agreeing} of {len(seeds)} seeds"
    return Claim(says, _together([_side(list(row.values())) for row in rows]), measured, reading)


def depends(says: Quote | str, readings: Mapping[str, Claim], reading: str = "") -> Claim:
    """One claim under several readings: their verdict if they share it, else ``undecided``."""
    found = {claim.verdict for claim in readings.values()}
    verdict = found.pop() if len(found) == 1 else "undecided"
    measured = "; ".join(f"{name}: {c.verdict}, {c.measured}" for name, c in readings.items())
    return Claim(says, verdict, measured, reading)


def untested(says: Quote | str, why: str, reading: str = "") -> Claim:
    return Claim(says, "not tested", why, reading)


def unlearned(name: str, runs: Sequence[Mapping[str, Any]]) -> str:
    """Why forgetting of ``runs`` (one per seed) would mean nothing; empty if it means something.

    Args:
        name: Of the learner.
        runs: Each with ``accuracy``, rows ``t`` of accuracies on tasks ``o <= t``, and ``frozen``,
            the accuracy on every task of the network as it was after the first.
    """
    if not runs:
        return f"{name} was not run"
    if any("frozen" not in run for run in runs):
        return f"{name}: a frozen network was not measured beside it"
    tasks = range(1, len(runs[0]["accuracy"]))
    learned = [statistics.fmean(run["accuracy"][t][t] for run in runs) for t in tasks]
    frozen = [statistics.fmean(run["frozen"][t] for run in runs) for t in tasks]
    short = [
        f"task {t + 1}: {a:.2f} against {f:.2f}"
        for t, a, f in zip(tasks, learned, frozen, strict=True)
        if a - f < LEARNED * (1.0 - f)
    ]
    return f"{name} learned little more than a frozen network ({'; '.join(short)})" if (
        short
    ) else ""  # fmt: skip


def first_reason(*reasons: str) -> str:
    """The first that is one."""
    return next(filter(None, reasons), "")


def _differences(lower: Values, higher: Values) -> dict[int, float]:
    return {
        seed: higher[seed] - lower[seed]
        for seed in lower
        if seed in higher and not math.isnan(higher[seed] - lower[seed])
    }


def _mean(values: Values, seeds: Mapping[int, float]) -> float:
    return statistics.fmean(values[seed] for seed in seeds)


def _compared(low: float, high: float) -> str:
    return f"{brief(low)} {'<' if low < high else '≥'} {brief(high)}"


def _side(differences: Sequence[float]) -> str:
    """Whether positive, negative or within their spread."""
    mean = statistics.fmean(differences)
    if len(differences) < 2 or abs(mean) <= statistics.stdev(differences):
        return "undecided"
    return "agree" if mean > 0.0 else "disagree"


def _together(sides: Sequence[str]) -> str:
    for verdict in ("disagree", "undecided"):
        if verdict in sides:
            return verdict
    return "agree"


def brief(value: float) -> str:
    """A number for a sentence: three digits."""
    if math.isnan(value):
        return "none"
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"
