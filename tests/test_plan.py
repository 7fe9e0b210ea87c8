"""The planner's arithmetic against the package's own, and its plans against what is measured."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.measure import peak_memory
from benchmarks.trained import SMALL, trained
from curvlab import GaussNewton, Hessian, lanczos
from curvlab.basis import basis_bytes
from curvlab.batches import read
from curvlab.eigen.products import Products
from curvlab.eigen.room import PASSING, Room, quota, solve_bytes
from curvlab.nets import mlp, slim_resnet18, vit_cifar
from curvlab.operators import FromFunction
from curvlab.operators.products.sizing import Cost
from curvlab.plan import MACHINES, plan, plan_counted, scaled
from curvlab.plan.cost import SCHEDULER, Unit, counted, measured
from curvlab.plan.formulae import communication, mean_rows, memories, products_needed
from curvlab.rows.sizes import row_bytes

GENERATOR = torch.Generator().manual_seed(0)
IMAGES = (
    torch.randn(12, 3, 16, 16, generator=GENERATOR),
    torch.randint(5, (12,), generator=GENERATOR),
)
UNIT = Unit(
    n=1_000_000, element=4, held=4_000_000, sample_bytes=1000.0,
    graph=Cost(8e6, 1e6, 16e6, 1.5e6), setup=(0.1, 0.01), product=(0.01, 0.002), row=1e-4,
    step=1e-3, how="x",
)  # fmt: skip


def plan_of(**changes):
    given = {
        "samples": 100, "k": 10, "tol": 1e-3, "tasks": 5, "available": 10**9, "ranks": 1,
        "bandwidth": 1e9,
    }  # fmt: skip
    return scaled(UNIT, **{**given, **changes})


@pytest.mark.parametrize(
    "name", ["mlp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("resnet", "vit"))]
)
def test_products_are_predicted_within_a_factor_of_two(name):
    network = trained(SMALL[name])
    operator = Hessian(network.model, network.loss, (network.inputs, network.targets))
    for k, tol in ((5, 1e-2), (10, 1e-3)):
        pairs = lanczos(operator, k, tol=tol, progress=False)
        data = network.inputs, network.targets
        planned = plan(network.model, network.loss, data, k=k, tol=tol)
        assert 0.5 < planned.products / pairs.matvecs < 2.0, (k, pairs.matvecs)


def test_a_harder_spectrum_is_seen_before():
    flat = torch.nn.Linear(40, 2)
    data = torch.randn(60, 40, generator=GENERATOR), torch.randint(2, (60,), generator=GENERATOR)
    stretched = data[0] * 0.8 ** torch.arange(40), data[1]
    hard, easy = (plan(flat, cross_entropy, given, k=5).products for given in (data, stretched))
    for given, planned in ((data, hard), (stretched, easy)):
        pairs = lanczos(Hessian(flat, cross_entropy, given), 5, dense=False, progress=False)
        assert 0.5 < planned / pairs.matvecs < 2.0
    assert easy < 0.8 * hard


@pytest.mark.parametrize("kind", [Hessian, GaussNewton])
def test_the_graph_is_as_large_as_the_operator_finds_it(kind):
    model = slim_resnet18(5, nf=4).eval()
    unit = measured(kind, model, cross_entropy, read(IMAGES), {}, k=3, tol=1e-2)
    operator = kind(model, cross_entropy, IMAGES)
    assert unit.graph.kept(12) == pytest.approx(operator.cost.kept(12), rel=0.1)
    assert unit.n == operator.n


def test_counting_without_memory_finds_the_same_graph():
    for make, shape in ((lambda: slim_resnet18(5, nf=4), 16), (lambda: _vit(), 32)):
        images = torch.randn(8, 3, shape, shape, generator=GENERATOR)
        batch = images, torch.randint(5, (8,), generator=GENERATOR)
        operator = Hessian(make().eval(), cross_entropy, batch)
        with torch.device("meta"):
            model = make()
        unit = counted(model, cross_entropy, batch, MACHINES["cpu"])
        assert unit.n == operator.n
        assert unit.graph.kept(8) == pytest.approx(operator.cost.kept(8), rel=0.15)
        assert unit.product[1] > 0.0


def test_flops_of_a_linear_layer_are_those_of_its_products():
    batch = torch.randn(8, 50), torch.randint(20, (8,))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(50, 40, bias=False), nn.Linear(40, 20, bias=False))
    unit = counted(model, cross_entropy, batch, dataclasses.replace(MACHINES["cpu"], flops=1 / 0.4))
    weights = 50 * 40 + 40 * 20
    # a product has two passes of two GEMMs per layer (fewer where the inputs are data)
    assert 4.0 <= unit.product[1] / weights <= 12.0


def test_memory_of_a_solve_is_predicted_on_a_network_large_enough_to_be_seen():
    model = mlp((400, 300, 200, 10), seed=0)
    data = torch.randn(600, 400, generator=GENERATOR), torch.randint(10, (600,))
    taken = []

    def solve():
        taken.append(lanczos(Hessian(model, cross_entropy, data), 5, progress=False).matvecs)

    solve()
    unit = measured(Hessian, model, cross_entropy, read(data), {}, k=5, tol=1e-3)
    # the products that were made: how well they are foretold is another question
    unit = dataclasses.replace(unit, effort=taken[0] / products_needed(5, 1e-3))
    planned = scaled(unit, 600, 5, 1e-3, 1, 10**10, 1, 1e9)
    assert planned.products == taken[0]
    assert planned.peak / peak_memory(solve, threads=1) == pytest.approx(1.0, abs=0.4)


def test_less_memory_rebuilds_graphs_and_then_does_not_fit():
    wide, narrow, none = (plan_of(available=size) for size in (10**10, 46 * 10**7, 10**8))
    assert wide.kept_chunks == wide.chunks
    assert narrow.kept_chunks < narrow.chunks
    assert narrow.fits
    assert narrow.seconds > wide.seconds
    assert narrow.peak <= narrow.available
    assert not none.fits
    assert any("k = " in line or "solver's rows" in line for line in none.advice)


def test_the_k_that_is_said_to_fit_fits_and_a_larger_one_does_not():
    for available in (4 * 10**8, 10**9, 5 * 10**9):
        most = plan_of(available=available).largest_k
        assert plan_of(available=available, k=most).fits
        assert not plan_of(available=available, k=2 * most + 10).fits


def test_the_memory_is_what_a_basis_takes():
    for found, dtype in zip(
        memories(12_345, 70, 10**7), (torch.float32, torch.float16, torch.int8), strict=True
    ):
        assert found.bytes == basis_bytes(12_345, 70, dtype)
        assert found.fits == (found.bytes <= 10**7)
        assert basis_bytes(12_345, found.rows_that_fit, dtype) <= 10**7


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 64])
def test_ranks_divide_rows_and_samples_and_pay_in_messages(ranks):
    one, many = plan_of(), plan_of(ranks=ranks)
    assert many.solver == pytest.approx(one.solver / ranks, rel=1e-6)
    assert many.data == pytest.approx(one.data / ranks, rel=0.3)
    traffic = communication(10**6, 50, ranks, 4)
    assert traffic.product == pytest.approx(2 * (ranks - 1) / ranks * 4e6)
    assert (many.communication_seconds == 0.0) == (ranks == 1)


def test_a_plan_reads_well_and_goes_to_json():
    text = str(plan_of(ranks=2))
    for words in ("parameters", "peak", "M in int8", "sent by each rank", "time per task"):
        assert words in text
    facts = plan_of().to_json()
    assert facts["fits"] is True
    assert facts["memories"][0]["dtype"] == "float32"


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match=r"k= is between 0 \(one product\) and n = 1000000"):
        plan_of(k=-1)
    with pytest.raises(ValueError, match="samples can be counted"):
        plan(nn.Linear(3, 2), cross_entropy, (torch.zeros(4, 3), torch.zeros(5).long()))


def test_a_product_alone_and_rows_in_little_room_are_planned_without_the_usual_rows():
    whole, alone = plan_of(available=10**10), plan_of(available=10**10, k=0)
    assert (alone.products, alone.solver) == (1, 0)
    # checks, search and result are not in memory at once
    assert alone.peak < whole.peak < alone.peak + whole.solver
    assert plan_of(available=10**10, k=0, probed=False).peak < alone.peak
    for room, rows in ((Room(rows=20), 20), (Room(file="rows"), 0), (Room(bytes=2 * 10**8), 36)):
        unit = scaled(UNIT, 100, 10, 1e-3, 1, 10**10, 1, 1e9, room=room)
        assert unit.solver == (rows + 10 + PASSING) * UNIT.n * UNIT.element
    with pytest.raises(ValueError, match=r"bytes=100000000\) is too little: k = 10 needs"):
        scaled(UNIT, 100, 10, 1e-3, 1, 10**10, 1, 1e9, room=Room(bytes=10**8))


@pytest.mark.parametrize(
    "options", [{"mode": "batch-statistics"}, {"chunk": "batch"}, {"chunk": 4}], ids=str
)
def test_samples_that_stay_together_are_planned_as_the_operator_computes_them(options):
    model = slim_resnet18(5, nf=4).eval()
    images = torch.randn(60, 3, 16, 16, generator=GENERATOR), torch.arange(60) % 5
    batches = [tuple(tensor[part] for tensor in images) for part in (slice(0, 30), slice(30, 60))]
    found = plan(model, cross_entropy, batches, k=0, memory=10**9, **options)
    operator = Hessian(model, cross_entropy, batches, budget=10**9, **options)
    chunks = len(operator.problem.chunks)
    assert (found.chunks, found.kept_chunks) == (chunks, operator._keep)
    size = 1 if operator.problem.whole else options["chunk"]
    working = operator.cost.peak(size) - operator.cost.kept(size)
    taken = chunks * operator.cost.kept(size) + working
    assert found.graph == pytest.approx(taken, rel=0.25)


def test_a_plan_that_fits_is_of_a_solve_that_begins():
    """The solver asks for all rows that it may use, also where few products would do."""
    usual = plan_of(available=10**10, samples=2)
    assert usual.products + 2 < 2 * 10 + 64
    between = (usual.peak + usual.asked) // 2
    found = plan_of(available=between, samples=2)
    assert found.peak < between < found.asked
    assert not found.fits
    (advice,) = [line for line in found.advice if "would not begin" in line]
    rows = int(advice.partition("rows=")[2].rstrip(")"))
    assert plan_of(available=between, samples=2, room=Room(rows=rows)).fits
    products = Products(FromFunction(lambda v: v, UNIT.n), None)
    begun = quota(products, 10, 1, Room(), copies=True)
    vectors = solve_bytes(begun.total, 10, row_bytes(UNIT.n, torch.float32))
    assert 0 < usual.asked - vectors < 0.05 * usual.asked


def test_few_rows_are_nearly_full_all_the_time_and_take_as_long_in_a_file():
    assert mean_rows(5, 20, 10**6, 4, Room(rows=1000)) == 10.0
    assert mean_rows(5, 10**6, 10**6, 4, Room(rows=20)) == pytest.approx(16.0, rel=1e-4)
    few, filed, many = (
        plan_of(available=10**10, room=room).orthogonalise_seconds
        for room in (Room(rows=20), Room(rows=20, file="rows"), Room())
    )
    assert few == filed < many


# Both on one core: the same work twice, and the second time beside another process that works.
BESIDE = """
import json, os, subprocess, sys, time
from curvlab.plan.cost import clock

def work():
    began = clock(), time.perf_counter(), time.process_time()
    for number in range(6_000_000):
        pass
    return clock() - began[0], time.perf_counter() - began[1], time.process_time() - began[2]

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
time.sleep(0.5)
beside = work()
other.kill()
began = clock()
time.sleep(0.2)
print(json.dumps([*beside, clock() - began]))
"""


@pytest.mark.skipif(not Path(SCHEDULER).exists(), reason="only Linux says how long a thread waited")
def test_the_clock_of_a_plan_stands_while_other_work_has_the_core():
    done = subprocess.run(
        [sys.executable, "-c", BESIDE], capture_output=True, text=True, check=True, timeout=120
    )
    own, wall, computed, slept = json.loads(done.stdout)
    assert wall > 1.4 * own
    assert own == pytest.approx(computed, rel=0.3)
    assert slept > 0.15


def test_counting_leaves_a_tied_model_tied_and_alone():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 4), nn.Linear(4, 6, bias=False))
    model[2].weight = model[0].weight
    model.train()
    tokens = torch.zeros(8, dtype=torch.int64)
    unit = counted(model, cross_entropy, (tokens, tokens), MACHINES["cpu"])
    assert unit.n == 6 * 4 + 4 * 4 + 4
    assert model[2].weight is model[0].weight
    assert model[0].weight.device.type == "cpu"
    assert model.training


def test_a_model_that_never_had_memory_can_be_planned():
    with torch.device("meta"):
        model = _vit()
    batch = torch.randn(2, 3, 32, 32), torch.randint(5, (2,))
    found = plan_counted(
        model, cross_entropy, batch, samples=10_000, machine=MACHINES["a100"], k=20, ranks=8
    )
    assert found.fits
    assert found.how.startswith("counted")


def _vit():
    return vit_cifar(5, hidden=32, depth=2, heads=4)


def test_a_solve_checks_an_operator_that_was_not_checked_when_it_was_made():
    file = Room(file="rows")
    checked, unchecked, product = (
        scaled(UNIT, 100, k, 1e-3, 1, 10**10, 1, 1e9, room=file, probed=probed)
        for k, probed in ((5, True), (5, False), (0, False))
    )
    assert checked.peak == unchecked.peak > product.peak


def test_vectors_of_a_narrow_operator_are_planned_as_the_solver_holds_them():
    room = Room(rows=20)
    narrow, usual = (
        scaled(dataclasses.replace(UNIT, element=e), 100, 8, 1e-3, 1, 10**10, 1, 1e9, room=room)
        for e in (2, 4)
    )
    assert narrow.solver == usual.solver + 4 * 4 * UNIT.n  # its eight vectors, rounded


def test_a_budget_is_advised_only_where_it_would_change_what_the_operator_does():
    def advised(available):
        found = scaled(UNIT, 100, 10, 1e-3, 1, available, 1, 1e9, budget=0.9 * available)
        return any("give the operator budget=" in line for line in found.advice)

    assert not advised(2 * 10**9)  # all graphs fit beside the rows either way
    assert advised(5 * 10**8)
