"""``.npz`` packs: plain arrays, and CIFAR-10 as lossless WebP sprites."""

import io
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from curvlab.tasks.images import DataError, image_tensor, label_tensor

_TILES = 100  # a sprite is 100 x 100 images of 32 x 32, row by row


def read_arrays(path: Path, keys: tuple[str, ...]) -> dict[str, NDArray[Any]]:
    """The named arrays of an ``.npz`` file; pickled objects in it are refused."""
    try:
        pack = np.load(path, allow_pickle=False)
        if not isinstance(pack, np.lib.npyio.NpzFile):
            raise DataError(f"{path} is a single array, not an .npz pack")
        with pack:
            absent = [key for key in keys if key not in pack.files]
            if absent:
                raise DataError(
                    f"{path} lacks {', '.join(absent)}; it has {', '.join(pack.files) or 'nothing'}"
                )
            return {key: pack[key] for key in keys}
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} is damaged or not an .npz file: {error}. Get it again") from error


def read_sprites(path: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Train images and labels, test images and labels of a pack of WebP sprites."""
    trains = tuple(f"train_webp_{i}" for i in range(5))
    arrays = read_arrays(path, (*trains, "y_train", "test_webp", "y_test"))
    train = torch.cat([_tiles(arrays[key], f"{path}: {key}") for key in trains])
    test = _tiles(arrays["test_webp"], f"{path}: test_webp")
    train_labels = label_tensor(arrays["y_train"], f"{path}: y_train", 10)
    test_labels = label_tensor(arrays["y_test"], f"{path}: y_test", 10)
    for images, labels, key in ((train, train_labels, "y_train"), (test, test_labels, "y_test")):
        if len(images) != len(labels):
            raise DataError(f"{path}: {len(images)} images but {len(labels)} labels in {key}")
    return train, train_labels, test, test_labels


def _tiles(sprite: NDArray[Any], where: str) -> Tensor:
    """The images ``(10000, 3, 32, 32)`` of one sprite."""
    try:
        from PIL import Image, UnidentifiedImageError, features
    except ImportError as error:
        raise DataError(f"{where} needs Pillow: pip install 'curvlab[data]'") from error
    if not features.check("webp"):
        raise DataError(f"{where} needs Pillow built with WebP: pip install --upgrade pillow")
    try:
        with Image.open(io.BytesIO(sprite.tobytes()), formats=["WEBP"]) as image:
            side = 32 * _TILES
            if image.size != (side, side):
                raise DataError(f"{where}: the sprite is {image.size}, not {(side, side)}")
            pixels = np.asarray(image.convert("RGB"))
    except (UnidentifiedImageError, OSError) as error:
        raise DataError(f"{where} is damaged: {error}. Get the pack again") from error
    grid = pixels.reshape(_TILES, 32, _TILES, 32, 3).transpose(0, 2, 4, 1, 3)
    return image_tensor(grid.reshape(_TILES * _TILES, 3, 32, 32), where, (3, 32, 32))
