"""The perturbation score s(r): how much steeper than random directions are eigenvectors, r away?

s(r) = |L(theta + r v) - L(theta)| / mean over mu of |L(theta + r mu/|mu|) - L(theta)|.

At a minimum of a quadratic loss s is the same at every radius, lambda P / tr(H) for an eigenvector
of eigenvalue lambda. Where a gradient is left it takes over as r -> 0 and the plateau is lost:
s -> |g'v| / (|g| sqrt(2 / (pi P))), which is about 1 or less for a v unrelated to g. Read a
plateau only at a converged model.

Outside its ball the published score goes to 1. Cross-entropy need not do that: in a ReLU network of
L layers the loss grows like r^L along every direction, and s tends to a constant that has nothing
to do with 1 (thousands for the top eigenvector of the 18,010-parameter MLP). Any bounded loss does
go to 1 there: clipped cross-entropy, the error rate, or a float32 log(softmax) that overflows in
both directions. :func:`measures_at` gives the loss unbounded and bounded, and the error rate; say
which was used.
"""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from curvlab.checks import whole
from curvlab.parameters import call_with, layout_of, select_parameters
from curvlab.tasks import Samples

MEASURES = ("loss", "bounded", "error")
LEAST_PROBABILITY = 1e-7  # of the bounded loss
RADII = tuple(10.0 ** (power / 4) for power in range(-12, 17))  # 10^-3 .. 10^4, four per decade


@dataclass(frozen=True, slots=True)
class Perturbation:
    """Loss changes along k chosen and m random directions at R radii, and the score.

    Attributes:
        radii: ``(R,)``.
        changes: ``(k, R)``; ``|L(theta + r v_i) - L(theta)|``.
        random_changes: ``(m, R)``; the same along random unit directions.
        loss: L(theta).
    """

    radii: Tensor
    changes: Tensor
    random_changes: Tensor
    loss: float

    def score(self) -> Tensor:
        """s(r) for each direction, ``(k, R)``.

        Far out a loss overflows. Where both sides are infinite or NaN the directions are equally
        bad and s = 1; where only the random side is, s = 0; where only the chosen one is, s = inf.
        Where neither moved the loss at all (r below rounding) s is NaN: nothing was measured.
        """
        expected = self.random_changes.mean(0).expand_as(self.changes)
        score = self.changes / expected
        lost, random_lost = ~self.changes.isfinite(), ~expected.isfinite()
        score[lost & random_lost] = 1.0
        score[~lost & random_lost] = 0.0
        score[lost & ~random_lost] = float("inf")
        return score

    def reach(self, tolerance: float = 1.0) -> Tensor:
        """The radius from which the score has come down to 1, ``(k,)``: the paper's green line.

        It is the smallest radius such that s(r) <= 1 + tolerance there and at all larger radii; inf
        where that never happens. Below it the chosen direction is steeper than a random one.

        Args:
            tolerance: How far above 1 still counts as 1. Ten random directions leave about that
                much noise.
        """
        score = self.score()
        high = (score > 1.0 + tolerance) | score.isnan()
        after = high.flip(1).cumsum(1).flip(1) == 0  # no high score from here outwards
        settled = after.float().argmax(1)
        reach = self.radii[settled]
        return torch.where(after.any(1), reach, torch.full_like(reach, float("inf")))


def measures_at(
    model: nn.Module, samples: Samples, *, rows: int = 1000
) -> Callable[[Tensor], dict[str, Tensor]]:
    """Loss and error on ``samples`` as functions of flat parameters ``(n,)``, from one pass.

    * ``"loss"``: mean cross-entropy, in float64.
    * ``"bounded"``: the same with probabilities of at least 1e-7, so at most 16.1.
    * ``"error"``: the fraction predicted wrong.

    Args:
        model: Copied in its present state and put in eval mode; later training changes nothing.
        samples: All of them are used, on the model's device and in its dtype.
        rows: Samples per forward pass; the mean is over samples, not over passes.
    """
    model = copy.deepcopy(model).eval()
    layout = layout_of(select_parameters(model))

    @torch.no_grad()
    def measures(parameters: Tensor) -> dict[str, Tensor]:
        named = dict(zip(layout.names, layout.unflatten(parameters), strict=True))
        total = torch.zeros(len(MEASURES), dtype=torch.float64, device=parameters.device)
        for start in range(0, len(samples), rows):
            part = samples[start : start + rows]
            outputs = call_with(model, named, (part.inputs,))
            losses = cross_entropy(outputs.double(), part.targets, reduction="none")
            wrong = (outputs.argmax(1) != part.targets).double()
            bounded = losses.clamp_max(-math.log(LEAST_PROBABILITY))
            total += torch.stack([losses.sum(), bounded.sum(), wrong.sum()])
        return dict(zip(MEASURES, total / len(samples), strict=True))

    return measures


@torch.no_grad()
def perturb(
    measures: Callable[[Tensor], Mapping[str, Tensor | float]],
    point: Tensor,
    directions: Tensor,
    *,
    generator: torch.Generator,
    random: int = 10,
    radii: Tensor | tuple[float, ...] = RADII,
) -> dict[str, Perturbation]:
    """Losses on spheres around ``point``, by name; along the same directions for all of them.

    Args:
        measures: From flat parameters ``(n,)`` to losses by name; deterministic (frozen data, eval
            mode), such as :func:`measures_at`.
        point: ``(n,)``: theta.
        directions: ``(k, n)``, the Hessian's eigenvectors; normalised here.
        generator: For the random directions, which are Gaussian and normalised.
        random: How many random directions. Costs ``(k + random) * len(radii) + 1`` losses.
        radii: ``(R,)``.
    """
    if point.dim() != 1 or directions.dim() != 2 or directions.shape[1] != point.numel():
        raise ValueError(
            "perturb needs point (n,) and directions (k, n); "
            f"got {tuple(point.shape)} and {tuple(directions.shape)}"
        )
    whole(random=random)
    radius = torch.as_tensor(radii, dtype=torch.float64)

    def values(parameters: Tensor) -> Tensor:
        found = [float(value) for value in measures(parameters).values()]
        return torch.tensor(found, dtype=torch.float64)

    names, base = list(measures(point)), values(point)
    if not base.isfinite().all():
        raise ValueError(f"the loss at the point itself is {base.tolist()}")

    def changes(direction: Tensor) -> Tensor:
        unit = (direction.double() / direction.double().norm()).to(point.device)
        moved = [values((point.double() + r * unit).to(point)) for r in radius.tolist()]
        return (torch.stack(moved) - base).abs()  # (R, M)

    chosen = torch.stack([changes(row) for row in directions])
    # one at a time: for a ViT each is 50 MB
    drawn = torch.stack(
        [
            changes(torch.randn(point.numel(), generator=generator, device=generator.device))
            for _ in range(random)
        ]
    )
    return {
        name: Perturbation(radius, chosen[..., m], drawn[..., m], float(base[m]))
        for m, name in enumerate(names)
    }
