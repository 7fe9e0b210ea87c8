"""The paper's statements as checks, in float64; among them those that must fail.

Numbers beside a test are what was measured when it was written, one seed each.
"""

import math

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, hessian, jacrev
from torch.nn.functional import cross_entropy, one_hot

from curvlab.metrics import (
    block_diagonality,
    expand,
    layer_labels,
    perturb,
    spectral_similarity,
)
from curvlab.nets import mlp
from curvlab.parameters import layout_of, parameter_vector, select_parameters
from curvlab.theory import (
    label_only_residual,
    null_space,
    plateau_score,
    quadratic_forgetting,
    retraced_forgetting,
    retracing_update,
    slope_score,
    softmax_curvature,
)

ZERO = 1e-12  # what float64 leaves of an exact zero at the sizes used here


class Dense:
    def __init__(self, matrix):
        self.matrix, self.n = matrix, matrix.shape[0]
        self.dtype, self.device = matrix.dtype, matrix.device

    def __matmul__(self, vectors):
        return vectors @ self.matrix


def low_rank(n, rank, generator):
    factor = torch.randn(n, rank, generator=generator, dtype=torch.float64)
    return factor @ factor.T


def random_vector(n, generator):
    return torch.randn(n, generator=generator, dtype=torch.float64)


def tasks_of(generator, n=40, tasks=5, rank=6):
    return [low_rank(n, rank, generator) for _ in range(tasks)]


def walk(hessians, generator, allowed):
    """theta_t with each update drawn freely, or in null(sum of old H) where ``allowed[t]``."""
    n = hessians[0].shape[0]
    theta = [random_vector(n, generator)]
    for t in range(1, len(hessians)):
        update = random_vector(n, generator)
        if allowed[t]:
            rows = null_space(sum(hessians[:t]))
            update = rows.T @ (rows @ update)
        theta.append(theta[-1] + update)
    return torch.stack(theta)


def expansion_of(theta, hessians):
    return expand(theta, torch.zeros_like(theta), map(Dense, hessians))


# ---- quadratic tasks: the recursion and theorems 1 and 2 -----------------------------------------


def test_the_recursion_is_exact_on_quadratic_tasks(generator):
    hessians = tasks_of(generator)
    theta = walk(hessians, generator, [False] * 5)
    measured = quadratic_forgetting(theta, hessians)
    predicted = expansion_of(theta, hessians).recursion(measured)
    truth = measured.sum(1) / torch.arange(1, 6)
    assert float(truth[-1]) > 1.0
    assert float(((predicted - truth).abs() / truth.clamp(min=1)).max()) < 1e-14


def test_theorem_1_after_a_null_prefix_forgetting_is_the_last_updates_form_over_2t(generator):
    hessians = tasks_of(generator)
    theta = walk(hessians, generator, [True, True, True, True, False])
    forgetting = quadratic_forgetting(theta, hessians)
    assert float(forgetting[:4].abs().max()) < 1e-11
    update = theta[4] - theta[3]
    form = float(update @ sum(hessians[:4]) @ update) / (2 * 5)
    assert form > 1.0
    assert float(forgetting[4].sum() / 5) == pytest.approx(form, rel=1e-12)


def test_theorem_2_updates_in_the_null_space_at_every_step_forget_nothing(generator):
    hessians = tasks_of(generator)
    theta = walk(hessians, generator, [True] * 5)
    assert float((theta[4] - theta[0]).norm()) > 1.0
    assert float(quadratic_forgetting(theta, hessians).abs().max()) < 1e-11


def test_theorem_2_fails_when_one_earlier_step_violates_the_constraint(generator):
    """The equation holds at the last step, yet task 1 is forgotten: it is needed at all steps."""
    hessians = tasks_of(generator)
    theta = walk(hessians, generator, [True, False, True, True, True])
    violation = expansion_of(theta, hessians).violation()
    assert float(violation[1]) > 1.0
    assert float(violation[2:].abs().max()) < 1e-11
    assert float(quadratic_forgetting(theta, hessians)[4, 0]) > 1.0


# ---- the non-monotonic theorem -------------------------------------------------------------------


def forgetting_after(update, next_update, old, last, tasks):
    """E(tau+1) by its definition, for a null prefix: old tasks see both updates, tau the last."""
    moved = update + next_update
    return float((moved @ old @ moved + next_update @ last @ next_update) / (2 * (tasks + 1)))


@pytest.mark.parametrize("ranks", [(6, 6), (20, 25), (1, 39)])
def test_the_retracing_update_is_the_argmin_of_later_forgetting(ranks, generator):
    n, tasks = 40, 3
    old, last = (low_rank(n, rank, generator) for rank in ranks)
    update = random_vector(n, generator)
    best = retracing_update(old, last, update)
    least = forgetting_after(update, best, old, last, tasks)
    assert least == pytest.approx(
        float(retraced_forgetting(old, last, update, tasks)), abs=1e-9, rel=1e-9
    )
    for _ in range(20):
        other = best + 0.1 * random_vector(n, generator)
        assert forgetting_after(update, other, old, last, tasks) > least - 1e-9
    # z in the null space of the sum changes nothing
    free = null_space(old + last)
    if len(free):
        moved = best + free.T @ random_vector(len(free), generator)
        assert forgetting_after(update, moved, old, last, tasks) == pytest.approx(least, abs=1e-9)


def test_retracing_reaches_zero_only_where_the_ranges_meet_trivially(generator):
    n, tasks = 40, 3
    update = random_vector(n, generator)
    apart = low_rank(n, 6, generator), low_rank(n, 6, generator)  # 12 < 40 dimensions
    assert forgetting_after(update, retracing_update(*apart, update), *apart, tasks) < 1e-9
    meeting = low_rank(n, 25, generator), low_rank(n, 25, generator)  # 50 > 40: they must meet
    left = forgetting_after(update, retracing_update(*meeting, update), *meeting, tasks)
    assert left > 0.01
    assert left == pytest.approx(float(retraced_forgetting(*meeting, update, tasks)), rel=1e-9)


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


# ---- OGD-GTL -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("classes", "ratio", "residual"),
    [(2, 1.0, 0.50), (5, 0.25, 0.378), (10, 0.111, 0.289), (100, 0.0101, 0.099)],
)
def test_what_ogd_gtl_leaves_out_depends_on_the_classes_and_does_not_vanish(
    classes, ratio, residual
):
    confidence = 1 - 1e-7
    p = torch.full((classes,), (1 - confidence) / (classes - 1), dtype=torch.float64)
    p[0] = confidence
    curvature = softmax_curvature(p)
    assert float(curvature[0, 0]) == pytest.approx(1e-7, rel=1e-5)  # -> 0: not O(1)
    assert float(curvature[1, 1] / curvature[0, 0]) == pytest.approx(ratio, rel=5e-3)
    assert label_only_residual(classes, confidence) == pytest.approx(residual, abs=1e-3)
    assert label_only_residual(classes, confidence) == pytest.approx(
        1 / math.sqrt(classes + 2), rel=1e-5
    )


def test_softmax_curvature_is_the_second_derivative_of_cross_entropy(generator):
    logits = random_vector(7, generator)
    truth = hessian(lambda f: cross_entropy(f, torch.tensor(3)))(logits)
    torch.testing.assert_close(softmax_curvature(logits.softmax(0)), truth, atol=1e-15, rtol=0)


# ---- the perturbation score ----------------------------------------------------------------------


def test_without_a_gradient_the_score_is_one_plateau_at_every_radius(generator):
    n = 500
    values = torch.cat([torch.tensor([40.0, 10.0]), torch.full((n - 2,), 0.1)]).double()
    found = perturb(
        lambda x: 0.5 * (values * x * x).sum(),
        torch.zeros(n, dtype=torch.float64),
        torch.eye(n, dtype=torch.float64)[:2],
        generator=generator,
        random=2000,
        radii=(1e-3, 1e-1, 1e2, 1e4),
    )
    for row, value in zip(found.score(), values, strict=False):
        expected = plateau_score(float(value), float(values.sum()), n)
        assert row.tolist() == pytest.approx([expected] * 4, rel=0.05)
    assert float(found.score()[0, 0]) > 100


def test_with_a_gradient_the_plateau_is_lost_as_the_radius_shrinks(generator):
    n = 500
    values = torch.cat([torch.tensor([40.0]), torch.full((n - 1,), 0.1)]).double()
    slope = random_vector(n, generator)
    top = torch.eye(n, dtype=torch.float64)[:1]
    found = perturb(
        lambda x: 0.5 * (values * x * x).sum() + slope @ x,
        torch.zeros(n, dtype=torch.float64),
        top,
        generator=generator,
        random=1000,
        radii=(1e-6, 1e4),
    )
    inner, outer = found.score()[0].tolist()
    assert inner == pytest.approx(slope_score(slope, top[0]), rel=0.1)
    assert inner < 5
    assert outer == pytest.approx(plateau_score(40.0, float(values.sum()), n), rel=0.1)


# ---- random matrices -----------------------------------------------------------------------------


def test_random_matrices_score_as_published(generator):
    """D -.001 +- .02 and S -.0002 +- .01: 100 x 100 Gaussian entries, not symmetric, 5 blocks."""
    labels = torch.arange(5).repeat_interleave(20)
    pairs = [torch.randn(2, 100, 100, generator=generator, dtype=torch.float64) for _ in range(300)]
    blocks = torch.tensor([block_diagonality(a, labels).value for a, _ in pairs])
    cosines = torch.tensor([spectral_similarity(a, b).value for a, b in pairs])
    assert abs(float(blocks.mean())) < 0.005
    assert 0.017 < float(blocks.std()) < 0.022
    assert abs(float(cosines.mean())) < 0.0025
    assert 0.009 < float(cosines.std()) < 0.0115


def test_symmetric_random_matrices_bias_block_diagonality_upwards(generator):
    labels = torch.arange(5).repeat_interleave(20)
    scores = []
    for _ in range(300):
        a = torch.randn(100, 100, generator=generator, dtype=torch.float64)
        scores.append(block_diagonality(a + a.T, labels).value)
    assert 0.01 < float(torch.tensor(scores).mean()) < 0.03
