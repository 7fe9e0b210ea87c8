"""What every label of the paper looks like to the command line and the report page.

A module ends in ``EXPERIMENT = Experiment(...)``. Its ``run`` turns a configuration and seeds into
metrics: JSON that holds all that its tables, claims and figure need. Those three read metrics
alone, so a results file rebuilds the page without data, training or a second measurement.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.shelf import Shelf, Training
from experiments.store import Result, key_of, make_result
from experiments.tables import Metrics, Table
from experiments.verdicts import Claim, Quote, untested

# From the smallest to the one that counts most. "tenth" is the paper's network on a tenth of its
# images. The last four are the paper's size: "half" trains in bfloat16 and takes Hessians of fewer
# samples, "raw" has inputs in 0..1 where "few" and "full" have them normalised, which fits the
# paper better, and "few" leaves out parts that would take longest and says which.
SIZES = ("demo", "scaled", "tenth", "half", "raw", "few", "full")
PAPERS = ("half", "raw", "few", "full")
SEEDS = (11, 13, 21, 33, 55)  # the paper's

BySeed = Mapping[int, Metrics]
FIRST = "1"  # the version of everything that never changed


@dataclass(frozen=True)
class Experiment:
    """One experiment, which may answer several labels.

    Args:
        label: As in the paper, ``"tab:VOC"``.
        what: One line.
        data: ``"none"``, ``"mnist"``, ``"cifar10"`` or ``"cifar100"``; what ``scaled`` and ``full``
            read from files (``demo`` takes embedded data).
        sizes: Names of ``SIZES`` to the module's frozen ``Config``.
        run: ``(config, seeds, shelf)`` to the metrics of each seed, which may not depend on the
            other seeds.
        tables: ``(config, metrics by seed)`` to tables.
        claims: ``(config, metrics by seed, tables)`` to verdicts on ``quotes`` and on checks of our
            own.
        quotes: What the paper states under these labels; those without a verdict are not tested.
        cost: A size to what it takes: ``"2 min"``, ``"1 h on one A100 (estimate, not run)"``.
        figure: ``(config, metrics by seed, path)`` draws ``path.png`` and ``path.pdf`` (the path
            comes without a suffix); ``None`` where the paper has a table only.
        trainings: The runs that ``run`` will ask of the shelf: they are trained before it measures,
            all seeds side by side, and with ``--jobs`` different ones in different processes.
        also: Further labels of the paper that this experiment answers.
        version: Raised when a change of the code changes the metrics: old results stop counting.
            When only that of a training changed, results are shown as earlier ones until they are
            made again.
    """

    label: str
    what: str
    data: str
    sizes: Mapping[str, Any]
    run: Callable[[Any, Sequence[int], Shelf], dict[int, Metrics]]
    tables: Callable[[Any, BySeed], list[Table]]
    claims: Callable[[Any, BySeed, list[Table]], list[Claim]]
    quotes: tuple[Quote, ...] = ()
    cost: Mapping[str, str] = field(default_factory=dict)
    figure: Callable[[Any, BySeed, Path], None] | None = None
    trainings: Callable[[Any], Sequence[Training]] | None = None
    also: tuple[str, ...] = ()
    version: str = FIRST

    def judged(self, size: str, metrics: BySeed) -> tuple[list[Table], list[Claim]]:
        """Tables, and a verdict on every statement of the paper and every check of our own."""
        config = self.sizes[size]
        tables = self.tables(config, metrics)
        found = self.claims(config, metrics, tables)
        known = {claim.says for claim in found}
        rest = [untested(quote, "not run") for quote in self.quotes if quote not in known]
        return tables, [*found, *rest]

    def code(self, size: str) -> str:
        """The version of the code behind a result: its own, and those of its trainings."""
        trainings = () if self.trainings is None else self.trainings(self.sizes[size])
        changed = sorted({one.version for one in trainings} - {FIRST})
        return "; ".join([self.version, *(f"trained by {version}" for version in changed)])

    def key(self, size: str, seed: int) -> str:
        """Of the result line of ``seed``."""
        return key_of(self.label, self.sizes[size], seed, self.code(size))

    def is_earlier(self, result: Result, size: str) -> bool:
        """Whether a line of this configuration and version has trainings that changed since."""
        code = str(result.versions.get("code"))
        same = result.key == key_of(self.label, self.sizes[size], result.seed, code)
        return same and code.split("; ")[0] == self.version and code != self.code(size)

    def result(
        self, size: str, seed: int, metrics: Metrics, seconds: float, command: str
    ) -> Result:
        """A result line of this checkout, now."""
        return make_result(self.label, size, seed, self.sizes[size], metrics, seconds,
                           self.code(size), command)  # fmt: skip

    @property
    def labels(self) -> tuple[str, ...]:
        """All labels of the paper that it answers."""
        return (self.label, *self.also)


def rounded(value: Any) -> Any:
    """JSON numbers to 6 significant digits, through lists and dictionaries: results stay small."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {str(key): rounded(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(entry) for entry in value]
    return value


def file_name(label: str) -> str:
    """A label as the stem of a file's name."""
    return "".join(letter if letter.isalnum() else "-" for letter in label)
