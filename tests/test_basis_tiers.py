"""Where rows live changes nothing about them; a basis may be larger than the memory."""

import ctypes
import math
import mmap
import os
import subprocess
import sys

import pytest
import torch

from benchmarks.measure import peak_memory
from curvlab.basis import Basis, DeviceMemory, MappedFile, PinnedHost
from curvlab.rows import store, tiers
from curvlab.rows.locked import locked
from curvlab.rows.sizes import row_bytes
from curvlab.storage import StorageError


@pytest.fixture(params=["device", "host", "file"])
def tier(request, tmp_path):
    return {"device": DeviceMemory(), "host": PinnedHost(), "file": MappedFile(tmp_path / "m")}[
        request.param
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8], ids=str)
@pytest.mark.parametrize("slab_bytes", [store.SLAB_BYTES, 1])
def test_every_tier_gives_the_same_numbers(tier, dtype, slab_bytes, generator, monkeypatch):
    n = 1500
    vectors = torch.randn(10, n, generator=generator)
    gradient = torch.randn(n, generator=generator) + vectors.sum(0)
    plain = Basis(n, 12, dtype=dtype)
    for start in range(0, 10, 5):
        plain.extend(vectors[start : start + 5])
    expected = gradient.clone()
    plain.project_out_(expected)
    # Two rows at a time where rows are not resident: pieces really occur.
    monkeypatch.setattr(tiers, "PIECE_BYTES", 2 * n * dtype.itemsize + 100)
    monkeypatch.setattr(store, "SLAB_BYTES", slab_bytes)
    basis = Basis(n, 12, dtype=dtype, tier=tier)
    for start in range(0, 10, 5):
        basis.extend(vectors[start : start + 5])
    pieces = list(basis.store.pieces())
    assert sum(rows.shape[0] for _, rows, _ in pieces) == 10
    if not tier.resident:
        assert max(rows.shape[0] for _, rows, _ in pieces) == 2
    changed = gradient.clone()
    basis.project_out_(changed)
    size = float(expected.norm())
    assert float((changed - expected).norm()) <= 1e-5 * size
    assert float(basis.leak(changed)) <= 1e-5
    parts = [gradient[:700].clone(), gradient[700:].clone()]
    basis.project_out_(parts)
    assert float((torch.cat(parts) - changed).norm()) <= 1e-5 * size
    assert basis.orthogonality(recompute=True).passed
    if dtype == torch.float32:
        exact = basis.rows().double()
        assert float((exact @ exact.T - torch.eye(10)).abs().max()) <= 5e-7


@pytest.mark.parametrize("kind", ["twice", "expanded"])
def test_a_list_that_holds_one_number_twice_is_refused_wherever_the_rows_are(tier, kind, generator):
    basis = Basis(100, 4, tier=tier)
    basis.extend(torch.randn(4, 100, generator=generator))
    first, other = torch.randn(2, 50, generator=generator)
    tensors = [first, first] if kind == "twice" else [first, other[:1].expand(50)]
    kept, slopes = [first.clone(), other.clone()], [torch.ones(50), torch.ones(50)]
    with pytest.raises(ValueError, match=r"share memory|one number twice"):
        basis.project_out_(tensors)
    for parameters, momenta in ((tensors, slopes), ([torch.ones(50), torch.ones(50)], tensors)):
        with pytest.raises(ValueError, match=r"share memory|one number twice"):
            basis.sgd_step_(parameters, [torch.ones(1).expand(50)] * 2, momenta, 0.1, 0.0, 0.9)
    assert torch.equal(first, kept[0])
    assert torch.equal(other, kept[1])
    basis.sgd_step_([first, other], [torch.ones(1).expand(50)] * 2, slopes, 0.1, 0.0, 0.9)


# What is wrong with (gradients, momenta, lr, momentum) of parameters (2, 3) and (4,).
WRONG_STEPS = {
    "gradients must agree": (((4,), (2, 3)), ((2, 3), (4,)), 0.1, 0.9),
    "gradients must agree.*": (((3, 2), (4,)), (), 0.1, 0.0),
    "momenta must agree": (((2, 3), (4,)), ((4,), (2, 3)), 0.1, 0.9),
    "lr must be finite": (((2, 3), (4,)), (), math.nan, 0.0),
    "momentum must be one real number": (((2, 3), (4,)), ((2, 3), (4,)), 0.1, "0.9"),
    r"gradients\[1\] is None": (((2, 3), None), (), 0.1, 0.0),
}


@pytest.mark.parametrize("words", WRONG_STEPS)
def test_a_step_that_is_wrong_is_refused_wherever_the_rows_are(tier, words, generator):
    """Gradients in another order have as many elements together."""
    basis = Basis(10, 3, tier=tier)
    basis.extend(torch.randn(3, 10, generator=generator))
    slopes, momenta, lr, momentum = WRONG_STEPS[words]
    slopes, momenta = (
        [None if shape is None else torch.ones(shape) for shape in shapes]
        for shapes in (slopes, momenta)
    )
    parameters = [torch.ones(2, 3), torch.ones(4)]
    with pytest.raises((TypeError, ValueError), match=words):
        basis.sgd_step_(parameters, slopes, momenta, lr, 0.0, momentum)
    assert all(bool((each == 1).all()) for each in [*parameters, *momenta])


def test_orthonormal_pieces_are_fetched_once_per_projection(tmp_path, generator, monkeypatch):
    fetched = []
    original = tiers.pieces

    def counting(*arguments):
        for piece in original(*arguments):
            fetched.append(piece[0])
            yield piece

    monkeypatch.setattr("curvlab.rows.store.pieces", counting)
    monkeypatch.setattr(tiers, "PIECE_BYTES", 1000 * 4)
    basis = Basis(1000, 4, tier=MappedFile(tmp_path))
    basis.extend(torch.randn(4, 1000, generator=generator))
    fetched.clear()
    basis.project_out_(torch.randn(1000, generator=generator))
    assert fetched == [0, 1, 2, 3]


def test_memory_is_allocated_when_it_is_needed(generator, monkeypatch):
    monkeypatch.setattr(store, "SLAB_BYTES", 3 * 64 * 4)  # rows of 50 are padded to 64
    allocated = []

    class Counting(DeviceMemory):
        def allocate(self, count, *rest):
            allocated.append(count)
            return super().allocate(count, *rest)

    basis = Basis(50, 8, tier=Counting())
    assert allocated == []
    basis.extend(torch.randn(2, 50, generator=generator))
    assert allocated == [3]
    basis.extend(torch.randn(5, 50, generator=generator))
    assert allocated == [3, 4]
    basis.extend(torch.randn(1, 50, generator=generator))
    assert allocated == [3, 4, 1]  # no more than the capacity


def test_scratch_files_are_gone_with_the_basis(tmp_path, generator):
    basis = Basis(1000, 4, tier=MappedFile(tmp_path))
    basis.extend(torch.randn(4, 1000, generator=generator))
    assert list(tmp_path.iterdir()) == []  # mapped, but without a name
    assert basis.orthogonality(recompute=True).passed


def test_a_full_disk_is_reported_before_anything_is_written(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    basis = Basis(1000, 4, tier=MappedFile(tmp_path))
    with pytest.raises(StorageError, match="no room for"):
        basis.extend(torch.eye(4, 1000))
    assert basis.size == 0
    assert list(tmp_path.iterdir()) == []


def test_rows_on_a_cpu_are_one_piece_of_memory_that_is_taken_as_they_are_written():
    basis = Basis(1_000_000, 100)
    extra = peak_memory(lambda: basis.store.make_room(1), threads=1)
    assert basis.store.allocated == 100
    assert extra < 100_000_000  # 400 MB are reserved
    basis.append(torch.ones(1_000_000))
    basis.admit(99)
    assert basis.whole is not None


LARGER_THAN_MEMORY = """
import resource, sys
import torch
from curvlab.basis import Basis, MappedFile

torch.set_num_threads(1)
folder, n, rows = sys.argv[1], 250_000, 240  # 240 MB in float32
generator = torch.Generator().manual_seed(0)
# Imports, compiled loops and their threads are there before the limit is set.
warm = Basis(n, 16, tier=MappedFile(folder))
warm.extend(torch.randn(8, n, generator=generator))
warm.extend(torch.randn(8, n, generator=generator))
warm.project_out_(torch.randn(n, generator=generator))
del warm


def data_bytes():
    for line in open("/proc/self/status"):
        if line.startswith("VmData"):
            return int(line.split()[1]) * 1024


# Anonymous memory only: a mapped file does not count, and neither would its pages be kept.
limit = data_bytes() + 180_000_000
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
try:
    Basis(n, rows).reserve(rows)
except MemoryError:
    print("too large for the memory")
few = Basis(n, rows)  # room for all of them cannot be reserved, and is not needed yet
assert few.extend(torch.randn(8, n, generator=generator)).all()
del few
basis = Basis(n, rows, tier=MappedFile(folder))
for _ in range(rows // 8):
    assert basis.extend(torch.randn(8, n, generator=generator)).all()
gradient = torch.randn(n, generator=generator)
basis.project_out_(gradient)
assert float(basis.leak(gradient)) <= 1e-6, float(basis.leak(gradient))
basis.save(folder + "/saved")
again = Basis.load(folder + "/saved", tier=MappedFile(folder))
assert again.size == rows and float(again.leak(gradient)) <= 1e-6
print("worked through the file")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_basis_larger_than_the_memory_works_through_a_file(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", LARGER_THAN_MEMORY, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["too large for the memory", "worked through the file"]


class Driver:
    """Stands for CUDA's runtime: what is locked, and what became of it."""

    def __init__(self, refuses=0):
        self.refuses, self.locked, self.log = refuses, {}, []

    def cudaHostRegister(self, pointer, size, flags):
        assert flags == 0
        assert not any(p < pointer + size and pointer < p + s for p, s in self.locked.items())
        if not self.refuses:
            self.locked[pointer] = size
        return self.refuses

    def cudaHostUnregister(self, pointer):
        self.log.append("unlocked")
        # still mapped and ours: its bytes can be read
        assert ctypes.string_at(pointer, 1) == b"\7"
        del self.locked[pointer]


def test_locked_memory_takes_its_bytes_in_whole_pages_and_outlives_its_views():
    driver = Driver()
    size = 5 * mmap.PAGESIZE + 3
    data = locked(size, driver, lambda: driver.log.append("waited"))
    other = locked(100, driver, lambda: None)
    assert sorted(driver.locked.values()) == [mmap.PAGESIZE, 6 * mmap.PAGESIZE]
    assert data.shape == (size,)
    assert not data.any()
    data[0] = other[0] = 7
    view = data[4 : size - 3].view(torch.float32)
    del data
    assert driver.log == []
    del view
    assert driver.log == ["waited", "unlocked"]  # a copy may be under way when rows are dropped
    del other
    assert driver.locked == {}


def test_memory_that_cannot_be_locked_is_refused_with_a_cure():
    with pytest.raises(MemoryError, match=r"CUDA error 2.*ulimit -l"):
        locked(100, Driver(refuses=2), lambda: None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_a_slab_of_bytes_holds_rows_and_scales_that_do_not_overlap(dtype):
    data = torch.zeros(3 * row_bytes(80, dtype), dtype=torch.uint8)
    slab = tiers._slab(data, 3, 80, dtype)
    slab.rows.view(torch.uint8).fill_(1)
    if slab.scales is not None:
        assert slab.scales.shape == (3, 2)
        slab.scales.view(torch.uint8).fill_(2)
        assert int(data.sum()) == 3 * 80 + 2 * 3 * 2 * 4
    assert bool((data > 0).all())
