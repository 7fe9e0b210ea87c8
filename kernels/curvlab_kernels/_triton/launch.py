"""How kernels are launched, and how the audit listens in place of a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch: what a launcher would have sent to the GPU."""

    kernel: Any
    programs: int
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    options: dict[str, Any]


_record: ContextVar[list[Launch] | None] = ContextVar("record", default=None)


def launch(
    kernel: Any,
    programs: int,
    *arguments: Any,
    warps: int = 4,
    fp_fusion: bool = True,
    **constants: Any,
) -> None:
    """Run ``kernel`` on a one-dimensional grid (its limit is 2^31 - 1; the other axes' is 65535).

    Args:
        arguments: The first is a tensor, whose device is used.
        fp_fusion: Contract ``a * b + c`` to one rounding. Always given: Triton's default changes.
    """
    # One stage: the loops keep enough 128-bit loads in flight by themselves, and a software
    # pipeline would send them through shared memory.
    options = {"num_warps": warps, "num_stages": 1, "enable_fp_fusion": fp_fusion}
    record = _record.get()
    if record is not None:
        record.append(Launch(kernel, programs, arguments, constants, options))
        return
    device = arguments[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            kernel[(programs,)](*arguments, **constants, **options)
    else:
        kernel[(programs,)](*arguments, **constants, **options)


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Within it launches are listed and nothing runs, so tensors may be on the meta device."""
    launches: list[Launch] = []
    token = _record.set(launches)
    try:
        yield launches
    finally:
        _record.reset(token)
