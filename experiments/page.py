"""The report page as HTML: a verdict on top, then every experiment with what stands behind it."""

import base64
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from experiments.costs import count, duration
from experiments.experiment import PAPERS, SIZES, Experiment
from experiments.figures import DPI
from experiments.findings import Finding
from experiments.markup import Markup, joined, table, tag
from experiments.paper import published
from experiments.provenance import provenance, runs, unused
from experiments.store import Result
from experiments.tables import Cell, Table, format_pair
from experiments.verdicts import VERDICTS, Claim, Quote, untested

TITLE = "Towards guarantees for parameter isolation in continual learning: what reproduces"
SIGNS = {"agree": "✓ agrees", "disagree": "✗ disagrees", "undecided": "~ undecided",
         "not tested": "○ not tested"}  # fmt: skip
LEGEND = (
    "✓ agrees; ✗ disagrees; ~ undecided: seeds disagree, there is one seed only, or the answer "
    "depends on a choice that the paper leaves open (one side of it may not have been run); "
    "○ not tested: not run, run at a smaller size only, or a learner in it learned no more than a "
    "frozen network. ⚠ learned so little that "
    "forgetting means nothing. A number in a table links to the command that made it. Core time "
    "includes trainings, which several labels share. † trained by an earlier version of the code, "
    "whose roundings differ: still to be repeated."
)
STYLES = {"agree": "agree", "disagree": "disagree", "undecided": "undecided",
          "not tested": "untested"}  # fmt: skip


def page(
    experiments: Sequence[Experiment],
    findings: Mapping[str, list[Finding]],
    pictures: Mapping[str, bytes],
    results: Sequence[Result],
) -> str:
    """The whole document.

    Args:
        experiments: In the order in which they are to stand.
        findings: By label, the largest size first; empty where there are no results.
        pictures: PNG files by the anchor of their finding.
        results: All lines of the results file.
    """
    sections = [
        _section(one, findings[one.label], pictures) for one in experiments if findings[one.label]
    ]
    shown = {
        result.key
        for found in findings.values()
        for one in found
        for result in one.results.values()
    }
    body = [*_top(experiments, findings), *sections, runs(results), unused(results, shown)]
    document = tag("html", _head(), tag("body", tag("main", *body)), lang="en")
    return f"<!DOCTYPE html>\n{document}\n"


def _head() -> Markup:
    style = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", TITLE),
        tag("style", Markup(style)),
    )


def _counted(experiment: Experiment, found: list[Finding]) -> list[Claim]:
    """The paper's statements with the verdicts that count: of results at the paper's size.

    A smaller network or stream can neither confirm nor refute what is said of a larger one.
    """
    why = f"only at size {found[0].size}" if found else "not run"
    counted = {quote: untested(quote, why) for quote in experiment.quotes}
    for one in reversed([one for one in found if one.size in PAPERS]):
        for claim in one.claims:
            # the larger size decides where both test a statement
            if isinstance(claim.says, Quote) and (
                claim.verdict != "not tested" or counted[claim.says].verdict == "not tested"
            ):
                counted[claim.says] = claim
    return list(counted.values())


def _top(
    experiments: Sequence[Experiment], findings: Mapping[str, list[Finding]]
) -> Iterator[Markup]:  # fmt: skip
    """The verdict: a sentence, a table, and every disagreement with its reading."""
    best = [found[0] for found in findings.values() if found]
    counted = {one.label: _counted(one, findings[one.label]) for one in experiments}
    verdicts = Counter(claim.verdict for claims in counted.values() for claim in claims)
    own = Counter(c.verdict for found in best for c in found.claims if c.ours)
    yield tag("h1", TITLE)
    yield tag("p", "Every table and figure of arXiv 2310.01165, measured again with curvlab.",
              class_="soft")  # fmt: skip
    if not best:
        yield tag("p", "There are no results yet. ", tag("code", "python -m experiments run all"),
                  " makes those of the smallest size.", class_="lead")  # fmt: skip
    yield tag(
        "p",
        f"Of {verdicts.total()} statements of the paper, at its own size, ",
        tag("strong", _said(verdicts["agree"], "agrees", "agree"), class_="agree"),
        " with our results, ",
        tag("strong", _said(verdicts["disagree"], "disagrees", "disagree"),
            class_="disagree"), ", ",
        tag("strong", _said(verdicts["undecided"], "is undecided", "are undecided"),
            class_="undecided"),
        f" and {_said(verdicts['not tested'], 'is not tested', 'are not tested')}.",
        class_="lead",
    )  # fmt: skip
    if own:
        yield tag("p", f"Apart from these, {own['agree']} of {own.total()} checks of our own hold.",
                  class_="soft")  # fmt: skip
    head = ("Label", "The paper's statements", "Our checks", "Size", "Seeds", "Learned (a_tt)",
            "Core time")  # fmt: skip
    yield tag("h2", "Verdict", id="verdict")
    yield table(head, [
        _verdict(one, findings[one.label], counted[one.label]) for one in experiments
    ])  # fmt: skip
    yield tag("p", LEGEND, class_="soft")
    for verdict, title in (("disagree", "What disagrees"), ("undecided", "What is undecided")):
        yield from _listed(verdict, title, experiments, findings, counted)
    if missing := [one for one in experiments if not findings[one.label]]:
        yield _not_run(missing)


def _said(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def _listed(
    verdict: str,
    title: str,
    experiments: Sequence[Experiment],
    findings: Mapping[str, list[Finding]],
    counted: Mapping[str, list[Claim]],
) -> Iterator[Markup]:
    """The statements of one verdict, each with the figures and the reading behind it."""
    items = [
        tag("li", tag("a", one.label, href=f"#{findings[one.label][0].anchor}"), ": ",
            *_statement(claim))
        for one in experiments
        for claim in counted[one.label]
        if claim.verdict == verdict
    ]  # fmt: skip
    if items:
        yield tag("h2", title)
        yield tag("ul", *items)


def _statement(claim: Claim) -> list[object]:
    """The words, then figures and reading."""
    reading = f" Read as: {claim.reading}." if claim.reading else ""
    return [_dagger(str(claim.says)), tag("span", f" Measured: {claim.measured}.{reading}",
                                          class_="soft")]  # fmt: skip


def _not_run(experiments: Iterable[Experiment]) -> Markup:
    """The commands that would fill the gaps, at the smallest size that there is."""
    smallest = [(one, next(size for size in SIZES if size in one.sizes)) for one in experiments]
    items = [tag("li", _command(one, size)) for one, size in smallest]
    note = f"{count(len(items), 'experiment')} not run: the commands"
    return tag("details", tag("summary", note), tag("ul", *items))


def _command(experiment: Experiment, size: str) -> Markup:
    """What to type for one size, and what it costs."""
    command = f"python -m experiments run {shlex.quote(experiment.label)} --size {size}"
    command += " --data DIR" if size != "demo" and experiment.data != "none" else ""
    cost = experiment.cost.get(size)
    return joined([tag("code", command), f" ({cost})" if cost else None])


def _papers_size(experiment: Experiment) -> Markup:
    return tag("p", "The paper's size: ", _command(experiment, "full"), class_="soft")


def _verdict(
    experiment: Experiment, found: list[Finding], counted: Sequence[Claim]
) -> list[object]:
    names = joined([joined([tag("wbr"), name]) for name in experiment.labels], ", ")
    marks = _marks(counted)
    if not found:
        return [names, marks, "", tag("span", "not run", class_="untested"), *["–"] * 3]
    first = found[0]
    accuracies, low = first.learned()
    learned: object = ""
    if accuracies:
        span = f"{min(accuracies):.2f} to {max(accuracies):.2f}"
        learned = tag("span", f"⚠ {span}: barely", class_="warning") if low else span
    own = _marks([claim for claim in first.claims if claim.ours])
    took = "not known" if first.spent.training is None else duration(first.spent.total)
    size = f"{first.size} †" if first.earlier else first.size
    return [tag("a", names, href=f"#{first.anchor}"), marks, own, size, len(first.results),
            learned, took]  # fmt: skip


def _marks(claims: Sequence[Claim]) -> Markup:
    counts = Counter(claim.verdict for claim in claims)
    return joined(
        tag("span", f"{SIGNS[verdict][0]} {counts[verdict]}", class_=f"count {STYLES[verdict]}",
            title=SIGNS[verdict])
        for verdict in VERDICTS
        if counts[verdict]
    )  # fmt: skip


def _section(experiment: Experiment, found: list[Finding], pictures: Mapping[str, bytes]) -> Markup:
    first, *others = found
    folded = [
        tag("details",
            tag("summary", f"the same at size {other.size}, {count(len(other.results), 'seed')}"),
            *_body(other, pictures), id=other.anchor)
        for other in others
    ]  # fmt: skip
    return tag(
        "section",
        tag("h2", ", ".join(experiment.labels), " ",
            tag("span", f"{first.size}, {count(len(first.results), 'seed')}", class_="badge")),
        tag("p", experiment.what),
        _papers_size(experiment) if first.size != "full" and "full" in experiment.sizes else None,
        *_body(first, pictures),
        *folded,
        id=first.anchor,
    )  # fmt: skip


def _body(found: Finding, pictures: Mapping[str, bytes]) -> Iterator[Markup]:
    _, low = found.learned()
    if low:
        yield tag("p", "⚠ Some rows have an accuracy a_tt close to chance: they learned little, so "
                  "that they forget little means nothing.", class_="warning")  # fmt: skip
    small = found.size not in PAPERS
    if small and found.experiment.quotes:
        yield tag("p", "Smaller than the paper's: this does not count for or against it.",
                  class_="soft")  # fmt: skip
    for ours in (False, True):
        items = [
            tag("li", tag("span", SIGNS[claim.verdict], class_=f"verdict {STYLES[claim.verdict]}"),
                *_statement(claim))
            for claim in found.claims
            if claim.ours == ours
        ]  # fmt: skip
        if items and ours:
            yield tag("p", "Checks of our own:", class_="soft")
        if items:
            yield tag("ul", *items, class_="claims")
    for one in found.tables:
        yield _table(one, found)
    if found.anchor in pictures:
        yield _figure(found, pictures[found.anchor])
    yield provenance(found)


def _dagger(text: str) -> str:
    return text.replace("SGD-dagger", "SGD†")


def _table(one: Table, found: Finding) -> Markup:
    head = [joined([column, _near_note(found, one, column)]) for column in one.columns]
    rows = []
    for name, cells in one.rows.items():
        entries = [_cell(one, name, column, cells.get(column), found) for column in one.columns]
        rows.append([_dagger(name), *entries])
    beside = any(published(one.label, row, column) for row in one.rows for column in one.columns)
    note = "mean ± standard deviation" + ("; below it the paper's" if beside else "")
    caption = f"{one.label}: {one.title} ({note})"
    return table(["", *head], rows, caption, "data")


def _near_note(found: Finding, one: Table, column: str) -> Markup | None:
    """At the paper's size, how many cells of a column lie near the published ones."""
    pairs = [
        (cells[column], theirs)
        for name, cells in one.rows.items()
        if column in cells and (theirs := published(one.label, name, column)) is not None
    ]
    if found.size != "full" or not pairs:
        return None
    near = sum(_near(cell, theirs) for cell, theirs in pairs)
    title = "cells in which the two means are no further apart than the two deviations together"
    return tag("span", f"≈ {near}/{len(pairs)}", class_="theirs", title=title)


def _near(cell: Cell, theirs: tuple[float, float]) -> bool:
    return abs(cell.mean - theirs[0]) <= cell.std + theirs[1]


def _cell(one: Table, row: str, column: str, cell: Cell | None, found: Finding) -> Markup:
    theirs = published(one.label, row, column)
    below = None if theirs is None else tag("span", format_pair(*theirs), class_="theirs")
    if cell is None:
        return joined(["–", below])
    made = "\n".join(found.commands)
    ours = tag("a", str(cell), href=f"#made-{found.anchor}", title=made, class_="ours")
    return joined([ours, below])


def _figure(found: Finding, picture: bytes) -> Markup:
    data = base64.b64encode(picture).decode()
    what = f"Figure: {found.experiment.what}"
    links = [
        tag("a", kind.upper(), href=f"figures/{found.anchor}.{kind}") for kind in ("png", "pdf")
    ]
    return tag(
        "figure",
        tag("img", src=f"data:image/png;base64,{data}", alt=what, width=_width(picture)),
        tag("figcaption", "as ", joined(links, ", ")),
    )


def _width(picture: bytes) -> int:
    """In CSS pixels, 96 an inch as drawn: letters are of one size in all figures."""
    return int.from_bytes(picture[16:20], "big") * 96 // DPI
