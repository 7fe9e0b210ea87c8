"""Saved bases: whole or absent, verified, and nothing in them is executed."""

import json
import pickle
import struct

import pytest
import torch
from safetensors.torch import save_file

from curvlab.basis import Basis, MappedFile, Segment
from curvlab.storage import StorageError, load_tensors, save_tensors

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def filled(dtype, generator, n=333, size=5):
    basis = Basis(n, 9, dtype=dtype)
    working = torch.float64 if dtype == torch.float64 else torch.float32
    vectors = torch.randn(size, n, generator=generator, dtype=working)
    basis.extend(vectors[:2], task="a", step=3, values=[2.0, 1.5])
    basis.extend(vectors[2:], task="b")
    return basis


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_saved_basis_comes_back_bit_for_bit(dtype, tmp_path, generator):
    basis = filled(dtype, generator)
    path = basis.save(tmp_path / "folder" / "basis.safetensors")
    again = Basis.load(path)
    assert (again.n, again.size, again.capacity, again.dtype) == (333, 5, 9, dtype)
    assert torch.equal(again.rows(), basis.rows())
    assert torch.equal(again.gram, basis.gram)
    assert again.segments == basis.segments
    assert again.segments[0] == Segment("a", 0, 2, 3, (2.0, 1.5))
    vector = torch.randn(333, generator=generator, dtype=torch.float64)
    if dtype != torch.float64:
        vector = vector.float()
    copy = vector.clone()
    basis.project_out_(vector)
    again.project_out_(copy)
    assert (vector - copy).norm() <= 1e-6 * vector.norm()
    assert again.extend(torch.randn(2, 333, generator=generator).to(vector.dtype)).all()
    assert Basis.load(path, capacity=5).capacity == 5
    assert Basis.load(path, tier=MappedFile(tmp_path)).orthogonality(recompute=True).passed


def test_an_empty_basis_can_be_saved(tmp_path):
    for dtype in (torch.float32, torch.int8):  # of vectors longer than the file
        path = Basis(100_000, 3, dtype=dtype).save(tmp_path / "empty")
        again = Basis.load(path)
        assert (again.n, again.size, again.capacity) == (100_000, 0, 3)
        assert again.extend(torch.ones(1, 100_000)).all()


def test_the_file_is_one_that_other_tools_read(tmp_path, generator):
    basis = filled(torch.float32, generator)
    basis.save(tmp_path / "basis.safetensors")
    tensors, manifest = load_tensors(tmp_path / "basis.safetensors", "basis")
    assert torch.equal(tensors["rows"][:, :333], basis.rows())
    assert manifest["n"] == 333
    assert manifest["segments"][0]["task"] == "a"


def test_a_flipped_bit_is_noticed(tmp_path, generator):
    path = filled(torch.float16, generator).save(tmp_path / "basis")
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    with pytest.raises(StorageError, match="checksum"):
        Basis.load(path)


def test_a_cut_file_is_noticed(tmp_path, generator):
    path = filled(torch.float32, generator).save(tmp_path / "basis")
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(StorageError, match="damaged"):
        Basis.load(path)


def test_a_failed_write_leaves_the_old_file(tmp_path, generator, monkeypatch):
    basis = filled(torch.float32, generator)
    path = basis.save(tmp_path / "basis")
    before = path.read_bytes()
    basis.extend(torch.randn(1, 333, generator=generator))
    calls = []
    original = type(basis.store).stored

    def failing(self):
        calls.append(1)
        for piece in original(self):
            if len(calls) > 1:  # the first reading is for the checksum
                raise OSError(28, "No space left on device")
            yield piece

    monkeypatch.setattr(type(basis.store), "stored", failing)
    with pytest.raises(StorageError, match="unchanged"):
        basis.save(path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["basis"]


def test_missing_and_foreign_files_are_named(tmp_path):
    with pytest.raises(StorageError, match="does not exist"):
        Basis.load(tmp_path / "nothing")
    save_file({"rows": torch.zeros(2, 16)}, tmp_path / "foreign")
    with pytest.raises(StorageError, match="did not write it"):
        Basis.load(tmp_path / "foreign")
    save_tensors(tmp_path / "other", "eigenpairs", {"values": torch.zeros(3)}, {})
    with pytest.raises(StorageError, match="not a basis"):
        Basis.load(tmp_path / "other")


class Malicious:
    def __reduce__(self):
        return (open, ("executed", "w"))


def test_an_untrusted_file_executes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pickle").write_bytes(pickle.dumps(Malicious()))
    torch.save({"rows": Malicious()}, tmp_path / "torch")
    for name in ("pickle", "torch"):
        with pytest.raises(StorageError, match="not a safetensors file"):
            Basis.load(tmp_path / name)
    assert not (tmp_path / "executed").exists()


LIES = {
    "rows": ({"rows": torch.zeros(2, 32)}, {}, "does not fit n=10"),
    "dtype": ({"rows": torch.zeros(2, 16, dtype=torch.int32)}, {}, "int32"),
    "gram": ({"gram": torch.eye(3).double()}, {}, "Gram matrix has shape"),
    "singular": ({"gram": torch.zeros(2, 2).double()}, {}, "not positive definite"),
    "nan": ({"gram": torch.full((2, 2), float("nan")).double()}, {}, "not positive definite"),
    "more": ({"extra": torch.zeros(1)}, {}, "instead of"),
    "segments": ({}, {"segments": [{"task": "a"}]}, "segments cannot be read"),
    "gap": (
        {},
        {"segments": [{"task": "a", "start": 1, "stop": 2, "step": None, "values": []}]},
        "do not cover",
    ),
    "values": (
        {},
        {"segments": [{"task": "a", "start": 0, "stop": 2, "step": None, "values": [1.0]}]},
        "number of values",
    ),
    "n": ({}, {"n": "many"}, "does not describe a basis"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_file_that_lies_about_itself_is_refused(lie, tmp_path):
    whole = {"task": "a", "start": 0, "stop": 2, "step": None, "values": []}
    tensors = {"rows": torch.eye(2, 16), "gram": torch.eye(2).double()}
    manifest = {"n": 10, "capacity": 2, "segments": [whole]}
    save_tensors(tmp_path / "good", "basis", tensors, manifest)
    assert Basis.load(tmp_path / "good").size == 2
    changed, facts, words = LIES[lie]
    save_tensors(tmp_path / "bad", "basis", {**tensors, **changed}, {**manifest, **facts})
    with pytest.raises(StorageError, match=words):
        Basis.load(tmp_path / "bad")


def test_a_header_that_promises_too_much_is_refused(tmp_path):
    entry = {"rows": {"dtype": "F32", "shape": [2**40, 16], "data_offsets": [0, 2**46]}}
    text = json.dumps(entry).encode()
    (tmp_path / "huge").write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(StorageError, match="damaged"):
        Basis.load(tmp_path / "huge")


def test_too_small_a_capacity_is_said(tmp_path, generator):
    path = filled(torch.float32, generator).save(tmp_path / "basis")
    with pytest.raises(ValueError, match="capacity=4 is too small"):
        Basis.load(path, capacity=4)
