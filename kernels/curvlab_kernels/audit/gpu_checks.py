"""The checks that ``gpu_check`` runs on a GPU, each by its name.

A check raises ``AssertionError``, or returns what it measured in words. Times are in ``gpu_grid``.
"""

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from curvlab_kernels.audit.agreement import STORAGE, checks
from curvlab_kernels.formats import padded, quantise

LONG = 12_400_003

Timer = Callable[[Callable[[], object], torch.device], float]


def table() -> dict[str, Callable[[torch.device], str]]:
    """Every check by name; which dtypes the device has is known to the check."""
    found: dict[str, Callable[[torch.device], str]] = {
        check.name: partial(_silent, check.run) for check in checks()
    }
    found["addresses beyond 2^31"] = far_addresses
    found["tensors that move"] = moving_tensors
    found["another device"] = another_device
    found["leak and orthogonality"] = partial(accuracy, LONG, 20)
    for dtype in STORAGE:
        name = str(dtype).removeprefix("torch.")
        found[f"repeatable {name}"] = partial(repeatable, LONG, 20, dtype)
    return found


def agreement(device: torch.device) -> str:
    """All comparisons with the reference in one process, for a sanitizer to watch."""
    ran = 0
    for check in checks():
        if available(check.name, device):
            check.run(device)
            ran += 1
    return f"{ran} checks"


def available(name: str, device: torch.device) -> bool:
    """Whether the device has the dtype that a check is named after."""
    from curvlab_kernels._triton.tiles import storage_dtypes

    if "e4m3" not in name or device.type != "cuda":
        return True
    return torch.float8_e4m3fn in storage_dtypes(device)


def _silent(run: Callable[[torch.device], None], device: torch.device) -> str:
    run(device)
    return ""


def problem(
    n: int, m: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Rows that are orthonormal up to their storage, scales, and a vector; on the device."""
    from curvlab_kernels import _triton

    place = device if device.type == "cuda" else torch.device("cpu")
    generator = torch.Generator(place).manual_seed(0)
    work = torch.float64 if dtype == torch.float64 else torch.float32
    rows = torch.zeros(m, padded(n), device=device, dtype=work)
    rows[:, :n] = torch.randn(m, n, generator=generator, device=place, dtype=work)
    block = rows[:, :n].contiguous()
    _triton.orthonormalise_block_(rows[:0], block)
    stored, scales = quantise(block, dtype)
    vector = torch.randn(n, generator=generator, device=place, dtype=work).to(device)
    return stored, scales, vector


def repeatable(n: int, m: int, dtype: torch.dtype, device: torch.device) -> str:
    """The same bits in five runs."""
    from curvlab_kernels import _triton

    rows, scales, vector = problem(n, m, dtype, device)
    first, first_removed = vector.clone(), None
    for run in range(5):
        again = vector.clone()
        removed = _triton.project_(rows, again, None, scales)
        if run == 0:
            first, first_removed = again, removed
        assert first_removed is not None
        assert torch.equal(removed, first_removed), f"coefficients of run {run} differ"
        assert torch.equal(again, first), f"the vector of run {run} differs"
    return ""


def accuracy(n: int, m: int, device: torch.device) -> str:
    """Leak of a projection and orthogonality of an orthonormalised block at full length."""
    from curvlab_kernels import _triton

    rows, _, vector = problem(n, m, torch.float32, device)
    _triton.project_(rows, vector)
    left = _triton.coefficients(rows, vector)
    leak = float(left.norm() / _triton.norm(vector))
    products = _triton.gram(rows)
    identity = torch.eye(m, dtype=torch.float64, device=device)
    error = float((products - identity).abs().max())
    assert leak <= 1e-6, f"leak {leak:.1e}"
    assert error <= 5e-7, f"orthogonality {error:.1e}"
    return f"leak {leak:.1e}, orthogonality {error:.1e}"


def far_addresses(device: torch.device) -> str:
    """Rows whose elements lie beyond 2^31 give the same as the same rows close together."""
    from curvlab_kernels import _triton

    m, ld, n = 3, 2**30, 5000
    free = torch.cuda.mem_get_info(device)[0]
    assert free > 2 * m * ld + 2**28, (
        f"needs {2 * m * ld / 2**30:.0f} GiB free, has {free / 2**30:.0f}"
    )
    near, _, vector = problem(n, m, torch.float16, device)
    far = torch.empty(m, ld, dtype=torch.float16, device=device)
    far[:, : near.shape[1]] = near
    other = vector.clone()
    a, b = _triton.project_(near, vector), _triton.project_(far, other)
    assert torch.equal(a, b), "coefficients differ"
    assert torch.equal(vector, other), "vectors differ"
    return ""


def moving_tensors(device: torch.device, n: int = 10_007, steps: int = 20) -> str:
    """A list of fresh tensors in every step is projected like the flat vector."""
    from curvlab_kernels import _triton

    rows, _, vector = problem(n, 3, torch.float32, device)
    for step in range(steps):
        flat = vector * (step + 1)
        sizes = [1 + step, n // 3, 0, n - n // 3 - 1 - step]
        tensors = [piece.clone() for piece in torch.split(flat, sizes)]
        _triton.project_list_(rows, tensors)
        _triton.project_(rows, flat)
        error = float((torch.cat(tensors) - flat).abs().max() / flat.abs().max())
        assert error <= 3e-7, f"step {step}: {error:.1e}"
    return ""


def another_device(device: torch.device) -> str:
    """Tensors on the second GPU while the first is current."""
    if device.type != "cuda" or torch.cuda.device_count() < 2:
        return "there is no second GPU"
    from curvlab_kernels.audit.agreement import project, project_list

    project(17, 1025, torch.float32, torch.device("cuda", 1))
    project_list(17, 1025, torch.float32, torch.device("cuda", 1))
    return ""


def seconds(run: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    """Median of single runs, after warming up."""
    if device.type != "cuda":
        begun = time.perf_counter()
        run()
        return time.perf_counter() - begun
    for _ in range(3):
        run()
    times: list[float] = []
    for _ in range(repeats):
        begin, end = (torch.Event(device, enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return sorted(times)[len(times) // 2]
