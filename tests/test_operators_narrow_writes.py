"""A model with narrow frozen weights may write into its own tensors: the writes are not lost."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import curvlab


class Writes(nn.Module):
    def __init__(self, way):
        super().__init__()
        torch.manual_seed(0)
        self.base, self.head, self.way = nn.Linear(5, 6), nn.Linear(6, 3), way

    def forward(self, inputs):
        hidden = torch.tanh(self.base(inputs))
        if self.way == "mask":
            mask = torch.zeros(6)
            mask[4:] = -2.0
            return self.head(hidden + mask)
        out = torch.zeros(len(inputs), 6)
        if self.way == "slice":
            out[:, :3] = hidden[:, :3]
        else:
            out[:, :3].copy_(hidden[:, :3])
        return self.head(out)


@pytest.mark.parametrize("way", ["mask", "slice", "copy"])
def test_what_a_model_writes_into_its_own_tensors_counts(way):
    model = Writes(way)
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(8, 5, generator=generator), torch.randint(0, 3, (8,), generator=generator)
    found = curvlab.Hessian(model, cross_entropy, data, select="head*", dtype=torch.float64)
    model = model.double()
    named = dict(model.head.named_parameters(prefix="head"))
    flat = torch.cat([p.detach().flatten() for p in named.values()])

    def loss(vector):
        weight, bias = vector[:18].view(3, 6), vector[18:]
        outputs = torch.func.functional_call(
            model, {"head.weight": weight, "head.bias": bias}, data[0].double()
        )
        return cross_entropy(outputs, data[1])

    torch.set_default_dtype(torch.float64)  # for the tensors that forward makes
    try:
        truth = torch.autograd.functional.hessian(loss, flat)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.allclose(found.dense(), truth, atol=1e-7)


@pytest.mark.parametrize("scale", [1e-300, 1e-200, 1e200, 1e300])
def test_a_right_hand_side_of_any_scale_is_solved(scale):
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(30, 30, generator=generator, dtype=torch.float64)
    matrix = root @ root.T / 30
    b = torch.randn(30, generator=generator, dtype=torch.float64)
    found = curvlab.solve(curvlab.Dense(matrix), b * scale, damping=0.1)
    truth = torch.linalg.solve(matrix + 0.1 * torch.eye(30, dtype=torch.float64), b)
    assert found.converged
    assert float((found.x / scale - truth).norm() / truth.norm()) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_class_weights_of_a_loss_module_follow_the_dtype(dtype):
    model = nn.Linear(4, 3)
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(6, 4, generator=generator), torch.tensor([0, 1, 2, 0, 1, 2])
    weights = torch.tensor([0.5, 1.0, 2.0])
    loss = nn.CrossEntropyLoss(weight=weights)
    found = curvlab.Hessian(model, loss, data, count=lambda b: weights[b[1]].sum(), dtype=dtype)
    flat = curvlab.parameter_vector(model).double()

    def truth(vector):
        outputs = data[0].double() @ vector[:12].view(3, 4).T + vector[12:]
        return cross_entropy(outputs, data[1], weight=weights.double())

    exact = torch.autograd.functional.hessian(truth, flat)
    assert torch.allclose(found.dense().double(), exact, atol=1e-6)
    assert loss.weight.dtype == torch.float32
