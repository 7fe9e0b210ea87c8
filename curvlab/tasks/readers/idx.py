"""The idx format of MNIST, gzipped or not."""

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from curvlab.tasks.images import DataError, MissingDataError

MOST = 60_000 * 28 * 28  # bytes: MNIST's training images, the largest of its files


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


_BYTES = 0x08  # the type code of unsigned bytes, the only one MNIST uses


def read_idx(path: str | Path) -> NDArray[np.uint8]:
    """The array of bytes in an idx file: ``(N,)`` for labels, ``(N, 28, 28)`` for images.

    No more is read than the largest of MNIST's files holds, whatever the header says. Gzip is
    recognised by its first two bytes, whatever the file is called.
    """
    path = Path(path)
    try:
        with path.open("rb") as raw:
            zipped = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            if zipped:
                with gzip.GzipFile(fileobj=raw) as file:
                    return _parse(file, path)
            return _parse(raw, path)
    except FileNotFoundError as error:
        raise MissingDataError(f"{path} does not exist") from error
    except (EOFError, zlib.error, OSError) as error:  # a bad gzip file is an OSError, too
        raise DataError(f"{path} is damaged: {error}. Get it again") from error


def _parse(file: _Readable, path: Path) -> NDArray[np.uint8]:
    magic = file.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0":
        raise DataError(f"{path} is not an idx file: it starts with {magic.hex() or 'nothing'}")
    if magic[2] != _BYTES:
        raise DataError(f"{path}: idx type 0x{magic[2]:02x}; MNIST files hold bytes (0x08)")
    sizes = file.read(4 * magic[3])
    if magic[3] == 0 or len(sizes) < 4 * magic[3]:
        raise DataError(f"{path} is truncated: its header announces {magic[3]} dimensions")
    shape = struct.unpack(f">{magic[3]}I", sizes)
    count = math.prod(shape)
    if count > MOST:
        raise DataError(
            f"{path} announces an array {shape}, more than the {MOST:,} bytes of MNIST's largest "
            "file: its header is damaged, or it holds other data"
        )
    # one byte more than announced is enough to see that a file is too long, however long it is
    content = file.read(count + 1)
    if len(content) != count:
        state = "truncated" if len(content) < count else "longer than its header says"
        raise DataError(f"{path} is {state}: shape {shape} needs {count} bytes. Get it again")
    return np.frombuffer(content, np.uint8).reshape(shape)
