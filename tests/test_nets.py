"""The paper's networks: exact counts, seeded weights, second derivatives, explicit BatchNorm."""

import hashlib
import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jvp
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from curvlab.nets import mlp, slim_resnet18, vit_cifar
from curvlab.nets.vit import Attention
from curvlab.parameters import parameter_count, parameter_vector

# Relative error of a Hessian-vector product, by dtype; of one from finite differences in float64.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-4}
DIFFERENCES = 1e-5

TINY = {
    "mlp": (lambda **to: mlp((7, 5, 3), activation=nn.Tanh, **to), (7,)),
    "mlp relu": (lambda **to: mlp((7, 5, 5, 3), **to), (7,)),
    "resnet stable": (lambda **to: slim_resnet18(3, nf=2, blocks=(1, 1), **to), (3, 8, 8)),
    "resnet gem": (
        lambda **to: slim_resnet18(3, nf=3, blocks=(1, 1), block="gem", **to),
        (3, 6, 6),
    ),
    "resnet group": (
        lambda **to: slim_resnet18(3, nf=4, blocks=(1, 1), norm="group", **to),
        (3, 7, 5),
    ),
    "resnet none": (lambda **to: slim_resnet18(3, nf=3, blocks=(2,), norm="none", **to), (3, 5, 5)),
    "vit": (lambda **to: vit_cifar(3, hidden=8, depth=2, heads=2, mlp=12, side=8, **to), (3, 8, 8)),
}


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda: mlp(), 18_010),
        (lambda: mlp(bias=False), 17_800),
        (lambda: mlp(depth=3), 15_460),
        (lambda: slim_resnet18(5), 481_385),
        (lambda: slim_resnet18(2), 480_902),
        (lambda: slim_resnet18(5, block="gem"), 1_093_945),
        (lambda: slim_resnet18(5, norm="group"), 481_385),
        (lambda: vit_cifar(2), 12_466_946),
        (lambda: vit_cifar(5, device="meta"), 12_468_101),
        (lambda: vit_cifar(2, heads=12, device="meta"), 12_466_946),
        (lambda: vit_cifar(5, hidden=48, depth=2, mlp=96), 43_781),
    ],
)
def test_the_parameter_count_is_that_of_the_paper(build, expected):
    assert parameter_count(build()) == expected


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_second_derivatives_agree_between_double_backward_and_forward_over_reverse(name, dtype):
    model, loss, direction = hessian_case(name, dtype)
    twice = double_backward(model, loss, direction)
    _, mixed = jvp(grad(loss), (dict(model.named_parameters()),), (direction,))
    error = torch.cat([(twice[key] - mixed[key]).flatten() for key in twice]).norm()
    size = torch.cat([value.flatten() for value in twice.values()]).norm()
    assert size > 0
    assert error / size < TOLERANCE[dtype]


@pytest.mark.parametrize("name", TINY)
def test_second_derivatives_agree_with_differences_of_gradients(name):
    model, loss, direction = hessian_case(name, torch.float64)
    twice = double_backward(model, loss, direction)
    step = 1e-6
    here = {key: value.detach() for key, value in model.named_parameters()}
    ahead, behind = (
        grad(loss)({key: here[key] + sign * step * direction[key] for key in here})
        for sign in (1, -1)
    )
    error = torch.cat(
        [(twice[k] - (ahead[k] - behind[k]) / (2 * step)).flatten() for k in twice]
    ).norm()
    assert error / torch.cat([v.flatten() for v in twice.values()]).norm() < DIFFERENCES


@pytest.mark.parametrize("name", TINY)
def test_every_parameter_is_used(name):
    model, loss, _ = hessian_case(name, torch.float64)
    gradients = grad(loss)(dict(model.named_parameters()))
    # A key's bias shifts all scores of a query alike, so softmax ignores it: zero is right there.
    unused = [key for key, g in gradients.items() if not g.any() and not key.endswith("key.bias")]
    assert unused == []


@pytest.mark.parametrize("name", TINY)
def test_a_seed_fixes_the_weights_and_leaves_the_global_generator_alone(name):
    build, _ = TINY[name]
    before = torch.get_rng_state()
    first, again, other = (parameter_vector(build(seed=seed)) for seed in (3, 3, 4))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.isfinite(first).all()
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("name", TINY)
def test_float64_weights_are_the_float32_ones(name):
    build, _ = TINY[name]
    double = build(seed=1, dtype=torch.float64)
    assert all(t.dtype in (torch.float64, torch.int64) for t in double.state_dict().values())
    assert torch.equal(parameter_vector(double), parameter_vector(build(seed=1)).double())


def test_a_generator_is_advanced_so_that_two_networks_differ():
    generator = torch.Generator().manual_seed(0)
    first, second = mlp(seed=generator), mlp(seed=generator)
    assert torch.equal(parameter_vector(first), parameter_vector(mlp(seed=0)))
    assert not torch.equal(parameter_vector(first), parameter_vector(second))


def test_weights_do_not_depend_on_the_default_dtype_or_device():
    expected = parameter_vector(mlp((3, 4, 2), seed=5))
    try:
        torch.set_default_dtype(torch.float64)
        assert torch.equal(parameter_vector(mlp((3, 4, 2), seed=5)), expected.double())
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        assert mlp((3, 4, 2))[0].weight.is_meta
        assert torch.equal(parameter_vector(mlp((3, 4, 2), seed=5, device="cpu")), expected)


def test_weights_do_not_depend_on_the_processors_instruction_set():
    program = (
        "import hashlib, torch; from curvlab.nets import mlp, vit_cifar;"
        "from curvlab.parameters import parameter_vector as v;"
        "print(torch.backends.cpu.get_cpu_capability());"
        "print(hashlib.sha256(b''.join(v(m).numpy().tobytes() for m in"
        " (mlp(seed=11), vit_cifar(depth=1, seed=11)))).hexdigest())"
    )
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    capability, digest = done.stdout.split()
    assert capability == "DEFAULT"
    here = (mlp(seed=11), vit_cifar(depth=1, seed=11))
    content = b"".join(parameter_vector(model).numpy().tobytes() for model in here)
    assert digest == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("make", [lambda: nn.Linear(30, 400), lambda: nn.Conv2d(5, 60, 3)])
def test_weights_follow_the_default_distribution_of_pytorch(make):
    from curvlab.nets.initialise import build

    drawn = build(make, 0, None, None)
    torch_default = make()
    for name, parameter in drawn.named_parameters():
        bound = drawn.weight[0].numel() ** -0.5
        assert parameter.abs().max() <= bound
        assert parameter.abs().max() > 0.97 * bound
        assert abs(float(parameter.detach().std()) / bound - 3**-0.5) < 0.06
        assert abs(float(torch_default.get_parameter(name).detach().std()) / bound - 3**-0.5) < 0.06


def test_the_mlp_is_linear_layers_and_activations():
    model = mlp((6, 4, 3), activation=nn.Tanh)
    assert [type(layer) for layer in model] == [nn.Linear, nn.Tanh, nn.Linear]
    assert [layer.out_features for layer in mlp(width=7, depth=2) if hasattr(layer, "bias")] == [
        7,
        7,
        10,
    ]
    assert len(mlp((6, 3))) == 1
    assert parameter_count(mlp((6, 4, 3), activation=nn.PReLU)) == 6 * 4 + 4 + 4 * 3 + 3 + 1


def test_batch_norm_uses_its_statistics_in_eval_mode_only():
    model = slim_resnet18(3, nf=4, blocks=(1, 1), seed=0)
    images = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    model(images)  # train mode: moves the statistics
    assert model.norm.num_batches_tracked == 1
    model.eval()
    assert torch.allclose(model(images)[:2], model(images[:2]), atol=1e-6)
    assert model.norm.num_batches_tracked == 1


def test_untracked_batch_norm_depends_on_the_batch_even_in_eval_mode():
    model = slim_resnet18(3, nf=4, blocks=(1, 1), norm="batch_untracked", seed=0).eval()
    images = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    assert not torch.allclose(model(images)[:2], model(images[:2]), atol=1e-3)
    assert dict(model.named_buffers()) == {}


@pytest.mark.parametrize("norm", ["group", "none"])
def test_the_other_norms_keep_no_statistics_and_treat_images_one_by_one(norm):
    model = slim_resnet18(3, nf=4, blocks=(1, 1), norm=norm, seed=0)
    images = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(model(images)[:2], model(images[:2]), atol=1e-6)
    assert dict(model.named_buffers()) == {}


def test_attention_is_softmax_attention_scaled_by_the_whole_hidden_size():
    from curvlab.nets.initialise import build

    attention = build(lambda: Attention(12, 3), 0, torch.float64, None)
    tokens = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def split(layer):
        return layer(tokens).view(2, 5, 3, 4).transpose(1, 2)

    mixed = scaled_dot_product_attention(
        split(attention.query), split(attention.key), split(attention.value), scale=12**-0.5
    )
    expected = attention.output(mixed.transpose(1, 2).reshape(2, 5, 12))
    assert torch.allclose(attention(tokens), expected, atol=1e-13)


def test_patches_are_read_row_column_channel():
    model = vit_cifar(hidden=8, depth=0, heads=1)
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    patches = model._patches(images)
    assert patches.shape == (2, 64, 48)
    expected = images[1, :, 4:8, 8:12].permute(1, 2, 0).reshape(-1)  # grid row 1, column 2
    assert torch.equal(patches[1, 8 + 2], expected)


def test_the_mlp_of_a_transformer_block_ends_in_a_second_gelu():
    block = vit_cifar(hidden=8, depth=1, heads=1, side=8).blocks[0]
    nn.init.zeros_(block.attention.output.weight)
    nn.init.zeros_(block.attention.output.bias)
    nn.init.zeros_(block.narrow.weight)
    nn.init.constant_(block.narrow.bias, -1.0)
    tokens = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))
    gelu_of_minus_one = -0.15865525
    assert torch.allclose(block(tokens) - tokens, torch.tensor(gelu_of_minus_one), atol=1e-6)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: mlp((5,)), "at least inputs and outputs"),
        (lambda: mlp((5, 0, 2)), "at least one unit"),
        (lambda: mlp((5, 4, 3, 2), depth=3), "needs width="),
        (lambda: mlp(depth=-1), "number of hidden layers"),
        (lambda: mlp(seed="a"), "seed= must be an int"),
        (lambda: mlp(dtype=torch.int64), "dtype= must be a real floating type"),
        (lambda: mlp((2, 2, 2), activation=lambda: nn.Bilinear(2, 2, 2)), "cannot fill Bilinear"),
        (lambda: slim_resnet18(block="wide"), "block= must be one of"),
        (lambda: slim_resnet18(norm="layer"), "norm= must be one of"),
        (lambda: slim_resnet18(0), "at least 1"),
        (lambda: slim_resnet18(nf=2, blocks=(1,))(torch.zeros(2, 1, 8, 8)), r"\(N, 3, H, W\)"),
        (lambda: vit_cifar(hidden=10, heads=3), "multiple of heads="),
        (lambda: vit_cifar(side=30), "multiple of patch="),
        (lambda: vit_cifar(hidden=8, depth=-1), "depth= must be at least 0"),
        (lambda: vit_cifar(hidden=8, depth=0)(torch.zeros(2, 3, 28, 28)), r"\(N, 3, 32, 32\)"),
    ],
)
def test_errors_name_the_argument_and_the_cure(call, words):
    with pytest.raises((ValueError, TypeError), match=words):
        call()


def hessian_case(name, dtype):
    """A network in eval mode, its loss as a function of named parameters, and a direction."""
    build, shape = TINY[name]
    model = build(seed=2, dtype=dtype).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            # Fresh norms shift by 0, which leaves sums of ReLUs exactly on the kink.
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter += 0.1 * noise
    inputs = torch.randn(6, *shape, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(3, (6,), generator=generator)
    direction = {
        key: torch.randn(p.shape, generator=generator, dtype=torch.float64).to(dtype)
        for key, p in model.named_parameters()
    }
    buffers = dict(model.named_buffers())

    def loss(parameters):
        return cross_entropy(functional_call(model, {**parameters, **buffers}, inputs), targets)

    return model, loss, direction


def double_backward(model, loss, direction):
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(loss(parameters), list(parameters.values()), create_graph=True)
    slope = sum((g * direction[k]).sum() for k, g in zip(parameters, gradients, strict=True))
    return dict(zip(parameters, torch.autograd.grad(slope, list(parameters.values())), strict=True))
