"""Long sequences and large vocabularies: exact derivatives without the square or the copies."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from curvlab.operators import functions
from curvlab.operators.functions import Replaced
from curvlab.operators.products import attention
from curvlab.operators.products.sizing import LiveBytes


def second(value: Any, inputs: list[Tensor], seed: int = 0) -> list[Tensor]:
    """The value, the gradients and a Hessian product of ``sum(sin(value))``."""
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    result = value(*leaves)
    gradients = torch.autograd.grad(result.sin().sum(), leaves, create_graph=True)
    generator = torch.Generator().manual_seed(seed)
    along = [torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in leaves]
    return [result, *gradients, *torch.autograd.grad(gradients, leaves, along)]


def off(found: list[Tensor], truth: list[Tensor]) -> float:
    pairs = zip(found, truth, strict=True)
    tiny = torch.finfo(torch.float64).tiny  # where nothing is seen, all is exactly 0
    return max(float((a - b).detach().norm() / (b.detach().norm() + tiny)) for a, b in pairs)


def attend(shape: tuple[int, ...], keys: int, heads: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    *outer, length, width = shape
    others = [*outer[:-1], heads] if heads else outer
    shapes = [(*outer, length, width), (*others, keys, width), (*others, keys, width + 1)]
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


CALLS: dict[str, tuple[tuple[int, ...], int, int, dict[str, Any]]] = {
    "plain": ((2, 3, 11, 4), 11, 0, {}),
    "other keys": ((2, 3, 7, 4), 13, 0, {"scale": 0.3}),
    "causal": ((2, 3, 11, 4), 11, 0, {"is_causal": True}),
    "causal, fewer keys": ((2, 3, 11, 4), 5, 0, {"is_causal": True}),
    "causal, more keys": ((2, 3, 5, 4), 11, 0, {"is_causal": True}),
    "grouped heads": ((2, 4, 9, 4), 9, 2, {"enable_gqa": True, "is_causal": True}),
    "no heads": ((2, 9, 4), 9, 0, {}),
    "one sequence": ((9, 4), 9, 0, {}),
    "mask": ((2, 3, 11, 4), 11, 0, {"attn_mask": torch.rand(11, 11) < 0.7}),
    "mask of keys": ((2, 3, 11, 4), 11, 0, {"attn_mask": torch.rand(2, 1, 1, 11) < 0.7}),
    "mask of keys alone": ((2, 3, 11, 4), 11, 0, {"attn_mask": torch.rand(11) < 0.7}),
    "added mask": ((2, 3, 11, 4), 11, 0, {"attn_mask": torch.randn(3, 11, 11).double()}),
    "nothing seen": ((1, 2, 3, 4), 5, 0, {"attn_mask": torch.zeros(3, 5, dtype=torch.bool)}),
}


@pytest.mark.parametrize("name", CALLS)
def test_long_attention_is_torchs_own_to_rounding(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, keys, heads, options = CALLS[name]
    inputs = attend(shape, keys, heads)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, **options)

    with sdpa_kernel(SDPBackend.MATH):
        truth = second(call, inputs)
    monkeypatch.setattr(attention, "LARGE", 0)
    monkeypatch.setattr(attention, "PIECE", 1000)
    ran = []
    monkeypatch.setattr(
        functions, "attention", lambda given: ran.append(1) or attention.attention(given)
    )

    def long(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with Replaced():
            return call(q, k, v)

    found = second(long, inputs)
    assert ran
    assert off(found, truth) < 1e-13


def test_a_mask_beside_is_causal_is_refused_as_torch_refuses_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "LARGE", 0)
    inputs = [tensor.requires_grad_() for tensor in attend((2, 3, 8, 4), 8)]
    mask = torch.ones(8, 8, dtype=torch.bool)
    with Replaced(), pytest.raises(RuntimeError, match="attn_mask should not be set when"):
        scaled_dot_product_attention(*inputs, attn_mask=mask, is_causal=True)


def test_an_added_mask_that_is_learned_has_its_derivatives(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = [*attend((2, 3, 8, 4), 8), torch.randn(3, 8, 8, dtype=torch.float64)]

    def call(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        with Replaced(), sdpa_kernel(SDPBackend.MATH):
            return scaled_dot_product_attention(q, k, v, attn_mask=mask)

    truth = second(call, inputs)
    monkeypatch.setattr(attention, "LARGE", 0)
    monkeypatch.setattr(attention, "PIECE", 700)
    assert off(second(call, inputs), truth) < 1e-13


def held(run: Any) -> int:
    with LiveBytes() as bytes_:
        run()
    return bytes_.peak


def test_memory_of_attention_grows_with_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "LARGE", 1 << 20)
    monkeypatch.setattr(attention, "PIECE", 1 << 16)

    def at(length: int, context: Any) -> int:
        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with context(), sdpa_kernel(SDPBackend.MATH):
                return scaled_dot_product_attention(q, k, v, is_causal=True)

        return held(lambda: second(call, attend((1, 2, length, 4), length)))

    class Plain:
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    assert at(1024, Plain) > 3.5 * at(512, Plain)
    assert at(1024, Replaced) < 3 * at(512, Replaced)
    assert at(1024, Replaced) < at(1024, Plain) / 10


def vocabulary(words: int, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(rows, words, generator=generator, dtype=dtype) * 3
    targets = torch.randint(words, (rows,), generator=generator)
    targets[::5] = -100
    return logits, targets


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy_in_pieces_is_torchs_own(
    reduction: str, weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, targets = vocabulary(17, 23, torch.float64)
    weight = torch.rand(17, dtype=torch.float64) if weighted else None

    def call(z: Tensor) -> Tensor:
        return cross_entropy(z, targets, weight, reduction=reduction)

    truth = second(call, [logits])
    monkeypatch.setattr(functions, "LARGE", 0)
    monkeypatch.setattr(functions, "PIECE", 17 * 8 * 4)

    def pieces(z: Tensor) -> Tensor:
        with Replaced():
            return call(z)

    assert off(second(pieces, [logits]), truth) < 1e-13


def test_cross_entropy_of_a_vocabulary_holds_few_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, targets = vocabulary(5000, 200, torch.float32)

    def copies() -> float:
        def call(z: Tensor) -> Tensor:
            with Replaced():
                return cross_entropy(z, targets)

        return held(lambda: second(call, [logits])) / logits.nbytes

    plain = copies()
    monkeypatch.setattr(functions, "LARGE", 0)
    monkeypatch.setattr(functions, "PIECE", 5000 * 4 * 10)
    # The leaf, its gradient, the direction, its image, and one more while pieces are joined. Both
    # bounds were set after seeing 5.0 and 7.0; the first guess for the plain formula was above 10.
    assert copies() < 5.5
    assert plain > 6.5
