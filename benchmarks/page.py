"""The results page: ``RESULTS.md`` and its pictures, rebuilt from the rows that are committed.

    python -m benchmarks page [--rows FILE ...] [--folder benchmarks]

``--rows`` first folds measured rows into ``rows/``, one file per section: what was measured again
(the same subject at the same ``x``) replaces what was there. The rest stays if it is of the same
processor and is withdrawn if it is not: a section compares within one machine. The page holds
nothing that is not in the rows; every section and every target names the machine and the revision.
The README's comparison is written from the same rows.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks import front, pictures, verdicts
from benchmarks.measure import (
    SMALL,
    Row,
    machine_of,
    processor_of,
    read_rows,
    threads_of,
    write_rows,
)
from benchmarks.sections import SECTIONS, Section, View, section_of
from benchmarks.verdicts import MET, MISSED, number

FOLDER = Path(__file__).parent
ERRORS = ("error in float64", "residual", "orthogonality", "error")


def fold(folder: Path, new: Iterable[Row]) -> list[Path]:
    """Put ``new`` rows in place of those of the same subject and ``x``; returns changed files.

    Of a section that is measured on another processor nothing older stays.
    """
    by_section: dict[str, list[Row]] = {}
    for entry in new:
        if not f"{entry.x}".startswith(SMALL) and not entry.subject.startswith(SMALL):
            by_section.setdefault(section_of(entry), []).append(entry)
    written = []
    for name, rows in by_section.items():
        path = folder / f"{name}.csv"
        replaced, here = {_group(entry) for entry in rows}, {processor_of(entry) for entry in rows}
        if len(here) > 1:
            raise ValueError(f"rows of {name} are of {len(here)} processors; fold one in at a time")
        old = read_rows(path) if path.is_file() else []
        kept = [e for e in old if _group(e) not in replaced and processor_of(e) in here]
        written.append(write_rows(path, [*kept, *rows]))
    return written


def _group(entry: Row) -> tuple[str, str]:
    # a curve is one run whatever its points, and so is a large model; elsewhere a run is all
    # contenders at one x
    alone = entry.subject.startswith(("growth", "eigensolver curve", "large"))
    return entry.subject, entry.contender if alone else str(entry.x)


def table(view: View, rows: Sequence[Row]) -> str:
    """The view in Markdown; empty if no row is there."""
    own = [entry for entry in rows if entry.subject == view.subject]
    shown = [entry for entry in own if (entry.metric, entry.unit) in view.metrics]
    if not shown:
        return ""
    by_x = len(view.metrics) == 1
    several = len({_text(entry.x) for entry in shown}) > 1

    def place(entry: Row) -> tuple[str, str]:
        """Line and column."""
        if by_x:
            return entry.contender, _text(entry.x)
        name = f"{entry.contender}, {_text(entry.x)}" if several else entry.contender
        same = entry.unit in ("", entry.metric)
        return name, entry.metric if same else f"{entry.metric}, {entry.unit}"

    if not by_x:
        shown.sort(key=lambda entry: view.metrics.index((entry.metric, entry.unit)))
    columns = list(dict.fromkeys(place(entry)[1] for entry in shown))
    cells = {place(entry): _cell(entry, view.sized) for entry in shown}
    lines = []
    for name, version in {place(entry)[0]: entry.version for entry in own}.items():
        line = [cells.get((name, c)) or (_wrong(own, name, c) if by_x else "") for c in columns]
        if any(line):
            lines.append([f"{name} {version}".strip(), *line])
    return f"**{view.title}**\n\n" + markdown(["", *columns], lines) + _threads(shown)


def _text(x: float | str) -> str:
    return f"{x:g}" if isinstance(x, float) else x


def _cell(entry: Row, sized: bool) -> str:
    if entry.unit == "bytes":
        small = entry.p50 < 10 * 2**20
        return f"{entry.p50 / 2**10:,.0f} KiB" if small else f"{entry.p50 / 2**20:,.0f} MiB"
    if not sized or entry.p20 == entry.p80:
        alone = sized and verdicts.single(entry)
        return f"{number(entry.p50)} (one sample)" if alone else number(entry.p50)
    return f"{number(entry.p50)} ({number(entry.p20)} to {number(entry.p80)})"


def _threads(shown: Sequence[Row]) -> str:
    """With how many threads each was timed, where they differ: a sentence under the table."""
    counts: dict[str, list[str]] = {}
    for entry in shown:
        if entry.metric.startswith(verdicts.TIMED):
            word = f"{entry.contender} ({_text(entry.x)})"
            counts.setdefault(threads_of(entry), []).append(word)
    if len(counts) < 2:
        return ""
    most = max(counts, key=lambda count: len(counts[count]))
    rest = [f"{count}: {', '.join(who)}" for count, who in counts.items() if count != most]
    return f"\n\nTorch's threads: {most}; with {'; with '.join(rest)}."


def _wrong(rows: Sequence[Row], contender: str, x: str) -> str:
    """Why a contender has no time there: the error that it was stopped with."""
    for entry in rows:
        if entry.contender == contender and _text(entry.x) == x and entry.metric in ERRORS:
            return f"wrong: {number(entry.p50)}" if math.isfinite(entry.p50) else "fails"
    return ""


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table; bars inside cells are escaped."""
    clean = [[cell.replace("|", "\\|") for cell in line] for line in (header, *lines)]
    return "\n".join(
        [f"| {' | '.join(clean[0])} |", "|" + "---|" * len(clean[0])]
        + [f"| {' | '.join(line)} |" for line in clean[1:]]
    )


def targets(rows: Sequence[Row]) -> str:
    """The verdict table, what fell short first; its processors have letters, told above it."""
    found = verdicts.judge(rows)
    order = {MISSED: 0, MET: 1}
    found.sort(key=lambda verdict: order.get(verdict.verdict, 2))
    decided = dict.fromkeys(v.processor for v in found if v.processor)
    letters = {processor: chr(ord("A") + place) for place, processor in enumerate(decided)}
    lines = []
    for verdict in found:
        where = f"{letters.get(verdict.processor, '')} {verdict.commit}".strip()
        line = [*verdicts.cells(verdict), where or "-"]
        if verdict.verdict == MISSED:
            line[3] = f"**{line[3]}**"
        lines.append(line)
    heading = ["target", "limit", "measured", "verdict", "machine, revision"]
    told = "".join(f" {letter}: {processor}." for processor, letter in letters.items())
    return f"{verdicts.summary(found)}.{told}\n\n{markdown(heading, lines)}"


def provenance(rows: Sequence[Row]) -> str:
    """The machines and revisions of these rows in one line."""
    machines = list(dict.fromkeys(machine_of(entry) for entry in rows))
    commits = list(dict.fromkeys(entry.commit or "unknown" for entry in rows))
    return f"Measured on {'; also '.join(machines)}. Revision {', '.join(commits)}."


def build(folder: Path) -> Path:
    """Write the page and its pictures from ``folder / "rows"``."""
    files = {path.stem: read_rows(path) for path in sorted((folder / "rows").glob("*.csv"))}
    every = [entry for rows in files.values() for entry in rows]
    if not every:
        raise ValueError(f"{folder / 'rows'} holds no rows; fold some in with --rows FILE")
    parts = [HEAD, "## Targets\n", targets(every) + "\n"]
    if (folder / "rows" / "networks.json").is_file():
        parts.append(networks(folder / "rows" / "networks.json"))
    for name, section in SECTIONS.items():
        if files.get(name):
            parts.append(written(name, section, files[name], folder))
    page = folder / "RESULTS.md"
    page.write_text("\n".join(parts), encoding="utf-8")
    return page


def written(name: str, section: Section, rows: Sequence[Row], folder: Path) -> str:
    """A section: text, where it was measured, picture, tables."""
    parts = [f"## {section.title}\n", f"{section.text} {provenance(rows)}\n".lstrip()]
    typed = list(dict.fromkeys(entry.command for entry in rows if entry.command))
    typed = typed or [f"python -m benchmarks {name} --size full"]
    parts.append("\n".join(f"    {one}" for one in typed) + "\n")
    picture = pictures.draw(name, rows, folder / "pictures")
    if picture is not None:
        parts.append(f"![{section.title}](pictures/{picture.name})\n")
    tables = [table(view, rows) for view in section.views]
    if name in ("growth", "distributed"):
        tables.append(growth(rows))
    return "\n".join([*parts, *(f"{one}\n" for one in tables if one)])


def networks(path: Path) -> str:
    """What `python -m benchmarks.trained --out` recorded."""
    columns = ["size", "network", "parameters", "samples", "loss", "sha256"]
    found = json.loads(path.read_text(encoding="utf-8"))
    lines = [[str(one[column])[:16] for column in columns] for one in found]
    text = "Trained from the embedded data by `python -m benchmarks.trained`; another machine may "
    text += "round differently and get other weights.\n\n"
    return f"## Trained networks\n\n{text}{markdown(columns, lines)}\n"


def growth(rows: Sequence[Row]) -> str:
    """Fitted exponents beside the expected ones."""
    expected: Mapping[tuple[str, str], float] = {
        (entry.contender, entry.metric): entry.p50 for entry in rows if entry.unit == "expected"
    }
    lines = []
    for entry in rows:
        if entry.unit == "fitted":
            wanted = expected.get((entry.contender, entry.metric))
            spread = f"{entry.p50:.2f} ± {entry.p80 - entry.p50:.2f}"
            line = [entry.contender, entry.metric.removeprefix("exponent of "), spread]
            lines.append([*line, "" if wanted is None else f"{wanted:g}"])
    return markdown(["of", "figure", "exponent", "by count"], lines) if lines else ""


HEAD = """# Results

`python -m benchmarks page` makes this page from the files in `benchmarks/rows/`. Times are medians
of interleaved rounds with their 20 % and 80 % quantiles, in units measured in the same rounds.
"One sample" has no spread. A contender that is wrong is shown with its error and not timed. Every
section names the machine, the revision and the commands. Revisions differ where not everything was
measured again. There was no GPU.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks page",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", nargs="+", type=Path, default=[], help="rows to fold in first")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args(arguments)
    missing = [str(path) for path in options.rows if not path.is_file()]
    if missing:
        parser.error(f"no file {missing[0]}; rows are what `python -m benchmarks SUBJECT` writes")
    try:
        for path in options.rows:
            for changed in fold(options.folder / "rows", read_rows(path)):
                print(f"folded {path} into {changed}")
        print(f"page: {build(options.folder)}")
        if options.folder.resolve() == FOLDER.resolve():
            readme = FOLDER.parent / "README.md"
            every = [e for p in sorted((FOLDER / "rows").glob("*.csv")) for e in read_rows(p)]
            print(f"{readme}: {'changed' if front.write(readme, every) else 'as it was'}")
    except ValueError as reason:
        parser.error(str(reason))
    return 0


if __name__ == "__main__":
    sys.exit(main())
