"""How kernels are launched, and how the audit steps in for a GPU."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from curvlab_kernels._triton.shapes import PLAIN, Tile


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch: what a launcher would have sent to the GPU.

    Attributes:
        reaches: Tensors that the kernel finds by addresses in a table, not by its arguments.
    """

    kernel: Any
    programs: int
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    options: dict[str, Any]
    reaches: tuple[torch.Tensor, ...] = ()


_instead: ContextVar[Callable[[Launch], object] | None] = ContextVar("instead", default=None)


def launch(
    kernel: Any,
    programs: int,
    *arguments: Any,
    tile: Tile = PLAIN,
    fp_fusion: bool = True,
    reaches: Sequence[torch.Tensor] = (),
    **constants: Any,
) -> None:
    """Run ``kernel`` on a one-dimensional grid (its limit is 2^31 - 1; the other axes' is 65535).

    Args:
        arguments: The first is a tensor, whose device is used.
        tile: For its warps and registers; the kernel's constants have its rows and columns.
        fp_fusion: Contract ``a * b + c`` to one rounding. Always given: Triton's default changes.
        reaches: Tensors whose addresses the kernel reads from a table.
    """
    # One stage: the loops keep enough 128-bit loads in flight by themselves, and a software
    # pipeline would send them through shared memory.
    options = {"num_warps": tile.warps, "num_stages": 1, "enable_fp_fusion": fp_fusion}
    if tile.registers:
        options["maxnreg"] = tile.registers
    instead = _instead.get()
    if instead is not None:
        instead(Launch(kernel, programs, arguments, constants, options, tuple(reaches)))
        return
    device = arguments[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            kernel[(programs,)](*arguments, **constants, **options)
    else:
        kernel[(programs,)](*arguments, **constants, **options)


@contextmanager
def handed_to(function: Callable[[Launch], object]) -> Iterator[None]:
    """Within it launches go to ``function`` and not to a GPU."""
    token = _instead.set(function)
    try:
        yield
    finally:
        _instead.reset(token)


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Within it launches are listed and nothing runs, so tensors may be on the meta device."""
    launches: list[Launch] = []
    with handed_to(launches.append):
        yield launches
