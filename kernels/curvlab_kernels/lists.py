"""Lists of tensors that are one vector in their order."""

from collections.abc import Sequence

import torch
from torch import Tensor


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """All as one vector, a copy; there is at least one."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def parts(vector: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views of ``vector``, of the tensors' shapes."""
    cut = torch.split(vector, [tensor.numel() for tensor in tensors])
    return [piece.view(tensor.shape) for piece, tensor in zip(cut, tensors, strict=True)]


def all_contiguous(tensors: Sequence[Tensor]) -> bool:
    return all(tensor.is_contiguous() for tensor in tensors)
