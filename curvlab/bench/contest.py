"""Who is fast: solvers that passed the gate, timed in rounds, each with its best threads.

A sample builds the operator and solves, between two gradients on the same data. Both together are
what a user pays the first time; the solve alone is what the next one costs. The first run, which
may compile and load, only counts for the gate. A solver that passes is then run once with every
number of threads to choose the best; the rounds after that are reported. The gradient also runs
with its best number of threads. Ratios are taken inside a round. Where curvlab multiplies float32
matrices with oneDNN (:mod:`curvlab.float32`), all that use torch do.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from curvlab.bench.gate import judged, wanted
from curvlab.bench.problem import Answer, Problem
from curvlab.bench.solvers import Contender, Solve, contenders
from curvlab.bench.timing import (
    Threads,
    best_threads,
    per_round_ratio,
    pinned_threads,
    seconds_of,
    synchronise,
    usual_threads,
)
from curvlab.float32 import EXACT, float32_products
from curvlab.operators import Curvature

SEEN = 0.02  # seconds that a call must last for the clock to resolve it
SHORT = 3.0  # a fast solver gets samples for at least these seconds, however many rounds
MOST_ROUNDS = 9
STEADY = 5.0  # from this many seconds on, a first run may be used to compare threads
LONG = 20.0  # from this many seconds on, a first run counts as a sample: loading is small beside
REFERENCE = "lanczos"  # whose time the others are compared with


@dataclass(frozen=True, slots=True)
class Timing:
    """How time is taken: elapsed, or CPU time on one thread where other work runs."""

    threads: int
    clock: Callable[[], float] = time.perf_counter

    def gradient(self, found: Problem) -> float:
        """Seconds of one gradient; 1 where there is none, so that the unit stays seconds.

        The least of two, each repeated until the clock can see it: it is called around every solve
        and must cost less than one.
        """
        if found.gradient is None:
            return 1.0
        with pinned_threads(self.threads):
            once = seconds_of(found.gradient, 1)
            repeats = max(1, round(SEEN / max(once, 1e-9)))
            return min(seconds_of(found.gradient, repeats, self.clock) for _ in range(2))


@dataclass(frozen=True, slots=True)
class Sample:
    """Time of one run, in gradients (or in seconds where there are none)."""

    set_up: float
    solve: float
    seconds: float

    @property
    def whole(self) -> float:
        return self.set_up + self.solve


@dataclass(slots=True)
class Outcome:
    """What the gate found, the best threads, and the samples taken with them.

    Attributes:
        first_residual: At the solver's own defaults.
        failure: The error that ended it, if one did.
    """

    contender: Contender
    answer: Answer
    effort: float
    residual: float
    missing: int
    first_residual: float
    threads: Threads
    failure: str = ""
    samples: list[Sample] = field(default_factory=list)

    def passes(self, tol: float) -> bool:
        return self.residual <= tol and self.missing == 0

    def against(self, reference: "Outcome", reused: bool = False) -> list[float]:
        """The reference's time over this one's, round by round."""
        rounds = min(len(self.samples), len(reference.samples))
        times = [
            [one.solve if reused else one.whole for one in of.samples[:rounds]]
            for of in (reference, self)
        ]
        return per_round_ratio(*times)


@dataclass(frozen=True, slots=True)
class Contest:
    """All outcomes of one problem, by name; who took no part, and why.

    Attributes:
        way: Where the wanted values come from.
    """

    found: Problem
    k: int
    tol: float
    way: str
    outcomes: dict[str, Outcome]
    absent: dict[str, str]


def sample(
    found: Problem, contender: Contender, effort: float, timing: Timing, threads: Threads
) -> tuple[Answer, Sample]:
    """One run, and its time in gradients measured right before and after it (or in seconds)."""
    before = timing.gradient(found)
    with threads.pinned():
        began = _now(timing)
        solve = contender.prepare()
        prepared = _now(timing)
        answer = solve(effort)
        done = _now(timing)
    unit = 0.5 * (before + timing.gradient(found))
    return answer, Sample((prepared - began) / unit, (done - prepared) / unit, done - began)


def _now(timing: Timing) -> float:
    synchronise()
    return timing.clock()


def enter(
    found: Problem,
    contender: Contender,
    truth: Tensor,
    tol: float,
    timing: Timing,
    settings: Sequence[Threads],
) -> Outcome:
    """Run at the contender's default, then with more effort until the gate lets it pass.

    One that passed tries the ``settings`` of threads and keeps to the fastest.
    """
    first = None
    for effort in contender.efforts:
        failure = ""
        try:
            answer, taken = sample(found, contender, effort, timing, settings[0])
            worst, missing = judged(found.operator, answer, truth, tol)
        # a library may fail in any way of its own, by exit() too: say how
        except (Exception, SystemExit) as reason:
            failure = f"{type(reason).__name__}: {str(reason)[:200]}"
            answer, taken = (truth, torch.zeros(0), 0), Sample(0.0, 0.0, 0.0)
            worst, missing = float("inf"), len(truth)
        first = worst if first is None else first
        outcome = Outcome(contender, answer, effort, worst, missing, first, settings[0], failure)
        if outcome.passes(tol):
            if len(settings) > 1:
                outcome.threads = _fastest(found, outcome, timing, settings, taken)
            elif taken.seconds >= LONG:
                outcome.samples.append(taken)
            break
    return outcome


def _fastest(
    found: Problem,
    outcome: Outcome,
    timing: Timing,
    settings: Sequence[Threads],
    first: Sample,
) -> Threads:
    times = {settings[0]: first.whole} if first.seconds >= STEADY else {}
    for threads in settings:
        if threads not in times:
            taken = sample(found, outcome.contender, outcome.effort, timing, threads)[1]
            times[threads] = taken.whole
    return min(times, key=times.__getitem__)


def _unit(found: Problem, timing: Timing, settings: Sequence[Threads]) -> Timing:
    """The clock, with the number of threads with which a gradient is fastest."""
    if found.gradient is None:
        return timing
    counts = list(dict.fromkeys(threads.torch for threads in settings))
    best = best_threads({"gradient": found.gradient}, counts, clock=timing.clock)
    return replace(timing, threads=best["gradient"])


def contest(
    found: Problem,
    k: int,
    tol: float,
    rounds: int,
    *,
    whole: bool = True,
    only: Sequence[str] = (),
    own: Mapping[str, Solve] | None = None,
    timing: Timing | None = None,
    settings: Sequence[Threads] = (),
    say: Callable[[str], object] = print,
) -> Contest:
    """Gate and time all solvers on one problem.

    Args:
        rounds: Samples of every solver. From two on it is the least: short solves get more.
        whole: Also solvers that need hundreds or thousands of products.
        only: Beginnings of names; the others are not run.
        own: A user's solvers by name.
        timing: The clock; elapsed time with torch's present threads by default.
        settings: Numbers of threads that everybody is tried with.
        say: Called with a line of progress.
    """
    timing = timing or Timing(torch.get_num_threads())
    settings = settings or usual_threads()
    of_model = found.operator.problem.matmul if isinstance(found.operator, Curvature) else EXACT
    with float32_products(of_model):  # the others, and the gradient, as fast as lanczos
        return _contest(found, k, tol, rounds, whole, only, own, timing, settings, say)


def _contest(
    found: Problem,
    k: int,
    tol: float,
    rounds: int,
    whole: bool,
    only: Sequence[str],
    own: Mapping[str, Solve] | None,
    timing: Timing,
    settings: Sequence[Threads],
    say: Callable[[str], object],
) -> Contest:
    timing = _unit(found, timing, settings)
    truth, way = wanted(found, k, tol)
    say(f"{found.name}: the wanted values are from {way}")
    table, absent = contenders(found, k, tol, truth, whole=whole, own=own)
    for start in only:
        if not any(name.startswith(start) for name in table):
            absent[start] = f"no solver's name begins so; there are {', '.join(table)}"
    outcomes = {}
    for name, contender in table.items():
        if only and not name.startswith(tuple(only)):
            continue
        outcomes[name] = one = enter(found, contender, truth, tol, timing, settings)
        say(f"{name}: {'right' if one.passes(tol) else one.failure or 'wrong'}")
    passed = {name: one for name, one in outcomes.items() if one.passes(tol)}
    names = list(passed)
    turns = dict.fromkeys(names, rounds)
    turn = 0
    while turn < max(turns.values(), default=0):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            one = passed[name]
            if len(one.samples) <= turn < turns[name]:
                taken = sample(found, one.contender, one.effort, timing, one.threads)[1]
                one.samples.append(taken)
                enough = int(SHORT / max(taken.seconds, 1e-3)) if rounds > 1 else 1
                turns[name] = max(turns[name], min(MOST_ROUNDS, enough))
        turn += 1
    return Contest(found, k, tol, way, outcomes, absent)
