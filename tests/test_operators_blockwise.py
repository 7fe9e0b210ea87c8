"""Products with blocks computed again: exact for any model, with the memory of one block."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

import curvlab
from curvlab.batches import tensors
from curvlab.losses import IGNORED, next_token, sequence
from curvlab.nets import gpt, slim_resnet18, vit_cifar
from curvlab.operators.products import sizing
from curvlab.operators.products.blocks import find_blocks
from curvlab.operators.products.sizing import LiveBytes
from curvlab.probe import OperatorError

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
KINDS = (curvlab.Hessian, curvlab.GaussNewton, curvlab.FunctionalHessian, curvlab.EmpiricalFisher)


def products(kind: Any, model: nn.Module, batch: Any, **options: Any) -> Tensor:
    operator = kind(model, cross_entropy, batch, dtype=torch.float64, **options)
    generator = torch.Generator().manual_seed(6)
    block = torch.randn(3, operator.n, generator=generator, dtype=torch.float64)
    result: Tensor = operator @ block
    return result


def off(result: Tensor, truth: Tensor) -> float:
    return float((result - truth).norm() / truth.norm())


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", MODELS)
def test_products_in_blocks_are_those_of_the_whole_graph(name: str, kind: Any) -> None:
    model, batch = MODELS[name]()
    assert len(find_blocks(model)) >= 2
    truth = products(kind, model, batch, engine="rebuilt")
    for chunk in (None, 2):
        assert off(products(kind, model, batch, engine="blockwise", chunk=chunk), truth) < 1e-12


def test_graphs_that_are_not_kept_give_the_same_products() -> None:
    model, batch = language()
    truth = products(curvlab.Hessian, model, batch)
    operator = curvlab.Hessian(
        model, cross_entropy, batch, dtype=torch.float64, engine="blockwise", chunk=1
    )
    operator._keep, operator._kept = 1, {}
    generator = torch.Generator().manual_seed(6)
    block = torch.randn(3, operator.n, generator=generator, dtype=torch.float64)
    assert off(operator @ block, truth) < 1e-12


def test_dropout_has_the_same_frozen_masks_when_a_block_runs_again() -> None:
    model, batch = language()
    model.train()
    options = {"mode": "frozen-masks"}
    truth = products(curvlab.Hessian, model, batch, engine="rebuilt", **options)
    assert (
        off(products(curvlab.Hessian, model, batch, engine="blockwise", **options), truth) < 1e-12
    )
    assert off(truth, products(curvlab.Hessian, model, batch, mode="eval")) > 1e-3


def test_the_gradient_and_selected_parameters_are_exact_too() -> None:
    model, batch = language()
    for select in (None, "layers.1.*", "embed*"):
        options = {"dtype": torch.float64, "select": select}
        plain = curvlab.Hessian(model, cross_entropy, batch, engine="rebuilt", **options)
        blocks = curvlab.Hessian(model, cross_entropy, batch, engine="blockwise", **options)
        assert off(blocks.gradient(), plain.gradient()) < 1e-13
        vector = torch.randn(plain.n, dtype=torch.float64)
        assert off(blocks @ vector, plain @ vector) < 1e-12


def test_the_model_is_left_as_it_was() -> None:
    model, batch = language()
    patched = model.layers[1].forward  # type: ignore[union-attr,index]
    model.layers[1].forward = lambda *a, **k: patched(*a, **k)  # type: ignore[union-attr,index]
    before = [dict(module.__dict__) for module in model.modules()]
    truth = products(curvlab.Hessian, model, batch, engine="rebuilt")
    assert off(products(curvlab.Hessian, model, batch, engine="blockwise"), truth) < 1e-12
    after = [dict(module.__dict__) for module in model.modules()]
    assert [set(one) for one in before] == [set(one) for one in after]
    assert all(
        one["forward"] is other["forward"]
        for one, other in zip(before, after, strict=True)
        if "forward" in one
    )


class Reads(nn.Module):
    """A block that reads a tensor it was not given."""

    def __init__(self, seen: list[Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen = seen

    def forward(self, values: Tensor) -> Tensor:
        result: Tensor = torch.tanh(self.linear(values)) * self.seen[0]
        return result


class Hidden(nn.Module):
    def __init__(self, forgets: bool) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        self.forgets = forgets
        self.blocks = nn.ModuleList([Reads(self.seen), Reads(self.seen)])
        self.scale = nn.Parameter(torch.ones(4))
        self.head = nn.Linear(4, 3)

    def forward(self, values: Tensor) -> Tensor:
        self.seen[:] = [self.scale * 2.0]
        for block in self.blocks:
            values = block(values)
        if self.forgets:
            self.seen.clear()
        result: Tensor = self.head(values)
        return result


@pytest.mark.parametrize("forgets", [False, True])
def test_a_block_that_reads_a_tensor_behind_its_arguments_is_refused(forgets: bool) -> None:
    torch.manual_seed(0)
    batch = torch.randn(6, 4), torch.arange(6) % 3
    with pytest.raises(OperatorError, match="only their arguments, parameters and buffers"):
        curvlab.Hessian(Hidden(forgets), cross_entropy, batch, engine="blockwise")


class Branch(nn.Module):
    """Starts as the identity, and leaves a tensor on itself for a penalty."""

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(4, 4), nn.Linear(4, 4)
        nn.init.zeros_(self.narrow.weight)
        nn.init.zeros_(self.narrow.bias)

    def forward(self, values: Tensor) -> Tensor:
        self.activation = self.narrow(torch.tanh(self.widen(values)))
        return values + self.activation


class Penalised(nn.Module):
    def __init__(self, outside: bool) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Branch(), Branch()]), nn.Linear(4, 3)
        self.outside = outside

    def forward(self, values: Tensor) -> tuple[Tensor, Tensor]:
        penalty = torch.zeros(len(values), dtype=values.dtype)
        for block in self.blocks:
            values = block(values)
            if self.outside:
                penalty = penalty + block.activation.square().mean(1)
        return self.head(values), penalty


def penalised(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    return cross_entropy(outputs[0], targets) + outputs[1].mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tensor_left_for_use_outside_is_refused_where_its_gradient_is_0(
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    batch = torch.randn(6, 4, dtype=dtype), torch.arange(6) % 3
    model = Penalised(outside=True).to(dtype)
    with pytest.raises(OperatorError, match=r"not leave a tensor on self.*engine=\"rebuilt\""):
        curvlab.Hessian(model, penalised, batch, engine="blockwise")
    # where nothing reads it, and where what is selected does not reach it, products are right
    for right, select in ((Penalised(outside=False).to(dtype), None), (model, ["head.*"])):
        whole, parts = (
            curvlab.Hessian(right, penalised, batch, engine=engine, select=select)
            for engine in ("rebuilt", "blockwise")
        )
        vector = torch.ones(whole.n, dtype=dtype)
        torch.testing.assert_close(parts @ vector, whole @ vector)


class Logarithm(nn.Module):
    """Has no value a little to one side of its parameter."""

    def __init__(self, at: float) -> None:
        super().__init__()
        self.linear, self.small = nn.Linear(4, 4), nn.Parameter(torch.full((4,), at))

    def forward(self, values: Tensor) -> Tensor:
        result: Tensor = torch.tanh(self.linear(values)) * self.small.log()
        return result


def test_models_without_a_value_at_a_distance_are_not_refused() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Logarithm(1e-6) for _ in range(2))).double()
    batch = torch.randn(6, 4).double(), torch.arange(6) % 4
    truth = products(curvlab.Hessian, model, batch, engine="rebuilt")
    assert off(products(curvlab.Hessian, model, batch, engine="blockwise"), truth) < 1e-12


class Turned(nn.Module):
    """Returns a view of what it has made."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, values: Tensor) -> Tensor:
        return self.linear(torch.tanh(values)).transpose(0, 1)


class ChangesViews(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Turned(), Turned()])
        self.shift = nn.Parameter(torch.randn(4))

    def forward(self, values: Tensor) -> Tensor:
        for block in self.blocks:
            values = block(values).transpose(0, 1)
            values += self.shift
        return values


class Spectrum(nn.Module):
    """Takes and returns complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, values: Tensor) -> Tensor:
        parts = values.real * values.imag.cos() if values.is_complex() else values
        return torch.fft.fft(torch.tanh(self.linear(parts)))


class Spectra(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Spectrum(), Spectrum(), Spectrum()])

    def forward(self, values: Tensor) -> Tensor:
        for block in self.blocks:
            values = block(values)
        return values.abs()


@pytest.mark.parametrize("kind", [curvlab.Hessian, curvlab.GaussNewton])
@pytest.mark.parametrize("model", [ChangesViews, Spectra])
def test_views_changed_outside_and_complex_numbers_pass_between_blocks(
    model: Any, kind: Any
) -> None:
    torch.manual_seed(0)
    made, batch = model().double(), (torch.randn(5, 4).double(), torch.arange(5) % 4)
    truth = products(kind, made, batch, engine="rebuilt")
    assert off(products(kind, made, batch, engine="blockwise"), truth) < 1e-12


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_weight_computed_by_a_hook_is_refused_with_the_cure() -> None:
    torch.manual_seed(0)
    batch = torch.randn(6, 4).double(), torch.arange(6) % 4

    def model(norm: Any) -> nn.Module:
        return nn.Sequential(norm(nn.Linear(4, 5)), nn.Tanh(), norm(nn.Linear(5, 4))).double()

    with pytest.raises(OperatorError, match=r"Hooks .*torch\.nn\.utils\.parametrizations"):
        curvlab.Hessian(model(nn.utils.weight_norm), cross_entropy, batch, engine="blockwise")
    cured = model(nn.utils.parametrizations.weight_norm)
    truth = products(curvlab.Hessian, cured, batch, engine="rebuilt")
    assert off(products(curvlab.Hessian, cured, batch, engine="blockwise"), truth) < 1e-12


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Remembers(), Remembers()])
        self.head = nn.Linear(4, 3)

    def forward(self, values: Tensor) -> Tensor:
        for block in self.blocks:
            values = block(values, Cache())
        result: Tensor = self.head(values)
        return result


class Cache:
    """Keys and values of earlier words, as decoders keep them."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, values: Tensor, cache: Cache) -> Tensor:
        cache.seen.append(torch.tanh(self.linear(values)))
        return torch.stack(cache.seen).prod(0)


def test_a_block_that_fills_a_cache_is_refused_with_the_cure() -> None:
    torch.manual_seed(0)
    batch = torch.randn(6, 4), torch.arange(6) % 3
    with pytest.raises(OperatorError, match="use_cache = False"):
        curvlab.Hessian(Cached(), cross_entropy, batch, engine="blockwise")


class Optional(nn.Module):
    """Returns None beside its tensor, and changes a buffer that it has read in place."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.ones(()))

    def forward(self, values: Tensor, cache: None = None) -> tuple[Tensor, None, None]:
        calls = self.calls.clone()
        self.calls.mul_(0.5)
        return values + calls * torch.tanh(self.norm(self.linear(values))), None, cache


class Optionals(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Optional(), Optional()])

    def forward(self, values: Tensor) -> Tensor:
        cache = None
        for block in [*self.blocks, *self.blocks]:
            values, _, cache = block(values, cache=cache)
        return values


def test_blocks_may_return_none_and_change_their_buffers() -> None:
    torch.manual_seed(0)
    model, batch = Optionals().double(), (torch.randn(6, 4).double(), torch.arange(6) % 3)
    whole, parts = (
        curvlab.Hessian(model, cross_entropy, batch, mode="batch-statistics", engine=engine)
        for engine in ("rebuilt", "blockwise")
    )
    vector = torch.randn(whole.n, dtype=torch.float64)
    for _ in range(2):  # the second product finds nothing changed by the first
        torch.testing.assert_close(parts @ vector, whole @ vector, rtol=1e-12, atol=1e-12)


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


def test_a_boolean_mask_hides_keys_in_every_operator() -> None:
    torch.manual_seed(0)
    model, (tokens, targets) = language()
    model = model.double().eval()
    truth = cross_entropy(model(tokens), targets).item()
    operator = curvlab.Hessian(model, cross_entropy, (tokens, targets))
    assert abs(float(operator.loss) - truth) < 1e-12 * truth
