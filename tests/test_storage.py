"""Files are whole or absent, verified when read, and nothing in them is executed."""

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import curvlab
from curvlab.operators.products.sizing import LiveBytes
from curvlab.storage import (
    DTYPES,
    FORMAT,
    Pieces,
    StorageError,
    load_tensors,
    open_pieces,
    save_pieces,
    save_tensors,
    versions,
    write_atomically,
)


def tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        "rows": torch.randn(5, 7, generator=generator),
        "half": torch.randn(3, 2, 2, generator=generator).half(),
        "counts": torch.arange(4),
        "flag": torch.tensor(True),
        "nothing": torch.zeros(0, 3),
    }


def in_pieces(tensor, size=2):
    def read():
        return (
            [tensor]
            if tensor.dim() == 0
            else [tensor[i : i + size] for i in range(0, len(tensor), size)]
        )

    return Pieces(tensor.dtype, tuple(tensor.shape), read)


def assert_same(read, expected):
    assert sorted(read) == sorted(expected)
    for name, tensor in expected.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor), name


def test_what_is_saved_is_loaded_with_its_manifest(tmp_path):
    path = save_tensors(tmp_path / "deep" / "file.safetensors", "basis", tensors(), {"task": 3})
    read, manifest = load_tensors(path, "basis")
    assert_same(read, tensors())
    assert manifest["task"] == 3
    assert manifest["kind"] == "basis"
    assert manifest["format"] == FORMAT
    assert manifest["curvlab"] == curvlab.__version__
    assert manifest.items() >= versions().items()


def test_non_contiguous_tensors_and_graphs_are_stored_as_their_values(tmp_path):
    matrix = torch.arange(6.0).reshape(2, 3).T.requires_grad_()
    path = save_tensors(tmp_path / "file", "basis", {"m": matrix * 1}, {})
    assert torch.equal(load_tensors(path, "basis")[0]["m"], matrix.detach())


def test_rows_with_gaps_between_them_are_written_without_a_second_copy(tmp_path):
    rows = torch.arange(8 * 1000.0).reshape(8, 1000)[:, :990]  # as a solve's rows lie
    with LiveBytes() as made:
        path = save_tensors(tmp_path / "file", "basis", {"rows": rows}, {})
    assert made.peak == 0
    assert torch.equal(load_tensors(path, "basis")[0]["rows"], rows)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_every_dtype_goes_both_ways_whole_and_in_pieces(tmp_path, dtype):
    original = {"x": torch.arange(12).reshape(4, 3).to(dtype)}
    whole = save_tensors(tmp_path / "whole", "basis", original, {})
    pieces = save_pieces(
        tmp_path / "pieces", "basis", {name: in_pieces(t) for name, t in original.items()}, {}
    )
    for path in (whole, pieces):
        read, _ = load_tensors(path, "basis")
        assert read["x"].dtype == dtype
        assert torch.equal(read["x"].float(), original["x"].float())
        with open_pieces(path, "basis") as (parts, _):
            joined = torch.cat([part.float() for part in parts["x"].read()])
        assert torch.equal(joined, original["x"].float())


def test_pieces_and_whole_tensors_make_the_same_contents(tmp_path):
    whole = {name: t for name, t in tensors().items() if t.numel()}
    path = save_pieces(
        tmp_path / "file", "basis", {name: in_pieces(t) for name, t in whole.items()}, {"k": [1]}
    )
    read, manifest = load_tensors(path, "basis")
    assert_same(read, whole)
    assert manifest["k"] == [1]


def test_pieces_that_do_not_add_up_are_refused_and_leave_nothing(tmp_path):
    short = Pieces(torch.float32, (4, 2), lambda: [torch.zeros(3, 2)])
    with pytest.raises(ValueError, match="add up"):
        save_pieces(tmp_path / "file", "basis", {"x": short}, {})
    assert list(tmp_path.iterdir()) == []


def open_all(path, kind):
    with open_pieces(path, kind) as (parts, _):
        return {name: list(part.read()) for name, part in parts.items()}


@pytest.mark.parametrize("load", [load_tensors, open_all], ids=["whole", "pieces"])
def test_any_flipped_bit_is_noticed(tmp_path, load):
    path = save_tensors(tmp_path / "file", "basis", {"x": torch.arange(9.0)}, {"task": 1})
    good = path.read_bytes()
    for place in range(0, len(good), 7):
        bad = bytearray(good)
        bad[place] ^= 1
        path.write_bytes(bytes(bad))
        try:
            load(path, "basis")
        except StorageError:
            continue
        # only white space that pads the header may change unnoticed
        assert good[place : place + 1] == b" ", place


@pytest.mark.parametrize("load", [load_tensors, open_all], ids=["whole", "pieces"])
@pytest.mark.parametrize("keep", [0, 4, 20, -1])
def test_a_truncated_file_is_named(tmp_path, keep, load):
    path = save_tensors(tmp_path / "file", "basis", tensors(), {})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(StorageError, match="file is damaged"):
        load(path, "basis")


@pytest.mark.parametrize("load", [load_tensors, open_all], ids=["whole", "pieces"])
def test_missing_foreign_and_mismatched_files_are_told_apart(tmp_path, load):
    with pytest.raises(StorageError, match="does not exist"):
        load(tmp_path / "none", "basis")
    save_file({"x": torch.zeros(2)}, tmp_path / "foreign")
    with pytest.raises(StorageError, match="curvlab did not write it"):
        load(tmp_path / "foreign", "basis")
    path = save_tensors(tmp_path / "pairs", "eigenpairs", {"x": torch.zeros(2)}, {})
    with pytest.raises(StorageError, match="holds a eigenpairs, not a basis"):
        load(path, "basis")


def test_a_file_of_a_newer_format_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("curvlab.storage.FORMAT", FORMAT + 1)
    path = save_tensors(tmp_path / "file", "basis", {"x": torch.zeros(2)}, {})
    monkeypatch.undo()
    with pytest.raises(StorageError, match="newer curvlab"):
        load_tensors(path, "basis")


class Bomb:
    exploded = False

    def __reduce__(self):
        return setattr, (Bomb, "exploded", True)


@pytest.mark.parametrize("load", [load_tensors, open_all], ids=["whole", "pieces"])
def test_a_pickle_is_not_executed(tmp_path, load):
    path = tmp_path / "file"
    path.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(StorageError):
        load(path, "basis")
    torch.save({"x": torch.zeros(2), "bomb": Bomb()}, path)
    with pytest.raises(StorageError):
        load(path, "basis")
    assert not Bomb.exploded


def test_a_failed_write_leaves_the_previous_file(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, lambda name: Path(name).write_text("first"))

    def full(name):
        Path(name).write_text("half of")
        raise OSError(28, "No space left on device")

    with pytest.raises(StorageError, match=r"No space left on device.*unchanged"):
        write_atomically(path, full)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, interrupted)
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]


def interrupted(name):
    Path(name).write_text("half of")
    raise KeyboardInterrupt


def test_a_symbolic_link_stays_one_and_its_target_is_written(tmp_path):
    (tmp_path / "large disk").mkdir()
    target, link = tmp_path / "large disk" / "kept", tmp_path / "latest"
    link.symlink_to(target)  # which does not exist yet
    for number in range(2):
        save_tensors(link, "basis", {"x": torch.tensor(number)}, {})
        assert link.is_symlink()
        assert load_tensors(target, "basis")[0]["x"] == number
    assert sorted(tmp_path.rglob("*")) == sorted([link, target.parent, target])


def test_what_is_no_file_is_neither_replaced_nor_read(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # as /dev/null, which root could replace
    for place in (pipe, tmp_path):
        with pytest.raises(StorageError, match="it is not a file"):
            save_tensors(place, "basis", {}, {})
        with pytest.raises(StorageError, match="is not a file"):
            load_tensors(place, "basis")
    assert pipe.is_fifo()


def test_a_dtype_that_files_do_not_hold_is_named(tmp_path):
    with pytest.raises(TypeError, match=r"x is torch\.complex64"):
        save_tensors(tmp_path / "file", "basis", {"x": torch.zeros(2, dtype=torch.complex64)}, {})


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="could not write"):
        save_tensors(tmp_path / "file" / "below", "basis", {"x": torch.zeros(1)}, {})


def test_a_name_that_no_disk_takes_is_refused_by_name(tmp_path):
    long = tmp_path / ("x" * 300 + ".safetensors")
    with pytest.raises(StorageError, match=r"'x{57}\.\.\.' cannot be used as a file .*too long"):
        save_tensors(long, "test", {"a": torch.ones(2)}, {})
    with pytest.raises(StorageError, match="cannot be used as a file"):
        load_tensors(long, "test")
    assert list(tmp_path.iterdir()) == []


def test_a_manifest_must_be_json(tmp_path):
    with pytest.raises(TypeError):
        save_tensors(tmp_path / "file", "basis", {}, {"model": object()})
    assert list(tmp_path.iterdir()) == []
    json.dumps(versions())
