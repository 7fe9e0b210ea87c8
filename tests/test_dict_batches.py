"""Models of the Hugging Face interface: dict batches in, an output with .loss and .logits back."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import curvlab
from curvlab.doctor import doctor
from curvlab.plan import plan

TOLERANCE = 1e-10


@dataclass
class Output:
    """As transformers.modeling_outputs.SequenceClassifierOutput: attributes, some of them None."""

    loss: torch.Tensor | None
    logits: torch.Tensor


class Encoder(nn.Module):
    """A sequence classifier with tied-in attention masks, in the library's calling convention."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.words = nn.Embedding(11, 6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True, dtype=torch.float32)
        self.classifier = nn.Linear(6, 3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))

    def forward(self, input_ids, attention_mask=None, labels=None):
        x = self.words(input_ids)
        padding = None if attention_mask is None else attention_mask == 0
        x = x + self.attention(x, x, x, key_padding_mask=padding, need_weights=False)[0]
        logits = self.classifier(x[:, 0])
        return Output(None if labels is None else cross_entropy(logits, labels), logits)


def rows(count=9, seed=1):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(count, 5, dtype=torch.int64)
    mask[::2, 3:] = 0
    return [
        {
            "input_ids": torch.randint(11, (5,), generator=generator),
            "attention_mask": mask[i],
            "labels": torch.randint(3, (), generator=generator),
        }
        for i in range(count)
    ]


def batch():
    found = rows()
    return {key: torch.stack([row[key] for row in found]) for key in found[0]}


def model():
    return Encoder().double().eval()


def test_own_loss_and_logits_with_labels_are_the_same_curvature():
    own = curvlab.Hessian(model(), None, batch())
    split = curvlab.Hessian(model(), cross_entropy, batch())
    vector = torch.randn(own.n, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    torch.testing.assert_close(own @ vector, split @ vector, rtol=TOLERANCE, atol=TOLERANCE)


def test_the_product_is_the_second_derivative():
    net = model()
    H = curvlab.Hessian(net, None, batch())
    start = curvlab.parameter_vector(net)
    vector = torch.randn(H.n, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def gradient(point):
        curvlab.load_parameter_vector(net, point)
        return curvlab.Hessian(net, None, batch(), check=False).gradient()

    step = 1e-5
    difference = (gradient(start + step * vector) - gradient(start - step * vector)) / (2 * step)
    torch.testing.assert_close(H @ vector, difference, rtol=1e-6, atol=1e-8)


def test_a_loader_of_dicts_with_a_short_last_batch_gives_the_same_matrix():
    loader = DataLoader(rows(), batch_size=4)
    whole = curvlab.Hessian(model(), None, batch())
    parts = curvlab.Hessian(model(), None, loader)
    vector = torch.ones(whole.n, dtype=torch.float64)
    torch.testing.assert_close(whole @ vector, parts @ vector, rtol=TOLERANCE, atol=TOLERANCE)


def test_gauss_newton_needs_the_logits_and_takes_them():
    G = curvlab.GaussNewton(model(), cross_entropy, batch())
    assert curvlab.lanczos(G, k=2, which="SA", tol=1e-2).values.min() > -1e-8
    with pytest.raises(TypeError, match="outputs apart from the loss"):
        curvlab.GaussNewton(model(), None, batch())


def test_spectrum_doctor_plan_and_protection_take_dict_batches():
    net = Encoder().eval()
    pairs = curvlab.lanczos(curvlab.Hessian(net, None, batch()), k=3)
    assert pairs.converged.all()
    report = doctor(net, None, DataLoader(rows(), batch_size=4))
    assert report.healthy, report
    assert {"fused attention", "partial batches"} <= set(report.traps())
    assert plan(net, None, batch(), k=3).fits
    memory = curvlab.Basis(pairs.n, 3)
    memory.extend(pairs.vectors)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    curvlab.protect(optimizer, memory, net)
    before = curvlab.parameter_vector(net)
    net(**batch()).loss.backward()
    optimizer.step()
    assert memory.leak(curvlab.parameter_vector(net) - before) < 1e-4


def test_labels_that_are_missing_are_asked_for():
    bare = {key: value for key, value in batch().items() if key != "labels"}
    with pytest.raises(TypeError, match=r"output\.loss, and there is none"):
        curvlab.Hessian(model(), None, bare)
    with pytest.raises(ValueError, match='needs "labels"'):
        curvlab.Hessian(model(), cross_entropy, bare)


def test_the_real_library_when_it_is_installed():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=20, max_position_embeddings=8, num_labels=3,
    )  # fmt: skip
    net = transformers.BertForSequenceClassification(config).eval()
    pairs = curvlab.lanczos(curvlab.Hessian(net, None, batch()), k=2, tol=1e-2)
    assert pairs.converged.all()
