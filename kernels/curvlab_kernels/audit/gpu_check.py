"""What only a GPU can confirm: ``python -m curvlab_kernels.audit.gpu_check`` on a CUDA machine.

Without a GPU the kernels are checked in two ways: their source runs in Triton's interpreter against
the float64 reference, and their compiled code is read by ``python -m curvlab_kernels.audit``.
Neither has run on hardware. Unverified until this command passes on a machine with a GPU:

1. Agreement of the *compiled* kernels with the reference: layouts, barriers, vector loads and
   conversions of float16, bfloat16, int8 and float8 are not those of the interpreter.
2. Races, and bitwise equal results of repeated runs.
3. Addresses beyond 2^31 elements on the device (the audit shows them by interval arithmetic).
4. Lists of tensors by address: the tables of pointers, and that they follow tensors that move.
5. Time and bandwidth: everything the audit predicts is bytes divided by a bandwidth. The reuse of
   the L2 cache between the two passes, and the cost of short vectors, are guesses.
6. Orthogonality and leak at 12.4 million columns with the GPU's own summation order.
7. Kernels on a second device while the first is current.

It prints a line per check, and exits with 1 if one fails, with 2 if there is no GPU.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from curvlab_kernels.formats import LEVELS, padded, quantise

LONG = 12_400_003
_MISSING = (
    "no CUDA device is present, so nothing was checked and nothing is claimed.\n"
    "Without a GPU: `python -m curvlab_kernels.audit` reads the compiled kernels, and\n"
    "`pytest tests/test_triton_kernels.py` runs their source in Triton's interpreter."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every check; returns the exit code."""
    parser = argparse.ArgumentParser(prog="curvlab_kernels.audit.gpu_check", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--n", type=int, default=LONG, help="columns of the timed problems")
    parser.add_argument("--m", type=int, default=20, help="rows of the timed problems")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(_MISSING)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(device)
    print(f"{properties.name}, sm_{properties.major}{properties.minor}, torch {torch.__version__}")
    failures = 0
    for name, check in _checks(device, options.n, options.m):
        try:
            detail = check()
        except AssertionError as error:
            failures += 1
            print(f"FAIL {name}: {error}", flush=True)
        else:
            print(f"ok   {name}{': ' + detail if detail else ''}", flush=True)
    print(f"{failures} checks failed")
    return 1 if failures else 0


def _checks(device: torch.device, n: int, m: int) -> Iterator[tuple[str, Callable[[], str]]]:
    from curvlab_kernels import _triton
    from curvlab_kernels.audit.agreement import checks

    readable = _triton.storage_dtypes(device)
    unreadable = {str(d).removeprefix("torch.") for d in LEVELS if d not in readable}
    for check in checks():
        if not any(name in check.name for name in unreadable):
            yield check.name, lambda check=check: _silent(check.run, device)  # type: ignore[misc]
    yield "addresses beyond 2^31", lambda: far_addresses(device)
    yield "tensors that move", lambda: moving_tensors(device)
    if torch.cuda.device_count() > 1:
        yield "another device", lambda: another_device()
    for dtype in readable:
        label = str(dtype).removeprefix("torch.")
        yield f"repeatable {label}", lambda dtype=dtype: repeatable(n, m, dtype, device)  # type: ignore[misc]
        yield f"bandwidth {label}", lambda dtype=dtype: bandwidth(n, m, dtype, device)  # type: ignore[misc]
    yield "leak and orthogonality", lambda: accuracy(n, m, device)


def _silent(run: Callable[[torch.device], None], device: torch.device) -> str:
    run(device)
    return ""


def _problem(
    n: int, m: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Rows that are orthonormal up to their storage, scales, and a vector; on the device."""
    from curvlab_kernels import _triton

    generator = torch.Generator(device).manual_seed(0)
    work = torch.float64 if dtype == torch.float64 else torch.float32
    rows = torch.zeros(m, padded(n), device=device, dtype=work)
    rows[:, :n] = torch.randn(m, n, generator=generator, device=device, dtype=work)
    block = rows[:, :n].contiguous()
    _triton.orthonormalise_block_(rows[:0], block)
    stored, scales = quantise(block, dtype)
    vector = torch.randn(n, generator=generator, device=device, dtype=work)
    return stored, scales, vector


def repeatable(n: int, m: int, dtype: torch.dtype, device: torch.device) -> str:
    """The same bits in five runs."""
    from curvlab_kernels import _triton

    rows, scales, vector = _problem(n, m, dtype, device)
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


def bandwidth(n: int, m: int, dtype: torch.dtype, device: torch.device) -> str:
    """Time of a projection, and its model bytes per second against a copy in the same run."""
    from curvlab_kernels import _triton

    rows, scales, vector = _problem(n, m, dtype, device)
    stored = rows.numel() * rows.element_size()
    moved = 2 * (stored + (0 if scales is None else scales.numel() * 4))
    moved += 3 * vector.numel() * vector.element_size()
    seconds = _seconds(lambda: _triton.project_(rows, vector, None, scales))
    source = torch.empty(max(stored, 2**28), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    copied = 2 * source.numel() / _seconds(lambda: target.copy_(source))
    rate = moved / seconds
    return (
        f"{seconds * 1e6:.0f} us, {rate / 1e9:.0f} GB/s, {rate / copied:.2f} of a copy "
        f"({copied / 1e9:.0f} GB/s)"
    )


def accuracy(n: int, m: int, device: torch.device) -> str:
    """Leak of a projection and orthogonality of an orthonormalised block at full length."""
    from curvlab_kernels import _triton

    rows, _, vector = _problem(n, m, torch.float32, device)
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
    near, _, vector = _problem(n, m, torch.float16, device)
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

    rows, _, vector = _problem(n, 3, torch.float32, device)
    for step in range(steps):
        flat = vector * (step + 1)
        sizes = [1 + step, n // 3, 0, n - n // 3 - 1 - step]
        tensors = [piece.clone() for piece in torch.split(flat, sizes)]
        _triton.project_list_(rows, tensors)
        _triton.project_(rows, flat)
        error = float((torch.cat(tensors) - flat).abs().max() / flat.abs().max())
        assert error <= 3e-7, f"step {step}: {error:.1e}"
    return ""


def another_device() -> str:
    """Tensors on the second GPU while the first is current."""
    from curvlab_kernels.audit.agreement import project, project_list

    project(17, 1025, torch.float32, torch.device("cuda", 1))
    project_list(17, 1025, torch.float32, torch.device("cuda", 1))
    return ""


def _seconds(run: Callable[[], object], repeats: int = 20) -> float:
    """Median of single runs, after warming up."""
    for _ in range(3):
        run()
    times: list[float] = []
    for _ in range(repeats):
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return sorted(times)[len(times) // 2]


if __name__ == "__main__":
    sys.exit(main())
