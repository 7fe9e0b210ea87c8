"""Checks of sums that no comparison with a tolerance would tell: squares, and whole numbers."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from curvlab_kernels import reference
from curvlab_kernels._triton.dots import Unless, partial_coefficients
from curvlab_kernels._triton.project import Pass, project_once_
from curvlab_kernels._triton.project_list import list_partials, project_list_once_
from curvlab_kernels._triton.segments import segments
from curvlab_kernels._triton.sgd_step import Step
from curvlab_kernels._triton.sums import sum_chunks
from curvlab_kernels._triton.tiles import work_dtype
from curvlab_kernels.audit.agreement import Check, basis, default_vectors, moved, random
from curvlab_kernels.formats import LEVELS, padded


def exact_checks() -> Iterator[Check]:
    """Squares of what passes find and leave, and sums of whole numbers."""
    for what in ("vector", "block", "list", "sgd"):
        yield Check(f"squares-{what}", partial(squares, what, 9, 1025, torch.float32))
    # Rows of a block that start on 16 elements are another kernel.
    yield Check("squares-block-aligned", partial(squares, "block", 6, 528, torch.float32))
    for what in ("vector", "block", "list"):
        for dtype in (torch.float32, torch.int8):
            name = str(dtype).removeprefix("torch.")
            yield Check(f"exact-{what}-{name}", partial(exact, what, 9, 1025, dtype))
    yield Check("exact-rest", partial(exact_rest, 9, 1025))


def same_squares(actual: Tensor, vector: Tensor, what: str) -> None:
    """Raise unless ``actual`` ``(1,)`` is the sum of squares of a vector as it is stored."""
    wanted = float(reference.norm(vector.cpu())) ** 2
    error = abs(float(actual) - wanted) / wanted
    assert error <= 1e-13, f"squares {what}: relative error {error:.1e}"


def squares(what: str, m: int, n: int, dtype: torch.dtype, device: torch.device) -> None:
    """Squares before and after a pass: what decides whether another follows."""
    rows, scales = basis(m, n, dtype)
    kind, decay = default_vectors(dtype), 0.1
    stored = rows.to(device), moved(scales, device)
    shape = (5, n) if what == "block" else (n,)
    before = random(*shape, seed=2, dtype=kind)
    after = before.to(device, copy=True)
    if what in ("vector", "block"):
        removed, found = project_once_(stored[0], after, None, stored[1])
        left, again = reference.norm(after.cpu()).square().view(-1), after.clone()
        ones = torch.ones_like(left, device=device)
        lost = Unless(ones, 0 * ones, 0.5)  # as if a second pass were needed
        more = Pass(removed.clone(), lost)
        _, second = project_once_(stored[0], again, None, stored[1], more)
        error = float((second.before.cpu()[: len(left)] / left - 1).abs().max())
        assert error <= 1e-13, f"squares before the second pass: relative error {error:.1e}"
    elif what == "list":
        cut = list(torch.split(after, [7, n - 7]))
        removed, found = project_list_once_(*stored, segments(cut), None, cut[0])
    else:
        slopes = list(torch.split(after, [7, n - 7]))
        weights, buffers = ([torch.ones_like(piece) for piece in slopes] for _ in range(2))
        where = segments(slopes, weights, buffers)
        step = Step(*stored, where, slopes[0], 3, (1.0, decay, 0.0))
        removed = step.take(list_partials(*stored, where, slopes[0], 3, decay), None)
        found, before = step.enough, before + torch.full_like(before, decay)
    was = reference.norm(before).square().view(-1)
    left = was - removed.cpu().square().sum(-1)
    for actual, wanted in ((found.before, was), (found.after, left)):
        error = float((actual.cpu()[: len(wanted)] - wanted).abs().max() / was.max())
        assert error <= 1e-13, f"squares: relative error {error:.1e}"


def exact(what: str, m: int, n: int, dtype: torch.dtype, device: torch.device) -> None:
    """Sums of whole numbers that no float rounds: not one bit may go astray in an exchange.

    Rows of ones and minus ones; numbers as large as a float32 can add up, so that the lower half of
    a float64 counts.
    """
    generator = torch.Generator().manual_seed(7)
    signs = torch.randint(2, (m, padded(n)), generator=generator) * 2 - 1
    rows, scales = signs.to(dtype).to(device), None
    if dtype in LEVELS:
        scales = torch.ones(m, -(-padded(n) // 64), device=device)
    shape = (5, n) if what == "block" else (n,)
    largest = 2**24 // -(-n // 16384) // (16 if scales is not None else 1)
    whole = torch.randint(-largest, largest, shape, generator=generator)
    vectors = whole.to(default_vectors(dtype)).to(device)
    work = work_dtype(vectors, rows)
    if what == "list":
        cut = list(torch.split(vectors, [7, n - 7]))
        partials = list_partials(rows, scales, segments(cut), cut[0], 1, 0.0)
    else:
        partials = partial_coefficients(rows, vectors, scales, work, squares=True)
    block = whole.view(-1, n)
    actual = sum_chunks(partials.view(len(partials), -1)).cpu().view(len(block), -1)
    wanted = (block @ signs[:, :n].T).double()
    assert torch.equal(actual[:, :-1], wanted), "sums of whole numbers are not exact"
    for found, vector in zip(actual[:, -1], block, strict=True):
        same_squares(found, vector.double(), "of whole numbers")


def exact_rest(m: int, n: int, device: torch.device) -> None:
    """What a pass leaves where no float32 rounds: the weights that it adds up itself, to the bit.

    Every row is 1 or -1 in three columns of its own, where the vector has odd numbers of 22 bits:
    their sums fill the lower half of a float64, and what is left still fits a float32.
    """
    generator = torch.Generator().manual_seed(7)
    places = torch.randperm(n, generator=generator)[: 3 * m].view(m, 3)
    signs = torch.zeros(m, padded(n), dtype=torch.int64)
    signs.scatter_(1, places, torch.randint(2, (m, 3), generator=generator) * 2 - 1)
    whole = torch.zeros(n, dtype=torch.int64)
    numbers = torch.randint(2**20, 7 * 2**18, (3 * m,), generator=generator) * 2 + 1
    whole[places.view(-1)] = numbers * (torch.randint(2, (3 * m,), generator=generator) * 2 - 1)
    vector = whole.float().to(device)
    project_once_(signs.float().to(device), vector, None, None)
    wanted = whole - signs[:, :n].T @ (signs[:, :n] @ whole)
    assert torch.equal(vector.cpu(), wanted.float()), "what is left of whole numbers is not exact"
