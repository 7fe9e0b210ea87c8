"""Rows applied to a model's gradients: lists of tensors that make one vector together.

Where the rows are one piece of memory, the kernels read the tensors as they are. For rows in
several pieces, in shards or streamed, the work is done on one flat copy.
In shards, tensors are whole and the same on every rank of a data-parallel job; the step computes
its own range of the parameters and gathers the rest.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from curvlab_kernels import checks, ops
from curvlab_kernels.checks import WORKING
from torch import Tensor

if TYPE_CHECKING:
    from curvlab.rows.projector import Projector


def project_list_(rows: "Projector", tensors: Sequence[Tensor]) -> Tensor:
    """See :meth:`Projector.project_out_`."""
    _check_count(rows, tensors, "gradients")
    whole = rows.whole
    if whole is not None and not rows.space.sharded:
        return ops.project_list_(whole[0], tensors, rows.factor, whole[1])
    _check(rows, tensors, "gradients")
    checks.check_places({"tensors": tensors})
    held = rows.space.take_list(tensors)
    removed = rows.project_out_(held)
    rows.space.give_list(held, tensors)
    return removed


@torch.no_grad()
def sgd_step_(
    rows: "Projector",
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    momenta: Sequence[Tensor],
    lr: float,
    weight_decay: float,
    momentum: float,
) -> Tensor:
    """See :meth:`Rows.sgd_step_`."""
    _check_count(rows, parameters, "parameters")
    whole, space = rows.whole, rows.space
    if whole is not None and not space.sharded:
        _check_count(rows, gradients, "gradients")
        hyper = (lr, weight_decay, momentum)
        return ops.sgd_step_(
            whole[0], parameters, gradients, momenta, *hyper, factor=rows.factor, scales=whole[1]
        )
    _check(rows, parameters, "parameters")
    numbers = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
    lr, weight_decay, momentum = (checks.number(each, name) for name, each in numbers.items())
    if momentum != 0.0 and not momenta:
        one = "one shard of zeros" if space.sharded else "one tensor of zeros per parameter"
        raise ValueError(f"momentum={momentum} needs momenta: {one}")
    if not space.sharded:
        for name, tensors in {"gradients": gradients, "momenta": momenta}.items():
            if tensors or name == "gradients":
                _check_count(rows, tensors, name)
                checks.check_alike(parameters, tensors, f"parameters and {name}")
    # Gradients may lie where they like: they are copied before anything changes.
    checks.check_places({"parameters": parameters, "momenta": momenta})
    step = _held(rows, gradients, "gradients")
    values = space.take_list(parameters)
    if weight_decay:
        step.add_(values, alpha=weight_decay)
    removed = rows.project_out_(step)
    if momenta:
        gathered = momenta[0] if space.sharded else space.take_list(momenta)
        # Only projected steps enter the momentum: while the rows stay, it needs no projection.
        step = gathered.mul_(momentum).add_(step)
        if not space.sharded:
            space.give_list(step, momenta)
    space.give_list(values.sub_(step, alpha=lr), parameters)
    return removed


def _held(rows: "Projector", tensors: Sequence[Tensor], name: str) -> Tensor:
    """What is held here of ``tensors``: whole ones, or one shard."""
    if rows.space.sharded and len(tensors) == 1 and tensors[0].shape == (rows.width,):
        return tensors[0].clone()  # gradients are the caller's; the step is made in place
    _check_count(rows, tensors, name)
    _check(rows, tensors, name)
    return rows.space.take_list(tensors)


def _check_count(rows: "Projector", tensors: Sequence[Tensor], name: str) -> None:
    try:
        total = sum([tensor.numel() for tensor in tensors])
    except AttributeError:
        checks.check_list(rows, tensors, name)  # says which one is no tensor
        raise
    if total != rows.n:
        raise ValueError(
            f"{name} have {total} elements together; the basis holds vectors of {rows.n}. Pass "
            "one tensor per parameter, in the order of the parameters"
        )


def _check(rows: "Projector", tensors: Sequence[Tensor], name: str) -> None:
    for index, tensor in enumerate(tensors):
        if tensor.dtype not in WORKING:
            raise TypeError(f"{name}[{index}] must be float32 or float64; got {tensor.dtype}")
        if tensor.device != rows.device:
            raise ValueError(f"{name}[{index}] is on {tensor.device}, the basis on {rows.device}")
