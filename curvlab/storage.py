"""Files that are whole or absent: safetensors for tensors, JSON for everything else, never pickle.

A saved thing is one ``.safetensors`` file. Its header carries a JSON manifest (kind, format
version, library versions, whatever the caller adds) and a SHA-256 over manifest and tensors,
checked on load. Writing goes to a temporary file beside the target, is flushed to disk and then
renamed over it, so a crash or a full disk leaves the previous file as it was.
"""

import hashlib
import json
import math
import os
import platform
import re
import shlex
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

try:
    import fcntl
except ImportError:  # not a POSIX system: what a killed process leaves stays there
    fcntl = None  # type: ignore[assignment]

FORMAT = 1
HEADER_BYTES = 100_000_000  # the format's own limit
PIECE_BYTES = 1 << 24  # read at a time from a file that may be larger than the memory

# torch's dtypes by the names that safetensors files use.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class StorageError(ValueError):
    """A file is missing, damaged, of another kind, or could not be written."""


class MissingFileError(StorageError, FileNotFoundError):
    """A file that was to be read does not exist."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """A tensor that need not be whole in memory.

    Attributes:
        read: Called for an iteration over consecutive parts along the first dimension; called
            twice, and must give the same both times.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Iterable[Tensor]]

    @classmethod
    def of(cls, tensor: Tensor) -> "Pieces":
        """A tensor that is whole in memory; no second one is made of rows with gaps between."""
        parts = [tensor]
        if tensor.dim() > 1 and not tensor.is_contiguous():
            parts = [tensor[row : row + 1] for row in range(len(tensor))]
        return cls(tensor.dtype, tuple(tensor.shape), lambda: parts)

    def whole(self) -> Tensor:
        """All parts, read now."""
        found, position = torch.zeros(self.shape, dtype=self.dtype), 0
        for part in self.read():
            if not self.shape:
                return part
            found[position : position + len(part)] = part
            position += len(part)
        return found


def save_tensors(
    path: str | Path, kind: str, tensors: Mapping[str, Tensor], manifest: Mapping[str, Any]
) -> Path:
    """Write ``tensors`` and ``manifest`` to ``path`` atomically; returns the path.

    Args:
        path: The path of the file; its folder is made if missing.
        kind: What the file holds (``"eigenpairs"``, ``"basis"``, ...); checked on load.
        tensors: Any of the dtypes in :data:`DTYPES`, on any devices.
        manifest: JSON-serialisable facts to keep with them.
    """
    return save_pieces(path, kind, {n: Pieces.of(t) for n, t in tensors.items()}, manifest)


def save_pieces(
    path: str | Path, kind: str, tensors: Mapping[str, Pieces], manifest: Mapping[str, Any]
) -> Path:
    """:func:`save_tensors` for tensors larger than the memory."""
    facts = {**versions(), "command": command(), **manifest, "kind": kind, "format": FORMAT}
    text = json.dumps(facts, sort_keys=True)
    entries: dict[str, Any] = {"__metadata__": {"curvlab": text, "sha256": _digest(text, tensors)}}
    names = {dtype: name for name, dtype in DTYPES.items()}
    # Widest first, so that every tensor starts at a multiple of its element size.
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    offset = 0
    for name in order:
        dtype, shape = tensors[name].dtype, list(tensors[name].shape)
        stop = offset + dtype.itemsize * math.prod(shape)
        if dtype not in names:
            raise TypeError(f"{name} is {dtype}; a file holds {', '.join(map(str, names))}")
        entries[name] = {"dtype": names[dtype], "shape": shape, "data_offsets": [offset, stop]}
        offset = stop
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)

    def write(temporary: str) -> None:
        with Path(temporary).open("wb") as file:
            file.write(len(header).to_bytes(8, "little"))
            file.write(header)
            for name in order:
                for piece in tensors[name].read():
                    file.write(tensor_bytes(piece))
            if file.tell() != 8 + len(header) + offset:
                raise ValueError("the pieces of a tensor do not add up to its shape")

    write_atomically(path, write)
    return Path(path)


def read_manifest(path: str | Path) -> dict[str, Any]:
    """A file's own description: kind, versions, command and what its writer added.

    Only the header is read; :func:`load_tensors` verifies the checksum.
    """
    with _opened(path) as (text, _, _):
        return _manifest(Path(path), text)


def load_tensors(path: str | Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a file written by :func:`save_tensors`; verify its kind and checksum.

    Returns:
        The tensors (on the CPU) and the manifest.
    """
    with _opened(path) as (text, checksum, stored):
        tensors = {name: pieces.whole() for name, pieces in stored.items()}
    held = {name: Pieces.of(tensor) for name, tensor in tensors.items()}
    return tensors, _verified(Path(path), text, checksum, held, kind)


@contextmanager
def open_pieces(path: str | Path, kind: str) -> Iterator[tuple[dict[str, Pieces], dict[str, Any]]]:
    """:func:`load_tensors` for tensors larger than the memory: verified, then read in pieces."""
    with _opened(path) as (text, checksum, stored):
        yield stored, _verified(Path(path), text, checksum, stored, kind)


@contextmanager
def _opened(path: str | Path) -> Iterator[tuple[str, str | None, dict[str, Pieces]]]:
    """A file's manifest as text, its checksum, and its tensors, which are not read yet."""
    path = Path(path)
    present, is_file = _seen(path)
    if not is_file:
        raise MissingFileError(f"{path} {'is not a file' if present else 'does not exist'}")
    with path.open("rb") as file:
        try:
            header, tensors = _stored_pieces(file, path.stat().st_size)
        except _UNREADABLE as error:
            raise StorageError(f"{path} is damaged or not a safetensors file: {error}") from error
        if "curvlab" not in header:
            raise StorageError(f"{path} is a safetensors file, but curvlab did not write it")
        yield header["curvlab"], header.get("sha256"), tensors


def _verified(
    path: Path, text: str, checksum: str | None, tensors: Mapping[str, Pieces], kind: str
) -> dict[str, Any]:
    """The manifest, once the checksum is right and the file is of that kind."""
    if checksum != _digest(text, tensors):
        raise StorageError(f"{path} is damaged: its checksum does not match its content")
    manifest = _manifest(path, text)
    if manifest["kind"] != kind:
        raise StorageError(f"{path} holds a {manifest['kind']}, not a {kind}")
    if manifest["format"] > FORMAT:
        newer = manifest.get("curvlab", "of an unknown version")
        raise StorageError(f"{path} was written by a newer curvlab ({newer}): update")
    return manifest


def _stored_pieces(file: BinaryIO, size: int) -> tuple[dict[str, str], dict[str, Pieces]]:
    """What a safetensors header describes; raises unless it describes the file exactly."""
    length = int.from_bytes(file.read(8), "little")
    if not 0 < length <= min(size - 8, HEADER_BYTES):
        raise ValueError("its header does not fit into it")
    entries = json.loads(file.read(length))
    metadata = _metadata(entries)
    entries.pop("__metadata__", None)
    found, expected = dict[str, Pieces](), 0
    for name, entry in sorted(entries.items(), key=lambda item: _numbers(item[1]["data_offsets"])):
        dtype, shape = DTYPES[entry["dtype"]], _numbers(entry["shape"])
        start, stop = _numbers(entry["data_offsets"])
        # Python's own integers: a product of 64-bit ones may wrap around to what the file has. No
        # extent is longer than the file, so that nothing is counted through or made for nothing.
        count = dtype.itemsize * math.prod(shape)
        empty = shape[:1] == (0,)  # nothing is counted through, however long its rows would be
        if (
            (max(shape, default=0) > size and not empty)
            or start != expected
            or stop != start + count
        ):
            raise ValueError(f"tensor {name!r} is not where its header says")
        found[name] = Pieces(dtype, shape, _reader(file, 8 + length + start, dtype, shape))
        expected = stop
    if 8 + length + expected != size:
        raise ValueError("its length is not that of its tensors")
    return metadata, found


def _reader(
    file: BinaryIO, offset: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> Callable[[], Iterator[Tensor]]:
    row = dtype.itemsize * math.prod(shape[1:])
    at_once = max(1, PIECE_BYTES // max(row, 1))
    rows = shape[0] if shape else 1

    def read() -> Iterator[Tensor]:
        for start in range(0, rows, at_once):
            count = min(at_once, rows - start)
            file.seek(offset + start * row)
            data = torch.zeros(count * row, dtype=torch.uint8)
            if file.readinto(data.numpy().data) != count * row:  # type: ignore[attr-defined]
                raise StorageError(f"{file.name} ended while it was read")
            yield data.view(dtype).view(count, *shape[1:]) if shape else data.view(dtype).view(())

    return read


def write_atomically(path: str | Path, write: Callable[[str], object] | None) -> None:
    """Call ``write(temporary_path)``, then rename the result over ``path``; all or nothing.

    A symbolic link stays one: what it points to is written. Without ``write`` nothing is, and what
    would stand in its way is raised: before the work whose result it is to be.
    """
    path = Path(os.path.realpath(path))
    present, is_file = _seen(path)
    if present and not is_file:
        raise StorageError(f"could not write {path}: it is not a file, and is left as it is")
    # Not mkstemp: its files are readable by their owner alone, whatever the user's umask says.
    temporary = path.parent / f".{path.name}.{uuid.uuid4().hex}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(path)
        with temporary.open("xb") as held:
            try:
                if not _lock(held):  # held until it is complete, so that nobody else removes it
                    held.close()
                if write is None:
                    return
                write(str(temporary))
                with temporary.open("rb") as file:
                    os.fsync(file.fileno())
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(
            f"could not write {path}: {error}. What was there before is unchanged"
        ) from error


def _seen(path: Path) -> tuple[bool, bool]:
    """Whether something is there, and whether it is a file."""
    try:
        return path.exists(), path.is_file()
    except OSError as error:  # a name that is too long, or a folder that may not be read
        shown = path.name if len(path.name) <= 60 else f"{path.name[:57]}..."
        raise StorageError(
            f"{shown!r} cannot be used as a file ({error.strerror}): choose another name or folder"
        ) from error


def _lock(file: BinaryIO) -> bool:
    """Hold the open file for this process; False if another does. Ends with the process."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove_stale(path: Path) -> None:
    """Remove what killed processes left of files that were to become ``path``."""
    name = re.compile(re.escape(f".{path.name}.") + "[0-9a-f]{32}")
    for sibling in path.parent.glob(".*"):
        if name.fullmatch(sibling.name) and sibling.is_file():
            # it may be gone, or another user's
            with suppress(FileNotFoundError, PermissionError), sibling.open("rb") as file:
                if _lock(file):
                    sibling.unlink()


def versions() -> dict[str, str]:
    """The versions behind a saved result."""
    from curvlab import __version__

    return {
        "curvlab": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def command() -> str:
    """The command line of this process, as it would be typed."""
    name = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"
    return shlex.join([name, *sys.argv[1:]])


# What a header can be that is not one: no JSON, other types, names or numbers, nested too deep.
_UNREADABLE = (
    ValueError, KeyError, TypeError, AttributeError, OSError, OverflowError, RecursionError,
)  # fmt: skip


def _metadata(entries: Any) -> dict[str, str]:
    metadata = entries.get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError("its metadata are not texts")
    return metadata


def _numbers(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or any(type(v) is not int or v < 0 for v in values):
        raise ValueError(f"{values!r:.60} are not sizes")
    return tuple(values)


def _manifest(path: Path, text: str) -> dict[str, Any]:
    try:
        manifest = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StorageError(f"{path} has a manifest that cannot be read: {error}") from error
    known = isinstance(manifest, dict) and isinstance(manifest.get("kind"), str)
    if not known or type(manifest.get("format")) is not int:
        raise StorageError(f"{path} has a manifest without a kind and a format: it is damaged")
    return dict(manifest)


def _digest(text: str, tensors: Mapping[str, Pieces]) -> str:
    total = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        total.update(f"{name}:{tensor.dtype}:{tensor.shape}:".encode())
        for piece in tensor.read():
            total.update(tensor_bytes(piece))
    return total.hexdigest()


def below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with ``prefix``, by what follows it."""
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def series(tensors: Mapping[str, Tensor], name: str) -> list[Tensor]:
    """The tensors ``name/0``, ``name/1``, ... in this order."""
    found = below(tensors, f"{name}/")
    return [found[str(number)] for number in range(len(found))]


def tensor_digest(tensors: Iterable[Tensor]) -> str:
    """SHA-256 over dtypes, shapes and elements."""
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        total.update(tensor_bytes(tensor))
    return total.hexdigest()


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The elements as they lie in a file."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
