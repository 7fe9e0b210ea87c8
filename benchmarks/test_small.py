"""The benchmarks under pytest-benchmark, at the small size, on the same measuring functions.

    pytest benchmarks                      # everything runs once and must be right
    pytest benchmarks --benchmark-enable   # and is timed, with pytest-benchmark's own options

The gate is the same as everywhere here: a contender that is wrong fails instead of being timed.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch

from benchmarks import append, conformance, dense_hessian, products, projection_contenders
from benchmarks.learner_networks import filled, population, stepping
from benchmarks.networks import SIZES, SMALL, Network
from benchmarks.plain import steady, truth
from benchmarks.spectra import outliers
from curvlab.bench.contest import Timing, enter
from curvlab.bench.gate import wanted
from curvlab.bench.problem import Problem
from curvlab.bench.solvers import contenders
from curvlab.bench.timing import Threads, pinned_threads
from curvlab.learners import SGD
from curvlab.operators import Hessian

Timer = Callable[..., Any]  # pytest-benchmark's fixture
THREADS = 1  # where this runs, other work runs too
WIDTH = products.WIDTH


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    with pinned_threads(THREADS):
        yield


@cache
def network(name: str) -> Network:
    return steady(SMALL[name], 0.1 * products.LIMIT)


def every_product() -> Iterator[tuple[str, str, str]]:
    """Network, kind of product, contender: installed peers included."""
    for name in SMALL:
        for kind in products.KINDS:
            for contender in products.contenders(SMALL[name](), kind, compiled=False):
                yield name, kind, contender.name


@pytest.mark.parametrize(("name", "kind", "contender"), list(every_product()))
def test_product(benchmark: Timer, name: str, kind: str, contender: str) -> None:
    net = network(name)
    one, double = (
        next(c for c in products.contenders(of, kind, compiled=False) if c.name == contender)
        for of in (net, net.double())
    )
    block = torch.randn(one.width, net.n, generator=torch.Generator().manual_seed(1))
    outcome = products.enter(one, double, block, truth(net, kind, block), THREADS)
    if not outcome.right and not contender.startswith("curvlab"):
        pytest.skip(f"{contender} is wrong by {outcome.exactness:.0e}: not timed")
    assert outcome.right
    benchmark(outcome.product, block)


SOLVERS = ("lanczos", "lanczos, uncertified", "block lanczos", "scipy eigsh, our product")


@pytest.mark.parametrize("solver", SOLVERS)
def test_solver(benchmark: Timer, solver: str) -> None:
    if solver.startswith("scipy"):
        pytest.importorskip("threadpoolctl")
    operator = outliers(10_000)
    found = Problem("small outliers", lambda: operator, operator, spectrum=operator.values)
    values, _ = wanted(found, 10, 1e-3)
    table, _ = contenders(found, 10, 1e-3, values, whole=False)
    settings = [Threads(THREADS, THREADS)]
    outcome = enter(found, table[solver], values, 1e-3, Timing(THREADS), settings)
    assert outcome.passes(1e-3)
    benchmark(table[solver].prepare(), outcome.effort)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
def test_projection(benchmark: Timer, dtype: str) -> None:
    given = projection_contenders.problem(20_000, 10)
    found = projection_contenders.curvlab(given, getattr(torch, dtype))
    assert found.leak <= 1e-3
    benchmark(found.run)


@pytest.mark.parametrize("style", ["torch_rows", "torch_columns", "python_loop", "gpm_matrices"])
def test_projection_in_the_styles_of_public_code(benchmark: Timer, style: str) -> None:
    found = getattr(projection_contenders, style)(projection_contenders.problem(20_000, 10))
    assert found.leak <= 1e-3
    benchmark(found.run)


def test_dense_hessian(benchmark: Timer) -> None:
    network = SMALL["mlp"]()
    assert dense_hessian.measure(network, 32, 1, THREADS)[0].p50 <= 1e-5  # its own gate
    operator = Hessian(network.model, network.loss, (network.inputs, network.targets))
    benchmark(operator.dense)


def test_appending_stays_orthonormal(benchmark: Timer) -> None:
    found = benchmark(append.accuracy, append.Size(10_000, (8, 500), (1, 1, 1), 1))
    off = [entry.p50 for entry in found if entry.metric == "orthogonality"]
    assert max(off) <= 5e-7


def test_no_prescribed_spectrum_is_silently_wrong(benchmark: Timer) -> None:
    name, (_, solve) = next(iter(conformance.solvers().items()))
    assert name == "lanczos"
    values = conformance.spectra()["multiplicity 4"]
    _, missed, _ = benchmark(conformance._run, solve, values, (4,), (0,))
    assert missed == 0


@pytest.mark.parametrize("directions", [0, 20])
def test_training_step(benchmark: Timer, directions: int) -> None:
    runs, batch = population(SIZES["full"]["mlp"]())
    learner = filled(runs, directions, torch.float32) if directions else SGD()
    benchmark(stepping(runs, learner, batch, []))
