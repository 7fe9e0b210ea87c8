"""Two scores of a matrix's shape: block-diagonality D(M) and spectral similarity S(A, B).

Both are exact where every column can be afforded, and estimated with a standard error where not:
D from exact columns drawn at random, S from Hutchinson probes. A matrix is a square tensor or
anything that satisfies the LinearOperator protocol.
"""

import torch
from torch import Tensor

from curvlab.eigen import Estimate
from curvlab.operators import Operator
from curvlab.parameters import Layout
from curvlab.probe import LinearOperator

CHUNK = 64  # columns taken per product: memory stays at 64 vectors


class OuterProducts(Operator):
    """The mean of ``g g'`` over the rows ``g`` of ``rows`` ``(m, n)``.

    With the gradients of the true-label logits that OGD stores this is its picture of the Hessian:
    the outer-product Hessian without the loss's own curvature, which is not constant.
    """

    def __init__(self, rows: Tensor) -> None:
        if rows.dim() != 2 or len(rows) == 0:
            raise ValueError(f"rows must be (m, n), one gradient each; got {tuple(rows.shape)}")
        super().__init__(rows.shape[1], rows.dtype, rows.device)
        self.rows = rows

    def _product(self, block: Tensor) -> Tensor:
        return (block @ self.rows.T) @ self.rows / len(self.rows)


def layer_labels(layout: Layout) -> Tensor:
    """For each parameter the number of its layer, ``(n,)``: a layer's weight and bias together."""
    labels = torch.zeros(layout.n, dtype=torch.int64)
    for number, slices in enumerate(layout.layers().values()):
        for where in slices:
            labels[where] = number
    return labels


def block_diagonality(
    matrix: Tensor | LinearOperator,
    labels: Tensor,
    *,
    columns: int | None = None,
    generator: torch.Generator | None = None,
) -> Estimate:
    """``D(M) = 1 - mean |entry outside the diagonal blocks| / mean |entry inside them|``.

    1 for a block-diagonal matrix, about 0 for a random one, without lower bound. (The paper writes
    the block set as D in the formula and B in the text.)

    Args:
        matrix: ``(n, n)``, or an operator.
        labels: ``(n,)``: entry (i, j) is inside a block where ``labels[i] == labels[j]``
            (:func:`layer_labels`).
        columns: How many columns to draw, spread over the blocks; ``None`` takes all and is exact.
        generator: For the draw; needed when ``columns`` is given.

    Returns:
        The score with its standard error. Every block is sampled (half of the draws in proportion
        to size, half evenly, two at least): a small last layer with large entries, seen by few
        draws or none, would spoil both the value and the error bar.
    """
    n = _size(matrix)
    if labels.shape != (n,):
        raise ValueError(f"labels must be ({n},), one block per row; got {tuple(labels.shape)}")
    blocks = [(labels.cpu() == label).nonzero().flatten() for label in sorted(set(labels.tolist()))]
    inside_count = sum(len(block) ** 2 for block in blocks)
    if len(blocks) < 2:
        raise ValueError("block_diagonality needs two blocks at least: all labels are equal")
    if columns is not None and (columns < 2 or generator is None):
        raise ValueError("a stochastic D needs columns >= 2 and a generator=")
    sums: list[tuple[Tensor, Tensor]] = []
    for block in blocks:
        drawn = block if columns is None else _draw(block, columns, n, len(blocks), generator)
        sums.append(_inside_and_outside(matrix, drawn, block))
    # estimated sums over all columns, scaled to means over entries
    scale = inside_count / (n * n - inside_count)
    inside = sum(len(b) * float(i.mean()) for b, (i, _) in zip(blocks, sums, strict=True))
    outside = sum(len(b) * float(o.mean()) for b, (_, o) in zip(blocks, sums, strict=True))
    ratio = scale * outside / inside
    variance = 0.0  # of scale * outside - ratio * inside: the linearised ratio
    for block, (within, without) in zip(blocks, sums, strict=True):
        size, taken = len(block), len(within)
        if taken < size:
            spread = float((scale * without - ratio * within).var())
            variance += size * (size - taken) * spread / taken
    return Estimate(1.0 - ratio, variance**0.5 / inside, sum(len(i) for i, _ in sums))


def spectral_similarity(
    first: Tensor | LinearOperator,
    second: Tensor | LinearOperator,
    *,
    probes: int | None = None,
    generator: torch.Generator | None = None,
) -> Estimate:
    """``S(A, B) = <A, B>_F / (|A|_F |B|_F)``, the cosine of two matrices.

    Between -1 and 1 (the paper's "arbitrarily low" is bounded by -1).

    Args:
        first: ``(n, n)``, or an operator.
        second: The same.
        probes: Number of random sign vectors z, with <A, B> = E (Az)'(Bz); ``None`` takes all n
            columns and is exact.
        generator: For the probes; needed when ``probes`` is given.

    Returns:
        The score; its standard error is the jackknife's over probes.
    """
    n = _size(first)
    if _size(second) != n:
        raise ValueError(f"the two matrices have {n} and {_size(second)} rows")
    if probes is None:
        chunks = [torch.arange(n)[start : start + CHUNK] for start in range(0, n, CHUNK)]
        pieces = [_moments(_columns(first, index), _columns(second, index)) for index in chunks]
        return Estimate(_cosine(torch.cat(pieces).sum(0)), 0.0, n)
    if probes < 2 or generator is None:
        raise ValueError("a stochastic S needs probes >= 2 and a generator=")
    pieces = []
    for size in [min(CHUNK, probes - start) for start in range(0, probes, CHUNK)]:
        signs = torch.randint(0, 2, (size, n), generator=generator, device=generator.device)
        z = signs.double() * 2 - 1
        pieces.append(_moments(_product(first, z), _product(second, z)))
    moments = torch.cat(pieces)
    total = moments.sum(0)
    rest = total - moments
    # A ratio of sums: its error is estimated by leaving out each probe in turn (jackknife).
    left_out = rest[:, 0] / (rest[:, 1] * rest[:, 2]).sqrt()
    error = float(((left_out - left_out.mean()) ** 2).sum() * (probes - 1) / probes) ** 0.5
    return Estimate(_cosine(total), error, probes)


def _moments(left: Tensor, right: Tensor) -> Tensor:
    return torch.stack([(left * right).sum(1), (left**2).sum(1), (right**2).sum(1)], dim=1)


def _cosine(sums: Tensor) -> float:
    inner, left, right = sums.tolist()
    if left <= 0.0 or right <= 0.0:
        raise ValueError("spectral similarity of a zero matrix is undefined")
    return float(inner / (left * right) ** 0.5)


def _size(matrix: Tensor | LinearOperator) -> int:
    if isinstance(matrix, Tensor):
        if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1]:
            raise ValueError(f"a dense matrix must be (n, n); got {tuple(matrix.shape)}")
        return matrix.shape[0]
    return matrix.n


def _draw(
    block: Tensor, columns: int, n: int, blocks: int, generator: torch.Generator | None
) -> Tensor:
    wanted = max(2, round(columns * (0.5 * len(block) / n + 0.5 / blocks)))
    if wanted >= len(block) or generator is None:
        return block
    order = torch.randperm(len(block), generator=generator, device=generator.device)
    return block[order[:wanted].cpu()]


def _inside_and_outside(
    matrix: Tensor | LinearOperator, drawn: Tensor, block: Tensor
) -> tuple[Tensor, Tensor]:
    """For each column drawn from a block, the sums of |entry| inside and outside of the block."""
    inside, outside = [], []
    for start in range(0, len(drawn), CHUNK):
        magnitudes = _columns(matrix, drawn[start : start + CHUNK]).abs()
        inside.append(magnitudes[:, block].sum(1))
        magnitudes[:, block] = 0.0  # not total minus inside: that would leave rounding behind
        outside.append(magnitudes.sum(1))
    return torch.cat(inside), torch.cat(outside)


def _columns(matrix: Tensor | LinearOperator, index: Tensor) -> Tensor:
    """Columns ``index`` as rows, float64 on the CPU, ``(len(index), n)``."""
    if isinstance(matrix, Tensor):
        return matrix[:, index.to(matrix.device)].T.double().cpu()
    units = torch.zeros(len(index), matrix.n, dtype=torch.float64)
    units[torch.arange(len(index)), index] = 1.0
    return _product(matrix, units)


def _product(matrix: Tensor | LinearOperator, rows: Tensor) -> Tensor:
    if isinstance(matrix, Tensor):
        return (rows.to(matrix) @ matrix.T).double().cpu()
    return (matrix @ rows.to(matrix.dtype).to(matrix.device)).detach().double().cpu()
