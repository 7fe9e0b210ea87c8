"""Losses of language models, and models that compute in float32 whatever they are given."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from curvlab import GaussNewton, Hessian
from curvlab.doctor import doctor
from curvlab.losses import IGNORED, next_token, sequence

WORDS, TOKENS = 7, 5


@dataclass
class Output:
    logits: Tensor
    loss: Tensor | None


class Coarse(nn.Module):
    """Normalises in float32 and gives back the dtype it got, as LLaMA's layers do."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide / wide.square().mean(-1, keepdim=True).add(1e-5).sqrt()).to(x.dtype)


class Language(nn.Module):
    """Calls and answers as Hugging Face models do; its loss may be computed in float32."""

    def __init__(self, norm: nn.Module, narrow_loss: bool) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(WORDS, 6), norm
        self.mix, self.head = nn.Linear(6, 6), nn.Linear(6, WORDS, bias=False)
        self.narrow_loss = narrow_loss

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Output:
        hidden = self.embed(input_ids)
        seen = hidden.cumsum(1) / torch.arange(1, 1 + hidden.shape[1]).unsqueeze(1)
        logits = self.head(torch.tanh(self.mix(self.norm(seen))))
        if labels is None:
            return Output(logits, None)
        wide = logits.float() if self.narrow_loss else logits
        loss = cross_entropy(wide[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return Output(logits, loss)


def language(norm: nn.Module | None = None, narrow_loss: bool = False) -> Language:
    torch.manual_seed(0)
    return Language(norm or nn.Identity(), narrow_loss)


def padded() -> dict[str, Tensor]:
    ids = torch.randint(0, WORDS, (6, TOKENS), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[1, 3:] = labels[4, 1:] = IGNORED  # of the fourth, nothing counts
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize("chunk", [None, 2])
def test_a_mean_over_tokens_is_weighed_by_tokens_however_the_data_are_cut(chunk) -> None:
    model, batch = language().double(), padded()
    own = Hessian(model, None, batch, count=next_token.count, chunk=chunk)
    apart = Hessian(model, next_token, batch, count=next_token.count, chunk=chunk)

    def loss(flat: Tensor) -> Tensor:
        parts = iter(flat.split([p.numel() for p in model.parameters()]))
        named = {n: next(parts).view_as(p) for n, p in model.named_parameters()}
        result = torch.func.functional_call(model, named, (batch["input_ids"], batch["labels"]))
        return result.loss

    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    truth = torch.autograd.functional.hessian(loss, flat)
    for operator in (own, apart):
        assert float((operator.dense() - truth).abs().max()) < 1e-13
    whole = Hessian(model, next_token, batch, count=next_token.count, select="head.*")
    linear = GaussNewton(model, next_token, batch, count=next_token.count, select="head.*")
    # in the last layer the logits are linear, so that Gauss-Newton is the Hessian
    assert float((linear.dense() - whole.dense()).abs().max()) < 1e-13


def test_labels_that_stand_where_they_are_predicted_are_not_shifted() -> None:
    model, batch = language().double(), padded()
    logits = model(batch["input_ids"]).logits
    labels = batch["labels"]
    expected = cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert torch.equal(sequence(logits, labels), expected)
    assert sequence.count(batch) == int((labels != IGNORED).sum())
    with pytest.raises(ValueError, match=r"logits \(samples, tokens, vocabulary\)"):
        sequence(logits[0], labels)


def test_cross_entropy_of_tokens_is_refused_with_a_loss_that_works() -> None:
    with pytest.raises(ValueError, match=r"curvlab\.losses\.next_token"):
        GaussNewton(language(), cross_entropy, padded())


@pytest.mark.parametrize("narrow_loss", [False, True], ids=["layer", "loss"])
def test_a_model_that_computes_in_float32_inside_is_not_blamed_for_it(narrow_loss) -> None:
    model = language(nn.Identity() if narrow_loss else Coarse(), narrow_loss)
    batch = padded()
    operator = Hessian(model, None, batch, count=next_token.count, dtype=torch.float64)
    assert operator.about()["loss computed in"] == (
        "torch.float32" if narrow_loss else "torch.float64"
    )
    report = doctor(model, None, batch, count=next_token.count)
    assert report.healthy, report
    assert "loss computed in float32" in report.traps()
    exact = language(nn.Identity() if narrow_loss else Coarse(), narrow_loss)
    exact.narrow_loss = False
    if narrow_loss:
        truth = Hessian(exact, None, batch, count=next_token.count, dtype=torch.float64).dense()
        assert float((operator.dense() - truth).abs().max() / truth.abs().max()) < 1e-5


def test_what_has_no_gradient_is_named_in_the_result() -> None:
    model = language()
    model.spare = nn.Linear(2, 2)
    operator = Hessian(model, None, padded(), count=next_token.count)
    assert operator.about()["without gradient"] == ["spare.weight", "spare.bias"]
