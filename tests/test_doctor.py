"""Every trap that the doctor knows, each with a model or data made to be in it."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, dropout, scaled_dot_product_attention
from torch.utils.data import DataLoader, TensorDataset

from curvlab import Hessian, parameter_vector
from curvlab.doctor import doctor
from curvlab.operators.policy import unwrap
from curvlab.probe import OperatorError
from curvlab.refusals import Trap
from tests.wrong_derivatives import Cube, Doubled, Rounded, Uneven, Using

GENERATOR = torch.Generator().manual_seed(0)
INPUTS = torch.randn(13, 6, generator=GENERATOR)
TARGETS = torch.randint(3, (13,), generator=GENERATOR)
DATA = (INPUTS, TARGETS)


def net(*between):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), *between, nn.Tanh(), nn.Linear(8, 3))


class RandomForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x):
        return self.linear(dropout(x, 0.5, training=True))


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.head = nn.Linear(6, 12), nn.Linear(4, 3)

    def forward(self, x):
        tokens = self.linear(x).view(-1, 3, 4)
        return self.head(scaled_dot_product_attention(tokens, tokens, tokens).mean(1))


class OwnAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(6, 2, batch_first=True), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.attention(x[:, None], x[:, None], x[:, None])[0][:, 0])


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.LSTM(6, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.layer(x[:, None])[0][:, 0])


class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(10, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.bag(x.abs().mul(2).long().clamp(max=9)))


class Writing(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x):
        return self.linear(x.mul_(0.5)).tanh()


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.spare = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        return self.used(x).tanh()


class Detached(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x):
        return self.linear(x).detach()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.two.weight = self.one.weight

    def forward(self, x):
        return self.head(self.two(self.one(x).tanh()).tanh())


def frozen():
    model = net()
    model[0].requires_grad_(False)
    return model


def all_frozen():
    return net().requires_grad_(False)


def broken():
    model = net()
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    return model


def mixed():
    model = net()
    model[0].double()
    return model


def elsewhere():
    model = net()
    model[0].to("meta")
    return model


def wrapped():
    return nn.DataParallel(net())


# trap -> model; all with the plain data and cross-entropy
MODELS = {
    "train-mode dropout": lambda: net(nn.Dropout(0.5)),
    "train-mode BatchNorm": lambda: net(nn.BatchNorm1d(8)),
    "BatchNorm without statistics": lambda: net(
        nn.BatchNorm1d(8, track_running_stats=False)
    ).eval(),
    "BatchNorm never trained": lambda: net(nn.BatchNorm1d(8)).eval(),
    "random loss": RandomForward,
    "fused attention": Attending,
    "fused recurrent layer": Recurrent,
    "wrong second derivative": lambda: Using(Uneven),
    "no second derivative": Bags,
    "inputs written to": Writing,
    "unused parameters": Unused,
    "no dependence": Detached,
    "tied parameters": Tied,
    "frozen parameters": frozen,
    "nothing to differentiate": all_frozen,
    "NaN in parameters": broken,
    "mixed dtypes": mixed,
    "half precision": lambda: net().bfloat16(),
    "several devices": elsewhere,
    "wrapped model": wrapped,
    "uninitialised parameters": lambda: nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 3)),
    "model does not run": lambda: nn.Linear(7, 3),
}
HANDLED = {
    "fused attention", "fused recurrent layer", "inputs written to", "unused parameters",
    "tied parameters", "frozen parameters", "wrapped model",
}  # fmt: skip
NOTES = {*HANDLED, "BatchNorm never trained"}


@pytest.mark.parametrize("trap", MODELS)
def test_each_trap_of_a_model_is_named_with_its_cure(trap):
    report = doctor(MODELS[trap](), cross_entropy, DATA)
    found = next((f for f in report if f.trap == trap), None)
    assert found is not None, report
    assert found.cure
    assert (found.handled == "yes") == (trap in HANDLED)
    assert report.healthy == (trap in NOTES)
    assert trap in str(report)


@pytest.mark.parametrize("trap", [t for t in MODELS if t in NOTES])
def test_what_is_handled_does_give_an_operator(trap):
    Hessian(MODELS[trap](), cross_entropy, DATA)


@pytest.mark.parametrize("trap", [t for t in MODELS if t not in NOTES])
def test_what_is_not_handled_is_refused_by_the_operator_too(trap):
    with pytest.raises((ValueError, TypeError, RuntimeError)):
        Hessian(MODELS[trap](), cross_entropy, DATA)


def loaders():
    dataset = TensorDataset(*DATA)
    noisy = [(INPUTS, TARGETS)]

    class Augmenting:
        def __iter__(self):
            yield noisy[0][0] + torch.randn_like(INPUTS), TARGETS

    return {
        "shuffling loader": (DataLoader(dataset, batch_size=4, shuffle=True), True),
        "changing data": (DataLoader(dataset, batch_size=4, shuffle=True, drop_last=True), False),
        "changing data, augmented": (Augmenting(), False),
        "unusable data": ((batch for batch in [DATA]), False),
        "partial batches": (DataLoader(dataset, batch_size=4), True),
        "dropped samples": (DataLoader(dataset, batch_size=4, drop_last=True), True),
        "NaN in data": ((INPUTS / 0.0, TARGETS), False),
    }


@pytest.mark.parametrize("trap", loaders())
def test_each_trap_of_the_data_is_named(trap):
    data, healthy = loaders()[trap]
    report = doctor(net(), cross_entropy, data)
    assert trap.partition(",")[0] in report.traps(), report
    assert report.healthy == healthy


WEIGHTS = torch.tensor([1.0, 5.0, 0.2])
LOSSES = {
    "loss that does not add up": lambda o, t: cross_entropy(o, t, weight=WEIGHTS),
    "loss is not a scalar": nn.CrossEntropyLoss(reduction="none"),
    "summed loss": nn.CrossEntropyLoss(reduction="sum"),
    "loss is not finite": lambda o, t: cross_entropy(o, t) * float("inf"),
}


@pytest.mark.parametrize("trap", LOSSES)
def test_each_trap_of_the_loss_is_named(trap):
    report = doctor(net(), LOSSES[trap], DATA)
    assert trap in report.traps(), report
    assert report.healthy == (trap == "summed loss")


def test_attention_modules_are_seen_without_running():
    report = doctor(OwnAttention(), cross_entropy, DATA)
    assert report.traps().count("fused attention") == 1
    assert report.healthy


def test_a_compiled_model_is_looked_into():
    model = torch.compile(net())
    assert unwrap(model) is not model
    assert doctor(model, cross_entropy, DATA).traps() == ["wrapped model"]


def test_settings_settle_what_they_settle():
    model = net(nn.Dropout(0.5), nn.BatchNorm1d(8))
    assert not doctor(model, cross_entropy, DATA).healthy
    assert doctor(model, cross_entropy, DATA, mode="eval").healthy
    both = ("frozen-masks", "batch-statistics")
    report = doctor(model, cross_entropy, DATA, mode=both)
    assert report.healthy
    assert {"train-mode dropout", "train-mode BatchNorm"} <= set(report.traps())
    assert doctor(mixed(), cross_entropy, DATA, dtype=torch.float64).healthy
    assert doctor(
        net(),
        LOSSES["loss that does not add up"],
        DATA,
        count=lambda batch: float(WEIGHTS[batch[1]].sum()),
    ).healthy


def test_a_healthy_model_is_told_so():
    report = doctor(net(), cross_entropy, DATA)
    assert report.findings == ()
    assert str(report).startswith("healthy")
    assert report.to_json() == {"healthy": True, "findings": []}


def test_the_gravest_comes_first_and_json_says_what_is_open():
    model = net(nn.Dropout(0.5))
    model[0].requires_grad_(False)
    report = doctor(model, cross_entropy, DATA)
    assert report.traps() == ["train-mode dropout", "frozen parameters"]
    assert [f["open"] for f in report.to_json()["findings"]] == [True, False]


@pytest.mark.parametrize("trap", ["train-mode BatchNorm", "inputs written to", "random loss"])
def test_a_visit_changes_nothing(trap):
    model = MODELS[trap]()
    before, state = parameter_vector(model), copy.deepcopy(model.state_dict())
    inputs, random = INPUTS.clone(), torch.get_rng_state()
    flags = [module.training for module in model.modules()]
    doctor(model, cross_entropy, DATA)
    assert torch.equal(parameter_vector(model), before)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(INPUTS, inputs)
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in model.modules()] == flags
    assert all(p.grad is None for p in model.parameters())


def test_the_wrong_derivative_is_wrong_and_not_only_called_so():
    with pytest.raises(OperatorError, match="differ by"):
        Hessian(Using(Uneven), cross_entropy, DATA)


@pytest.mark.parametrize(
    ("function", "trap"),
    [(Cube, Trap.DERIVATIVE), (Rounded, Trap.ESTIMATOR)],
)
def test_a_wrong_derivative_that_leaves_products_symmetric_is_found_too(function, trap):
    torch.manual_seed(0)
    model = Using(function)
    with pytest.raises(OperatorError, match="check=False") as refused:
        Hessian(model, cross_entropy, DATA)
    assert refused.value.trap is trap
    assert Hessian(model, cross_entropy, DATA, check=False).probe().passed  # it cannot see it
    report = doctor(model, cross_entropy, DATA)
    assert trap.title in report.traps(), report
    assert not report.healthy


def test_a_gradient_that_is_consistent_but_not_of_the_loss_is_found():
    def loss(output, target):
        return Doubled.apply(cross_entropy(output, target))

    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    Hessian(model, loss, DATA)  # products agree with differences of this gradient
    assert Trap.ESTIMATOR.title in doctor(model, loss, DATA).traps()


@pytest.mark.parametrize("activation", [nn.ReLU, nn.GELU, nn.LeakyReLU, nn.SiLU])
def test_right_derivatives_are_not_called_wrong(activation):
    for seed in range(5):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 30), activation(), nn.Linear(30, 3))
        assert doctor(model, cross_entropy, DATA).healthy


def test_a_loss_without_curvature_is_noted():
    report = doctor(nn.Linear(6, 3), lambda output, _: output.mean(), DATA)
    assert report.traps() == ["no curvature"]
    assert report.healthy
