"""The Hessian of the loss, and the functional part of it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from curvlab.operators.curvature import Curvature
from curvlab.operators.dense_mlp import dense_hessian
from curvlab.operators.frozen import Chunk
from curvlab.operators.gauss_newton import slope
from curvlab.operators.objective import require_scalar
from curvlab.operators.products import autograd
from curvlab.operators.products.autograd import Product
from curvlab.operators.products.choose import Engine


class Hessian(Curvature):
    """The second derivatives of the objective: ``Hessian(model, loss, data) @ vector``."""

    def _scalar(self, chunk: Chunk) -> Callable[[Sequence[Tensor]], Tensor]:
        """The function of the parameters whose second derivatives these are, on one chunk."""
        return lambda parameters: self.problem.loss(chunk, parameters)

    def _retained(self, chunk: Chunk, keep: bool = True) -> Product:
        problem = self.problem

        def value() -> Tensor:
            value = problem.loss(chunk, problem.parameters)
            problem.check(chunk, value)
            return value

        return autograd.kept(value, problem.parameters, problem.layout, keep, problem.around)

    def _linearised(self, chunk: Chunk) -> Product:
        problem = self.problem
        return autograd.linearised(self._scalar(chunk), problem.parameters, problem.layout)

    def _compiled(self, chunk: Chunk) -> Product:
        problem = self.problem
        return autograd.compiled(self._scalar(chunk), problem.parameters, problem.layout)

    def _inside(self, chunk: Chunk) -> Callable[[nn.Module, Any], Tensor]:
        """The same as a function of the model and the batch."""
        whole = self.problem.terms.whole
        return lambda model, batch: require_scalar(whole(model, batch)) * chunk.weight

    def _moved(self, chunk: Chunk, step: Tensor) -> Tensor:
        problem, layout = self.problem, self.problem.layout
        flat = layout.flatten(problem.parameters).add_(step)
        leaves = [piece.detach().requires_grad_() for piece in layout.unflatten(flat.detach())]
        return problem.slope(self._inside(chunk), chunk, leaves)

    def _rate(self, _chunk: Chunk, rate: Tensor) -> Tensor:
        return rate

    def _mlp(self, chunk: Chunk) -> Product:
        return self._mlp_product(chunk).hessian

    def _builders(self) -> dict[Engine, Callable[[Chunk], Product]]:
        own: dict[Engine, Callable[[Chunk], Product]] = {
            "retained": self._retained,
            "linearised": self._linearised,
            "compiled": self._compiled,
        }
        return own if self.plan is None else {"mlp": self._mlp, **own}

    def dense(self) -> Tensor:
        """The matrix ``(n, n)``, exactly symmetric; plain MLPs have a way of their own to it."""
        if self.plan is None or self._engine != "mlp" or type(self) is not Hessian:
            return super().dense()
        problem, matrix = self.problem, None
        for chunk in problem.chunks:
            inputs, targets = chunk.batch
            matrix = dense_hessian(
                self.plan, problem.named(), inputs, targets, chunk.weight, matrix
            )
        return torch.empty(0, 0) if matrix is None else matrix


class FunctionalHessian(Hessian):
    """H^F = H - H^O: the part of the Hessian that comes from the network's own second derivatives.

    It is the Hessian of ``sum(c * output(parameters))`` with ``c`` the loss's gradient at the
    outputs, held constant: exact, with no difference of two large matrices.
    """

    needs_outputs = True

    def _scalar(self, chunk: Chunk) -> Callable[[Sequence[Tensor]], Tensor]:
        problem = self.problem
        with torch.no_grad():
            output = problem.output(chunk, problem.parameters)
        _, constant = slope(self, chunk, output)
        return lambda parameters: (constant * problem.output(chunk, parameters)).sum()

    def _inside(self, chunk: Chunk) -> Callable[[nn.Module, Any], Tensor]:
        problem = self.problem
        with torch.no_grad():
            output = problem.output(chunk, problem.parameters)
        _, constant = slope(self, chunk, output)
        function = problem.terms.split("FunctionalHessian").output
        return lambda model, batch: (constant * function(model, batch)).sum()

    def _retained(self, chunk: Chunk, keep: bool = True) -> Product:
        problem = self.problem

        def value() -> Tensor:
            output = problem.output(chunk, problem.parameters)
            _, constant = slope(self, chunk, output)
            return (constant * output).sum()

        return autograd.kept(value, problem.parameters, problem.layout, keep, problem.around)

    def _mlp(self, chunk: Chunk) -> Product:
        return self._mlp_product(chunk).functional
