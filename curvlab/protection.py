"""Training with any torch optimizer without leaving what a basis protects: SGD-dagger, wrapped on.

    protect(optimizer, basis, model)      # from here on every optimizer.step() is projected

What is guaranteed, for every optimizer: the change of the parameters in a step is orthogonal to the
rows of the basis, ``M (after - before) = 0``, up to the rounding of the parameters themselves
(norm at most ``eps |theta|`` in each step, without preferred direction). The projection is applied
to the change that the optimizer has made, so nothing an optimizer does can leak: not momentum
gathered before the basis grew, weight decay, a closure's line search or an adaptive scale.

- ``SGD``, with or without momentum, Nesterov and weight decay, is linear in the gradients: its
  projected change *is* the step of SGD-dagger, ``d = P(g + wd p)``, as long as the basis stays the
  same.
- ``Adam``, ``AdamW`` and all others rescale gradients by element, which turns a projected gradient
  back into the protected directions: projecting gradients alone would leak. Here the gradients are
  projected first, so that the moments estimate the gradient that training may follow, and then the
  change. The result is orthogonal to M; it is not the step of least distance in Adam's own metric.

Parameters that the basis covers and the optimizer does not train stay where they are: the others
are projected by the basis restricted to them. Parameters outside the basis are trained freely.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from curvlab.basis import Basis
from curvlab.parameters import Selection, select_parameters


class Protection:
    """An optimizer whose steps are projected, until :meth:`remove`.

    Attributes:
        basis: What is protected; rows added to it later count from the next step on.
        removed: The share of the last change's norm that the projection removed; 0 before a step.
    """

    def __init__(
        self, optimizer: Optimizer, basis: Basis, covered: Sequence[nn.Parameter], gradients: bool
    ) -> None:
        self.basis, self.removed = basis, 0.0
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._moving = [id(p) in trained and p.requires_grad for p in covered]
        self._covered = list(covered)
        self.parameters = [p for p, moves in zip(covered, self._moving, strict=True) if moves]
        if not self.parameters:
            raise ValueError(
                "protect: the optimizer trains none of the parameters that the basis covers, so "
                "there is nothing to project: pass the optimizer of this model"
            )
        self._before: list[Tensor] = []
        self._restricted: tuple[int, Basis] | None = None
        self._gradients = gradients
        self._hooks = [
            optimizer.register_step_pre_hook(self._start),
            optimizer.register_step_post_hook(self._finish),
        ]

    def remove(self) -> None:
        """Give the optimizer its own steps back."""
        for hook in self._hooks:
            hook.remove()

    @property
    def _rows(self) -> Basis:
        """The basis over the parameters that move."""
        if all(self._moving):
            return self.basis
        if self._restricted is None or self._restricted[0] != self.basis.size:
            self._restricted = self.basis.size, self._restrict()
        return self._restricted[1]

    def _restrict(self) -> Basis:
        sizes = [p.numel() for p in self._covered]
        mask = torch.cat(
            [torch.full((s,), m) for s, m in zip(sizes, self._moving, strict=True)]
        ).to(self.basis.device)
        n = int(mask.sum())
        wide = torch.float64 if self.basis.dtype == torch.float64 else torch.float32
        part = Basis(n, min(n, self.basis.size), dtype=wide, device=self.basis.device)
        for start in range(0, self.basis.size, 64):
            rows = self.basis.rows(start, min(start + 64, self.basis.size))
            part.extend(rows[:, mask])
        return part

    @torch.no_grad()
    def _start(self, _optimizer: Optimizer, _arguments: Any, _options: Any) -> None:
        if not self._before:
            self._before = [torch.zeros_like(p, memory_format=_CONTIGUOUS) for p in self.parameters]
        torch._foreach_copy_(self._before, [p.detach() for p in self.parameters])
        present = [p.grad for p in self.parameters if p.grad is not None]
        if self._gradients and len(present) == len(self.parameters):
            flat = [gradient.contiguous() for gradient in present]
            self._rows.project_out_(flat)
            torch._foreach_copy_(present, flat)

    @torch.no_grad()
    def _finish(self, _optimizer: Optimizer, _arguments: Any, _options: Any) -> None:
        after = [p.detach() for p in self.parameters]
        change = [now.contiguous() - old for now, old in zip(after, self._before, strict=True)]
        size = _norm(change)
        self._rows.project_out_(change)
        left = _norm(change)
        self.removed = max(0.0, 1.0 - (left / size) ** 2) ** 0.5 if size > 0.0 else 0.0
        torch._foreach_add_(change, self._before)
        torch._foreach_copy_(after, change)


_CONTIGUOUS = torch.contiguous_format


def protect(
    optimizer: Optimizer,
    basis: Basis,
    model: nn.Module | Iterable[nn.Parameter] | None = None,
    *,
    select: Selection = None,
    gradients: bool | None = None,
) -> Protection:
    """Project every step of ``optimizer`` out of ``basis``; see the module's header.

    Args:
        optimizer: Any torch optimizer. A step costs one copy of the parameters more, and a
            projection (two, with ``gradients``).
        basis: Rows over the parameters in the order of ``model.named_parameters()``, as every
            curvlab operator on that model has them. It may grow while it protects.
        model: The model, or the parameters in the order of the basis; by default those of the
            optimizer, if it has them in one group.
        select: Which of the model's parameters the basis covers, as for the operators.
        gradients: Whether gradients are projected before the step as well; by default for all
            optimizers but ``torch.optim.SGD``, where it would change nothing.

    Returns:
        A handle: ``.removed`` for watching, ``.remove()`` to end the protection.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"protect needs a torch.optim.Optimizer; got {type(optimizer).__name__}. For a step "
            "of your own use basis.project_out_(update)"
        )
    if not isinstance(basis, Basis):
        raise TypeError(
            f"protect needs a curvlab.Basis; got {type(basis).__name__}. For eigenpairs: basis = "
            "Basis(pairs.n, capacity); basis.extend(pairs.vectors)"
        )
    covered = _covered(optimizer, model, select)
    total = sum(p.numel() for p in covered)
    if total != basis.n:
        raise ValueError(
            f"the parameters have {total} elements together, the basis covers {basis.n}: pass the "
            "model= the basis was computed for, with the same select="
        )
    for parameter in covered:
        if parameter.dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"protect needs float32 or float64 parameters; got {parameter.dtype}, whose "
                "rounding alone would leak more than most steps: keep a float32 master copy"
            )
        if parameter.device != basis.device:
            raise ValueError(
                f"parameters are on {parameter.device}, the basis on {basis.device}: load it with "
                "Basis.load(path, device=...)"
            )
    project_gradients = not isinstance(optimizer, SGD) if gradients is None else gradients
    return Protection(optimizer, basis, covered, project_gradients)


def _covered(
    optimizer: Optimizer, model: nn.Module | Iterable[nn.Parameter] | None, select: Selection
) -> list[nn.Parameter]:
    if isinstance(model, nn.Module):
        return list(select_parameters(model, select).values())
    if select is not None:
        raise ValueError("select= names parameters of a model: pass model= as well")
    if model is not None:
        return list(model)
    if len(optimizer.param_groups) > 1:
        raise ValueError(
            f"the optimizer has {len(optimizer.param_groups)} groups of parameters, whose order "
            "need not be that of the basis: pass model="
        )
    return list(optimizer.param_groups[0]["params"])


def _norm(tensors: list[Tensor]) -> float:
    squares = [tensor.double().square().sum() for tensor in tensors]
    return float(torch.stack(squares).sum().sqrt())
