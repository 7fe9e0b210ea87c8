"""Files that are whole or absent: safetensors for tensors, JSON for everything else, never pickle.

A saved thing is one ``.safetensors`` file. Its header carries a JSON manifest (kind, format
version, library versions, whatever the caller adds) and a SHA-256 over manifest and tensors,
checked on load. Writing goes to a temporary file beside the target, is flushed to disk and then
renamed over it, so a crash or a full disk leaves the previous file as it was.
"""

import hashlib
import json
import os
import platform
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FORMAT = 1


class StorageError(ValueError):
    """A file is missing, damaged, of another kind, or could not be written."""


def save_tensors(
    path: str | Path, kind: str, tensors: Mapping[str, Tensor], manifest: Mapping[str, Any]
) -> Path:
    """Write ``tensors`` and ``manifest`` to ``path`` atomically; returns the path.

    Args:
        path: Of the file; its folder is made if missing.
        kind: What the file holds (``"eigenpairs"``, ``"basis"``, ...); checked on load.
        tensors: Any dtypes and devices; stored contiguous on the CPU.
        manifest: JSON-serialisable facts to keep with them.
    """
    from safetensors.torch import save

    stored = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    text = json.dumps({**versions(), **manifest, "kind": kind, "format": FORMAT}, sort_keys=True)
    header = {"curvlab": text, "sha256": _digest(text, stored)}
    payload = save(stored, metadata=header)
    write_atomically(path, lambda file: Path(file).write_bytes(payload))
    return Path(path)


def load_tensors(path: str | Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a file written by :func:`save_tensors`; verify its kind and checksum.

    Returns:
        The tensors (on the CPU) and the manifest.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.is_file():
        raise StorageError(f"{path} does not exist")
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise StorageError(f"{path} is damaged or not a safetensors file: {error}") from error
    text = header.get("curvlab")
    if text is None:
        raise StorageError(f"{path} is a safetensors file, but curvlab did not write it")
    if header.get("sha256") != _digest(text, tensors):
        raise StorageError(f"{path} is damaged: its checksum does not match its content")
    manifest: dict[str, Any] = json.loads(text)
    if manifest["kind"] != kind:
        raise StorageError(f"{path} holds a {manifest['kind']}, not a {kind}")
    if manifest["format"] > FORMAT:
        raise StorageError(f"{path} was written by a newer curvlab ({manifest['curvlab']}): update")
    return tensors, manifest


def write_atomically(path: str | Path, write: Callable[[str], object]) -> None:
    """Call ``write(temporary_path)``, then rename the result over ``path``; all or nothing."""
    path = Path(path)
    # Not mkstemp: its files are readable by their owner alone, whatever the user's umask says.
    temporary = path.parent / f".{path.name}.{uuid.uuid4().hex}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch(exist_ok=False)
        try:
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


def versions() -> dict[str, str]:
    """What a saved result needs to be understood later."""
    from curvlab import __version__

    return {
        "curvlab": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    total = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        total.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}:".encode())
        total.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()
