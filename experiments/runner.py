"""From labels to results: what is missing is computed, in one process or several."""

import os
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch

from experiments.experiment import Experiment
from experiments.registry import find
from experiments.shelf import Shelf, Training
from experiments.store import Result, Store
from experiments.tables import Metrics


@dataclass(frozen=True)
class Place:
    """Where to read and write; all that a process needs besides its work."""

    results: Path
    data: Path | None = None
    threads: int = 1
    progress: bool | None = None
    device: str = "cpu"

    @property
    def store(self) -> Store:
        return Store(self.results)


@dataclass(frozen=True)
class Work:
    """One label at one size for some seeds; with ``training``, only that run of it."""

    label: str
    size: str
    seeds: tuple[int, ...]
    training: Training | None = None

    @property
    def command(self) -> str:
        words = ["run", self.label, "--size", self.size, "--seeds", *map(str, self.seeds)]
        return f"python -m experiments {shlex.join(words)}"

    def __str__(self) -> str:
        what = self.label
        if self.training is not None:
            one = self.training
            what = f"{one.learner} on {one.stream}, rates {one.rates}"
        return f"{what} ({self.size}, seeds {' '.join(map(str, self.seeds))})"


def results_of(
    store: Store, experiment: Experiment, size: str, *, earlier: bool = False
) -> dict[int, Result]:
    """The newest result of every seed that belongs to the present configuration and version.

    Args:
        store: Where to look.
        experiment: Whose results.
        size: One of its sizes.
        earlier: Whether a seed without one may have a result whose trainings changed since.
    """
    lines = [result for result in store.results() if result.label == experiment.label]
    found = {one.seed: one for one in lines if earlier and experiment.is_earlier(one, size)}
    found |= {one.seed: one for one in lines if one.key == experiment.key(size, one.seed)}
    return dict(sorted(found.items()))


def measure(work: Work, place: Place) -> dict[int, Metrics]:
    """The metrics of a label, those that are missing computed now and appended to the store."""
    experiment, store = find(work.label), place.store
    command = work.command + (f" --device {place.device}" if place.device != "cpu" else "")
    shelf = Shelf(store, place.data, command, place.progress, place.device)
    if work.training is not None:
        shelf.runs(work.training, work.seeds)
        return {}
    config = experiment.sizes[work.size]
    known = results_of(store, experiment, work.size)
    missing = [seed for seed in work.seeds if seed not in known]
    for training in _trainings(experiment, config) if missing else ():
        shelf.runs(training, missing)  # side by side
    for seed in missing:  # one by one: what is measured stays when the next one fails
        # a lock for each seed: two processes with different seeds of a label do not wait
        with store.locked(f"label-{experiment.key(work.size, seed)}"):
            if seed in results_of(store, experiment, work.size):
                continue  # another process measured it meanwhile
            began = time.process_time()
            [metrics] = experiment.run(config, [seed], shelf).values()
            seconds = time.process_time() - began
            store.append([experiment.result(work.size, seed, metrics, seconds, command)])
    known = results_of(store, experiment, work.size)
    return {seed: known[seed].metrics for seed in work.seeds}


def trainings_of(work: Sequence[Work], place: Place) -> list[Work]:
    """The runs, each once, that ``work`` needs and that are not on the shelf yet."""
    wanted: dict[Training, set[int]] = {}
    origin: dict[Training, Work] = {}
    shelf = Shelf(place.store)
    for one in work:
        experiment = find(one.label)
        known = results_of(place.store, experiment, one.size)
        for training in _trainings(experiment, experiment.sizes[one.size]):
            missing = {
                seed for seed in one.seeds
                if seed not in known and not shelf.file(training, seed).exists()
            }  # fmt: skip
            if missing:
                wanted.setdefault(training, set()).update(missing)
                origin.setdefault(training, one)
    return [
        Work(origin[training].label, origin[training].size,
             tuple(seed for seed in _order(work) if seed in seeds), training)
        for training, seeds in wanted.items()
    ]  # fmt: skip


def shard(work: Sequence[Work], index: int, count: int) -> list[Work]:
    """Part ``index`` (from 1) of ``count``; the parts share nothing and leave nothing out.

    Seeds are kept together as far as possible: one machine then trains a seed's runs for all
    labels, and no run is trained twice.
    """
    pairs = [(seed, one) for seed in _order(work) for one in work if seed in one.seeds]
    part = pairs[len(pairs) * (index - 1) // count : len(pairs) * index // count]
    chosen = [(one, tuple(seed for seed in one.seeds if (seed, one) in part)) for one in work]
    return [Work(one.label, one.size, seeds, one.training) for one, seeds in chosen if seeds]


def each(work: Sequence[Work], place: Place, jobs: int) -> Iterator[tuple[Work, str | None]]:
    """Do all of it, ``jobs`` at a time; yields each piece when it ends, with its error if any."""
    if jobs == 1:
        torch.set_num_threads(place.threads)
        for one in work:
            try:
                measure(one, place)
            except Exception as error:
                yield one, _explain(error)
            else:
                yield one, None
        return
    yield from _side_by_side(work, place, jobs)


def _side_by_side(
    work: Sequence[Work], place: Place, jobs: int
) -> Iterator[tuple[Work, str | None]]:
    context = get_context("spawn")
    waiting, active = list(work), list[tuple[Work, SpawnProcess, Connection]]()
    try:
        while waiting or active:
            while waiting and len(active) < jobs:
                one = waiting.pop(0)
                reading, writing = context.Pipe(duplex=False)
                process = context.Process(target=_in_process, args=(one, place, writing))
                process.start()
                writing.close()
                active.append((one, process, reading))
            wait([process.sentinel for _, process, _ in active])
            ended = [entry for entry in active if not entry[1].is_alive()]
            active = [entry for entry in active if entry not in ended]
            for one, process, reading in ended:
                yield one, _last_words(process, reading)
    finally:
        # Ctrl-C reaches this process alone (the others are groups of their own), so that each of
        # them is told exactly once: a second signal would not let it write its checkpoint.
        for _, process, _ in active:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGINT)
        for _, process, _ in active:
            process.join()


def _last_words(process: SpawnProcess, reading: Connection) -> str | None:
    """The error that an ended process sent, or what its exit code says."""
    process.join()
    try:
        return str(reading.recv())
    except EOFError:
        return f"its process ended with code {process.exitcode}" if process.exitcode else None


def _in_process(one: Work, place: Place, writing: Connection) -> None:
    os.setpgrp()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # a shell may start what it puts in the background with Ctrl-C ignored, and that is inherited
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(place.threads)
    try:
        measure(one, place)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        writing.send(_explain(error))


def _end_with_parent() -> None:
    """End as on Ctrl-C when the parent is killed: nobody waits for the results any more."""
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGINT)  # it writes its checkpoint; the lock goes with it


def _explain(error: Exception) -> str:
    """Advice as it is; anything else with the place where it happened."""
    if isinstance(error, ValueError | FloatingPointError):
        return str(error)
    return "".join(traceback.format_exception(error))


def _order(work: Sequence[Work]) -> list[int]:
    return list(dict.fromkeys(seed for one in work for seed in one.seeds))


def _trainings(experiment: Experiment, config: Any) -> Sequence[Training]:
    return () if experiment.trainings is None else experiment.trainings(config)
