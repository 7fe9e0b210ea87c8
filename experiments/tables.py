"""Tables beside the paper's numbers.

A cell holds its samples, one per seed (and per task pair where the paper averages over those too),
and prints as mean ± standard deviation with the published figure behind it.
"""

import csv
import io
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from curvlab.cli.output import table
from experiments.paper import published

Metrics = dict[str, Any]  # what one seed measured, as JSON: numbers, lists, nested dicts


@dataclass(frozen=True, slots=True)
class Cell:
    """Samples of one quantity."""

    samples: tuple[float, ...]

    @property
    def mean(self) -> float:
        return math.fsum(self.samples) / len(self.samples) if self.samples else math.nan

    @property
    def std(self) -> float:
        """Over the samples (population form, as the paper's five seeds are all there are)."""
        mean = self.mean
        return (
            math.sqrt(math.fsum((x - mean) ** 2 for x in self.samples) / len(self.samples))
            if self.samples
            else math.nan
        )

    def __str__(self) -> str:
        """``0.295 ± 0.031``; of one sample no deviation is known."""
        if len(self.samples) < 2:
            return _rounded(self.mean, abs(self.mean)) if self.samples else "-"
        return format_pair(self.mean, self.std)


@dataclass(slots=True)
class Table:
    """Rows and columns of cells for one label of the paper."""

    label: str
    title: str
    columns: tuple[str, ...]
    rows: dict[str, dict[str, Cell]] = field(default_factory=dict)

    def add(self, row: str, column: str, samples: Iterable[float]) -> None:
        """Put ``samples`` into a cell; the column must be one of the table's."""
        if column not in self.columns:
            raise ValueError(f"{self.label} has columns {self.columns}; got {column!r}")
        self.rows.setdefault(row, {})[column] = Cell(tuple(float(x) for x in samples))

    def mean(self, row: str, column: str) -> float:
        """A cell's mean; NaN where nothing was measured, so that no comparison with it holds."""
        cell = self.rows.get(row, {}).get(column)
        return math.nan if cell is None else cell.mean

    def __str__(self) -> str:
        lines = [["", *self.columns]]
        for name, cells in self.rows.items():
            line = [name]
            for column in self.columns:
                theirs = published(self.label, name, column)
                ours = str(cells[column]) if column in cells else "-"
                line.append(ours if theirs is None else f"{ours} [{format_pair(*theirs)}]")
            lines.append(line)
        beside = any(published(self.label, row, c) for row in self.rows for c in self.columns)
        note = "mean ± std" + ("; the paper's in brackets" if beside else "")
        head = f"{self.label}: {self.title}  ({note})"
        return f"{head}\n{table(lines[0], lines[1:])}"

    def to_csv(self) -> str:
        """One line per cell: label, row, column, mean, std, samples, the paper's mean and std."""
        out = io.StringIO()
        writer = csv.writer(out)
        writer.writerow(["label", "row", "column", "mean", "std", "samples", "paper", "paper_std"])
        for name, cells in self.rows.items():
            for column, cell in cells.items():
                theirs = published(self.label, name, column) or ("", "")
                writer.writerow(
                    [self.label, name, column, cell.mean, cell.std, len(cell.samples), *theirs]
                )
        return out.getvalue()


def format_pair(mean: float, std: float) -> str:
    """``0.295 ± 0.031``: as many decimals as show three digits of the larger one, at most four."""
    size = max(abs(mean), abs(std))
    return f"{_rounded(mean, size)} ± {_rounded(std, size)}"


def _rounded(value: float, size: float) -> str:
    if size > 999.5 or size == 0.0:  # zero means exactly that, not rounded to it
        return f"{value:,.0f}"
    decimals = 4 if size < 0.0995 else 3 if size < 0.995 else 2 if size < 99.5 else 1
    return f"{value:.{decimals}f}"
