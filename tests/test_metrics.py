"""Metrics over matrices and the quadratic model, against hand-worked tables and dense Hessians."""

import math

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, hessian
from torch.nn.functional import cross_entropy

from curvlab.metrics import (
    NORMS,
    LowRank,
    accuracy_forgetting,
    average_accuracy,
    average_forgetting,
    block_diagonality,
    current_accuracy,
    distances,
    expand,
    layer_labels,
    loss_forgetting,
    measures_at,
    old_pairs,
    previous_pairs,
    spectral_similarity,
)
from curvlab.operators import GaussNewton, Hessian, average
from curvlab.parameters import (
    layout_of,
    load_parameter_vector,
    parameter_vector,
    select_parameters,
)
from curvlab.tasks import Samples
from tests.dense_truth import Dense, symmetric

NAN = float("nan")
EXACT = 1e-12  # float64 sums of a few dozen terms
FLOAT32 = 1e-5


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


def test_average_and_current_accuracy():
    assert average_accuracy(ACCURACY.double()).tolist() == pytest.approx([0.9, 0.75, 2.0 / 3])
    assert current_accuracy(ACCURACY.double()).tolist() == pytest.approx([0.9, 0.8, 0.6])


def test_seeds_pass_through_and_pairs_are_picked_below_the_diagonal():
    stacked = torch.stack([ACCURACY, ACCURACY + 0.1]).double()
    assert average_forgetting(accuracy_forgetting(stacked)).shape == (2, 3)
    forgetting = accuracy_forgetting(stacked)[0]
    assert old_pairs(forgetting).tolist() == pytest.approx([0.2, 0.4, -0.1])
    assert previous_pairs(forgetting).tolist() == pytest.approx([0.2, -0.1])


def test_a_single_task_has_forgotten_nothing():
    one = torch.tensor([[0.9]])
    assert [average_forgetting(accuracy_forgetting(one), n).tolist() for n in NORMS] == [[0.0]] * 3


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


# ---- on a network --------------------------------------------------------------------------------


def dense_block_diagonality(matrix, labels):
    inside = labels[:, None] == labels[None, :]
    return float(1 - matrix[~inside].abs().mean() / matrix[inside].abs().mean())


@pytest.fixture(scope="module")
def network():
    """A network of 420 parameters, data, three points and the dense Hessians there."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 10, bias=False)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    layout = layout_of(select_parameters(model))
    samples = Samples(
        torch.randn(30, 10, generator=generator, dtype=torch.float64),
        torch.randint(0, 10, (30,), generator=generator),
    )

    def loss(flat):
        named = dict(zip(layout.names, layout.unflatten(flat), strict=True))
        return cross_entropy(functional_call(model, named, (samples.inputs,)), samples.targets)

    theta = parameter_vector(model) + 0.1 * path(3, layout.n, generator)
    return model, samples, loss, theta, [hessian(loss)(point) for point in theta]


def at(model, point):
    load_parameter_vector(model, point)
    return model


def test_on_420_parameters_products_give_the_numbers_of_the_dense_hessian(network):
    model, samples, loss, theta, dense = network
    assert theta.shape[1] == 420
    data = (samples.inputs, samples.targets)
    operators = [Hessian(at(model, point), nn.CrossEntropyLoss(), data) for point in theta]
    gradients = [operator.gradient() for operator in operators]
    found = expand(theta, gradients, operators)
    truth = expand(theta, [grad(loss)(point) for point in theta], map(Dense, dense))
    for mine, reference in [
        (found.violation(), truth.violation()),
        (found.taylor(), truth.taylor()),
        (found.recursion(torch.zeros(3, 3)), truth.recursion(torch.zeros(3, 3))),
    ]:
        torch.testing.assert_close(mine, reference, atol=1e-12, rtol=1e-10)
    update = theta[2] - theta[1]
    mean = (dense[0] + dense[1]) / 3
    assert float(found.violation()[2]) == pytest.approx(float(update @ mean @ update), abs=1e-12)
    whole = average(operators[:2])
    assert float(2 / 3 * (update @ (whole @ update))) == pytest.approx(float(found.violation()[2]))


def test_scores_of_a_networks_operators_are_those_of_its_matrices(network, generator):
    model, samples, _, theta, dense = network
    data = (samples.inputs, samples.targets)
    full = Hessian(at(model, theta[0]), nn.CrossEntropyLoss(), data)
    outer = GaussNewton(model, nn.CrossEntropyLoss(), data)
    labels = layer_labels(full.layout)
    exact = dense_block_diagonality(dense[0], labels)
    assert block_diagonality(full, labels).value == pytest.approx(exact, abs=1e-10)
    some = block_diagonality(full, labels, columns=100, generator=generator)
    assert abs(some.value - exact) < 4 * some.error
    cosine = spectral_similarity(outer.dense(), dense[0]).value
    assert cosine < 0.99
    some = spectral_similarity(outer, full, probes=200, generator=generator)
    assert abs(some.value - cosine) < 4 * some.error
    assert some.error < 0.1


def test_a_low_rank_hessian_comes_nearer_with_its_rank(network):
    _, _, _, theta, dense = network
    truth = expand(theta, torch.zeros(3, 420), map(Dense, dense)).second_order()
    pairs = [torch.linalg.eigh(matrix) for matrix in dense]
    errors = []
    for rank in (0, 20, 100, 420):
        operators = []
        for values, columns in pairs:
            order = values.abs().argsort(descending=True)[:rank]
            operators.append(LowRank(values[order], columns.T[order]))
        found = expand(theta, torch.zeros(3, 420), operators).second_order()
        errors.append(float((found - truth).abs().max()))
    assert errors[0] > errors[2] > errors[3]
    assert errors[3] < 1e-10
    with pytest.raises(ValueError, match=r"vectors \(r, n\)"):
        LowRank(torch.zeros(2), torch.zeros(3, 5))


def test_loss_bounded_loss_and_error_are_means_over_samples(network):
    model, samples, loss, theta, _ = network
    function = measures_at(at(model, theta[0]), samples, rows=7)  # 30 = 4 * 7 + 2
    load_parameter_vector(model, theta[2])  # must not matter
    assert float(function(theta[1])["loss"]) == pytest.approx(float(loss(theta[1])), rel=1e-12)
    found = measures_at(model, samples, rows=7)(1e3 * theta[2])
    load_parameter_vector(model, 1e3 * theta[2])
    outputs = model(samples.inputs)
    expected = float((outputs.argmax(1) != samples.targets).double().mean())
    assert float(found["error"]) == pytest.approx(expected)
    chosen = outputs.softmax(1).gather(1, samples.targets[:, None]).clamp_min(1e-7)
    assert float(found["bounded"]) == pytest.approx(float(-chosen.log().mean()))
    assert float(found["bounded"]) <= -math.log(1e-7) < float(found["loss"])
    noisy = nn.Sequential(nn.Linear(10, 10), nn.Dropout(0.5)).double()
    function = measures_at(noisy, samples)
    point = parameter_vector(noisy)
    assert function(point) == function(point)
    assert noisy.training
