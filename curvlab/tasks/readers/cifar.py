"""CIFAR's python batches, read without trusting them.

The published files are pickles, and a pickle is a program. Here it runs against two closed lists:
the opcodes that build lists, dicts, strings and integers, and the four names a pickled array of
bytes refers to, each replaced by a stand-in of this module, so that not even numpy's own
constructors run on what the file says. Anything else is refused before it is called.
"""

import gzip
import io
import math
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from curvlab.tasks.images import DataError, image_tensor, label_tensor, require_same_length

LARGEST = 160_000_000  # bytes of a batch file: CIFAR-100's training set, with its file names
UNPACKED = 220_000_000  # of an archive; the published ones have 186 million


def read_cifar_batch(
    content: bytes, where: str, key: str = "labels", classes: int = 10
) -> tuple[Tensor, Tensor]:
    """Images ``(N, 3, 32, 32)`` uint8 and labels ``(N,)`` int64 of one batch file.

    Args:
        content: The file's bytes.
        where: What to call it in errors.
        key: The name of the labels: ``"labels"`` in CIFAR-10, ``"fine_labels"`` in CIFAR-100.
        classes: Number of classes.
    """
    batch = _load(content, where)
    if not isinstance(batch, dict):
        raise DataError(f"{where} is not a CIFAR batch: it holds a {type(batch).__name__}")
    batch = {_text(name): value for name, value in batch.items()}
    for name in ("data", key):
        if name not in batch:
            raise DataError(
                f"{where} is not a CIFAR batch with {key!r}: it has no {name!r}, only "
                f"{sorted(map(str, batch))}"
            )
    images = image_tensor(batch["data"], f"{where}: 'data'", (3072,)).view(-1, 3, 32, 32)
    if not isinstance(batch[key], list) or not all(type(label) is int for label in batch[key]):
        raise DataError(f"{where}: {key!r} must be a list of integers")
    labels = label_tensor(batch[key], f"{where}: {key!r}", classes)
    require_same_length(images, labels, where)
    return images, labels


def read_cifar_batches(
    archive: Path, members: list[str], key: str, classes: int
) -> list[tuple[Tensor, Tensor]]:
    """The named batches of a ``.tar.gz`` as published; nothing is unpacked to disk."""
    read: dict[str, tuple[Tensor, Tensor]] = {}
    try:
        with gzip.open(archive) as unpacked:
            bounded: Any = _Bounded(unpacked, UNPACKED)
            files = tarfile.open(fileobj=bounded, mode="r|")  # noqa: SIM115 (nothing to close)
            for member in files:
                if member.name in members and member.isfile():
                    if member.size > LARGEST:
                        raise tarfile.TarError(f"{member.name} announces {member.size:,} bytes")
                    stream = files.extractfile(member)
                    content = stream.read() if stream is not None else b""
                    where = f"{archive}:{member.name}"
                    read[member.name] = read_cifar_batch(content, where, key, classes)
            while bounded.read(1 << 20):
                pass  # to the end: gzip's checksum of all of it is there
    except DataError:
        raise
    # The headers of a damaged archive can fail in any way that numbers and names in them can.
    except Exception as error:
        raise DataError(f"{archive} is damaged: {error}. Get it again") from error
    absent = [name for name in members if name not in read]
    if absent:
        raise DataError(f"{archive} lacks {', '.join(absent)}: truncated, or another archive")
    return [read[name] for name in members]


def content_of(path: Path) -> bytes:
    """The bytes of a batch file, unless there are more than a published one has."""
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST + 1)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if len(content) > LARGEST:
        raise DataError(f"{path} has more than the {LARGEST:,} bytes of any CIFAR batch")
    return content


class _Bounded:
    """A stream that ends in an error where the published archives are long over."""

    def __init__(self, stream: gzip.GzipFile, most: int) -> None:
        self.stream, self.left = stream, most

    def read(self, size: int = -1) -> bytes:
        content = self.stream.read(min(size, self.left + 1) if size >= 0 else self.left + 1)
        self.left -= len(content)
        if self.left < 0:
            raise tarfile.TarError(f"it unpacks to more than {UNPACKED:,} bytes")
        return content


class _Allowed:
    """A stand-in for one global: callable, and closed to everything else a pickle can do."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make

    def __call__(self, *arguments: Any) -> Any:
        return self._make(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("a batch may not alter what it refers to")


class _Array:
    """A pickled array of bytes: filled by the pickle's own state, checked in :meth:`array`."""

    __slots__ = ("state",)

    def __init__(self, *_: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def array(self) -> Any:
        """The bytes as a read-only uint8 array."""
        _, shape, kind, column_major, content = self.state
        if not isinstance(kind, _Kind) or not isinstance(content, bytes):
            raise ValueError("an array of something other than bytes")
        if math.prod(shape) != len(content):
            raise ValueError(f"shape {shape} needs {math.prod(shape)} bytes, not {len(content)}")
        order: Any = "F" if column_major else "C"
        return np.frombuffer(content, np.uint8).reshape(shape, order=order)


class _Kind:
    """A pickled dtype: only that of unsigned bytes is accepted."""

    __slots__ = ()

    def __init__(self, code: Any, *_: Any) -> None:
        if _text(code) not in ("u1", "|u1"):
            raise pickle.UnpicklingError(f"array of type {code!r}; CIFAR batches hold bytes")

    def __setstate__(self, state: Any) -> None:
        """Byte order and alignment: nothing that matters for single bytes."""


def _latin1(text: Any, encoding: Any = "latin1") -> bytes:
    """How Python 3 pickles bytes in the protocol of Python 2."""
    if not isinstance(text, str) or _text(encoding) != "latin1":
        raise pickle.UnpicklingError(f"bytes encoded as {encoding!r}")
    return text.encode("latin1")


_GLOBALS: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,  # numpy 2 writes this name
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Kind,
    ("_codecs", "encode"): _latin1,
}


_OPCODES = (
    pickle.PROTO + pickle.STOP + pickle.MARK + pickle.GLOBAL + pickle.REDUCE + pickle.BUILD
    + pickle.EMPTY_DICT + pickle.DICT + pickle.SETITEM + pickle.SETITEMS
    + pickle.EMPTY_LIST + pickle.LIST + pickle.APPEND + pickle.APPENDS
    + pickle.EMPTY_TUPLE + pickle.TUPLE + pickle.TUPLE1 + pickle.TUPLE2 + pickle.TUPLE3
    + pickle.NONE + pickle.NEWTRUE + pickle.NEWFALSE + pickle.BININT + pickle.BININT1
    + pickle.BININT2 + pickle.INT + pickle.LONG1
    + pickle.BINSTRING + pickle.SHORT_BINSTRING + pickle.BINUNICODE
    + pickle.BINPUT + pickle.LONG_BINPUT + pickle.BINGET + pickle.LONG_BINGET
)  # fmt: skip


# The Python implementation: its table of opcodes can be cut down, and unlike the C one it does not
# allocate as much memory as a damaged file may ask for.
class _BatchUnpickler(pickle._Unpickler):
    dispatch: ClassVar = {code: pickle._Unpickler.dispatch[code] for code in _OPCODES}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _GLOBALS:
            raise pickle.UnpicklingError(
                f"it refers to {module}.{name}, which no CIFAR batch needs; it may be malicious"
            )
        return _Allowed(_GLOBALS[module, name])


def _load(content: bytes, where: str) -> Any:
    try:
        # strings of Python 2 become bytes: only then do arrays keep every byte
        batch = _BatchUnpickler(io.BytesIO(content), encoding="bytes").load()
        if isinstance(batch, dict):
            return {k: v.array() if isinstance(v, _Array) else v for k, v in batch.items()}
        return batch
    # A damaged pickle can fail in any way its opcodes can: all of them mean the same to the user.
    except Exception as error:
        raise DataError(f"{where} is not a readable CIFAR batch: {error!r}") from error


def _text(value: Any) -> Any:
    return value.decode("latin1") if isinstance(value, bytes) else value
