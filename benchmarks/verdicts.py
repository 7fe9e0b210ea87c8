"""Promises against measurements: met, missed, or not measured here."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.measure import Row, format_table, processor_of
from benchmarks.targets import AT_MOST, TARGETS, Figure, Target

MET, PARTLY, MISSED, ABSENT = "met", "met where measured", "missed", "not measured here"
TIMED = ("time", "speed", "step", "set-up", "CPU time", "norm time", "outside", "overhead")
Key = tuple[str, str, str, str, str]


@dataclass(frozen=True, slots=True)
class Verdict:
    """A target, what was measured (the worst of its points) and what that means.

    Attributes:
        measured: None if no point was.
        at: The ``x`` of the worst point.
        points: How many of the target's points were measured.
        processor: Of the row that decided.
        note: Why nothing was measured, where the rows tell.
        commit: The revision that was measured.
        single: Whether it is one timed sample, without a spread.
    """

    target: Target
    measured: float | None
    at: str
    points: int
    verdict: str
    processor: str
    note: str = ""
    commit: str = ""
    single: bool = False


def single(entry: Row) -> bool:
    """Whether a row is one sample of something that varies; counts have one sample and do not."""
    return entry.samples == 1 and entry.metric.startswith(TIMED)


def judge(rows: Iterable[Row], targets: Sequence[Target] = TARGETS) -> list[Verdict]:
    """One verdict per target. Where rows say the same thing twice, the later one counts."""
    table = {key(entry): entry for entry in rows}
    return [_judge_one(target, table) for target in targets]


def _judge_one(target: Target, table: Mapping[Key, Row]) -> Verdict:
    found: list[tuple[float, float | str, Row]] = []
    for x in target.figure.x:
        own = _look_up(target.figure, x, table)
        if own is None:
            continue
        value = own.p50
        if target.per is not None:
            other = replace(target.figure, contender=target.per)
            beside = _look_up(other, x, table)
            if beside is None:
                continue
            value = beside.p50 / value if target.inverse else value / beside.p50
        found.append((value, x, own))
    if not found:
        return Verdict(target, None, "", 0, ABSENT, "", _why(target, table))
    upper = target.sense == AT_MOST
    # NaN is the worst of all: it must not slip through a comparison
    value, x, decides = max(
        found,
        key=lambda one: math.inf if math.isnan(one[0]) else (one[0] if upper else -one[0]),
    )
    good = value <= target.limit if upper else value >= target.limit
    whole = len(found) == len(target.figure.x)
    verdict = (MET if whole else PARTLY) if good else MISSED
    return Verdict(
        target, value, str(x), len(found), verdict, processor_of(decides),
        commit=decides.commit, single=single(decides),
    )  # fmt: skip


def _why(target: Target, table: Mapping[Key, Row]) -> str:
    """Why there is no time: a rival that was wrong has errors in the rows instead."""
    if target.per is not None:
        for entry in table.values():
            wrong = entry.metric in ("residual", "error in float64")
            same = entry.subject == target.figure.subject and entry.x in target.figure.x
            if wrong and same and entry.contender == target.per:
                return f"the other is wrong: {entry.metric} {number(entry.p50)}"
    return ""


def _look_up(figure: Figure, x: float | str, table: Mapping[Key, Row]) -> Row | None:
    return table.get((figure.subject, figure.contender, figure.metric, figure.unit, str(x)))


def key(entry: Row) -> Key:
    """Two rows with one key measure the same thing."""
    return entry.subject, entry.contender, entry.metric, entry.unit, str(entry.x)


def number(value: float) -> str:
    """A figure as it is shown: three digits, powers of ten only where they help."""
    if value == 0.0 or 0.01 <= abs(value) < 1e5:
        return f"{value:.3g}"
    return f"{value:.1e}"


def cells(verdict: Verdict) -> list[str]:
    """What is promised, the limit, what was measured, the verdict."""
    target = verdict.target
    measured = verdict.note or "-" if verdict.measured is None else number(verdict.measured)
    measured += " (one sample)" if verdict.single else ""
    if len(target.figure.x) > 1 and verdict.measured is not None:
        measured += f" (worst of {verdict.points}: {verdict.at})"
    word = verdict.verdict
    if word == PARTLY:
        word = f"{MET} at {verdict.points} of {len(target.figure.x)} points"
    return [target.what, f"{target.sense} {number(target.limit)} {target.unit}", measured, word]


def table(verdicts: Sequence[Verdict]) -> str:
    """The printed table and how it ends in one line."""
    lines = [cells(verdict) for verdict in verdicts]
    return "\n".join(
        [format_table(["target", "limit", "measured", "verdict"], lines), "", summary(verdicts)]
    )


def summary(verdicts: Sequence[Verdict]) -> str:
    """How many of each."""
    count = {
        word: sum(verdict.verdict == word for verdict in verdicts)
        for word in (MET, PARTLY, MISSED, ABSENT)
    }
    return f"{len(verdicts)} targets: " + ", ".join(f"{n} {word}" for word, n in count.items() if n)
