"""Random vectors in shards: the numbers of one process on any number of ranks, in pieces."""

from types import SimpleNamespace

import pytest
import torch

from curvlab.distributed import Shards, join, shards as module
from curvlab.distributed.operators import Sharded
from curvlab.eigen import lanczos
from curvlab.operators import Dense
from curvlab.rows import Whole

SIZES = (1, 5, 15, 16, 17, 63, 64, 65, 79, 80, 81, 128, 143, 144, 1001)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_shards_draw_the_numbers_of_one_process(ranks, dtype, monkeypatch):
    monkeypatch.setattr(module, "DRAWN", 64)
    for n in SIZES:
        normal, signs = [], []
        for rank in range(ranks):
            space = Shards(n, SimpleNamespace(rank=rank, size=ranks))
            generator = torch.Generator().manual_seed(3)
            normal.append(space.normal(generator, dtype))
            signs.append(space.signs(generator, 3))
        generator = torch.Generator().manual_seed(3)
        assert torch.equal(torch.cat(normal)[:n], Whole(n).normal(generator, dtype))
        assert torch.equal(torch.cat(signs, 1)[:, :n].long(), Whole(n).signs(generator, 3).long())
        assert not torch.cat(normal)[n:].any()
        assert not torch.cat(signs, 1)[:, n:].any()


def test_no_draw_is_longer_than_a_piece(monkeypatch):
    """Of a vector of four million elements, a rank of four draws no tensor of more than a piece."""
    longest = 0

    def counted(make):
        def call(*arguments, **options):
            nonlocal longest
            made = make(*arguments, **options)
            longest = max(longest, made.numel())
            return made

        return call

    monkeypatch.setattr(torch, "randn", counted(torch.randn))
    monkeypatch.setattr(torch, "randint", counted(torch.randint))
    space = Shards(1 << 22, SimpleNamespace(rank=1, size=4))
    generator = torch.Generator().manual_seed(0)
    assert space.signs(generator, 2).dtype == torch.int8
    space.normal(generator, torch.float32)
    assert longest < module.DRAWN + 16


def test_sharded_pairs_print_as_whole_ones_do():
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(60, 60, generator=generator, dtype=torch.float64)
    with join():
        pairs = lanczos(Sharded(Dense(matrix + matrix.T)), 3)
        assert pairs.space.sharded
        assert repr(pairs) == repr(pairs.gather())
