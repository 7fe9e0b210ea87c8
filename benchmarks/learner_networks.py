"""What the projection costs beside a training step of the larger networks.

    python -m benchmarks.learner_networks [--networks resnet vit] [--size small|full] [--rows 20 80]
                                          [--dtype float32 float16] [--rounds 5] [--out FILE.csv]

One seed, batch 10, plain SGD against SGD-dagger with directions in its memory (random ones:
their values do not matter for time). Interleaved. Columns: milliseconds of plain SGD's step, of
SGD-dagger's step, of the projection in it; the projection in units of reading the memory twice;
memory; how much of a random vector is left in the memory's span.
"""

import argparse
from collections.abc import Callable, Sequence

import torch

from benchmarks.measure import Row, format_table, read, row, write_rows
from benchmarks.networks import SIZES, Network
from curvlab.bench.timing import environment, interleave, per_round_ratio, quantiles
from curvlab.learners import SGD, Learner, Population, SGDDagger, Step, population_of
from curvlab.learners.statistics import BatchNormPolicy
from curvlab.tasks.samples import Samples
from curvlab.training.step import take_step

BATCH = 10
STEP = Step(task=1, step=0, steps=1, epoch=0, epochs=1, lr=1e-6)


def population(network: Network) -> tuple[Population, Samples]:
    """The network as a population of one, and a batch for it."""
    one = population_of([network.model], [0], batchnorm=_policy(network))
    one.begin_task(1)
    repeat = -(-BATCH // network.samples)
    inputs = torch.cat([network.inputs] * repeat)[:BATCH]
    return one, Samples(inputs, torch.cat([network.targets] * repeat)[:BATCH])


def _policy(network: Network) -> BatchNormPolicy | None:
    has = any(isinstance(m, torch.nn.BatchNorm2d) for m in network.model.modules())
    return "freeze" if has else None


def filled(runs: Population, rows: int, dtype: torch.dtype) -> SGDDagger:
    """A learner whose memory holds ``rows`` random directions."""
    learner = SGDDagger(k=rows, storage=dtype)
    empty = Samples(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64))
    learner.before_task(runs, 0, empty)
    generator = torch.Generator().manual_seed(1)
    memory = learner.memory
    if memory is None:
        raise AssertionError("before_task makes the memory")
    for start in range(0, rows, 16):
        block = torch.randn(min(16, rows - start), runs.n, generator=generator)
        memory.bases[0].extend(block.to(runs.dtype))
    return learner


def measure(
    network: Network, counts: Sequence[int], dtypes: Sequence[str], rounds: int, threads: int
) -> list[Row]:
    """Rows of all figures for one network."""
    runs, batch = population(network)
    found: list[Row] = []
    for dtype in dtypes:
        for count in counts:
            learner = filled(runs, count, getattr(torch, dtype))
            if learner.memory is None:
                raise AssertionError("before_task makes the memory")
            basis = learner.memory.bases[0]
            inside: list[float] = []
            memory = torch.ones(basis.bytes // 4)

            def twice(memory: torch.Tensor = memory) -> None:
                read(memory)
                read(memory)

            calls = {
                "SGD": stepping(runs, SGD(), batch, []),
                "dagger": stepping(runs, learner, batch, inside),
                "read": twice,
            }
            # a sample is one step, so that the last `rounds` projections are those of the samples
            seconds = interleave(calls, rounds=rounds, threads=threads, shortest=0.0)
            inside = inside[-rounds:]
            vector = torch.randn(runs.n, generator=torch.Generator().manual_seed(2))
            basis.project_out_(vector)
            name = f"{network.name}, {count} rows, {dtype}"
            figures = {
                ("SGD step", "ms"): [second * 1e3 for second in seconds["SGD"]],
                ("SGD-dagger step", "ms"): [second * 1e3 for second in seconds["dagger"]],
                ("projection", "ms"): [second * 1e3 for second in inside],
                ("projection", "reads"): per_round_ratio(inside, seconds["read"]),
                ("memory", "MB"): [basis.bytes / 1e6],
                ("leak", ""): [float(basis.leak(vector))],
            }
            found += [
                row("learner networks", name, metric, unit, count, quantiles(v), threads=threads)
                for (metric, unit), v in figures.items()
            ]
    return found


def stepping(
    runs: Population, learner: Learner, batch: Samples, inside: list[float]
) -> Callable[[], None]:
    """One step; appends the seconds spent in the projection."""
    inputs, targets = batch.inputs.unsqueeze(0), batch.targets.unsqueeze(0)

    def step() -> None:
        inside.append(take_step(runs, learner, inputs, targets, STEP))

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--networks", nargs="+", choices=["resnet", "vit"], default=["resnet"])
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--rows", type=int, nargs="+", default=[20, 80])
    parser.add_argument("--dtype", nargs="+", default=["float32", "float16"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", help="write the rows to this .csv or .json")
    options = parser.parse_args()
    print(environment(options.threads))
    rows: list[Row] = []
    for name in options.networks:
        network = SIZES[options.size][name]()
        rows += measure(network, options.rows, options.dtype, options.rounds, options.threads)
    columns = ["SGD step ms", "SGD-dagger step ms", "projection ms", "projection reads",
               "memory MB", "leak"]  # fmt: skip
    cells: dict[str, dict[str, str]] = {}
    for entry in rows:
        shown = f"{entry.metric} {entry.unit}".strip()
        cells.setdefault(entry.contender, {})[shown] = f"{entry.p50:.3g}"
    lines = [[name, *(line[column] for column in columns)] for name, line in cells.items()]
    print(format_table(["network", *columns], lines))
    if options.out:
        print("rows in", write_rows(options.out, rows))


if __name__ == "__main__":
    main()
