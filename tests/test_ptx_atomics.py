"""Triton kernels with atomics, executed: orders of blocks that matter, and those that do not."""

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from curvlab_kernels.audit.agreement import random  # noqa: E402
from curvlab_kernels.audit.ptx import Fault, execute  # noqa: E402

from tests.ptx_snippets import ARCHITECTURES  # noqa: E402

pytestmark = pytest.mark.aot


@triton.jit
def atomic_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(out, tl.sum(tl.load(x + at, mask=at < n, other=0), axis=0))


@triton.jit
def emptied_by_one_kernel(x, out, n, BLOCK: tl.constexpr):
    """The first block empties what all add to: those that came before are lost."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if tl.program_id(0) == 0:
        tl.store(out, 0)
    tl.atomic_add(out, tl.sum(tl.load(x + at, mask=at < n, other=0), axis=0))


def test_a_plain_store_races_with_atomics_of_other_blocks():
    x, out = torch.arange(1000, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(Fault, match="race in global memory"):
        execute(emptied_by_one_kernel, (4,), x, out, 1000, BLOCK=256)
    execute(emptied_by_one_kernel, (1,), x, out, 1000, BLOCK=1024)  # a block has an order
    assert out.item() == int(x.sum())


def test_atomics_do_not_race():
    x, out = torch.arange(1000, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    execute(atomic_kernel, (4,), x, out, 1000, BLOCK=256)
    assert out.item() == int(x.sum())


@triton.jit
def last_block_kernel(x, parts, count, out, n, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """The block that counts itself last adds up what all have left, in a fixed order."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(parts + tl.program_id(0), tl.sum(tl.load(x + at, mask=at < n, other=0.0), axis=0))
    if tl.atomic_add(count, 1) == BLOCKS - 1:
        tl.store(out, tl.sum(tl.load(parts + tl.arange(0, BLOCKS)), axis=0))
        tl.store(count, 0)


@triton.jit
def positive_kernel(x, out, count, n, BLOCK: tl.constexpr):
    """Each positive number takes the next place: whichever comes first."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + at, mask=at < n, other=-1.0)
    place = tl.atomic_add(count + 0 * at, 1, mask=values > 0)
    tl.store(out + place, values, mask=values > 0)


@triton.jit
def exchange_kernel(out):
    tl.atomic_xchg(out, tl.program_id(0))


@triton.jit
def largest_kernel(x, out, n, BLOCK: tl.constexpr):
    """Compare and swap until nobody else has written meanwhile."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    largest = tl.max(tl.load(x + at, mask=at < n, other=0), axis=0)
    old = tl.atomic_cas(out, 0, largest)
    while old < largest:
        seen = tl.atomic_cas(out, old, largest)
        old = tl.where(seen == old, largest, seen)


@triton.jit
def shared_out_kernel(x, out, count, total, n, BLOCK: tl.constexpr):
    """Blocks take the next piece as they get there; what they add up rounds by their order."""
    tile = tl.atomic_add(count, 1)
    while tile * BLOCK < n:
        at = tile * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(x + at, mask=at < n, other=0.0)
        tl.store(out + at, 2 * values, mask=at < n)
        tl.atomic_add(total, tl.sum(values, axis=0))
        tile = tl.atomic_add(count, 1)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_atomics_whose_old_value_is_used_pass_if_no_order_matters(architecture):
    options = {"BLOCK": 128, "architecture": architecture}
    x, out = random(1000, dtype=torch.float32), torch.empty(1)
    parts, count = torch.empty(8), torch.zeros(1, dtype=torch.int32)
    execute(last_block_kernel, (8,), x, parts, count, out, 1000, BLOCKS=8, **options)
    assert abs(float(out) - float(x.double().sum())) < 1e-4
    assert count.item() == 0
    whole, most = torch.arange(1000, dtype=torch.int32) * 7 % 1000, torch.zeros_like(count)
    execute(largest_kernel, (8,), whole, most, 1000, **options)
    assert most.item() == 999
    doubled, total = torch.empty(1000), torch.zeros(1)
    execute(shared_out_kernel, (3,), x, doubled, count, total, 1000, **options)
    assert torch.equal(doubled, 2 * x)
    assert abs(float(total) - float(x.double().sum())) < 1e-4


@triton.jit
def first_kernel(out, flag):
    """Whichever block comes first finds zero, each by an instruction of its own."""
    program = tl.program_id(0)
    if program == 0:
        tl.store(out, tl.atomic_cas(flag, 0, 1))
    else:
        tl.store(out + program, tl.atomic_cas(flag, 0, 2))


@triton.jit
def middle_kernel(out, count):
    """Which block is the second of three, if counting begins at zero."""
    if tl.atomic_add(count, 1) == 1:
        tl.store(out, tl.program_id(0))


@pytest.mark.parametrize("kernel", [first_kernel, middle_kernel])
@pytest.mark.parametrize("lanes", [128, 1 << 15])
@pytest.mark.parametrize("blocks", [2, 3, 5])
def test_an_order_that_matters_by_branches_or_in_the_middle_is_a_fault(kernel, blocks, lanes):
    out, state = torch.zeros(2, 5, dtype=torch.int32)
    if kernel is middle_kernel and blocks == 5:  # the one in the middle
        state.fill_(-1)
    with pytest.raises(Fault, match="depends on the order"):
        execute(kernel, (blocks,), out, state, lanes=lanes)


@pytest.mark.parametrize("lanes", [128, 1 << 15])
def test_blocks_run_in_the_order_that_was_asked_for(lanes):
    for order, found in ((range, [0, 1]), (lambda count: reversed(range(count)), [2, 0])):
        out, flag = torch.zeros(2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        execute(first_kernel, (2,), out, flag, order=order, lanes=lanes)
        assert out.tolist() == found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_result_that_depends_on_the_order_of_atomics_is_a_fault(architecture):
    options = {"architecture": architecture}
    x, out = random(1000, dtype=torch.float32), torch.zeros(1000)
    count = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(Fault, match="depends on the order"):
        execute(positive_kernel, (4,), x, out, count, 1000, BLOCK=256, **options)
    with pytest.raises(Fault, match="depends on the order"):
        execute(exchange_kernel, (4,), count, **options)
    count.zero_()
    execute(positive_kernel, (4,), x, out, count, 1000, BLOCK=256, order=range, **options)
    assert torch.equal(out[: int(count)].sort().values, x[x > 0].sort().values)


@triton.jit
def added_kernel(x, total, begun):
    """A float for each block; those that find the sum begun say so, which in each order some do."""
    if tl.atomic_add(total, tl.load(x + tl.program_id(0))) != 0:
        tl.store(begun, 1)


def test_sums_of_floats_by_atomics_may_round_by_their_order_and_no_more():
    begun = torch.zeros(1, dtype=torch.int32)

    def total(numbers, **options):
        out = torch.zeros(1)
        execute(added_kernel, (len(numbers),), torch.tensor(numbers), out, begun, **options)
        return out.item()

    half = 2.0**-24  # of the last bit of one
    orders = [{"order": order} for order in (range, lambda count: reversed(range(count)))]
    assert [total([1, half, half], **order) for order in orders] == [1, 1 + 2 * half]
    assert total([1, half, half]) == 1
    with pytest.raises(Fault, match="depends on the order"):
        total([1e8, -1e8, 1])  # the last one is lost or not
    assert begun.item() == 1


@triton.jit
def histogram_kernel(x, out, n, ATOMIC: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    counted = out + tl.load(x + at, mask=at < n, other=0)
    if ATOMIC:
        tl.atomic_add(counted, 1, mask=at < n)
    else:
        tl.store(counted, tl.load(counted, mask=at < n) + 1, mask=at < n)


def test_a_histogram_is_right_with_atomics_and_races_without():
    x, out = torch.arange(1000, dtype=torch.int32) ** 2 % 10, torch.zeros(10, dtype=torch.int32)
    execute(histogram_kernel, (4,), x, out, 1000, ATOMIC=True, BLOCK=256)
    assert torch.equal(out.long(), torch.bincount(x, minlength=10))
    with pytest.raises(Fault, match="race in global memory"):
        execute(histogram_kernel, (4,), x, out, 1000, ATOMIC=False, BLOCK=256)
