"""Models made of blocks, and how products of two engines are compared."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from curvlab.nets import slim_resnet18, vit_cifar

WORDS, WIDTH = 13, 8


class Layer(nn.Module):
    """Takes a mask by name and returns a tuple with a dictionary in it, as foreign layers do."""

    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inputs, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.2)
        self.heads = heads

    def forward(self, words: Tensor, *, mask: Tensor) -> tuple[Tensor, dict[str, Any]]:
        n, length, width = words.shape
        split = self.inputs(self.norm1(words)).view(n, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(query, key, value, attn_mask=mask)
        words = words + self.output(mixed.transpose(1, 2).reshape(n, length, width))
        words = words + self.dropout(self.narrow(gelu(self.widen(self.norm2(words)))))
        return words, {"mean": words.mean(-1), "name": "layer"}


class Language(nn.Module):
    """A decoder with tied ends, one layer used twice and something from inside every layer."""

    def __init__(self, depth: int = 3, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
        words, means = self.embed(tokens), 0.0
        for layer in [*self.layers, self.layers[0]]:
            words, more = layer(words, mask=mask)
            means = means + more["mean"]
        logits: Tensor = self.head(words) + torch.as_tensor(means)[..., None] ** 2
        return logits.transpose(1, 2)


def language(seed: int = 0, **options: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(seed)
    return Language(**options).eval(), (
        torch.randint(WORDS, (5, 7)),
        torch.randint(WORDS, (5, 7)),
    )


def convolutional(norm: str = "batch") -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    model = slim_resnet18(classes=3, nf=4, norm=norm, seed=1)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(6, 3, 8, 8, generator=generator)
    with torch.no_grad():
        model.train()(images)
    return model.eval(), (images, torch.arange(6) % 3)


def vision() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    model = vit_cifar(classes=2, hidden=12, depth=2, heads=3, side=8, patch=4, seed=3)
    generator = torch.Generator().manual_seed(4)
    return model, (torch.randn(4, 3, 8, 8, generator=generator), torch.arange(4) % 2)


def sequential() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 3))
    return model, (torch.randn(9, 4), torch.arange(9) % 3)


MODELS = {
    "language": language,
    "batch norm": convolutional,
    "group norm": lambda: convolutional("group"),
    "vision": vision,
    "sequential": sequential,
}


def products(kind: Any, model: nn.Module, batch: Any, **options: Any) -> Tensor:
    operator = kind(model, cross_entropy, batch, dtype=torch.float64, **options)
    generator = torch.Generator().manual_seed(6)
    block = torch.randn(3, operator.n, generator=generator, dtype=torch.float64)
    result: Tensor = operator @ block
    return result


def off(result: Tensor, truth: Tensor) -> float:
    return float((result - truth).norm() / truth.norm())
