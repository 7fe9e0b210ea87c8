"""Spectra of single layers, against the diagonal blocks of the dense Hessian."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from curvlab import GaussNewton, Hessian, Interrupted, layer_spectra
from curvlab.operators import Dense


class Odd(nn.Module):
    """A parameter of its own, a nested module, a layer without bias."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.scale = nn.Parameter(torch.rand(4, generator=generator, dtype=torch.float64) + 0.5)
        self.body = nn.Sequential(
            nn.Linear(4, 5, dtype=torch.float64), nn.Tanh(), nn.Linear(5, 6, dtype=torch.float64)
        )
        self.head = nn.Linear(6, 3, bias=False, dtype=torch.float64)
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.7

    def forward(self, x):
        return self.head(torch.tanh(self.body(x * self.scale)))


def data():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(40, 4, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(3, (40,), generator=generator)


@pytest.mark.parametrize("kind", [Hessian, GaussNewton])
def test_each_layer_has_the_eigenvalues_of_its_dense_block(kind):
    operator = kind(Odd(), cross_entropy, data())
    found = layer_spectra(operator, 3, tol=1e-6)
    assert list(found.layers) == ["scale", "body.0", "body.2", "head"]
    dense, slices = operator.dense(), operator.layout.slices()
    for name, pairs in found.layers.items():
        own = [s for full, s in slices.items() if full == name or full.rpartition(".")[0] == name]
        index = torch.cat([torch.arange(s.start, s.stop) for s in own])
        true = torch.linalg.eigvalsh(dense[index][:, index])
        true = true[true.abs().argsort(descending=True)][:3]
        torch.testing.assert_close(pairs.values, true, rtol=1e-8, atol=1e-12)
        assert pairs.n == len(index)
    lines = found.table().splitlines()
    assert len(lines) == 5
    assert lines[1].startswith("scale ")
    assert found.products == sum(pairs.matvecs for pairs in found.layers.values())


def test_a_layer_smaller_than_k_gives_all_it_has():
    found = layer_spectra(Hessian(Odd(), cross_entropy, data()), 10, tol=1e-6)
    assert len(found.layers["scale"]) == 4
    assert len(found.layers["head"]) == 10


def test_an_operator_without_names_is_refused():
    with pytest.raises(TypeError, match="whose parameters"):
        layer_spectra(Dense(torch.eye(5)))


def test_an_interrupt_carries_the_layers_that_are_done(monkeypatch):
    operator = Hessian(Odd(), cross_entropy, data())
    inner, second = Hessian._product, operator.layout.slices()["body.0.weight"]

    def product(self, block):
        if bool(block[:, second].any()):
            raise KeyboardInterrupt
        return inner(self, block)

    monkeypatch.setattr(Hessian, "_product", product)
    with pytest.raises(Interrupted) as stop:
        layer_spectra(operator, 2)
    assert list(stop.value.partial.layers) == ["scale"]
