"""Make the data embedded in the package: ``python -m experiments.embed --data ROOT``.

``ROOT`` holds all of MNIST and CIFAR-10, in any form the readers take.

Images are taken at even distances through each class, in the order of the data set: MNIST's first
test images are easier than its last. MNIST is halved to 14 x 14 by means of 2 x 2 pixels, rounded
half up.
"""

import argparse
import hashlib
import json
import lzma
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvlab.storage import write_atomically
from curvlab.tasks import embedded
from curvlab.tasks.embedded import Bytes
from curvlab.tasks.images import DataError, ImageData
from curvlab.tasks.readers import cifar10, mnist

# Images per class: MNIST as the demo needs it, CIFAR-10 as much as 3 MB hold.
SIZES = {"mnist14": (500, 100), "cifar10": (125, 50)}
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 0, "pb": 0}]


def spread(labels: Tensor, per_class: int, classes: int) -> Tensor:
    """Positions of ``per_class`` members of every class, evenly spaced, in ascending order."""
    chosen = []
    for label in range(classes):
        members = (labels == label).nonzero().flatten()
        if len(members) < per_class:
            raise DataError(f"class {label} has {len(members)} images; {per_class} are needed")
        chosen.append(
            members[torch.arange(per_class, device=labels.device) * len(members) // per_class]
        )
    return torch.cat(chosen).sort().values


def halve(images: Tensor) -> Tensor:
    """Images ``(N, C, 2H, 2W)`` to ``(N, C, H, W)``: means of 2 x 2 pixels, rounded half up."""
    n, channels, height, width = images.shape
    tiles = images.view(n, channels, height // 2, 2, width // 2, 2).to(torch.int16)
    return ((tiles.sum((3, 5)) + 2) // 4).to(torch.uint8)


def select(data: ImageData, name: str) -> ImageData:
    """The images that are embedded under ``name``."""
    train = spread(data.train_labels, SIZES[name][0], len(data.classes))
    test = spread(data.test_labels, SIZES[name][1], len(data.classes))
    images = data.train_images[train], data.test_images[test]
    if name == "mnist14":
        images = halve(images[0]), halve(images[1])
    return ImageData(
        name, images[0], data.train_labels[train], images[1], data.test_labels[test], data.classes
    )


def encode(images: Bytes) -> Bytes:
    """Images ``(N, C, H, W)`` to planes ``(C, N, H, W)`` that compress well; C is 1 or 3.

    The inverse of :func:`curvlab.tasks.embedded.decode`.
    """
    planes = images.transpose(1, 0, 2, 3).copy()
    if len(planes) == 1:
        return planes  # digits: mostly exact zeros, which differencing would only hide
    red, green, blue = planes
    planes = np.stack([green, red - green, blue - green])
    planes[:, :, 1:] -= planes[:, :, :-1].copy()
    planes[:, :, :, 1:] -= planes[:, :, :, :-1].copy()
    return planes


def write(folder: Path, name: str, data: ImageData) -> dict[str, Any]:
    """Write one set; returns its entry of the manifest."""
    labels = torch.cat([data.train_labels, data.test_labels]).numpy().astype(np.uint8)
    images = torch.cat([data.train_images, data.test_images]).numpy()
    raw = labels.tobytes() + np.ascontiguousarray(encode(images)).tobytes()
    content = lzma.compress(raw, format=lzma.FORMAT_XZ, filters=FILTERS)
    path = folder / f"{name}.xz"
    write_atomically(path, lambda file: Path(file).write_bytes(content))
    return {
        "file": path.name,
        "sha256": hashlib.sha256(content).hexdigest(),
        "pixels_sha256": hashlib.sha256(images.tobytes()).hexdigest(),
        "train": len(data.train_labels),
        "test": len(data.test_labels),
        "shape": list(images.shape[1:]),
        "classes": list(data.classes),
        "bytes": len(content),
        "compression": round(math.prod(images.shape) / len(content), 2),
    }


def build(root: Path, folder: Path) -> dict[str, Any]:
    """Write both sets and ``manifest.json`` into ``folder``; returns the manifest."""
    sources = {"mnist14": mnist(root), "cifar10": cifar10(root)}
    manifest = {name: write(folder, name, select(data, name)) for name, data in sources.items()}
    for name, data in sources.items():
        pixels = hashlib.sha256(data.train_images.numpy().tobytes())
        pixels.update(data.test_images.numpy().tobytes())
        manifest[name]["source"] = data.name
        manifest[name]["source_pixels_sha256"] = pixels.hexdigest()
    text = json.dumps(manifest, indent=2) + "\n"
    write_atomically(folder / "manifest.json", lambda file: Path(file).write_text(text))
    return manifest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of MNIST and CIFAR-10")
    parser.add_argument(
        "--out", type=Path, default=Path(embedded.__file__).parent, help="where to write"
    )
    arguments = parser.parse_args()
    for name, entry in build(arguments.data, arguments.out).items():
        print(f"{name}: {entry['train']} + {entry['test']} images, {entry['bytes']:,} bytes")


if __name__ == "__main__":
    main()
