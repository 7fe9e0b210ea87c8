"""Small models of the kinds that people bring, each with what its loss is and how it is asked for.

Stand-ins for transformers' and peft's classes keep their habits: dict batches, outputs with
``.loss`` and ``.logits``, losses in float32 whatever the model is, tied and frozen weights.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from curvlab import Objective
from curvlab.losses import next_token, sequence

WORDS, WIDTH, SAMPLES, TOKENS = 7, 4, 6, 5


def draw(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def pick(high, *shape, seed=2):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


class Attention(nn.Module):
    def __init__(self, causal=True):
        super().__init__()
        self.qkv, self.out, self.causal = (
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
            causal,
        )

    def forward(self, x):
        split = self.qkv(x).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*split, is_causal=self.causal)
        return self.out(seen.transpose(1, 2).flatten(2))


class RMSNorm(nn.Module):
    """LLaMA's: in float32 whatever comes in."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
        return self.weight * wide.to(x.dtype)


class Language(nn.Module):
    """A decoder in the manner of transformers: tied weights, own loss, computed in float32."""

    def __init__(self, norm=lambda: nn.LayerNorm(WIDTH), checkpointed=None):
        super().__init__()
        self.words, self.norm, self.attend = nn.Embedding(WORDS, WIDTH), norm(), Attention()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.drop, self.checkpointed = nn.Dropout(0.1), checkpointed

    def forward(self, input_ids, attention_mask=None, labels=None):  # noqa: ARG002
        x = self.words(input_ids)
        if self.checkpointed is None:
            x = x + self.drop(self.attend(self.norm(x)))
        else:
            body = lambda x: self.attend(self.norm(x))  # noqa: E731
            x = x + checkpoint(body, x, use_reentrant=self.checkpointed)
        logits = self.head(x)
        loss = None if labels is None else next_token(logits.float(), labels)
        return SimpleNamespace(logits=logits, loss=loss)


class Pairs(Language):
    """nanoGPT's habit: ``logits, loss = model(tokens, targets)``."""

    def forward(self, tokens, targets):
        logits = super().forward(tokens).logits
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Classifier(nn.Module):
    """BERT's habit, and ViT's with pixels."""

    def __init__(self, pixels=False):
        super().__init__()
        self.embed = nn.Conv2d(1, WIDTH, 2, 2) if pixels else nn.Embedding(WORDS, WIDTH)
        self.attend, self.head = Attention(causal=False), nn.Linear(WIDTH, 3)

    def forward(self, input_ids=None, pixel_values=None, labels=None):
        x = self.embed(input_ids if pixel_values is None else pixel_values)
        x = x if pixel_values is None else x.flatten(2).mT
        logits = self.head((x + self.attend(x)).mean(1))
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return SimpleNamespace(logits=logits, loss=loss)


class Translator(nn.Module):
    """T5's habit: the decoder's inputs are made from the labels."""

    def __init__(self):
        super().__init__()
        self.words, self.attend = nn.Embedding(WORDS, WIDTH), Attention()
        self.head = nn.Linear(WIDTH, WORDS)

    def prepare_decoder_input_ids_from_labels(self, labels):
        return F.pad(labels[:, :-1].clamp_min(0), (1, 0))

    def forward(self, input_ids, labels=None, decoder_input_ids=None):
        if decoder_input_ids is None:
            if labels is None:
                raise ValueError("You have to specify either decoder_input_ids or labels")
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        x = self.words(decoder_input_ids) + torch.tanh(self.words(input_ids)).mean(1, keepdim=True)
        logits = self.head(x + self.attend(x))
        loss = None if labels is None else sequence(logits, labels)
        return SimpleNamespace(logits=logits, loss=loss)


class Adapted(nn.Module):
    """peft's habit: frozen weights and a trainable product of two thin matrices."""

    def __init__(self, dtype=None):
        super().__init__()
        self.base = Language()
        self.base.requires_grad_(False).to(dtype)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, input_ids, labels=None):
        x = self.base.words(input_ids)
        hidden = self.base.attend(x) + self.up(self.down(x.to(self.down.weight.dtype))).to(x.dtype)
        logits = self.base.head(torch.tanh(hidden))
        loss = None if labels is None else next_token(logits.float(), labels)
        return SimpleNamespace(logits=logits, loss=loss)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.LSTM(3, WIDTH, batch_first=True), nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.head(self.cell(x)[0][:, -1])


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.norm = nn.Conv2d(1, 4, 3, 2, 1), nn.GroupNorm(2, 4)
        self.up, self.out = nn.ConvTranspose2d(4, 2, 2, 2), nn.Conv2d(3, 1, 1)

    def forward(self, x):
        return self.out(torch.cat([x, self.up(F.silu(self.norm(self.down(x))))], 1))


class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x, edges):
        h = torch.tanh(self.a(x))
        return self.b(h + torch.zeros_like(h).index_add(0, edges[:, 1], h[edges[:, 0]]))


class Experts(nn.Module):
    """Each sample goes to one expert, weighed by its gate."""

    def __init__(self):
        super().__init__()
        self.gate, self.head = nn.Linear(3, 2), nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(3, WIDTH) for _ in range(2))

    def forward(self, x):
        gates = self.gate(x).softmax(1)
        best = gates.argmax(1)
        h = x.new_zeros(len(x), WIDTH)
        for i, expert in enumerate(self.experts):
            h = h.index_put((torch.where(best == i)[0],), torch.tanh(expert(x[best == i])))
        return self.head(h * gates.amax(1, keepdim=True))


class Plain(nn.Module):
    def __init__(self, inside=torch.tanh, norm=None):
        super().__init__()
        self.a, self.b, self.inside = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 3), inside
        self.norm = norm

    def forward(self, x):
        h = self.inside(self.a(x))
        return self.b(h if self.norm is None else self.norm(h))


class Autocasting(Plain):
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x)


class LogProbabilities(Plain):
    def forward(self, x):
        return super().forward(x).log_softmax(1)


class Square(torch.autograd.Function):
    """A Function of one's own, written so that it can be differentiated twice."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, seed):
        return 2 * seed * ctx.saved_tensors[0]


class Detached(Square):
    """The same, written so that it cannot."""

    @staticmethod
    def backward(ctx, seed):
        return 2 * seed * ctx.saved_tensors[0].detach()


def rounded(x):
    return torch.tanh(x + (torch.round(4 * x) / 4 - x).detach())


def denoise(model, x):
    # drawn in float32 whatever x is: float64 would draw others
    time, noise = torch.rand(len(x), 1).to(x.dtype), torch.randn(x.shape).to(x.dtype)
    return F.mse_loss(model(x + time * noise), noise)


def contrast(model, views):
    one, other = (F.normalize(model(view), dim=1) for view in views)
    return F.cross_entropy(one @ other.T / 0.5, torch.arange(len(one)))


def seeded(function):
    """With the numbers that frozen masks draw for the first batch."""

    def run(model, batch):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return function(model, batch)

    return run


def weight_normed():
    model = Plain()
    model.a = nn.utils.parametrizations.weight_norm(model.a)
    return model


def by_formula(model, batch):
    """torch's own second derivative of weight_norm is wrong in 2.13."""
    scale, direction = model.a.parametrizations.weight.parameters()
    weight = scale * direction / direction.norm(dim=1, keepdim=True)
    return CE(model.b(torch.tanh(F.linear(batch[0], weight, model.a.bias))), batch[1])


def halved(dtype):
    return lambda: Plain().to(dtype)


@dataclass(frozen=True)
class Case:
    """A model as its user would ask for it, and what is refused until the cure is applied."""

    make: Callable[[], nn.Module]
    loss: Any
    data: Any
    options: dict[str, Any] = field(default_factory=dict)
    truth: Callable[[nn.Module, Any], torch.Tensor] | None = None  # of loss and data by default
    refused: str = ""  # words of the refusal; then:
    cure: dict[str, Any] = field(default_factory=dict)  # options, or
    cured: Callable[[], nn.Module] | None = None  # another model
    coarse: bool = False  # computes in float32 inside
    split: bool = True  # whether the outputs are known apart from the loss


def own_loss(model, batch):
    return model(**batch).loss


def with_labels(high=WORDS, pad=False):
    labels = pick(high, SAMPLES, TOKENS)
    batch = {"input_ids": labels.clone(), "labels": labels}
    if pad:
        batch["labels"][1, 2:] = -100
    return batch


ROWS = draw(SAMPLES, 3), pick(3, SAMPLES)
IDS = {"input_ids": pick(WORDS, SAMPLES, TOKENS), "labels": pick(3, SAMPLES)}
PIXELS = {"pixel_values": draw(SAMPLES, 1, 4, 4), "labels": pick(3, SAMPLES)}
EDGES = torch.tensor([[5, 0], [4, 2], [3, 3], [1, 4], [0, 5], [2, 1]])
GRAPH = (draw(SAMPLES, 3), EDGES), pick(3, SAMPLES)
CE = F.cross_entropy

CASES = {
    "GPT-2": Case(Language, next_token, with_labels(pad=True), {"mode": "eval"}, coarse=True),
    "GPT-2, own loss": Case(
        Language, None, with_labels(pad=True), {"mode": "eval"}, own_loss, "pass count=",
        {"count": next_token.count}, coarse=True, split=False,
    ),
    "GPT-2, cross_entropy": Case(
        Language, CE, with_labels(), {"mode": "eval"}, own_loss, r"losses\.next_token",
        {"loss": next_token}, coarse=True,
    ),
    "GPT-2 in training": Case(
        Language, next_token, with_labels(), {}, own_loss, r'drop \(Dropout\).*mode="eval"',
        {"mode": "eval"}, coarse=True,
    ),
    "nanoGPT": Case(
        Pairs, Objective(lambda model, batch: model(*batch)[1]), (pick(WORDS, SAMPLES, TOKENS),
        pick(WORDS, SAMPLES, TOKENS, seed=5)), {"mode": "eval"}, split=False,
    ),
    "LLaMA": Case(
        lambda: Language(RMSNorm), next_token, with_labels(), {"mode": "eval"}, own_loss,
        coarse=True,
    ),
    "T5": Case(Translator, sequence, with_labels(pad=True), {}, own_loss),
    "BERT": Case(Classifier, CE, IDS, {}, own_loss),
    "ViT": Case(lambda: Classifier(True), CE, PIXELS, {}, own_loss),
    "LoRA": Case(Adapted, next_token, with_labels(), {"mode": "eval"}, own_loss, coarse=True),
    "LoRA on bfloat16": Case(
        lambda: Adapted(torch.bfloat16), next_token, with_labels(), {"mode": "eval"}, own_loss,
        "others are narrower.*dtype=torch.float32", {"dtype": torch.float32}, coarse=True,
    ),
    "checkpointed": Case(
        lambda: Language(checkpointed=False), next_token, with_labels(), {"mode": "eval"},
        own_loss, coarse=True,
    ),
    "reentrant": Case(
        lambda: Language(checkpointed=True), next_token, with_labels(), {"mode": "eval"},
        own_loss, "use_reentrant=False", cured=lambda: Language(checkpointed=False), coarse=True,
    ),
    "LSTM": Case(Recurrent, CE, (draw(SAMPLES, 4, 3), pick(3, SAMPLES))),
    "U-Net": Case(UNet, F.mse_loss, (draw(SAMPLES, 1, 4, 4), draw(SAMPLES, 1, 4, 4, seed=3))),
    "graph": Case(Graph, CE, GRAPH, {}, lambda m, b: CE(m(*b[0]), b[1])),
    "experts": Case(Experts, CE, ROWS),
    "compiled": Case(lambda: torch.compile(Plain()), CE, ROWS),
    "bfloat16": Case(
        halved(torch.bfloat16), CE, ROWS, refused="dtype=torch.float32",
        cure={"dtype": torch.float32},
    ),
    "float16": Case(
        halved(torch.float16), CE, ROWS, refused="dtype=torch.float32",
        cure={"dtype": torch.float32},
    ),
    "autocast inside": Case(Autocasting, CE, ROWS),
    "contrastive": Case(
        Plain, Objective(contrast), (draw(SAMPLES, 3), draw(SAMPLES, 3, seed=4)), {}, contrast,
        'chunk="batch"', {"chunk": "batch"}, split=False,
    ),
    "diffusion": Case(
        Plain, Objective(denoise), draw(SAMPLES, 3), {}, seeded(denoise), 'mode="frozen-masks"',
        {"mode": "frozen-masks"}, split=False,
    ),
    "own Function": Case(lambda: Plain(Square.apply), CE, ROWS),
    "detached Function": Case(
        lambda: Plain(Detached.apply), CE, ROWS, refused="write it with torch operations",
        cured=lambda: Plain(torch.square),
    ),
    "straight-through": Case(
        lambda: Plain(rounded), CE, ROWS, refused="straight-through.*check=False",
        cure={"check": False},
    ),
    "weight_norm": Case(weight_normed, CE, ROWS, {}, by_formula),
    "BatchNorm": Case(
        lambda: Plain(norm=nn.BatchNorm1d(WIDTH)), CE, ROWS, refused=r'mode="batch-statistics"',
        cure={"mode": "batch-statistics"},
    ),
    "log-probabilities": Case(LogProbabilities, F.nll_loss, ROWS, {}, split=False),
}  # fmt: skip
