"""A basis in one safetensors file: written and read in pieces, so that memory is not doubled.

Nothing in the file is executed: numbers, and a JSON manifest. What it claims is checked against
its own tensors before a basis is built from it.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from curvlab_kernels.checks import STORAGE
from curvlab_kernels.formats import BLOCK, LEVELS, padded
from torch import Tensor

from curvlab.basis import segments
from curvlab.basis.tiers import Tier
from curvlab.storage import Pieces, StorageError, open_pieces, save_pieces

if TYPE_CHECKING:
    from curvlab.basis.memory import Basis

KIND = "basis"


def save(basis: "Basis", path: str | Path, about: Mapping[str, Any]) -> Path:
    """See :meth:`Basis.save`."""
    ld = padded(basis.n)

    def rows() -> Iterator[Tensor]:
        return (row for _, row, _ in basis.store.stored())

    def scales() -> Iterator[Tensor]:
        return (scale for _, _, scale in basis.store.stored() if scale is not None)

    tensors = {
        "rows": Pieces(basis.dtype, (basis.size, ld), rows),
        "gram": Pieces(torch.float64, tuple(basis.gram.shape), lambda: [basis.gram]),
    }
    if basis.dtype in LEVELS:
        tensors["scales"] = Pieces(torch.float32, (basis.size, -(-ld // BLOCK)), scales)
    manifest = {
        "n": basis.n,
        "capacity": basis.capacity,
        "segments": segments.to_json(basis.segments),
        "about": dict(about),
    }
    return save_pieces(path, KIND, tensors, manifest)


def load(
    make: type["Basis"],
    path: str | Path,
    capacity: int | None,
    device: torch.device | str,
    tier: Tier | None,
    slab: int | None,
) -> "Basis":
    """See :meth:`Basis.load`."""
    with open_pieces(path, KIND) as (tensors, manifest):
        try:
            n, size, dtype, origin = _described(tensors, manifest)
            gram = _gram(tensors["gram"])
        except (KeyError, TypeError, ValueError) as error:
            raise StorageError(f"{path} does not describe a basis: {error}") from error
        room = max(int(manifest["capacity"]), size) if capacity is None else capacity
        if room < size:
            raise ValueError(f"{path} holds {size} rows; capacity={capacity} is too small")
        basis = make(n, room, dtype=dtype, device=device, tier=tier, slab=slab)
        position = 0
        for rows in tensors["rows"].read():
            basis.store.write_rows(position, rows)
            position += rows.shape[0]
        position = 0
        for scales in tensors["scales"].read() if "scales" in tensors else ():
            basis.store.write_scales(position, scales)
            position += scales.shape[0]
    basis.restore(gram.to(basis.device), origin)
    return basis


def _described(
    tensors: dict[str, Pieces], manifest: dict[str, Any]
) -> tuple[int, int, torch.dtype, list[segments.Segment]]:
    """Size, dtype and provenance, having checked that manifest and tensors agree."""
    n, rows = int(manifest["n"]), tensors["rows"]
    if n < 1 or len(rows.shape) != 2 or rows.shape[1] != padded(n):
        raise ValueError(f"its rows have shape {rows.shape}, which does not fit n={n}")
    size, dtype = rows.shape[0], rows.dtype
    if dtype not in STORAGE:
        raise ValueError(f"its rows are {dtype}")
    wanted = {"rows", "gram"} | ({"scales"} if dtype in LEVELS else set())
    if set(tensors) != wanted:
        raise ValueError(f"it holds {sorted(tensors)} instead of {sorted(wanted)}")
    blocks = -(-padded(n) // BLOCK)
    if dtype in LEVELS and tensors["scales"].shape != (size, blocks):
        raise ValueError(f"its scales have shape {tensors['scales'].shape}")
    if tensors["gram"].shape != (size, size) or tensors["gram"].dtype != torch.float64:
        raise ValueError(f"its Gram matrix has shape {tensors['gram'].shape}")
    return n, size, dtype, segments.from_json(manifest["segments"], size)


def _gram(stored: Pieces) -> Tensor:
    gram = torch.cat([torch.zeros(0, stored.shape[0], dtype=torch.float64), *stored.read()])
    if not bool(gram.isfinite().all()) or int(torch.linalg.cholesky_ex(gram).info) != 0:
        raise ValueError("its Gram matrix is not positive definite")
    return gram
