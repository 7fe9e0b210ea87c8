"""Data and streams of tasks: readers, embedded subsets, rotated, permuted, split and toy streams.

A stream is a list of :class:`Task`. Images come as :class:`ImageData`, from a reader (``mnist``,
``cifar10``, ``cifar100``: your own files) or embedded in the package (``embedded_mnist``,
``embedded_cifar10``); a stream function turns them into resident tensors::

    tasks = rotated_mnist(mnist("~/data"))      # 5 x 60,000
    tasks = limit(rotated_mnist(), train=1000)  # embedded, 5 x 1,000
"""

from curvlab.tasks.embedded import embedded_cifar10, embedded_mnist
from curvlab.tasks.images import DataError, ImageData
from curvlab.tasks.readers import cifar10, cifar100, mnist
from curvlab.tasks.samples import Samples, Task, joined, limit, subset
from curvlab.tasks.streams import (
    ANGLES,
    CIFAR_NORMALISATION,
    MNIST_NORMALISATION,
    permuted_mnist,
    rotated_mnist,
    split_cifar10,
    split_cifar100,
    split_classes,
)
from curvlab.tasks.toy import toy_challenge

__all__ = [
    "ANGLES",
    "CIFAR_NORMALISATION",
    "MNIST_NORMALISATION",
    "DataError",
    "ImageData",
    "Samples",
    "Task",
    "cifar10",
    "cifar100",
    "embedded_cifar10",
    "embedded_mnist",
    "joined",
    "limit",
    "mnist",
    "permuted_mnist",
    "rotated_mnist",
    "split_cifar10",
    "split_cifar100",
    "split_classes",
    "subset",
    "toy_challenge",
]
