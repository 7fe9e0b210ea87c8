"""The Fisher information: exact or by sampling, and the empirical one.

A loss is read as the negative log-likelihood of its targets: cross-entropy of a categorical, binary
cross-entropy of Bernoulli variables, squared error of normal ones with variance 1/2. A mean over
several terms per sample (pixels, tokens) is a mean of their Fisher matrices, so that the
expectation is the Gauss-Newton matrix under either reduction.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from curvlab.batches import sample_count
from curvlab.operators.frozen import Chunk
from curvlab.operators.gauss_newton import GaussNewton, Sandwich, slope
from curvlab.operators.objective import Loss, Objective, Reduction
from curvlab.operators.policy import Mode, Precision
from curvlab.operators.problem import ChunkSize, Count
from curvlab.operators.products.choose import Engine
from curvlab.operators.products.sandwich import OutputCurvature
from curvlab.parameters import Selection


class EmpiricalFisher(Sandwich):
    """``1/N sum_i g_i g_i'`` with ``g_i`` the gradient of sample i's loss at its own target.

    With a sum reduction the sum is not divided. A sample is an entry of the first dimension. This
    is not the Fisher information, and away from a good fit it can be far from the Hessian.
    """

    def _output_curvature(self, chunk: Chunk, output: Tensor) -> OutputCurvature:
        require_rows(chunk, output)
        _, gradient = slope(self, chunk, output)
        return outer_products(gradient[None], self.problem.normaliser)


class Fisher(GaussNewton):
    """The Fisher information of the model's own predictive distribution."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss | Objective | None,
        data: Any,
        *,
        samples: int | None = None,
        seed: int = 0,
        select: Selection = None,
        mode: Mode | Sequence[Mode] | None = None,
        reduction: Reduction | None = None,
        count: Count | None = None,
        chunk: ChunkSize = None,
        dtype: torch.dtype | None = None,
        precision: Precision = "exact",
        budget: float | None = None,
        engine: Engine | Literal["auto", "measure"] = "auto",
        check: bool = True,
    ) -> None:
        """Draw targets if asked to; the rest is as for every curvature.

        Args:
            model: As for :class:`curvlab.Hessian`; arguments not listed here are the same too.
            loss: Cross-entropy, binary cross-entropy with logits or squared error.
            data: As for :class:`curvlab.Hessian`.
            samples: Default ``None``: the exact expectation over targets. A number draws that many
                targets per sample, once, when the operator is made.
            seed: The seed of the drawn targets, default 0; how the data are cut does not change
                them.
        """
        self.likelihood = likelihood(loss)
        if samples is not None and (not isinstance(samples, int) or samples < 1):
            raise ValueError(f"samples= is a number of targets to draw, or None; got {samples!r}")
        if samples is not None and count is not None:
            raise ValueError("Fisher with samples= does not take count=: use samples=None")
        self.draws, self.seed = samples, seed
        self._noise: dict[tuple[int, ...], Tensor] = {}
        super().__init__(
            model,
            loss,
            data,
            select=select,
            mode=mode,
            reduction=reduction,
            count=count,
            chunk=chunk,
            dtype=dtype,
            precision=precision,
            budget=budget,
            engine=engine,
            check=check,
        )

    def _output_curvature(self, chunk: Chunk, output: Tensor) -> OutputCurvature:
        if self.draws is None:
            return super()._output_curvature(chunk, output)
        require_rows(chunk, output)
        noise = self._noise_for(chunk, output).to(output)
        mean = self.problem.reduction == "mean"
        # all draws as one tall batch; its mean divides by the number of draws once too often
        tall = output.expand(len(noise), *output.shape).flatten(0, 1).detach().requires_grad_()
        target = self.likelihood.draw(tall.detach(), noise.flatten(0, 1))
        weight = chunk.weight * (self.draws if mean else 1)
        value = self.problem.criterion(Chunk((None, target), weight), tall)
        (gradient,) = torch.autograd.grad(value, tall)
        terms = self.likelihood.terms(output) if mean else 1
        scale = self.problem.normaliser * terms / self.draws
        return outer_products(gradient.reshape(len(noise), *output.shape), scale)

    def _noise_for(self, chunk: Chunk, output: Tensor) -> Tensor:
        """``(draws, samples, ...)``: the part of the whole data set's noise that is the chunk's."""
        shape = self.likelihood.noise_shape(output)
        if shape not in self._noise:
            samples = self.problem.batches.samples or len(output)
            generator = torch.Generator().manual_seed(self.seed)
            make = torch.randn if self.likelihood.normal else torch.rand
            whole = (samples, self.draws or 1, *shape)
            self._noise[shape] = make(whole, generator=generator, dtype=torch.float64)
        return self._noise[shape][chunk.start : chunk.start + len(output)].transpose(0, 1)

    def _builders(self) -> Any:
        builders = super()._builders()
        if self.draws is not None:
            builders.pop("mlp", None)
        return builders


@dataclass(frozen=True, slots=True)
class Likelihood:
    """How targets are drawn from outputs, given noise."""

    draw: Callable[[Tensor, Tensor], Tensor]
    normal: bool  # the noise: standard normal, or uniform
    classes: bool  # whether dimension 1 of the outputs holds the logits of one draw

    def noise_shape(self, output: Tensor) -> tuple[int, ...]:
        return tuple(output.shape[2:] if self.classes else output.shape[1:])

    def terms(self, output: Tensor) -> int:
        """Draws per sample: what a mean reduction divides by, besides the number of samples."""
        return torch.Size(self.noise_shape(output)).numel()


def likelihood(loss: object) -> Likelihood:
    """The distribution whose negative log-likelihood ``loss`` is."""
    plain = isinstance(loss, nn.Module)
    if loss is functional.cross_entropy or (
        plain
        and type(loss) is nn.CrossEntropyLoss
        and not loss.label_smoothing
        and loss.weight is None
    ):
        return Likelihood(_categorical, normal=False, classes=True)
    if loss is functional.mse_loss or type(loss) is nn.MSELoss:
        return Likelihood(lambda z, noise: z + noise * 0.5**0.5, normal=True, classes=False)
    if loss is functional.binary_cross_entropy_with_logits or (
        plain
        and type(loss) is nn.BCEWithLogitsLoss
        and loss.weight is None
        and loss.pos_weight is None
    ):
        return Likelihood(
            lambda z, noise: (noise < z.sigmoid()).to(z.dtype), normal=False, classes=False
        )
    raise ValueError(
        "Fisher needs a loss that is a known negative log-likelihood: cross_entropy, mse_loss or "
        "binary_cross_entropy_with_logits, or their modules without weights or label smoothing; "
        f"got {loss!r}. GaussNewton takes any loss(output, target)"
    )


def outer_products(gradients: Tensor, scale: float) -> OutputCurvature:
    """``u -> scale * sum_s c_s (c_s . u)`` per sample; ``gradients`` is ``(draws, N, ...)``."""
    drawn = gradients.flatten(2)

    def curvature(along: Tensor) -> Tensor:
        inner = torch.einsum("sno,no->sn", drawn, along.flatten(1))
        return torch.einsum("sn,sno->no", inner, drawn).mul_(scale).reshape(along.shape)

    return curvature


def require_rows(chunk: Chunk, output: Tensor) -> None:
    """Raise unless the outputs have one row per sample."""
    samples = sample_count(chunk.batch)
    if output.dim() < 1 or samples is None or len(output) != samples:
        raise ValueError(
            f"this operator needs outputs with one row per sample; {samples} samples gave outputs "
            f"{tuple(output.shape)}"
        )


def _categorical(logits: Tensor, uniform: Tensor) -> Tensor:
    cumulative = logits.double().softmax(1).cumsum(1)
    picked = (uniform.double().unsqueeze(1) > cumulative).sum(1)
    return picked.clamp_(max=logits.shape[1] - 1)
