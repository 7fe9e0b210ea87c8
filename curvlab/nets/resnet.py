"""Slim ResNet18 in the two shapes used by the continual-learning literature.

Block ``"stable"`` (Mirzadeh et al., without the second convolution that code declares but never
calls): 481,385 parameters with 5 classes, 480,902 with 2. Block ``"gem"`` (Lopez-Paz and Ranzato):
1,093,945 with 5.

Normalisation is a choice of the caller, since BatchNorm's statistics live outside the parameters
and forgetting leaks through them:

- ``"batch"``: affine; batch statistics in train mode, running statistics in eval mode. Curvature
  belongs in eval mode, where the network is a function of its parameters alone. ``learn`` asks
  what becomes of the statistics between tasks (``batchnorm=``).
- ``"batch_untracked"``: affine, no running statistics (the choice of GPM): outputs depend on which
  samples share a batch, in eval mode too.
- ``"group"``: affine GroupNorm; no statistics, the same parameter count as ``"batch"``.
- ``"none"``: no normalisation and no parameters for it.
"""

from collections.abc import Callable, Sequence
from math import gcd
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from curvlab.checks import whole
from curvlab.nets.heads import MultiHead
from curvlab.nets.initialise import Seed, build

Block = Literal["stable", "gem"]
Norm = Literal["batch", "batch_untracked", "group", "none"]


def slim_resnet18(
    classes: int = 5,
    *,
    block: Block = "stable",
    norm: Norm = "batch",
    nf: int = 20,
    blocks: Sequence[int] = (2, 2, 2, 2),
    channels: int = 3,
    tasks: int | None = None,
    seed: Seed = 0,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> nn.Module:
    """Images ``(N, channels, H, W)`` to logits ``(N, classes)``.

    Args:
        classes: Outputs of a head.
        block: ``"stable"`` or ``"gem"``; see above.
        norm: ``"batch"``, ``"batch_untracked"``, ``"group"`` or ``"none"``; see above.
        nf: Channels of the first stage; each later stage doubles them.
        blocks: Blocks per stage; every stage but the first halves the image.
        channels: How many channels the images have.
        tasks: One head for every task: ``forward(images, task)``
            (:class:`~curvlab.nets.heads.MultiHead`). ``None`` shares one.
    """
    if block not in _BLOCKS:
        raise ValueError(f"block= must be one of {list(_BLOCKS)}; got {block!r}")
    if norm not in _NORMS:
        raise ValueError(f"norm= must be one of {list(_NORMS)}; got {norm!r}")
    whole(classes=classes, nf=nf, channels=channels, blocks=min(blocks, default=0))

    def make() -> nn.Module:
        network = SlimResNet(_BLOCKS[block], _NORMS[norm], nf, blocks, channels, classes)
        if tasks is None:
            return network
        network.head = nn.Identity()
        return MultiHead(network, nf * 2 ** (len(blocks) - 1), classes, tasks)

    return build(make, seed, dtype, device)


Normalise = Callable[[int], nn.Module]


class StableBlock(nn.Module):
    """One convolution: ``BN(relu(BN(relu(conv x)) + shortcut x))``, a bare 1x1 as shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, normalise: Normalise) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = normalise(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        self.norm2 = normalise(outputs)

    def forward(self, images: Tensor) -> Tensor:
        inner = self.norm1(relu(self.conv(images)))
        result: Tensor = self.norm2(relu(inner + self.shortcut(images)))
        return result


class GemBlock(nn.Module):
    """Two convolutions: ``relu(BN(conv(relu(BN(conv x)))) + shortcut x)``, shortcut 1x1 with BN."""

    def __init__(self, inputs: int, outputs: int, stride: int, normalise: Normalise) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = normalise(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = normalise(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), normalise(outputs)
            )

    def forward(self, images: Tensor) -> Tensor:
        inner = relu(self.norm1(self.conv1(images)))
        return relu(self.norm2(self.conv2(inner)) + self.shortcut(images))


class SlimResNet(nn.Module):
    """Stem, stages of blocks, mean over the image, one linear head."""

    def __init__(
        self,
        block: type[StableBlock] | type[GemBlock],
        normalise: Normalise,
        nf: int,
        blocks: Sequence[int],
        channels: int,
        classes: int,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, nf, 3, padding=1, bias=False)
        self.norm = normalise(nf)
        stages: list[nn.Module] = []
        width = nf
        for stage, count in enumerate(blocks):
            outputs = nf * 2**stage
            for index in range(count):
                stride = 2 if stage > 0 and index == 0 else 1
                stages.append(block(width, outputs, stride, normalise))
                width = outputs
        self.blocks = nn.Sequential(*stages)
        self.head: nn.Module = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        if images.dim() != 4 or images.shape[1] != self.conv.in_channels:
            raise ValueError(
                f"slim_resnet18 needs images (N, {self.conv.in_channels}, H, W); "
                f"got {tuple(images.shape)}"
            )
        features = self.blocks(relu(self.norm(self.conv(images))))
        logits: Tensor = self.head(features.mean((-2, -1)))
        return logits


_BLOCKS: dict[str, type[StableBlock] | type[GemBlock]] = {"stable": StableBlock, "gem": GemBlock}

_NORMS: dict[str, Normalise] = {
    "batch": nn.BatchNorm2d,
    "batch_untracked": lambda width: nn.BatchNorm2d(width, track_running_stats=False),
    # at most 4 groups, fewer where the width does not divide
    "group": lambda width: nn.GroupNorm(gcd(4, width), width),
    "none": lambda _: nn.Identity(),
}
