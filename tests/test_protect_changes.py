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


@pytest.mark.parametrize("change", [later_group, later_grad, other_memory])
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


def test_a_linear_layer_with_a_forward_of_its_own_is_no_layer():
    class Standardised(nn.Linear):
        def forward(self, inputs):
            return linear(inputs, self.weight / self.weight.norm(), self.bias)

    model = nn.Sequential(Standardised(6, 8), nn.Tanh(), nn.Linear(8, 4))
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
