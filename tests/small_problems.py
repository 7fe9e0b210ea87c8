"""Tasks and networks that several test files learn: small, seeded, different from task to task."""

import itertools

import torch
from torch import nn

from curvlab.learners import SGD, population_of
from curvlab.nets import mlp, slim_resnet18, vit_cifar
from curvlab.tasks import Samples, Task
from curvlab.training import Schedule, learn


def make_tasks(count=2, train=43, test=20, shape=(6,), classes=3, dtype=torch.float32):
    """Task ``t`` asks which of the inputs ``t, ..., t + classes - 1`` is the largest.

    The 43 samples end in a short batch, whatever the usual batch sizes.
    """
    generator = torch.Generator().manual_seed(5)
    tasks = []
    for t in range(count):
        inputs = torch.randn(train + test, *shape, generator=generator, dtype=torch.float64)
        samples = Samples(inputs.to(dtype), inputs.flatten(1)[:, t : t + classes].argmax(1))
        tasks.append(Task(f"task{t}", samples[:train], samples[train:], classes))
    return tasks


def cloud_tasks(count=3, samples=60, width=8, classes=3, shape=None):
    """Separable clouds; each task has its own middles, so that one task's solution fails others."""
    tasks = []
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        middles = torch.randn(classes, width, generator=generator) * 1.5

        def draw(size, generator=generator, middles=middles):
            targets = torch.arange(size) % classes
            noise = torch.randn(size, width, generator=generator) * 0.3
            inputs = middles[targets] + noise
            return Samples(inputs if shape is None else inputs.reshape(size, *shape), targets)

        tasks.append(Task(f"task {number}", draw(samples), draw(30), classes))
    return tasks


def small(seed, dtype=torch.float32, **options):
    return mlp((6, 8, 7, 3), seed=seed, dtype=dtype, **options)


def tanh_network(widths, seed, dtype=torch.float32):
    """Layers and tanh in turn, with parameters that are large enough to be curved."""
    generator = torch.Generator().manual_seed(seed)
    layers = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b, dtype=dtype), nn.Tanh()]
    model = nn.Sequential(*layers[:-1])
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.5 * torch.randn(p.shape, generator=generator, dtype=dtype))
    return model


def resnet(seed, norm="batch"):
    return slim_resnet18(3, nf=2, blocks=(1, 1), norm=norm, seed=seed)


def vit(seed):
    return vit_cifar(3, hidden=8, heads=2, depth=1, mlp=8, seed=seed)


def trained(dtype=torch.float64):
    """Two runs side by side after one epoch of one task, and that task."""
    tasks = make_tasks(1, dtype=dtype)
    population = population_of([small(seed, dtype) for seed in (1, 2)], (1, 2))
    learn(population, tasks, SGD(), Schedule(0.1, epochs=1))
    return population, tasks[0]
