"""``.npz`` packs: plain arrays, and CIFAR-10 as lossless WebP sprites."""

import io
import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from curvlab.tasks.images import DataError, image_tensor, label_tensor, require_same_length

HEADER = 16_384  # bytes; numpy writes 128
_TILES = 100  # a sprite is 100 x 100 images of 32 x 32, row by row


def read_arrays(path: Path, most: dict[str, int]) -> dict[str, NDArray[Any]]:
    """Named arrays of an ``.npz`` file; pickled objects in it are refused.

    Args:
        most: Bytes that each array may have; no more is unpacked, whatever the file says.
    """
    try:
        with zipfile.ZipFile(path) as pack:
            held = [name.removesuffix(".npy") for name in pack.namelist()]
            absent = [key for key in most if key not in held]
            if absent:
                raise DataError(
                    f"{path} lacks {', '.join(absent)}; it has {', '.join(held) or 'nothing'}"
                )
            return {key: _array(pack, key, bytes_) for key, bytes_ in most.items()}
    except DataError:
        raise
    # A damaged zip file can fail in any way that the numbers and names in its headers can.
    except Exception as error:
        said = str(error) or type(error).__name__
        raise DataError(f"{path} is damaged or not an .npz file: {said}. Get it again") from error


def _array(pack: zipfile.ZipFile, key: str, most: int) -> NDArray[Any]:
    name = key if key in pack.namelist() else f"{key}.npy"
    with pack.open(name) as file:
        content = file.read(most + HEADER + 1)
    if len(content) > most + HEADER:
        raise ValueError(f"{key} unpacks to more than {most:,} bytes")
    stream = io.BytesIO(content)
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0
    if version != (1, 0):
        read = np.lib.format.read_array_header_2_0
    shape, column_major, dtype = read(stream)
    if dtype.kind not in "iuf":
        raise ValueError(f"{key} holds {dtype}, not numbers: nothing else is read")
    size = math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or stream.tell() + size != len(content):
        raise ValueError(f"{key} has {len(content) - stream.tell()} bytes; {shape} needs {size}")
    flat = np.frombuffer(content, dtype, offset=stream.tell())
    return flat.reshape(shape, order="F" if column_major else "C")


def read_sprites(path: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Train images and labels, test images and labels of a pack of WebP sprites."""
    trains = tuple(f"train_webp_{i}" for i in range(5))
    sprite, eights = 3 * (32 * _TILES) ** 2, 8 * 5 * _TILES**2  # bytes: unpacked, and as int64
    most = dict.fromkeys((*trains, "test_webp"), sprite) | {"y_train": eights, "y_test": eights}
    arrays = read_arrays(path, most)
    train = torch.cat([_tiles(arrays[key], f"{path}: {key}") for key in trains])
    test = _tiles(arrays["test_webp"], f"{path}: test_webp")
    train_labels = label_tensor(arrays["y_train"], f"{path}: y_train", 10)
    test_labels = label_tensor(arrays["y_test"], f"{path}: y_test", 10)
    require_same_length(train, train_labels, f"{path}: y_train")
    require_same_length(test, test_labels, f"{path}: y_test")
    return train, train_labels, test, test_labels


def _tiles(sprite: NDArray[Any], where: str) -> Tensor:
    """The images ``(10000, 3, 32, 32)`` of one sprite."""
    try:
        from PIL import Image, features
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
    except DataError:
        raise
    except Exception as error:  # of the decoder, on bytes it cannot make sense of
        raise DataError(f"{where} is damaged: {error}. Get the pack again") from error
    grid = pixels.reshape(_TILES, 32, _TILES, 32, 3).transpose(0, 2, 4, 1, 3)
    return image_tensor(grid.reshape(_TILES * _TILES, 3, 32, 32), where, (3, 32, 32))
