"""The objective is the mean (or sum) over all samples, whatever the batches look like."""

import functools
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import curvlab.batches
from curvlab.operators import EmpiricalFisher, Fisher, GaussNewton, Hessian, Objective
from curvlab.refusals import Refusal
from tests.dense_truth import dense_hessian

TOLERANCE = 1e-12  # relative, float64


def network(inputs=4, classes=3):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(inputs, 3), nn.Tanh(), nn.Linear(3, classes)).double()


def samples(n=11, inputs=4, classes=3):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, inputs, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, classes, (n,), generator=generator)


def assert_same(operator, truth):
    error = float((operator.dense() - truth).norm() / truth.norm())
    assert error < TOLERANCE, f"relative error {error:.1e}"


def test_targets_and_inputs_in_the_wrong_order_are_named():
    model, (x, y) = network(), samples()
    for data in ((y, x), [(y[:5], x[:5]), (y[5:], x[5:])]):
        with pytest.raises(Refusal, match=r"seem to be \(targets, inputs\).*int64"):
            Hessian(model, F.cross_entropy, data)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):  # wrong both ways
        Hessian(model, F.cross_entropy, (x[:, :-1], y))


@pytest.mark.parametrize("chunk", [None, 1, 4, 5, 100, "batch"])
def test_a_short_last_batch_counts_by_its_size(chunk):
    model, (x, y) = network(), samples()
    batches = [(x[:5], y[:5]), (x[5:10], y[5:10]), (x[10:], y[10:])]
    truth = dense_hessian(model, lambda m: F.cross_entropy(m(x), y))
    assert_same(Hessian(model, nn.CrossEntropyLoss(), batches, chunk=chunk), truth)


def test_all_forms_of_data_are_the_same_operator():
    model, (x, y) = network(), samples()
    truth = dense_hessian(model, lambda m: F.cross_entropy(m(x), y))

    @dataclass
    class Samples:
        inputs: torch.Tensor
        targets: torch.Tensor

    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    shuffled = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)
    for data in [(x, y), Samples(x, y), loader, curvlab.batches.freeze(shuffled)]:
        assert_same(Hessian(model, F.cross_entropy, data), truth)


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(reduction="sum"),
        functools.partial(F.cross_entropy, reduction="sum"),
        lambda z, y: F.cross_entropy(z, y, reduction="sum"),
    ],
    ids=["module", "partial", "function"],
)
def test_a_sum_stays_a_sum(loss):
    model, (x, y) = network(), samples()
    truth = dense_hessian(model, lambda m: F.cross_entropy(m(x), y, reduction="sum"))
    operator = Hessian(model, loss, [(x[:4], y[:4]), (x[4:], y[4:])], chunk=3)
    assert_same(operator, truth)
    assert operator.loss == pytest.approx(float(F.cross_entropy(model(x), y)) * len(x))
    outer = GaussNewton(model, nn.CrossEntropyLoss(reduction="sum"), (x, y))
    fisher = Fisher(model, nn.CrossEntropyLoss(reduction="sum"), (x, y))
    assert_same(fisher, outer.dense())


def test_loss_and_gradient_are_those_of_the_whole_data_set():
    model, (x, y) = network(), samples()
    loss = F.cross_entropy(model(x), y)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    operator = Hessian(model, F.cross_entropy, (x, y), chunk=4)
    assert operator.loss == pytest.approx(loss.item(), rel=1e-12)
    assert operator.samples == 11
    flat = torch.cat([g.reshape(-1) for g in gradients])
    assert torch.allclose(operator.gradient(), flat, rtol=1e-12, atol=1e-14)


def weighted_loss():
    return nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.2], dtype=torch.float64))


@pytest.mark.parametrize("order", ["mixed", "sorted by class"])
def test_class_weights_are_refused_until_count_says_what_the_mean_divides_by(order):
    model, (x, y), loss = network(), samples(30), weighted_loss()
    if order == "sorted by class":
        y, index = y.sort()
        x = x[index]
    with pytest.raises(ValueError, match="count="):
        Hessian(model, loss, (x, y), chunk=4)
    operator = Hessian(
        model, loss, (x, y), chunk=4, count=lambda batch: loss.weight[batch[1]].sum()
    )
    assert_same(operator, dense_hessian(model, lambda m: loss(m(x), y)))


def test_class_weights_are_noticed_even_if_every_chunk_is_of_one_class():
    model, (x, _) = network(), samples(36)
    y = torch.arange(36) // 12
    with pytest.raises(ValueError, match="count="):
        Hessian(model, weighted_loss(), (x, y), chunk=12)


def test_ignored_targets_are_refused_until_count_leaves_them_out():
    model, (x, y) = network(), samples(20)
    y[[1, 2, 3, 12]] = -100
    with pytest.raises(ValueError, match="ignore_index"):
        Hessian(model, F.cross_entropy, (x, y))
    operator = Hessian(
        model, F.cross_entropy, (x, y), chunk=2, count=lambda b: float((b[1] != -100).sum())
    )
    assert_same(operator, dense_hessian(model, lambda m: F.cross_entropy(m(x), y)))


def test_a_wrong_reduction_is_refused():
    model, data = network(), samples()
    with pytest.raises(ValueError, match="not the sum over its samples"):
        Hessian(model, lambda z, y: F.cross_entropy(z, y), data, reduction="sum")


def contrastive(model, x):
    z = model(x)
    return torch.logsumexp(z @ z.T, 1).mean()


def test_coupled_samples_are_refused_unless_batches_stay_whole():
    model, (x, _) = network(), samples(12)
    with pytest.raises(ValueError, match="coupled"):
        Hessian(model, Objective(contrastive), [x[:8], x[8:]])
    operator = Hessian(model, Objective(contrastive), [x[:8], x[8:]], chunk="batch")
    truth = dense_hessian(
        model, lambda m: (8 * contrastive(m, x[:8]) + 4 * contrastive(m, x[8:])) / 12
    )
    assert_same(operator, truth)


def test_time_first_batches_need_a_count():
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.out = nn.RNN(2, 3), nn.Linear(3, 2)

        def forward(self, x):
            return self.out(self.cell(x)[0][-1])

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Last().double()
        batches = [
            (torch.randn(4, n, 2, dtype=torch.float64), torch.randint(0, 2, (n,))) for n in (3, 5)
        ]
    with pytest.raises(ValueError, match="count="):
        Hessian(model, F.cross_entropy, batches)
    operator = Hessian(model, F.cross_entropy, batches, count=lambda b: len(b[1]))
    truth = dense_hessian(
        model, lambda m: sum(len(y) * F.cross_entropy(m(x), y) for x, y in batches) / 8
    )
    assert_same(operator, truth)


def test_an_objective_of_model_and_batch_is_differentiated_as_it_is():
    model, (x, y) = network(), samples()

    def objective(m, batch):
        penalty = sum((p**4).sum() for p in m.parameters())
        return F.cross_entropy(m(batch["x"]), batch["y"]) + 0.1 * penalty

    operator = Hessian(model, Objective(objective), {"x": x, "y": y}, chunk=4)
    assert_same(operator, dense_hessian(model, lambda m: objective(m, {"x": x, "y": y})))


def test_an_objective_may_ignore_its_argument_and_use_the_model_it_closed_over():
    model, (x, y) = network(), samples()
    operator = Hessian(
        model, Objective(lambda _, b: F.cross_entropy(model(b[0]), b[1])), (x, y), chunk=4
    )
    assert_same(operator, dense_hessian(model, lambda m: F.cross_entropy(m(x), y)))


@dataclass
class ModelOutput:
    logits: torch.Tensor
    loss: torch.Tensor | None = None


class Classifier(nn.Module):
    """Calls and answers as Hugging Face models do."""

    def __init__(self):
        super().__init__()
        self.body = network()

    def forward(self, features, scale=None, labels=None):
        logits = self.body(features if scale is None else features * scale)
        return ModelOutput(logits, None if labels is None else F.cross_entropy(logits, labels))


def test_dict_batches_work_with_a_loss_of_logits_and_with_the_models_own_loss():
    model, (x, y) = Classifier(), samples()
    scale = torch.rand(11, 1, dtype=torch.float64)
    data = {"features": x, "scale": scale, "labels": y}
    truth = dense_hessian(model, lambda m: F.cross_entropy(m.body(x * scale), y))
    assert_same(Hessian(model, None, data, chunk=3), truth)
    assert_same(Hessian(model, F.cross_entropy, [data], chunk=3), truth)
    outer = GaussNewton(model, F.cross_entropy, data, chunk=3).dense()
    assert_same(GaussNewton(model.body, F.cross_entropy, (x * scale, y)), outer)


def test_several_inputs_are_passed_as_arguments():
    model, (x, y) = nn.Bilinear(4, 4, 3).double(), samples()
    data = ((x, torch.tanh(x)), y)
    assert_same(
        Hessian(model, F.cross_entropy, data),
        dense_hessian(model, lambda m: F.cross_entropy(m(x, torch.tanh(x)), y)),
    )


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kind", ["categorical", "per token", "normal", "bernoulli"])
def test_drawn_fisher_approaches_the_exact_one_and_ignores_the_chunks(kind, reduction):
    model, (x, y) = network(), samples(6)
    if kind == "categorical":
        loss = nn.CrossEntropyLoss(reduction=reduction)
    elif kind == "per token":
        model = nn.Sequential(network(4, 6), nn.Unflatten(1, (3, 2)))
        loss, y = nn.CrossEntropyLoss(reduction=reduction), torch.stack([y, y], 1)
    elif kind == "normal":
        loss, y = nn.MSELoss(reduction=reduction), torch.randn(6, 3, dtype=torch.float64)
    else:
        loss = nn.BCEWithLogitsLoss(reduction=reduction)
        y = (torch.randn(6, 3, dtype=torch.float64) > 0).double()
    exact = Fisher(model, loss, (x, y)).dense()
    assert_same(GaussNewton(model, loss, (x, y)), exact)
    drawn = Fisher(model, loss, (x, y), samples=1500, seed=3, check=False).dense()
    assert float((drawn - exact).norm() / exact.norm()) < 0.1
    few = [
        Fisher(model, loss, (x, y), samples=2, seed=seed, chunk=chunk, check=False).dense()
        for seed, chunk in [(0, None), (0, 2), (1, None)]
    ]
    assert torch.allclose(few[0], few[1], rtol=1e-12, atol=1e-14)
    assert not torch.allclose(few[0], few[2], rtol=1e-3)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_empirical_fisher_is_the_second_moment_of_sample_gradients(reduction):
    model, (x, y) = network(), samples()
    rows = []
    for i in range(len(x)):
        pieces = torch.autograd.grad(
            F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]), list(model.parameters())
        )
        rows.append(torch.cat([piece.reshape(-1) for piece in pieces]))
    gradients = torch.stack(rows)
    truth = gradients.T @ gradients / (len(x) if reduction == "mean" else 1)
    loss = nn.CrossEntropyLoss(reduction=reduction)
    assert_same(EmpiricalFisher(model, loss, [(x[:4], y[:4]), (x[4:], y[4:])], chunk=3), truth)
