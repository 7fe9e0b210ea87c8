"""A small GPT: tokens to the logits of each next token. For examples and measurements."""

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from curvlab.checks import whole
from curvlab.nets.initialise import Seed, build, normal_


def gpt(
    vocabulary: int = 256,
    *,
    context: int = 128,
    hidden: int = 384,
    depth: int = 6,
    heads: int = 6,
    seed: Seed = 0,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> nn.Module:
    """Tokens ``(N, T)``, ``T <= context``, to logits ``(N, T, vocabulary)``.

    Every weight is applied by a layer of its own (embeddings, linear layers, norms), and none is
    tied. The default reads bytes and has 10,893,312 parameters.

    Args:
        vocabulary: How many tokens there are.
        context: The most tokens of a text.
        hidden: Features of a token; a multiple of ``heads``.
        depth: Number of blocks.
        heads: How many heads each attention has.
    """
    whole(vocabulary=vocabulary, context=context, hidden=hidden, heads=heads)
    whole(0, depth=depth)
    if hidden % heads:
        raise ValueError(f"hidden= must be a multiple of heads=; got {hidden} and {heads}")
    return build(lambda: GPT(vocabulary, context, hidden, depth, heads), seed, dtype, device)


class Block(nn.Module):
    """One pre-norm block: causal attention and an MLP, each added to its input."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(hidden)
        self.attend = nn.Linear(hidden, 3 * hidden)
        self.output = nn.Linear(hidden, hidden)
        self.norm2 = nn.LayerNorm(hidden)
        self.widen = nn.Linear(hidden, 4 * hidden)
        self.narrow = nn.Linear(4 * hidden, hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        n, count, hidden = tokens.shape
        joined = self.attend(self.norm1(tokens)).view(n, count, 3, self.heads, -1)
        query, key, value = joined.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        tokens = tokens + self.output(mixed.transpose(1, 2).reshape(n, count, hidden))
        wide: Tensor = self.widen(self.norm2(tokens))
        added: Tensor = self.narrow(gelu(wide))
        return tokens + added


class Table(nn.Embedding):
    """An embedding that starts small beside what blocks add to it, as GPT-2's does."""

    def draw_(self, generator: torch.Generator) -> None:
        """Fill it with normal numbers of deviation 0.02, in place."""
        normal_(self.weight, generator)
        self.weight.mul_(0.02)


class GPT(nn.Module):
    """Embedded tokens and positions, blocks, a norm and a head."""

    def __init__(self, vocabulary: int, context: int, hidden: int, depth: int, heads: int) -> None:
        super().__init__()
        self.tokens = Table(vocabulary, hidden)
        self.positions = Table(context, hidden)
        self.blocks = nn.Sequential(*(Block(hidden, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.dim() != 2 or tokens.shape[1] > len(self.positions.weight):
            raise ValueError(
                f"this gpt needs tokens (N, T) with T of at most {len(self.positions.weight)}; got "
                f"{tuple(tokens.shape)}"
            )
        places = torch.arange(tokens.shape[1], device=tokens.device)
        features = self.blocks(self.tokens(tokens) + self.positions(places))
        logits: Tensor = self.head(self.norm(features))
        return logits
