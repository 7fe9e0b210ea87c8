"""Products with blocks computed again take the memory of one block, and the chooser knows it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import curvlab
from curvlab.batches import tensors
from curvlab.losses import IGNORED, next_token, sequence
from curvlab.nets import gpt, slim_resnet18, vit_cifar
from curvlab.operators.products import sizing
from curvlab.operators.products.sizing import LiveBytes
from tests.block_models import WIDTH, WORDS, Layer, language, off


def peak(operator: Any) -> int:
    vector = torch.ones(operator.n, dtype=operator.dtype)
    operator._kept.clear()
    with LiveBytes() as held:
        operator @ vector
    return held.peak


def test_memory_is_that_of_one_block() -> None:
    # Activations outweigh parameters here; each layer more adds its boundary, not its inside.
    def at(depth: int, engine: str) -> int:
        model, _ = language(depth=depth, width=16)
        batch = torch.randint(WORDS, (16, 48)), torch.randint(WORDS, (16, 48))
        return peak(curvlab.Hessian(model, cross_entropy, batch, engine=engine, chunk=16))

    growth = {engine: at(9, engine) - at(3, engine) for engine in ("retained", "blockwise")}
    assert growth["blockwise"] < growth["retained"] / 8
    assert at(9, "blockwise") < at(9, "retained") / 4


@pytest.mark.parametrize("kind", [curvlab.Hessian, curvlab.GaussNewton])
def test_beside_the_image_and_its_copy_there_is_one_block(kind: Any) -> None:
    # Parameters outweigh activations here. Nobody reads the gradient that is differentiated.
    blocks = 16
    layers = [nn.Sequential(nn.Linear(96, 96), nn.Tanh()) for _ in range(blocks)]
    sample = torch.randn(1, 96), torch.zeros(1, dtype=torch.int64)
    operator = kind(nn.Sequential(*layers), cross_entropy, sample, engine="blockwise")
    assert peak(operator) < (2 + 4 / blocks) * 4 * operator.n


def test_a_budget_that_no_graph_of_one_sample_fits_takes_blocks() -> None:
    model, _ = language(depth=12, width=16)
    torch.manual_seed(7)
    batch = torch.randint(WORDS, (2, 200)), torch.randint(WORDS, (2, 200))
    plain = curvlab.Hessian(model, cross_entropy, batch, chunk=1)
    data = sum(t.nbytes for t in batch)
    room = sizing.operator_room(0.0, data, 4 * plain.n, plain.n, 4)
    budget = (plain.cost.peak(1) / 3 - room) * sizing.FRAGMENTED
    small = curvlab.Hessian(model, cross_entropy, batch, budget=budget)
    assert small.engine.startswith("blockwise")
    vector = torch.randn(plain.n)
    assert off(small @ vector, plain @ vector) < 1e-5
    assert peak(small) < budget


def test_an_operator_that_is_not_checked_needs_no_room_for_the_check() -> None:
    model, _ = language(depth=2, width=64)
    batch = torch.randint(WORDS, (1, 4)), torch.randint(WORDS, (1, 4))
    plain = curvlab.Hessian(model, cross_entropy, batch, chunk=1)
    data = sum(t.nbytes for t in batch)
    none = sizing.operator_room(0.0, data, 4 * plain.n, plain.n, 4, checked=False)
    budget = (1.2 * plain.cost.peak(1) - none) * sizing.FRAGMENTED
    given: Any = {"budget": budget, "engine": "retained"}
    with pytest.raises(ValueError, match="pass a larger budget="):
        curvlab.Hessian(model, cross_entropy, batch, **given)
    small = curvlab.Hessian(model, cross_entropy, batch, check=False, **given)
    vector = torch.randn(plain.n)
    assert torch.equal(small @ vector, plain @ vector)
    assert peak(small) < budget


class Foreign(nn.Module):
    """In the manner of transformers: several inputs by name, ties across blocks, ``.logits``."""

    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(Layer(WIDTH) for _ in range(depth))
        for layer in self.layers[1:]:
            layer.widen.weight = self.layers[0].widen.weight  # type: ignore[union-attr]
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, **_: Tensor
    ) -> SimpleNamespace:
        causal = torch.ones(input_ids.shape[1], input_ids.shape[1], dtype=torch.bool).tril()
        mask = causal & attention_mask[:, None, None, :].bool()
        words = self.words(input_ids) + self.places(position_ids)
        for layer in self.layers:
            words, _ = layer(words, mask=mask)
        return SimpleNamespace(logits=self.head(words))


def foreign() -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(8)
    tokens = torch.randint(WORDS, (3, 64))
    seen = torch.ones(3, 64, dtype=torch.int64)
    seen[1, 50:] = 0
    labels = tokens.masked_fill(seen == 0, IGNORED)
    places = torch.arange(64).repeat(3, 1)
    batch = {"input_ids": tokens, "attention_mask": seen, "position_ids": places, "labels": labels}
    return Foreign().eval(), next_token, batch


def tied_gpt() -> tuple[nn.Module, Any, Any]:
    model: Any = gpt(WORDS, context=64, hidden=12, depth=6, heads=3, seed=0)
    model.head.weight = model.tokens.weight
    generator = torch.Generator().manual_seed(9)
    tokens = torch.randint(WORDS, (2, 65), generator=generator)
    return model, sequence, (tokens[:, :-1], tokens[:, 1:])


def pictures(model: nn.Module) -> tuple[nn.Module, Any, Any]:
    generator = torch.Generator().manual_seed(10)
    images = torch.randn(2, 3, 32, 32, generator=generator)
    return model.eval(), cross_entropy, (images, torch.arange(2) % 2)


def chain() -> nn.Module:
    torch.manual_seed(11)
    layers = [nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.GELU()) for _ in range(6)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(3 * 32 * 32, 2))


LONG = {
    "gpt": tied_gpt,
    "transformers": foreign,
    "vit": lambda: pictures(vit_cifar(2, hidden=12, depth=6, heads=3, seed=3)),
    "resnet": lambda: pictures(slim_resnet18(2, nf=4, seed=1)),
    "sequential": lambda: pictures(chain()),
}


@pytest.mark.parametrize("name", LONG)
def test_the_chooser_takes_blocks_between_what_they_need_and_what_graphs_need(name: str) -> None:
    model, loss, batch = LONG[name]()
    given: Any = {"dtype": torch.float64}
    whole, parts = (
        curvlab.Hessian(model, loss, batch, engine=engine, chunk=1, **given)
        for engine in ("retained", "blockwise")
    )
    assert parts.cost.peak(1) < whole.cost.peak(1)
    data = sum(t.nbytes for t in tensors(batch))
    held = 8 * whole.n + sum(b.nbytes for b in whole.problem.buffers.values())
    none = sizing.operator_room(0.0, data, held, whole.n, 8)
    budgets = [
        ((1 - share) * parts.cost.peak(1) + share * whole.cost.peak(1) - none) * sizing.FRAGMENTED
        for share in (0.5, 1.5)
    ]
    small, large = (curvlab.Hessian(model, loss, batch, budget=b, **given) for b in budgets)
    assert small.engine.startswith("blockwise")
    assert large.engine.startswith("retained")
    generator = torch.Generator().manual_seed(12)
    vector = torch.randn(whole.n, generator=generator, dtype=torch.float64)
    assert off(small @ vector, whole @ vector) < 1e-12
    assert off(small.gradient(), whole.gradient()) < 1e-12
