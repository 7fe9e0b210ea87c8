"""Shards on disk, read by another number of ranks; a killed solve goes on where it was saved."""

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.measure import peak_memory
from curvlab.basis import Basis
from curvlab.distributed import (
    DataParallel,
    RankError,
    Sharded,
    Shards,
    join,
    launch,
    shard_width,
)
from curvlab.eigen import Checkpoint, Eigenpairs, Room, lanczos
from curvlab.operators import Dense, FromFunction
from curvlab.storage import StorageError

pytestmark = pytest.mark.distributed

N = 700  # not a multiple of 64: two ranks hold 384 and 316
STORAGE = [torch.float64, torch.float32, torch.bfloat16, torch.int8]
ASKED = {"tol": 1e-6, "room": Room(rows=32)}


def matrix():
    generator = torch.Generator().manual_seed(3)
    q = torch.linalg.qr(torch.randn(N, N, generator=generator, dtype=torch.float64)).Q
    return (q * (5.0 * 0.97 ** torch.arange(N, dtype=torch.float64))) @ q.T


def dying(group, folder):
    """A solve whose rank 1 is killed at product 40."""
    whole, made = matrix(), 0

    def product(vector):
        nonlocal made
        made += 1
        if made == 40 and group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return whole @ vector

    operator = Sharded(FromFunction(product, N, dtype=torch.float64), group)
    lanczos(operator, 6, checkpoint=Checkpoint(Path(folder) / "solve", every=10), **ASKED)


def solve(group, folder):
    whole, made = matrix(), 0

    def product(vector):
        nonlocal made
        made += 1
        return whole @ vector

    operator = Sharded(FromFunction(product, N, dtype=torch.float64), group)
    made = 0  # without those of the probe
    pairs = lanczos(operator, 6, checkpoint=Checkpoint(folder / "solve", every=10), **ASKED)
    found = pairs.gather()
    return {"values": found.values, "vectors": found.vectors, "all": pairs.matvecs, "made": made}


def load_basis(path, group, **options):
    return Basis.load(path, space=Shards.saved(path, group), **options)


def load_pairs(path, group):
    return Eigenpairs.load(path, space=Shards.saved(path, group))


def save_all(group, folder):
    for dtype in STORAGE:
        basis = Basis(Shards(N, group), 9, dtype=dtype)
        shards, generator = basis.space, torch.Generator().manual_seed(1)
        vectors = torch.randn(5, N, generator=generator, dtype=basis.store.working)
        basis.extend(shards.take(vectors), task="first", values=[5.0, 4.0, 3.0, 2.0, 1.0])
        basis.save(folder / f"basis {dtype}")
    pairs = lanczos(Sharded(Dense(matrix()), group), 3)
    pairs.save(folder / "pairs")
    pairs.save(folder / "pairs")  # once more: the newer state counts


def load_all(group, folder):
    found = {}
    for dtype in STORAGE:
        basis = load_basis(folder / f"basis {dtype}", group)
        found[f"basis {dtype}"] = {
            "rows": basis.space.gather(basis.rows()),
            "gram": basis.gram,
            "width": basis.width,
            "capacity": basis.capacity,
            "segments": [(s.task, s.values) for s in basis.segments],
            "drift": basis.orthogonality(recompute=True).drift,
        }
    pairs = load_pairs(folder / "pairs", group)
    found["pairs"] = {
        "values": pairs.values,
        "vectors": pairs.gather().vectors,
        "facts": (pairs.matvecs, pairs.reason, pairs.certificate),
    }
    return found


def whole_file(group, folder):
    basis = load_basis(folder / "whole.safetensors", group, capacity=20)
    pairs = load_pairs(folder / "pairs.safetensors", group)
    return basis.space.gather(basis.rows()), basis.size, basis.capacity, pairs.gather().vectors


def refusals(group, folder):
    said = {}

    def tried(name, call):
        try:
            call()
            said[name] = "nothing"
        except (StorageError, RankError, ValueError) as error:
            said[name] = f"{type(error).__name__}: {error}"

    tried("missing", lambda: load_basis(folder / "nowhere", group))
    tried("kind", lambda: load_pairs(folder / "basis torch.float32", group))
    tried(
        "other n",
        lambda: Shards(N + 1, group).load(folder / "pairs", "sharded eigenpairs"),
    )
    tried("too small", lambda: load_basis(folder / "basis torch.int8", group, capacity=2))
    # damage on the disk that only rank 1 reads: rank 0 must hear of it
    tried("damaged", lambda: load_basis(folder / "damaged", group))
    return said


def replicated(group, folder):
    """A solve with whole vectors on every rank, broken off and resumed: one file for all."""
    whole, made = matrix(), 0

    def product(vector):
        nonlocal made
        made += 1
        if made == 40:
            raise OSError("the disk of this rank is gone") if group.rank else KeyError("nothing")
        return whole @ vector

    operator = DataParallel(FromFunction(product, N, dtype=torch.float64), samples=2 + group.rank)
    asked = {
        **ASKED,
        "checkpoint": Checkpoint(folder / "replicated.safetensors", every=10),
        "dense": False,
    }
    try:
        lanczos(operator, 6, **asked)
    except (OSError, KeyError) as error:
        broken = str(error)
    before, pairs = made, lanczos(operator, 6, **asked)
    return {"broken": broken, "made": made - before, "all": pairs.matvecs, "values": pairs.values}


def peak(group):
    """Bytes by which this process grew at most while it found vectors and kept 160 rows."""
    n, generator = 1 << 19, torch.Generator().manual_seed(group.rank)
    spectrum = torch.cat([10.0 * 0.7 ** torch.arange(64.0), torch.zeros(n - 64)])
    operator = Sharded(FromFunction(lambda vector: spectrum * vector, n), group)

    def find():
        memory = Basis(Shards(n, group), 160)
        pairs = lanczos(operator, 8, tol=1e-2, room=Room(rows=66), certify=False)
        memory.extend(pairs.vectors)
        while memory.size < memory.capacity:
            memory.extend(torch.randn(8, memory.width, generator=generator))

    find()  # libraries take their buffers
    return peak_memory(find, threads=1)


class Largest(TorchDispatchMode):
    """Remembers the most bytes that any tensor had."""

    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.bytes = max(self.bytes, tensor.nbytes)
        return result


def room(group):
    """The most bytes of any tensor while 12 vectors are found, kept and projected off."""
    spectrum = 0.8 ** torch.arange(5000, dtype=torch.float64)
    sharded = Sharded(FromFunction(lambda v: spectrum * v, 5000, dtype=torch.float64), group)
    memory = Basis(Shards(5000, group), 20, dtype=torch.float64)
    with Largest() as largest:
        pairs = lanczos(sharded, 12, tol=1e-2, room=Room(rows=62), certify=False)
        memory.extend(pairs.vectors)
        memory.project_out_(pairs.vectors.clone())
    return largest.bytes


def on_two_ranks(group, ours, theirs):
    """Everything that two ranks do, in one start."""
    found = {"loaded": load_all(group, theirs), "whole": whole_file(group, theirs)}
    save_all(group, ours)
    damaged = ours / "damaged"
    load_basis(ours / "basis torch.float32", group).save(damaged)
    if group.rank == 1:
        file = next(damaged.glob("state-*/shard-00001-*"))
        data = bytearray(file.read_bytes())
        data[-5] ^= 1
        file.write_bytes(bytes(data))
    group.facts(None)  # both have come here
    found["refusals"] = refusals(group, ours)
    found["resumed"] = solve(group, ours)
    found["replicated"] = replicated(group, ours)
    found["largest"] = room(group)
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """What two ranks wrote, what one wrote, what two read, and how the killed solve ended."""
    one, two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    with pytest.raises(RankError) as killed:
        launch(dying, 2, str(two), timeout=60, patience=20)
    shutil.copytree(two / "solve", two / "copy" / "solve")
    with join() as group:
        save_all(group, one)
    whole = Basis(N, 9)
    whole.extend(torch.randn(4, N, generator=torch.Generator().manual_seed(7)))
    whole.save(one / "whole.safetensors")
    pairs = lanczos(matrix(), 3)
    pairs.save(one / "pairs.safetensors")
    found = launch(on_two_ranks, 2, two, one, timeout=100, patience=30)
    return {"one": one, "two": two, "found": found, "killed": str(killed.value), "whole": whole,
            "vectors": pairs.vectors}  # fmt: skip


def same(a, b):
    assert a.keys() == b.keys()
    for name, one in a.items():
        for key, value in one.items():
            other = b[name][key]
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, other), (name, key)
            elif key not in ("width", "drift"):
                assert value == other, (name, key)


def test_what_one_rank_saved_two_ranks_read_bit_for_bit(folders):
    with join() as group:
        here = load_all(group, folders["one"])
    for there in folders["found"]:
        same(there["loaded"], here)
        assert there["loaded"]["basis torch.float32"]["width"] == 384
        assert there["loaded"]["basis torch.float32"]["drift"] < 1e-6


def test_what_two_ranks_saved_one_rank_reads(folders):
    with join() as group:
        ours, theirs = load_all(group, folders["two"]), load_all(group, folders["one"])
    for dtype in STORAGE:
        name = f"basis {dtype}"
        tolerance = {torch.bfloat16: 1e-2, torch.int8: 2e-2}.get(dtype, 1e-6)
        assert torch.allclose(ours[name]["rows"], theirs[name]["rows"], atol=tolerance), name
        assert ours[name]["segments"] == theirs[name]["segments"], name
    assert torch.allclose(ours["pairs"]["values"], theirs["pairs"]["values"], rtol=1e-9)
    assert torch.allclose(ours["pairs"]["vectors"], theirs["pairs"]["vectors"], atol=1e-5)


def test_only_the_newest_two_states_are_kept(folders):
    states = sorted(path.name for path in (folders["two"] / "pairs").glob("state-*"))
    assert states == ["state-1", "state-2"]


def test_a_state_that_was_never_finished_does_not_count(folders):
    rest = folders["two"] / "pairs" / "state-7"
    rest.mkdir()
    (rest / "shard-00000-of-00002.safetensors").write_bytes(b"half of it")
    with join() as group:
        assert len(load_pairs(folders["two"] / "pairs", group)) == 3


def test_files_of_whole_vectors_can_be_read_in_shards(folders):
    rows, size, capacity, vectors = folders["found"][1]["whole"]
    assert torch.equal(rows, folders["whole"].rows())
    assert (size, capacity) == (4, 20)
    assert torch.equal(vectors, folders["vectors"])


def test_a_folder_of_shards_is_not_read_as_whole_vectors_without_saying_so(folders):
    for load in (Eigenpairs.load, Basis.load):
        with pytest.raises(StorageError, match=r"space=curvlab.distributed.Shards.saved"):
            load(folders["two"] / "pairs")


def test_a_killed_rank_ends_the_solve_and_is_named(folders):
    assert "rank 1 ended with exit code -9" in folders["killed"]
    assert "rank 0: rank 1 gave no sign of life" in folders["killed"]


def test_the_killed_solve_resumes_on_as_many_ranks_and_on_another_number(folders):
    straight = lanczos(matrix(), 6, dense=False, **ASKED)
    with join() as group:
        alone = solve(group, folders["two"] / "copy")
    for resumed in (folders["found"][0]["resumed"], alone):
        assert torch.allclose(resumed["values"], straight.values, rtol=1e-10)
        assert torch.allclose(resumed["vectors"], straight.vectors, atol=1e-6)
        # four of the probe, and one in each of two calls that tells whose file it is
        assert abs(resumed["all"] - straight.matvecs) <= 6
        # not from the beginning: the products before the checkpoint were not made again
        assert resumed["made"] <= resumed["all"] - 30


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (4, 8)])
def test_a_solve_killed_on_some_ranks_resumes_on_others(tmp_path, before, after):
    straight = lanczos(matrix(), 6, dense=False, **ASKED)
    with pytest.raises(RankError, match="rank 1 ended with exit code -9"):
        launch(dying, before, str(tmp_path), timeout=90, patience=30)
    for resumed in launch(solve, after, tmp_path, timeout=120, patience=60):
        assert torch.allclose(resumed["values"], straight.values, rtol=1e-10)
        assert torch.allclose(resumed["vectors"], straight.vectors, atol=1e-6)
        assert resumed["made"] <= resumed["all"] - 30


@pytest.mark.slow
def test_what_four_ranks_saved_eight_read_bit_for_bit(tmp_path):
    launch(save_all, 4, tmp_path, timeout=120, patience=60)
    with join() as group:
        here = load_all(group, tmp_path)
    for there in launch(load_all, 8, tmp_path, timeout=120, patience=60):
        same(there, here)
        assert there["basis torch.float32"]["width"] == shard_width(N, 8)


def test_ranks_with_whole_vectors_share_one_checkpoint(folders):
    straight = lanczos(matrix(), 6, dense=False, **ASKED)
    for rank, found in enumerate(folders["found"]):
        resumed = found["replicated"]
        assert ("disk" in resumed["broken"]) == (rank == 1)
        assert torch.allclose(resumed["values"], straight.values, rtol=1e-10)
        assert resumed["made"] <= resumed["all"] - 30
    assert (folders["two"] / "replicated.safetensors").is_file()


def test_no_rank_ever_holds_a_whole_basis(folders):
    for found in folders["found"]:
        # the solver's own rows, 62 at most, and what aligns them to 64 bytes
        assert found["largest"] == 8 * (62 * shard_width(5000, 2) + 8)


@pytest.mark.slow
def test_the_measured_memory_of_a_rank_is_its_share(monkeypatch):
    # What is freed goes back at once: measured is what a rank holds, not what malloc keeps.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    alone = launch(peak, 1, timeout=240)[0]
    assert alone > 160 * 4 * (1 << 19)
    for ranks in (2, 4):
        for held in launch(peak, ranks, timeout=240):
            # and a few whole vectors during a product, which do not shrink
            assert held <= (1.0 / ranks + 0.1) * alone, ranks


def test_what_cannot_be_read_is_refused_on_every_rank(folders):
    expected = {
        "missing": "is not a folder of shards",
        "kind": "holds a sharded basis, not a sharded eigenpairs",
        "other n": "holds vectors of 700 elements, not 701",
        "too small": "holds 5 rows; capacity=2",
        "damaged": "checksum does not match",
    }
    for rank, found in enumerate(folders["found"]):
        for name, text in expected.items():
            assert text in found["refusals"][name], (rank, name)
    assert "rank 1 failed in loading" in folders["found"][0]["refusals"]["damaged"]
