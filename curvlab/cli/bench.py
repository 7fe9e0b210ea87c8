"""``bench eig`` and ``bench merge``: eigensolvers compared on a user's model, and leaderboards."""

from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

from curvlab.bench import leaderboard
from curvlab.bench.contest import contest
from curvlab.bench.problem import of_model
from curvlab.bench.solvers import Solve
from curvlab.bench.timing import Threads
from curvlab.cli.load import case, named, operator
from curvlab.cli.output import emit, say, table
from curvlab.cli.parser import UsageError


def eig(options: Namespace) -> int:
    """Compare eigensolvers; exit code 1 if nobody is right."""
    solvers = dict(_solver(spec) for spec in options.solver)
    out = Path(options.out)
    if out.exists():
        _lines(out)  # what is no leaderboard is told of before minutes are spent
    loss = case(options).loss
    found = of_model(options.name or options.model, lambda: operator(options), loss)
    if options.k >= found.operator.n:
        raise UsageError(f"--k must be below n = {found.operator.n}; got {options.k}")
    result = contest(
        found,
        options.k,
        options.tol,
        options.rounds,
        whole=options.all,
        only=[*options.only, *solvers] if options.only else (),
        own=solvers,
        settings=[Threads(*given) for given in options.threads],
        say=lambda words: say(options, words),
    )
    for name, why in result.absent.items():
        say(options, f"left out: {name} ({why})", name in options.only)
    if not result.outcomes:
        raise UsageError(f"--only {' '.join(options.only)}: no solver that is here begins so")
    lines = leaderboard.lines_of(result)
    for name, one in result.outcomes.items():
        if one.failure:
            say(options, f"{name} fails: {one.failure}", True)
    try:
        # read again: another run may have added lines meanwhile
        before = _lines(out) if out.exists() else []
        leaderboard.write(out, leaderboard.merge([*before, *lines]))
    finally:  # what was measured is shown where it cannot be written, too
        _show(options, lines)
    return 0 if any(line.right for line in lines) else 1


def merge(options: Namespace) -> int:
    """Several leaderboards as one."""
    lines = leaderboard.merge(line for file in options.files for line in _lines(Path(file)))
    if not lines:
        raise UsageError("the files hold no lines")
    if options.out is not None:
        leaderboard.write(Path(options.out), lines)
    _show(options, lines)
    return 0


def _show(options: Namespace, lines: list[leaderboard.Line]) -> None:
    text = [f"{head}\n\n{table(leaderboard.HEADER, c)}" for head, c in leaderboard.tables(lines)]
    units = {line.unit for line in lines}
    text.append(f"times in {' or '.join(sorted(units))}; x lanczos: its time over this one's")
    drawn = []
    if options.picture and any(line.right for line in lines):
        from curvlab import plots

        drawn = [str(path) for path in plots.write(leaderboard.picture(lines), *options.picture)]
    text += [f"picture {name}" for name in drawn]
    text += [f"lines   {options.out}"] if options.out is not None else []
    facts = {"lines": [asdict(line) for line in lines], "file": options.out, "pictures": drawn}
    emit(options, facts, "\n\n".join(text[:-1]) + "\n" + text[-1])


def _lines(path: Path) -> list[leaderboard.Line]:
    try:
        return leaderboard.read(path)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise UsageError(str(error)) from error


def _solver(spec: str) -> tuple[str, Solve]:
    found = named(spec, "--solver")
    if not callable(found):
        raise UsageError(f"--solver {spec} is not a function of (operator, k, tol)")
    return spec, found
