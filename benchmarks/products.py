"""Hessian and Gauss-Newton products: every engine and peer on the three networks.

    python -m benchmarks.products [--size small|full] [--networks mlp resnet vit] [--out FILE.csv]

The gate: in float64 a contender must agree with plain autograd's product, which itself must agree
with central differences; in float32, as it is timed, to rounding. Only then is it timed,
interleaved with the unit, one gradient on the same data, each with the number of threads that suits
it best. Where curvlab multiplies float32 matrices with oneDNN, all that use torch do. Columns:
threads, time per vector in gradients (20 % - 80 %), time to set up (a user's checks and the first
product included; one sample) in gradients, peak memory of building and first product, relative
error in both precisions. "time over that of" another is the ratio inside the rounds. A contender
that is wrong or fails is shown as such and not timed. ``--compiled`` adds the compiled engine,
which takes minutes to set up.
"""

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.measure import (
    TRIED,
    Row,
    format_table,
    peak_memory,
    relative_error,
    row,
    threads_of,
    write_rows,
)
from benchmarks.networks import SIZES, Network
from benchmarks.plain import PLAIN, Product, steady, truth
from curvlab.bench import peers
from curvlab.bench.timing import (
    Quantiles,
    best_threads,
    environment,
    interleave,
    per_round_ratio,
    pinned_threads,
    quantiles,
    version_of,
)
from curvlab.float32 import EXACT, float32_products
from curvlab.operators import GaussNewton, Hessian

LIMIT64 = 1e-9  # relative error of a right product in float64
LIMIT = 1e-4  # and in float32
WIDTH = 16  # vectors in a block
UNIT = "one gradient"
OURS = "curvlab auto"
KINDS = {"hessian": Hessian, "gauss_newton": GaussNewton}


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to build a product, and how many vectors it is given at once."""

    name: str
    version: str
    build: Callable[[], Product]
    width: int = 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the gate found."""

    contender: Contender
    product: Product | None
    exactness: float  # relative error in float64
    error: float  # and in float32
    setup: float
    memory: int

    @property
    def right(self) -> bool:
        return self.product is not None and self.exactness <= LIMIT64 and self.error <= LIMIT


def contenders(
    network: Network, kind: str, compiled: bool, only: Sequence[str] = ()
) -> list[Contender]:
    """Plain autograd, curvlab's engines (``only`` those beginnings), and installed peers."""
    data = (network.inputs, network.targets)
    ours = version_of("curvlab")

    def engine(name: str) -> Callable[[], Product]:
        def build() -> Product:
            operator = KINDS[kind](network.model, network.loss, data, engine=name)  # type: ignore[arg-type]
            return lambda block: operator @ block

        return build

    engines = ["auto", "retained", "rebuilt", "linearised"]
    if compiled and kind == "hessian":
        engines.append("compiled")
    if network.name == "mlp":
        engines.append("mlp")

    def with_mkl() -> Product:
        operator = KINDS[kind](network.model, network.loss, data)
        operator.problem.matmul = EXACT
        return lambda block: operator @ block

    torch_version = str(torch.__version__)
    found = [Contender("plain autograd", torch_version, lambda: PLAIN[kind](network))]
    found += [Contender(f"curvlab {name}", ours, engine(name)) for name in engines]
    if network.switch != EXACT:
        found.append(Contender("curvlab auto, MKL", ours, with_mkl))
    if network.name == "mlp":
        found.append(Contender(f"curvlab mlp, {WIDTH} at once", ours, engine("mlp"), WIDTH))
    found = [
        one
        for one in found
        if not only or one.name.startswith(("plain", *(f"curvlab {name}" for name in only)))
    ]
    for peer in peers.installed(network.model, kind):
        name, version = peer.NAME, version_of(peer.DISTRIBUTION)
        build = partial(getattr(peer, kind), network.model, network.loss, [data])
        found.append(Contender(name, version, build))
        if network.name == "mlp" and peer.BLOCKS:
            found.append(Contender(f"{name}, {WIDTH} at once", version, build, WIDTH))
    return found


def enter(
    contender: Contender, double: Contender, block: Tensor, exact: Tensor, threads: int
) -> Outcome:
    """Build and multiply once, in float64 and in float32, and compare with the truth."""
    some, right = block[: contender.width], exact[: contender.width]
    made: list[Product] = []
    results: list[Tensor] = []
    seconds: list[float] = []

    def first() -> None:
        start = time.perf_counter()
        made.append(contender.build())
        results.append(made[0](some))
        seconds.append(time.perf_counter() - start)

    try:
        exactness = relative_error(double.build()(some.double()), right)
        memory = peak_memory(first, threads=threads)
    except Exception as reason:  # a peer may fail in any way of its own: say how, leave it out
        print(f"{contender.name} fails: {type(reason).__name__}: {str(reason)[:200]}")
        return Outcome(contender, None, float("inf"), float("inf"), 0.0, 0)
    error = relative_error(results[0], right)
    return Outcome(contender, made[0], exactness, error, seconds[0], memory)


def measure(network: Network, kind: str, options: argparse.Namespace) -> list[Row]:
    """Gate first, then time those that passed, interleaved with the gradient."""
    block = torch.randn(WIDTH, network.n, generator=torch.Generator().manual_seed(1))
    leaves = list(network.model.parameters())

    def gradient() -> None:
        loss = network.loss(network.model(network.inputs), network.targets)
        torch.autograd.grad(loss, leaves)

    gradient()  # buffers that libraries make at first use do not count
    exact = truth(network, kind, block if network.name == "mlp" else block[:1])
    pairs = zip(
        contenders(network, kind, options.compiled, options.only),
        contenders(network.double(), kind, options.compiled, options.only),
        strict=True,
    )
    most = max(options.threads)
    outcomes = [enter(one, double, block, exact, most) for one, double in pairs]
    calls: dict[str, Callable[[], object]] = {UNIT: gradient}
    for outcome in outcomes:
        if outcome.right and outcome.product is not None:
            some = block[: outcome.contender.width]
            calls[outcome.contender.name] = partial(outcome.product, some)
    clock = time.process_time if options.cpu_time else time.perf_counter
    threads = best_threads(calls, options.threads, clock=clock)
    seconds = interleave(calls, rounds=options.rounds, threads=threads, clock=clock)
    once = quantiles(seconds[UNIT])
    torch_version = str(torch.__version__)
    rows = [
        row(kind, UNIT, "time", "seconds", network.shown, once, threads=threads[UNIT],
            version=torch_version)
    ]  # fmt: skip
    for outcome in outcomes:
        count = threads.get(outcome.contender.name, most)
        rows += _rows(network, kind, outcome, seconds, count)
    return rows


def _rows(
    network: Network, kind: str, outcome: Outcome, seconds: dict[str, list[float]], threads: int
) -> list[Row]:
    contender = outcome.contender
    figures: list[tuple[str, str, Quantiles | float]] = [
        ("error in float64", "relative", outcome.exactness),
        ("error in float32", "relative", outcome.error),
    ]
    if contender.name in seconds:
        ratios = per_round_ratio(seconds[contender.name], seconds[UNIT])
        per_vector = quantiles([ratio / contender.width for ratio in ratios])
        setup = outcome.setup / quantiles(seconds[UNIT]).p50
        figures += [
            ("time per vector", "gradients", per_vector),
            ("set-up", "gradients", setup),
            ("peak memory", "bytes", float(outcome.memory)),
        ]
        if contender.name == OURS:
            figures += [
                (
                    f"time over that of {other}",
                    "ratio",
                    quantiles(per_round_ratio(seconds[OURS], of)),
                )
                for other, of in seconds.items()
                if not other.startswith(("curvlab", UNIT)) and " at once" not in other
            ]
    return [
        row(
            kind,
            contender.name,
            metric,
            unit,
            network.shown,
            value,
            threads=threads,
            version=contender.version,
        )
        for metric, unit, value in figures
    ]


def table(rows: list[Row]) -> str:
    """One line per contender of one network and kind."""
    figures = {(entry.contender, entry.metric): entry for entry in rows}
    lines = []
    for entry in rows:
        if entry.metric != "error in float64":
            continue
        name, exactness = entry.contender, entry.p50
        error = figures[name, "error in float32"].p50
        line = [name, entry.version, "", "WRONG" if math.isfinite(exactness) else "fails", "", ""]
        if (name, "time per vector") in figures:
            spread = figures[name, "time per vector"]
            line[2] = threads_of(spread)
            line[3] = f"{spread.p50:.2f} ({spread.p20:.2f}-{spread.p80:.2f})"
            line[4] = f"{figures[name, 'set-up'].p50:.0f}"
            line[5] = f"{figures[name, 'peak memory'].p50 / 2**20:.0f}"
        lines.append([*line, f"{exactness:.0e}", f"{error:.0e}"])
    header = ["contender", "version", "threads", "gradients per vector", "set-up", "peak MiB"]
    header += ["error float64", "float32"]
    return format_table(header, lines)


def _use_once(network: Network) -> None:
    """Imports and buffers that a library makes at its first use do not count as set-up."""
    for kind in KINDS:
        for contender in contenders(network, kind, compiled=False):
            contender.build()(torch.ones(contender.width, network.n))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument(
        "--networks", nargs="+", choices=list(SIZES["full"]), default=list(SIZES["full"])
    )
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--compiled", action="store_true", help="also the compiled engine")
    parser.add_argument("--only", nargs="+", default=[], help="beginnings of curvlab's engines")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, nargs="+", default=[2, 1], help=TRIED)
    parser.add_argument("--cpu-time", action="store_true", help="for a busy machine; 1 thread")
    parser.add_argument("--out", help="write the rows to this .csv or .json")
    options = parser.parse_args()
    options.threads = [1] if options.cpu_time else options.threads
    most = max(options.threads)
    print(environment(most))
    rows: list[Row] = []
    with pinned_threads(most):
        _use_once(SIZES["small"]["mlp"]())
        for name in options.networks:
            network = steady(SIZES[options.size][name], 0.1 * LIMIT)
            for kind in options.kinds:
                with float32_products(network.switch):
                    some = measure(network, kind, options)
                rows += some
                print(
                    f"\n{kind} product, {name}: n = {network.n:,}, {network.samples} samples, "
                    f"one gradient = {1e3 * some[0].p50:.2f} ms"
                )
                print(table(some), flush=True)
                if options.out:  # after each: the next may take long
                    print("rows in", write_rows(options.out, rows), flush=True)


if __name__ == "__main__":
    main()
