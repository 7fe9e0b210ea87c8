"""What experiments took, from the processor seconds in result lines: measured, not guessed."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.experiment import Experiment
from experiments.shelf import LABEL, Training
from experiments.store import Result, plain

PARTS = ("train_seconds", "after_task_seconds", "evaluate_seconds")


@dataclass(frozen=True)
class Spent:
    """Processor seconds of all seeds of one experiment at one size, as its runs were trained.

    Attributes:
        seeds: How many.
        measuring: The label itself, its runs being there.
        training: The runs, which other labels may share; ``None`` where a line of theirs is
            missing.
    """

    seeds: int
    measuring: float
    training: float | None

    @property
    def total(self) -> float:
        return self.measuring + (self.training or 0.0)

    def __str__(self) -> str:
        """``12 min for 5 seeds``, with the part that other labels may share."""
        if self.training is None:
            what = f"{duration(self.measuring)} without training"
        elif self.training > 0.1 * self.total:
            what = f"{duration(self.total)}, {duration(self.training)} of it training"
        else:
            what = duration(self.total)
        return f"{what} ({count(self.seeds, 'seed')}, measured)"


def spent(results: Sequence[Result], experiment: Experiment, size: str) -> Spent | None:
    """What ``experiment`` took at ``size``; ``None`` where ``results`` do not say."""
    own = {
        result.seed: result.seconds
        for result in results
        if result.label == experiment.label
        and (result.key == experiment.key(size, result.seed) or experiment.is_earlier(result, size))
    }
    if not own:
        return None
    trainings = experiment.trainings
    needed = dict.fromkeys(() if trainings is None else trainings(experiment.sizes[size]))
    shares = [_share(results, training, own) for training in needed]
    known = [share for share in shares if share is not None]
    # what they branch from is a training of its own; older results have none
    first = [_share(results, one, own) for one in dict.fromkeys(t.first_task() for t in needed)]
    training = sum(known) if len(known) == len(shares) else None
    if training is not None:
        training += sum(share for share in first if share is not None)
    return Spent(len(own), sum(own.values()), training)


def _share(results: Sequence[Result], training: Training, seeds: Iterable[int]) -> float | None:
    """Seconds of a training for ``seeds``; ``None`` unless all of them are known.

    Seeds that were trained side by side have equal notes, which count the seconds of all of them
    together and, unlike the line's own, those before an interruption too. Lines of any version of
    the code: its roundings take no time.
    """
    wanted, config = set(seeds), plain(training)
    lines = {
        one.seed: one
        for one in results
        if one.label == LABEL and one.seed in wanted and one.config == config
    }
    if len(lines) < len(wanted):
        return None
    together: dict[float, list[float]] = {}
    for line in lines.values():
        together.setdefault(_noted(line.metrics), []).append(line.seconds)
    return sum(max(noted, sum(seconds)) for noted, seconds in together.items())


def _noted(metrics: Mapping[str, Any]) -> float:
    """Processor seconds; of older results, which do not have them, seconds on the clock."""
    notes = metrics.get("notes", ())
    if any("cpu_seconds" in note for note in notes):
        return float(sum(note.get("cpu_seconds", 0.0) for note in notes))
    return float(sum(note.get(part, 0.0) for note in notes for part in PARTS))


def duration(seconds: float) -> str:
    """``45 s``, ``12 min``, ``2.5 h``."""
    if seconds < 100.0:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000.0 else f"{seconds / 3600:.1f} h"


def count(number: int, noun: str) -> str:
    """``1 seed``, ``5 seeds``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
