"""Checks that the Triton kernels agree with the float64 reference, on any device they run on.

On a GPU ``python -m curvlab_kernels.audit.gpu_check`` runs them; without one the tests run the same
checks on the CPU through Triton's interpreter. A check raises ``AssertionError`` or says nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from curvlab_kernels import _triton, reference
from curvlab_kernels.formats import LEVELS, padded, quantise

# Largest error, relative to the norm of the vector for coefficients, to its largest element else.
TOLERANCE = {torch.float32: 3e-7, torch.float64: 2e-15}
LEAK = {torch.float32: 1e-6, torch.float64: 4e-15}  # what a projection leaves, of the rest
ORTHOGONALITY = {torch.float32: 5e-7, torch.float64: 2e-15}
STORAGE = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
INSIDE = ((torch.float32,) * 2, (torch.float64,) * 2, (torch.int8, torch.float32))
SHAPES = ((0, 7), (1, 1), (3, 1023), (17, 1025), (33, 4999))  # (rows, columns)


@dataclass(frozen=True, slots=True)
class Check:
    """A named comparison."""

    name: str
    run: Callable[[torch.device], None]


def checks() -> Iterator[Check]:
    """Every kernel, storage dtype and awkward shape."""
    for dtype in STORAGE:
        name = str(dtype).removeprefix("torch.")
        for m, n in SHAPES:
            yield Check(f"project-{name}-{m}x{n}", partial(project, m, n, dtype))
        yield Check(f"project-block-{name}", partial(project, 17, 1025, dtype, count=5))
        yield Check(f"project-list-{name}", partial(project_list, 17, 1025, dtype))
        yield Check(f"sgd-{name}", partial(sgd_step, 5, 1023, dtype, 0.1, 0.9))
        yield Check(f"coefficients-apply-{name}", partial(separate, 9, 777, dtype))
        if dtype in LEVELS:
            yield Check(f"gram-factor-{name}", partial(project, 17, 1025, dtype, corrected=True))
            yield Check(f"quantise-{name}", partial(storage, dtype))
        # Beyond short vectors: other tiles, several of them in a program, and a second stage.
        yield Check(f"project-long-{name}", partial(project, 9, 66049, dtype))
        if dtype in (torch.float32, torch.bfloat16, torch.int8):
            yield Check(f"project-list-long-{name}", partial(project_list, 9, 66049, dtype))
            yield Check(f"sgd-long-{name}", partial(sgd_step, 9, 66049, dtype, 0.1, 0.9))
            run = partial(project, 9, 66049, dtype, count=5)
            yield Check(f"project-block-long-{name}", run)
    yield Check("project-several-tiles-per-chunk", partial(project, 9, 9001, torch.float32))
    for dtype in (torch.float32, torch.int8, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        run = partial(project, 5, 1023, dtype, vectors=torch.float64)
        yield Check(f"project-float64-vector-{name}", run)
        run = partial(project, 5, 1023, dtype, count=5, vectors=torch.float64)
        yield Check(f"project-block-float64-vector-{name}", run)
        run = partial(project_list, 5, 1023, dtype, vectors=torch.float64)
        yield Check(f"project-list-float64-vector-{name}", run)
    yield Check("project-block-of-none", partial(project, 5, 300, torch.float32, count=0))
    yield Check("project-block-of-one", partial(project, 5, 300, torch.float32, count=1))
    yield Check("project-misaligned-vector", misaligned)
    yield Check("project-garbage-in-padding", garbage_in_padding)
    for dtype, vectors in INSIDE:
        name = str(dtype).removeprefix("torch.")
        for what in ("vector", "block", "list", "sgd"):
            yield Check(f"inside-{what}-{name}", partial(inside, what, dtype, vectors))
    yield Check("inside-long", partial(inside, "vector", torch.float32, torch.float32, n=66049))
    yield Check("lists-with-strides", strided)
    yield Check("sgd-plain", partial(sgd_step, 17, 1025, torch.float32, 0.0, 0.0))
    yield Check("sgd-decay", partial(sgd_step, 3, 65, torch.float32, 0.1, 0.0))
    yield Check("sgd-gram-factor", partial(sgd_step, 5, 1023, torch.int8, 0.1, 0.9, True))
    yield Check("sgd-empty-basis", partial(sgd_step, 0, 65, torch.float32, 0.1, 0.9))
    from curvlab_kernels.audit.agreement_exact import exact_checks
    from curvlab_kernels.audit.agreement_orthogonal import orthogonal_checks

    yield from exact_checks()
    yield from orthogonal_checks()


def close(actual: Tensor, expected: Tensor, scale: float, dtype: torch.dtype, what: str) -> None:
    """Raise unless every element differs by at most TOLERANCE of ``scale``."""
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, not {expected.shape}"
    if actual.numel() == 0:
        return
    error = (actual.cpu().double() - expected.cpu().double()).abs().max().item()
    allowed = TOLERANCE[dtype] * scale
    # Written so that a NaN fails.
    assert error <= allowed, f"{what}: error {error:.2e}, allowed {allowed:.2e}"


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal numbers on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def basis(m: int, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """``m`` orthonormal rows of length ``n``, stored, on the CPU."""
    rows = (
        torch.linalg.qr(random(n, m, seed=1)).Q.T.contiguous() if m else torch.zeros(0, n).double()
    )
    return quantise(rows if dtype == torch.float64 else rows.float(), dtype)


def default_vectors(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def moved(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device)


def gram_factor(rows: Tensor, scales: Tensor | None, n: int) -> Tensor:
    """Lower Cholesky factor of the Gram matrix of the stored values."""
    factor: Tensor = torch.linalg.cholesky(
        reference.gram(reference.dequantise(rows, scales, n).double())
    )
    return factor


def project(
    m: int,
    n: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    count: int | None = None,
    corrected: bool = False,
    vectors: torch.dtype | None = None,
) -> None:
    """``project_`` on one vector, or on a block of ``count``."""
    rows, scales = basis(m, n, dtype)
    kind = vectors or default_vectors(dtype)
    expected = (
        random(n, seed=2, dtype=kind) if count is None else random(count, n, seed=2, dtype=kind)
    )
    actual = expected.to(device, copy=True)
    factor = gram_factor(rows, scales, n) if corrected else None
    length = largest = 0.0
    if expected.numel():
        length, largest = float(reference.norm(expected).max()), float(expected.abs().max())
    removed = _triton.project_(
        rows.to(device), actual, moved(factor, device), moved(scales, device)
    )
    close(removed, reference.project_(rows, expected, factor, scales), length, kind, "coefficients")
    close(actual, expected, largest, kind, "vector")


def separate(m: int, n: int, dtype: torch.dtype, device: torch.device) -> None:
    """``coefficients`` and ``apply_`` each for itself."""
    rows, scales = basis(m, n, dtype)
    kind = default_vectors(dtype)
    vector = random(n, seed=2, dtype=kind)
    products = _triton.coefficients(rows.to(device), vector.to(device), moved(scales, device))
    length = float(reference.norm(vector))
    close(products, reference.coefficients(rows, vector, scales), length, kind, "coefficients")
    weights, actual = random(m, seed=3), vector.to(device, copy=True)
    _triton.apply_(rows.to(device), weights.to(device), actual, moved(scales, device))
    reference.apply_(rows, weights, vector, scales)
    close(actual, vector, float(vector.abs().max()), kind, "vector")


def misaligned(device: torch.device) -> None:
    """A vector that starts anywhere in memory."""
    rows, _ = basis(9, 1023, torch.float32)
    expected = random(1024, seed=2, dtype=torch.float32)
    actual = expected.to(device, copy=True)
    _triton.project_(rows.to(device), actual[1:])
    reference.project_(rows, expected[1:])
    close(actual, expected, float(expected.abs().max()), torch.float32, "vector and its neighbour")


def garbage_in_padding(device: torch.device) -> None:
    """Columns beyond ``n`` of the stored rows never reach a sum."""
    n = 1001
    rows, _ = basis(9, n, torch.float32)
    expected = random(n, seed=2, dtype=torch.float32)
    actual = expected.to(device, copy=True)
    dirty = rows.clone()
    dirty[:, n:] = float("nan")
    removed = _triton.project_(dirty.to(device), actual)
    assert padded(n) > n
    length = float(reference.norm(expected))
    close(removed, reference.project_(rows, expected), length, torch.float32, "coefficients")
    close(actual, expected, float(expected.abs().max()), torch.float32, "vector")


def inside(
    what: str, dtype: torch.dtype, kind: torch.dtype, device: torch.device, *, n: int = 1025
) -> None:
    """What is left of a vector almost inside the span is orthogonal to it as that of any other."""
    m, left = 9, 1e-4 if kind == torch.float32 else 1e-10
    rows, scales = basis(m, n, dtype)
    values = reference.dequantise(rows, scales, n).double()
    factor = gram_factor(rows, scales, n) if scales is not None else None
    outside = random(n, seed=2) * left / n**0.5
    vector = (random(m, seed=3) @ values + outside).to(kind).to(device)
    stored = rows.to(device), moved(factor, device), moved(scales, device)
    whole = vector.cpu().double().clone()
    if what == "block":  # beside others, which are not
        block = random(6, n, seed=4, dtype=kind).to(device)
        block[5] = vector
        removed = _triton.project_(stored[0], block, *stored[1:])[5]
        rest = block[5]
    elif what == "list":
        cut = list(torch.split(vector, [7, n - 7]))
        removed, rest = _triton.project_list_(stored[0], cut, *stored[1:]), torch.cat(cut)
    elif what == "sgd":
        cut = list(torch.split(vector, [7, n - 7]))
        still, buffers = ([torch.zeros_like(piece) for piece in cut] for _ in range(2))
        removed = _triton.sgd_step_(stored[0], still, cut, buffers, 1.0, 0.1, 0.9, *stored[1:])
        rest = torch.cat(buffers)
        assert torch.equal(torch.cat(still), -rest), "parameters are not those of the momenta"
    else:
        removed, rest = _triton.project_(stored[0], vector, *stored[1:]), vector
    rest = rest.cpu().double()
    leak = float((values @ rest).norm() / rest.norm() / values.norm(dim=1).max())
    assert leak <= LEAK[kind], f"{leak:.1e} of what is left lies in the span"
    lost = float((whole - removed.cpu() @ values - rest).norm() / whole.norm())
    assert lost <= LEAK[kind], f"what was removed is off by {lost:.1e}"


def strided(device: torch.device) -> None:
    """Tensors of a list whose memory is not in the order of their elements, or has gaps."""
    shapes, n = ((3, 5, 7), (4, 6), (11,)), 140
    rows, _ = basis(5, n, torch.float32)

    def made(seed: int, to: torch.device) -> list[Tensor]:
        a, b, c = (random(*shape, seed=seed, dtype=torch.float32) for shape in shapes)
        gaps = torch.zeros(22)
        gaps[::2] = c
        return [a.permute(2, 0, 1).contiguous().to(to).permute(1, 2, 0), b.to(to), gaps.to(to)[::2]]

    cpu = torch.device("cpu")
    lists = [[made(seed, to) for seed in (2, 3, 4)] for to in (device, cpu)]
    for kernels, tensors, place in ((_triton, lists[0], device), (reference, lists[1], cpu)):
        kernels.project_list_(rows.to(place), tensors[1])
        kernels.sgd_step_(rows.to(place), *tensors, 0.1, 0.1, 0.9)
    for mine, theirs in zip(*lists, strict=True):
        for actual, expected in zip(mine, theirs, strict=True):
            assert actual.stride() == expected.stride()
            close(actual, expected, 5.0, torch.float32, "tensors with strides")


def pieces(n: int, seed: int, dtype: torch.dtype) -> list[Tensor]:
    """``n`` elements as tensors of uneven sizes: single elements, none, many in one tile, large."""
    sizes = [1, 0, 2, 3, 5, 7, 11, 13] if n > 100 else [1, 0]
    rest = n - sum(sizes)
    sizes += [rest // 2, rest - rest // 2]
    flat = random(n, seed=seed, dtype=dtype)
    return [piece.clone() for piece in torch.split(flat, sizes)]


def project_list(
    m: int,
    n: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    vectors: torch.dtype | None = None,
) -> None:
    rows, scales = basis(m, n, dtype)
    kind = vectors or default_vectors(dtype)
    expected = pieces(n, 2, kind)
    actual = [tensor.to(device, copy=True) for tensor in expected]
    length = float(reference.norm(torch.cat(expected)))
    removed = _triton.project_list_(rows.to(device), actual, None, moved(scales, device))
    wanted = reference.project_list_(rows, expected, None, scales)
    close(removed, wanted, length, kind, "coefficients")
    close(torch.cat(actual), torch.cat(expected), 5.0, kind, "tensors")


def sgd_step(
    m: int,
    n: int,
    dtype: torch.dtype,
    decay: float,
    momentum: float,
    *arguments: bool | torch.device,
) -> None:
    """``sgd_step_``; the optional argument before the device asks for a Gram factor."""
    *corrected, device = arguments
    assert isinstance(device, torch.device)
    rows, scales = basis(m, n, dtype)
    kind = default_vectors(dtype)
    wanted = [pieces(n, seed, kind) for seed in (2, 3, 4)]
    actual = [[tensor.to(device, copy=True) for tensor in tensors] for tensors in wanted]
    factor = gram_factor(rows, scales, n) if corrected else None
    numbers = (0.1, decay, momentum)
    buffers = actual[2] if momentum else []
    removed = _triton.sgd_step_(
        rows.to(device),
        actual[0],
        actual[1],
        buffers,
        *numbers,
        moved(factor, device),
        moved(scales, device),
    )
    expected = reference.sgd_step_(
        rows, wanted[0], wanted[1], wanted[2] if momentum else [], *numbers, factor, scales
    )
    close(removed, expected, float(n) ** 0.5 * 1.2, kind, "coefficients")
    for what, mine, theirs in zip(
        ("parameters", "gradients", "momenta"), actual, wanted, strict=True
    ):
        close(torch.cat(mine), torch.cat(theirs), 6.0, kind, what)


def storage(
    dtype: torch.dtype, device: torch.device, *, sizes: Sequence[int] = (1, 63, 65, 1023, 4099)
) -> None:
    """``quantise`` and ``dequantise``: the same codes, scales and values, to the last bit."""
    for n in sizes:
        vectors = random(3, n, seed=5).float()
        vectors[0] *= 10.0 ** random(n, seed=6).float()  # many magnitudes in a block
        vectors[1, : min(n, 64)] = 0.0
        rows, scales = _triton.quantise(vectors.to(device), dtype)
        wanted_rows, wanted_scales = reference.quantise(vectors, dtype)
        assert scales is not None
        assert wanted_scales is not None
        assert torch.equal(scales.cpu(), wanted_scales), f"scales differ at n = {n}"
        assert torch.equal(rows.cpu().float(), wanted_rows.float()), f"codes differ at n = {n}"
        values = _triton.dequantise(wanted_rows.to(device), wanted_scales.to(device), n)
        wanted = reference.dequantise(wanted_rows, wanted_scales, n)
        assert torch.equal(values.cpu(), wanted), f"values differ at n = {n}"
