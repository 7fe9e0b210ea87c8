"""Shards in a folder: written by some ranks, read by any number of others.

Each rank writes its columns to a file of its own (:mod:`curvlab.storage`: checksums, no pickle) in
a new subfolder; when all have, rank 0 names that subfolder in ``current.json``. A job that dies
while it saves leaves the state before. On loading, each rank reads the files that hold columns of
its own shard, in pieces: no rank ever holds all columns.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from curvlab_kernels.formats import BLOCK, padded
from torch import Tensor

from curvlab.distributed.group import Group
from curvlab.manifest import fits
from curvlab.storage import (
    Pieces,
    StorageError,
    open_pieces,
    read_manifest,
    save_pieces,
    write_atomically,
)

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
    given = {**rows, **(others if group.rank == 0 else {})}
    tensors = {n: t if isinstance(t, Pieces) else Pieces.of(t) for n, t in given.items()}
    manifest = {"n": shards.n, "width": shards.width, "facts": dict(facts), "rows": sorted(rows)}

    def write() -> None:
        save_pieces(folder / name, kind, tensors, manifest)

    group.together(write, f"saving {path}")
    group.together(lambda: _commit(path, kind, shards, number), f"saving {path}")


def load(shards: "Shards", path: Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """This rank's columns of the rows, the other tensors whole, and the facts.

    Args:
        path: A folder that :func:`save` wrote, or one file of whole rows of the same kind.
    """
    return shards.group.together(lambda: _load(shards, path, kind), f"loading {path}")


def elements(path: str | Path) -> int:
    """``n`` of what is saved in the folder ``path``, or of a file of whole rows."""
    path = Path(path)
    if path.is_file():
        n = read_manifest(path).get("n")
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise StorageError(f"{path} does not say how long its vectors are")
        return n
    return int(_current(path)["n"])


def _load(shards: "Shards", path: Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    with _opened(shards, path, kind) as (tensors, facts):
        return {name: pieces.whole() for name, pieces in tensors.items()}, facts


@contextmanager
def open_rows(
    shards: "Shards", path: Path, kind: str
) -> Iterator[tuple[dict[str, Pieces], dict[str, Any]]]:
    """This rank's columns of rows, to be read in pieces, and the facts; every rank calls this.

    Args:
        path: A folder that ``save_rows`` wrote on any number of ranks, or one file of whole rows.
    """
    with ExitStack() as stack:

        def enter() -> tuple[dict[str, Pieces], dict[str, Any]]:
            if path.is_file():
                opened = _whole(shards, path, kind)
            else:
                opened = _opened(shards, path, f"sharded {kind}")
            return stack.enter_context(opened)

        yield shards.group.together(enter, f"loading {path}")


@contextmanager
def _opened(
    shards: "Shards", path: Path, kind: str
) -> Iterator[tuple[dict[str, Pieces], dict[str, Any]]]:
    """This rank's columns of the folder ``path``, the other tensors whole, and the facts."""
    current = _current(path)
    if current["kind"] != kind:
        raise StorageError(f"{path} holds a {current['kind']}, not a {kind}")
    if current["n"] != shards.n:
        raise StorageError(f"{path} holds vectors of {current['n']} elements, not {shards.n}")
    folder, width, ranks = path / current["folder"], current["width"], current["ranks"]
    first, last = shards.start // width, (shards.start + max(shards.held, 1) - 1) // width
    with ExitStack() as stack:

        def file(rank: int) -> tuple[dict[str, Pieces], dict[str, Any]]:
            return stack.enter_context(open_pieces(folder / _name(rank, ranks), kind))

        opened = {rank: file(rank) for rank in sorted({0, *range(first, min(last + 1, ranks))})}
        tensors, manifest = opened[0]  # the first file holds the other tensors too
        _require_rows(path, opened)
        found = {name: t for name, t in tensors.items() if name not in manifest["rows"]}
        for name in manifest["rows"]:
            parts = [(rank * width, width, file[name]) for rank, (file, _) in opened.items()]
            found[name] = columns(shards, parts)
        yield found, manifest["facts"]


def _require_rows(
    path: Path, opened: Mapping[int, tuple[dict[str, Pieces], dict[str, Any]]]
) -> None:
    """Raise unless all files have the same rows, as the first one's manifest says."""
    first, manifest = opened[0]
    names: Any = manifest.get("rows")
    if not fits(names, [str]) or not isinstance(manifest.get("facts"), dict):
        raise StorageError(f"{path} does not say what its tensors are: it is damaged")
    for rank, (tensors, _) in opened.items():
        for name in names:
            shape = tensors[name].shape if name in tensors else ()
            if name not in first or len(shape) != 2 or shape != first[name].shape:
                raise StorageError(f"{path}: the file of rank {rank} has other rows {name!r:.40}")


@contextmanager
def _whole(
    shards: "Shards", path: Path, kind: str
) -> Iterator[tuple[dict[str, Pieces], dict[str, Any]]]:
    """This rank's columns of a file of whole rows."""
    with open_pieces(path, kind) as (tensors, facts):
        ld = padded(shards.n)
        widths = {"rows": ld, "scales": -(-ld // BLOCK) * BLOCK, "vectors": shards.n}
        yield (
            {
                name: columns(shards, [(0, widths[name], t)]) if name in widths else t
                for name, t in tensors.items()
            },
            facts,
        )


def columns(shards: "Shards", parts: list[tuple[int, int, Pieces]]) -> Pieces:
    """This rank's columns ``(m, width of a shard)`` of a tensor that files have parts of.

    Args:
        parts: First element of a file's columns in the whole vector, how many elements they stand
            for, and the columns. All have the same rows in every piece.
    """
    _, width, sample = parts[0]
    unit = max(width // max(sample.shape[1], 1), 1)  # elements per column: 64 for scales
    mine = shards.width // unit

    def cut(first: int, width: int) -> tuple[slice, slice] | None:
        low, high = max(first, shards.start), min(first + width, shards.start + shards.held)
        if low >= high:
            return None
        source = slice((low - first) // unit, -(-(high - first) // unit))
        start = (low - shards.start) // unit
        return source, slice(start, start + source.stop - source.start)

    def read() -> Iterator[Tensor]:
        wanted = [(where, t) for first, w, t in parts if (where := cut(first, w)) is not None]
        if not wanted:
            yield torch.zeros(sample.shape[0], mine, dtype=sample.dtype)
            return
        for pieces in zip(*(t.read() for _, t in wanted), strict=True):
            found = torch.zeros(len(pieces[0]), mine, dtype=sample.dtype)
            for piece, ((source, target), _) in zip(pieces, wanted, strict=True):
                found[:, target] = piece[:, source]
            yield found

    return Pieces(sample.dtype, (sample.shape[0], mine), read)


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
        ints = {name: current[name] for name in ("ranks", "n", "width")}
        if any(type(value) is not int or value < 1 for value in ints.values()):
            raise ValueError(f"{ints} are not sizes")
        if ints["ranks"] * ints["width"] < ints["n"]:
            raise ValueError(f"{ints}: the shards do not make up a vector")
        return {"kind": str(current["kind"]), "folder": Path(current["folder"]).name, **ints}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
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
