"""ViT-CIFAR: 12,466,946 parameters with 2 classes, 12,468,101 with 5.

Oddities of the reference, kept because the paper's counts and numbers are its: a second GELU after
the last linear layer of each MLP, scores divided by the square root of the whole hidden size (not
of one head's share), separate query, key, value and output layers, positions drawn from a standard
normal. Dropout is 0 there, so there is none here.

Attention is written out as matmul and softmax: the fused kernels have no second derivative.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, softmax

from curvlab.checks import whole
from curvlab.nets.heads import MultiHead
from curvlab.nets.initialise import Seed, build, normal_


def vit_cifar(
    classes: int = 2,
    *,
    hidden: int = 384,
    depth: int = 7,
    heads: int = 8,
    mlp: int | None = None,
    side: int = 32,
    patch: int = 4,
    channels: int = 3,
    tasks: int | None = None,
    seed: Seed = 0,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> nn.Module:
    """Images ``(N, channels, side, side)`` to logits ``(N, classes)``.

    Args:
        classes: Outputs of a head.
        hidden: Features of a token; a multiple of ``heads``.
        depth: Number of blocks.
        heads: How many heads each attention has; their number does not change the parameter count.
        mlp: Hidden units of each block's MLP; ``None`` is ``4 * hidden``.
        side: Pixels along an image's side; a multiple of ``patch``.
        patch: Pixels along a patch's side: the default makes 8 x 8 patches of 48 numbers.
        channels: How many channels the images have.
        tasks: One head for every task: ``forward(images, task)``
            (:class:`~curvlab.nets.heads.MultiHead`). ``None`` shares one.
    """
    mlp = 4 * hidden if mlp is None else mlp
    whole(classes=classes, hidden=hidden, heads=heads, mlp=mlp)
    whole(side=side, patch=patch, channels=channels)
    whole(0, depth=depth)
    if hidden % heads:
        raise ValueError(f"hidden= must be a multiple of heads=; got {hidden} and {heads}")
    if side % patch:
        raise ValueError(f"side= must be a multiple of patch=; got {side} and {patch}")

    def make() -> nn.Module:
        network = VisionTransformer(classes, hidden, depth, heads, mlp, side, patch, channels)
        if tasks is None:
            return network
        network.head = nn.Identity()
        return MultiHead(network, hidden, classes, tasks)

    return build(make, seed, dtype, device)


class Attention(nn.Module):
    """Multi-head self-attention over tokens ``(N, T, hidden)``."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.scale = hidden**-0.5
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.output = nn.Linear(hidden, hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        n, count, hidden = tokens.shape

        def split(features: Tensor) -> Tensor:
            return features.view(n, count, self.heads, hidden // self.heads).transpose(1, 2)

        # scaling the queries, not the scores: T x hidden numbers instead of heads x T x T
        query = split(self.query(tokens) * self.scale)
        weights = softmax(query @ split(self.key(tokens)).transpose(-2, -1), dim=-1)
        mixed = (weights @ split(self.value(tokens))).transpose(1, 2).reshape(n, count, hidden)
        result: Tensor = self.output(mixed)
        return result


class Encoder(nn.Module):
    """One pre-norm block: attention and an MLP with two GELUs, each added to its input."""

    def __init__(self, hidden: int, heads: int, mlp: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads)
        self.norm2 = nn.LayerNorm(hidden)
        self.widen = nn.Linear(hidden, mlp)
        self.narrow = nn.Linear(mlp, hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + self.attention(self.norm1(tokens))
        return tokens + gelu(self.narrow(gelu(self.widen(self.norm2(tokens)))))


class VisionTransformer(nn.Module):
    """Patches to tokens, a class token, learned positions, blocks, a head on the class token."""

    def __init__(
        self,
        classes: int,
        hidden: int,
        depth: int,
        heads: int,
        mlp: int,
        side: int,
        patch: int,
        channels: int,
    ) -> None:
        super().__init__()
        self.image = (channels, side, side)
        self.patch = patch
        count = (side // patch) ** 2
        self.embed = nn.Linear(patch * patch * channels, hidden)
        self.token = nn.Parameter(torch.empty(1, 1, hidden))
        self.positions = nn.Parameter(torch.empty(1, count + 1, hidden))
        self.blocks = nn.Sequential(*(Encoder(hidden, heads, mlp) for _ in range(depth)))
        self.norm = nn.LayerNorm(hidden)
        self.head: nn.Module = nn.Linear(hidden, classes)

    def draw_(self, generator: torch.Generator) -> None:
        """Fill the class token and the positions, in place."""
        normal_(self.token, generator)
        normal_(self.positions, generator)

    def forward(self, images: Tensor) -> Tensor:
        if images.dim() != 4 or tuple(images.shape[1:]) != self.image:
            raise ValueError(
                f"this vit_cifar needs images (N, {', '.join(map(str, self.image))}); "
                f"got {tuple(images.shape)}"
            )
        words = self.embed(self._patches(images))
        tokens = torch.cat([self.token.expand(len(words), -1, -1), words], dim=1)
        tokens = self.blocks(tokens + self.positions)
        logits: Tensor = self.head(self.norm(tokens[:, 0]))
        return logits

    def _patches(self, images: Tensor) -> Tensor:
        """``(N, C, S, S)`` to ``(N, patches, patch * patch * C)``: row, column, channel."""
        n, channels, side, _ = images.shape
        grid = side // self.patch
        tiles = images.reshape(n, channels, grid, self.patch, grid, self.patch)
        return tiles.permute(0, 2, 4, 3, 5, 1).reshape(n, grid * grid, -1)
