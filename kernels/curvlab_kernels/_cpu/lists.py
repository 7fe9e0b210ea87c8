"""Lists of tensors as one vector.

Copying them costs as much as reading two to four rows, and then they are projected as fast as one
vector: a team of threads that would go from tensor to tensor is slower from eight rows on.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def gathered(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    """All as one vector: a view of a contiguous tensor that is alone, else a copy."""
    if len(tensors) == 1 and tensors[0].is_contiguous():
        return tensors[0] if tensors[0].dim() == 1 else tensors[0].view(-1)
    if not tensors:
        return torch.zeros(0, dtype=torch.promote_types(like.dtype, torch.float32))
    return torch._C._nn.flatten_dense_tensors(list(tensors))


def parts(vector: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views of ``vector``, of the tensors' shapes."""
    return list(torch._C._nn.unflatten_dense_tensors(vector, list(tensors)))


def scatter(vector: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy a changed vector back into the tensors it was copied from; nothing for a view."""
    if len(tensors) > 1 or (tensors and not tensors[0].is_contiguous()):
        torch._foreach_copy_(list(tensors), parts(vector, tensors))
