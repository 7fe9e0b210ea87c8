"""Where rows live: on the device, in pinned host memory, or in a file.

A tier allocates slabs of rows, and says how many rows pass through the device at a time. Rows are
computed on in pieces of slabs, whose origin does not matter.
"""

import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from curvlab_kernels.formats import BLOCK, LEVELS
from torch import Tensor

from curvlab.rows.locked import locked
from curvlab.rows.sizes import row_bytes
from curvlab.storage import StorageError

ALIGNMENT = 64  # bytes, of what torch allocates
PIECE_BYTES = 1 << 28  # of rows in flight, when they do not all stay on the device


@dataclass(frozen=True, slots=True)
class Slab:
    """Memory for some rows: ``rows`` ``(c, ld)``, ``scales`` ``(c, ceil(ld / 64))`` or ``None``."""

    rows: Tensor
    scales: Tensor | None

    def head(self, count: int) -> "Slab":
        """A copy of the first ``count`` rows."""
        scales = None if self.scales is None else self.scales[:count].clone()
        return Slab(self.rows[:count].clone(), scales)


class Tier(Protocol):
    """What rows ask of the place that holds them."""

    @property
    def resident(self) -> bool:
        """Whether all rows are always at hand, so that whole slabs are computed on at once."""
        ...

    def allocate(self, count: int, ld: int, dtype: torch.dtype, device: torch.device) -> Slab:
        """Zeroed memory for ``count`` rows of ``ld`` elements that ``device`` computes on."""
        ...


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Rows in the memory of the device that computes on them."""

    resident: bool = True

    def allocate(self, count: int, ld: int, dtype: torch.dtype, device: torch.device) -> Slab:
        return _plain(count, ld, dtype, device)


@dataclass(frozen=True, slots=True)
class PinnedHost:
    """Rows in page-locked host memory; pieces are copied to the device ahead of their use.

    It takes the rows' bytes, in whole pages, of the host's memory and two pieces of at most
    ``PIECE_BYTES`` of the device's. For a basis on the CPU this is ordinary memory.
    """

    resident: bool = False

    def allocate(self, count: int, ld: int, dtype: torch.dtype, device: torch.device) -> Slab:
        if device.type != "cuda":
            return _plain(count, ld, dtype, torch.device("cpu"))
        wait = partial(torch.cuda.synchronize, device)
        data = locked(count * row_bytes(ld, dtype), torch.cuda.cudart(), wait)  # type: ignore[no-untyped-call]
        return _slab(data, count, ld, dtype)


@dataclass(frozen=True, slots=True)
class MappedFile:
    """Rows in files of ``folder``, mapped into memory: the basis may be larger than the memory.

    The files are scratch space, without a name once they are mapped: their room on disk is free
    again when the basis is. :meth:`Basis.save` writes a file to keep. A disk without room is
    reported when rows are allocated.
    """

    folder: str | Path
    resident: bool = False

    def allocate(
        self,
        count: int,
        ld: int,
        dtype: torch.dtype,
        device: torch.device,  # noqa: ARG002 (every tier has one signature)
    ) -> Slab:
        data = _mapped(Path(self.folder), count * row_bytes(ld, dtype))
        return _slab(data, count, ld, dtype)


def pieces(
    slab: Slab, used: int, device: torch.device, resident: bool
) -> Iterator[tuple[int, Tensor, Tensor | None]]:
    """The first ``used`` rows of a slab on ``device``: index of the first, rows, scales.

    All at once if they are resident; otherwise few enough at a time to fit beside other work, the
    next piece being copied while the current one is used.
    """
    if used == 0:
        return
    row_size = slab.rows.shape[1] * slab.rows.itemsize
    at_once = used if resident else max(1, PIECE_BYTES // row_size)
    cuts = [slice(start, min(start + at_once, used)) for start in range(0, used, at_once)]
    if slab.rows.device == device:
        for cut in cuts:
            yield cut.start, slab.rows[cut], None if slab.scales is None else slab.scales[cut]
    else:
        yield from _copied_ahead(slab, cuts, device)


def _copied_ahead(
    slab: Slab, cuts: list[slice], device: torch.device
) -> Iterator[tuple[int, Tensor, Tensor | None]]:
    """Pieces on a device: two buffers, a copy stream, and events in both directions."""
    copying = torch.Stream(device)
    computing = torch.accelerator.current_stream(device)
    buffers = [_like(slab, cuts[0], device) for _ in cuts[:2]]
    arrived, consumed = ([torch.Event(device) for _ in buffers] for _ in range(2))
    copying.wait_stream(computing)  # the buffers' memory may still be in use by earlier work

    def copy(index: int) -> None:
        which = index % 2
        with copying:
            if index >= 2:
                copying.wait_event(consumed[which])
            _copy_ahead(slab, cuts[index], buffers[which])
            arrived[which].record(copying)

    try:
        copy(0)
        for index, cut in enumerate(cuts):
            if index + 1 < len(cuts):
                copy(index + 1)
            which, count = index % 2, cut.stop - cut.start
            computing.wait_event(arrived[which])
            rows, scales = buffers[which].rows, buffers[which].scales
            yield cut.start, rows[:count], None if scales is None else scales[:count]
            consumed[which].record(computing)
    finally:
        # Whoever stops half-way, by an error for one, frees the buffers under a copy: their memory
        # is used again only after it, because later work of the computing stream waits for it.
        computing.wait_stream(copying)


def _like(slab: Slab, cut: slice, device: torch.device) -> Slab:
    rows = torch.empty_like(slab.rows[cut], device=device)
    scales = None if slab.scales is None else torch.empty_like(slab.scales[cut], device=device)
    return Slab(rows, scales)


def _copy_ahead(slab: Slab, cut: slice, buffer: Slab) -> None:
    count = cut.stop - cut.start
    buffer.rows[:count].copy_(slab.rows[cut], non_blocking=True)
    if buffer.scales is not None and slab.scales is not None:
        buffer.scales[:count].copy_(slab.scales[cut], non_blocking=True)


def _plain(count: int, ld: int, dtype: torch.dtype, device: torch.device) -> Slab:
    """Zeros whose memory is touched, on a CPU, only when a row is written: many never are."""
    size = count * row_bytes(ld, dtype)
    if device.type != "cpu":
        return _slab(torch.zeros(size, dtype=torch.uint8, device=device), count, ld, dtype)
    try:
        data = torch.from_numpy(np.zeros(size + ALIGNMENT, np.uint8))
    except MemoryError as error:
        raise MemoryError(
            f"no memory for {count} rows of {ld} elements in {dtype}, {size / 1e9:.1f} GB: keep "
            "fewer, store them in a narrower dtype, or use MappedFile(folder)"
        ) from error
    start = -data.data_ptr() % ALIGNMENT
    return _slab(data[start : start + size], count, ld, dtype)


def _slab(data: Tensor, count: int, ld: int, dtype: torch.dtype) -> Slab:
    """Bytes ``data`` as a slab: its rows, then their scales."""
    split = count * ld * dtype.itemsize
    rows, scales = data[:split].view(dtype).view(count, ld), None
    if dtype in LEVELS:
        scales = data[split:].view(torch.float32).view(count, -(-ld // BLOCK))
    return Slab(rows, scales)


def _mapped(folder: Path, size: int) -> Tensor:
    """A new file of ``size`` zero bytes in ``folder``, mapped as a uint8 tensor ``(size,)``."""
    path = folder / f"basis-{uuid.uuid4().hex}.raw"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            if hasattr(os, "posix_fallocate"):
                # Reserved now: a write to a mapped page without room on disk kills the process.
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.truncate(size)
        data = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
    except (OSError, RuntimeError) as error:
        path.unlink(missing_ok=True)
        raise StorageError(
            f"no room for {size} bytes of a basis in {folder}: {error}. Use another folder, a "
            "narrower dtype or fewer rows"
        ) from error
    if os.name == "posix":
        path.unlink()  # the mapping keeps the space; it is freed with the basis, even after a crash
    return data
