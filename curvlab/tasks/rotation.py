"""Rotate and shrink many images at once.

Bilinear rotation and the mean over blocks of pixels are both linear in the image, so the two
together are one small matrix per angle: all angles of a data set are one matrix product.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

CHUNK = 4096  # images converted to float at once: bounds memory, costs nothing


def resampling_matrix(size: int, side: int, degrees: float) -> Tensor:
    """The map ``(side * side, size * size)``, float64: rotate at ``size``, then shrink to ``side``.

    Args:
        size: Pixels along the side of the image.
        side: Pixels along the side of the result; divides ``size``. Blocks are averaged.
        degrees: Counter-clockwise, about the middle of the image; outside the image is black.
    """
    if side < 1 or size % side:
        raise ValueError(f"side= must divide the images' side of {size} pixels; got {side}")
    if not math.isfinite(degrees):
        raise ValueError(f"angles must be finite numbers of degrees; got {degrees}")
    middle = (size - 1) / 2
    offsets = torch.arange(size, dtype=torch.float64, device="cpu") - middle
    row, column = torch.meshgrid(offsets, offsets, indexing="ij")
    cosine, sine = _cos_sin(degrees)
    # where each rotated pixel comes from; rows grow downwards
    source_row = (sine * column + cosine * row + middle).flatten()
    source_column = (cosine * column - sine * row + middle).flatten()
    matrix = torch.zeros(size * size, size * size, dtype=torch.float64, device="cpu")
    target = torch.arange(size * size, device="cpu")
    for step_row in (0, 1):
        for step_column in (0, 1):
            near_row, near_column = (
                source_row.floor() + step_row,
                source_column.floor() + step_column,
            )
            weight = (1 - (source_row - near_row).abs()) * (1 - (source_column - near_column).abs())
            inside = (near_row >= 0) & (near_row < size) & (near_column >= 0) & (near_column < size)
            source = (near_row * size + near_column).long()
            matrix[target[inside], source[inside]] += weight[inside]
    block = size // side
    tiles = matrix.view(side, block, side, block, size * size)
    return tiles.mean((1, 3)).reshape(side * side, size * size)


def rotated(images: Tensor, degrees: Sequence[float], side: int) -> Tensor:
    """``images`` turned by each of A angles: ``(A, N, side * side)`` float32 in 0..1.

    Args:
        images: Shape ``(N, 1, size, size)``, uint8.
        degrees: Counter-clockwise angles.
        side: See :func:`resampling_matrix`.
    """
    n, channels, height, width = images.shape
    if channels != 1 or height != width:
        raise ValueError(f"rotation needs images (N, 1, S, S); got {tuple(images.shape)}")
    matrices = [resampling_matrix(height, side, angle) / 255 for angle in degrees]
    matrix = torch.cat(matrices).to(images.device, torch.float32).T.contiguous()
    result = torch.empty(len(degrees), n, side * side, dtype=torch.float32, device=images.device)
    for start in range(0, n, CHUNK):
        pixels = images[start : start + CHUNK].reshape(-1, height * width).float()
        turned = (pixels @ matrix).view(-1, len(degrees), side * side)
        result[:, start : start + CHUNK] = turned.transpose(0, 1)
    return result


def _cos_sin(degrees: float) -> tuple[float, float]:
    """Exact at multiples of 90 degrees, where rounding would blur the image a little."""
    turns, rest = divmod(degrees, 90.0)
    cosine, sine = math.cos(math.radians(rest)), math.sin(math.radians(rest))
    for _ in range(int(turns) % 4):
        cosine, sine = -sine, cosine
    return cosine, sine
