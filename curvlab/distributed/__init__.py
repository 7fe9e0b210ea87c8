"""Over many processes and machines: shares of the data, shards of vectors and bases.

Built on ``torch.distributed``: gloo on CPUs, nccl on GPUs, started by torchrun. Every rank runs the
same program; all calls here are collective.
"""

from curvlab.distributed.differences import DifferenceHessian
from curvlab.distributed.group import Group, Traffic, current, join
from curvlab.distributed.launch import launch
from curvlab.distributed.models import fill
from curvlab.distributed.operators import DataParallel, Sharded
from curvlab.distributed.sharded_models import TensorParallelHessian
from curvlab.distributed.shards import Shards, shard_width
from curvlab.distributed.watch import RankError

__all__ = [
    "DataParallel",
    "DifferenceHessian",
    "Group",
    "RankError",
    "Sharded",
    "Shards",
    "TensorParallelHessian",
    "Traffic",
    "current",
    "fill",
    "join",
    "launch",
    "shard_width",
]
