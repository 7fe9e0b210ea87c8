"""A Hessian from differences of gradients, for FSDP2 models that cannot be had exactly.

``Hessian`` takes FSDP2 models as they are, exactly. Where it refuses one (a module that cannot be
copied, a layer with no second derivative) and a plain copy does not fit a rank, differences of
gradients are what is left: four gradients per product, with an estimate of the error in every one;
a product whose error is above the tolerance raises. Nothing falls back to this: it is used when it
is named.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from curvlab.distributed.group import Group
from curvlab.distributed.sharded_models import OfShards, local
from curvlab.distributed.sharded_problem import whole
from curvlab.operators import Objective
from curvlab.operators.objective import Loss, require_scalar
from curvlab.operators.policy import fully_sharded
from curvlab.parameters import Selection
from curvlab.probe import OperatorError

TOLERANCE = {torch.float32: 1e-2, torch.float64: 1e-5}
STEPS = (4.0, 1.0, 0.25, 0.0625)  # tried, in units of the one that rounding suggests


class DifferenceHessian(OfShards):
    """The Hessian of an FSDP2 model from differences of gradients, with its error under control.

    A product takes the gradient at four points along the vector and extrapolates (Richardson). The
    difference between the two steps estimates the error; above ``tolerance`` the product raises.
    The model's parameters are moved for it and put back bit for bit.

    Args:
        model: After ``fully_shard``, over all ranks of the job.
        loss: ``loss(output, target)``, a mean or a sum; or as for other operators.
        data: This rank's share, in as many chunks as on the other ranks; weights are exact.
        select: Which parameters.
        chunk: Most samples at a time.
        tolerance: Largest estimated error of a product, relative to its size or that of a random
            vector's; by default 1e-2 in float32, 1e-5 in float64.
        step: Length of the longer step in parameter space; by default the best of four.
        group: The ranks; by default those of the job.

    Attributes:
        error: The largest estimate so far.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss | Objective | None,
        data: Any,
        *,
        select: Selection = None,
        chunk: int | None = None,
        tolerance: float | None = None,
        step: float | None = None,
        group: Group | None = None,
    ) -> None:
        if not fully_sharded(model):
            raise TypeError(
                "differences of gradients are for FSDP2 models (fully_shard): this model has "
                "second derivatives, so use Hessian or TensorParallelHessian, which are exact"
            )
        super().__init__(model, loss, data, select, chunk, group)
        everyone = self.group.facts([sum(self.counts), len(self.batches)], "numbers of samples")
        chunks = [number for _, number in everyone]
        odd = [rank for rank, number in enumerate(chunks) if number != chunks[0]]
        if odd:
            raise ValueError(
                f"rank {odd[0]} has {chunks[odd[0]]} chunks of data and rank 0 has {chunks[0]}: "
                "FSDP2 gathers parameters with every chunk, so all ranks need as many; set chunk="
            )
        total = sum(count for count, _ in everyone) if self.reduction == "mean" else 1.0
        shares = [c / total if self.reduction == "mean" else 1.0 for c in self.counts]
        self._weights = [share * self.group.size for share in shares]  # FSDP2 averages over ranks
        self.tolerance = self.limit = TOLERANCE[self.dtype] if tolerance is None else tolerance
        self.error, self.scale = 0.0, 0.0
        self.step = self._best_step() if step is None else step
        product, error = self._extrapolated(self._unit(self.random()), self.step)
        self.scale = float(product.norm())
        self._judge(error, self.scale)
        self.certificate = self.probe()
        self.certificate.require()

    def _product(self, block: Tensor) -> Tensor:
        result = torch.zeros_like(block)
        for vector, row in zip(block, result, strict=True):
            length = float(torch.linalg.vector_norm(vector, dtype=torch.float64))
            if length == 0.0:
                continue
            product, error = self._extrapolated(self._unit(vector), self.step)
            self._judge(error, max(float(product.norm()), self.scale))
            row.copy_(product * length)
        return result

    def _judge(self, error: float, size: float) -> None:
        relative = error / size if size > 0 else 0.0
        if not relative <= self.tolerance:
            raise OperatorError(
                f"the differences of gradients are off by about {relative:.1e} (tolerance "
                f"{self.tolerance:.1e}): a model in float64, smooth activations, or another step= "
                f"(it is {self.step:.1e}) make them better; fill(plain, model) makes them exact"
            )
        self.error = max(self.error, relative)

    def _best_step(self) -> float:
        """The step with the smallest estimate along a random vector."""
        squares = [float(whole(p.detach().double().square().sum())) for p in self.parameters]
        size = math.sqrt(math.fsum(squares))
        usual = float(torch.finfo(self.dtype).eps) ** 0.25 * (1.0 + size)
        vector = self._unit(self.random())
        errors: dict[float, float] = {}
        for factor in STEPS:
            product, error = self._extrapolated(vector, factor * usual)
            errors[factor * usual] = error / max(float(product.norm()), 1e-300)
        return min(errors, key=lambda step: errors[step])

    def _extrapolated(self, vector: Tensor, step: float) -> tuple[Tensor, float]:
        """``H v`` for a unit vector, float64, and an estimate of its error."""
        coarse, fine = self._difference(vector, step), self._difference(vector, 0.5 * step)
        # The difference holds truncation, most of which the extrapolation removes, and rounding,
        # of which the extrapolation makes 1.2 times as much: twice the difference is above both.
        return (4.0 * fine - coarse) / 3.0, 2.0 * float((fine - coarse).norm())

    @torch.no_grad()
    def _difference(self, vector: Tensor, step: float) -> Tensor:
        """``(g(p + step v) - g(p - step v)) / (2 step)``, float64."""
        directions = [local(piece) for piece in self.cut(vector)]
        places = [local(parameter) for parameter in self.parameters]
        before = [place.clone() for place in places]
        gradients = []
        try:
            for sign in (1.0, -1.0):
                for place, start, along in zip(places, before, directions, strict=True):
                    place.copy_(start + (sign * step) * along)
                gradients.append(self._gradient().double())
        finally:
            for place, start in zip(places, before, strict=True):
                place.copy_(start)
        return (gradients[0] - gradients[1]) / (2.0 * step)

    def _gradient(self) -> Tensor:
        """Over all ranks' samples, whole; the model's own ``.grad`` stay as they were."""
        everything = list(self.model.parameters())
        kept = [parameter.grad for parameter in everything]
        try:
            for parameter in everything:
                parameter.grad = None
            for batch, weight in zip(self.batches, self._weights, strict=True):
                with torch.enable_grad():
                    value = require_scalar(self.value(self.model, batch)) * weight
                    value.backward()  # type: ignore[no-untyped-call]
            return self.flat([parameter.grad for parameter in self.parameters])
        finally:
            for parameter, gradient in zip(everything, kept, strict=True):
                parameter.grad = gradient

    def _unit(self, vector: Tensor) -> Tensor:
        length = float(torch.linalg.vector_norm(vector, dtype=torch.float64))
        return vector / length
