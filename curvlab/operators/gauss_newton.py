"""Curvatures ``J' A J``: J the Jacobian of the outputs, A how the loss curves at the outputs.

``GaussNewton``: A is the loss's Hessian at the outputs. ``Fisher``: A is the covariance of the
loss's gradient there, with targets drawn from the model; the same matrix for cross-entropy, binary
cross-entropy and squared error. ``EmpiricalFisher``: A is ``c c'`` per sample, with ``c`` the
loss's gradient at the targets in the data.
"""

from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from curvlab.operators.curvature import Curvature
from curvlab.operators.frozen import Chunk
from curvlab.operators.problem import TRIED
from curvlab.operators.products import sandwich
from curvlab.operators.products.autograd import Product
from curvlab.operators.products.choose import Engine
from curvlab.operators.products.sandwich import OutputCurvature
from curvlab.refusals import Refusal, Trap


class Sandwich(Curvature):
    """``J' A J`` with A given by a subclass."""

    needs_outputs = True
    second = False

    @abstractmethod
    def _output_curvature(self, chunk: Chunk, output: Tensor) -> OutputCurvature:
        """A at ``output``: ``(samples, ...)`` to the same shape."""

    def _retained(self, chunk: Chunk, keep: bool = True) -> Product:
        problem = self.problem
        return sandwich.kept(
            lambda: problem.output(chunk, problem.parameters),
            lambda output: self._output_curvature(chunk, output),
            problem.parameters,
            problem.layout,
            keep,
            problem.around,
        )

    def _linearised(self, chunk: Chunk) -> Product:
        problem = self.problem
        with torch.no_grad():
            output = problem.output(chunk, problem.parameters)
        return sandwich.linearised(
            lambda parameters: problem.output(chunk, parameters),
            self._output_curvature(chunk, output),
            problem.parameters,
            problem.layout,
        )

    def _moved(self, chunk: Chunk, step: Tensor) -> Tensor:
        problem, layout = self.problem, self.problem.layout
        with torch.no_grad():
            flat = layout.flatten(problem.parameters).add_(step)
            return problem.output(chunk, layout.unflatten(flat))

    def _rate(self, chunk: Chunk, rate: Tensor) -> Tensor:
        problem = self.problem
        with torch.no_grad():
            output = problem.output(chunk, problem.parameters)
        curved = self._output_curvature(chunk, output)(rate)
        function = problem.terms.split("this operator").output
        return problem.slope(function, chunk, problem.parameters, curved)

    def _builders(self) -> dict[Engine, Callable[[Chunk], Product]]:
        return {"retained": self._retained, "linearised": self._linearised}


def slope(
    operator: Curvature, chunk: Chunk, output: Tensor, *, create_graph: bool = False
) -> tuple[Tensor, Tensor]:
    """``output`` as a leaf, and the gradient there of the chunk's share of the loss."""
    point = output.detach().requires_grad_()
    value = operator.problem.criterion(chunk, point)
    (gradient,) = torch.autograd.grad(value, point, create_graph=create_graph)
    operator.problem.check(chunk, value)
    return point, gradient


class GaussNewton(Sandwich):
    """H^O, the generalised Gauss-Newton or outer-product matrix: ``J' (d2 loss / d output2) J``."""

    def _output_curvature(self, chunk: Chunk, output: Tensor) -> OutputCurvature:
        point, gradient = slope(self, chunk, output, create_graph=True)

        def curvature(along: Tensor) -> Tensor:
            if not gradient.requires_grad:  # a loss that is linear in the outputs
                return torch.zeros_like(along)
            (image,) = torch.autograd.grad(
                gradient, point, along, retain_graph=True, allow_unused=True, materialize_grads=True
            )
            return image

        if chunk.number == TRIED:
            self._require_curved(gradient.detach(), curvature)
        return curvature

    def _require_curved(self, gradient: Tensor, curvature: OutputCurvature) -> None:
        if bool(gradient.any()) and not bool(curvature(gradient).any()):
            raise Refusal(
                f"the loss is linear in the outputs, so that {type(self).__name__} is zero. For "
                "nll_loss of log-probabilities: have the model return logits and pass "
                "cross_entropy, which is the same loss",
                Trap.LINEAR_LOSS,
            )

    def _mlp(self, chunk: Chunk) -> Product:
        return self._mlp_product(chunk).gauss_newton

    def _builders(self) -> dict[Engine, Callable[[Chunk], Product]]:
        own = super()._builders()
        return own if self.plan is None else {"mlp": self._mlp, **own}
