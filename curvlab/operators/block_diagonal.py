"""The layer-wise block diagonal of a curvature (eq. 7): everything between layers set to zero."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from curvlab.operators.operator import Operator
from curvlab.parameters import Layout
from curvlab.probe import LinearOperator


class BlockDiagonal(Operator):
    """The diagonal blocks of ``base``; a product costs one product of ``base`` per block.

    Args:
        base: Any operator.
        blocks: Slices of the flat vector by name of the block. By default the layers: a module's
            own parameters, weight and bias together.
    """

    def __init__(
        self, base: LinearOperator, blocks: Mapping[str, Sequence[slice]] | None = None
    ) -> None:
        layout: Layout | None = getattr(base, "layout", None)
        if blocks is None:
            if layout is None:
                raise TypeError("this operator has no layout, so it has no layers: pass blocks=")
            blocks = layout.layers()
        self.blocks = {name: tuple(where) for name, where in blocks.items()}
        taken = torch.zeros(base.n, dtype=torch.int64)
        for where in self.blocks.values():
            for piece in where:
                taken[piece] += 1
        if not bool((taken == 1).all()):
            raise ValueError(
                f"blocks= must hold each of the {base.n} coordinates once; "
                f"{int((taken == 0).sum())} are missing and {int((taken > 1).sum())} repeat"
            )
        super().__init__(base.n, base.dtype, base.device, layout)
        self.limit = getattr(base, "limit", None)
        self.base = base

    def _product(self, block: Tensor) -> Tensor:
        result = torch.empty_like(block)
        pieces = list(self.blocks.values())
        # several layers at once where the vectors are short, so that the base sees large blocks
        step = max(1, (1 << 22) // max(1, block.numel()))
        for start in range(0, len(pieces), step):
            some = pieces[start : start + step]
            masked = torch.zeros(len(some), *block.shape, dtype=self.dtype, device=self.device)
            for mask, where in zip(masked, some, strict=True):
                for piece in where:
                    mask[:, piece] = block[:, piece]
            images = (self.base @ masked.reshape(-1, self.n)).reshape(masked.shape)
            for image, where in zip(images, some, strict=True):
                for piece in where:
                    result[:, piece] = image[:, piece]
        return result
