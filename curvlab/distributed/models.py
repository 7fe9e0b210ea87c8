"""A plain model filled with the parameters of one in shards (FSDP2, tensor parallelism).

``Hessian`` and ``GaussNewton`` take FSDP2 models as they are, ``TensorParallelHessian`` takes
tensor-parallel ones. For everything else there is a plain model of the same code, filled with the
whole parameters on every rank; the operator's products are then divided over ranks by data, and its
vectors and bases by shards.
"""

import torch
from torch import nn

from curvlab.distributed.sharded_problem import whole


@torch.no_grad()
def fill(plain: nn.Module, sharded: nn.Module) -> nn.Module:
    """Write the whole parameters and buffers of ``sharded`` into ``plain``; every rank calls this.

    Args:
        plain: A model of the same code that was never sharded; on the device where curvature is to
            be computed, not ``meta``.
        sharded: With ``DTensor`` parameters, gathered one at a time, or ordinary ones.

    Returns:
        ``plain``, in the modes (train or eval) of ``sharded``.
    """
    for kind, mine, theirs in (
        ("parameters", dict(plain.named_parameters()), dict(sharded.named_parameters())),
        ("buffers", dict(plain.named_buffers()), dict(sharded.named_buffers())),
    ):
        if mine.keys() != theirs.keys():
            odd = sorted(mine.keys() ^ theirs.keys())
            raise ValueError(f"the two models have other {kind}: only one of them has {odd[:8]}")
        for name, target in mine.items():
            source = whole(theirs[name])
            if source.shape != target.shape:
                raise ValueError(
                    f"{name!r} is {tuple(source.shape)} in the sharded model and "
                    f"{tuple(target.shape)} in the plain one: build both with the same arguments"
                )
            target.copy_(source)
    for mine_, theirs_ in zip(plain.modules(), sharded.modules(), strict=True):
        mine_.training = theirs_.training
    return plain
