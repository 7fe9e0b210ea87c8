"""What came out of a contest: JSON lines that can be merged, a table, a picture.

A line is one solver on one problem on one machine. Two lines with the same key (problem, k,
tolerance, solver and its version, machine) are two measurements of one thing: the later one counts.
So files can be merged in any order, any number of times. Times are compared only inside a run:
``speed`` is certified lanczos' time over the solver's, from ratios inside the rounds of that run.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import UnionType
from typing import Any, get_origin, get_type_hints

from curvlab.bench.contest import REFERENCE, Contest, Outcome
from curvlab.bench.timing import Quantiles, command, environment, quantiles
from curvlab.storage import write_atomically

FORMAT = "curvlab bench eig 1"
Spread = tuple[float, float, float]  # 20 %, 50 % and 80 % quantiles


@dataclass(frozen=True, slots=True)
class Line:
    """One solver's result.

    Attributes:
        problem: What the operator is: kind, sizes, digests of parameters and data.
        unit: The unit of the times, ``gradients`` on the same data or ``seconds``.
        right: Whether every true residual is at most ``tol`` and no wanted pair is missing.
        residual: The largest true relative residual, by one product per pair.
        residual_at_defaults: The same at the solver's own settings for ``tol``.
        samples: How many runs the times are quantiles of.
        when: UTC.
    """

    format: str
    problem: dict[str, Any]
    name: str
    k: int
    tol: float
    wanted_values_from: str
    solver: str
    version: str
    right: bool
    failure: str
    residual: float | None
    residual_at_defaults: float | None
    missing: int
    products: int | None
    unit: str
    time: Spread | None
    time_reused: Spread | None
    speed: Spread | None
    speed_reused: Spread | None
    samples: int
    threads: str
    environment: str
    command: str
    when: str

    @property
    def key(self) -> tuple[str, ...]:
        """Two lines with one key measure the same thing."""
        of = json.dumps(self.problem, sort_keys=True)
        return of, str(self.k), repr(self.tol), self.solver, self.version, self.environment

    @property
    def group(self) -> tuple[str, ...]:
        """Lines with one group stand in one table."""
        of = json.dumps(self.problem, sort_keys=True)
        return of, str(self.k), repr(self.tol), self.environment


def lines_of(result: Contest) -> list[Line]:
    """One line per solver that took part."""
    threads = max((one.threads.torch for one in result.outcomes.values()), default=1)
    reference = result.outcomes.get(REFERENCE)
    when = datetime.now(UTC).isoformat(timespec="seconds")
    return [
        _line(result, name, one, reference, environment(threads), when)
        for name, one in result.outcomes.items()
    ]


def _line(
    result: Contest,
    name: str,
    one: Outcome,
    reference: Outcome | None,
    machine: str,
    when: str,
) -> Line:
    right = one.passes(result.tol)
    compared = right and reference is not None and reference.passes(result.tol)
    speeds: dict[bool, Spread | None] = {True: None, False: None}
    if compared and reference is not None:
        speeds = {r: _spread(quantiles(one.against(reference, r))) for r in (True, False)}
    whole, solve = [s.whole for s in one.samples], [s.solve for s in one.samples]
    return Line(
        format=FORMAT,
        problem=result.found.about or {"operator": result.found.name, "n": result.found.operator.n},
        name=result.found.name,
        k=result.k,
        tol=result.tol,
        wanted_values_from=result.way,
        solver=name,
        version=one.contender.version,
        right=right,
        failure=one.failure,
        residual=_finite(one.residual),
        residual_at_defaults=_finite(one.first_residual),
        missing=one.missing,
        products=one.answer[2] if not one.failure else None,
        unit="seconds" if result.found.gradient is None else "gradients",
        time=_spread(quantiles(whole)) if right else None,
        time_reused=_spread(quantiles(solve)) if right else None,
        speed=speeds[False],
        speed_reused=speeds[True],
        samples=len(one.samples),
        threads=str(one.threads),
        environment=machine,
        command=command(),
        when=when,
    )


def _spread(of: Quantiles) -> Spread:
    return of.p20, of.p50, of.p80


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def merge(lines: Iterable[Line]) -> list[Line]:
    """One line per key, the latest; sorted, so that the order of files does not matter."""
    found: dict[tuple[str, ...], Line] = {}
    for line in lines:
        old = found.get(line.key)
        if old is None or (old.when, _text(old)) < (line.when, _text(line)):
            found[line.key] = line
    return [found[key] for key in sorted(found)]


def _text(line: Line) -> str:
    return json.dumps(asdict(line))


def write(path: Path, lines: Sequence[Line]) -> Path:
    """Write a leaderboard, all or nothing."""
    text = "".join(_text(line) + "\n" for line in lines)
    write_atomically(path, lambda name: Path(name).write_text(text, encoding="utf-8"))
    return path


def read(path: Path) -> list[Line]:
    """The lines of a file; one that is not of this format is an error that names it."""
    found = []
    kinds = get_type_hints(Line)
    try:
        # not splitlines: a command may hold a separator of lines that JSON does not escape
        content = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a leaderboard: {error}") from error
    for number, text in enumerate(content, start=1):
        if not text.strip():
            continue
        try:
            record = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
        if (
            not isinstance(record, dict)
            or record.get("format") != FORMAT
            or set(record) != {*kinds}
        ):
            raise ValueError(
                f"{path}, line {number} is not of format {FORMAT!r}, as curvlab bench eig writes"
            )
        wrong = [name for name, kind in kinds.items() if not _is(record[name], kind)]
        if wrong:
            told = ", ".join(f"{name} is {record[name]!r}"[:60] for name in wrong)
            raise ValueError(f"{path}, line {number} is damaged: {told}. Take that line out")
        spreads = ("time", "time_reused", "speed", "speed_reused")
        record |= {n: tuple(record[n]) for n in spreads if record[n] is not None}
        found.append(Line(**record))
    return found


def _is(value: Any, kind: Any) -> bool:
    """Whether what JSON gave is of a field's kind."""
    if isinstance(kind, UnionType):
        return any(_is(value, one) for one in kind.__args__)
    if kind == Spread:
        return isinstance(value, list) and len(value) == 3 and all(_is(v, float) for v in value)
    if kind is float:
        return _is(value, int) or (isinstance(value, float) and math.isfinite(value))
    plain = get_origin(kind) or kind
    return isinstance(value, plain) and (plain is bool or not isinstance(value, bool))


def tables(lines: Sequence[Line]) -> list[tuple[str, list[list[str]]]]:
    """For every problem and machine a heading and rows of text, the fastest first."""
    groups: dict[tuple[str, ...], list[Line]] = {}
    for line in lines:
        groups.setdefault(line.group, []).append(line)
    found = []
    for some in groups.values():
        one = some[0]
        n = one.problem.get("n", "?")
        heading = (
            f"{one.name}: n = {n}, top {one.k} at a true relative residual of {one.tol:g}\n"
            f"wanted values from {one.wanted_values_from}\n{one.environment}\n{one.command}"
        )
        ordered = sorted(some, key=lambda line: (not line.right, line.time or (0.0,) * 3))
        found.append((heading, [_cells(line) for line in ordered]))
    return found


HEADER = [
    "solver", "version", "threads", "products", "with set-up", "reused", "x lanczos", "samples",
    "residual", "at its defaults",
]  # fmt: skip


def _cells(line: Line) -> list[str]:
    def times(of: Spread | None) -> str:
        if of is None:
            return "-"
        return f"{of[1]:.3g}" if line.samples == 1 else f"{of[1]:.3g} ({of[0]:.3g}-{of[2]:.3g})"

    residual = "fails" if line.residual is None else f"{line.residual:.0e}"
    residual += f", {line.missing} missing" if line.missing and line.residual is not None else ""
    return [
        line.solver,
        line.version or "-",
        line.threads if line.right else "-",
        "-" if line.products is None else str(line.products),
        times(line.time) if line.right else "WRONG",
        times(line.time_reused),
        "-" if line.speed is None else f"{line.speed[1]:.2f}",
        ("one" if line.samples == 1 else str(line.samples)) if line.right else "-",
        residual,
        "fails" if line.residual_at_defaults is None else f"{line.residual_at_defaults:.0e}",
    ]


def picture(lines: Sequence[Line]) -> Any:
    """Times of the solvers of the first problem that are right; the title names the wrong ones."""
    from curvlab import plots

    one = lines[0]
    some = [line for line in lines if line.group == one.group]
    right = {line.solver: line for line in some if line.time and line.time_reused}
    order = sorted(right, key=lambda name: right[name].time or ())
    return plots.contest(
        order,
        [(right[name].time, right[name].time_reused) for name in order],  # type: ignore[misc]
        [right[name].products or 0 for name in order],
        wrong=[line.solver for line in some if not line.right],
        unit=one.unit,
        title=f"{one.name}: top {one.k} at a relative residual of {one.tol:g}",
    )
