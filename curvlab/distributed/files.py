"""Shards in a folder: written by some ranks, read by any number of others.

Each rank writes its columns to a file of its own (:mod:`curvlab.storage`: checksums, no pickle) in
a new subfolder; when all have, rank 0 names that subfolder in ``current.json``. A job that dies
while it saves leaves the state before. On loading, each rank reads the files that hold columns of
its own shard, in pieces: no rank ever holds all columns.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from curvlab.distributed.group import Group
from curvlab.storage import Pieces, StorageError, open_pieces, save_pieces, write_atomically

if TYPE_CHECKING:
    from curvlab.distributed.shards import Shards

CURRENT = "current.json"
KEPT = 2  # states: the current one and the one before


def seen_by_all(group: Group, path: Path) -> bool:
    """Whether the file ``path`` exists; raises if only some ranks see it."""
    seen = group.facts(path.is_file(), "a look for a saved state")
    if any(seen) and not all(seen):
        blind = [rank for rank, found in enumerate(seen) if not found]
        raise StorageError(f"ranks {blind} do not see {path}, others do: use a shared folder")
    return bool(seen[0])


def save(
    shards: "Shards",
    path: Path,
    kind: str,
    rows: Mapping[str, Tensor | Pieces],
    others: Mapping[str, Tensor | Pieces],
    facts: Mapping[str, Any],
) -> None:
    """Write a state to the folder ``path``; what was there counts until everything is written.

    Args:
        rows: Tensors whose columns are shared out: ``(m, width)``, or ``(m, width / 64)`` for
            scales.
        others: The same on every rank.
        facts: Rank 0's are kept.
    """
    group = shards.group
    number = max(group.facts(_newest(path), "saving")) + 1  # ranks may see the folder late
    folder = path / f"state-{number}"
    name = _name(group.rank, group.size)
    tensors = {**rows, **(others if group.rank == 0 else {})}
    manifest = {"n": shards.n, "width": shards.width, "facts": dict(facts), "rows": sorted(rows)}

    def write() -> None:
        save_pieces(folder / name, kind, {n: _pieces(t) for n, t in tensors.items()}, manifest)

    group.together(write, f"saving {path}")
    group.together(lambda: _commit(path, kind, shards, number), f"saving {path}")


def load(shards: "Shards", path: Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """This rank's columns of the rows, the other tensors whole, and the facts.

    Args:
        path: A folder that :func:`save` wrote, or one file of whole rows of the same kind.
    """
    return shards.group.together(lambda: _load(shards, path, kind), f"loading {path}")


def elements(path: str | Path) -> int:
    """``n`` of what is saved in the folder ``path``."""
    return int(_current(Path(path))["n"])


def _load(shards: "Shards", path: Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    current = _current(path)
    if current["kind"] != kind:
        raise StorageError(f"{path} holds a {current['kind']}, not a {kind}")
    if current["n"] != shards.n:
        raise StorageError(f"{path} holds vectors of {current['n']} elements, not {shards.n}")
    folder = path / current["folder"]
    found: dict[str, Tensor] = {}
    facts: dict[str, Any] = {}
    for rank in range(current["ranks"]):
        first = rank * current["width"]
        apart = first >= shards.start + shards.width or shards.start >= first + current["width"]
        if rank and apart:
            continue  # the first file holds the other tensors too
        with open_pieces(folder / _name(rank, current["ranks"]), kind) as (tensors, manifest):
            if rank == 0:
                facts = manifest["facts"]
            for name, pieces in tensors.items():
                if name in manifest["rows"]:
                    copy_columns(shards, pieces, first, current["width"], found, name)
                elif rank == 0:
                    found[name] = torch.cat([_empty(pieces), *pieces.read()])
    return found, facts


def copy_columns(
    shards: "Shards",
    pieces: Pieces,
    first: int,
    width: int,
    found: dict[str, Tensor],
    name: str,
) -> None:
    """Add to ``found[name]`` ``(m, width of a shard)`` what a file with other columns has of it.

    Args:
        first: Of the file's ``width`` elements, in the whole vector.
    """
    unit = width // pieces.shape[1]  # elements per column: 64 for scales
    mine = shards.width // unit
    if name not in found:
        found[name] = torch.zeros(pieces.shape[0], mine, dtype=pieces.dtype)
    low, high = max(first, shards.start), min(first + width, shards.start + shards.held)
    if low >= high:
        return
    source = slice((low - first) // unit, -(-(high - first) // unit))
    start = (low - shards.start) // unit
    target = slice(start, start + source.stop - source.start)
    row = 0
    for piece in pieces.read():
        found[name][row : row + piece.shape[0], target] = piece[:, source]
        row += piece.shape[0]


def _commit(path: Path, kind: str, shards: "Shards", number: int) -> None:
    if shards.group.rank:
        return
    current = {
        "kind": kind,
        "folder": f"state-{number}",
        "ranks": shards.group.size,
        "n": shards.n,
        "width": shards.width,
    }
    write_atomically(path / CURRENT, lambda file: Path(file).write_text(json.dumps(current)))
    for old in sorted(_states(path))[:-KEPT]:
        shutil.rmtree(path / f"state-{old}")


def _current(path: Path) -> dict[str, Any]:
    try:
        current: dict[str, Any] = json.loads((path / CURRENT).read_text())
        ints = {name: int(current[name]) for name in ("ranks", "n", "width")}
        return {"kind": str(current["kind"]), "folder": Path(current["folder"]).name, **ints}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{path} is not a folder of shards: {error}") from error


def _states(path: Path) -> Iterator[int]:
    for folder in path.glob("state-*"):
        number = folder.name.removeprefix("state-")
        if number.isdigit():
            yield int(number)


def _newest(path: Path) -> int:
    return max(_states(path), default=0)


def _name(rank: int, ranks: int) -> str:
    return f"shard-{rank:05d}-of-{ranks:05d}.safetensors"


def _empty(pieces: Pieces) -> Tensor:
    return torch.zeros((0, *pieces.shape[1:]), dtype=pieces.dtype)


def _pieces(tensor: Tensor | Pieces) -> Pieces:
    if isinstance(tensor, Pieces):
        return tensor
    return Pieces(tensor.dtype, tuple(tensor.shape), _once(tensor))


def _once(tensor: Tensor) -> Callable[[], list[Tensor]]:
    return lambda: [tensor]
