"""The paper's statements about networks as checks, in float64; among them those that must fail."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, hessian, jacrev
from torch.nn.functional import cross_entropy, one_hot

from curvlab.metrics import (
    block_diagonality,
    layer_labels,
    spectral_similarity,
)
from curvlab.nets import mlp
from curvlab.parameters import layout_of, parameter_vector, select_parameters
from tests.theory import (
    softmax_curvature,
)

ZERO = 1e-12  # what float64 leaves of an exact zero at the sizes used here


def random_vector(n, generator):
    return torch.randn(n, generator=generator, dtype=torch.float64)


# ---- networks ------------------------------------------------------------------------------------


class Problem:
    """A network, data, and its loss and logits as functions of the flat parameters."""

    def __init__(self, model, inputs, targets):
        self.model, self.inputs, self.targets = model.double(), inputs, targets
        self.layout = layout_of(select_parameters(model))
        self.theta = parameter_vector(model)

    def named(self, flat):
        return dict(zip(self.layout.names, self.layout.unflatten(flat), strict=True))

    def logits(self, flat):
        return functional_call(self.model, self.named(flat), (self.inputs,))

    def loss(self, flat):
        return cross_entropy(self.logits(flat), self.targets)

    def outer_product(self, flat):
        """H^O = 1/n sum of J'(diag(p) - pp')J, eq. Hessian-decomp."""
        rows = jacrev(self.logits)(flat)
        curvature = torch.stack([softmax_curvature(p) for p in self.logits(flat).softmax(1)])
        return torch.einsum("ikp,ikl,ilq->pq", rows, curvature, rows) / len(rows)

    def functional(self, flat):
        """H^F: the Hessian minus the outer-product part, computed directly."""
        slopes = self.logits(flat).softmax(1) - one_hot(self.targets, self.logits(flat).shape[1])
        return hessian(lambda x: (self.logits(x) * slopes).sum() / len(slopes))(flat)


def problem(generator, sizes=(6, 8, 8, 3), samples=20, seed=0, **options):
    inputs = torch.randn(samples, sizes[0], generator=generator, dtype=torch.float64)
    targets = torch.randint(0, sizes[-1], (samples,), generator=generator)
    return Problem(mlp(sizes, seed=seed, dtype=torch.float64, **options), inputs, targets)


def test_orthogonality_to_all_logit_gradients_nulls_the_outer_product_but_not_the_hessian(
    generator,
):
    """Theorem 3 is about H^O: away from a minimum the update still meets the functional part."""
    task = problem(generator, samples=8)
    gradients = jacrev(task.logits)(task.theta).reshape(-1, task.layout.n)
    _, sizes, rows = torch.linalg.svd(gradients, full_matrices=True)
    null = rows[int((sizes > 1e-10 * sizes.max()).sum()) :]
    update = null.T @ random_vector(len(null), generator)
    outer, full = task.outer_product(task.theta), hessian(task.loss)(task.theta)
    assert abs(float(update @ outer @ update)) < ZERO
    assert abs(float(update @ full @ update)) > 0.1


def test_at_a_converged_model_the_outer_product_is_the_hessian(generator):
    task = problem(generator, sizes=(6, 12, 3), samples=12)

    def similarity(flat):
        return spectral_similarity(task.outer_product(flat), hessian(task.loss)(flat)).value

    flat = task.theta.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([flat], max_iter=300, tolerance_grad=0, tolerance_change=0)

    def closure():
        optimizer.zero_grad()
        loss = task.loss(flat)
        loss.backward()
        return loss

    optimizer.step(closure)
    assert float(task.loss(flat.detach())) < 1e-6
    assert similarity(task.theta) < 0.9
    assert similarity(flat.detach()) > 0.99


@pytest.mark.parametrize("bias", [True, False])
def test_the_functional_hessian_of_a_relu_network_is_block_hollow(bias, generator):
    task = problem(generator, bias=bias)
    matrix = task.functional(task.theta)
    labels = layer_labels(task.layout)
    inside = labels[:, None] == labels[None, :]
    assert float(matrix[inside].abs().max()) < 1e-14
    assert float(matrix[~inside].abs().max()) > 0.05
    assert block_diagonality(hessian(task.loss)(task.theta), labels).value < 1.0


def test_the_functional_hessian_of_a_tanh_network_is_not_block_hollow(generator):
    task = problem(generator, activation=nn.Tanh)
    labels = layer_labels(task.layout)
    inside = labels[:, None] == labels[None, :]
    assert float(task.functional(task.theta)[inside].abs().max()) > 0.01


def test_the_two_parts_sum_to_the_hessian(generator):
    task = problem(generator, activation=nn.Tanh)
    parts = task.outer_product(task.theta) + task.functional(task.theta)
    torch.testing.assert_close(parts, hessian(task.loss)(task.theta), atol=1e-13, rtol=0)


# ---- GPM -----------------------------------------------------------------------------------------


def layer_inputs(model, inputs):
    """What enters each linear layer, ``(samples, in)``."""
    found = []
    for layer in model:
        if isinstance(layer, nn.Linear):
            found.append(inputs)
        inputs = layer(inputs)
    return found


@torch.no_grad()
def frozen_direction(task, generator, biases):
    """A random update of every layer with dW x = 0 for the stored inputs.

    ``biases``: ``"free"`` moves them unconstrained; ``"augmented"`` constrains [W b] against [x 1].
    """
    pieces = {}
    linear = [(name, m) for name, m in task.model.named_modules() if isinstance(m, nn.Linear)]
    for (name, layer), x in zip(linear, layer_inputs(task.model, task.inputs), strict=True):
        if biases == "augmented":
            x = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], dim=1)
        _, sizes, rows = torch.linalg.svd(x, full_matrices=False)
        rows = rows[sizes > 1e-10 * sizes.max()]
        move = torch.randn(layer.out_features, x.shape[1], generator=generator, dtype=x.dtype)
        move -= (move @ rows.T) @ rows
        pieces[f"{name}.weight"] = move[:, : layer.in_features]
        if layer.bias is not None:
            free = torch.randn(layer.out_features, generator=generator, dtype=x.dtype)
            pieces[f"{name}.bias"] = move[:, -1] if biases == "augmented" else free
    return task.layout.flatten([pieces[name] for name in task.layout.names])


def gpm_problem(generator, bias):
    # fewer samples than units, so that every layer keeps free directions
    return problem(generator, sizes=(12, 14, 14, 3), samples=5, bias=bias)


@pytest.mark.parametrize(("bias", "biases"), [(False, "none"), (True, "augmented")])
def test_gpm_freezes_outputs_at_any_step_size_and_needs_no_block_diagonal_hessian(
    bias, biases, generator
):
    task = gpm_problem(generator, bias)
    direction = frozen_direction(task, generator, biases)
    assert float(direction.norm()) > 5
    matrix = hessian(task.loss)(task.theta)
    labels = layer_labels(task.layout)
    inside = (labels[:, None] == labels[None, :]).double()
    assert abs(float(grad(task.loss)(task.theta) @ direction)) < ZERO
    assert abs(float(direction @ (matrix * inside) @ direction)) < ZERO
    assert abs(float(direction @ matrix @ direction)) < ZERO  # the full form: no block assumption
    assert block_diagonality(matrix, labels).value < 0.9
    before = task.logits(task.theta)
    assert float((task.logits(task.theta + direction) - before).abs().max()) < 1e-11
    flat = task.theta
    for _ in range(5):  # no small steps needed: the activations never move
        flat = flat + 30 * frozen_direction(task, generator, biases)
    assert float((task.logits(flat) - before).abs().max()) < 1e-5
    assert float((flat - task.theta).norm()) > 100


def test_gpm_with_free_biases_forgets(generator):
    task = gpm_problem(generator, bias=True)
    direction = frozen_direction(task, generator, "free")
    moved = task.logits(task.theta + direction) - task.logits(task.theta)
    assert float(moved.abs().max()) > 0.1
    assert abs(float(task.loss(task.theta + direction) - task.loss(task.theta))) > 0.01
