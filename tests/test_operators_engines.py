"""Engines agree, budgets hold, and sums over many chunks do not drift."""

import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import curvlab.nets
from curvlab.operators import (
    EmpiricalFisher,
    Fisher,
    FunctionalHessian,
    GaussNewton,
    Hessian,
    Objective,
)
from curvlab.operators.products import choose, sizing
from curvlab.operators.products.linearise import linearise
from curvlab.probe import OperatorError
from tests.dense_truth import relative

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}  # between engines, relative


def network(dtype=torch.float64):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.GELU(), nn.Flatten(), nn.Linear(27, 3)
        )
        model[1].running_mean.normal_()
        return model.to(dtype).eval()


def samples(n=12, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 1, 5, 5, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.randint(0, 3, (n,), generator=generator)


def vectors(operator, count=3):
    generator = torch.Generator().manual_seed(2)
    block = torch.randn(count, operator.n, generator=generator, dtype=torch.float64)
    return block.to(operator.dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", [Hessian, GaussNewton, FunctionalHessian, EmpiricalFisher, Fisher])
def test_engines_and_chunks_agree(kind, dtype):
    model, data = network(dtype), samples(dtype=dtype)
    truth = kind(network(), F.cross_entropy, samples(), engine="retained")
    block = vectors(truth)
    expected = truth @ block
    cases = [("auto", None), ("retained", 5), ("rebuilt", None), ("rebuilt", 5), ("linearised", 7)]
    for engine, chunk in cases:
        operator = kind(model, F.cross_entropy, data, engine=engine, chunk=chunk, check=False)
        product = operator @ block.to(dtype)
        assert product.dtype == dtype
        assert relative(product, expected) < TOLERANCE[dtype], (engine, chunk)


@pytest.mark.slow
def test_the_compiled_engine_agrees():
    model, data = network(torch.float32), samples(dtype=torch.float32)
    for kind in (Hessian, FunctionalHessian):
        operator = kind(model, F.cross_entropy, data, engine="compiled")
        expected = kind(network(), F.cross_entropy, samples(), engine="retained")
        block = vectors(operator)
        for _ in range(2):
            assert relative(operator @ block, expected @ block.double()) < 2e-5


def test_a_block_is_its_rows():
    operator = Hessian(network(), F.cross_entropy, samples(), chunk=5)
    block = vectors(operator, 4)
    rows = torch.stack([operator @ row for row in block])
    assert torch.allclose(operator @ block, rows, rtol=1e-12, atol=1e-14)
    strided = vectors(operator, 8)[::2]
    assert torch.allclose(operator @ strided, torch.stack([operator @ row for row in strided]))
    assert operator.products == 4 + 4 + 4 + 4


def test_a_dtype_of_its_own_evaluates_the_model_in_it():
    model, (x, y) = network(torch.float32), samples(dtype=torch.float32)
    operator = Hessian(model, F.cross_entropy, (x, y), dtype=torch.float64)
    truth = Hessian(network(torch.float32).double(), F.cross_entropy, (x.double(), y))
    assert operator.dtype == torch.float64
    assert relative(operator.dense(), truth.dense()) < 1e-12
    assert next(model.parameters()).dtype == torch.float32


def test_bfloat16_stays_within_its_documented_band():
    model, data = network(torch.float32), samples(40, dtype=torch.float32)
    for kind in (Hessian, GaussNewton):
        exact = kind(model, F.cross_entropy, data)
        rough = kind(model, F.cross_entropy, data, precision="bfloat16")
        error = relative(rough @ vectors(rough), exact @ vectors(exact))
        assert 1e-4 < error < 3e-2
        assert rough.certificate.limit == 0.2


def test_a_global_switch_to_low_precision_does_not_reach_the_operator():
    before = torch.get_float32_matmul_precision()
    seen = []

    def objective(model, batch):
        seen.append(torch.backends.mkldnn.matmul.fp32_precision)
        return F.cross_entropy(model(batch[0]), batch[1])

    try:
        torch.set_float32_matmul_precision("medium")
        Hessian(network(torch.float32), Objective(objective), samples(dtype=torch.float32))
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert set(seen) == {"ieee"}


def test_hundreds_of_chunks_do_not_drift():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2))
        x, y = torch.randn(600, 3), torch.randint(0, 2, (600,))
    many = Hessian(model, F.cross_entropy, (x, y), chunk=1, engine="retained", check=False)
    assert len(many.problem.chunks) == 600
    truth = Hessian(model, F.cross_entropy, (x, y), dtype=torch.float64)
    assert relative(many @ vectors(many), truth @ vectors(many).double()) < 2e-7


BUDGETS = {3.9e6: "some", 1.7e7: "some", 1.2e8: "all"}


def test_a_budget_decides_how_many_graphs_are_kept_and_the_peak_respects_it():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 8, 3, padding=1), nn.GELU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3),
        )  # fmt: skip
        data = torch.randn(256, 1, 16, 16), torch.randint(0, 3, (256,))
    expected = Hessian(model, F.cross_entropy, data, budget=1e10)
    assert expected.engine == "retained, 1 chunk(s), 1 kept"
    block = vectors(expected, 2)
    for budget, outcome in BUDGETS.items():
        with sizing.LiveBytes() as live:
            operator = Hessian(model, F.cross_entropy, data, budget=budget)
            product = operator @ block
        assert live.peak <= budget, operator.engine
        assert relative(product, expected @ block) < 2e-5
        chunks, kept = (int(part.split()[0]) for part in operator.engine.split(", ")[1:])
        assert outcome == ("all" if kept == chunks else "some" if kept else "none")


def test_live_bytes_counts_what_is_made_and_forgets_what_is_freed():
    outside = torch.zeros(100)
    with sizing.LiveBytes() as live:
        same = outside.view(10, 10).T
        assert live.live == 0
        a = outside + 1
        view = a[:10]
        assert live.live == 400
        b = torch.cat([a, a])
        assert (live.live, live.peak) == (1200, 1200)
        del a
        assert live.live == 1200  # the view holds it
        del view
        assert live.live == 800
        del b, same
    assert (live.live, live.peak) == (0, 1200)


def test_chunk_sizes_follow_the_costs():
    cost = sizing.Cost(kept_fixed=0.0, kept_each=1.0, peak_fixed=0.0, peak_each=2.0)
    assert sizing.chunk_size(100, cost, 1e6) == 100
    size = sizing.chunk_size(100, cost, 120.0)  # everything fits if the working part is small
    assert size * -(-100 // size) + size <= 120 + size
    assert sizing.fitting(cost, size, 120.0, -(-100 // size)) == -(-100 // size)
    size = sizing.chunk_size(1000, cost, 100.0)
    assert cost.peak(size) <= 100.0
    assert 0 < sizing.fitting(cost, size, 100.0, 1000 // size) < 1000 // size
    with pytest.raises(ValueError, match="larger budget="):
        sizing.chunk_size(10, sizing.Cost(500.0, 1.0, 900.0, 1.0), 100.0)


def test_measuring_chooses_once_and_says_what_it_saw(caplog):
    model, data = network(), samples()
    with caplog.at_level(logging.INFO, logger="curvlab"):
        operator = Hessian(model, F.cross_entropy, data, engine="measure")
    assert "retained: " in caplog.text
    assert "linearised: " in caplog.text
    caplog.clear()
    again = Hessian(model, F.cross_entropy, data, engine="measure")
    assert "s per product" not in caplog.text
    assert again.engine == operator.engine
    assert model in choose._measured


def test_an_engine_that_disagrees_with_autograd_is_refused(monkeypatch):
    def wrong(self, chunk):
        product = self._retained(chunk)
        return lambda block: 1.01 * product(block)  # symmetric, linear, repeatable, and wrong

    monkeypatch.setattr(Hessian, "_linearised", wrong)
    with pytest.raises(OperatorError, match=r"differ by 1\.0e-02"):
        Hessian(network(), F.cross_entropy, samples(), engine="linearised")


def test_linearisation_is_not_changed_by_its_products():
    """torch.func.linearize of this function is wrong from the second product on."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        attention = nn.MultiheadAttention(2, 2, batch_first=True).double()
        x = torch.randn(5, 3, 2, dtype=torch.float64)
    names = [name for name, _ in attention.named_parameters()]

    def loss(parameters):
        state = dict(zip(names, parameters, strict=True))
        output = torch.func.functional_call(attention, state, (x, x, x))[0]
        return F.cross_entropy(output.mean(1), torch.tensor([0, 1, 0, 1, 1]))

    point = tuple(p.detach() for p in attention.parameters())
    push = linearise(torch.func.grad(loss), point)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        along = tuple(torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in point)
        expected = torch.func.jvp(torch.func.grad(loss), (point,), (along,))[1]
        for got, truth in zip(push(*along), expected, strict=True):
            assert torch.allclose(got, truth, rtol=1e-10, atol=1e-12)


def test_a_constant_written_after_it_was_read_keeps_both_values():
    ones = torch.ones(3)  # made outside, so that functionalisation does not see the write

    def function(point):
        constant = ones + 1.0
        before = constant * point[0]
        constant.add_(1.0)
        return before + constant * point[0]

    push = linearise(function, (torch.ones(3),))
    for _ in range(2):
        assert push(torch.tensor([1.0, 2.0, 3.0])).tolist() == [5.0, 10.0, 15.0]


def distributed(model):
    """``model`` in DistributedDataParallel, without the process group that making one needs."""
    wrapper = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(wrapper)
    wrapper.module = model
    return wrapper


def test_compiled_and_wrapped_models_are_unwrapped_with_a_note(caplog):
    model, data = network(), samples()
    expected = Hessian(model, F.cross_entropy, data)
    with caplog.at_level(logging.INFO, logger="curvlab"):
        for wrapped in (torch.compile(model), nn.DataParallel(model), distributed(model)):
            operator = Hessian(wrapped, F.cross_entropy, data)
            assert operator.layout.names == expected.layout.names
            assert relative(operator.dense(), expected.dense()) < 1e-12
    assert "OptimizedModule" in caplog.text
    assert "inside DataParallel" in caplog.text
    assert "inside DistributedDataParallel" in caplog.text


def test_a_compiled_part_of_a_model_runs_eagerly():
    class Partly(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = torch.compile(inner)

        def forward(self, x):
            return self.inner(x)

    model, data = network(), samples()
    operator = Hessian(Partly(model), F.cross_entropy, data)
    expected = Hessian(model, F.cross_entropy, data)
    assert relative(operator.dense(), expected.dense()) < 1e-12


def test_the_hand_written_mlp_engine_is_the_default_for_a_plain_mlp():
    model = curvlab.nets.mlp((6, 5, 4, 3), seed=0, dtype=torch.float64)
    x = torch.randn(20, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = torch.arange(20) % 3
    for kind in (Hessian, GaussNewton, FunctionalHessian):
        quick = kind(model, F.cross_entropy, (x, y), chunk=7)
        plain = kind(model, F.cross_entropy, (x, y), engine="retained")
        assert quick.engine.startswith("mlp")
        assert relative(quick.dense(), plain.dense()) < 1e-12
    part = Hessian(model, F.cross_entropy, (x, y), select="2.*")
    whole = Hessian(model, F.cross_entropy, (x, y), engine="retained")
    assert part.engine.startswith("mlp")
    assert relative(part.dense(), whole.restrict("2.*").dense()) < 1e-12
