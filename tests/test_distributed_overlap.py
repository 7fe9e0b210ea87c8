"""What travels between ranks, and when: sums that begin during the backward pass, counted bytes."""

import functools
import os
import signal
import time

import pytest
import torch
from torch.nn.functional import cross_entropy

from curvlab.basis import Basis
from curvlab.distributed import DataParallel, RankError, Sharded, Shards, launch
from curvlab.operators import FromFunction, GaussNewton, Hessian
from curvlab.plan.formulae import communication
from tests.small_problems import tanh_network

pytestmark = pytest.mark.distributed

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}
RANKS = [2, pytest.param(4, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)]
WIDTHS = (9, 30, 17, 3)
SAMPLES = 29


def own(group):
    """This rank's samples: the last rank has most, the one before it none if there are many."""
    cuts = [*range(group.size), SAMPLES]
    if group.size > 2:
        cuts[-2] = cuts[-3]
    return slice(cuts[group.rank], cuts[group.rank + 1])


def distance(a, b):
    return float((a - b).norm() / b.norm())


def overlapped(group):
    """Products whose sums begin during the last backward pass, beside one sum after it."""
    found = {}
    cases = {
        "hessian": (Hessian, torch.float32, {}),
        "chunks": (Hessian, torch.float32, {"chunk": 4}),
        "rebuilt": (Hessian, torch.float64, {"engine": "rebuilt"}),
        "gauss-newton": (GaussNewton, torch.float64, {"chunk": 4}),
    }
    for seed, (name, (kind, dtype, options)) in enumerate(cases.items()):
        model = tanh_network(WIDTHS, seed, dtype)
        generator = torch.Generator().manual_seed(seed)
        inputs = torch.randn(SAMPLES, WIDTHS[0], generator=generator, dtype=dtype)
        targets = torch.randint(WIDTHS[-1], (SAMPLES,), generator=generator)
        options = {"engine": "retained", **options}
        whole = kind(model, cross_entropy, (inputs, targets), **options)
        mine, part = own(group), None
        if mine.start < mine.stop:
            part = kind(model, cross_entropy, (inputs[mine], targets[mine]), **options)
        plain = DataParallel(part, overlap=None)
        pieces = DataParallel(part, overlap=64 * torch.finfo(dtype).bits // 8)
        vector = torch.randn(whole.n, generator=generator, dtype=torch.float64).to(dtype)
        before, reached = group.traffic.messages, []
        hook = None
        if part is not None:  # the last parameter that the pass comes to
            first = part.problem.parameters[0]
            hook = first.register_hook(lambda _, r=reached: r.append(group.traffic.messages))
        product = pieces @ vector
        after = group.traffic.messages
        if hook is not None:
            hook.remove()
        sharded, space = Sharded(pieces), Shards(whole.n, group)
        found[name] = {
            "dtype": dtype,
            "product": distance(product, whole @ vector),
            "sharded": distance(space.gather(sharded @ space.take(vector)), whole @ vector),
            "block": distance(
                pieces @ torch.stack([vector] * 2), whole @ torch.stack([vector] * 2)
            ),
            "same bits": torch.equal(product, plain @ vector),
            "repeats": torch.equal(product, pieces @ vector),
            "itself": product,
            "pieces": -(-whole.n // pieces.piece),
            "messages": after - before,
            "begun": reached[-1] - before if reached else None,
        }
    return found


def counted(group):
    """Messages and bytes of a product, a Lanczos step and an SGD-dagger step."""
    n, m = 64 * 40, 6
    spectrum = torch.linspace(0.0, 1.0, n)
    operator = DataParallel(FromFunction(lambda v: spectrum * v, n), samples=1 + group.rank)
    sharded, space = Sharded(operator), Shards(n, group)
    memory = Basis(Shards(n, group), m)
    memory.extend(space.take(torch.eye(n)[:m]))
    calls = {
        "product": lambda: sharded @ space.take(torch.ones(n)),
        "orthogonalise": lambda: memory.lanczos_step_(space.take(torch.ones(n)), 0.0),
        "step": lambda: memory.sgd_step_(
            [torch.zeros(n)], [space.sum_list([torch.ones(n)])], [], 0.1
        ),
    }
    found = {}
    for name, call in calls.items():
        messages, sent = group.traffic.messages, group.traffic.bytes
        call()
        found[name] = group.traffic.messages - messages, group.traffic.bytes - sent
    return found


def everything(group):
    return {"overlapped": overlapped(group), "counted": counted(group)}


@functools.cache
def brought_back(ranks):
    return launch(everything, ranks, timeout=60 + 30 * ranks, patience=30)


def results(case, ranks):
    return [one[case] for one in brought_back(ranks)]


@pytest.mark.parametrize("ranks", RANKS)
def test_sums_begin_during_the_last_backward_pass_and_change_no_result(ranks):
    everyone = results("overlapped", ranks)
    for name, found in everyone[0].items():
        for figure in ("product", "sharded", "block"):
            assert found[figure] <= TOLERANCE[found["dtype"]], (name, figure)
        assert found["repeats"], name
        assert found["messages"] == found["pieces"] + 1, name  # and what the ranks say of it
        assert all(torch.equal(one[name]["itself"], found["itself"]) for one in everyone), name
        if ranks == 2:  # two numbers have one sum; with more ranks the order is another
            assert found["same bits"], name
        begun = [one[name]["begun"] for one in everyone if one[name]["begun"] is not None]
        # all but the pieces with the first layer, which the pass reaches last
        assert min(begun) >= found["pieces"] - 6, name


@pytest.mark.parametrize("ranks", RANKS)
def test_what_a_rank_sends_is_what_the_planner_says(ranks):
    n, m = 64 * 40, 6
    planned = communication(n, m, ranks, 4)
    for found in results("counted", ranks):
        (product, sent), (step, coefficients), (train, trained) = found.values()
        assert product + step == planned.messages
        assert train == 3
        # what ranks say of a product travels with it: ranks * 4 bytes each way
        assert sent == pytest.approx(planned.product, abs=8 * ranks**2 + 256 * ranks)
        assert coefficients == pytest.approx(planned.orthogonalise, rel=0.25)
        assert trained == pytest.approx(planned.step, abs=8 * ranks**2 + 512 * ranks)


def stopped_in_the_pass(group, how, in_shards):
    """A product in pieces during whose backward pass rank 1 is killed, or never comes back."""
    inputs = torch.randn(9, WIDTHS[0], generator=torch.Generator().manual_seed(group.rank))
    data = inputs, torch.arange(9) % 3
    part = Hessian(tanh_network(WIDTHS, 0), cross_entropy, data, engine="retained")
    operator = DataParallel(part, overlap=256)
    vector = torch.ones(operator.n)
    if in_shards:
        operator = Sharded(operator)
        vector = operator.vector_space.take(vector)
    if group.rank == 1:
        stop = {"killed": lambda _: os.kill(os.getpid(), signal.SIGKILL), "hangs": hang}[how]
        part.problem.parameters[0].register_hook(stop)
    operator @ vector


def hang(_):
    time.sleep(600)


@pytest.mark.slow
@pytest.mark.parametrize("in_shards", [False, True], ids=["whole", "shards"])
@pytest.mark.parametrize(
    ("how", "text"),
    [("killed", "rank 1 gave no sign of life"), ("hangs", "ranks went apart: rank 1: after")],
)
def test_a_rank_that_stops_during_the_pass_is_named_while_sums_are_under_way(how, text, in_shards):
    began = time.monotonic()
    with pytest.raises(RankError) as error:
        launch(stopped_in_the_pass, 3, how, in_shards, timeout=90, patience=5)
    assert text in str(error.value)
    assert time.monotonic() - began < 60
