"""Steps per second of every learner at 1 and 5 seeds, against plain torch: a loop, and a stack.

    python -m benchmarks.learners [--seeds 1 5] [--rounds 11] [--only SGD OGD-GTL] [--out FILE.csv]

The network is the paper's MLP (18,010 parameters) on embedded Rotated-MNIST, batch 10. Naive: one
``nn.Module``, ``cross_entropy``, ``backward``, ``torch.optim.SGD`` and an index per batch. Stacked:
all seeds in batched products written by hand (:mod:`benchmarks.stacked`), the rival of several
seeds, with the same number of directions projected off. Every
learner first fills its memory, with a task or with random directions; one that does not do what it
promises (gradients of autograd, directions removed) is shown as wrong and not timed. All are timed
interleaved, each with the number of threads that suits it best, in slabs of 64 steps of the same
code as ``learn`` repeats.

Columns: microseconds per step of all seeds; steps per second and run against the naive loop; the
stacked rival's time over ours; the step in units of plain SGD's at the same number of seeds; the
limit for that, SGD's step plus 1.3 times reading the learner's memory twice, and the step over it,
both inside the rounds; megabytes of memory per run; share of the projection.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.measure import (
    TRIED,
    Row,
    format_table,
    read,
    relative_error,
    row,
    threads_of,
    write_rows,
)
from benchmarks.stacked import stacked
from curvlab.bench.timing import best_threads, environment, interleave, per_round_ratio, quantiles
from curvlab.learners import (
    EWC,
    GPM,
    OGD,
    SGD,
    Learner,
    Population,
    SGDDagger,
    StackedMLP,
    Step,
    population_of,
)
from curvlab.learners.kwinners import HeterogeneousDropout
from curvlab.learners.packnet import PackNet
from curvlab.learners.powerprop import Powerpropagation
from curvlab.learners.progressive import Progressive
from curvlab.learners.spacenet import SpaceNet
from curvlab.nets import mlp
from curvlab.nets.kwinners import kwinners_mlp
from curvlab.nets.powerprop import powerpropagate
from curvlab.nets.progressive import progressive_mlp
from curvlab.tasks import Task, rotated_mnist
from curvlab.training import Evaluation, Schedule, learn
from curvlab.training.batches import SLAB, seed_batches
from curvlab.training.step import take_step

SIZES = (196, 50, 50, 50, 50, 10)
SEEDS = (11, 13, 21, 33, 55)
BATCH = 10
NAIVE = "naive torch"
STACKED = {  # ours: the directions of the stack written by hand that does the same
    "SGD": 0,
    "SGD-dagger, 20 directions": 20,
    "SGD-dagger, 80 directions": 80,
}
LEAK = 1e-3  # share of a gradient left in the memory's span, at which a contender counts as wrong


@dataclass(frozen=True, slots=True)
class Contender:
    """A learner, its network, and what fills its memory: a task, or so many random directions."""

    make: Callable[[], Learner]
    build: Callable[[int], nn.Module] = lambda seed: mlp(SIZES, seed=seed)
    random: int = 0


CONTENDERS = {
    "SGD": Contender(SGD),
    # which directions does not matter for time; 80 are four tasks with 20 eigenvectors each
    "SGD-dagger, 20 directions": Contender(lambda: SGDDagger(k=20), random=20),
    "SGD-dagger, 80 directions": Contender(lambda: SGDDagger(k=20), random=80),
    "SGD-dagger, 20 directions, float16": Contender(
        lambda: SGDDagger(k=20, storage=torch.float16), random=20
    ),
    "SGD-dagger, 80 directions, float16": Contender(
        lambda: SGDDagger(k=20, storage=torch.float16), random=80
    ),
    # the smaller epsilon, the more directions: few are used as rows, many as factors
    "OGD-GTL eps=.01, 1,000 samples": Contender(lambda: OGD(0.01)),
    "OGD-GTL eps=.001, 1,000 samples": Contender(lambda: OGD(0.001)),
    "OGD-GTL eps=.001, dense": Contender(lambda: OGD(0.001, structured=False)),
    "OGD all logits, 100 samples": Contender(lambda: OGD(0.01, samples=100, logits="all")),
    "GPM, augmented biases": Contender(lambda: GPM(0.99, bias="augmented")),
    "GPM, no biases": Contender(GPM, lambda seed: mlp(SIZES, bias=False, seed=seed)),
    "EWC": Contender(EWC),
    "PackNet": Contender(PackNet),
    "SpaceNet": Contender(
        lambda: SpaceNet((20,) * 4, (10,) * 4, (800, 200, 200, 200, 100)),
        lambda seed: mlp(SIZES, bias=False, seed=seed),
    ),
    "Powerpropagation": Contender(
        Powerpropagation, lambda seed: powerpropagate(mlp(SIZES, seed=seed))
    ),
    "k-winners on GPM": Contender(
        lambda: HeterogeneousDropout(GPM(0.99)), lambda seed: kwinners_mlp(SIZES, seed=seed)
    ),
    "Progressive, 2 columns": Contender(
        Progressive, lambda seed: progressive_mlp(SIZES, tasks=2, seed=seed)
    ),
}


def naive(task: Task) -> Callable[[], None]:
    """A slab of steps of the loop that everyone writes first."""
    model = mlp(SIZES, seed=SEEDS[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    order = torch.randperm(len(task.train), generator=torch.Generator().manual_seed(0))

    def slab() -> None:
        for step in range(SLAB):
            chosen = order[step * BATCH : (step + 1) * BATCH]
            optimizer.zero_grad()
            loss = cross_entropy(model(task.train.inputs[chosen]), task.train.targets[chosen])
            torch.autograd.backward(loss)
            optimizer.step()

    return slab


def prepared(
    contender: Contender, seeds: Sequence[int], tasks: Sequence[Task]
) -> tuple[Population, Learner]:
    """Runs that have learned the first task and stand at the beginning of the second."""
    learner = contender.make()
    population = population_of([contender.build(seed) for seed in seeds], seeds)
    teacher = SGD() if contender.random else learner
    learn(population, tasks[:1], teacher, Schedule(0.05), evaluation=Evaluation(train=0))
    if isinstance(learner, SGDDagger) and contender.random:
        learner.before_task(population, 0, tasks[0].train)
        for s in range(population.size):
            generator = torch.Generator().manual_seed(s)
            rows = torch.randn(contender.random, population.n, generator=generator)
            if learner.memory is not None:
                learner.memory.extend(s, rows, task=0, values=torch.zeros(len(rows)))
    population.begin_task(1)
    if not contender.random:
        learner.before_task(population, 1, tasks[1].train)
    return population, learner


def steps(
    population: Population, learner: Learner, index: int, task: Task, shares: list[float]
) -> Callable[[], None]:
    """A slab of the loop's steps; appends the share of time spent in the learner's transform_."""

    def slab() -> None:
        begun, inside = time.perf_counter(), 0.0
        batches = seed_batches(task.train, population.seeds, BATCH, task=index, epoch=0)
        for count, (inputs, targets) in enumerate(islice(batches, SLAB)):
            step = Step(index, count, 10**6, 0, 1, 1e-4)
            inside += take_step(population, learner, inputs, targets, step)
        shares.append(inside / (time.perf_counter() - begun))

    return slab


def error(population: Population, learner: Learner, index: int, task: Task) -> float:
    """What is wrong with a step: with plain gradients, or with what should have been removed."""
    inputs, targets = next(seed_batches(task.train, population.seeds, BATCH, task=index, epoch=0))
    population.gradient_(inputs, targets, index)
    errors = [0.0]
    if isinstance(population, StackedMLP):  # other networks are differentiated by autograd
        for s, model in enumerate(population.models):
            value = cross_entropy(model(inputs[s]), targets[s])
            exact = torch.autograd.grad(value, list(model.parameters()))
            truth = population.layout.flatten(exact)
            errors.append(relative_error(population.gradients[s], truth))
    before = population.gradients.double().norm(dim=1)
    learner.transform_(population)
    for s, rows in enumerate(protected(learner)):
        errors.append(float((rows @ population.gradients[s].double()).norm() / before[s]))
    return max(errors)


def protected(learner: Learner) -> list[Tensor]:
    """For each run, the orthonormal directions that its gradients may not have."""
    if isinstance(learner, SGDDagger) and learner.memory is not None:
        return [basis.rows().double() for basis in learner.memory.bases]
    if isinstance(learner, OGD):
        return learner.directions()
    return []


def memory_bytes(learner: Learner) -> list[int]:
    """Of each run."""
    if isinstance(learner, SGDDagger) and learner.memory is not None:
        return learner.memory.bytes
    noted = learner.notes[-1].get("memory_bytes", 0)
    return list(noted) if isinstance(noted, list) else [int(noted)]


def reading(sizes: Sequence[int], runs: int) -> Callable[[], None]:
    """Read each run's memory twice, one run after the other, as a projection has to."""
    bytes_of = [max(size, 4) for size in (sizes if len(sizes) == runs else list(sizes) * runs)]
    buffers = [torch.ones(size // 4) for size in bytes_of]

    def twice() -> None:
        for buffer in buffers:
            read(buffer)
            read(buffer)

    return twice


def measure(
    names: Sequence[str],
    count: int,
    rounds: int,
    tried: Sequence[int],
    clock: Callable[[], float] = time.perf_counter,
) -> list[Row]:
    """Rows of all figures for the named contenders at one number of seeds."""
    tasks = rotated_mnist()
    rows: list[Row] = []
    calls: dict[str, Callable[[], object]] = {NAIVE: naive(tasks[0])}
    shares: dict[str, list[float]] = {}
    sizes: dict[str, list[int]] = {}
    for name in names:
        population, learner = prepared(CONTENDERS[name], SEEDS[:count], tasks)
        wrong = error(population, learner, 1, tasks[1])
        rows.append(row("learners", name, "error", "", count, wrong, threads=max(tried)))
        if wrong <= LEAK:
            shares[name], sizes[name] = [], memory_bytes(learner)
            calls[name] = steps(population, learner, 1, tasks[1], shares[name])
            calls[f"read {name}"] = reading(sizes[name], count)
        if name in STACKED:
            rival, wrong = _stacked(name, count, tasks[1])
            rows.append(row("learners", f"stacked {name}", "error", "", count, wrong,
                            threads=max(tried), version=str(torch.__version__)))  # fmt: skip
            if wrong <= LEAK:
                calls[f"stacked {name}"] = rival
    threads = best_threads(calls, tried, clock=clock)
    for taken in shares.values():
        taken.clear()  # those of the search for threads
    seconds = interleave(calls, rounds=rounds, threads=threads, clock=clock)
    for name in shares:
        rows += figures(name, count, seconds, shares[name], sizes[name], threads[name])
    rivals = [NAIVE, *(name for name in calls if name.startswith("stacked"))]
    for name in rivals:  # its time stands in ours' ratios; the row says with how many threads
        micro = quantiles([1e6 * second / SLAB for second in seconds[name]])
        rows.append(row("learners", name, "step", "us", count, micro, threads=threads[name],
                        version=str(torch.__version__)))  # fmt: skip
    return rows


def _stacked(name: str, count: int, task: Task) -> tuple[Callable[[], None], float]:
    models = [CONTENDERS[name].build(seed) for seed in SEEDS[:count]]
    rival, wrong = stacked(models, task, SEEDS[:count], STACKED[name], BATCH)
    return lambda: rival(SLAB), wrong


def figures(
    name: str,
    count: int,
    seconds: dict[str, list[float]],
    shares: list[float],
    sizes: list[int],
    threads: int,
) -> list[Row]:
    """The rows of one learner at one number of seeds."""
    step = [second / SLAB for second in seconds[name]]
    plain = [second / SLAB for second in seconds["SGD"]]
    gain = per_round_ratio([second * count for second in seconds[NAIVE]], seconds[name])
    limit = [
        (one + 1.3 * read) / one for one, read in zip(plain, seconds[f"read {name}"], strict=True)
    ]
    over = [one / (base * most) for one, base, most in zip(step, plain, limit, strict=True)]
    figures = {
        ("step", "of the limit"): over,
        ("step", "us"): [second * 1e6 for second in step],
        ("speed per run", "naive"): gain,
        ("step", "SGD steps"): per_round_ratio(step, plain),
        ("limit", "SGD steps"): limit,
        ("memory", "MB per run"): [sum(sizes) / len(sizes) / 1e6],
        ("transform", "share of step"): shares,
    }
    if f"stacked {name}" in seconds:
        against = per_round_ratio(seconds[f"stacked {name}"], seconds[name])
        figures["speed", "stacked torch"] = against
    return [
        row("learners", name, metric, unit, count, quantiles(values), threads=threads)
        for (metric, unit), values in figures.items()
    ]


def table(rows: Sequence[Row]) -> str:
    """One line per learner and number of seeds."""
    found: dict[tuple[str, float | str], dict[tuple[str, str], Row]] = {}
    for entry in rows:
        found.setdefault((entry.contender, entry.x), {})[entry.metric, entry.unit] = entry
    columns = {
        "us/step": ("step", "us"),
        "of limit": ("step", "of the limit"),
        "x naive": ("speed per run", "naive"),
        "x stacked": ("speed", "stacked torch"),
        "x SGD": ("step", "SGD steps"),
        "limit": ("limit", "SGD steps"),
        "MB/run": ("memory", "MB per run"),
        "projection": ("transform", "share of step"),
        "error": ("error", ""),
    }
    lines = []
    for (name, count), cells in sorted(found.items(), key=lambda item: float(item[0][1])):
        right = ("error", "") not in cells or cells["error", ""].p50 <= LEAK
        absent = "-" if right else "wrong"
        shown = [f"{cells[key].p50:.3g}" if key in cells else absent for key in columns.values()]
        threads = threads_of(cells["step", "us"]) if ("step", "us") in cells else absent
        lines.append([name, f"{count:.0f}", threads, *shown])
    return format_table(["learner", "seeds", "threads", *columns], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 5])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, nargs="+", default=[2, 1], help=TRIED)
    parser.add_argument("--cpu-time", action="store_true", help="for a busy machine; 1 thread")
    parser.add_argument("--only", nargs="+", default=[], help="beginnings of learners' names")
    parser.add_argument("--out", help="write the rows to this .csv or .json")
    options = parser.parse_args()
    tried = [1] if options.cpu_time else options.threads
    clock = time.process_time if options.cpu_time else time.perf_counter
    print(environment(max(tried)))
    chosen = [
        name
        for name in CONTENDERS
        if not options.only or name == "SGD" or name.startswith(tuple(options.only))
    ]
    rows: list[Row] = []
    for count in options.seeds:
        new = measure(chosen, count, options.rounds, tried, clock)
        print(table(new), flush=True)
        rows += new
        if options.out:  # after each: the next takes minutes
            print("rows in", write_rows(options.out, rows), flush=True)


if __name__ == "__main__":
    main()
