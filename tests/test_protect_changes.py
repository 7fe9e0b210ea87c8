"""What a user does to a model after, or around, `protect`: the promise holds or is refused."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, linear

import curvlab
from curvlab.nets import mlp


def net():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)
    )


def batch(seed, count=5):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(count, 6, generator=generator),
        torch.randint(0, 4, (count,), generator=generator),
    )


OLD, NEW = batch(1), batch(2, 20)


def train(model, optimizer, steps=25, data=NEW):
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(model(data[0]), data[1]).backward()
        optimizer.step()


def moved(model, before, data=OLD):
    with torch.no_grad():
        return float((model(data[0]) - before).norm() / before.norm())


def later_group(model):
    optimizer = torch.optim.AdamW(model[0].parameters(), lr=1e-2)
    return optimizer, lambda: optimizer.add_param_group({"params": list(model[2].parameters())})


def later_grad(model):
    model[2].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return optimizer, lambda: model[2].requires_grad_(True)


def other_memory(model):
    def give():
        for p in model.parameters():
            p.data = p.data.clone()

    return torch.optim.AdamW(model.parameters(), lr=1e-2), give


def other_parameter(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def give():
        model[2].weight = nn.Parameter(model[2].weight.detach().clone())
        optimizer.add_param_group({"params": [model[2].weight]})

    return optimizer, give


@pytest.mark.parametrize("change", [later_group, later_grad, other_memory, other_parameter])
def test_stored_inputs_are_held_after_the_model_or_the_optimizer_changed(change):
    model = net()
    before, other = model(OLD[0]).detach(), model(NEW[0]).detach()
    optimizer, then = change(model)
    curvlab.protect(optimizer, curvlab.layer_bases(model, OLD, energy=1.0), model)
    train(model, optimizer, 5)
    then()
    train(model, optimizer)
    assert moved(model, before) < 1e-5
    assert moved(model, other, NEW) > 1e-2, "and it did train"


@pytest.mark.parametrize("which", ["rows", "layers"])
def test_a_group_added_later_is_protected_and_a_frozen_parameter_stays(which):
    model = mlp((6, 8, 4), seed=0)
    optimizer, parameters = None, list(model.parameters())
    optimizer = torch.optim.SGD(parameters[:2], lr=0.1, momentum=0.9)
    if which == "rows":
        memory = curvlab.Basis(sum(p.numel() for p in parameters), capacity=3)
        memory.extend(torch.randn(3, memory.n))
    else:
        memory = curvlab.layer_bases(model, OLD, energy=1.0)
    curvlab.protect(optimizer, memory, model)
    optimizer.add_param_group({"params": parameters[2:]})
    start = torch.cat([p.detach().flatten() for p in parameters])
    before = model(OLD[0]).detach()
    train(model, optimizer)
    if which == "rows":
        change = torch.cat([p.detach().flatten() for p in parameters]) - start
        assert float((memory.rows() @ change).norm() / change.norm()) < 1e-5
    else:
        assert moved(model, before) < 1e-5
    parameters[0].requires_grad_(False)
    held = parameters[0].detach().clone()
    train(model, optimizer)
    assert torch.equal(parameters[0], held)


def test_rows_hold_a_parameter_that_took_the_place_of_another():
    model = net()
    memory = curvlab.Basis(curvlab.parameter_count(model), capacity=5)
    memory.extend(torch.randn(5, memory.n, generator=torch.Generator().manual_seed(0)))
    optimizer, then = other_parameter(model)
    curvlab.protect(optimizer, memory, model)
    train(model, optimizer, 3)
    then()
    start = torch.cat([p.detach().flatten() for p in model.parameters()])
    train(model, optimizer)
    change = torch.cat([p.detach().flatten() for p in model.parameters()]) - start
    assert float((memory.rows() @ change).norm() / change.norm()) < 1e-5


@pytest.mark.parametrize("when", ["before", "later"])
@pytest.mark.parametrize("which", ["rows", "layers"])
def test_two_parameters_with_one_memory_are_refused(which, when):
    def tie():
        model[2].weight.data = model[0].weight.data

    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if which == "rows":
        memory = curvlab.Basis(curvlab.parameter_count(model), capacity=3)
        memory.extend(torch.randn(3, memory.n))
    else:
        memory = curvlab.layer_bases(model, OLD, energy=1.0)
    if when == "before":
        tie()
    with pytest.raises(ValueError, match=r"one memory \(tied by \.data\)"):  # noqa: PT012
        curvlab.protect(optimizer, memory, model)
        assert when == "later"
        train(model, optimizer, 1)
        tie()
        train(model, optimizer, 1)


def test_a_weight_tied_by_hand_is_held_whole():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(10, 6)
            self.mix = nn.Linear(6, 6)

        def forward(self, tokens):
            return linear(torch.tanh(self.mix(self.table(tokens))), self.table.weight)

    torch.manual_seed(0)
    model, old, new = Tied(), torch.arange(3), torch.arange(10)
    before = model(old).detach()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    curvlab.protect(optimizer, curvlab.layer_bases(model, (old, old), energy=1.0), model)
    train(model, optimizer, data=(new, new.flip(0)))
    assert moved(model, before, (old, old)) < 1e-5


def test_a_weight_used_in_a_list_of_tensors_is_held_whole():
    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 4)

        def forward(self, inputs):
            again = inputs.sin() @ torch.cat([self.first.weight, self.first.weight])[:6]
            return self.second(torch.tanh(self.first(inputs) + again))

    torch.manual_seed(0)
    model = Listed()
    before = model(OLD[0]).detach()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    handle = curvlab.protect(optimizer, curvlab.layer_bases(model, OLD, energy=1.0), model)
    train(model, optimizer)
    assert moved(model, before) < 1e-5
    assert "first.weight" in handle.held


def test_layers_that_cannot_be_seen_are_refused_by_name():
    class Mapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 4)

        def forward(self, inputs):
            return torch.vmap(self.layer)(inputs)

    class Everywhere(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, inputs):
            return linear(self.layer(inputs), self.layer.weight)

    with pytest.raises(TypeError, match=r"inside torch\.vmap.*on the whole batch"):
        curvlab.layer_bases(Mapped(), OLD)
    with pytest.raises(TypeError, match=r"torch\.jit module.*that it was made of"):
        curvlab.layer_bases(torch.jit.trace(net(), OLD[0]), OLD)
    with pytest.raises(ValueError, match=r"\['layer'\].*uses outside of them.*its layer alone"):
        curvlab.layer_bases(Everywhere(), OLD)


class Recurrent(nn.Module):
    """Time first, the last answer only."""

    def __init__(self):
        super().__init__()
        self.into, self.again, self.out = nn.Linear(3, 70), nn.Linear(70, 70), nn.Linear(70, 4)

    def forward(self, steps):
        state = steps.new_zeros(*steps.shape[1:-1], 70)
        for one in steps:
            state = torch.tanh(self.into(one) + self.again(state))
        return self.out(state)


class Library(nn.Module):
    """Of torch's own parts, time first."""

    def __init__(self, kind):
        super().__init__()
        self.part = (
            nn.LSTM(3, 80)
            if kind == "LSTM"
            else nn.TransformerEncoderLayer(3, 1, 80, dropout=0.0)
            if kind == "encoder"
            else nn.MultiheadAttention(3, 1)
        )
        self.out = nn.Linear(80 if kind == "LSTM" else 3, 90)

    def forward(self, steps):
        attention = isinstance(self.part, nn.MultiheadAttention)
        found = self.part(steps, steps, steps) if attention else self.part(steps)
        return self.out(found[0] if isinstance(found, tuple) else found)


WHOLE = {
    "time first": (Recurrent, (60, 1, 3)),
    "time first, one sample": (Recurrent, (60, 3)),
    "LSTM": (lambda: Library("LSTM"), (60, 1, 3)),
    "LSTM, one sample": (lambda: Library("LSTM"), (60, 3)),
    "encoder": (lambda: Library("encoder"), (60, 2, 3)),
    "encoder, one sample": (lambda: Library("encoder"), (60, 3)),
    "attention": (lambda: Library("attention"), (60, 2, 3)),
    "a vector": (lambda: nn.Sequential(nn.Linear(60, 70), nn.Tanh(), nn.Linear(70, 4)), (60,)),
    "statistics of the batch": (
        lambda: nn.Sequential(
            nn.Linear(6, 90), nn.BatchNorm1d(90, track_running_stats=False), nn.Linear(90, 4)
        ),
        (60, 6),
    ),
}


@pytest.mark.parametrize("side", ["inputs", "both"])
@pytest.mark.parametrize("name", WHOLE)
def test_what_is_no_batch_of_independent_samples_is_read_whole(name, side):
    make, shape = WHOLE[name]
    torch.manual_seed(0)
    model, data = make().double().eval(), torch.randn(*shape, dtype=torch.float64)
    seen = {}
    hooks = [
        part.register_forward_pre_hook(
            lambda _, given, name=name: seen.setdefault(name, []).append(given[0])
        )
        for name, part in model.named_modules()
        if type(part) is nn.Linear
    ]
    model(data)
    for hook in hooks:
        hook.remove()
    loss = None if side == "inputs" else lambda output, _: output.square().mean()
    given = data if side == "inputs" else (data, data)
    bases = curvlab.layer_bases(model, given, energy=1.0, side=side, loss=loss)
    for name, inputs in seen.items():
        truth = torch.cat([one.reshape(-1, one.shape[-1]) for one in inputs]).detach()
        truth = torch.cat([truth, truth.new_ones(len(truth), 1)], 1)
        rows = bases.layers[f"{name}.weight"].into.rows()
        assert float((truth - truth @ rows.T @ rows).norm() / truth.norm()) < 1e-12
        assert len(rows) == torch.linalg.matrix_rank(truth)


def test_a_batch_of_independent_samples_is_read_in_pieces():
    model, sizes = net(), []
    model.register_forward_pre_hook(lambda _, given: sizes.append(len(given[0])))
    bases = curvlab.layer_bases(model, batch(5, 130), energy=0.9)
    assert max(sizes) == 50
    assert sum(sizes) == 130 + 8 + 8, "and the trial that asks whether it may be"
    again = curvlab.layer_bases(model, [batch(5, 130)], energy=0.9)
    assert repr(bases) == repr(again)


def test_a_linear_layer_with_a_forward_of_its_own_is_no_layer():
    class Standardised(nn.Linear):
        def forward(self, inputs):
            return linear(inputs, self.weight / self.weight.norm(), self.bias)

    model = nn.Sequential(Standardised(6, 8), nn.Tanh(), nn.Linear(8, 4))
    assert list(curvlab.layer_bases(model, OLD, energy=1.0).layers) == ["2.weight"]
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    model[0].forward = lambda inputs: linear(inputs, model[0].weight.abs())  # of the instance
    assert list(curvlab.layer_bases(model, OLD, energy=1.0).layers) == ["2.weight"]


def test_running_statistics_that_would_move_are_refused():
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    curvlab.protect(optimizer, curvlab.layer_bases(model, OLD), model)
    model.train()
    with pytest.raises(ValueError, match="running statistics"):
        train(model, optimizer, 1)
    model.eval()
    train(model, optimizer, 1)


@pytest.mark.parametrize("which", ["rows", "layers"])
def test_a_closure_gives_lbfgs_projected_gradients(which):
    model = mlp((6, 16, 4), seed=1)
    optimizer = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe")
    if which == "rows":
        memory = curvlab.Basis(curvlab.parameter_count(model), capacity=40)
        memory.extend(torch.randn(40, memory.n, generator=torch.Generator().manual_seed(0)))
    else:
        memory = curvlab.layer_bases(model, OLD, energy=1.0)
    curvlab.protect(optimizer, memory, model)

    def closure():
        optimizer.zero_grad()
        loss = cross_entropy(model(NEW[0]), NEW[1])
        loss.backward()
        return loss

    first = float(closure().detach())
    for _ in range(5):
        optimizer.step(closure)
    assert float(closure().detach()) < first


@pytest.mark.parametrize("new_way", [True, False])
def test_a_spectral_norm_whose_vectors_would_move_is_refused(new_way):
    utils = nn.utils
    spectral_norm = utils.parametrizations.spectral_norm if new_way else utils.spectral_norm
    model = nn.Sequential(spectral_norm(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 4)).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    curvlab.protect(optimizer, curvlab.layer_bases(model, OLD, energy=1.0), model)
    before = model(OLD[0]).detach()
    train(model, optimizer, 3)
    assert moved(model, before) < 1e-5
    model.train()
    with pytest.raises(ValueError, match="spectral norm"):
        train(model, optimizer, 1)


@pytest.mark.parametrize("first", ["rows", "layers"])
@pytest.mark.parametrize("second", ["rows", "layers"])
def test_a_second_protection_of_the_same_parameters_is_refused_and_the_cure_works(first, second):
    model = mlp((6, 16, 4), seed=1)

    def memory(which, data):
        if which == "layers":
            return curvlab.layer_bases(model, data, energy=1.0)
        basis = curvlab.Basis(curvlab.parameter_count(model), capacity=9)
        basis.extend(torch.randn(2, basis.n, generator=torch.Generator().manual_seed(len(data))))
        return basis

    other = batch(7, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    handle = curvlab.protect(optimizer, memory(first, OLD), model)
    with pytest.raises(ValueError, match="protected already"):
        curvlab.protect(optimizer, memory(second, other), model)
    if first == second == "layers":
        before, inputs = model(other[0]).detach(), memory("layers", other)
        handle.bases.merge(inputs)
        train(model, optimizer)
        assert moved(model, before, other) < 1e-4
    handle.remove()
    curvlab.protect(optimizer, memory(second, other), model)


def test_two_models_of_one_optimizer_are_protected_each():
    one, two = net(), net()
    optimizer = torch.optim.AdamW([*one.parameters(), *two.parameters()], lr=1e-2)
    for model in (one, two):
        curvlab.protect(optimizer, curvlab.layer_bases(model, OLD, energy=1.0), model)
    before = [model(OLD[0]).detach() for model in (one, two)]
    for _ in range(20):
        optimizer.zero_grad()
        cross_entropy(one(NEW[0]) + two(NEW[0]), NEW[1]).backward()
        optimizer.step()
    assert moved(one, before[0]) < 1e-4
    assert moved(two, before[1]) < 1e-4


def test_sparse_gradients_of_embeddings_are_held_or_refused_with_the_cure():
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(30, 8, sparse=True), nn.Flatten(), nn.Linear(24, 4))

    old, new = (torch.randint(10, (2, 3)), None), (torch.randint(30, (20, 3)), NEW[1])
    model = make()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    curvlab.protect(optimizer, curvlab.layer_bases(model, old[0], energy=1.0), model)
    before, weight = model(old[0]).detach(), model[0].weight.detach().clone()
    train(model, optimizer, 5, new)
    assert moved(model, before, old) < 1e-5
    assert not torch.equal(model[0].weight, weight)
    assert model[0].weight.grad.is_sparse

    model = make()
    basis = curvlab.Basis(curvlab.parameter_count(model), capacity=2)
    basis.extend(torch.randn(2, basis.n, generator=torch.Generator().manual_seed(0)))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    handle = curvlab.protect(optimizer, basis, model)
    with pytest.raises(ValueError, match="gradients=False"):
        train(model, optimizer, 1, new)
    handle.remove()
    curvlab.protect(optimizer, basis, model, gradients=False)
    start = torch.cat([p.detach().flatten() for p in model.parameters()])
    train(model, optimizer, 5, new)
    change = torch.cat([p.detach().flatten() for p in model.parameters()]) - start
    assert basis.leak(change) < 1e-5


def test_data_without_a_sample_are_refused():
    with pytest.raises(ValueError, match="no sample"):
        curvlab.layer_bases(net(), OLD[0][:0])
