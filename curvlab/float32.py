"""Which of torch's two libraries multiplies float32 matrices on this processor.

torch's own choice is MKL, which on AMD's processors leaves AVX-512 unused: a product of matrices
takes twice as long there as with oneDNN, torch's other library. The switch that hands float32
products to oneDNN also *allows* it to round their factors to bfloat16. Only processors with matrix
units (AMX) do that. So the switch is used where three things hold: the processor has AVX-512 and
is not Intel's, it has no matrix units, and a product that bfloat16 or TF32 would round comes
out exact. Everywhere else torch's choice stands.
"""

import contextlib
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

EXACT = "ieee"  # torch's switch: no rounding, MKL
ONEDNN = "bf16"  # torch's switch: oneDNN, which may round


# Multiplications of a matrix product from which on oneDNN is the faster one: it takes 10 to 25
# microseconds more to begin (MLPs of 165 to 18,010 parameters on 100 to 1,000 samples).
WORTHWHILE = 2_000_000


def float32_switch(samples: int, parameters: Iterable[Tensor], dtype: torch.dtype) -> str:
    """What ``torch.backends.mkldnn.matmul.fp32_precision`` should be for exact float32 products.

    Args:
        samples: That pass through the network together.
        parameters: Of the network, frozen ones too; whole ones where they are in shards.
        dtype: In which it is computed.
    """
    if dtype != torch.float32:
        return EXACT
    matrices = [one.numel() for one in parameters if one.ndim > 1]
    large = samples * sum(matrices) >= WORTHWHILE * len(matrices) > 0
    return _switch() if large else EXACT


class Switch:
    """One of torch's settings ``fp32_precision``, for contexts that overlap.

    torch has one for all threads. The last context to end puts back what the caller had, whatever
    the order in which those of several threads end. While two of them ask for different values,
    the later one has its way: on a CPU that decides about speed and the last bits only.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._lock = threading.RLock()  # a signal may come while it is held
        self._wanted: list[Wanted] = []
        self._before = ""

    @property
    def value(self) -> str:
        """The present setting."""
        found: str = self._backend.fp32_precision
        return found

    @property
    def callers(self) -> str:
        """The setting outside of all contexts."""
        with self._lock:
            return self._before if self._wanted else self.value

    @contextlib.contextmanager
    def set_to(self, value: str) -> Iterator[None]:
        """Have it so in the context."""
        wanted = Wanted(value)
        try:
            self.take(wanted)
            yield
        finally:
            self.give_back(wanted)

    def take(self, wanted: "Wanted") -> None:
        """Have it so until it is given back."""
        with self._lock:
            present = self.value
            if not self._wanted:
                self._before = present
            self._wanted.append(wanted)
            self._write(wanted.value, present)

    def give_back(self, wanted: "Wanted") -> None:
        """What is still wanted, or else was there before, stands again."""
        with self._lock:
            if wanted in self._wanted:  # else an interrupt came first
                self._wanted.remove(wanted)
                left = self._wanted[-1].value if self._wanted else self._before
                self._write(left, self.value)

    def _write(self, value: str, present: str) -> None:
        if present != value and (present, value) != ("none", EXACT):
            self._backend.fp32_precision = value


@dataclass(slots=True, eq=False)  # not frozen: three are made for each product
class Wanted:
    """What one context wants of a switch; told from all others, equal ones too."""

    value: str


_backends: Any = torch.backends
MATMUL = Switch(_backends.mkldnn.matmul)
SWITCHES = {
    "cpu": (MATMUL, Switch(_backends.mkldnn.conv), Switch(_backends.mkldnn.rnn)),
    "cuda": (
        Switch(_backends.cuda.matmul),
        Switch(_backends.cudnn.conv),
        Switch(_backends.cudnn.rnn),
    ),
}


@contextlib.contextmanager
def float32_products(switch: str) -> Iterator[None]:
    """Multiply float32 matrices as ``switch`` says, unless the caller has a choice of their own."""
    if switch == EXACT or MATMUL.callers not in ("none", EXACT):
        yield
        return
    with MATMUL.set_to(switch):
        yield


@cache
def _switch() -> str:
    if not (_backends.mkldnn.is_available() and _backends.mkl.is_available()):
        return EXACT
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return EXACT  # oneDNN is not asked there
    described = _described()
    if not described or "GenuineIntel" in described or "amx" in described:
        return EXACT
    return ONEDNN if _exact_with(ONEDNN) else EXACT


def _described() -> str:
    """Maker and features of the processor; empty where the system does not say."""
    information = Path("/proc/cpuinfo")
    if not information.is_file():
        return ""
    lines = information.read_text().split("\n\n", 1)[0].splitlines()
    return "\n".join(line for line in lines if line.startswith(("vendor_id", "flags")))


def _exact_with(switch: str) -> bool:
    """Whether products of whole numbers that float32 holds exactly come out so.

    The factors have 13 and 9 significant bits, of which TF32 keeps 11 and bfloat16 8. Four terms
    of at most 22 bits stay below 2 ** 24. What is found holds for the whole process: the caller's
    own switch, autocast and default device must not be part of it.
    """
    with (
        torch.device("cpu"),
        torch.autocast("cpu", enabled=False),
        torch.inference_mode(False),
        MATMUL.set_to(switch),
    ):
        generator = torch.Generator().manual_seed(0)
        wide = torch.randint(4097, 8192, (192, 256), generator=generator)
        narrow = torch.randint(257, 512, (256, 160), generator=generator)
        kept = (torch.arange(256) - torch.arange(192)[:, None]) % 64 == 0  # four in each row
        wide = wide * kept
        found = wide.float() @ narrow.float()
        batched = wide.float().expand(2, -1, -1) @ narrow.float().expand(2, -1, -1)
        exact = (wide @ narrow).float()
        return torch.equal(found, exact) and all(torch.equal(one, exact) for one in batched)
