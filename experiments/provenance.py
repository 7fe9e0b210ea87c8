"""What stands behind the numbers of the page: commands, commits, versions, the runs they share."""

from collections.abc import Iterable

from experiments.choices import Algorithm
from experiments.costs import count, duration
from experiments.findings import Finding
from experiments.markup import Markup, joined, table, tag
from experiments.shelf import LABEL as RUN
from experiments.store import Result


def provenance(found: Finding) -> Markup:
    """The commands, times, commits and versions behind every number of a finding."""
    results = found.results.values()
    versions: dict[str, list[str]] = {}
    for result in results:
        for name, value in result.versions.items():
            versions.setdefault(name, []).append(str(value))
    facts = [
        f"seeds {' '.join(map(str, found.results))}",
        str(found.spent),
        f"commit {', '.join(dict.fromkeys(result.commit for result in results))}",
        *(f"{name} {', '.join(dict.fromkeys(values))}" for name, values in versions.items()),
    ]
    if found.earlier:
        seeds = " ".join(map(str, found.earlier))
        facts.insert(1, f"seeds {seeds} were trained by an earlier version of the code, whose "
                     "roundings differ: to be made again")  # fmt: skip
    files = joined(
        [tag("a", f"{name}.csv", href=f"tables/{name}.csv") for name, _ in found.files()], ", "
    )
    return tag(
        "div",
        *(tag("p", tag("code", command), class_="command") for command in found.commands),
        tag("p", "; ".join(facts), joined([". ", files]) if files else None, class_="facts"),
        id=f"made-{found.anchor}",
    )


def runs(results: Iterable[Result]) -> Markup | None:
    """The trained runs that the experiments share, one row per training."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        if result.label == RUN:
            groups.setdefault(str(sorted(result.config.items())), []).append(result)
    if not groups:
        return None
    rows = []
    for group in groups.values():
        config = group[0].config
        seeds = {result.seed: result for result in group}  # the newest of each seed
        learned = [
            row[-1] for one in seeds.values() for row in one.metrics.get("test_accuracy", [])
        ]
        rows.append([
            str(Algorithm(**config["learner"])),
            f"{config.get('stream')}, {config.get('network')}",
            f"{config.get('rates')}, {config.get('epochs')}",
            " ".join(map(str, sorted(seeds))),
            f"{sum(learned) / len(learned):.3f}" if learned else "–",
            duration(sum(one.seconds for one in seeds.values())),
        ])  # fmt: skip
    head = ("Learner", "Stream, network", "Rates, epochs", "Seeds", "Mean a_tt", "Time")
    note = f"{count(len(groups), 'training')}, shared by the experiments above"
    return tag("section", tag("details", tag("summary", note), table(head, rows)))


def unused(results: Iterable[Result], shown: set[str]) -> Markup | None:
    rest = sum(result.label != RUN and result.key not in shown for result in results)
    if not rest:
        return None
    return tag("p", f"{count(rest, 'result')} of other configurations or older versions of the "
               "code are in the file and not on this page.", class_="soft")  # fmt: skip
