"""What a results file says of each experiment and size: tables, claims, how much was learned."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from experiments.costs import Spent, spent
from experiments.experiment import SIZES, Experiment, file_name
from experiments.runner import results_of
from experiments.store import Result, Store
from experiments.tables import Table
from experiments.verdicts import Claim

# What guessing gives. A learner that covered less than a third of the way from there to 1 has
# little to forget; the paper's own CIFAR runs cover about 0.4 of it.
CHANCE = {
    "rotated_mnist": 0.1, "rotated_mnist_20": 0.1, "split_cifar10": 0.5,
    "split_cifar10_pixels": 0.5, "split_cifar100": 0.2,
    "mnist": 0.1, "cifar10": 0.5, "cifar100": 0.2,
}  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """What the results say about one experiment at one size."""

    experiment: Experiment
    size: str
    results: dict[int, Result]
    tables: list[Table]
    claims: list[Claim]
    spent: Spent

    @property
    def anchor(self) -> str:
        return f"{file_name(self.experiment.label)}-{self.size}"

    @property
    def metrics(self) -> dict[int, dict[str, Any]]:
        return {seed: result.metrics for seed, result in self.results.items()}

    @property
    def earlier(self) -> list[int]:
        """The seeds whose trainings changed since: they are due to be made again."""
        return [s for s, one in self.results.items() if self.experiment.is_earlier(one, self.size)]

    @property
    def commands(self) -> list[str]:
        return list(dict.fromkeys(result.command for result in self.results.values()))

    def learned(self) -> tuple[list[float], bool]:
        """All a_tt of its tables, and whether one is so low that forgetting says nothing."""
        found = [
            cell.mean
            for one in self.tables
            for cells in one.rows.values()
            for column, cell in cells.items()
            if column.startswith("a_tt") and not math.isnan(cell.mean)
        ]
        config = next(iter(self.results.values())).config
        streams = [CHANCE[name] for name in _streams(config) if name in CHANCE]
        chance = max(streams, default=CHANCE.get(self.experiment.data, 0.0))
        return found, any(accuracy < chance + (1.0 - chance) / 3.0 for accuracy in found)

    def files(self) -> Iterator[tuple[str, Table]]:
        """The tables with the stems of their CSV files."""
        several = Counter(one.label for one in self.tables)
        for number, one in enumerate(self.tables, start=1):
            part = f"-{number}" if several[one.label] > 1 else ""
            yield f"{file_name(one.label)}-{self.size}{part}", one


def findings_of(store: Store, experiment: Experiment) -> list[Finding]:
    """One per size that has results, the largest first."""
    found, lines = [], store.results()
    shown: list[object] = []
    for size in reversed(SIZES):
        if size not in experiment.sizes or experiment.sizes[size] in shown:
            continue  # some are so cheap that every size is the paper's
        shown.append(experiment.sizes[size])
        results = results_of(store, experiment, size, earlier=True)
        took = spent(lines, experiment, size) if results else None
        if took is not None:
            metrics = {seed: result.metrics for seed, result in results.items()}
            tables, claims = experiment.judged(size, metrics)
            found.append(Finding(experiment, size, results, tables, claims, took))
    return found


def _streams(config: object) -> Iterator[str]:
    """The values of all fields called ``stream`` in a configuration."""
    if isinstance(config, dict):
        for name, value in config.items():
            if name == "stream" and isinstance(value, str):
                yield value
            else:
                yield from _streams(value)
    elif isinstance(config, list):
        for entry in config:
            yield from _streams(entry)
