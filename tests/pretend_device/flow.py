"""What flows are made of: the list of them, a small problem, and a comparison with the CPU."""

from types import SimpleNamespace

import torch
from torch.nn.functional import cross_entropy

import curvlab
from tests import pretend_device
from tests.small_problems import small

FLOWS = {}
# The pretend device, once it is loaded, and launches of Triton kernels in the flow under way.
HERE = SimpleNamespace(device=torch.device("cpu"), kernels=[])


def flow(function):
    FLOWS[function.__name__.replace("_", " ")] = function
    return function


def data(device, samples=40):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, 6, generator=generator)
    targets = torch.randint(3, (samples,), generator=generator)
    return inputs.to(device), targets.to(device)


def operator(device, kind=curvlab.Hessian, build=small, **options):
    return kind(build(0).to(device), cross_entropy, data(device), **options)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def error(actual, expected):
    """Largest difference, relative to the largest element."""
    actual, expected = (
        torch.as_tensor(each).detach().cpu().double() for each in (actual, expected)
    )
    assert actual.shape == expected.shape
    return float((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-30))


def both(run):
    """The flow on the CPU and on the device: the error between, and the waits of the latter."""
    expected = run(torch.device("cpu"))
    pretend_device.reset()
    actual = run(HERE.device)
    waits = sum(pretend_device.waits().values())
    errors = [error(a, e) for a, e in zip(actual, expected, strict=True)]
    return {"error": max(errors), "waits": waits}
