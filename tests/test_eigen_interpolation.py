"""Networks from initialisation to a perfect fit: a right operator is never called a wrong one.

As the loss goes to 0, ``p - onehot`` cancels and products lose digits that nothing gives back.
Residuals must say so, and the solve may end before its tolerance; it may not blame the operator.
"""

import functools

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import curvlab
from curvlab.eigen import lanczos
from curvlab.nets import mlp, slim_resnet18, vit_cifar
from curvlab.probe import OperatorError

LOSSES = [None, 1e-1, 1e-2, 1e-4, 1e-6, 1e-8]
KINDS = [curvlab.Hessian, curvlab.GaussNewton, curvlab.Fisher]
TOKENS = 17


class GPT(nn.Module):
    """Causal attention over tokens ``(samples, length)``; what follows the last is predicted."""

    def __init__(self, width=16, length=6):
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, width), nn.Embedding(length, width)
        block = functools.partial(
            nn.TransformerEncoderLayer, width, 2, 4 * width, 0.0, "gelu", batch_first=True
        )
        self.blocks = nn.ModuleList(block(norm_first=True) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, TOKENS)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, tokens):
        hidden = self.tokens(tokens) + self.places.weight
        for block in self.blocks:
            hidden = block(hidden, src_mask=self.mask)
        return self.head(self.norm(hidden[:, -1]))


def digits(generator):
    return torch.randn(40, 20, generator=generator), torch.randint(5, (40,), generator=generator)


def images(generator):
    return torch.randn(8, 3, 8, 8, generator=generator), torch.arange(8) % 3


def sentences(generator):
    tokens = torch.randint(TOKENS, (12, 7), generator=generator)
    return tokens[:, :-1], tokens[:, -1]


def small_vit():
    return vit_cifar(3, hidden=8, heads=2, depth=2, mlp=16, side=8, seed=0)


NETS = {
    "mlp": (lambda: mlp((20, 32, 32, 5), seed=0), digits),
    "wide mlp": (lambda: mlp((20, 200, 200, 5), seed=0), digits),
    "tanh mlp": (lambda: mlp((20, 32, 32, 5), activation=nn.Tanh, seed=0), digits),
    "resnet": (lambda: slim_resnet18(3, nf=4, blocks=(1, 1), seed=0), images),
    "vit": (small_vit, images),
    "gpt": (GPT, sentences),
}


@functools.cache
def fitted(name, loss):
    """The network, in eval mode, and its data, at about this loss.

    Trained to 1e-3 at most; below that the last layer is enlarged, as long training does.
    """
    torch.manual_seed(0)
    model, draw = NETS[name][0](), NETS[name][1]
    inputs, targets = draw(torch.Generator().manual_seed(3))
    if loss is not None:
        optimiser = torch.optim.Adam(model.parameters(), lr=5e-3)
        for _ in range(2000):
            optimiser.zero_grad()
            value = cross_entropy(model(inputs), targets)
            if value.item() <= max(loss, 1e-3):
                break
            value.backward()
            optimiser.step()
    model.eval()
    head = [m for m in model.modules() if isinstance(m, nn.Linear)][-1]
    with torch.no_grad():
        while loss is not None and float(cross_entropy(model(inputs).double(), targets)) > loss:
            for parameter in head.parameters():
                parameter.mul_(1.1)
    return model, (inputs, targets)


def check(name, loss, kind, dtype):
    model, data = fitted(name, loss)
    operator = kind(model, cross_entropy, data, dtype=dtype)
    for tol, options in ((1e-2, {}), (1e-5, {"certify": False})):
        pairs = lanczos(operator, 5, tol=tol, max_products=200, dense=False, **options)
        image = operator @ pairs.vectors
        rest = image.double() - pairs.values[:, None] * pairs.vectors.double()
        true = torch.linalg.vector_norm(rest, dim=1)
        assert bool((true <= pairs.residuals * 1.01 + pairs.floor / 2).all())
        if not bool(pairs.converged.all()) and pairs.matvecs < 200:
            assert "precision" in pairs.reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", ["mlp", "tanh mlp"])
def test_no_plain_network_is_refused_however_well_it_fits(name, loss, kind, dtype):
    check(name, loss, kind, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", ["wide mlp", "resnet", "vit", "gpt"])
def test_no_network_is_refused_however_well_it_fits(name, loss, kind, dtype):
    check(name, loss, kind, dtype)


class Wrong:
    """The Hessian of a network, and an error that no rounding explains."""

    def __init__(self, operator, error):
        self.n, self.dtype, self.device = operator.n, operator.dtype, operator.device
        self.operator, self.error, self.count = operator, error, 0

    def __matmul__(self, vectors):
        self.count += 1
        return self.operator @ vectors + self.error(self, vectors)


def skew(wrong, vectors):
    """0.3 % of an antisymmetric operator as large on random vectors as the Hessian is."""
    size = float((wrong.operator @ torch.ones_like(vectors)).norm()) / wrong.n**0.5
    return 3e-3 * size * (torch.roll(vectors, 1, -1) - torch.roll(vectors, -1, -1))


def drift(wrong, vectors):
    return 1e-2 * wrong.count * (wrong.operator @ vectors)


def dropout(wrong, vectors):
    generator = torch.Generator().manual_seed(wrong.count)
    mask = torch.randn(wrong.n, generator=generator, dtype=wrong.dtype)
    return 1e-2 * mask * (wrong.operator @ vectors)


@pytest.mark.parametrize("error", [skew, drift, dropout])
@pytest.mark.parametrize("loss", [None, 1e-2, 1e-4])
def test_a_wrong_operator_of_a_network_that_fits_is_still_refused(loss, error):
    model, data = fitted("mlp", loss)
    operator = curvlab.Hessian(model, cross_entropy, data, dtype=torch.float64)
    with pytest.raises(OperatorError):
        lanczos(Wrong(operator, error), 5, tol=1e-2)
