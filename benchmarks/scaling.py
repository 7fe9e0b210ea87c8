"""Models of known sizes for ``curvlab plan --counted``: made without memory, nothing is run.

    curvlab plan --model benchmarks.scaling:vit_b --data benchmarks.scaling:images --counted \
        --machine a100 --samples 1000 --k 10 --tasks 20 --ranks 8

``python -m benchmarks.scaling`` prints the plans that curvlab/guide/scaling.md quotes, and ``python
-m benchmarks.scaling curve FILE`` its table of counted messages and bytes, from the rows that
``python -m benchmarks distributed --size full`` wrote.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, silu, softmax

from benchmarks.measure import Row, format_table, read_rows
from curvlab.nets.vit import VisionTransformer
from curvlab.plan import MACHINES, scaled
from curvlab.plan.cost import counted
from curvlab.plan.in_shards import counted_in_shards


def vit_b() -> nn.Module:
    """ViT-B/16 at 224 pixels: 86 M parameters."""
    return VisionTransformer(1000, 768, 12, 12, 3072, 224, 16, 3)


def vit_l() -> nn.Module:
    """ViT-L/16 at 224 pixels: 304 M parameters."""
    return VisionTransformer(1000, 1024, 24, 16, 4096, 224, 16, 3)


def decoder_7b() -> nn.Module:
    """A decoder of the usual shape: 32 blocks, 4,096 features, 6.7e9 parameters."""
    return Decoder(32_000, 4096, 32, 32, 11_008)


def decoder_1b() -> nn.Module:
    """The same shape with 24 blocks and 2,048 features: 1.4e9 parameters."""
    return Decoder(32_000, 2048, 24, 16, 5632)


def images() -> tuple[Tensor, Tensor]:
    """Two images, for their shapes."""
    return torch.zeros(2, 3, 224, 224), torch.zeros(2, dtype=torch.int64)


def text() -> tuple[Tensor, Tensor]:
    """Two texts of 2,048 tokens, for their shapes."""
    tokens = torch.zeros(2, 2048, dtype=torch.int64)
    return tokens, tokens


class Decoder(nn.Module):
    """Tokens ``(N, T)`` to logits ``(N, vocabulary, T)``."""

    def __init__(self, words: int, hidden: int, depth: int, heads: int, mlp: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads, mlp) for _ in range(depth))
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        features = self.words(tokens)
        for block in self.blocks:
            features = block(features)
        logits: Tensor = self.head(self.norm(features))
        return logits.transpose(1, 2)


class Block(nn.Module):
    """Causal attention and a gated MLP, without biases."""

    def __init__(self, hidden: int, heads: int, mlp: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.mix = nn.Linear(hidden, 3 * hidden, bias=False)
        self.output = nn.Linear(hidden, hidden, bias=False)
        self.gate, self.up = (nn.Linear(hidden, mlp, bias=False) for _ in range(2))
        self.down = nn.Linear(mlp, hidden, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        n, count, hidden = features.shape
        parts = self.mix(self.norm1(features)).view(n, count, 3, self.heads, -1).transpose(1, 3)
        query, key, value = parts.unbind(2)
        mask = torch.full((count, count), float("-inf"), device=features.device).triu(1)
        scores = query @ key.transpose(-2, -1) * (hidden // self.heads) ** -0.5 + mask
        mixed = (softmax(scores, -1) @ value).transpose(1, 2).reshape(n, count, hidden)
        features = features + self.output(mixed)
        inner = self.norm2(features)
        result: Tensor = features + self.down(silu(self.gate(inner)) * self.up(inner))
        return result


MODELS = {
    "vit_b": (vit_b, images),
    "vit_l": (vit_l, images),
    "decoder_1b": (decoder_1b, text),
    "decoder_7b": (decoder_7b, text),
}
HEADER = ["model", "n", "params", "graph", "rows", "peak", "fits", "s each", "min", "talking",
          "M f32", "M int8"]  # fmt: skip


def lines_of(name: str, samples: int = 1000, k: int = 10, tasks: int = 20) -> list[list[str]]:
    """A model's rows: gigabytes per rank, seconds per product, minutes per task."""
    make, batch = MODELS[name]
    machine = MACHINES["a100"]
    with torch.device("meta"):
        model = make()
    shards = name.startswith("decoder")
    lines = []
    for ranks in (8, 64, 256) if shards else (1, 8, 64):
        if shards:
            unit = counted_in_shards(model, cross_entropy, batch(), machine, ranks)
        else:
            unit = counted(model, cross_entropy, batch(), machine)
        found = scaled(unit, samples, k, 1e-3, tasks, machine.memory, ranks, machine.link)
        gigabytes = [found.parameters, found.graph, found.solver, found.peak]
        lines.append(
            [
                f"{name}, {ranks} x A100",
                f"{found.n / 1e6:,.0f} M",
                *(f"{count / 1e9:.1f}" for count in gigabytes),
                "yes" if found.fits else "no",
                f"{found.product_seconds:.3g}",
                f"{found.seconds / 60:.2g}",
                f"{found.communication_seconds / found.seconds:.1%}",
                f"{found.memories[0].bytes / 1e9:.1f}",
                f"{found.memories[2].bytes / 1e9:.1f}",
            ]
        )
    return lines


def curve(rows: list[Row]) -> str:
    """What a rank sends per call, counted, as a Markdown table: a column per number of ranks."""
    counted = {
        (entry.contender, entry.metric, int(entry.x)): entry.p50
        for entry in rows
        if entry.subject == "distributed" and entry.metric in ("messages", "bytes")
    }
    ranks = sorted({at for _, _, at in counted})
    names = list(dict.fromkeys(name for name, _, _ in counted))
    lines = [
        "| per call, on each rank | " + " | ".join(f"{count} ranks" for count in ranks) + " |",
        "|---" * (len(ranks) + 1) + "|",
    ]
    for name in names:
        cells = []
        for at in ranks:
            messages, size = counted.get((name, "messages", at)), counted[name, "bytes", at]
            held = f"{size / 1e6:,.0f} MB held"
            cells.append(held if messages is None else f"{messages:g}: {size:,.0f} B")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines).replace("| 1 ranks", "| 1 rank")


def main() -> int:
    """The tables of curvlab/guide/scaling.md."""
    if sys.argv[1:2] == ["curve"]:
        print(curve(read_rows(Path(sys.argv[2]))))
        return 0
    for name in sys.argv[1:] or MODELS:
        print(format_table(HEADER, lines_of(name)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
