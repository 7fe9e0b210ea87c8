"""FSDP2 models in the states that people leave them in, with losses and layers that they have."""

import functools
import traceback
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from curvlab.distributed import DataParallel, launch
from curvlab.operators import Hessian
from tests.test_distributed_fsdp import SAMPLES, WORDS, fully, meshes, network, off, share, vectors

pytestmark = pytest.mark.distributed


def summed(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs, targets, reduction="sum")


class Padded(nn.Module):
    """An embedding with a padding row that the data use."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 4, padding_idx=2)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        words: Tensor = self.embed(tokens)
        for layer in self.layers:
            words = words + layer(words)
        return words.mean(1)


class Checkpointed(Padded):
    def forward(self, tokens: Tensor) -> Tensor:
        words: Tensor = self.embed(tokens)
        for layer in self.layers:
            words = words + checkpoint(layer, words, use_reentrant=False)
        return words.mean(1)


def padded(kind: Any = Padded) -> nn.Module:
    torch.manual_seed(4)
    made: nn.Module = kind().double()
    return made


def words() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    drawn = torch.randint(WORDS, (SAMPLES, 6), generator=generator)
    drawn[:, 1] = 2
    return drawn, torch.arange(SAMPLES) % 4


def evaluated(group: Any) -> nn.Module:
    """After a look at the loss: FSDP2 keeps the outermost parameters whole until the next step."""
    model = fully(network(), meshes(group)["one"])
    with torch.no_grad():
        model(share(group, vectors())[0])
    return model


def kept_whole(group: Any) -> nn.Module:
    """Told to keep its parameters whole from one backward pass to the next."""
    model: Any = fully(network(), meshes(group)["one"])
    model.set_reshard_after_backward(False)
    model(share(group, vectors())[0]).sum().backward()
    model.reshard()
    model.zero_grad()
    model.unshard()
    return model  # type: ignore[no-any-return]


def everything(group: Any) -> Any:
    try:
        found: dict[str, Any] = {}
        mine, mesh = share(group, vectors()), meshes(group)["one"]
        plain = Hessian(network(), summed, vectors())
        for name, given in {"one sample": mine, "one each": tuple(t[:1] for t in mine)}.items():
            operator = Hessian(fully(network(), mesh), summed, given)
            found[name] = operator.problem.reduction
            if name == "one sample":
                found["sum"] = off(operator, plain)
            parts = DataParallel(Hessian(network(), summed, given))
            first = slice(0, SAMPLES if name == "one sample" else 2)
            whole = Hessian(network(), summed, tuple(t[first] for t in vectors()))
            one = torch.ones(whole.n, dtype=torch.float64)
            found[f"{name}, parallel"] = float((parts @ one - whole @ one).norm())
        plain = Hessian(network(), cross_entropy, vectors())
        for make in (evaluated, kept_whole):
            model = make(group)
            found[make.__name__] = off(Hessian(model, cross_entropy, mine), plain)
            found[f"{make.__name__}: left"] = [p.grad is not None for p in model.parameters()]
        plain = Hessian(padded(), cross_entropy, words())
        found["padding"] = off(
            Hessian(fully(padded(), mesh), cross_entropy, share(group, words())), plain
        )
        try:
            Hessian(fully(padded(Checkpointed), mesh), cross_entropy, share(group, words()))
        except TypeError as error:
            found["checkpointed"] = str(error)
        return found
    except Exception:
        return traceback.format_exc()


@functools.cache
def everyone() -> Any:
    found = launch(everything, 2, timeout=300, patience=60)
    for rank, one in enumerate(found):
        assert not isinstance(one, str), f"rank {rank}: {one}"
    return found


def test_a_sum_is_told_from_a_mean_where_a_rank_has_one_sample() -> None:
    for found in everyone():
        assert found["one sample"] == found["one each"] == "sum"
        assert found["sum"] < 1e-12
        assert found["one sample, parallel"] < 1e-12
        assert found["one each, parallel"] < 1e-12


def test_parameters_that_were_left_whole_are_no_obstacle() -> None:
    for found in everyone():
        for name in ("evaluated", "kept_whole"):
            assert found[name] < 1e-12
            assert not any(found[f"{name}: left"])


def test_an_embedding_may_have_a_padding_row() -> None:
    for found in everyone():
        assert found["padding"] < 1e-12


def test_activation_checkpoints_are_refused_with_the_cure() -> None:
    for found in everyone():
        assert "turn activation checkpointing off" in found["checkpointed"]
