"""Rows in one safetensors file, or in a folder of shards: written and read in pieces.

Memory is not doubled, and nothing in a file is executed: numbers, and a JSON manifest. What it
claims is checked against its own tensors before rows are built from it.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from curvlab_kernels.checks import STORAGE
from curvlab_kernels.formats import BLOCK, LEVELS, padded
from torch import Tensor

from curvlab.manifest import require_finite
from curvlab.rows.space import Space, Whole
from curvlab.rows.tiers import Tier
from curvlab.storage import Pieces, StorageError, open_pieces

if TYPE_CHECKING:
    from curvlab.rows.orthonormal import Rows

Kept = TypeVar("Kept", bound="Rows")


def save(rows: "Rows", path: str | Path, facts: Mapping[str, Any]) -> Path:
    """See :meth:`Rows.save`."""
    store, path = rows.store, Path(path)

    def stored() -> Iterator[Tensor]:
        return (row for _, row, _ in store.stored())

    def scales() -> Iterator[Tensor]:
        return (scale for _, _, scale in store.stored() if scale is not None)

    tensors = {"rows": Pieces(rows.dtype, (rows.size, store.ld), stored)}
    if rows.dtype in LEVELS:
        tensors["scales"] = Pieces(torch.float32, (rows.size, -(-store.ld // BLOCK)), scales)
    others = {"gram": Pieces.of(rows.gram)}
    rows.space.save_rows(path, rows.kind, tensors, others, {"capacity": rows.capacity, **facts})
    return path


def load(
    make: type[Kept],
    path: str | Path,
    capacity: int | None,
    device: torch.device | str,
    tier: Tier | None,
    space: Space | None,
) -> Kept:
    """See :meth:`Rows.load`."""
    path = Path(path)
    with _opened(path, make.kind, space) as (space, tensors, facts):
        try:
            size, dtype = _described(space.width, tensors)
            gram = _gram(tensors["gram"])
            room = _whole_number(facts, "capacity")
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise StorageError(f"{path} does not describe a {make.kind}: {error}") from error
        room = max(room, size) if capacity is None else capacity
        if room < size:
            raise ValueError(f"{path} holds {size} rows; capacity={capacity} is too small")
        rows = make(space, room, dtype=dtype, device=device, tier=tier)
        rows.store.make_room(size)
        position = 0
        for piece in tensors["rows"].read():
            require_finite(path, "rows", piece)
            rows.store.write_rows(position, piece)
            position += piece.shape[0]
        position = 0
        for scales in tensors["scales"].read() if "scales" in tensors else ():
            require_finite(path, "scales", scales)
            rows.store.write_scales(position, scales)
            position += scales.shape[0]
    rows.restore(gram.to(rows.device))
    try:
        rows._recall(facts)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise StorageError(f"{path} does not describe a {make.kind}: {error}") from error
    return rows


@contextmanager
def _opened(
    path: Path, kind: str, space: Space | None
) -> Iterator[tuple[Space, dict[str, Pieces], dict[str, Any]]]:
    """The space, its share of the tensors, and the facts; by default whole vectors."""
    if space is not None:
        with space.open_rows(path, kind) as (tensors, facts):
            yield space, tensors, facts
        return
    refuse_shards(path)
    with open_pieces(path, kind) as (tensors, facts):
        try:
            whole = Whole(_whole_number(facts, "n"))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise StorageError(f"{path} does not describe a {kind}: {error}") from error
        yield whole, tensors, facts


def refuse_shards(path: Path) -> None:
    """Raise if ``path`` is a folder, where a file of whole vectors is to be read."""
    if path.is_dir():
        raise StorageError(
            f"{path} is a folder of shards: pass space=curvlab.distributed.Shards.saved(path) on "
            "every rank of a job, be it one"
        )


def _whole_number(facts: Mapping[str, Any], name: str) -> int:
    value = facts[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise TypeError(f"its {name} is {value!r}, not a whole number")
    return value


def _described(width: int, tensors: dict[str, Pieces]) -> tuple[int, torch.dtype]:
    """Size and dtype, having checked that tensors agree with each other and with the width."""
    rows = tensors["rows"]
    if len(rows.shape) != 2 or rows.shape[1] != padded(width):
        raise ValueError(f"its rows have shape {rows.shape}, which does not fit n={width}")
    size, dtype = rows.shape[0], rows.dtype
    if dtype not in STORAGE:
        raise ValueError(f"its rows are {dtype}")
    wanted = {"rows", "gram"} | ({"scales"} if dtype in LEVELS else set())
    if set(tensors) != wanted:
        raise ValueError(f"it holds {sorted(tensors)} instead of {sorted(wanted)}")
    blocks = -(-padded(width) // BLOCK)
    if dtype in LEVELS and tensors["scales"].shape != (size, blocks):
        raise ValueError(f"its scales have shape {tensors['scales'].shape}")
    if tensors["gram"].shape != (size, size) or tensors["gram"].dtype != torch.float64:
        raise ValueError(f"its Gram matrix has shape {tensors['gram'].shape}")
    return size, dtype


def _gram(stored: Pieces) -> Tensor:
    gram = stored.whole()
    if not bool(gram.isfinite().all()) or int(torch.linalg.cholesky_ex(gram).info) != 0:
        raise ValueError("its Gram matrix is not positive definite")
    return gram
