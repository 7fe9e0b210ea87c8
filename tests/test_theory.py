"""The paper's statements as checks: quadratic tasks, OGD-GTL, the projector, the scores."""

import math
from itertools import pairwise

import pytest
import torch
from torch.func import hessian
from torch.nn.functional import cross_entropy

from curvlab.basis import Basis
from curvlab.learners import EWC, SGDDagger
from curvlab.metrics import (
    block_diagonality,
    expand,
    perturb,
    spectral_similarity,
)
from curvlab.nets import mlp
from curvlab.tasks import Samples, Task
from curvlab.training import Schedule, learn
from tests.dense_truth import Dense
from tests.theory import (
    label_only_residual,
    null_space,
    penalised_update,
    plateau_score,
    projected_update,
    quadratic_forgetting,
    retraced_forgetting,
    retracing_update,
    slope_score,
    softmax_curvature,
)


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
        lambda x: {"loss": 0.5 * (values * x * x).sum()},
        torch.zeros(n, dtype=torch.float64),
        torch.eye(n, dtype=torch.float64)[:2],
        generator=generator,
        random=2000,
        radii=(1e-3, 1e-1, 1e2, 1e4),
    )["loss"]
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
        lambda x: {"loss": 0.5 * (values * x * x).sum() + slope @ x},
        torch.zeros(n, dtype=torch.float64),
        top,
        generator=generator,
        random=1000,
        radii=(1e-6, 1e4),
    )["loss"]
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


# ---- the projector of SGD-dagger -----------------------------------------------------------------


def eigenvectors_of(generator, n=300, tasks=4, k=7):
    """Rows ``(k, n)`` per task, some directions shared between tasks."""
    shared = torch.randn(3, n, generator=generator)
    own = [torch.randn(k - 3, n, generator=generator) for _ in range(tasks)]
    return [torch.linalg.qr(torch.cat([shared, rows]).T).Q.T.contiguous() for rows in own]


def memory_of(blocks, order):
    memory = Basis(blocks[0].shape[1], capacity=sum(len(rows) for rows in blocks))
    for number in order:
        memory.extend(blocks[number])
    return memory


def test_the_memory_is_orthonormal_and_removing_it_is_a_projection(generator):
    memory = memory_of(eigenvectors_of(generator), range(4))
    assert memory.size == 3 + 4 * 4  # shared directions are kept once
    rows = memory.rows()
    assert float((rows @ rows.T - torch.eye(len(rows))).abs().max()) < 1e-5
    gradient = torch.randn(300, generator=generator)
    once = gradient.clone()
    memory.project_out_(once)
    twice = once.clone()
    memory.project_out_(twice)
    assert float(once.norm()) < float(gradient.norm())
    assert float((twice - once).norm()) < 1e-5 * float(once.norm())
    assert float((rows @ once).abs().max()) < 1e-5


def test_the_span_does_not_depend_on_the_order_of_tasks(generator):
    blocks = eigenvectors_of(generator)
    forward, backward = memory_of(blocks, [0, 1, 2, 3]), memory_of(blocks, [3, 1, 0, 2])
    gradient = torch.randn(300, generator=generator)
    one, other = gradient.clone(), gradient.clone()
    forward.project_out_(one)
    backward.project_out_(other)
    torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


def test_an_empty_memory_changes_no_bit_and_a_full_one_leaves_nothing(generator):
    gradient = torch.randn(40, generator=generator)
    untouched = gradient.clone()
    Basis(40, capacity=0).project_out_(untouched)
    assert torch.equal(untouched, gradient)
    full = Basis(40, capacity=40)
    full.extend(torch.randn(40, 40, generator=generator))
    assert full.size == 40
    full.project_out_(gradient)
    assert float(gradient.abs().max()) < 1e-5


# ---- regularisation and isolation ----------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 3, 8])
def test_a_penalised_update_tends_to_the_projected_one_as_one_over_its_strength(generator, rank):
    n = 12
    old = low_rank(n, rank, generator) / n
    new = low_rank(n, n, generator) / n + torch.eye(n, dtype=torch.float64)
    gradient = torch.randn(n, generator=generator, dtype=torch.float64)
    limit = projected_update(gradient, new, old)
    assert float(limit @ old @ limit) < 1e-14  # the null-forgetting constraint, eq. opt-cond
    strengths = [1e3, 1e4, 1e5]
    updates = [penalised_update(gradient, new, old, strength) for strength in strengths]
    gaps = [float((one - limit).norm()) for one in updates]
    forgotten = [float(one @ old @ one) / 2 for one in updates]
    if rank == 0:
        assert max(gaps) < 1e-12
        return
    for one, next_one in pairwise(range(3)):
        assert gaps[next_one] / gaps[one] == pytest.approx(0.1, rel=0.05)
        assert forgotten[next_one] / forgotten[one] == pytest.approx(0.01, rel=0.1)


def test_projected_descent_ends_at_the_projected_update(generator):
    old = low_rank(9, 4, generator)
    new = low_rank(9, 9, generator) / 9 + torch.eye(9, dtype=torch.float64)
    gradient = torch.randn(9, generator=generator, dtype=torch.float64)
    memory = Basis(9, capacity=9, dtype=torch.float64)
    values, vectors = torch.linalg.eigh(old)
    memory.extend(vectors.T[values > 1e-10])
    point = torch.zeros(9, dtype=torch.float64)
    for _ in range(500):
        step = gradient + new @ point
        memory.project_out_(step)
        point = point - 0.1 * step
    torch.testing.assert_close(point, projected_update(gradient, new, old), atol=1e-10, rtol=0)


def test_ewc_of_great_strength_learns_what_sgd_dagger_learns_where_the_fisher_is_the_hessian():
    """A linear softmax on inputs of one feature each: its Hessian couples the classes alone.

    The Fisher's diagonal freezes both entries of a feature and the projection their difference,
    which is all that logits depend on: the differences of logits agree in the limit.
    """
    generator = torch.Generator().manual_seed(0)
    which = torch.arange(36) % 3
    first = torch.zeros(36, 6, dtype=torch.float64)
    first[torch.arange(36), which] = 1.0
    second = torch.randn(40, 6, generator=generator, dtype=torch.float64)
    labels = [torch.randint(0, 2, (len(x),), generator=generator) for x in (first, second)]
    tasks = [
        Task(name, Samples(x, y), Samples(x, y), 2)
        for name, x, y in zip("ab", (first, second), labels, strict=True)
    ]

    def ended(learner, lr, epochs):
        schedule = Schedule(0.5, lr_later=lr, epochs=400, epochs_later=epochs)
        build = lambda seed: mlp((6, 2), bias=False, seed=seed, dtype=torch.float64)  # noqa: E731
        (run,) = learn(build, tasks, learner, schedule, seeds=1, batch_size=40)
        weights = run.snapshots.view(2, 2, 6)
        return weights[:, 0] - weights[:, 1]

    before, projected = ended(SGDDagger(epsilon=1e-9, samples=36, tol=1e-9), 0.5, 400)
    assert float((projected - before)[:3].abs().max()) < 1e-9
    gaps = []
    for strength in (100.0, 1000.0):
        lr = 15.0 / strength  # F is at most 1 / 12 here, and lr * strength * F must stay below 2
        _, penalised = ended(EWC(strength, samples=36), lr, int(200 / lr))
        gaps.append(float((penalised - projected).norm()))
    assert gaps[1] / gaps[0] == pytest.approx(0.1, rel=0.1)
