"""The paper's streams: rotated and permuted MNIST, split CIFAR-10 and CIFAR-100.

Each function takes :class:`ImageData` and returns a list of :class:`Task` with float32 inputs in
0..1 (or normalised) and targets 0..C-1 inside each task, for one head shared by all tasks or one
head for each; split streams can also have targets that count over all tasks (``targets="all"``).
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from curvlab.checks import whole
from curvlab.tasks.embedded import embedded_cifar10, embedded_mnist
from curvlab.tasks.images import DataError, ImageData
from curvlab.tasks.rotation import rotated
from curvlab.tasks.samples import Samples, Task, generator_of

Normalisation = tuple[Sequence[float], Sequence[float]]  # mean and deviation of each channel

Targets = Literal["task", "all"]

ANGLES = (-45.0, -22.5, 0.0, 22.5, 45.0)
MNIST_NORMALISATION: Normalisation = ((0.1307,), (0.3081,))
CIFAR_NORMALISATION: Normalisation = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))


def rotated_mnist(
    data: ImageData | None = None,
    *,
    angles: Sequence[float] = ANGLES,
    side: int = 14,
    normalise: Normalisation | None = None,
    flat: bool = True,
) -> list[Task]:
    """One task per angle: all images turned counter-clockwise (bilinear), then shrunk.

    With the full 28 x 28 images, rotation comes before shrinking, as in the paper. The embedded
    subset is stored at 14 x 14 and is rotated there, which is softer: inputs differ by 18 % in
    norm from those of the same digits rotated first, by 0.2 % (rounding to bytes) at angle 0.

    Args:
        data: ``mnist()``; ``None`` takes the embedded subset.
        angles: In degrees, one task each.
        side: Pixels along the side of the inputs; divides the images' side.
        normalise: ``None`` leaves 0..1; else e.g. ``MNIST_NORMALISATION``.
        flat: Inputs ``(N, side * side)`` for an MLP, or ``(N, 1, side, side)``.
    """
    data = embedded_mnist() if data is None else data
    degrees = [float(angle) for angle in angles]
    if not degrees:
        raise ValueError("angles= is empty: a stream needs at least one task")
    train = _turned(data.train_images, degrees, side, normalise)
    test = _turned(data.test_images, degrees, side, normalise)
    shape = (-1, side * side) if flat else (-1, 1, side, side)
    return [
        Task(
            f"rotated by {angle:g}",
            Samples(train[index].view(shape), data.train_labels),
            Samples(test[index].view(shape), data.test_labels),
            len(data.classes),
        )
        for index, angle in enumerate(degrees)
    ]


def permuted_mnist(
    data: ImageData | None = None,
    *,
    tasks: int = 5,
    seed: int | torch.Generator = 0,
    side: int = 14,
    normalise: Normalisation | None = None,
) -> list[Task]:
    """The first task has the pixels in order, every further one in a random order of its own.

    Args:
        data: ``mnist()``; ``None`` takes the embedded subset.
        tasks: Their number.
        seed: The seed of the orders: an int or a CPU generator.
        side: As in :func:`rotated_mnist`; inputs are ``(N, side * side)``.
        normalise: As in :func:`rotated_mnist`.
    """
    whole(tasks=tasks)
    data = embedded_mnist() if data is None else data
    generator = generator_of(seed)
    [train] = _turned(data.train_images, [0.0], side, normalise)
    [test] = _turned(data.test_images, [0.0], side, normalise)
    stream = []
    for index in range(tasks):
        order = torch.arange(side * side, device="cpu")
        if index > 0:
            order = torch.randperm(side * side, generator=generator, device="cpu")
        order = order.to(train.device)
        stream.append(
            Task(
                f"permutation {index}",
                Samples(train[:, order], data.train_labels),
                Samples(test[:, order], data.test_labels),
                len(data.classes),
            )
        )
    return stream


def split_cifar10(
    data: ImageData | None = None,
    *,
    order: Sequence[int] | None = None,
    normalise: Normalisation | None = None,
    targets: Targets = "task",
) -> list[Task]:
    """Five tasks of two classes; see :func:`split_classes`. ``None`` takes the embedded subset."""
    data = embedded_cifar10() if data is None else data
    return split_classes(data, 2, order=order, normalise=normalise, targets=targets)


def split_cifar100(
    data: ImageData,
    *,
    order: Sequence[int] | None = None,
    normalise: Normalisation | None = None,
    targets: Targets = "task",
) -> list[Task]:
    """Twenty tasks of five classes; see :func:`split_classes`."""
    return split_classes(data, 5, order=order, normalise=normalise, targets=targets)


def split_classes(
    data: ImageData,
    per_task: int,
    *,
    order: Sequence[int] | None = None,
    normalise: Normalisation | None = None,
    targets: Targets = "task",
) -> list[Task]:
    """Consecutive classes, ``per_task`` at a time.

    Args:
        data: ``cifar10()``, ``cifar100()`` or any other.
        per_task: Classes of a task; divides their number.
        order: The classes in the order in which they are dealt out; ``None`` is 0, 1, 2, ...
            A selection makes a shorter stream.
        normalise: ``None`` leaves 0..1; else e.g. ``CIFAR_NORMALISATION``.
        targets: ``"task"`` counts 0..per_task-1 in each task, for one head shared by all or one
            head for each; ``"all"`` counts on over the tasks, for one head with all classes.
    """
    if targets not in ("task", "all"):
        raise ValueError(f"targets= must be 'task' or 'all'; got {targets!r}")
    chosen = list(range(len(data.classes))) if order is None else [int(label) for label in order]
    if len(set(chosen)) != len(chosen) or not set(chosen) <= set(range(len(data.classes))):
        raise ValueError(
            f"order= must name classes 0..{len(data.classes) - 1}, each at most once; got {chosen}"
        )
    if per_task < 1 or not chosen or len(chosen) % per_task:
        raise ValueError(f"per_task= must divide the {len(chosen)} classes; got {per_task}")
    stream = []
    for start in range(0, len(chosen), per_task):
        labels = chosen[start : start + per_task]
        first = start if targets == "all" else 0
        train = _of_classes(data, "train", labels, first, normalise)
        test = _of_classes(data, "test", labels, first, normalise)
        name = f"{data.name}: {', '.join(data.classes[label] for label in labels)}"
        if targets == "all":
            own = tuple(range(start, start + per_task))
            stream.append(Task(name, train, test, len(chosen), own))
        else:
            stream.append(Task(name, train, test, per_task))
    return stream


def _of_classes(
    data: ImageData, part: str, labels: list[int], first: int, normalise: Normalisation | None
) -> Samples:
    images = data.train_images if part == "train" else data.test_images
    original = data.train_labels if part == "train" else data.test_labels
    targets = torch.full((len(data.classes),), -1, device=original.device)
    targets[labels] = torch.arange(first, first + len(labels), device=original.device)
    remapped = targets[original]
    counts = torch.bincount(remapped[remapped >= 0], minlength=first + len(labels))[first:]
    absent = [label for label, count in zip(labels, counts.tolist(), strict=True) if count == 0]
    if absent:
        raise DataError(
            f"{data.name} has no {part} images of class {', '.join(map(str, absent))}; leave it "
            "out with order=, or read the whole data set"
        )
    member = remapped >= 0
    return Samples(_normalised(images[member].float().div_(255), normalise), remapped[member])


def _turned(
    images: Tensor, degrees: list[float], side: int, normalise: Normalisation | None
) -> Tensor:
    """Shape ``(A, N, side * side)``."""
    turned = rotated(images, degrees, side)
    return _normalised(turned.view(-1, 1, side * side), normalise).view(turned.shape)


def _normalised(inputs: Tensor, normalise: Normalisation | None) -> Tensor:
    """``inputs`` ``(N, C, ...)`` less the mean and over the deviation of each channel, in place."""
    if normalise is None:
        return inputs
    mean, deviation = (torch.tensor(list(figures), device=inputs.device) for figures in normalise)
    if (
        mean.shape != deviation.shape
        or mean.shape != inputs.shape[1:2]
        or not (deviation > 0).all()
    ):
        raise ValueError(
            f"normalise= needs (means, deviations), one of each for {inputs.shape[1]} channels, "
            f"deviations above 0; got {normalise}"
        )
    shape = (-1, *[1] * (inputs.dim() - 2))
    mean, deviation = (f.to(inputs).view(shape) for f in (mean, deviation))
    return inputs.sub_(mean).div_(deviation)
