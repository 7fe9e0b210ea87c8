"""What has no single Hessian is refused by name, with the cure; named policies make it one."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from curvlab.operators import (
    EmpiricalFisher,
    Fisher,
    FunctionalHessian,
    GaussNewton,
    Hessian,
    Objective,
)
from curvlab.probe import OperatorError
from tests.dense_truth import dense_hessian, relative
from tests.wrong_derivatives import Cube, Uneven, Using

TOLERANCE = 1e-12  # relative, float64


def seeded(build):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build().double()


def samples(n=12):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (n,), generator=generator)


def network(*middle):
    return seeded(lambda: nn.Sequential(nn.Linear(4, 4), *middle, nn.Tanh(), nn.Linear(4, 3)))


@pytest.mark.parametrize(
    "module",
    [
        nn.Dropout(0.2),
        nn.AlphaDropout(0.2),
        nn.MultiheadAttention(4, 2, dropout=0.1, batch_first=True),
        nn.LSTM(4, 2, num_layers=2, dropout=0.1),
    ],
    ids=lambda module: type(module).__name__,
)
def test_train_mode_dropout_is_refused_by_name(module):
    model = network(module).train()
    with pytest.raises(ValueError, match=rf'1 \({type(module).__name__}\).*mode="eval"'):
        Hessian(model, F.cross_entropy, samples())


def test_dropout_with_probability_zero_is_no_reason_to_refuse():
    Hessian(network(nn.Dropout(0.0)).train(), F.cross_entropy, samples())


class FunctionalDropout(nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.3, training=True)


def test_functional_dropout_is_caught_by_evaluating_twice():
    with pytest.raises(ValueError, match="random numbers"):
        Hessian(network(FunctionalDropout()), F.cross_entropy, samples())


def test_eval_mode_is_used_without_changing_the_model():
    model = network(nn.Dropout(0.5), nn.BatchNorm1d(4)).train()
    x, y = samples()
    operator = Hessian(model, F.cross_entropy, (x, y), mode="eval")
    assert all(module.training for module in model.modules())
    truth = dense_hessian(model.eval(), lambda m: F.cross_entropy(m(x), y))
    assert relative(operator.dense(), truth) < TOLERANCE


@pytest.mark.parametrize("dropout", [nn.Dropout(0.4), FunctionalDropout()], ids=["module", "call"])
@pytest.mark.parametrize("engine", ["retained", "rebuilt"])
def test_frozen_masks_are_the_same_in_every_product(dropout, engine):
    model = network(dropout).train()
    x, y = samples()
    data = [(x[:7], y[:7]), (x[7:], y[7:])]
    operator = Hessian(model, F.cross_entropy, data, mode="frozen-masks", engine=engine)
    first = operator.dense()
    torch.manual_seed(99)
    assert torch.equal(first, operator.dense())
    other = Hessian(model, F.cross_entropy, data, mode="frozen-masks")
    assert relative(other.dense(), first) < TOLERANCE
    plain = (
        Hessian(model.eval(), F.cross_entropy, data) if isinstance(dropout, nn.Dropout) else None
    )
    assert plain is None or relative(plain.dense(), first) > 1e-2


def test_train_mode_batch_norm_is_refused_unless_batch_statistics_are_asked_for():
    model = network(nn.BatchNorm1d(4)).train()
    x, y = samples()
    with pytest.raises(ValueError, match=r'1 \(BatchNorm1d\).*"batch-statistics"'):
        Hessian(model, F.cross_entropy, (x, y))
    data = [(x[:7], y[:7]), (x[7:], y[7:])]
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for engine in ("retained", "rebuilt"):
        operator = Hessian(model, F.cross_entropy, data, mode="batch-statistics", engine=engine)
        matrix = operator.dense()
        outer = GaussNewton(model, F.cross_entropy, data, mode="batch-statistics", engine=engine)
        rest = FunctionalHessian(model, F.cross_entropy, data, mode="batch-statistics")
        assert relative((outer + rest).dense(), matrix) < TOLERANCE
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())

    def objective(m):
        return (7 * F.cross_entropy(m(x[:7]), y[:7]) + 5 * F.cross_entropy(m(x[7:]), y[7:])) / 12

    assert relative(matrix, dense_hessian(model, objective)) < TOLERANCE


def test_batch_norm_without_running_statistics_is_refused_in_eval_mode_too():
    model = network(nn.BatchNorm1d(4, track_running_stats=False)).eval()
    with pytest.raises(ValueError, match="no running statistics"):
        Hessian(model, F.cross_entropy, samples(), mode="eval")
    Hessian(model, F.cross_entropy, samples(), mode="batch-statistics")


def test_modes_are_checked():
    with pytest.raises(ValueError, match="mode="):
        Hessian(network(), F.cross_entropy, samples(), mode="test")
    with pytest.raises(ValueError, match="cannot be combined"):
        Hessian(network(), F.cross_entropy, samples(), mode=("eval", "frozen-masks"))
    model = network(nn.Dropout(0.5), nn.BatchNorm1d(4)).train()
    Hessian(model, F.cross_entropy, samples(), mode=("frozen-masks", "batch-statistics"))


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_parameters_data_and_losses_that_are_not_finite_are_refused(poison):
    x, y = samples()
    model = network()
    with torch.no_grad():
        model[0].bias[1] = poison
    with pytest.raises(ValueError, match=r"parameter '0\.bias'"):
        Hessian(model, F.cross_entropy, (x, y))
    bad = x.clone()
    bad[3, 2] = poison
    with pytest.raises(ValueError, match="batch 0 of data="):
        Hessian(network(), F.cross_entropy, (bad, y))
    last = torch.zeros(12, dtype=torch.float64)
    last[-1] = 1.0

    def spoiled(model, batch):
        spoils = torch.where(batch[2] > 0, poison, 0.0).mean()
        return F.cross_entropy(model(batch[0]), batch[1]) + spoils

    with pytest.raises(ValueError, match=r"loss of chunk 2 .*is (nan|inf)"):
        Hessian(network(), Objective(spoiled), (x, y, last), chunk=4)


@pytest.mark.parametrize("operator", [GaussNewton, FunctionalHessian, EmpiricalFisher])
def test_operators_of_outputs_refuse_an_objective(operator):
    objective = Objective(lambda m, b: F.cross_entropy(m(b[0]), b[1]))
    with pytest.raises(TypeError, match=f"{operator.__name__} needs the outputs"):
        operator(network(), objective, samples())


def test_fisher_refuses_losses_that_are_no_known_likelihood():
    for loss in (F.l1_loss, nn.CrossEntropyLoss(label_smoothing=0.1), F.huber_loss):
        with pytest.raises(ValueError, match="negative log-likelihood"):
            Fisher(network(), loss, samples())
    with pytest.raises(ValueError, match="samples="):
        Fisher(network(), F.cross_entropy, samples(), samples=0)


@pytest.mark.parametrize(
    ("loss", "match"),
    [
        ("cross_entropy", "loss must be a callable"),
        (nn.CrossEntropyLoss(reduction="none"), 'reduction="none"'),
        (lambda z, y: F.cross_entropy(z, y, reduction="none"), "one number"),
        (lambda z, y: float(F.cross_entropy(z, y)), "one number"),
    ],
    ids=["name", "module none", "vector", "float"],
)
def test_losses_that_are_not_one_number_are_refused(loss, match):
    with pytest.raises((ValueError, TypeError), match=match):
        Hessian(network(), loss, samples())


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"engine": "fast"}, ValueError, "choose from"),
        ({"precision": "half"}, ValueError, "precision="),
        ({"chunk": 0}, ValueError, "chunk="),
        ({"budget": -1}, ValueError, "budget="),
        ({"reduction": "average"}, ValueError, "reduction="),
        ({"dtype": torch.float16}, TypeError, "float32 or float64"),
        ({"select": "head.*"}, ValueError, "matches no parameter"),
        ({"budget": 1000.0}, ValueError, "larger budget="),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_bad_arguments_are_named(arguments, error, match):
    with pytest.raises(error, match=match):
        Hessian(network(), F.cross_entropy, samples(), **arguments)


def test_parameters_that_do_not_reach_the_loss_are_refused_when_they_are_all_there_is():
    model = network()
    model.extra = nn.Parameter(torch.ones(2, dtype=torch.float64))
    x, y = samples()

    def objective(m, batch):
        return F.cross_entropy(m[:3](batch[0]), batch[1])

    with pytest.raises(ValueError, match="none of the selected parameters"):
        Hessian(model, Objective(objective), (x, y), select="extra")
    whole = Hessian(model, Objective(objective), (x, y))
    assert float((whole.dense()[whole.layout.slices()["extra"]]).abs().max()) == 0.0


def test_vectors_of_another_shape_dtype_or_kind_are_refused():
    operator = Hessian(network(), F.cross_entropy, samples())
    for bad, error, match in [
        (torch.zeros(operator.n + 1, dtype=torch.float64), ValueError, r"\(35,\)"),
        (torch.zeros(operator.n, 1, dtype=torch.float64), ValueError, "rows"),
        (torch.zeros(operator.n), TypeError, "float64"),
        (torch.zeros(operator.n, dtype=torch.int64), TypeError, "float64"),
        ([0.0] * operator.n, TypeError, "tensor"),
    ]:
        with pytest.raises(error, match=match):
            operator @ bad
    empty = torch.zeros(0, operator.n, dtype=torch.float64)
    assert (operator @ empty).shape == empty.shape


def test_a_wrong_second_derivative_that_is_not_symmetric_is_caught():
    model = seeded(lambda: Using(Uneven, inputs=4))
    with pytest.raises(OperatorError, match="wrong second derivative"):
        Hessian(model, F.cross_entropy, samples())
    unchecked = Hessian(model, F.cross_entropy, samples(), check=False)
    assert not unchecked.probe().passed
    with pytest.raises(OperatorError, match="asymmetric"):
        unchecked.dense()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_wrong_second_derivative_that_is_symmetric_is_caught(dtype):
    model = seeded(lambda: Using(Cube, inputs=4))
    with pytest.raises(OperatorError, match="differ from differences of gradients"):
        Hessian(model, F.cross_entropy, samples(), dtype=dtype)
    GaussNewton(model, F.cross_entropy, samples(), dtype=dtype)  # whose first derivative is right
    assert not any(p.grad is not None for p in model.parameters())


def test_the_padding_row_of_an_embedding_is_a_constant_and_no_wrong_derivative():
    model = seeded(lambda: nn.Sequential(nn.Embedding(5, 4, padding_idx=0), nn.Tanh()))
    model.append(nn.Flatten()).append(nn.Linear(12, 3))
    data = torch.randint(0, 5, (6, 3)), torch.randint(0, 3, (6,))
    with torch.no_grad():
        model[0].weight[0] = 0.3
    matrix = Hessian(model, F.cross_entropy, data, dtype=torch.float64).dense()
    assert not matrix[:4].any()
    assert matrix[4:20].any()


class Checkpointed(nn.Module):
    """Attention behind a checkpoint, or the first layer, which a reentrant one silently detaches"""

    def __init__(self, reentrant, first=False):
        super().__init__()
        self.reentrant, self.checkpoint_first = reentrant, first
        self.embed, self.out = nn.Linear(4, 8), nn.Linear(8, 3)
        self.attend = nn.Linear(8, 24)

    def body(self, x):
        q, k, v = self.attend(x.unsqueeze(1).expand(-1, 3, -1)).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v * torch.arange(3).reshape(3, 1)).mean(1)

    def forward(self, x):
        def run(function, value):
            return checkpoint(function, value, use_reentrant=self.reentrant)

        if self.checkpoint_first:
            return self.out(self.body(torch.tanh(run(self.embed, x))))
        return self.out(run(self.body, torch.tanh(self.embed(x))))


@pytest.mark.parametrize("engine", ["retained", "rebuilt"])
@pytest.mark.parametrize("kind", [Hessian, GaussNewton])
def test_activation_checkpoints_give_the_same_products_also_after_training_goes_on(kind, engine):
    model = seeded(lambda: Checkpointed(False)).double()
    x, y = samples()
    data = x.double(), y
    plain = seeded(lambda: Checkpointed(False)).double()
    plain.forward = lambda x: plain.out(plain.body(torch.tanh(plain.embed(x))))
    operator = kind(model, F.cross_entropy, data, engine=engine)
    expected = kind(plain, F.cross_entropy, data).dense()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)  # what is run again must not see this
    assert float((operator.dense() - expected).abs().max()) < 1e-13


def test_reentrant_checkpoints_are_refused_by_name():
    with pytest.raises(OperatorError, match="use_reentrant=False"):
        Hessian(seeded(lambda: Checkpointed(True)), F.cross_entropy, samples())
    with (
        pytest.warns(UserWarning, match="None of the inputs have requires_grad"),
        pytest.raises(OperatorError, match=r"embed.weight.*use_reentrant=False"),
    ):
        Hessian(seeded(lambda: Checkpointed(True, first=True)), F.cross_entropy, samples())


class WeightNorm(nn.Module):
    """torch's own weight norm: its double backward is wrong in torch 2.13."""

    def __init__(self, make):
        super().__init__()
        self.layer, self.out = make(nn.Linear(4, 6)), nn.Linear(6, 3)

    def forward(self, x):
        return self.out(torch.tanh(self.layer(x)))


@pytest.mark.parametrize("make", [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
def test_weight_norm_is_differentiated_as_its_formula_says(make):
    model = seeded(lambda: WeightNorm(make)).double()
    g = next(p for n, p in model.named_parameters() if p.numel() == 6 and "bias" not in n)
    with torch.no_grad():  # away from the start, where direction and weight agree
        g.mul_(1.7)
    x, y = samples()
    operator = Hessian(model, F.cross_entropy, (x.double(), y))
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])

    def loss(flat):
        parts = iter(flat.split([p.numel() for p in model.parameters()]))
        named = {n: next(parts).view_as(p) for n, p in model.named_parameters()}
        g, v = (named[n] for n in named if named[n].numel() in (6, 24) and "bias" not in n)
        hidden = torch.tanh(
            x.double() @ (v * g / v.norm(dim=1, keepdim=True)).T + named["layer.bias"]
        )
        return F.cross_entropy(hidden @ named["out.weight"].T + named["out.bias"], y)

    expected = torch.autograd.functional.hessian(loss, flat)
    assert float((operator.dense() - expected).abs().max()) < 1e-13


def test_a_layer_without_second_derivatives_is_named():
    model = seeded(lambda: nn.Sequential(nn.EmbeddingBag(5, 4), nn.Linear(4, 3)))
    data = (torch.randint(0, 5, (6, 3)), torch.randint(0, 3, (6,)))
    with pytest.raises(OperatorError, match="_embedding_bag_backward"):
        Hessian(model, F.cross_entropy, data)
