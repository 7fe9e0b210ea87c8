"""D and S with their error bars, the perturbation score, ranks: against dense matrices."""

import math

import pytest
import torch
from torch import nn

from curvlab.eigen import lanczos, spectral_density
from curvlab.learners import SGD
from curvlab.metrics import (
    OuterProducts,
    Perturbation,
    block_diagonality,
    counts_above,
    effective_rank,
    layer_labels,
    measures_at,
    perturb,
    spectral_similarity,
    spectrum_above,
)
from curvlab.nets import mlp
from curvlab.operators import Hessian
from curvlab.parameters import layout_of, parameter_vector, select_parameters
from curvlab.tasks import Samples, Task
from curvlab.training import Schedule, learn
from tests.dense_truth import Dense, symmetric

NAN = float("nan")
EXACT = 1e-12  # float64 sums of a few dozen terms


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
        lambda x: {"loss": 0.5 * (values * x * x).sum()},
        torch.zeros(n, dtype=torch.float64),
        torch.eye(n, dtype=torch.float64)[[n - 1, 0]] * 7,  # norms do not matter
        generator=generator,
        random=400,
        radii=(1e-3, 1.0, 1e4),
    )["loss"]
    assert found.changes[0].tolist() == pytest.approx([2.5e-6, 2.5, 2.5e8])
    assert found.random_changes.shape == (400, 3)
    for row, value in zip(found.score(), (5.0, 1.0), strict=True):
        assert row.tolist() == pytest.approx([value / 3.0] * 3, rel=0.02)


def test_overflow_has_one_convention_on_each_side():
    inf = float("inf")
    rows = torch.tensor([[2.0, inf, NAN, 2.0, inf, 0.0]])
    found = Perturbation(
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


def test_reach_is_where_the_score_comes_down_for_good():
    found = Perturbation(
        radii=torch.tensor([1.0, 2.0, 3.0, 4.0]),
        changes=torch.tensor([[9.0, 1.0, 9.0, 1.0], [9.0, 1.2, 1.9, 0.5], [9.0] * 4, [1.0] * 4]),
        random_changes=torch.ones(2, 4),
        loss=0.0,
    )
    assert found.reach().tolist() == [4.0, 2.0, float("inf"), 1.0]


def test_far_out_bounded_losses_score_one_and_the_loss_of_a_relu_network_does_not(generator):
    inputs = torch.randn(90, 6, generator=generator)
    samples = Samples(inputs, inputs[:, :3].argmax(1))
    model = mlp((6, 16, 16, 3), seed=0)
    task = Task("toy", samples, samples, classes=3)
    learn(model, [task], SGD(), Schedule(lr=0.2, epochs=40), seeds=0)
    curvature = Hessian(model, nn.CrossEntropyLoss(), (samples.inputs, samples.targets))
    top = lanczos(curvature, 1, progress=False).vectors
    options = {"generator": generator, "random": 40, "radii": (1e-1, 1e3, 1e4)}
    point = parameter_vector(model)
    found = perturb(measures_at(model, samples), point, top, **options)
    loss, bounded, error = (found[name].score()[0] for name in ("loss", "bounded", "error"))
    assert float(error[-1]) == pytest.approx(1.0, abs=0.4)
    assert float(bounded[-1]) == pytest.approx(1.0, abs=0.4)
    assert float(loss[-1]) == pytest.approx(float(loss[-2]), rel=0.1)  # a constant, but not 1
    assert float(loss[-1]) > 5


def test_several_losses_in_one_pass_are_those_of_a_pass_each(generator):
    def losses(x):
        return {"square": x @ x, "sum": x.sum()}

    point, directions = torch.ones(3), torch.eye(3)
    state = generator.get_state()
    both = perturb(losses, point, directions, generator=generator, random=5)
    for name in ("square", "sum"):
        generator.set_state(state)
        one = perturb(lambda x, name=name: {name: losses(x)[name]}, point, directions,
                      generator=generator, random=5)  # fmt: skip
        alone = one[name]
        assert torch.equal(alone.changes, both[name].changes)
        assert torch.equal(alone.random_changes, both[name].random_changes)
        assert alone.loss == both[name].loss


def test_outer_products_are_the_mean_of_the_rows_squared(generator):
    rows = torch.randn(7, 5, generator=generator, dtype=torch.float64)
    truth = sum(torch.outer(row, row) for row in rows) / 7
    assert torch.allclose(OuterProducts(rows).dense(), truth, atol=1e-14)
    with pytest.raises(ValueError, match=r"rows must be \(m, n\)"):
        OuterProducts(rows[:0])


def test_a_point_whose_loss_is_not_finite_is_refused(generator):
    with pytest.raises(ValueError, match="at the point itself"):
        perturb(lambda x: {"loss": x.sum() / 0}, torch.ones(3), torch.eye(3), generator=generator)
    with pytest.raises(ValueError, match=r"directions \(k, n\)"):
        perturb(lambda x: {"loss": x.sum()}, torch.ones(3), torch.eye(4), generator=generator)


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


def test_ctrl_c_while_counting_a_spectrum_stops_the_count(generator):
    class Stopped(Dense):
        def __matmul__(self, vectors):
            if self.products > 20:
                raise KeyboardInterrupt
            return super().__matmul__(vectors)

    with pytest.raises(KeyboardInterrupt, match="interrupted after"):
        spectrum_above(Stopped(with_spectrum(decaying(1500, 60), generator)), 1e-3)


def test_the_rank_of_nothing_is_zero_and_thresholds_are_not_negative():
    assert effective_rank(torch.zeros(0), 1.0, relative=True) == 0
    with pytest.raises(ValueError, match="threshold= must lie in"):
        effective_rank(torch.ones(3), -1.0)


def test_a_count_by_quadrature_agrees_with_the_enumeration(generator):
    matrix = Dense(with_spectrum(decaying(150, 60), generator))
    exact = effective_rank(spectrum_above(matrix, 1.0).values, 1.0)
    found = spectral_density(matrix, probes=20, steps=40).count_above(1.0)
    assert abs(found.value - exact) < 3 * found.error


def test_counts_are_exact_where_enumerated_and_sharper_below_than_quadrature_alone(generator):
    values = torch.cat([decaying(400, 20)[:20], torch.linspace(-1e-2, 2e-2, 380).double()])
    matrix = Dense(with_spectrum(values, generator))
    outer = spectrum_above(matrix, 0.15, first=20, tol=1e-6)
    cuts = (1.0, 1.5e-2, 5e-3)
    found = counts_above(matrix, outer, cuts, probes=8, steps=30)
    whole = spectral_density(matrix, probes=8, steps=30)
    assert (found[0].value, found[0].error) == (effective_rank(values, 1.0), 0.0)
    for cut, count in zip(cuts[1:], found[1:], strict=True):
        assert abs(count.value - effective_rank(values, cut)) < 3 * count.error
        assert count.error < 0.5 * whole.count_above(cut).error
