"""What blocks of other people's models do, and what of it is refused with the cure."""

from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import curvlab
from curvlab.probe import OperatorError
from tests.block_models import off, products


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


class Writes(nn.Module):
    """Leaves its result in a dictionary and a list that it was given, and reads what others left.

    One writes what is there already by another name, and takes something out.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear, self.number = nn.Linear(4, 4), number

    def forward(
        self, box: dict[str, Any], *, past: deque[tuple[Tensor, dict[str, Tensor]]]
    ) -> None:
        values = torch.tanh(self.linear(box["values"]))
        for keys, more in past:
            values = values * keys + more["sine"]
        past.append((values, {"sine": values.sin()}))
        if len(past) > 2:
            past.popleft()
        box["before"], box["values"] = box["values"], values + box["values"]
        box["seen"]["numbers"].append(self.number)
        box.pop("first", None)


class Written(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Writes(number) for number in range(4))
        self.head = nn.Linear(4, 3)

    def forward(self, values: Tensor) -> Tensor:
        numbers, past = list[int](), deque[tuple[Tensor, dict[str, Tensor]]]()
        box: dict[str, Any] = {"values": values, "first": values, "seen": {"numbers": numbers}}
        for block in self.blocks:
            before = box["values"]
            block(box, past=past)
            assert box["before"] is before  # and not another tensor with the same numbers
        assert numbers == [0, 1, 2, 3]
        assert set(box) == {"values", "before", "seen"}
        result: Tensor = self.head(box["values"] + box["before"] * past[0][1]["sine"])
        return result


@pytest.mark.parametrize("select", [None, ["blocks.1.*"]])
@pytest.mark.parametrize("kind", [curvlab.Hessian, curvlab.GaussNewton])
def test_blocks_may_write_into_dictionaries_and_lists(kind: Any, select: Any) -> None:
    torch.manual_seed(0)
    model, batch = Written().double(), (torch.randn(6, 4).double(), torch.arange(6) % 3)
    truth = products(kind, model, batch, engine="rebuilt", select=select)
    parts = products(kind, model, batch, engine="blockwise", select=select, chunk=2)
    assert off(parts, truth) < 1e-12


class InPlace(nn.Module):
    """Writes in place into a view of what it was given, or leaves that to the model."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.how = how

    def forward(self, values: Tensor) -> Tensor:
        result = torch.tanh(self.linear(values.clone()))
        if self.how == "a slice":
            values[:, :2].add_(result[:, :2])
        elif self.how == "detached":
            values.detach().add_(1.0)
        return result


class GivesViews(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList([InPlace(how), InPlace(how)])
        self.head = nn.Linear(8, 3)
        self.how = how

    def forward(self, values: Tensor) -> Tensor:
        values = torch.tanh(self.first(values)) * 1.0
        view = values[:, 2:6]
        for block in self.blocks:
            given = block(view)
            if self.how == "after it":
                view.add_(given)
        result: Tensor = self.head(values) + given[:, :3]
        return result


@pytest.mark.parametrize("how", ["a slice", "detached", "after it"])
def test_a_view_that_a_block_was_given_and_that_is_written_into_is_refused(how: str) -> None:
    torch.manual_seed(0)
    batch = torch.randn(6, 4, dtype=torch.float64), torch.arange(6) % 3
    model = GivesViews(how).double()
    names, shapes = zip(*((n, p.shape) for n, p in model.named_parameters()), strict=True)

    def loss(flat: Tensor) -> Tensor:
        parts = flat.split([shape.numel() for shape in shapes])
        given = {n: t.view(s) for n, t, s in zip(names, parts, shapes, strict=True)}
        return cross_entropy(torch.func.functional_call(model, given, (batch[0],)), batch[1])

    at = torch.cat([p.detach().flatten() for p in model.parameters()])
    truth = torch.autograd.functional.hessian(loss, at)
    with pytest.raises(OperatorError, match=r"block.*[wW]rite x = x \+ y in place of x \+= y"):
        curvlab.Hessian(model, cross_entropy, batch, engine="blockwise")
    cured = curvlab.Hessian(model, cross_entropy, batch, engine="rebuilt", chunk=1)
    assert torch.allclose(cured.dense(), truth, rtol=0, atol=1e-12)


class Mapped(nn.Module):
    """Calls its blocks sample by sample, through vmap."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))

    def forward(self, values: Tensor) -> Tensor:
        for block in self.blocks:
            values = values + torch.func.vmap(block)(values)
        return values


@pytest.mark.parametrize("kind", [curvlab.Hessian, curvlab.GaussNewton])
def test_blocks_may_be_called_through_vmap(kind: Any) -> None:
    torch.manual_seed(0)
    model, batch = Mapped().double(), (torch.randn(6, 4).double(), torch.arange(6) % 4)
    truth = products(kind, model, batch, engine="rebuilt")
    assert off(products(kind, model, batch, engine="blockwise"), truth) < 1e-12
