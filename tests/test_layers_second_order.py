"""Every kind of layer, twice differentiated, against central differences in float64.

The references use nothing but first derivatives of the plain model: its gradients and outputs at
displaced parameters, with a fourth-order stencil.
"""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import curvlab.nets
from curvlab.operators import (
    EmpiricalFisher,
    Fisher,
    FunctionalHessian,
    GaussNewton,
    Hessian,
)
from curvlab.parameters import load_parameter_vector, parameter_vector

TOLERANCE = 1e-9  # relative to the largest entry; the stencil itself is right to about 1e-11
STEP = 2e-4
SAMPLES = 5


class Function(nn.Module):
    """A module from layers and a function of (layers, inputs)."""

    def __init__(self, function, **layers):
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x):
        return self.function(self, x)


def flat(length=4):
    return torch.randn(SAMPLES, length)


def images(channels=1, side=4):
    return torch.randn(SAMPLES, channels, side, side)


def tokens(length=3, features=2):
    return torch.randn(SAMPLES, length, features)


def words(length=3):
    return torch.randint(0, 5, (SAMPLES, length))


def pooled(features, out=3):
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(features, out)]


def randomised(module):
    """Norm layers start at ones and zeros, where mistakes can hide."""
    for parameter in module.parameters():
        parameter.data.copy_(torch.randn_like(parameter) * 0.5)
    for name, buffer in module.named_buffers():
        if "running_mean" in name:
            buffer.copy_(torch.randn_like(buffer) * 0.3)
        if "running_var" in name:
            buffer.copy_(torch.rand_like(buffer) + 0.5)
    return module


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.mix = nn.Linear(3, 3)
        self.out = nn.Linear(3, 5, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x):
        return self.out(torch.tanh(self.mix(self.embed(x).mean(1))))


class Odd(nn.Module):
    """A scalar, a non-contiguous, an unused and a frozen parameter; integer buffer; two heads."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.matrix = nn.Parameter(torch.randn(4, 4).T)
        self.unused = nn.Parameter(torch.randn(3))
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.heads = nn.ModuleList(nn.Linear(4, 3) for _ in range(2))
        self.register_buffer("order", torch.tensor([2, 0, 1]))
        self.active = 1

    def forward(self, x):
        hidden = torch.tanh(self.scale * x @ self.matrix + self.frozen)
        return self.heads[self.active](hidden)[:, self.order]


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        hidden = self.first(x)
        hidden.mul_(2.0).sigmoid_()
        hidden = hidden + 1.0
        hidden[:, 0] = hidden[:, 1].clone() * hidden[:, 2].clone()
        hidden += torch.relu_(x.clone())
        return self.second(hidden)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


def attention(m, x):
    q, k, v = m.qkv(x).chunk(3, -1)
    return m.out(F.scaled_dot_product_attention(q, k, v).mean(1))


def causal(m, x):
    q, k, v = (t.unflatten(-1, (2, 1)).transpose(1, 2) for t in m.qkv(x).chunk(3, -1))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return m.out(mixed.transpose(1, 2).flatten(1))


def twice(m, x):
    return m.out(torch.tanh(m.same(torch.tanh(m.same(x)))))


def normalised(m, x):
    direction = m.direction / m.direction.norm(dim=1, keepdim=True)
    return m.out(torch.tanh(F.linear(x, m.length[:, None] * direction)))


def recurrent(m, x):
    return m.out(m.cell(x)[0][:, -1])


def checkpointed(m, x):
    return m.out(checkpoint(lambda h: torch.tanh(m.first(h)), x, use_reentrant=False))


def residual(m, x):
    hidden = torch.tanh(m.norm(m.a(x)))
    return m.out(hidden + m.norm(m.b(hidden)))


def contracted(m, x):
    return torch.einsum("bi,bj,ijk->bk", x, torch.logsumexp(m.w[:, :, 0] * x[:, None], 2), m.w)


S, L = nn.Sequential, nn.Linear

# fmt: off
MODELS = {
    "linear": (lambda: S(L(4, 3)), flat),
    "linear without bias": (lambda: S(nn.Linear(4, 3, bias=False)), flat),
    "tanh": (lambda: S(L(4, 4), nn.Tanh(), L(4, 3)), flat),
    "relu": (lambda: S(L(4, 4), nn.ReLU(), L(4, 4), nn.ReLU(), L(4, 3)), flat),
    "gelu": (lambda: S(L(4, 4), nn.GELU(), L(4, 3)), flat),
    "gelu tanh": (lambda: S(L(4, 4), nn.GELU("tanh"), L(4, 3)), flat),
    "silu": (lambda: S(L(4, 4), nn.SiLU(), L(4, 3)), flat),
    "softplus, sigmoid": (lambda: S(L(4, 4), nn.Softplus(), L(4, 3), nn.Sigmoid()), flat),
    "elu, mish": (lambda: S(L(4, 4), nn.ELU(), L(4, 3), nn.Mish()), flat),
    "prelu": (lambda: S(L(4, 4), nn.PReLU(), L(4, 3)), flat),
    "glu": (lambda: S(L(4, 6), nn.GLU(), L(3, 3)), flat),
    "softmax": (lambda: S(L(4, 4), nn.Softmax(1), L(4, 3)), flat),
    "bilinear": (lambda: Function(lambda m, x: m.b(x, x.tanh()), b=nn.Bilinear(4, 4, 2)), flat),
    "conv1d": (
        lambda: S(nn.Conv1d(2, 2, 3, stride=2), nn.Tanh(), nn.Flatten(), L(4, 3)),
        lambda: torch.randn(SAMPLES, 2, 5)),
    "conv2d": (lambda: S(nn.Conv2d(1, 3, 2, padding=1), nn.Tanh(), *pooled(3)), images),
    "conv2d grouped, dilated": (
        lambda: S(nn.Conv2d(2, 4, 2, 2, groups=2, dilation=2, bias=False), nn.Tanh(), *pooled(4)),
        lambda: images(2, 5)),
    "conv2d same, circular": (
        lambda: S(nn.Conv2d(1, 2, 3, padding="same"), nn.Tanh(),
                  nn.Conv2d(2, 2, 2, padding=1, padding_mode="circular"), nn.Tanh(), *pooled(2)),
        images),
    "conv3d": (
        lambda: S(nn.Conv3d(1, 2, 2), nn.Tanh(), nn.Flatten(), L(16, 2)),
        lambda: torch.randn(SAMPLES, 1, 3, 3, 3)),
    "transposed conv": (
        lambda: S(nn.ConvTranspose2d(1, 3, 2, stride=2), nn.Tanh(), *pooled(3)),
        lambda: images(side=3)),
    "batch norm 1d, eval": (lambda: S(L(4, 4), nn.BatchNorm1d(4), nn.Tanh(), L(4, 3)), flat),
    "batch norm 2d, eval": (
        lambda: S(nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.Tanh(), *pooled(3)), images),
    "batch norm without affine, eval": (
        lambda: S(L(4, 4), nn.BatchNorm1d(4, affine=False), nn.Tanh(), L(4, 3)), flat),
    "layer norm": (lambda: S(L(4, 4), nn.LayerNorm(4), nn.Tanh(), L(4, 3)), flat),
    "group norm": (
        lambda: S(nn.Conv2d(1, 4, 2), nn.GroupNorm(2, 4), nn.Tanh(), *pooled(4)), images),
    "instance norm": (
        lambda: S(nn.Conv2d(1, 3, 2), nn.InstanceNorm2d(3, affine=True), nn.Tanh(), *pooled(3)),
        images),
    "rms norm": (lambda: S(L(4, 4), nn.RMSNorm(4), nn.Tanh(), L(4, 3)), flat),
    "local response norm": (
        lambda: S(nn.Conv2d(1, 3, 2), nn.LocalResponseNorm(2), *pooled(3)), images),
    "max pool": (
        lambda: S(nn.Conv2d(1, 3, 2), nn.Tanh(), nn.MaxPool2d(2), *pooled(3)), images),
    "average pool": (
        lambda: S(nn.Conv2d(1, 3, 2), nn.Tanh(), nn.AvgPool2d(2), *pooled(3)), images),
    "upsampling": (
        lambda: S(nn.Conv2d(1, 3, 2), nn.Upsample(scale_factor=2, mode="bilinear"), nn.Tanh(),
                  *pooled(3)),
        images),
    "embedding": (
        lambda: Function(lambda m, x: m.out(m.table(x).tanh().mean(1)),
                         table=nn.Embedding(5, 3), out=L(3, 3)),
        words),
    "multi-head attention": (
        lambda: Function(lambda m, x: m.out(m.mha(x, x, x)[0].mean(1)),
                         mha=nn.MultiheadAttention(2, 2, batch_first=True), out=L(2, 3)),
        tokens),
    "attention without weights": (
        lambda: Function(lambda m, x: m.out(m.mha(x, x, x, need_weights=False)[0].mean(1)),
                         mha=nn.MultiheadAttention(2, 2, batch_first=True), out=L(2, 3)),
        tokens),
    "scaled dot product attention": (
        lambda: Function(attention, qkv=L(2, 6), out=L(2, 3)), tokens),
    "causal attention": (lambda: Function(causal, qkv=L(2, 6), out=L(6, 2)), tokens),
    "transformer encoder layer": (
        lambda: Function(lambda m, x: m.out(m.layer(x).mean(1)), out=L(4, 2),
                         layer=nn.TransformerEncoderLayer(4, 1, 2, batch_first=True)),
        lambda: tokens(3, 4)),
    "transformer decoder layer": (
        lambda: Function(lambda m, x: m.layer(x, x.tanh()).mean(1),
                         layer=nn.TransformerDecoderLayer(2, 1, 2, batch_first=True,
                                                          norm_first=True)),
        tokens),
    "rnn": (lambda: Function(recurrent, cell=nn.RNN(2, 2, batch_first=True), out=L(2, 3)), tokens),
    "gru": (lambda: Function(recurrent, cell=nn.GRU(2, 2, batch_first=True), out=L(2, 3)), tokens),
    "lstm": (
        lambda: Function(recurrent, cell=nn.LSTM(2, 2, batch_first=True), out=L(2, 3)), tokens),
    "tied weights": (Tied, words),
    "a layer used twice": (lambda: Function(twice, same=L(4, 4), out=L(4, 3)), flat),
    "odd parameters": (Odd, flat),
    "in-place operations": (InPlace, flat),
    "normalised weights": (
        lambda: Function(normalised, direction=nn.Parameter(torch.randn(4, 4)),
                         length=nn.Parameter(torch.rand(4) + 0.5), out=L(4, 3)),
        flat),
    "spectral norm, eval": (
        lambda: S(nn.utils.parametrizations.spectral_norm(L(4, 4)), nn.Tanh(), L(4, 3)), flat),
    "dropout, eval": (lambda: S(L(4, 4), nn.Tanh(), nn.Dropout(), L(4, 3)), flat),
    "custom function": (
        lambda: Function(lambda m, x: m.out(Cube.apply(m.first(x))), first=L(4, 4), out=L(4, 3)),
        flat),
    "checkpointed": (lambda: Function(checkpointed, first=L(4, 4), out=L(4, 3)), flat),
    "checkpointed conv": (
        lambda: Function(checkpointed, first=S(nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2)),
                         out=S(*pooled(2))),
        images),
    "two convs with residual": (
        lambda: Function(residual, a=nn.Conv2d(1, 2, 3, padding=1), norm=nn.BatchNorm2d(2),
                         b=nn.Conv2d(2, 2, 1, bias=False), out=S(*pooled(2))),
        images),
    "einsum, logsumexp": (
        lambda: Function(contracted, w=nn.Parameter(torch.randn(4, 4, 3) * 0.3)), flat),
    "tiny vit": (
        lambda: curvlab.nets.vit_cifar(2, hidden=4, depth=1, heads=2, mlp=2, side=4, patch=2,
                                       channels=1),
        lambda: images(1, 4)),
}
# fmt: on

# functions that torch.func cannot trace: autograd.Function without vmap rules, checkpoint
UNTRACEABLE = {"custom function", "checkpointed", "checkpointed conv"}
# tracing takes a second or so: a sample of the table by default, all of it in the slow tests
TRACED = {
    "tanh", "gelu", "conv2d", "batch norm 2d, eval", "layer norm", "group norm", "max pool",
    "embedding", "multi-head attention", "rnn", "tied weights", "odd parameters",
    "in-place operations",
}  # fmt: skip
TRACEABLE = [
    pytest.param(name, marks=() if name in TRACED else pytest.mark.slow)
    for name in MODELS
    if name not in UNTRACEABLE
]


@functools.cache
def problem(name):
    build, make = MODELS[name]
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = randomised(build()).double().eval()
        inputs = make()
        inputs = inputs.double() if inputs.is_floating_point() else inputs
        with torch.no_grad():
            outputs = model(inputs)
        targets = torch.randint(0, outputs.shape[1], (SAMPLES,))
    return model, inputs, targets, references(model, inputs, targets)


def references(model, inputs, targets):
    """Hessian, Jacobian, loss Hessian and per-sample gradients from first derivatives alone."""
    here = parameter_vector(model)

    def evaluated(vector):
        load_parameter_vector(model, vector)
        outputs = model(inputs)
        loss = F.cross_entropy(outputs, targets)
        chosen = [p for p in model.parameters() if p.requires_grad]
        pieces = torch.autograd.grad(loss, chosen, allow_unused=True, materialize_grads=True)
        gradient = torch.cat([piece.reshape(-1) for piece in pieces])
        return torch.cat([gradient, outputs.detach().reshape(-1)])

    columns = []
    for i in range(len(here)):
        shift = torch.zeros_like(here)
        shift[i] = STEP
        near = evaluated(here + shift) - evaluated(here - shift)
        far = evaluated(here + 2 * shift) - evaluated(here - 2 * shift)
        columns.append((8 * near - far) / (12 * STEP))
    load_parameter_vector(model, here)
    table = torch.stack(columns, 1)
    hessian, jacobian = table[: len(here)], table[len(here) :]
    outputs = model(inputs).detach()
    curve = torch.autograd.functional.hessian(lambda z: F.cross_entropy(z, targets), outputs)
    curve = curve.reshape(outputs.numel(), outputs.numel())
    slopes = torch.autograd.functional.jacobian(lambda z: F.cross_entropy(z, targets), outputs)
    per_sample = torch.einsum(
        "nc,ncp->np", slopes * SAMPLES, jacobian.reshape(SAMPLES, -1, len(here))
    )
    outer = jacobian.T @ curve @ jacobian
    return {
        "hessian": hessian,
        "gauss newton": outer,
        "functional": hessian - outer,
        "empirical": per_sample.T @ per_sample / SAMPLES,
    }


def assert_close(matrix, reference):
    error = float((matrix - reference).abs().max() / reference.abs().max().clamp_min(1e-3))
    assert error < TOLERANCE, f"relative error {error:.1e}"


@pytest.mark.parametrize("name", MODELS)
def test_hessian_agrees_with_central_differences(name):
    model, inputs, targets, truth = problem(name)
    operator = Hessian(model, F.cross_entropy, (inputs, targets), engine="retained")
    assert_close(operator.dense(), truth["hessian"])
    assert operator.certificate.passed


def assert_acts_like(operator, truth, scale):
    """Random vectors see an error anywhere with probability one."""
    generator = torch.Generator().manual_seed(3)
    vectors = torch.randn(5, operator.n, generator=generator, dtype=torch.float64)
    error = float((operator @ vectors - vectors @ truth).abs().max() / scale.abs().max())
    assert error < TOLERANCE, f"relative error {error:.1e}"


@pytest.mark.parametrize("name", TRACEABLE)
def test_linearised_hessian_agrees_with_central_differences(name):
    model, inputs, targets, truth = problem(name)
    operator = Hessian(model, F.cross_entropy, (inputs, targets), engine="linearised", check=False)
    assert_acts_like(operator, truth["hessian"], truth["hessian"])


@pytest.mark.parametrize("name", MODELS)
def test_parts_of_the_hessian_agree_with_their_definitions(name):
    model, inputs, targets, truth = problem(name)
    for kind, part in ((GaussNewton, "gauss newton"), (FunctionalHessian, "functional")):
        operator = kind(model, F.cross_entropy, (inputs, targets), engine="retained", check=False)
        assert_acts_like(operator, truth[part], truth["hessian"])


@pytest.mark.parametrize("name", MODELS)
def test_fisher_matrices_agree_with_their_definitions(name):
    model, inputs, targets, truth = problem(name)
    for kind, part in ((EmpiricalFisher, "empirical"), (Fisher, "gauss newton")):
        operator = kind(model, F.cross_entropy, (inputs, targets), check=False)
        assert_acts_like(operator, truth[part], truth[part])
