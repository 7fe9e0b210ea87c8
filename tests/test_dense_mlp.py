"""The dense MLP Hessian against autograd's in float64, and its symmetry to the last bit."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from curvlab.nets import mlp
from curvlab.operators import dense_mlp
from curvlab.operators.products.mlp import MLPProduct, recognise
from curvlab.parameters import layout_of, select_parameters

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
SIZES = [
    (3, 2),
    (1, 1),
    (4, 5, 3),
    (7, 1, 2),
    (5, 6, 4, 3),
    (3, 4, 5, 2, 6),
    (2, 5, 3, 5, 4, 2),
    (2, 3, 4, 3, 2, 3, 2),
]


def data(model, classes, samples, seed=0):
    generator = torch.Generator().manual_seed(seed)
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    inputs, outputs = linear[0].in_features, linear[-1].out_features
    x = torch.randn(samples, inputs, generator=generator, dtype=torch.float64)
    if classes:
        return x, torch.randint(outputs, (samples,), generator=generator)
    return x, torch.randn(samples, outputs, generator=generator, dtype=torch.float64)


def truth(model, loss, parameters, x, y):
    layout = layout_of(parameters)
    frozen = {k: v.detach() for k, v in model.named_parameters() if k not in parameters}

    def objective(flat):
        pieces = dict(zip(parameters, layout.unflatten(flat), strict=True))
        return loss(torch.func.functional_call(model, {**frozen, **pieces}, (x,)), y)

    flat = layout.flatten(parameters.values())
    return torch.autograd.functional.hessian(objective, flat, vectorize=True)


def dense(model, loss, parameters, x, y, weight=1.0, out=None):
    plan = recognise(model, loss, parameters)
    assert plan is not None
    return dense_mlp.dense_hessian(plan, dict(model.named_parameters()), x, y, weight, out)


def check(model, loss, parameters, x, y):
    ours = dense(model, loss, parameters, x, y)
    exact = truth(model, loss, parameters, x, y)
    assert torch.equal(ours, ours.T)
    assert float((ours - exact).norm()) <= TOLERANCE[torch.float64] * max(float(exact.norm()), 1e-3)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh, nn.GELU, nn.Identity])
def test_every_shape_gives_autograds_hessian(sizes, bias, activation):
    model = mlp(sizes, bias=bias, activation=activation, dtype=torch.float64)
    parameters = select_parameters(model)
    check(model, functional.cross_entropy, parameters, *data(model, True, 6))
    check(model, nn.MSELoss(reduction="sum"), parameters, *data(model, False, 6))


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Sigmoid])
def test_an_activation_on_the_outputs_is_part_of_the_hessian(activation):
    model = nn.Sequential(*mlp((3, 4, 2), activation=nn.Tanh, dtype=torch.float64), activation())
    check(model, functional.mse_loss, select_parameters(model), *data(model, False, 5))


@pytest.mark.parametrize(
    "select",
    ["0.*", "2.*", "4.*", "2.weight", "*.bias", ["0.bias", "4.weight"], "*.weight", "2.bias"],
    ids=str,
)
@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
def test_a_subset_of_the_parameters_gives_that_part(select, activation):
    model = mlp((4, 5, 3, 2), activation=activation, dtype=torch.float64)
    parameters = select_parameters(model, select)
    check(model, functional.cross_entropy, parameters, *data(model, True, 7))


@pytest.mark.parametrize(
    ("workspace", "tile", "square"), [(1, 256, 3), (1 << 28, 2, 1), (4000, 3, 7)]
)
def test_chunks_and_tiles_do_not_change_the_result(monkeypatch, workspace, tile, square):
    monkeypatch.setattr(dense_mlp, "WORKSPACE_BYTES", workspace)
    monkeypatch.setattr(dense_mlp, "TILE", tile)
    monkeypatch.setattr(dense_mlp, "SQUARE", square)
    model = mlp((4, 5, 3, 2), activation=nn.Tanh, dtype=torch.float64)
    check(model, functional.cross_entropy, select_parameters(model), *data(model, True, 11))


def test_chunks_of_data_add_up_in_out():
    model = mlp((4, 5, 3), dtype=torch.float64)
    parameters = select_parameters(model)
    x, y = data(model, True, 9)
    whole = dense(model, functional.cross_entropy, parameters, x, y)
    total = dense(model, functional.cross_entropy, parameters, x[:2], y[:2], 2 / 9)
    same = dense(model, functional.cross_entropy, parameters, x[2:], y[2:], 7 / 9, out=total)
    assert same is total
    assert torch.equal(total, total.T)
    assert float((total - whole).norm()) <= 1e-13 * float(whole.norm())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_rows_agree_with_products_on_a_network_wider_than_a_tile(dtype):
    model = mlp((40, 17, 13, 10), activation=nn.Tanh, dtype=dtype)
    x, y = data(model, True, 600)
    x = x.to(dtype)
    tensors, loss = dict(model.named_parameters()), functional.cross_entropy
    plan = recognise(model, loss, select_parameters(model))
    hessian = dense_mlp.dense_hessian(plan, tensors, x, y)
    block = torch.randn(5, plan.n, dtype=dtype, generator=torch.Generator().manual_seed(1))
    products = MLPProduct(plan, tensors, x, y).hessian(block)
    assert hessian.dtype == dtype
    assert torch.equal(hessian, hessian.T)
    assert float((block @ hessian - products).norm()) <= TOLERANCE[dtype] * float(products.norm())


@pytest.mark.parametrize(
    "out",
    [torch.zeros(43, 42), torch.zeros(43, 43), torch.zeros(43, 86, dtype=torch.float64)[:, ::2]],
    ids=["shape", "dtype", "strides"],
)
def test_an_unfit_out_is_refused_by_name(out):
    model = mlp((4, 5, 3), dtype=torch.float64)
    with pytest.raises(ValueError, match=r"out= must be a contiguous \(43, 43\)"):
        dense(
            model,
            functional.cross_entropy,
            select_parameters(model),
            *data(model, True, 3),
            out=out,
        )
