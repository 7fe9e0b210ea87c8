"""Triton kernels as users write them, executed from their PTX: what passes, and what is refused."""

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from curvlab_kernels.audit.agreement import random  # noqa: E402
from curvlab_kernels.audit.ptx import Fault, UnknownInstruction, execute  # noqa: E402

from tests.ptx_snippets import ARCHITECTURES  # noqa: E402

pytestmark = pytest.mark.aot


@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    tl.store(out + at, tl.load(x + at, mask=mask) + tl.load(y + at, mask=mask), mask=mask)


@triton.jit
def careless_kernel(x, out, n, BLOCK: tl.constexpr):
    """Forgets that the last block is not full."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n))


@triton.jit
def racing_kernel(x, n, BLOCK: tl.constexpr):
    """Every block adds to the same number without atomics."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.sum(tl.load(x + 1 + at, mask=at < n, other=0.0), axis=0)
    tl.store(x, tl.load(x) + total)


@triton.jit
def softmax_kernel(x, out, columns, BLOCK: tl.constexpr):
    """Two axes of programs, an exponential and two reductions."""
    row = tl.program_id(0) + tl.program_id(1) * tl.num_programs(0)
    at = tl.arange(0, BLOCK)
    values = tl.load(x + row * columns + at, mask=at < columns, other=-float("inf"))
    powers = tl.exp(values - tl.max(values, axis=0))
    tl.store(out + row * columns + at, powers / tl.sum(powers, axis=0), mask=at < columns)


@triton.jit
def matrix_kernel(a, b, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    where = at[:, None] * BLOCK + at[None, :]
    tl.store(out + where, tl.dot(tl.load(a + where), tl.load(b + where)))


@triton.jit
def written_twice_kernel(out):
    """The first block's last value is the second's first: neighbours are equal, results not."""
    tl.store(out, 1 + tl.program_id(0))
    tl.debug_barrier()
    tl.store(out, 2 + tl.program_id(0))


@triton.jit
def logarithm_kernel(x, out, n, BLOCK: tl.constexpr):
    """Triton's float32 logarithm and error function flush small numbers."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + at, mask=at < n, other=1.0)
    tl.store(out + at, tl.log(values), mask=at < n)
    tl.store(out + n + at, tl.erf(values), mask=at < n)


@triton.jit
def shifted_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at - 1, tl.load(x + at, mask=at < n), mask=at < n)


@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_anyones_kernel_can_be_executed(architecture):
    x, y = torch.randn(1000), torch.randn(1000)
    out = torch.empty(1000)
    report = execute(add_kernel, (4,), x, y, out, 1000, BLOCK=256, architecture=architecture)
    assert torch.equal(out, x + y)
    assert report.bytes["global read"] == 8000
    assert report.bytes["global written"] == 4000


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_softmax_over_two_axes_of_programs_is_right(architecture):
    x = torch.randn(6, 100)
    out = torch.empty(6, 100)
    options = {"num_warps": 2, "architecture": architecture}
    execute(softmax_kernel, (3, 2), x, out, 100, BLOCK=128, **options)
    assert torch.allclose(out, torch.softmax(x, 1), rtol=1e-6, atol=0)


def test_a_store_past_the_end_is_a_fault_that_names_the_line():
    with pytest.raises(Fault, match=r"out of bounds.*test_ptx_users\.py"):
        execute(careless_kernel, (4,), torch.randn(1000), torch.empty(1000), 1000, BLOCK=256)


def test_blocks_that_add_without_atomics_race():
    with pytest.raises(Fault, match="race in global memory"):
        execute(racing_kernel, (4,), torch.zeros(1001), 1000, BLOCK=256)


def test_blocks_that_meet_in_one_value_still_race():
    with pytest.raises(Fault, match="two threads write one address"):
        execute(written_twice_kernel, (2,), torch.zeros(1, dtype=torch.int32))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logarithm_and_error_function_of_float32_are_right(architecture):
    x = torch.rand(1000) * 10
    out = torch.empty(2, 1000)
    execute(logarithm_kernel, (4,), x, out, 1000, BLOCK=256, architecture=architecture)
    exact = torch.stack([x.double().log(), torch.erf(x.double())])
    assert torch.allclose(out.double(), exact, rtol=1e-6, atol=1e-6)


def test_a_grid_may_be_a_function_of_the_arguments():
    x, out = torch.randn(1000), torch.empty(1000)
    grid = lambda named: (triton.cdiv(named["n"], named["BLOCK"]),)  # noqa: E731 as users write it
    report = execute(add_kernel, grid, x, x, out, 1000, BLOCK=256)
    assert report.programs == 4
    assert torch.equal(out, 2 * x)


@pytest.mark.parametrize("grid", [(), (-1,), (1, 1, 1, 1)])
def test_a_grid_that_is_none_is_refused(grid):
    x = torch.randn(1000)
    with pytest.raises(ValueError, match="one to three numbers of programs"):
        execute(add_kernel, grid, x, x, x, 1000, BLOCK=256)


def test_tensors_without_memory_are_refused():
    x = torch.empty(1000, device="meta")
    with pytest.raises(ValueError, match="host memory"):
        execute(add_kernel, (4,), x, x, x, 1000, BLOCK=256)


def test_a_kernel_under_autotune_is_refused_with_a_cure_that_works():
    configs = [triton.Config({"BLOCK": 128}), triton.Config({"BLOCK": 256})]
    tuned = triton.autotune(configs, key=["n"])(add_kernel)
    x, out = torch.randn(1000), torch.empty(1000)
    with pytest.raises(TypeError, match=r"pass kernel\.fn, and one choice"):
        execute(tuned, (4,), x, x, out, 1000)
    execute(tuned.fn, (4,), x, x, out, 1000, BLOCK=256)
    assert torch.equal(out, 2 * x)


def test_a_store_before_the_start_names_the_nearest_tensor():
    with pytest.raises(Fault, match="4 bytes before the start of a tensor"):
        execute(shifted_kernel, (4,), torch.randn(1000), torch.empty(1000), 1000, BLOCK=256)


@triton.jit
def halves_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    values = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(out, tl.sum(values, axis=0))


@pytest.mark.parametrize(("dtype", "kind"), [(torch.float16, "f16"), (torch.bfloat16, "bf16")])
def test_sums_of_halves_as_users_write_them(dtype, kind):
    x, out = random(200, dtype=dtype), torch.empty(1)
    report = execute(halves_kernel, (1,), x, out, 200, BLOCK=256, architecture=100)
    assert report.issued[f"add.rn.f32.{kind}"]
    assert abs(float(out) - float(x.double().sum())) < 1e-4


@triton.jit
def seventh_kernel(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at) // 7)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_quotients_of_long_integers_as_users_write_them(architecture):
    whole = torch.arange(-64, 64) * (2**62 // 63)
    divided = torch.empty_like(whole)
    execute(seventh_kernel, (1,), whole, divided, BLOCK=128, architecture=architecture)
    assert torch.equal(divided, torch.div(whole, 7, rounding_mode="trunc"))


@triton.jit
def layer_norm_kernel(x, out, columns, BLOCK: tl.constexpr):
    """Squares are fused with their sums in one of two lanes that exchange them."""
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    values = tl.load(x + row * columns + at, mask=at < columns, other=0.0)
    rest = tl.where(at < columns, values - tl.sum(values, axis=0) / columns, 0.0)
    deviation = tl.sqrt(tl.sum(rest * rest, axis=0) / columns)
    tl.store(out + row * columns + at, rest / deviation, mask=at < columns)


@triton.jit
def waves_kernel(x, out, n, BLOCK: tl.constexpr):
    """Large arguments are reduced in memory of the thread, with a table and carries."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + at, mask=at < n, other=0.0, volatile=True)
    tl.store(out + at, tl.sin(values), mask=at < n)
    tl.store(out + n + at, tl.cos(values), mask=at < n)


@triton.jit
def counts_kernel(x, out, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """Atomics in shared memory, then in global memory."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(out + tl.arange(0, BINS), tl.histogram(tl.load(x + at), BINS))


@triton.jit
def loss_kernel(x, targets, out, columns, BLOCK: tl.constexpr):
    """Cross-entropy with a running maximum."""
    row, largest, total = tl.program_id(0), -float("inf"), 0.0
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        values = tl.load(x + row * columns + at, mask=at < columns, other=-float("inf"))
        larger = tl.maximum(largest, tl.max(values, axis=0))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(values - larger), axis=0)
        largest = larger
    right = tl.load(x + row * columns + tl.load(targets + row))
    tl.store(out + row, largest + tl.log(total) - right)


@triton.jit
def sorted_and_summed_kernel(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    values = tl.load(x + at)
    tl.store(out + at, tl.sort(values))
    tl.store(out + BLOCK + at, tl.cumsum(values, axis=0))


@triton.jit
def persistent_kernel(x, out, n, BLOCK: tl.constexpr):
    for tile in range(tl.program_id(0), tl.cdiv(n, BLOCK), tl.num_programs(0)):
        at = tile * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(x + at, mask=at < n)
        tl.store(out + at, values * tl.sigmoid(values), mask=at < n)


@triton.jit
def waiting_kernel(flag):
    while tl.load(flag, volatile=True) == 0:
        pass


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_as_users_write_them_are_right(architecture):
    def near(actual, exact):
        assert torch.allclose(actual.double(), exact, rtol=1e-5, atol=1e-6)

    options = {"architecture": architecture}
    x, out = random(5, 100, dtype=torch.float32), torch.empty(5, 100)
    execute(layer_norm_kernel, (5,), x, out, 100, BLOCK=128, **options)
    near(out, torch.nn.functional.layer_norm(x.double(), (100,), eps=0.0))
    targets, losses = torch.tensor([3, 99, 0, 50, 7]), torch.empty(5)
    execute(loss_kernel, (5,), x, targets, losses, 100, BLOCK=64, **options)
    near(losses, torch.nn.functional.cross_entropy(x.double(), targets, reduction="none"))

    x = random(300, dtype=torch.float32) * 10.0 ** torch.arange(300).remainder(7)
    out = torch.empty(2, 300)
    execute(waves_kernel, (3,), x, out, 300, BLOCK=128, **options)
    near(out, torch.stack([x.double().sin(), x.double().cos()]))
    execute(persistent_kernel, (2,), x, out, 300, BLOCK=64, **options)
    near(out[0], torch.nn.functional.silu(x.double()))

    x, out = random(128, dtype=torch.float32), torch.empty(2, 128)
    execute(sorted_and_summed_kernel, (1,), x, out, BLOCK=128, **options)
    near(out, torch.stack([x.sort().values, x.double().cumsum(0)]).double())
    x, counts = torch.arange(512, dtype=torch.int32) ** 2 % 16, torch.zeros(16, dtype=torch.int32)
    execute(counts_kernel, (2,), x, counts, BINS=16, BLOCK=256, **options)
    assert torch.equal(counts.long(), torch.bincount(x, minlength=16))


@triton.jit
def product_kernel(a, b, out, M, N, K, TYPE: tl.constexpr, BLOCK: tl.constexpr):
    """Loads of the next tiles are under way while these are multiplied."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((BLOCK, BLOCK), TYPE)
    for start in range(0, K, BLOCK):
        row, column = start + tl.arange(0, BLOCK)[:, None], start + tl.arange(0, BLOCK)[None, :]
        left = tl.load(a + i * K + column, mask=(i < M) & (column < K), other=0.0)
        right = tl.load(b + row * N + j, mask=(row < K) & (j < N), other=0.0)
        total = tl.dot(left, right, total)
    tl.store(out + i * N + j, total, mask=(i < M) & (j < N))


def test_products_of_bytes_are_exact():
    a, b = (torch.randint(-128, 128, shape, dtype=torch.int8) for shape in ((40, 100), (100, 50)))
    out = torch.empty(40, 50, dtype=torch.int32)
    execute(product_kernel, (2, 2), a, b, out, 40, 50, 100, TYPE=tl.int32, BLOCK=32)
    assert torch.equal(out.long(), a.long() @ b.long())


def test_a_kernel_that_waits_for_ever_is_a_fault_that_names_the_line():
    with pytest.raises(Fault, match=r"waiting_kernel does not end.*test_ptx_users\.py.*limit="):
        execute(waiting_kernel, (2,), torch.zeros(1, dtype=torch.int32), limit=2000)


def test_instructions_of_newer_tensor_cores_are_refused_by_name():
    a = torch.randn(64, 64, dtype=torch.float16)
    with pytest.raises(UnknownInstruction, match=r"fence\.proxy|wgmma"):
        execute(matrix_kernel, (1,), a, a, torch.empty(64, 64), BLOCK=64, architecture=90)


# What each type keeps of a product: float32 goes through tf32, cut to ten bits and one before them.
PRODUCTS = {torch.float16: 1e-6, torch.bfloat16: 1e-6, torch.float8_e5m2: 1e-6, torch.float32: 3e-3}


@pytest.mark.parametrize("dtype", PRODUCTS, ids=str)
@pytest.mark.parametrize("stages", [1, 3])
def test_a_product_of_matrices_is_right_on_the_oldest_tensor_cores(dtype, stages):
    a, b = (random(*shape, dtype=dtype) for shape in ((40, 100), (100, 50)))
    out = torch.empty(40, 50)
    sizes = {"TYPE": tl.float32, "BLOCK": 32, "num_stages": stages}
    execute(product_kernel, (2, 2), a, b, out, 40, 50, 100, **sizes)
    exact = a.double() @ b.double()
    size = a.double().norm(dim=1)[:, None] * b.double().norm(dim=0)
    assert ((out.double() - exact).abs() / size).max() <= PRODUCTS[dtype]


@triton.jit
def kept_kernel(x, out, n, BLOCK: tl.constexpr):
    """With hints on what caches should keep, as torch.compile writes them."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + at, mask=at < n, eviction_policy="evict_last")
    tl.store(out + at, 2 * values, mask=at < n, eviction_policy="evict_first")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_hints_on_caches_change_nothing(architecture):
    x, out = torch.randn(300), torch.empty(300)
    execute(kept_kernel, (3,), x, out, 300, BLOCK=128, architecture=architecture)
    assert torch.equal(out, 2 * x)


@triton.jit
def several_kernel(xs, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(xs[0] + at) + xs[1] * tl.load(xs[2][0] + at) * xs[2][1])


@pytest.mark.parametrize("factor", [1, 3])  # one is a constant to the compiler
def test_tuples_of_arguments_are_passed_one_by_one(factor):
    x, y, out = torch.randn(16), torch.randn(16), torch.empty(16)
    execute(several_kernel, (1,), (x, factor, (y, 2.0)), out, BLOCK=16)
    assert torch.allclose(out, x + 2.0 * factor * y)


def test_something_else_than_a_kernel_is_refused():
    with pytest.raises(TypeError, match=r"a kernel under triton\.jit"):
        execute(len, (1,))
