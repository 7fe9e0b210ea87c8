"""Small class-balanced subsets of MNIST (at 14 x 14) and CIFAR-10 that travel with the package.

``manifest.json`` says what each file holds, what it was made from, and its SHA-256, which is
checked at every load. ``python -m experiments.embed`` makes them.

A file is xz over bytes: train labels, test labels, then all images plane by plane. CIFAR's planes
are green, red minus green and blue minus green, each differenced along rows and columns (modulo
256, so nothing is lost): two cumulative sums undo it.
"""

import hashlib
import json
import lzma
import math
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from curvlab.tasks.images import DataError, ImageData

Bytes = NDArray[np.uint8]


def embedded_mnist() -> ImageData:
    """5,000 + 1,000 images of MNIST, ``(N, 1, 14, 14)``, each class equally often."""
    return load(files(__name__), "mnist14")


def embedded_cifar10() -> ImageData:
    """1,250 + 500 images of CIFAR-10, ``(N, 3, 32, 32)``, each class equally often."""
    return load(files(__name__), "cifar10")


def load(folder: Traversable, name: str) -> ImageData:
    """The set called ``name`` in a folder with a ``manifest.json``; its digest is checked."""
    entry: dict[str, Any] = json.loads((folder / "manifest.json").read_text())[name]
    path = folder / entry["file"]
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != entry["sha256"]:
        raise DataError(f"{path} is damaged: its SHA-256 is not that of manifest.json. Reinstall")
    train, test, shape = entry["train"], entry["test"], tuple(entry["shape"])
    total = train + test
    raw = np.frombuffer(lzma.decompress(content), np.uint8)
    if raw.size != total * (1 + math.prod(shape)):
        raise DataError(f"{path} holds {raw.size} bytes, not what manifest.json says. Reinstall")
    labels = torch.from_numpy(raw[:total].astype(np.int64))
    images = torch.from_numpy(decode(raw[total:].reshape(shape[0], total, *shape[1:])))
    return ImageData(
        f"embedded {name}",
        images[:train],
        labels[:train],
        images[train:],
        labels[train:],
        tuple(entry["classes"]),
    )


def decode(planes: Bytes) -> Bytes:
    """Images ``(N, C, H, W)`` of planes ``(C, N, H, W)``."""
    if len(planes) == 3:
        green, red, blue = planes.cumsum(axis=3, dtype=np.uint8).cumsum(axis=2, dtype=np.uint8)
        planes = np.stack([red + green, green, blue + green])
    return planes.transpose(1, 0, 2, 3).copy()
