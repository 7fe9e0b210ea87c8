"""Over many processes and machines: shares of the data, shards of vectors and bases.

Built on ``torch.distributed``: gloo on CPUs, nccl on GPUs, started by torchrun. Every rank runs the
same program; all calls here are collective.
"""

from curvlab.distributed.differences import DifferenceHessian as DifferenceHessian
from curvlab.distributed.group import (
    Group as Group,
    Traffic as Traffic,
    current as current,
    join as join,
)
from curvlab.distributed.launch import launch as launch
from curvlab.distributed.models import fill as fill
from curvlab.distributed.operators import DataParallel as DataParallel, Sharded as Sharded
from curvlab.distributed.sharded_models import TensorParallelHessian as TensorParallelHessian
from curvlab.distributed.shards import Shards as Shards, shard_width as shard_width
from curvlab.distributed.watch import RankError as RankError
