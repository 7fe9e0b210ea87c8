"""The hand-written MLP products against autograd in float64."""

import copy
from collections import OrderedDict
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional

from curvlab.nets import mlp
from curvlab.operators import GaussNewton, Hessian
from curvlab.operators.frozen import Chunk
from curvlab.operators.problem import TRIED
from curvlab.operators.products import mlp as engine, mlp_workspace
from curvlab.operators.products.sizing import LiveBytes
from curvlab.parameters import layout_of, select_parameters

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}
SIZES = [(3, 2), (4, 5, 3), (7, 1, 2), (5, 6, 4, 3), (2, 9, 3, 5, 4, 3, 2), (1, 3, 1)]
ACTIVATIONS = [
    nn.ReLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.GELU,
    lambda: nn.GELU(approximate="tanh"),
    nn.SiLU,
    lambda: nn.LeakyReLU(0.3),
    lambda: nn.ELU(0.7),
    lambda: nn.Softplus(2.0, threshold=1.0),
    nn.Identity,
    nn.ReLU6,
    nn.Hardtanh,
    nn.LogSigmoid,
    lambda: nn.ReLU(inplace=True),
]
LOSSES = [
    functional.cross_entropy,
    functional.mse_loss,
    nn.CrossEntropyLoss(reduction="sum"),
    nn.MSELoss(reduction="sum"),
]


def data(model, loss, samples, dtype=torch.float64, seed=0):
    """Inputs and targets that fit: class numbers for cross-entropy, else real numbers."""
    generator = torch.Generator().manual_seed(seed)
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    inputs, outputs = linear[0].in_features, linear[-1].out_features
    x = torch.randn(samples, inputs, generator=generator, dtype=torch.float64).to(dtype)
    if "cross" in getattr(loss, "__name__", type(loss).__name__).lower():
        return x, torch.randint(outputs, (samples,), generator=generator)
    return x, torch.randn(samples, outputs, generator=generator, dtype=torch.float64).to(dtype)


def truth(model, loss, parameters, x, y, weight=1.0):
    """Gradient ``(n,)``, Hessian and Gauss-Newton ``(n, n)`` by autograd, row by row."""
    names, leaves = list(parameters), list(parameters.values())
    layout = layout_of(parameters)
    frozen = {k: v.detach() for k, v in model.named_parameters() if k not in parameters}

    def outputs(flat):
        pieces = dict(zip(names, layout.unflatten(flat), strict=True))
        return torch.func.functional_call(model, {**frozen, **pieces}, (x,))

    flat = layout.flatten(leaves)
    gradient = torch.func.grad(lambda v: weight * loss(outputs(v), y))(flat)
    hessian = torch.autograd.functional.hessian(
        lambda v: weight * loss(outputs(v), y), flat, vectorize=True
    )
    jacobian = torch.autograd.functional.jacobian(
        lambda v: outputs(v).reshape(-1), flat, vectorize=True
    )
    at = outputs(flat).detach()
    inner = torch.autograd.functional.hessian(
        lambda o: weight * loss(o.view_as(at), y), at.reshape(-1)
    )
    return gradient, hessian, jacobian.T @ inner @ jacobian


def product(model, loss, parameters, x, y, weight=1.0):
    plan = engine.recognise(model, loss, parameters)
    assert plan is not None
    return engine.MLPProduct(plan, dict(model.named_parameters()), x, y, weight)


def close(value, exact, dtype=torch.float64, scale=None):
    assert value.shape == exact.shape
    assert value.dtype == dtype
    size = max(float((exact if scale is None else scale).norm()), 1e-3)
    assert float((value.double() - exact.double()).norm()) <= TOLERANCE[dtype] * size


def check(model, loss, parameters, x, y, weight=1.0):
    gradient, hessian, gauss_newton = truth(model, loss, parameters, x, y, weight)
    ours = product(model, loss, parameters, x, y, weight)
    basis = torch.eye(len(gradient), dtype=gradient.dtype)
    close(ours.gradient(), gradient)
    close(ours.hessian(basis), hessian)
    close(ours.gauss_newton(basis), gauss_newton)
    close(ours.functional(basis), hessian - gauss_newton, scale=hessian)
    close(ours.hessian(basis[1:2]), hessian[1:2])
    close(ours.gauss_newton(basis[1:2]), gauss_newton[1:2])


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("loss", LOSSES, ids=["ce", "mse", "ce-sum", "mse-sum"])
def test_every_shape_gives_autograds_gradient_hessian_and_gauss_newton(sizes, bias, loss):
    for activation in (nn.ReLU, nn.Tanh):
        model = mlp(sizes, bias=bias, activation=activation, dtype=torch.float64)
        check(model, loss, select_parameters(model), *data(model, loss, 7), weight=0.3)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_gives_autograds_products(activation):
    model = mlp((4, 6, 5, 3), activation=activation, dtype=torch.float64, seed=1)
    for loss in LOSSES[:2]:
        x, y = data(model, loss, 11)
        check(model, loss, select_parameters(model), 2.0 * x, y)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_activation_on_the_outputs_bends_the_hessian_but_not_the_gauss_newton(activation):
    model = nn.Sequential(*mlp((3, 4, 2), activation=nn.Tanh, dtype=torch.float64), activation())
    for loss in LOSSES[:2]:
        check(model, loss, select_parameters(model), *data(model, loss, 5))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_kinks_and_zeros_are_differentiated_as_torch_does(activation):
    model = mlp((3, 4, 4, 2), activation=activation, dtype=torch.float64)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
    x, y = data(model, functional.cross_entropy, 6)
    x[::2] = 0.0  # every pre-activation of these samples is exactly zero
    check(model, functional.cross_entropy, select_parameters(model), x, y)


@pytest.mark.parametrize(
    "select",
    ["0.*", "4.*", "2.weight", "*.bias", ["0.bias", "4.weight"], "*.weight", ["2.bias", "4.bias"]],
    ids=str,
)
def test_a_subset_of_the_parameters_gives_that_part_of_the_hessian(select):
    for activation in (nn.ReLU, nn.Tanh):
        model = mlp((4, 5, 3, 2), activation=activation, dtype=torch.float64)
        x, y = data(model, functional.cross_entropy, 9)
        check(model, functional.cross_entropy, select_parameters(model, select), x, y)


@pytest.mark.parametrize("rows", [1, 3, 8, 64])
@pytest.mark.parametrize("directions", [1, 3, 32])
def test_tiles_of_samples_and_groups_of_directions_do_not_change_the_products(
    monkeypatch, rows, directions
):
    model = mlp((4, 5, 3, 2), activation=nn.Tanh, dtype=torch.float64)
    x, y = data(model, functional.cross_entropy, 10)
    monkeypatch.setattr(mlp_workspace, "CPU_ROWS", rows)
    monkeypatch.setattr(engine, "DIRECTIONS", directions)
    check(model, functional.cross_entropy, select_parameters(model), x, y)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_papers_network_agrees_with_double_backward_in_both_precisions(dtype):
    exact = mlp(dtype=torch.float64)
    x, y = data(exact, functional.cross_entropy, 300)
    block = torch.randn(5, 18010, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    layout = layout_of(select_parameters(exact))
    leaves = list(exact.parameters())
    first = torch.autograd.grad(functional.cross_entropy(exact(x), y), leaves, create_graph=True)
    rows = [
        layout.flatten(torch.autograd.grad(first, leaves, layout.unflatten(row), retain_graph=True))
        for row in block
    ]
    model = copy.deepcopy(exact).to(dtype)
    ours = product(model, functional.cross_entropy, select_parameters(model), x.to(dtype), y)
    close(ours.hessian(block.to(dtype)), torch.stack(rows), dtype)
    close(ours.hessian(block.to(dtype)[:1]), torch.stack(rows[:1]), dtype)


def test_chunks_with_weights_add_up_to_the_whole_data_set():
    model = mlp((4, 5, 3), dtype=torch.float64)
    parameters = select_parameters(model)
    x, y = data(model, functional.cross_entropy, 13)
    block = torch.randn(3, layout_of(parameters).n, dtype=torch.float64)
    whole = product(model, functional.cross_entropy, parameters, x, y).hessian(block)
    parts = sum(
        product(model, functional.cross_entropy, parameters, x[s], y[s], len(x[s]) / 13).hessian(
            block
        )
        for s in (slice(0, 4), slice(4, 12), slice(12, 13))
    )
    close(parts, whole)


def test_a_leading_flatten_nested_sequentials_and_strided_blocks_are_handled():
    inner = nn.Sequential(nn.Linear(12, 5), nn.Tanh())
    model = nn.Sequential(OrderedDict(flat=nn.Flatten(), inner=inner, head=nn.Linear(5, 3)))
    model = model.double()
    x, y = torch.randn(6, 3, 2, 2, dtype=torch.float64), torch.tensor([0, 1, 2, 2, 1, 0])
    parameters = select_parameters(model)
    check(model, functional.cross_entropy, parameters, x, y)
    ours = product(model, functional.cross_entropy, parameters, x, y)
    n = layout_of(parameters).n
    wide = torch.randn(n, 4, dtype=torch.float64)
    assert ours.hessian(wide.T).is_contiguous()
    assert torch.equal(ours.hessian(wide.T), ours.hessian(wide.T.contiguous()))


def test_non_contiguous_weights_and_a_bare_linear_are_handled():
    model = mlp((4, 5, 3), dtype=torch.float64)
    model[0].weight = nn.Parameter(torch.randn(4, 5, dtype=torch.float64).T)
    x, y = data(model, functional.cross_entropy, 6)
    check(model, functional.cross_entropy, select_parameters(model), x, y)
    bare = nn.Linear(4, 3).double()
    check(bare, functional.cross_entropy, select_parameters(bare), x, y)


def test_products_leave_no_trace():
    model = mlp((4, 5, 3), dtype=torch.float64)
    x, y = data(model, functional.cross_entropy, 6)
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    ours = product(model, functional.cross_entropy, select_parameters(model), x, y)
    block = torch.randn(
        2, 43, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True
    )
    result = ours.hessian(block)
    assert not result.requires_grad
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_block_of_the_wrong_shape_is_refused_by_name():
    model = mlp((4, 5, 3))
    x, y = data(model, functional.cross_entropy, 6, torch.float32)
    ours = product(model, functional.cross_entropy, select_parameters(model), x, y)
    for wrong in (torch.zeros(43), torch.zeros(2, 42)):
        with pytest.raises(ValueError, match=r"\(b, 43\)"):
            ours.hessian(wrong)


@pytest.mark.parametrize("activation", [nn.ReLU, nn.GELU, nn.Identity])
@pytest.mark.parametrize("widths", [(3, 2), (10, 50, 5), (200, 7, 90, 3)])
def test_a_product_takes_at_most_what_the_plan_says(widths, activation):
    layers = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), activation()]
    data = torch.randn(300, widths[0]), torch.randint(widths[-1], (300,))
    model = nn.Sequential(*layers[:-1])
    for operator in (kind(model, nn.CrossEntropyLoss(), data) for kind in (Hessian, GaussNewton)):
        cost = operator.plan.cost(4)
        for samples in (1, 37, 300):
            chunk = Chunk(tuple(part[:samples] for part in data), number=TRIED)
            with LiveBytes() as live:
                product = operator._build(chunk)
                kept = live.live
                product(torch.ones(1, operator.n))
            assert kept <= cost.kept(samples)
            assert live.peak <= cost.peak(samples)
