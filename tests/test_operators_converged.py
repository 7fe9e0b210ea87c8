"""Products of networks that fit their data: no digits are lost as the loss goes to 0.

The truth is computed with 120 digits from nothing but the loss and the outputs as functions of the
parameters, by differences whose error is below 1e-50.
"""

from collections.abc import Callable

import pytest
import torch
from mpmath import mp, mpf
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

from curvlab import EmpiricalFisher, FunctionalHessian, GaussNewton, Hessian
from curvlab.operators.curvature import Curvature
from curvlab.operators.functions import Replaced
from curvlab.probe import OperatorError

LOSSES = (1e-1, 1e-4, 1e-8, 1e-12)
INPUTS, HIDDEN, CLASSES, SAMPLES = 3, 4, 3, 5
STEP = mpf(2) ** -100  # second differences lose 60 of the 120 digits, and are off by 1e-60


def fitted(loss: float, dtype: torch.dtype) -> tuple[nn.Module, Tensor, Tensor]:
    """A small tanh network whose own predictions are the targets, scaled to about ``loss``."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES))
    inputs = torch.randn(SAMPLES, INPUTS)
    with torch.no_grad():
        targets = net(inputs).argmax(1)
        low, high = 0.0, 1e4
        start = [parameter.clone() for parameter in net[2].parameters()]
        for _ in range(60):  # the loss falls as the last layer grows
            middle = (low + high) / 2
            for parameter, value in zip(net[2].parameters(), start, strict=True):
                parameter.copy_(value * middle)
            with Replaced():
                over = float(cross_entropy(net(inputs), targets)) > loss
            low, high = (middle, high) if over else (low, middle)
    return net.to(dtype), inputs.to(dtype), targets


class Exact:
    """The same network in 120 digits, as functions of a list of parameters."""

    def __init__(self, net: nn.Module, inputs: Tensor, targets: Tensor) -> None:
        self.point = [mpf(x) for p in net.parameters() for x in p.detach().flatten().tolist()]
        self.inputs = [[mpf(x) for x in row] for row in inputs.tolist()]
        self.targets = targets.tolist()

    def outputs(self, flat: list[mpf]) -> list[list[mpf]]:
        first, flat = flat[: HIDDEN * INPUTS], flat[HIDDEN * INPUTS :]
        bias, flat = flat[:HIDDEN], flat[HIDDEN:]
        second, last = flat[: CLASSES * HIDDEN], flat[CLASSES * HIDDEN :]
        result = []
        for row in self.inputs:
            inner = [
                mp.tanh(mp.fdot(first[i * INPUTS : (i + 1) * INPUTS], row) + bias[i])
                for i in range(HIDDEN)
            ]
            result.append(
                [
                    mp.fdot(second[i * HIDDEN : (i + 1) * HIDDEN], inner) + last[i]
                    for i in range(CLASSES)
                ]
            )
        return result

    def loss(self, flat: list[mpf]) -> mpf:
        rows = zip(self.outputs(flat), self.targets, strict=True)
        terms = [mp.log(mp.fsum(mp.exp(z) for z in row)) - row[y] for row, y in rows]
        return mp.fsum(terms) / SAMPLES

    def moved(self, *steps: tuple[mpf, list[mpf]]) -> list[mpf]:
        flat = list(self.point)
        for size, along in steps:
            flat = [a + size * b for a, b in zip(flat, along, strict=True)]
        return flat

    def unit(self, i: int) -> list[mpf]:
        return [mpf(i == j) for j in range(len(self.point))]

    def hessian(self, vector: list[mpf]) -> list[mpf]:
        return [
            mp.fsum(
                sign
                * other
                * self.loss(self.moved((sign * STEP, self.unit(i)), (other * STEP, vector)))
                for sign in (1, -1)
                for other in (1, -1)
            )
            / (4 * STEP**2)
            for i in range(len(self.point))
        ]

    def along(self, direction: list[mpf]) -> list[list[mpf]]:
        up, down = (self.outputs(self.moved((sign * STEP, direction))) for sign in (1, -1))
        return [
            [(a - b) / (2 * STEP) for a, b in zip(*rows, strict=True)]
            for rows in zip(up, down, strict=True)
        ]

    def sandwich(self, vector: list[mpf], empirical: bool) -> list[mpf]:
        """``J' A J v`` with A the loss's Hessian at the outputs, or its gradient's square."""
        curved = []
        rows = zip(self.outputs(self.point), self.along(vector), self.targets, strict=True)
        for row, tangent, y in rows:
            total = mp.fsum(mp.exp(z) for z in row)
            p = [mp.exp(z) / total for z in row]
            if empirical:
                p[y] -= 1
                curved.append([mp.fdot(p, tangent) * a for a in p])
            else:
                mean = mp.fdot(p, tangent)
                curved.append([a * (t - mean) for a, t in zip(p, tangent, strict=True)])
        return [
            mp.fsum(mp.fdot(a, b) for a, b in zip(curved, self.along(self.unit(i)), strict=True))
            / SAMPLES
            for i in range(len(self.point))
        ]


KINDS: dict[str, tuple[type[Curvature], Callable[[Exact, list[mpf]], list[mpf]]]] = {
    "Hessian": (Hessian, Exact.hessian),
    "GaussNewton": (GaussNewton, lambda exact, v: exact.sandwich(v, empirical=False)),
    "EmpiricalFisher": (EmpiricalFisher, lambda exact, v: exact.sandwich(v, empirical=True)),
    "FunctionalHessian": (
        FunctionalHessian,
        lambda exact, v: [
            a - b for a, b in zip(exact.hessian(v), exact.sandwich(v, empirical=False), strict=True)
        ],
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_engine_keeps_its_digits_as_the_loss_goes_to_0(
    kind: str, loss: float, dtype: torch.dtype
) -> None:
    mp.dps = 120
    net, inputs, targets = fitted(loss, dtype)
    exact = Exact(net, inputs, targets)
    vector = torch.randn(len(exact.point), generator=torch.Generator().manual_seed(1), dtype=dtype)
    operator, truth = KINDS[kind]
    wanted = truth(exact, [mpf(x) for x in vector.tolist()])
    size = mp.sqrt(mp.fsum(x * x for x in wanted))
    gaps = [max(row) - z for row in exact.outputs(exact.point) for z in row]
    # two logits are rounded, each to eps times itself: a probability is off by as much of itself
    limit = 2 * torch.finfo(dtype).eps * max(1.0, float(max(gaps)))
    engines = ["retained", "rebuilt", "linearised"]
    engines += [] if kind == "EmpiricalFisher" else ["mlp"]
    for engine in engines:
        made = operator(net, cross_entropy, (inputs, targets), engine=engine)
        image = [mpf(x) for x in (made @ vector).tolist()]
        error = mp.sqrt(mp.fsum((a - b) ** 2 for a, b in zip(image, wanted, strict=True))) / size
        assert error <= limit, (engine, float(error), limit)
        assert made.loss == pytest.approx(float(exact.loss(exact.point)), rel=limit)


CLASS_WEIGHTS = torch.tensor([0.5, 1.0, 2.0, 0.0, 3.0], dtype=torch.float64)
GRID = torch.tensor([[0, 3, 2, 4], [1, 1, -100, 0], [2, 4, 0, -100]])
SOFT = torch.linspace(0, 1, 15, dtype=torch.float64).reshape(3, 5)
FORMS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "mean": ((3, 5), lambda z: cross_entropy(z, GRID[:, 0])),
    "sum": ((3, 5), lambda z: cross_entropy(z, GRID[:, 0], reduction="sum")),
    "ignored": ((3, 5), lambda z: cross_entropy(z, GRID[:, 2])),
    "ignored by another number": ((3, 5), lambda z: cross_entropy(z, GRID[:, 0], ignore_index=2)),
    "weights": ((3, 5), lambda z: cross_entropy(z, GRID[:, 2], CLASS_WEIGHTS)),
    "weights, summed": (
        (3, 5),
        lambda z: cross_entropy(z, GRID[:, 0], weight=CLASS_WEIGHTS, reduction="sum"),
    ),
    "pixels": ((3, 5, 4), lambda z: cross_entropy(z, GRID, CLASS_WEIGHTS)),
    "none": ((3, 5, 4), lambda z: cross_entropy(z, GRID, reduction="none").square().sum()),
    "smoothed": ((3, 5), lambda z: cross_entropy(z, GRID[:, 0], label_smoothing=0.1)),
    "soft targets": ((3, 5), lambda z: cross_entropy(z, SOFT)),
    "one class": ((3, 1), lambda z: cross_entropy(z, torch.zeros(3, dtype=torch.int64))),
    "binary": ((3, 5), lambda z: binary_cross_entropy_with_logits(z, SOFT)),
    "binary, weights": (
        (3, 5),
        lambda z: binary_cross_entropy_with_logits(
            z, SOFT, weight=SOFT + 1, pos_weight=CLASS_WEIGHTS, reduction="sum"
        ),
    ),
}


@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0])
@pytest.mark.parametrize("form", FORMS)
def test_the_accurate_losses_are_torchs_own_functions(form: str, scale: float) -> None:
    """At logits of any size, right or wrong by far, and where all of them are 0."""
    shape, loss = FORMS[form]
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits *= scale

    def accurate(z: Tensor) -> Tensor:
        with Replaced():
            return loss(z)

    for derivative in (lambda f: f, torch.func.grad, torch.func.hessian):
        ours, own = derivative(accurate)(logits), derivative(loss)(logits)
        torch.testing.assert_close(ours, own, rtol=1e-13, atol=1e-13)


def test_fitted_binary_targets_keep_their_digits() -> None:
    net = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    for slope in (1.0, 10.0, 30.0):
        nn.init.constant_(net.weight, slope)
        data = torch.tensor([[1.0], [-1.0]]).double(), torch.tensor([[1.0], [0.0]]).double()
        p = 1 / (1 + mp.exp(-mpf(slope)))
        for kind in (Hessian, GaussNewton):
            curvature = kind(net, binary_cross_entropy_with_logits, data).dense()
            assert float(curvature) == pytest.approx(float(p * (1 - p)), rel=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_perfect_fit_is_not_taken_for_coupled_samples_or_a_wrong_engine(
    dtype: torch.dtype,
) -> None:
    """A squared error of 1e-15 is all rounding: parts of the data never add up to the whole."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(60, 200), nn.Tanh(), nn.Linear(200, 3)).to(dtype)
    inputs = torch.randn(3, 60, dtype=dtype)  # one sample alone is multiplied in another order
    with torch.no_grad():
        hidden = net[1](net[0](inputs))
        targets = hidden @ net[2].weight.T + net[2].bias
    for kind in (Hessian, GaussNewton):
        operator = kind(net, mse_loss, (inputs, targets))
        assert 0 <= operator.loss < 1e3 * torch.finfo(dtype).eps ** 2
        retained = kind(net, mse_loss, (inputs, targets), engine="retained")
        vector = torch.randn(operator.n, dtype=dtype)
        image, other = operator @ vector, retained @ vector
        assert float((image - other).norm() / other.norm()) < 100 * torch.finfo(dtype).eps


def test_what_is_not_rounding_is_refused_at_a_perfect_fit_too() -> None:
    net, inputs, targets = fitted(1e-8, torch.float64)

    def weighted(output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output, target, weight=torch.tensor([1.0, 2.0, 3.0]).double())

    with pytest.raises(ValueError, match="not the mean over its samples"):
        Hessian(net, weighted, (inputs, targets))


def test_an_engine_that_is_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    net, inputs, targets = fitted(1e-8, torch.float64)
    right = Hessian._mlp

    def wrong(self: Hessian, chunk: object) -> Callable[[Tensor], Tensor]:
        product = right(self, chunk)  # type: ignore[arg-type]
        return lambda block: product(block) * (1 + 1e-6)

    monkeypatch.setattr(Hessian, "_mlp", wrong)
    with pytest.raises(OperatorError, match="engine 'mlp' and plain autograd differ"):
        Hessian(net, cross_entropy, (inputs, targets))
