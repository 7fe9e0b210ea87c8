"""Data and streams of tasks: readers, embedded subsets, rotated, permuted, split and toy streams.

A stream is a list of :class:`Task`. Images come as :class:`ImageData`, from a reader (``mnist``,
``cifar10``, ``cifar100``: your own files) or embedded in the package (``embedded_mnist``,
``embedded_cifar10``); a stream function turns them into resident tensors::

    tasks = rotated_mnist(mnist("~/data"))      # 5 x 60,000
    tasks = limit(rotated_mnist(), train=1000)  # embedded, 5 x 1,000
"""

from curvlab.tasks.embedded import (
    embedded_cifar10 as embedded_cifar10,
    embedded_mnist as embedded_mnist,
)
from curvlab.tasks.images import DataError as DataError, ImageData as ImageData
from curvlab.tasks.readers import cifar10 as cifar10, cifar100 as cifar100, mnist as mnist
from curvlab.tasks.samples import (
    Samples as Samples,
    Task as Task,
    joined as joined,
    limit as limit,
    subset as subset,
)
from curvlab.tasks.streams import (
    ANGLES as ANGLES,
    CIFAR_NORMALISATION as CIFAR_NORMALISATION,
    MNIST_NORMALISATION as MNIST_NORMALISATION,
    permuted_mnist as permuted_mnist,
    rotated_mnist as rotated_mnist,
    split_cifar10 as split_cifar10,
    split_cifar100 as split_cifar100,
    split_classes as split_classes,
)
from curvlab.tasks.toy import toy_challenge as toy_challenge
