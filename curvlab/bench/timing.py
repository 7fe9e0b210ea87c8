"""How time is taken: contenders interleaved, threads pinned, medians with a spread.

The machine changes speed while a comparison runs. So each round times every contender once, in a
rotating order, and ratios are taken inside a round: a slow minute slows both sides. Quantiles
(20 %, 50 %, 80 %) rather than means: one interrupted sample must not move the result.
"""

import gc
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import metadata, util
from pathlib import Path

import torch

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Quantiles:
    """20 %, 50 % and 80 % quantiles, and the number of samples they are taken of."""

    p20: float
    p50: float
    p80: float
    samples: int = 1


def quantiles(samples: Sequence[float]) -> Quantiles:
    """The three quantiles of ``samples``, interpolated linearly; one sample is its own spread."""
    if not samples:
        raise ValueError("quantiles needs at least one sample; got none")
    at = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    values = torch.quantile(torch.tensor(list(samples), dtype=torch.float64), at)
    p20, p50, p80 = values.tolist()
    return Quantiles(p20, p50, p80, len(samples))


def per_round_ratio(samples: Sequence[float], unit: Sequence[float]) -> list[float]:
    """``samples`` in units of ``unit``, round by round: both must come from one :func:`interleave`.

    A ratio of medians would compare a quiet minute with a busy one.
    """
    return [sample / one for sample, one in zip(samples, unit, strict=True)]


@dataclass(frozen=True, slots=True)
class Threads:
    """How many threads torch and the BLAS of NumPy and SciPy may use."""

    torch: int
    blas: int

    def __str__(self) -> str:
        return f"{self.torch}/{self.blas}"

    @contextmanager
    def pinned(self) -> Iterator[None]:
        with pinned_threads(self.torch):
            if not util.find_spec("threadpoolctl"):  # then nobody here uses that BLAS
                yield
                return
            from threadpoolctl import threadpool_limits

            with threadpool_limits(self.blas, user_api="blas"):
                yield


def usual_threads() -> tuple[Threads, ...]:
    """What every contender is tried with: all of torch's with one or all of the BLAS's, and one."""
    most = torch.get_num_threads()
    return tuple(dict.fromkeys((Threads(most, 1), Threads(most, most), Threads(1, 1))))


@contextmanager
def pinned_threads(threads: int) -> Iterator[None]:
    """Run with torch on ``threads`` threads, then restore the number."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def interleave(
    contenders: Mapping[str, Call],
    *,
    rounds: int = 11,
    warmup: int = 1,
    threads: int | Mapping[str, int] = 2,
    shortest: float = 0.02,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds per call of every contender, one sample per round.

    Args:
        contenders: Functions without arguments. They must do the same work at the same accuracy.
        rounds: Samples per contender.
        warmup: Untimed calls of each first.
        threads: torch's thread count while measuring, one for all or one for each.
        shortest: A sample repeats its call until it lasts about this many seconds, so that the
            clock and the call overhead do not count.
        clock: ``time.perf_counter`` for elapsed time, ``time.process_time`` for CPU time.

    Returns:
        For each contender a list of ``rounds`` figures; entry ``i`` of all lists is one round.
    """
    if rounds < 1:
        raise ValueError(f"interleave needs rounds >= 1; got {rounds}")
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    counts = threads if isinstance(threads, Mapping) else dict.fromkeys(contenders, threads)
    with _collector_off():
        repeats = {}
        for name, call in contenders.items():
            with pinned_threads(counts[name]):
                for _ in range(warmup):
                    call()
                once = seconds_of(call, 1, time.perf_counter)
            repeats[name] = max(1, round(shortest / max(once, 1e-9)))
        names = list(contenders)
        for turn in range(rounds):
            first = turn % len(names)  # nobody always runs after the same neighbour's cache
            for name in names[first:] + names[:first]:
                with pinned_threads(counts[name]):
                    seconds[name].append(seconds_of(contenders[name], repeats[name], clock))
            gc.collect()
    return seconds


def best_threads(
    contenders: Mapping[str, Call],
    counts: Sequence[int],
    *,
    rounds: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, int]:
    """The number of torch's threads with which each contender is fastest, the least of its samples.

    Args:
        counts: Numbers that everybody is tried with; one alone is taken untried.
        rounds: Samples of each with each; one is enough where a call lasts a second.
    """
    if len(counts) == 1:
        return dict.fromkeys(contenders, counts[0])
    least: dict[str, dict[int, float]] = {}
    for name, call in contenders.items():
        call()  # what is compiled and loaded at first use chooses nothing
        least[name] = {}
        for count in counts:
            with pinned_threads(count):
                once = seconds_of(call, 1, clock)
                repeats = max(1, round(0.01 / max(once, 1e-9)))
                more = 0 if once >= 1.0 else rounds
                samples = [once, *(seconds_of(call, repeats, clock) for _ in range(more))]
            least[name][count] = min(samples)
    return {name: min(times, key=times.__getitem__) for name, times in least.items()}


def seconds_of(call: Call, repeats: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one call, the mean of ``repeats`` calls."""
    synchronise()
    start = clock()
    for _ in range(repeats):
        call()
    synchronise()
    return (clock() - start) / repeats


def synchronise() -> None:
    """Wait for the GPU, where there is one: launches return before the work is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextmanager
def _collector_off() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.collect()
    gc.freeze()  # what is there now is not looked through again after every round
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()


def version_of(package: str) -> str:
    """The version of an installed distribution, or ``""`` if it is not installed."""
    if package == "curvlab":
        from curvlab import __version__

        return __version__
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


@cache
def environment(threads: int) -> str:
    """The machine and the libraries in one line: ratios are comparable only where it agrees."""
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
    return "; ".join(
        [
            f"{_processor()} ({os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()})",
            device,
            f"{threads} threads",
            f"{platform.system()} {platform.machine()}",
            f"python {platform.python_version()}",
            f"torch {torch.__version__}",
            f"numba {version_of('numba') or 'not installed'}",
        ]
    )


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    if information.is_file():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown processor"


@cache
def command() -> str:
    """The command of this process, as it can be typed again."""
    given = [*sys.orig_argv]
    given[0] = "python"
    first = Path(given[1]) if len(given) > 1 else Path()
    if first.name == "curvlab":  # the installed script
        given[:2] = ["curvlab"]
    return shlex.join(given)
