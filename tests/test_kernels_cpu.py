"""The CPU back end: long rows, threads, forks, and the same numbers on every way."""

import multiprocessing
import os
import subprocess
import sys
import threading

import pytest
import torch
from curvlab_kernels import _cpu, ops, reference
from curvlab_kernels._cpu import path, threads

from benchmarks.measure import peak_memory

NARROW = [torch.float16, torch.bfloat16, torch.int8]


@pytest.mark.parametrize(
    ("dtype", "ld"),
    [(torch.int8, 2**29), (torch.bfloat16, 2**29), (torch.float32, 2**29), (torch.float64, 2**29)],
    ids=str,
)
def test_rows_past_two_to_the_31_elements_are_addressed(tmp_path, dtype, ld, generator):
    """A file with holes stands for the rows: 2.7e9 to 5.4e9 elements, of which few exist."""
    m, n = 9, 1003
    file = tmp_path / "rows"
    size = m * ld
    storage = torch.from_file(
        str(file), shared=True, size=size * dtype.itemsize, dtype=torch.uint8
    ).view(dtype)
    rows = storage.view(m, ld)
    assert rows.numel() > 2**31
    working = torch.float64 if dtype == torch.float64 else torch.float32
    orthonormal = torch.linalg.qr(torch.randn(n, m, generator=generator, dtype=working))[0].T
    values, scales = reference.quantise(orthonormal, dtype)
    for i in range(m):
        rows[i, :n] = values[i, :n]
    all_scales = None
    if scales is not None:
        all_scales = torch.zeros(m, ld // 64)
        all_scales[:, : scales.shape[1]] = scales
    vector = torch.randn(n, generator=generator, dtype=working)
    exact = reference.dequantise(values, scales, n).double()
    expected = vector.double() - (exact @ vector.double()) @ exact
    copy = [vector[:300].clone(), vector[300:].clone()]
    ops.project_(rows, vector, None, all_scales)
    assert (vector.double() - expected).norm() <= 1e-6 * expected.norm()
    ops.project_list_(rows, copy, None, all_scales)
    assert (torch.cat(copy).double() - expected).norm() <= 1e-6 * expected.norm()
    # The last row lies wholly beyond 2^31 elements.
    alone = torch.zeros(n, dtype=working)
    weights = torch.zeros(m, dtype=torch.float64)
    weights[-1] = -1.0
    ops.apply_(rows, weights, alone, all_scales)
    assert (alone.double() - exact[-1]).norm() <= 1e-6


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_the_result_depends_on_neither_scheduling_nor_threads(dtype, generator):
    n = 50_001
    rows, scales = reference.quantise(torch.randn(7, n, generator=generator), dtype)
    vector = torch.randn(n, generator=generator)
    found = []
    for count in (1, 2, 3, 2):
        torch.set_num_threads(count)
        found.append(_cpu.coefficients(rows, vector, scales))
    assert torch.equal(found[1], found[3])
    for other in found[1:]:
        # Tiles are the same for any number of threads; only the order of float64 sums differs.
        assert (other - found[0]).abs().max() <= 1e-12 * found[0].abs().max()


def stored(m, n, dtype, generator):
    """Rows that are orthonormal but for their storage, with their Gram factor and scales."""
    rows = torch.linalg.qr(torch.randn(n, m, generator=generator)).Q.T.contiguous()
    rows, scales = reference.quantise(rows, dtype)
    values = reference.dequantise(rows, scales, n).double()
    factor = None if dtype == torch.float32 else torch.linalg.cholesky(values @ values.T)
    return rows, factor, scales


@pytest.mark.parametrize("dtype", [torch.float32, *NARROW], ids=str)
@pytest.mark.parametrize(("m", "n"), [(8, 8193), (20, 18_010), (9, 40_001)])
@pytest.mark.parametrize("inside", [False, True], ids=["", "twice"])
def test_a_team_of_any_size_gives_the_same_bits(m, n, dtype, inside, generator):
    """Below ENOUGH products: sums are added tile by tile, whoever made them."""
    team = pytest.importorskip("curvlab_kernels._cpu.team")
    if not team.openmp()[0]:
        pytest.skip("this torch has no OpenMP")
    rows, factor, scales = stored(m, n, dtype, generator)
    vector = torch.randn(n, generator=generator)
    if inside:
        weights = torch.randn(m, generator=generator)
        vector = weights @ reference.dequantise(rows, scales, n) + 1e-4 * vector
    found = []
    for count in (1, 2, 3, 5):
        torch.set_num_threads(count)
        assert path.choose(rows, vector).threads == count
        left = vector.clone()
        found.append((_cpu.project_(rows, left, factor, scales), left))
    for removed, left in found[1:]:
        assert torch.equal(removed, found[0][0])
        assert torch.equal(left, found[0][1])


@pytest.mark.parametrize("dtype", [torch.float32, *NARROW], ids=str)
@pytest.mark.parametrize("n", [1003, 18_010, 1_000_003])
@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.9, 0.05)])
def test_a_step_in_one_call_has_the_bits_of_its_parts(n, dtype, momentum, decay, generator):
    """So that it makes no difference to a training how its steps are taken."""
    torch.set_num_threads(2)
    rows, factor, scales = stored(9, n, dtype, generator)
    values, slopes, buffer = torch.randn(3, n, generator=generator)
    step = slopes.add(values, alpha=decay)
    _cpu.project_(rows, step, factor, scales)
    moved = buffer.mul(momentum).add_(step) if momentum else step
    expected = values.add(moved, alpha=-0.03)
    momenta = [buffer] if momentum else []
    given = slopes.clone()
    _cpu.sgd_step_(rows, [values], [slopes], momenta, 0.03, decay, momentum, factor, scales)
    assert torch.equal(values, expected)
    assert torch.equal(slopes, given)
    if momentum:
        assert torch.equal(buffer, moved)


@pytest.mark.parametrize(("m", "n"), [(3, 1003), (9, 18_010), (9, 200_003)])
@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.9, 0.05)])
@pytest.mark.parametrize("strided", [False, True])
def test_a_list_has_the_bits_of_its_vector(m, n, momentum, decay, strided, generator):
    """However a model cuts its parameters, the first of them empty; gradients are not changed."""
    rows, _, _ = stored(m, n, torch.float32, generator)
    values, slopes, buffer = (draw.clone() for draw in torch.randn(3, n, generator=generator))
    sizes = [0, n // 2, 7, n // 3]
    sizes += [n - sum(sizes)]

    def cut(vector):
        parts = [part.clone() for part in vector.split(sizes)]
        if strided:
            parts[1] = torch.stack([parts[1], parts[1]], 1)[:, 0]  # every second number in memory
        return parts

    lists, buffers = (cut(values), cut(slopes)), [cut(buffer)] if momentum else []
    hyper = 0.03, decay, momentum
    _cpu.sgd_step_(rows, lists[0], lists[1], buffers[0] if momentum else [], *hyper)
    assert torch.equal(torch.cat(lists[1]), slopes)
    removed = _cpu.project_list_(rows, lists[1])
    _cpu.sgd_step_(rows, [values], [slopes], [buffer] if momentum else [], *hyper)
    assert torch.equal(torch.cat(lists[0]), values)
    if momentum:
        assert torch.equal(torch.cat(buffers[0]), buffer)
    assert torch.equal(removed, _cpu.project_(rows, slopes))
    assert torch.equal(torch.cat(lists[1]), slopes)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("count", [1, 2])
def test_a_list_of_many_small_tensors_has_the_bits_of_its_vector(dtype, count, generator):
    """Empty ones among them; tiles, and the columns of a thread, end anywhere inside a tensor."""
    torch.set_num_threads(count)
    n = 70_001
    rows, factor, scales = stored(9, n, dtype, generator)
    vector = torch.randn(n, generator=generator)
    sizes = [30_000, 0, 1, 8192, 63, 0, 5, 20_000, 8190, 0]
    parts = [part.clone() for part in vector.split([*sizes, n - sum(sizes)])]
    removed = _cpu.project_list_(rows, parts, factor, scales)
    assert torch.equal(removed, _cpu.project_(rows, vector, factor, scales))
    assert torch.equal(torch.cat(parts), vector)


def test_a_list_is_projected_where_it_lies(generator):
    pytest.importorskip("numba")
    parts = list(torch.randn(8, 500_000, generator=generator))
    rows = torch.zeros(1, 4_000_000)
    rows[0, :2] = torch.tensor([0.6, 0.8])
    _cpu.project_list_(rows, parts)  # what is compiled, or imported, is there
    extra = peak_memory(lambda: _cpu.project_list_(rows, parts), threads=1)
    assert extra < 0.5 * parts[0].nbytes * len(parts)  # one vector of them would be twice that


def _project_in_child(queue, rows, vector):
    queue.put(_cpu.project_(rows, vector).tolist())


def test_a_forked_child_projects_without_the_team_of_its_parent(generator):
    rows, _, _ = stored(8, 40_000, torch.float32, generator)
    vector = torch.randn(40_000, generator=generator)
    torch.set_num_threads(2)
    expected = _cpu.project_(rows, vector.clone()).tolist()  # the parent's team exists now
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_project_in_child, args=(queue, rows, vector), daemon=True)
    child.start()
    assert queue.get(timeout=60) == expected
    child.join(timeout=60)
    assert child.exitcode == 0


def test_spans_cover_the_columns_and_end_with_tiles():
    for count in (1, 2, 3, 8):
        for columns in (1, 8191, 8192, 8193, 65_536, 1_000_003):
            parts = threads.spans(columns, 100, count)
            assert [start for start, _ in parts] == [0, *(stop for _, stop in parts[:-1])]
            assert parts[-1][1] == columns
            assert len(parts) <= count
            assert all(stop % 8192 == 0 for _, stop in parts[:-1])


def test_two_python_threads_may_project_at_once(generator):
    n = 60_000
    rows, _ = reference.quantise(torch.randn(8, n, generator=generator) / n**0.5, torch.float16)
    vectors = [torch.randn(n, generator=generator) for _ in range(4)]
    expected = [vector.clone() for vector in vectors]
    for vector in expected:
        _cpu.project_(rows, vector)

    workers = [threading.Thread(target=_cpu.project_, args=(rows, v)) for v in vectors]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for vector, same in zip(vectors, expected, strict=True):
        assert torch.equal(vector, same)


def _run_in_child(queue):
    done = [None, None]

    def work(index, start, stop):
        done[index] = (start, stop)

    threads.run(work, [(0, 5), (5, 9)])
    queue.put(done)


def test_a_forked_child_gets_its_own_threads():
    threads.run(lambda *_: None, [(0, 1), (1, 2)])  # the parent's thread exists now
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_run_in_child, args=(queue,), daemon=True)
    child.start()
    assert queue.get(timeout=30) == [(0, 5), (5, 9)]
    child.join(timeout=30)
    assert child.exitcode == 0


def test_an_error_in_a_worker_reaches_the_caller():
    torch.set_num_threads(2)

    def work(index, _start, _stop):
        if index == 0:
            raise ArithmeticError("in the other thread")

    with pytest.raises(ArithmeticError, match="other thread"):
        threads.run(work, [(0, 1), (1, 2)])


def test_nan_and_infinity_show(generator):
    for dtype in (torch.float32, *NARROW):
        rows, scales = reference.quantise(torch.randn(5, 300, generator=generator), dtype)
        for bad in (float("nan"), float("inf")):
            vector = torch.randn(300, generator=generator)
            vector[7] = bad
            _cpu.project_(rows, vector, None, scales)
            assert not vector.isfinite().any()


STEPS = """
import hashlib, sys, torch
from curvlab_kernels import ops
torch.set_num_threads(int(sys.argv[1]))
generator = torch.Generator().manual_seed(0)
found = hashlib.sha256()
for m, n in ((3, 3000), (11, 800_003)):
    rows = torch.zeros(m, ops.padded(n))
    rows[:, :n] = torch.randn(m, n, generator=generator)
    ops.orthonormalise_block_(rows[:0], rows)
    for beta in (0.3, None):
        vector = torch.randn(n, generator=generator)
        results = ops.lanczos_step_(rows, vector, beta)
        results += (*ops.orthonormalise_(rows, 2 * vector + 1), ops.project_(rows, vector), vector)
        for tensor in results:
            found.update(tensor.numpy().tobytes())
print(found.hexdigest())
"""


@pytest.mark.parametrize("count", [1, 2])
def test_the_process_that_compiles_and_later_ones_get_the_same_bits(count, tmp_path):
    """What is promised: for one number of threads, whether numba's cache is empty or full."""
    pytest.importorskip("numba")
    cached = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", STEPS, str(count)]

    def digest():
        return subprocess.run(
            command, env=cached, capture_output=True, text=True, check=True
        ).stdout

    cold, warm = digest(), digest()
    assert list(tmp_path.rglob("*.nbc")), "nothing was cached, so nothing was compared"
    assert cold == warm
