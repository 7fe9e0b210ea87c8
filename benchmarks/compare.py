"""Did it get worse? Two revisions side by side, decided by counts and errors.

    python -m benchmarks compare BASE HEAD [--parts products ...] [--plain] [--time] [--all]

BASE and HEAD are git revisions, folders with a checkout (``.`` is the working tree), or two files
of rows. Revisions are unpacked into a temporary folder and :mod:`benchmarks.guard`, as it is here,
runs on both in turn, round by round, so that both see the same machine. A row is worse if it passes
its threshold below; the exit code is then 1. Counts decide: products, operators, bytes, errors,
leaks, residuals. They are the same on every run, so this does not flake on a busy machine. Time is
shown, and decides only with ``--time``. ``--plain`` leaves the compiled loops out: nothing
has to be compiled for a fresh folder, and torch's operators take their place, which are counted.
"""

import argparse
import math
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.guard import PARTS
from benchmarks.measure import Row, format_table, read_rows
from benchmarks.verdicts import number
from curvlab.bench.timing import quantiles

HERE = Path(__file__).resolve().parent
SUFFIXES = (".csv", ".json")


@dataclass(frozen=True, slots=True)
class Rule:
    """A figure is worse if it is above ``ratio`` times the old one, or ``floor`` if that is more.

    Below ``floor`` differences are rounding. With ``more`` a larger figure is better.
    """

    ratio: float
    floor: float = 0.0
    more: bool = False
    timed: bool = False  # noise: decides only when asked to


RULES: dict[str, Rule] = {
    "products": Rule(1.05),
    "operators": Rule(1.1, 10.0),
    "moved": Rule(1.05, 10_000.0),
    "allocated": Rule(1.1, 10_000.0),
    "peak": Rule(1.1, 10_000.0),
    "given to kernels": Rule(1.05),
    "rows": Rule(1.02),
    "error float64": Rule(4.0, 1e-14),
    "error in float64": Rule(4.0, 1e-14),
    "error float32": Rule(2.0, 5e-7),
    "error in float32": Rule(2.0, 5e-7),
    "error": Rule(2.0, 1e-7),
    "leak": Rule(1.5, 1e-7),
    "lost": Rule(2.0, 2e-6),
    "orthogonality": Rule(1.5, 8e-7),
    "residual": Rule(1.02, 1.0),  # in tolerances: anything within them is as good
    "energy left out": Rule(1.02, 1.0),
    "missing": Rule(1.0),
    "silently wrong": Rule(1.0),
    "fails": Rule(1.0),
    "time": Rule(1.3, timed=True),
    "time per vector": Rule(1.3, timed=True),
    "CPU time": Rule(1.3, timed=True),
    "step": Rule(1.3, timed=True),
    "speed": Rule(1.3, more=True, timed=True),
    "speed per run": Rule(1.3, more=True, timed=True),
}
Key = tuple[str, str, str, str, str]


@dataclass(frozen=True, slots=True)
class Change:
    """One figure before and after; ``after`` is None if the row is gone."""

    key: Key
    before: float
    after: float | None
    rule: Rule | None

    @property
    def ratio(self) -> float:
        if self.after is None or math.isnan(self.after):
            return math.inf
        if self.before == self.after:
            return 1.0
        return self.after / self.before if self.before else math.inf

    def worse(self, timed: bool) -> bool:
        """Whether it passes its threshold; a row that is gone, or NaN, always does."""
        if self.rule is None or (self.rule.timed and not timed):
            return False
        if self.after is None or math.isnan(self.after):
            return True
        if self.rule.more:
            return self.after < self.before / self.rule.ratio
        return self.after > self.rule.ratio * max(self.before, self.rule.floor)


def changes(base: Iterable[Row], head: Iterable[Row]) -> list[Change]:
    """Every figure of ``base``, and failures that only ``head`` has."""
    before, after = _medians(base), _medians(head)
    found = [Change(key, value, after.get(key), RULES.get(key[2])) for key, value in before.items()]
    for key, value in after.items():
        if key[2] == "fails" and key not in before:
            found.append(Change(key, 0.0, value, RULES["fails"]))
    return found


def _medians(rows: Iterable[Row]) -> dict[Key, float]:
    """Over all rounds: rows of the same figure are samples of it."""
    samples: dict[Key, list[float]] = {}
    for entry in rows:
        key = (entry.subject, entry.contender, entry.metric, entry.unit, str(entry.x))
        samples.setdefault(key, []).append(entry.p50)
    return {key: quantiles(values).p50 for key, values in samples.items()}


def measured(
    base: str, head: str, rounds: int, parts: Sequence[str], *, plain: bool = False
) -> tuple[list[Row], list[Row]]:
    """Rows of both, from files or by running the guard on both in turn."""
    if base.endswith(SUFFIXES) and head.endswith(SUFFIXES):
        return read_rows(base), read_rows(head)
    if base.endswith(SUFFIXES) or head.endswith(SUFFIXES):
        raise ValueError(f"compare needs two files of rows or two revisions; got {base}, {head}")
    found: dict[str, list[Row]] = {"base": [], "head": []}
    with tempfile.TemporaryDirectory(prefix="curvlab-compare-") as name:
        folder = Path(name)
        (folder / "tools").mkdir()
        (folder / "tools" / "benchmarks").symlink_to(HERE)
        _copy_timing(folder / "tools" / "clock")
        with checkout(base, folder / "base") as old, checkout(head, folder / "head") as new:
            for turn in range(rounds):
                order = [("base", old), ("head", new)]
                for side, tree in order[:: 1 if turn % 2 == 0 else -1]:
                    print(f"round {turn + 1}, {side}", file=sys.stderr, flush=True)
                    found[side] += guarded(tree, folder, parts, plain)
    labels = {"base": base, "head": head}
    sides = ([replace(e, commit=labels[side]) for e in found[side]] for side in ("base", "head"))
    return next(sides), next(sides)


@contextmanager
def checkout(what: str, folder: Path) -> Iterator[Path]:
    """A folder as it is, or a revision of this repository unpacked into ``folder``."""
    if Path(what).is_dir():
        yield Path(what).resolve()
        return
    archive = folder.with_suffix(".tar")
    done = subprocess.run(
        ["git", "archive", "--output", str(archive), what],
        cwd=Path.cwd(),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ValueError(
            f"{what!r} is neither a folder, a file of rows nor a revision of the repository here: "
            f"{done.stderr.strip()}"
        )
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    yield folder


def _copy_timing(folder: Path) -> None:
    """The one module of curvlab that measures, for revisions that have another one or none."""
    own = HERE.parent / "curvlab" / "bench"
    (folder / "bench").mkdir(parents=True)
    for name in ("__init__.py", "timing.py"):
        shutil.copy(own / name, folder / "bench" / name)


def guarded(tree: Path, folder: Path, parts: Sequence[str], plain: bool) -> list[Row]:
    """Rows of the guard, as it is here, on the curvlab of ``tree``."""
    if not (tree / "curvlab").is_dir():
        raise ValueError(f"{tree} has no folder curvlab: it is not a checkout of this project")
    out = folder / "rows.csv"
    path = os.pathsep.join(str(p) for p in (folder / "tools", tree, tree / "kernels"))
    script = "import sys; sys.modules['numba'] = None\n" if plain else ""
    script += (
        "import sys, pathlib, curvlab\n"
        "curvlab.__path__.insert(0, 'clock')\n"  # curvlab.bench.timing as it is here
        "import benchmarks.guard as guard\n"
        "tree = pathlib.Path(sys.argv[1]).resolve()\n"
        "where = pathlib.Path(curvlab.__file__).resolve()\n"
        "assert tree in where.parents, f'measured {where} in place of {tree}'\n"
        "guard.main(sys.argv[2:])\n"
    )
    command = [sys.executable, "-c", script, str(tree), "--out", str(out), "--parts", *parts]
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        cwd=folder / "tools",
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the guard failed on {tree}:\n{done.stdout}{done.stderr}")
    return read_rows(out)


def report(found: Sequence[Change], *, timed: bool, everything: bool) -> str:
    """What changed, the worse ones marked; with ``everything`` also what did not."""
    lines = []
    for change in found:
        worse = change.worse(timed)
        shown = everything or worse or (change.ratio != 1.0 and not _is_time(change))
        if not shown:
            continue
        _, contender, metric, unit, x = change.key
        after = "gone" if change.after is None else number(change.after)
        limit = "" if change.rule is None else f"{change.rule.ratio:g}"
        mark = "WORSE" if worse else ""
        name = contender if x == "small" else f"{contender}, {x}"
        figure = f"{metric}, {unit}" if unit else metric
        lines.append(
            [name, figure, number(change.before), after, f"{change.ratio:.3f}", limit, mark]
        )
    header = ["what", "figure", "base", "head", "ratio", "threshold", ""]
    count = sum(change.worse(timed) for change in found)
    end = f"{len(found)} figures compared, {count} worse"
    times = [change.ratio for change in found if _is_time(change) and math.isfinite(change.ratio)]
    if times:
        end += f"; time, median ratio {quantiles(times).p50:.2f}"
        end += "" if timed else " (does not decide)"
    return "\n".join(([format_table(header, lines), ""] if lines else []) + [end])


def _is_time(change: Change) -> bool:
    return change.rule is not None and change.rule.timed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("base", help="a revision, a folder, or a file of rows")
    parser.add_argument("head", help="the same, to be judged")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=1, help="more only make times steadier")
    parser.add_argument("--time", action="store_true", help="time decides too: a quiet machine")
    parser.add_argument("--plain", action="store_true", help="without the compiled loops")
    parser.add_argument("--all", action="store_true", help="show what did not change, too")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1; got {options.rounds}")
    try:
        base, head = measured(
            options.base, options.head, options.rounds, options.parts, plain=options.plain
        )
    except ValueError as reason:
        parser.error(str(reason))
    found = changes(base, head)
    print(report(found, timed=options.time, everything=options.all))
    return 1 if any(change.worse(options.time) for change in found) else 0


if __name__ == "__main__":
    sys.exit(main())
