"""Which of torch's two libraries multiplies float32 matrices on this processor.

torch's own choice is MKL, which on AMD's processors leaves AVX-512 unused: a product of matrices
takes twice as long there as with oneDNN, torch's other library. The switch that hands float32
products to oneDNN also *allows* it to round their factors to bfloat16. Only processors with matrix
units (AMX) do that. So the switch is used where three things hold: the processor has AVX-512 and
is not Intel's, it has no matrix units, and a product that bfloat16 or TF32 would round comes
out exact. Everywhere else torch's choice stands.
"""

import contextlib
from collections.abc import Iterable, Iterator
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


def float32_switch(samples: int, parameters: Iterable[Tensor]) -> str:
    """What ``torch.backends.mkldnn.matmul.fp32_precision`` should be for exact float32 products.

    Args:
        samples: That pass through the network together.
        parameters: Of the network, frozen ones too.
    """
    matrices = [one.numel() for one in parameters if one.ndim > 1 and one.dtype == torch.float32]
    large = samples * sum(matrices) >= WORTHWHILE * len(matrices) > 0
    return _switch() if large else EXACT


@contextlib.contextmanager
def float32_products(switch: str) -> Iterator[None]:
    """Multiply float32 matrices as ``switch`` says, unless the caller has a choice of their own."""
    backends: Any = torch.backends
    matmul = backends.mkldnn.matmul
    before = matmul.fp32_precision
    if switch == EXACT or before not in ("none", EXACT):
        yield
        return
    matmul.fp32_precision = switch
    try:
        yield
    finally:
        matmul.fp32_precision = before


@cache
def _switch() -> str:
    backends: Any = torch.backends
    if not (backends.mkldnn.is_available() and backends.mkl.is_available()):
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
    of at most 22 bits stay below 2 ** 24.
    """
    generator = torch.Generator().manual_seed(0)
    wide = torch.randint(4097, 8192, (192, 256), generator=generator)
    narrow = torch.randint(257, 512, (256, 160), generator=generator)
    kept = (torch.arange(256) - torch.arange(192)[:, None]) % 64 == 0  # four in each row
    wide = wide * kept
    with float32_products(switch):
        found = wide.float() @ narrow.float()
        batched = wide.float().expand(2, -1, -1) @ narrow.float().expand(2, -1, -1)
    exact = (wide @ narrow).float()
    return torch.equal(found, exact) and all(torch.equal(one, exact) for one in batched)
