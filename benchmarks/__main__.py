"""One front for all benchmarks.

    python -m benchmarks [SUBJECT ...] [--size small|standard|full] [--out DIR] [--minutes M]
    python -m benchmarks list
    python -m benchmarks verdicts FILE ...
    python -m benchmarks compare BASE HEAD [--time]
    python -m benchmarks page [--rows FILE ...]

Each subject runs in a process of its own, so that none inherits another's memory or compiled code,
and writes its rows under ``--out``. In the end every target is shown with what was measured and a
verdict. Nothing else should run on the machine meanwhile. A subject that would not end within
``--minutes`` by its usual time is left out, one that runs a minute over is stopped. What was
written until then counts, after Ctrl-C too; the rest is "not measured here".
"""

import argparse
import math
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.measure import Row, format_table, read_rows
from benchmarks.subjects import SIZES, SUBJECTS, Size, command

GRACE = 1.0  # minutes that a subject may go over the limit


def run(names: Sequence[str], size: Size, out: Path, minutes: float) -> int:
    """Measure the subjects in turn, print the verdicts, and return the exit code."""
    from benchmarks import verdicts
    from curvlab.bench import peers

    print(peers.summary())
    out.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    rows: list[Row] = []
    failed, left_out = [], []
    for name in names:
        subject = SUBJECTS[name]
        passed = time.perf_counter() - began
        if size not in subject.arguments:
            left_out.append(f"{name} (not at size {size})")
            continue
        if passed + subject.seconds[size] > 60 * minutes:
            left_out.append(f"{name} (about {subject.seconds[size]} s)")
            continue
        given = command(name, size, str(out))
        print(f"\n== python -m {' '.join(given)}", flush=True)
        path = out / f"{name}.csv"
        path.unlink(missing_ok=True)  # rows of an earlier run are not this run's
        try:
            code = _measure(given, 60 * (minutes + GRACE) - passed)
        except KeyboardInterrupt:
            left_out.append(f"{name} and what comes after it (interrupted)")
            rows += read_rows(path) if path.is_file() else []
            break
        print(f"== {name}: {time.perf_counter() - began - passed:.0f} s", flush=True)
        if code is None:
            left_out.append(f"{name} (stopped: it took too long)")
        elif code:
            failed.append(name)
        if path.is_file():
            rows += read_rows(path)
    print(f"\n== targets, from {len(rows)} rows in {out}")
    print(verdicts.table(verdicts.judge(rows)))
    print(f"\n{(time.perf_counter() - began) / 60:.1f} minutes")
    if rows:
        print(f"to put them on the page: python -m benchmarks page --rows {out}/*.csv")
    if left_out:
        print(f"left out: {', '.join(left_out)}; name a subject to run it alone")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _measure(given: Sequence[str], seconds: float) -> int | None:
    """The exit code of ``python -m given``; None if it was stopped because time ran out."""
    limit = None if math.isinf(seconds) else max(seconds, 1.0)
    try:
        return subprocess.run([sys.executable, "-m", *given], check=False, timeout=limit).returncode
    except subprocess.TimeoutExpired:
        return None


def _run(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("subjects", nargs="*", metavar="SUBJECT", help="by default all of `list`")
    parser.add_argument("--size", choices=SIZES, default="standard", help="(standard)")
    parser.add_argument(
        "--out", type=Path, default=Path("results") / "benchmarks", help="folder for the rows"
    )
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="leave out what would not end in time"
    )
    options = parser.parse_args(arguments)
    unknown = [name for name in options.subjects if name not in SUBJECTS]
    if unknown:
        parser.error(f"no subject {unknown[0]!r}; there are {', '.join(SUBJECTS)}")
    return run(options.subjects or list(SUBJECTS), options.size, options.out, options.minutes)


def _list(arguments: Sequence[str]) -> int:
    argparse.ArgumentParser(prog="python -m benchmarks list").parse_args(arguments)
    lines = [
        [name, *(f"{s.seconds[z]} s" if z in s.seconds else "-" for z in SIZES), s.what]
        for name, s in SUBJECTS.items()
    ]
    print(format_table(["subject", *SIZES, "what"], lines))
    return 0


def _verdicts(arguments: Sequence[str]) -> int:
    from benchmarks import verdicts

    parser = argparse.ArgumentParser(prog="python -m benchmarks verdicts")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="rows, .csv or .json")
    options = parser.parse_args(arguments)
    try:
        rows = [entry for file in options.files for entry in read_rows(file)]
    except (OSError, ValueError) as reason:
        parser.error(str(reason))
    print(verdicts.table(verdicts.judge(rows)))
    return 0


def _compare(arguments: Sequence[str]) -> int:
    from benchmarks import compare

    return compare.main(arguments)


def _page(arguments: Sequence[str]) -> int:
    from benchmarks import page

    return page.main(arguments)


VERBS: dict[str, Callable[[Sequence[str]], int]] = {
    "list": _list,
    "verdicts": _verdicts,
    "compare": _compare,
    "page": _page,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; see the file's header."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] in VERBS:
        return VERBS[given[0]](given[1:])
    return _run(given)


if __name__ == "__main__":
    sys.exit(main())
