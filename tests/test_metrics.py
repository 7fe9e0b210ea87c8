"""The metrics against hand-worked tables and dense float64 matrices."""

import math

import pytest
import torch
from torch import nn
from torch.func import functional_call, hessian
from torch.nn.functional import cross_entropy

from curvlab.metrics import (
    NORMS,
    accuracy_forgetting,
    average_accuracy,
    average_forgetting,
    backward_transfer,
    block_diagonality,
    current_accuracy,
    distances,
    effective_rank,
    expand,
    layer_labels,
    loss_forgetting,
    numerical_rank,
    old_pairs,
    perturb,
    previous_pairs,
    spectral_similarity,
    spectrum_above,
)
from curvlab.parameters import layout_of, select_parameters

NAN = float("nan")
EXACT = 1e-12  # float64 sums of a few dozen terms
FLOAT32 = 1e-5


class Dense:
    """A symmetric matrix as an operator that counts its products."""

    def __init__(self, matrix):
        self.matrix, self.n = matrix, matrix.shape[0]
        self.dtype, self.device, self.products = matrix.dtype, matrix.device, 0

    def __matmul__(self, vectors):
        self.products += 1 if vectors.dim() == 1 else vectors.shape[0]
        return vectors @ self.matrix


def symmetric(n, generator, rank=None):
    factor = torch.randn(n, rank or n, generator=generator, dtype=torch.float64)
    return factor @ factor.T / n


# ---- matrices ------------------------------------------------------------------------------------

ACCURACY = torch.tensor([[0.9, NAN, NAN], [0.7, 0.8, NAN], [0.5, 0.9, 0.6]])


def test_accuracy_forgetting_is_what_was_lost_since_a_task_was_learned():
    expected = torch.tensor([[0, 0, 0], [0.2, 0, 0], [0.4, -0.1, 0]], dtype=torch.float64)
    torch.testing.assert_close(accuracy_forgetting(ACCURACY), expected, atol=1e-7, rtol=0)


def test_loss_forgetting_has_the_opposite_sign():
    torch.testing.assert_close(loss_forgetting(ACCURACY), -accuracy_forgetting(ACCURACY))


def test_the_three_averages_differ_as_they_should():
    forgetting = accuracy_forgetting(ACCURACY.double())
    expected = {
        "t": [0, 0.2 / 2, 0.3 / 3],
        "t-1": [0, 0.2, 0.3 / 2],
        "pairs": [0, 0.2 / 3, 0.5 / 6],
    }
    for norm in NORMS:
        assert average_forgetting(forgetting, norm).tolist() == pytest.approx(expected[norm])


def test_the_published_averages_come_out_under_the_norm_each_table_uses():
    # Rotated-MNIST (lr 1e-2): E(2..5) of tab:Our-approx-full against mean E_o(t) of Table Taylor.
    forgetting = torch.zeros(5, 5, dtype=torch.float64)
    for t, mean in enumerate([0.36, 1.27, 2.45, 3.09], start=1):
        forgetting[t, :t] = mean
    assert average_forgetting(forgetting, "t-1")[1:].tolist() == pytest.approx(
        [0.36, 1.27, 2.45, 3.09]
    )
    assert float(old_pairs(forgetting).mean()) == pytest.approx(2.261, abs=5e-4)
    # CIFAR-10, ResNet with SGD: E(2..5) under 1/t against the column headed E(5) of tab:other-arch.
    forgetting = torch.zeros(5, 5, dtype=torch.float64)
    for t, mean in enumerate([0.0127, 0.0186, 0.0375, 0.0285], start=1):
        forgetting[t, :t] = mean * (t + 1) / t
    assert float(average_forgetting(forgetting, "t")[-1]) == pytest.approx(0.0285)
    assert float(average_forgetting(forgetting, "pairs")[-1]) == pytest.approx(0.0249, abs=5e-5)


def test_average_and_current_accuracy_and_backward_transfer():
    assert average_accuracy(ACCURACY.double()).tolist() == pytest.approx([0.9, 0.75, 2.0 / 3])
    assert current_accuracy(ACCURACY.double()).tolist() == pytest.approx([0.9, 0.8, 0.6])
    assert float(backward_transfer(ACCURACY.double())) == pytest.approx(0.15)


def test_seeds_pass_through_and_pairs_are_picked_below_the_diagonal():
    stacked = torch.stack([ACCURACY, ACCURACY + 0.1]).double()
    assert average_forgetting(accuracy_forgetting(stacked)).shape == (2, 3)
    forgetting = accuracy_forgetting(stacked)[0]
    assert old_pairs(forgetting).tolist() == pytest.approx([0.2, 0.4, -0.1])
    assert previous_pairs(forgetting).tolist() == pytest.approx([0.2, -0.1])


def test_a_single_task_has_forgotten_nothing():
    one = torch.tensor([[0.9]])
    assert [average_forgetting(accuracy_forgetting(one), n).tolist() for n in NORMS] == [[0.0]] * 3
    assert float(backward_transfer(one)) == 0.0


def test_a_missing_evaluation_is_named_and_a_wrong_shape_refused():
    hole = ACCURACY.clone()
    hole[2, 1] = NAN
    with pytest.raises(ValueError, match=r"accuracies\[2, 1\] is NaN"):
        average_accuracy(hole)
    with pytest.raises(ValueError, match=r"\(\.\.\., T, T\)"):
        average_accuracy(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="norm must be"):
        average_forgetting(ACCURACY.nan_to_num(), "T")


# ---- the quadratic model -------------------------------------------------------------------------


def path(tasks, n, generator, dtype=torch.float64):
    steps = torch.randn(tasks, n, generator=generator, dtype=torch.float64)
    return steps.cumsum(0).to(dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, EXACT), (torch.float32, FLOAT32)])
@pytest.mark.parametrize("tasks", [1, 2, 5])
def test_taylor_terms_equal_the_dense_ones_at_one_product_per_pair(
    tasks, dtype, tolerance, generator
):
    n = 23
    theta = path(tasks, n, generator, dtype)
    operators = [Dense(symmetric(n, generator).to(dtype)) for _ in range(tasks)]
    gradients = [torch.randn(n, generator=generator, dtype=dtype) for _ in range(tasks)]
    found = expand(theta, gradients, operators)
    assert sum(op.products for op in operators) == tasks * (tasks - 1) // 2 == found.products
    first, second = found.first_order(), found.second_order()
    for t in range(tasks):
        for o in range(tasks):
            d = (theta[t] - theta[o]).double()
            slope = float(gradients[o].double() @ d) if o < t else 0.0
            form = float(0.5 * d @ operators[o].matrix.double() @ d) if o < t else 0.0
            scale = n**0.5 * 10
            assert float(first[t, o]) == pytest.approx(slope, abs=tolerance * scale, rel=tolerance)
            assert float(second[t, o]) == pytest.approx(form, abs=tolerance * scale, rel=tolerance)
            assert float(found.taylor()[t, o]) == pytest.approx(
                slope + form, abs=tolerance * scale, rel=tolerance
            )
            assert float(found.distances[t, o]) == pytest.approx(float(d.norm()), rel=1e-5)


def test_the_violation_is_the_dense_form_without_a_half(generator):
    n, tasks = 11, 4
    theta = path(tasks, n, generator)
    matrices = [symmetric(n, generator) for _ in range(tasks)]
    matrices[1] -= 2 * torch.eye(n, dtype=torch.float64)  # indefinite: the sign must survive
    found = expand(theta, torch.zeros(tasks, n), map(Dense, matrices)).violation()
    for t in range(tasks):
        update = theta[t] - theta[t - 1] if t else torch.zeros(n, dtype=torch.float64)
        mean = sum(matrices[:t], torch.zeros(n, n, dtype=torch.float64)) / (t + 1)
        assert float(found[t]) == pytest.approx(float(update @ mean @ update), abs=EXACT)


@pytest.mark.parametrize("norm", ["t", "t-1"])
def test_the_recursion_follows_from_the_measured_forgetting_and_the_last_update(norm, generator):
    n, tasks = 9, 4
    theta = path(tasks, n, generator)
    matrices = [symmetric(n, generator) for _ in range(tasks)]
    measured = torch.randn(tasks, tasks, generator=generator, dtype=torch.float64).tril(-1)
    found = expand(theta, torch.zeros(tasks, n), map(Dense, matrices)).recursion(measured, norm)
    assert found[0] == 0
    for t in range(1, tasks):
        update = theta[t] - theta[t - 1]
        form = sum(0.5 * update @ matrices[o] @ update for o in range(t))
        v = sum((theta[t - 1] - theta[o]) @ matrices[o] for o in range(t))
        divisor = t + 1 if norm == "t" else t
        expected = (measured[t - 1].sum() + form + v @ update) / divisor
        assert float(found[t]) == pytest.approx(float(expected), abs=1e-11)


def test_operators_are_built_one_at_a_time(generator):
    alive = []

    def build():
        for _ in range(2):
            alive.append(len(alive))
            yield Dense(symmetric(5, generator))

    expand(path(3, 5, generator), torch.zeros(3, 5), build())
    assert alive == [0, 1]  # the last task's Hessian is not asked for


def test_the_expansion_refuses_what_does_not_fit(generator):
    theta = path(3, 5, generator)
    with pytest.raises(ValueError, match="ended at task 1"):
        expand(theta, torch.zeros(3, 5), [Dense(symmetric(5, generator))])
    with pytest.raises(ValueError, match="the operator 4"):
        expand(theta, torch.zeros(3, 5), [Dense(symmetric(4, generator))] * 3)
    found = expand(theta, torch.zeros(3, 5), [Dense(symmetric(5, generator))] * 3)
    with pytest.raises(ValueError, match="'t' or 't-1'"):
        found.recursion(torch.zeros(3, 3), "pairs")
    with pytest.raises(ValueError, match=r"\(3, 3\)"):
        found.recursion(torch.zeros(2, 2))


def test_a_small_distance_keeps_its_digits():
    far = torch.full((2, 1000), 1e4, dtype=torch.float64)
    far[1, 0] += 1e-6
    assert float(distances(far)[0, 1]) == pytest.approx(1e-6, rel=1e-4)


# ---- D and S -------------------------------------------------------------------------------------

LABELS = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2])


def dense_block_diagonality(matrix, labels):
    inside = labels[:, None] == labels[None, :]
    return float(1 - matrix[~inside].abs().mean() / matrix[inside].abs().mean())


def test_a_block_diagonal_matrix_scores_one_and_a_hollow_one_scores_low(generator):
    matrix = symmetric(9, generator)
    inside = LABELS[:, None] == LABELS[None, :]
    assert block_diagonality(matrix * inside, LABELS).value == 1.0
    assert block_diagonality(matrix * (~inside) + 1e-3 * inside, LABELS).value < -10


def test_block_diagonality_of_tensor_and_operator_equals_the_definition(generator):
    lopsided = torch.randn(9, 9, generator=generator, dtype=torch.float64)
    expected = dense_block_diagonality(lopsided, LABELS)
    assert block_diagonality(lopsided, LABELS).value == pytest.approx(expected, abs=EXACT)
    matrix = symmetric(9, generator)
    found = block_diagonality(Dense(matrix), LABELS)
    assert found.value == pytest.approx(dense_block_diagonality(matrix, LABELS), abs=EXACT)
    assert (found.error, found.samples) == (0.0, 9)


def uneven(generator):
    """Blocks of very different size and scale, as layers are."""
    labels = torch.repeat_interleave(torch.tensor([0, 1, 2, 3]), torch.tensor([200, 60, 30, 10]))
    scale = 1.0 + 2.0 * labels
    return symmetric(300, generator) * torch.outer(scale, scale), labels


def test_sampled_block_diagonality_is_within_its_error_bars(generator):
    matrix, labels = uneven(generator)
    truth = dense_block_diagonality(matrix, labels)
    scores = [
        block_diagonality(matrix, labels, columns=60, generator=generator) for _ in range(200)
    ]
    pulls = torch.tensor([(s.value - truth) / s.error for s in scores])
    assert abs(float(pulls.mean())) < 0.25
    assert 0.8 < float(pulls.std()) < 1.25
    assert all(abs(s.samples - 60) < 4 for s in scores)


def test_spectral_similarity_is_the_cosine_of_matrices(generator):
    a, b = symmetric(12, generator), symmetric(12, generator)
    expected = float((a * b).sum() / a.norm() / b.norm())
    for pair in [(a, b), (Dense(a), Dense(b)), (a, Dense(b))]:
        assert spectral_similarity(*pair).value == pytest.approx(expected, abs=EXACT)
    assert spectral_similarity(a, -3 * a).value == pytest.approx(-1.0, abs=EXACT)


def test_hutchinson_similarity_is_within_its_error_bars(generator):
    a = symmetric(200, generator)
    b = a + 0.1 * symmetric(200, generator, rank=3) * 200
    truth = spectral_similarity(a, b).value
    scores = [
        spectral_similarity(Dense(a), Dense(b), probes=40, generator=generator) for _ in range(100)
    ]
    pulls = torch.tensor([(s.value - truth) / s.error for s in scores])
    assert abs(float(pulls.mean())) < 0.4  # a ratio of estimates has a small bias
    assert 0.75 < float(pulls.std()) < 1.5


def test_equal_operators_have_similarity_one_from_any_probes(generator):
    a = Dense(symmetric(50, generator))
    found = spectral_similarity(a, a, probes=3, generator=generator)
    assert found.value == pytest.approx(1.0, abs=EXACT)
    assert found.error == pytest.approx(0.0, abs=1e-7)


def test_structure_scores_refuse_what_they_cannot_answer(generator):
    a = symmetric(9, generator)
    with pytest.raises(ValueError, match="two blocks"):
        block_diagonality(a, torch.zeros(9, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"labels must be \(9,\)"):
        block_diagonality(a, LABELS[:5])
    with pytest.raises(ValueError, match="generator"):
        block_diagonality(a, LABELS, columns=4)
    with pytest.raises(ValueError, match="probes >= 2"):
        spectral_similarity(a, a, probes=1, generator=generator)
    with pytest.raises(ValueError, match="zero matrix"):
        spectral_similarity(a, torch.zeros_like(a))
    with pytest.raises(ValueError, match="9 and 8"):
        spectral_similarity(a, symmetric(8, generator))
    with pytest.raises(ValueError, match=r"\(n, n\)"):
        block_diagonality(torch.zeros(3, 4), LABELS)


def test_a_layer_is_its_weight_and_bias_together():
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    labels = layer_labels(layout_of(select_parameters(model)))
    assert labels.tolist() == [0] * 9 + [1] * 4


# ---- the perturbation score ----------------------------------------------------------------------


def test_the_score_compares_a_direction_with_random_ones(generator):
    n = 50
    values = torch.linspace(1, 5, n, dtype=torch.float64)
    found = perturb(
        lambda x: 0.5 * (values * x * x).sum(),
        torch.zeros(n, dtype=torch.float64),
        torch.eye(n, dtype=torch.float64)[[n - 1, 0]] * 7,  # norms do not matter
        generator=generator,
        random=400,
        radii=(1e-3, 1.0, 1e4),
    )
    assert found.changes[0].tolist() == pytest.approx([2.5e-6, 2.5, 2.5e8])
    assert found.random_changes.shape == (400, 3)
    for row, value in zip(found.score(), (5.0, 1.0), strict=True):
        assert row.tolist() == pytest.approx([value / 3.0] * 3, rel=0.02)


def test_overflow_has_one_convention_on_each_side(generator):
    inf = float("inf")
    template = perturb(
        lambda x: x.sum(), torch.zeros(3), torch.eye(3), generator=generator, random=2
    )
    rows = torch.tensor([[2.0, inf, NAN, 2.0, inf, 0.0]])
    found = type(template)(
        radii=torch.arange(6.0),
        changes=rows,
        random_changes=torch.tensor(
            [[1.0, inf, 1.0, NAN, 1.0, 0.0], [3.0, NAN, 0.0, 1.0, 1.0, 0.0]]
        ),
        loss=0.0,
    )
    score = found.score()[0].tolist()
    assert score[:5] == [1.0, 1.0, inf, 0.0, inf]
    assert math.isnan(score[5])  # neither side moved: nothing was measured


def test_reach_is_where_the_score_comes_down_for_good(generator):
    template = perturb(
        lambda x: x.sum(), torch.zeros(3), torch.eye(3), generator=generator, random=2
    )
    found = type(template)(
        radii=torch.tensor([1.0, 2.0, 3.0, 4.0]),
        changes=torch.tensor([[9.0, 1.0, 9.0, 1.0], [9.0, 1.2, 1.9, 0.5], [9.0] * 4, [1.0] * 4]),
        random_changes=torch.ones(2, 4),
        loss=0.0,
    )
    assert found.reach().tolist() == [4.0, 2.0, float("inf"), 1.0]


def test_a_point_whose_loss_is_not_finite_is_refused(generator):
    with pytest.raises(ValueError, match="at the point itself"):
        perturb(lambda x: x.sum() / 0, torch.ones(3), torch.eye(3), generator=generator)
    with pytest.raises(ValueError, match=r"directions \(k, n\)"):
        perturb(lambda x: x.sum(), torch.ones(3), torch.eye(4), generator=generator)


# ---- ranks ---------------------------------------------------------------------------------------


def with_spectrum(values, generator):
    n = len(values)
    basis = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64)).Q
    return basis @ torch.diag(values) @ basis.T


def decaying(n, rank):
    values = torch.zeros(n, dtype=torch.float64)
    signs = torch.tensor([1.0, -1.0, 1.0]).repeat(n)[:rank]
    values[:rank] = 10.0 * signs * 0.8 ** torch.arange(rank)
    return values


@pytest.mark.parametrize(("threshold", "relative"), [(1.0, False), (0.1, True), (1e-2, True)])
def test_the_outer_spectrum_gives_the_rank_of_the_whole(threshold, relative, generator):
    values = decaying(150, 60)
    expected = effective_rank(values, threshold, relative=relative)
    matrix = Dense(with_spectrum(values, generator))
    found = spectrum_above(matrix, threshold, relative=relative, first=4, tol=1e-6)
    assert found.reached
    assert found.complete
    assert effective_rank(found.values, threshold, relative=relative) == expected
    assert found.values.abs().diff().max() <= 0
    kept = values[values.abs().argsort(descending=True)][:expected]
    torch.testing.assert_close(found.values[:expected], kept, rtol=1e-6, atol=0)
    assert 0 < found.products <= matrix.products


def test_a_rank_that_was_not_reached_is_called_a_lower_bound(generator):
    found = spectrum_above(Dense(with_spectrum(decaying(150, 60), generator)), 1e-3, most=10)
    assert not found.reached
    assert len(found.values) == 10


def test_a_matrix_of_low_rank_ends_at_its_zeros(generator):
    values = decaying(80, 12)
    found = spectrum_above(Dense(with_spectrum(values, generator)), 0.0, first=16)
    assert found.reached
    assert effective_rank(found.values, 1e-9) == 12


def test_numerical_rank_depends_on_the_precision_of_the_matrix(generator):
    values = torch.linalg.eigvalsh(with_spectrum(decaying(40, 7), generator))
    assert numerical_rank(values) == 7
    values[values.abs().argmin()] = -1e-5  # above float64 rounding, below float32's
    assert numerical_rank(values) == 8
    assert numerical_rank(values, torch.float32) == 7
    assert effective_rank(torch.zeros(0), 1.0, relative=True) == 0
    with pytest.raises(ValueError, match="0 or more"):
        effective_rank(values, -1.0)


# ---- on a network --------------------------------------------------------------------------------


def test_on_a_network_of_420_parameters_products_equal_the_dense_hessian(generator):
    """VNC and Taylor terms by products and by the dense Hessian are one number."""
    model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 10, bias=False)).double()
    parameters = select_parameters(model)
    layout = layout_of(parameters)
    assert layout.n == 420
    x = torch.randn(30, 10, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 10, (30,), generator=generator)

    def loss(flat):
        named = dict(zip(layout.names, layout.unflatten(flat), strict=True))
        return cross_entropy(functional_call(model, named, (x,)), y)

    theta = 0.1 * path(3, 420, generator)

    class Product:
        n, dtype, device = 420, torch.float64, torch.device("cpu")

        def __init__(self, point):
            self.point = point.clone().requires_grad_()
            self.gradient = torch.autograd.grad(loss(self.point), self.point, create_graph=True)[0]

        def __matmul__(self, vectors):
            return torch.stack(
                [
                    torch.autograd.grad(self.gradient, self.point, v, retain_graph=True)[0]
                    for v in vectors
                ]
            )

    products = [Product(point) for point in theta]
    found = expand(theta, [p.gradient for p in products], products)
    dense = [hessian(loss)(point) for point in theta]
    reference = expand(theta, [p.gradient for p in products], map(Dense, dense))
    for mine, truth in [
        (found.violation(), reference.violation()),
        (found.taylor(), reference.taylor()),
    ]:
        torch.testing.assert_close(mine, truth, atol=1e-12, rtol=1e-10)
    update = theta[2] - theta[1]
    mean = (dense[0] + dense[1]) / 3
    assert float(found.violation()[2]) == pytest.approx(float(update @ mean @ update), abs=1e-12)
