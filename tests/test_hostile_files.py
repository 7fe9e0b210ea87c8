"""Damaged and hostile files: an error that names the file, or right data; never a hang."""

import copy
import json
import random
import resource
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from curvlab.basis import Basis
from curvlab.storage import (
    StorageError,
    load_tensors,
    open_pieces,
    read_manifest,
    save_tensors,
    write_atomically,
)


@pytest.fixture
def little_memory():
    """A gigabyte more than there is: a file of a few hundred bytes must not need it."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def write_header(path, entries, data=b""):
    text = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(shape, offsets=(0, 0), dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


MANIFEST = {"curvlab": json.dumps({"kind": "basis", "format": 1, "n": 10}), "sha256": "0"}
HEADERS = {
    "endless rows of nothing": {"rows": entry([10**18, 0])},
    "more rows than a number holds": {"rows": entry([10**30, 0])},
    "sizes whose product wraps around": {"rows": entry([2**33, 2**31])},
    "negative": {"rows": entry([-1, -1])},
    "a fraction": {"rows": entry([0.5, 2])},
    "truth": {"rows": entry([True, 0])},
    "a word": {"rows": entry("many")},
    "no shape": {"rows": {"dtype": "F32", "data_offsets": [0, 0]}},
    "no offsets": {"rows": {"dtype": "F32", "shape": [0]}},
    "three offsets": {"rows": entry([0], (0, 0, 0))},
    "offsets behind the end": {"rows": entry([1], (0, 4))},
    "an unknown dtype": {"rows": entry([0], dtype="F7")},
    "a list": [1, 2, 3],
    "a number": 7,
    "metadata that are a list": {"__metadata__": ["curvlab"]},
    "metadata that are numbers": {"__metadata__": {"curvlab": 1}},
}


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_lies_is_refused_at_once(name, tmp_path):
    entries = HEADERS[name]
    if isinstance(entries, dict):
        entries = {"__metadata__": MANIFEST, **entries}
    path = write_header(tmp_path / "hostile", entries)
    began = time.monotonic()
    for load in (Basis.load, lambda p: load_tensors(p, "basis"), lambda p: opened(p)):
        with pytest.raises(StorageError, match="hostile"):
            load(path)
    assert time.monotonic() - began < 5.0


@pytest.mark.usefixtures("little_memory")
def test_a_header_nested_too_deep_is_refused(tmp_path):
    text = b"[" * 200_000
    (tmp_path / "deep").write_bytes(struct.pack("<Q", len(text)) + text)
    for load in (Basis.load, read_manifest):
        with pytest.raises(StorageError, match="deep"):
            load(tmp_path / "deep")


def opened(path):
    with open_pieces(path, "basis") as (tensors, _):
        return [list(tensor.read()) for tensor in tensors.values()]


def good(path, **facts):
    whole = {"task": "a", "start": 0, "stop": 2, "step": None, "values": [2.0, 1.0]}
    manifest = {"n": 10, "capacity": 2, "segments": [whole], **facts}
    tensors = {"rows": torch.eye(2, 16), "gram": torch.eye(2).double()}
    return save_tensors(path, "basis", tensors, manifest)


@pytest.mark.usefixtures("little_memory")
def test_a_large_capacity_costs_nothing(tmp_path):
    basis = Basis.load(good(tmp_path / "basis", capacity=20_000_000))
    assert (basis.size, basis.capacity) == (2, 20_000_000)
    assert basis.append(torch.eye(10)[5])


STRANGE = [None, True, -1, 0, 0.5, 1e400, float("nan"), 10**30, "", "x", [], [[]], {}, {"a": 1}]


@pytest.mark.usefixtures("little_memory")
def test_every_field_of_a_manifest_is_checked(tmp_path):
    """Each field of a basis's manifest replaced by each strange value: said, or right."""
    fields = [("n",), ("capacity",), ("segments",)] + [
        ("segments", 0, name) for name in ("task", "start", "stop", "step", "values")
    ]
    manifest = read_manifest(good(tmp_path / "basis"))
    said = list[str]()
    for field in fields:
        for value in STRANGE:
            facts = copy.deepcopy({k: manifest[k] for k in ("n", "capacity", "segments")})
            *place, last = field
            target = facts
            for key in place:
                target = target[key]
            target[last] = value
            said.append(outcome(good(tmp_path / "changed", **facts)))
    assert set(said) == {"right", "said"}
    # The others are harmless: a capacity of 0, another name or step of a task, no values.
    assert said.count("said") > 80
    assert len(said) == 112


def outcome(path):
    """What loading a changed file of :func:`good` comes to."""
    try:
        found = Basis.load(path)
    except StorageError as error:
        return "said" if path.name in str(error) else f"said without a name: {error}"
    except Exception as error:
        return repr(error)
    return "right" if torch.equal(found.rows(), torch.eye(2, 10)) else "wrong"


NO_MANIFESTS = ["[]", "7", "{}", "{", "[" * 5000, '{"kind": 3}', '{"kind": "basis"}',
                '{"kind": "basis", "format": "new"}']  # fmt: skip


@pytest.mark.parametrize("text", NO_MANIFESTS)
def test_a_manifest_that_is_none_is_refused(text, tmp_path):
    metadata = {"curvlab": text, "sha256": "0"}
    path = write_header(tmp_path / "hostile", {"__metadata__": metadata})
    with pytest.raises(StorageError, match="hostile"):
        Basis.load(path)
    with pytest.raises(StorageError, match="hostile"):
        read_manifest(path)


@pytest.mark.usefixtures("little_memory")
def test_changed_bytes_give_an_error_or_the_same_basis(tmp_path):
    """300 mutants of a small file: bits flipped, bytes cut out, doubled or overwritten."""
    path = good(tmp_path / "basis")
    data, choose = path.read_bytes(), random.Random(0)
    for _ in range(300):
        changed, at = bytearray(data), choose.randrange(len(data))
        kind = choose.randrange(4)
        if kind == 0:
            changed[at] ^= 1 << choose.randrange(8)
        elif kind == 1:
            del changed[at : at + choose.randrange(1, 40)]
        elif kind == 2:
            changed[at:at] = changed[at : at + choose.randrange(1, 40)]
        else:
            changed[at : at + 4] = choose.randbytes(4)
        mutant = tmp_path / "mutant"
        mutant.write_bytes(changed)
        assert outcome(mutant) in ("said", "right")


KILLED = """
import os, signal, sys
from curvlab.storage import write_atomically

def write(path):
    open(path, "wb").write(b"half of it")
    print("writing", flush=True)
    signal.pause()

write_atomically(sys.argv[1], write)
"""


def test_what_a_killed_process_left_goes_with_the_next_save(tmp_path):
    target, other = tmp_path / "result", tmp_path / "result2"
    writing = [
        subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE)
        for path in (target, target, other)
    ]
    for process in writing:
        process.stdout.readline()
    writing[0].send_signal(signal.SIGKILL)
    writing[0].wait()
    assert len(list(tmp_path.iterdir())) == 3
    write_atomically(target, lambda path: Path(path).write_bytes(b"all of it"))
    left = sorted(path.name for path in tmp_path.iterdir())
    # what a living process writes is not touched, nor what belongs to another file
    assert [name.rsplit(".", 1)[0] for name in left] == [".result", ".result2", "result"]
    assert target.read_bytes() == b"all of it"
    for process in writing[1:]:
        process.send_signal(signal.SIGKILL)
        process.wait()
    write_atomically(other, lambda path: Path(path).write_bytes(b""))
    write_atomically(target, lambda path: Path(path).write_bytes(b""))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["result", "result2"]
