"""Tiles and numbers of programs by architecture: all that launches choose for the sake of speed.

Chosen from the compiler's output and the model of ``audit.cost``, because there was no GPU to
measure on. On a GPU ``python -m curvlab_kernels.audit.tune`` measures and writes such a table for
it, and :func:`use` takes it. Another tile adds in another order: results are the same bits on all
devices with the same table, not across tables.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import triton.language as tl

ARCHITECTURES = (80, 90, 100)
SHORT = 65536  # columns of a vector whose tiles are made small so that they reach all processors


class Tile(NamedTuple):
    """Rows and columns, both powers of two, and the warps that share them.

    Attributes:
        registers: That a thread may take; 0 leaves it to the compiler, which rather spills a few
            than lets one block less on a processor.
    """

    rows: int
    columns: int
    warps: int
    registers: int = 0


PLAIN = Tile(1, 1, 4)  # for kernels that have no tiles


class Use(NamedTuple):
    """What a tile is for: a pass, bytes of a stored element, bytes of the arithmetic.

    Passes: ``dot`` (inner products with one vector), ``dots`` (with four), ``dot short`` (with a
    short vector, or few rows), ``list`` (with a list of tensors), ``sum`` (``M' c``), ``sums``
    (for four vectors) and ``sum short`` (rows split over the threads of a program).
    """

    name: str
    stored: int
    work: int


def _common() -> dict[Use, Tile]:
    """The table for every architecture.

    A thread loads 16 bytes of a row at a time. Inner products of 2 and 4 bytes: a thread has 16 to
    64 sums in registers and exchanges nothing until its chunk is done. One-byte codes: a warp is a
    program, so that no scale and no piece of the vector waits for other warps, with 8 rows for
    one piece. ``M' c``: all rows of a tile are summed within a thread.
    """
    tiles: dict[Use, Tile] = {}
    for stored in (1, 2, 4, 8):
        wide = 16 // stored  # elements of one load
        for work in (4, 8):
            tiles[Use("dot", stored, work)] = Tile(32, 128, 4) if work == 4 else Tile(16, 128, 4)
            tiles[Use("dots", stored, work)] = Tile(16, 128, 4) if work == 4 else Tile(8, 128, 4)
            columns = 512 if work == 4 else 256 if stored == 1 else 128
            tiles[Use("dot short", stored, work)] = Tile(8, columns, 4)
            tiles[Use("list", stored, work)] = Tile(16, 128, 4)
            rows = 8 if work == 4 else max(1, 16 // wide)
            tiles[Use("sum", stored, work)] = Tile(rows, 128 * wide, 4)
            tiles[Use("sums", stored, work)] = Tile(max(1, 16 // wide), 128 * wide, 4)
            tiles[Use("sum short", stored, work)] = Tile(wide, 128, 4)
    tiles[Use("list", 2, 4)], tiles[Use("list", 4, 4)] = Tile(32, 128, 4), Tile(8, 512, 4)
    tiles[Use("dot", 1, 4)] = tiles[Use("dot short", 1, 4)] = Tile(8, 512, 1)
    tiles[Use("dots", 1, 8)] = Tile(8, 256, 4)
    tiles[Use("dots", 1, 4)], tiles[Use("dots", 2, 4)] = Tile(8, 512, 4), Tile(16, 128, 4, 168)
    tiles[Use("sums", 1, 4)], tiles[Use("sums", 4, 4)] = Tile(1, 2048, 4, 168), Tile(4, 512, 4, 96)
    tiles[Use("list", 1, 4)] = Tile(8, 512, 1)
    tiles[Use("sum", 1, 4)] = Tile(4, 512, 1, 128)
    tiles[Use("list", 8, 8)], tiles[Use("sums", 8, 8)] = Tile(16, 128, 4, 160), Tile(8, 256, 4, 200)
    tiles[Use("dot short", 8, 8)] = Tile(8, 128, 4, 128)
    return tiles


@dataclass(frozen=True, slots=True)
class Shapes:
    """The choices for one architecture.

    Attributes:
        tiles: By use; those that a measured table leaves out are the common ones.
        warps: In all programs of a first pass, for long vectors: several times what a GPU holds.
        least: Tiles of a program, as far as there are any: so many pay for its start and its end.
    """

    tiles: Mapping[Use, Tile] = field(default_factory=_common)
    warps: int = 8192
    least: int = 4


_table = {architecture: Shapes() for architecture in ARCHITECTURES}


def architecture(device: torch.device) -> int:
    """The entry of the table for ``device``; the first one where there is no GPU."""
    if device.type != "cuda":
        return ARCHITECTURES[0]
    major, minor = torch.cuda.get_device_capability(device)
    return max((each for each in ARCHITECTURES if each <= 10 * major + minor), default=80)


def shapes(device: torch.device) -> Shapes:
    return _table[architecture(device)]


def tile(name: str, rows: torch.Tensor, work: tl.dtype) -> Tile:
    """The tile of the pass ``name`` over stored ``rows``."""
    use = Use(name, rows.dtype.itemsize, work.primitive_bitwidth // 8)
    return shapes(rows.device).tiles[use]


@contextmanager
def using(chosen: Shapes) -> Iterator[None]:
    """Within it ``chosen`` stands for every architecture."""
    kept = dict(_table)
    _table.update(dict.fromkeys(ARCHITECTURES, chosen))
    try:
        yield
    finally:
        _table.update(kept)


def save(path: str | Path, of: int, chosen: Shapes) -> None:
    """Write the choices for architecture ``of``, such as 90, as JSON."""
    tiles = {f"{use.name}, {use.stored}, {use.work}": each for use, each in chosen.tiles.items()}
    found = {"architecture": of, "warps": chosen.warps, "least": chosen.least, "tiles": tiles}
    Path(path).write_text(json.dumps(found, indent=1))


def use(path: str | Path) -> None:
    """From now on take the choices of a file that ``audit.tune`` wrote, on its architecture."""
    try:
        found = json.loads(Path(path).read_text())
        of, numbers = found["architecture"], (found["warps"], found["least"])
        given = {_use(name): Tile(*each) for name, each in found["tiles"].items()}
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is no table of launch shapes ({error}): write one on the GPU with "
            "`python -m curvlab_kernels.audit.tune`"
        ) from error
    common = _common()
    for name, each in given.items():
        powers = all(isinstance(x, int) and x > 0 and x & (x - 1) == 0 for x in each[:3])
        fits = powers and each.columns >= 128 and each.warps <= 32
        if name not in common or not fits or each.registers not in range(256):
            raise ValueError(
                f"{path}: no launch can take {each} for {name}; tiles are powers of two, of at "
                "least 128 columns and at most 32 warps, and threads have 255 registers"
            )
    if of not in ARCHITECTURES or not all(isinstance(x, int) and x > 0 for x in numbers):
        raise ValueError(f"{path}: architecture {of} and numbers {numbers} are out of range")
    _table[of] = Shapes(common | given, *numbers)


def _use(name: str) -> Use:
    words = name.split(", ")
    return Use(words[0], int(words[1]), int(words[2]))
