"""Host memory that a GPU copies from by itself: ordinary memory, registered with its driver.

torch's own pinned allocations are rounded up to a power of two: rows of 17 GB would lock 32. What
is registered here is rounded up to pages.
"""

import mmap
import weakref
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


class Runtime(Protocol):
    """What is used of CUDA's runtime; ``torch.cuda.cudart()`` is one."""

    def cudaHostRegister(self, pointer: int, size: int, flags: int, /) -> object: ...
    def cudaHostUnregister(self, pointer: int, /) -> object: ...


def locked(size: int, runtime: Runtime, wait: Callable[[], object]) -> Tensor:
    """``size`` zero bytes on pages of their own, locked until the last view of them is gone.

    Args:
        runtime: Locks and unlocks; it answers 0 if it could.
        wait: Ends when no copy is under way any more. Called before the memory is given back:
            whoever drops rows does not know whether a stream still reads them.
    """
    page = mmap.PAGESIZE
    whole = -(-max(size, 1) // page) * page
    holder = np.zeros(whole + page, np.uint8)
    begin = -holder.ctypes.data % page
    data = holder[begin : begin + whole]
    pointer = data.ctypes.data
    code = int(runtime.cudaHostRegister(pointer, whole, 0))  # type: ignore[call-overload]
    if code:
        raise MemoryError(
            f"{size / 1e9:.2f} GB of host memory cannot be page-locked (CUDA error {code}): raise "
            "the limit (ulimit -l), keep fewer rows, store them in a narrower dtype, or use "
            "MappedFile(folder)"
        )

    def release() -> None:
        wait()
        runtime.cudaHostUnregister(pointer)

    # Called before numpy frees the memory. Not at the end of the process: the driver may be gone.
    weakref.finalize(holder, release).atexit = False
    return torch.from_numpy(data[:size])
