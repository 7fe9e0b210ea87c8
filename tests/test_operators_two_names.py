"""A module that is registered under two names is one module: for products, and for its owner."""

import threading

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from curvlab import EmpiricalFisher, Fisher, GaussNewton, Hessian


class Twice(nn.Module):
    def __init__(self, copied):
        super().__init__()
        self.cell = nn.Linear(4, 4)
        self.again = self.cell
        self.head = nn.Linear(4, 3)
        if not copied:
            self.lock = threading.Lock()  # deepcopy refuses it: the user's own model is evaluated

    def forward(self, inputs):
        return self.head(torch.tanh(self.again(torch.tanh(self.cell(inputs)))))


def chain():
    shared = nn.Linear(4, 4)
    return nn.Sequential(shared, nn.Tanh(), shared, nn.Tanh(), nn.Linear(4, 3))


def case(make):
    torch.manual_seed(0)
    return make().double(), (torch.randn(6, 4).double(), torch.arange(6) % 3)


@pytest.mark.parametrize("engine", ["retained", "rebuilt", "blockwise"])
def test_products_are_those_of_double_backward(engine):
    model, (inputs, targets) = case(chain)
    hessian = Hessian(model, cross_entropy, (inputs, targets), engine=engine)
    parameters = list(model.parameters())
    loss = cross_entropy(model(inputs), targets)
    gradients = torch.autograd.grad(loss, parameters, create_graph=True)
    gradient = torch.cat([part.reshape(-1) for part in gradients])
    assert torch.allclose(hessian.gradient(), gradient, rtol=1e-12, atol=1e-14)
    vector = torch.randn(hessian.n, generator=torch.Generator().manual_seed(1)).double()
    truth = torch.autograd.grad(gradient @ vector, parameters)
    truth = torch.cat([part.reshape(-1) for part in truth])
    assert torch.allclose(hessian @ vector, truth, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", [Hessian, GaussNewton, Fisher, EmpiricalFisher])
@pytest.mark.parametrize("copied", [True, False])
def test_the_users_model_keeps_its_parameters(kind, copied):
    model, data = case(lambda: Twice(copied))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    held = dict(model.named_parameters())
    operator = kind(model, cross_entropy, data)
    operator @ torch.ones(operator.n).double()
    for name, parameter in model.named_parameters():
        assert parameter is held[name]
        assert torch.equal(parameter, before[name])
    assert len(held) == len(list(model.parameters()))
    model(data[0])
