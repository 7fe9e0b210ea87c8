"""Nothing in a pickled batch is executed, and the ordinary unpickler would have executed it."""

import os
import pickle

import pytest

from curvlab.tasks import DataError, cifar10
from curvlab.tasks.readers import read_cifar_batch
from curvlab.tasks.readers.cifar import _GLOBALS
from tests.made_up_data import CIFAR10_NAMES, Python2, cifar_files


def mark(path):
    """What a malicious pickle would call: leaves a file behind."""
    path = path.decode() if isinstance(path, bytes) else path
    open(path, "w").close()  # noqa: PTH123


class Payload:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def payloads(target):
    command = f"touch {target}"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        yield pickle.dumps(Payload(os.system, command), protocol)
        yield pickle.dumps({"data": Payload(eval, f"open({str(target)!r}, 'w')")}, protocol)
    name = Python2().text(str(target).encode())
    yield b"cposix\nsystem\n" + Python2().text(command.encode()) + b"\x85R."
    yield b"(" + Python2().text(command.encode()) + b"iposix\nsystem\n."  # INST
    yield b"(cposix\nsystem\n" + Python2().text(command.encode()) + b"o."  # OBJ
    yield (
        b"\x80\x04\x8c\x05posix\x8c\x06system\x93"
        + b"\x8c"
        + bytes([len(command)])
        + (command.encode() + b"\x85R.")
    )  # STACK_GLOBAL
    yield b"cbuiltins\ngetattr\ncnumpy\ndtype\n" + name + b"\x86R."
    yield b"\x80\x04\x8c\x05numpy\x8c\x0ef2py.os.system\x93."  # a dotted path
    # allowed names, used to reach something else: attributes, state, instantiation
    yield b"cnumpy.core.multiarray\n_reconstruct\n}" + name + b"K\1s" + b"b."
    yield b"cnumpy\nndarray\n(N}U\x05_makecposix\nsystem\nstb."
    yield b"cnumpy\ndtype\n)\x81."
    yield b"c_codecs\nencode\n" + name + b"U\x03hex\x86R."


def test_a_malicious_batch_executes_nothing(tmp_path):
    target = tmp_path / "executed"
    attempts = list(payloads(target))
    assert len(attempts) > 15
    for content in attempts:
        before = dict(_GLOBALS)
        with pytest.raises(DataError):
            read_cifar_batch(content, "batch")
        assert not target.exists()
        assert before == _GLOBALS


def test_the_payloads_are_real_for_the_ordinary_unpickler(tmp_path):
    target = tmp_path / "executed"
    ran = 0
    for content in list(payloads(target))[: 2 * (pickle.HIGHEST_PROTOCOL + 1) + 3]:
        pickle.loads(content, encoding="bytes")
        ran += target.exists()
        target.unlink(missing_ok=True)
    assert ran == 2 * (pickle.HIGHEST_PROTOCOL + 1) + 3


def test_a_malicious_file_in_the_folder_is_refused_by_name(tmp_path):
    contents, _ = cifar_files(CIFAR10_NAMES)
    contents["data_batch_3"] = pickle.dumps(Payload(mark, str(tmp_path / "executed")), 2)
    (tmp_path / "cifar-10-batches-py").mkdir()
    for name, content in contents.items():
        (tmp_path / "cifar-10-batches-py" / name).write_bytes(content)
    with pytest.raises(DataError, match=r"data_batch_3 is not a readable .*mark.*malicious"):
        cifar10(tmp_path)
    assert not (tmp_path / "executed").exists()
