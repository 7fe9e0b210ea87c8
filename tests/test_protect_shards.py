"""Weights in shards over two ranks are protected as whole ones are, without a message."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing, nn

from curvlab import layer_bases, protect
from curvlab.losses import sequence
from curvlab.nets import gpt


def rank_of_two(rank, file):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(0)
    old = torch.randint(9, (1, 8), generator=generator)
    new = torch.randint(17, (6, 8), generator=generator)
    model = gpt(17, context=8, hidden=24, depth=2, heads=2, seed=0)
    model.tokens.requires_grad_(False)  # in shards it is held whole, in one piece it is not
    bases = layer_bases(model, old, energy=1.0)
    before, whole = model(old).detach(), copy.deepcopy(model)
    fully_shard(model, mesh=mesh)
    for one in (model, whole):
        optimizer = torch.optim.AdamW(one.parameters(), 1e-2)
        protect(optimizer, bases, one)
        for _ in range(4):
            optimizer.zero_grad()
            sequence(one(new), new).backward()
            optimizer.step()
    still = (model(old).detach() - before).norm() / before.norm()
    apart = (model(new) - whole(new)).detach().norm() / whole(new).detach().norm()
    # float32: its rounding times what four steps at this rate amplify, with a margin of ten
    assert float(still) <= 1e-5
    assert float(apart) <= 1e-5
    turned = nn.Sequential(nn.Linear(8, 4))
    known = layer_bases(turned, torch.ones(2, 8))
    weight = distribute_tensor(turned[0].weight.detach(), mesh, [Shard(1)])
    turned[0].weight = nn.Parameter(weight)
    with pytest.raises(ValueError, match=r"'0\.weight' is placed .*first dimension only"):
        protect(torch.optim.SGD(turned.parameters(), 0.1), known, turned)
    dist.destroy_process_group()


@pytest.mark.slow
def test_sharded_weights_take_the_steps_of_whole_ones_and_leave_stored_outputs(tmp_path):
    multiprocessing.spawn(rank_of_two, (str(tmp_path / "meeting"),), nprocs=2)
