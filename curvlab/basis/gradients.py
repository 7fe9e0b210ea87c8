"""A basis applied to a model's gradients: lists of tensors that make one vector together.

Where the basis is one piece of memory the fused kernels read the tensors as they are; a basis in
several pieces or one that is streamed works on one flat copy, which is ``1/size`` of its own bytes.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from curvlab_kernels import ops
from curvlab_kernels.checks import WORKING
from torch import Tensor, nn

if TYPE_CHECKING:
    from curvlab.basis.memory import Basis


def project_list_(basis: "Basis", tensors: Sequence[Tensor]) -> Tensor:
    """See :meth:`Basis.project_out_`."""
    _check_count(basis, tensors, "gradients")
    whole = basis.store.whole
    if whole is not None:
        return ops.project_list_(whole[0], tensors, basis.factor, whole[1])
    _check(basis, tensors, "gradients")
    flat = _flat(tensors)
    removed = basis.project_out_(flat)
    _scatter(flat, tensors)
    return removed


def project_gradients_(basis: "Basis", parameters: Iterable[nn.Parameter]) -> Tensor:
    """See :meth:`Basis.project_gradients_`."""
    chosen = list(parameters)
    for parameter in chosen:
        if parameter.grad is None:  # zero, but its projection need not be
            parameter.grad = torch.zeros_like(parameter)
    with torch.no_grad():
        return project_list_(basis, [p.grad for p in chosen if p.grad is not None])


@torch.no_grad()
def sgd_step_(
    basis: "Basis",
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    momenta: Sequence[Tensor],
    lr: float,
    weight_decay: float,
    momentum: float,
) -> Tensor:
    """See :meth:`Basis.sgd_step_`."""
    _check_count(basis, parameters, "parameters")
    _check_count(basis, gradients, "gradients")
    hyper = (lr, weight_decay, momentum)
    whole = basis.store.whole
    if whole is not None:
        rows, scales = whole
        return ops.sgd_step_(
            rows, parameters, gradients, momenta, *hyper, factor=basis.factor, scales=scales
        )
    _check(basis, parameters, "parameters")
    _check(basis, gradients, "gradients")
    if momentum != 0.0 and not momenta:
        raise ValueError(f"momentum={momentum} needs momenta: one tensor of zeros per parameter")
    step = _flat(gradients)
    if weight_decay:
        step.add_(_flat(parameters), alpha=weight_decay)
    removed = basis.project_out_(step)
    parts = _parts(step, parameters)
    if momenta:
        torch._foreach_mul_(list(momenta), momentum)
        torch._foreach_add_(list(momenta), parts)
        parts = list(momenta)
    torch._foreach_sub_(list(parameters), parts, alpha=lr)
    return removed


def _check_count(basis: "Basis", tensors: Sequence[Tensor], name: str) -> None:
    total = sum([tensor.numel() for tensor in tensors])
    if total != basis.n:
        raise ValueError(
            f"{name} have {total} elements together; the basis holds vectors of {basis.n}. Pass "
            "one tensor per parameter, in the order of the parameters"
        )


def _check(basis: "Basis", tensors: Sequence[Tensor], name: str) -> None:
    for index, tensor in enumerate(tensors):
        if tensor.dtype not in WORKING:
            raise TypeError(f"{name}[{index}] must be float32 or float64; got {tensor.dtype}")
        if tensor.device != basis.device:
            raise ValueError(f"{name}[{index}] is on {tensor.device}, the basis on {basis.device}")


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _parts(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = torch.split_with_sizes(flat, [tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def _scatter(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    torch._foreach_copy_(list(tensors), _parts(flat, tensors))
