"""Augmentation: a run's batch, changed at random from a generator of its own.

``learn(augment=...)`` takes any function of inputs ``(B, ...)`` and a CPU generator that returns
inputs of the same shape. The generator starts at a function of seed, task and step, so that a run
sees the same images alone, among others and resumed.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

Augment = Callable[[Tensor, torch.Generator], Tensor]


@dataclass(frozen=True)
class CropAndFlip:
    """Images ``(B, C, H, W)`` shifted by up to ``padding`` pixels and, one in two, mirrored.

    Args:
        padding: Zeros around the image, of which a part of the old size is cut.
        flip: Whether to mirror.
    """

    padding: int = 4
    flip: bool = True

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        if images.dim() != 4:
            raise ValueError(f"CropAndFlip needs images (B, C, H, W); got {tuple(images.shape)}")
        count, _, height, width = images.shape
        room = 2 * self.padding + 1
        down, right = torch.randint(0, room, (2, count), generator=generator)
        mirrored = torch.rand(count, generator=generator) < 0.5
        rows = down[:, None] + torch.arange(height)
        columns = right[:, None] + torch.arange(width)
        if self.flip:
            columns = torch.where(mirrored[:, None], columns.flip(1), columns)
        wide = pad(images, (self.padding,) * 4)
        device, who = images.device, torch.arange(count)
        where = (who[:, None, None], rows[:, :, None], columns[:, None, :])
        sample, row, column = (index.to(device) for index in where)
        # advanced indices around a slice put the slice last
        return wide[sample, :, row, column].permute(0, 3, 1, 2).contiguous()
