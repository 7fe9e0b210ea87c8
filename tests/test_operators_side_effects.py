"""Operators borrow a model: they change nothing of it, and are not changed by its future."""

import gc
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from curvlab.operators import EmpiricalFisher, FunctionalHessian, GaussNewton, Hessian
from curvlab.operators.products.sizing import LiveBytes
from curvlab.probe import OperatorError

KINDS = [Hessian, GaussNewton, FunctionalHessian, EmpiricalFisher]


class Network(nn.Module):
    """BatchNorm, a counter, a cache of activations, a tied and a frozen parameter, two heads."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.norm = nn.BatchNorm1d(5)
        self.drop = nn.Dropout(0.3)
        self.heads = nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 3)])
        self.active = 0
        self.calls = 0
        self.cache = None
        self.heads[1].bias.requires_grad_(False)

    def forward(self, x):
        self.calls += 1
        self.cache = torch.tanh(self.norm(self.first(x)))
        return self.heads[self.active](self.drop(self.cache))


def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Network()


def samples(n=10):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 4, generator=generator)
    return x, torch.randint(0, 3, (n,), generator=generator)


def state(model):
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        "values": {name: tensor.detach().clone() for name, tensor in tensors.items()},
        "identities": {name: id(tensor) for name, tensor in tensors.items()},
        "gradients": {n: None if p.grad is None else p.grad.clone() for n, p in tensors.items()},
        "flags": {name: tensor.requires_grad for name, tensor in tensors.items()},
        "modes": {name: module.training for name, module in model.named_modules()},
        "attributes": (model.calls, model.cache, model.active),
    }


def assert_same_state(before, after):
    for name, value in before["values"].items():
        assert torch.equal(value, after["values"][name]), name
    for name, value in before["gradients"].items():
        other = after["gradients"][name]
        assert (value is None) == (other is None), name
        assert value is None or torch.equal(value, other), name
    for part in ("identities", "flags", "modes", "attributes"):
        assert before[part] == after[part], part


@pytest.mark.parametrize(
    "mode", ["eval", ("frozen-masks", "batch-statistics")], ids=["eval", "train"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_the_model_and_no_generator_changes(kind, mode):
    model, (x, y) = network().train(), samples()
    model.first.weight.grad = torch.ones_like(model.first.weight)
    before = state(model)
    generators = torch.get_rng_state(), random.getstate()
    settings = torch.is_grad_enabled(), torch.backends.mha.get_fastpath_enabled()
    operator = kind(model, F.cross_entropy, (x, y), mode=mode)
    operator @ torch.randn(2, operator.n, generator=torch.Generator().manual_seed(3))
    operator.gradient()
    operator.dense()
    assert_same_state(before, state(model))
    assert torch.equal(generators[0], torch.get_rng_state())
    assert generators[1] == random.getstate()
    assert settings == (torch.is_grad_enabled(), torch.backends.mha.get_fastpath_enabled())


class Counting(nn.Module):
    """Changes its buffer in every forward pass, and uses it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.layer(x) * self.calls


@pytest.mark.parametrize("kind", KINDS)
def test_every_evaluation_sees_the_buffers_as_they_were(kind):
    model = Counting()
    operator = kind(model, F.cross_entropy, samples(), engine="rebuilt", chunk=3)
    vector = torch.ones(operator.n)
    assert torch.equal(operator @ vector, operator @ vector)
    assert float(model.calls) == 0


@pytest.mark.parametrize("engine", ["retained", "rebuilt", "linearised"])
@pytest.mark.parametrize("kind", [Hessian, GaussNewton])
def test_a_model_that_writes_into_its_inputs_is_right_and_leaves_the_data_alone(kind, engine):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)
    (x, y), kept = samples(), samples()[0]
    writing = nn.Sequential(nn.ELU(inplace=True), *layers)
    operator = kind(writing, F.cross_entropy, (x, y), engine=engine, chunk=6)
    expected = kind(nn.Sequential(nn.ELU(), *layers), F.cross_entropy, (x, y))
    for _ in range(2):
        vector = torch.ones(operator.n)
        assert torch.allclose(operator @ vector, expected @ vector, rtol=1e-4, atol=1e-6)
    assert torch.equal(x, kept)


class Padded(nn.Module):
    """Without gradients torch takes a fast path that treats padded tokens differently."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 3, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)
        self.out = nn.Linear(4, 3)

    def forward(self, x, padding):
        return self.out(self.encoder(x, src_key_padding_mask=padding).mean(1))


def test_the_fast_path_of_transformers_is_not_taken():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Padded().eval()
        x, y = torch.randn(6, 5, 4), torch.randint(0, 3, (6,))
    padding = torch.arange(5) >= torch.tensor([[5], [4], [3], [5], [2], [3]])
    assert torch.backends.mha.get_fastpath_enabled()
    operator = Hessian(model, F.cross_entropy, ((x, padding), y))
    loss = F.cross_entropy(model.requires_grad_()(x, padding), y)
    assert operator.loss == pytest.approx(loss.item(), rel=1e-5)


def test_a_failing_forward_pass_leaves_the_model_as_it_was():
    model = network().eval()
    before = state(model)
    with pytest.raises(RuntimeError):
        Hessian(model, F.cross_entropy, (torch.zeros(3, 7), torch.zeros(3, dtype=torch.int64)))
    assert_same_state(before, state(model))


@pytest.mark.parametrize("engine", ["retained", "rebuilt"])
@pytest.mark.parametrize("kind", KINDS)
def test_later_changes_to_model_and_data_do_not_change_the_operator(kind, engine):
    model, (x, y) = network().eval(), samples()
    operator = kind(model, F.cross_entropy, (x, y), engine=engine)
    vector = torch.ones(operator.n)
    before = operator @ vector
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    model.train()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    x.add_(1.0)
    y.zero_()
    assert torch.equal(before, operator @ vector)
    assert model.training


def test_a_switch_of_the_model_does_not_change_the_operator():
    model, data = network().eval(), samples()
    operators = [kind(model, F.cross_entropy, data, engine="rebuilt") for kind in KINDS]
    vector = torch.ones(operators[0].n)
    before = [operator @ vector for operator in operators]
    model.active = 1
    for operator, image in zip(operators, before, strict=True):
        assert torch.equal(image, operator @ vector)


GLOBAL = {"scale": 1.0}


class Global(nn.Sequential):
    def forward(self, x):
        return super().forward(x) * GLOBAL["scale"]


def test_what_cannot_be_copied_is_noticed_when_it_changes(monkeypatch):
    model, data = Global(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), samples()
    kept = Hessian(model, F.cross_entropy, data, engine="retained")
    rebuilt = [kind(model, F.cross_entropy, data, engine="rebuilt") for kind in KINDS]
    vector = torch.ones(kept.n)
    before = kept @ vector
    monkeypatch.setitem(GLOBAL, "scale", 2.0)
    assert torch.equal(before, kept @ vector)
    for operator in rebuilt:
        with pytest.raises(OperatorError, match="has changed"):
            operator @ vector
    with pytest.raises(OperatorError, match="has changed"):
        kept.gradient()


class Watched(dict):
    """The parameters of a module, and every change of them."""

    changes = 0

    def __setitem__(self, name, value):
        Watched.changes += 1
        super().__setitem__(name, value)


def test_threads_multiply_with_one_operator_and_never_touch_the_model():
    model, data = network().eval(), samples()
    operator = Hessian(model, F.cross_entropy, data, engine="rebuilt", chunk=3)
    vectors = torch.randn(24, operator.n, generator=torch.Generator().manual_seed(0))
    expected = operator @ vectors
    before = state(model)
    for module in model.modules():
        module.__dict__["_parameters"] = Watched(module._parameters)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda vector: operator @ vector, vectors))
    assert Watched.changes == 0
    assert_same_state(before, state(model))
    assert torch.equal(torch.stack(found), expected)


def test_autocast_around_an_operator_does_not_change_it():
    model, data = network().eval(), samples()
    vector = torch.ones(Hessian(model, F.cross_entropy, data).n)
    outside = Hessian(model, F.cross_entropy, data, engine="rebuilt") @ vector
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = Hessian(model, F.cross_entropy, data, engine="rebuilt")
        assert torch.equal(inside @ vector, outside)
    assert torch.equal(inside @ vector, outside)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", KINDS)
def test_operators_work_inside_no_grad_and_inference_mode(kind, context):
    model, data = network().eval(), samples()
    vector = torch.ones(2, kind(model, F.cross_entropy, data).n)
    outside = kind(model, F.cross_entropy, data) @ vector
    with context():
        inside = kind(model, F.cross_entropy, data) @ torch.ones_like(vector)
    assert torch.equal(outside, inside)
    assert not inside.requires_grad


def test_products_do_not_share_memory_with_their_vector_or_each_other():
    operator = Hessian(network().eval(), F.cross_entropy, samples())
    vector = torch.ones(operator.n, requires_grad=True)
    first = operator @ vector
    kept = first.clone()
    second = operator @ (2 * vector)
    assert torch.equal(first, kept)
    assert not first.requires_grad
    assert first.data_ptr() != second.data_ptr()
    assert float(vector.detach().sum()) == operator.n


@pytest.mark.parametrize("engine", ["retained", "rebuilt", "linearised"])
@pytest.mark.parametrize("kind", [Hessian, GaussNewton])
def test_memory_is_flat_over_fifty_products(kind, engine):
    operator = kind(
        network().eval(), F.cross_entropy, samples(), engine=engine, chunk=6, check=False
    )
    vector = torch.ones(operator.n)
    operator @ vector
    gc.collect()
    gc.disable()  # nothing may wait for the cycle collector
    try:
        with LiveBytes() as memory:
            operator @ vector
            after_one, peak = memory.live, memory.peak
            for _ in range(50):
                operator @ vector
            assert memory.live == after_one
            assert memory.peak == peak
    finally:
        gc.enable()


def test_an_operator_that_is_dropped_frees_its_graphs():
    model, data = network().eval(), samples()
    with LiveBytes() as memory:
        operator = Hessian(model, F.cross_entropy, data, engine="retained")
        held = memory.live
        del operator
        gc.collect()
        assert memory.live < 0.2 * held
