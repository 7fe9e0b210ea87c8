"""Images as they are stored: bytes and labels, before any stream is made of them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


class DataError(ValueError):
    """A data file is missing, damaged or not what it should be; the message names the cure."""


class MissingDataError(DataError, FileNotFoundError):
    """A data file or its folder does not exist."""


@dataclass(frozen=True, slots=True, eq=False)
class ImageData:
    """A labelled image set: images ``(N, C, H, W)`` uint8, labels ``(N,)`` int64.

    Args:
        name: As in ``"mnist"``; names the tasks made of it.
        train_images: Shape ``(N, C, H, W)``.
        train_labels: Shape ``(N,)``, in ``0..len(classes)-1``.
        test_images: Shape ``(M, C, H, W)``.
        test_labels: Shape ``(M,)``.
        classes: Their names, in the order of the labels.
    """

    name: str
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        for part in ("train", "test"):
            images, labels = getattr(self, f"{part}_images"), getattr(self, f"{part}_labels")
            what = f"{self.name}: {part}_images and {part}_labels"
            if images.dtype != torch.uint8 or labels.dtype != torch.int64:
                raise TypeError(
                    f"{what} must be uint8 and int64; got {images.dtype} and {labels.dtype}"
                )
            if images.dim() != 4 or labels.dim() != 1 or len(images) != len(labels):
                raise ValueError(
                    f"{what} must have shapes (N, C, H, W) and (N,); got {tuple(images.shape)} and "
                    f"{tuple(labels.shape)}"
                )
            if len(images) == 0:
                raise ValueError(f"{what} are empty")
            low, high = int(labels.min()), int(labels.max())
            if low < 0 or high >= len(self.classes):
                raise ValueError(
                    f"{what}: labels run from {low} to {high}, but there are "
                    f"{len(self.classes)} classes"
                )
        if self.train_images.shape[1:] != self.test_images.shape[1:]:
            raise ValueError(
                f"{self.name}: train and test images differ in shape: "
                f"{tuple(self.train_images.shape[1:])} and {tuple(self.test_images.shape[1:])}"
            )


def require_same_length(images: Tensor, labels: Tensor, where: str) -> None:
    """Raise a :class:`DataError` that names ``where`` unless every image has a label."""
    if len(images) != len(labels):
        raise DataError(f"{where}: {len(images)} images but {len(labels)} labels")


def label_tensor(labels: Any, where: str, classes: int) -> Tensor:
    """``labels`` as int64 ``(N,)``, or a :class:`DataError` that names ``where``."""
    try:
        array = np.asarray(labels)
    except ValueError as error:  # a ragged list
        raise DataError(f"{where}: labels are not an array: {error}") from error
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise DataError(
            f"{where}: labels must be a one-dimensional array of integers; got {array.dtype} "
            f"of shape {array.shape}"
        )
    if array.size and not 0 <= int(array.min()) <= int(array.max()) < classes:
        raise DataError(
            f"{where}: labels must lie in 0..{classes - 1}; they run from {array.min()} to "
            f"{array.max()}. Is it a file of another data set?"
        )
    return torch.from_numpy(array.astype(np.int64))


def image_tensor(images: Any, where: str, shape: tuple[int, ...]) -> Tensor:
    """``images`` as uint8 ``(N, *shape)``, or a :class:`DataError` that names ``where``."""
    array = images if isinstance(images, np.ndarray) else np.empty(0, object)
    if array.dtype != np.uint8 or array.ndim != len(shape) + 1 or array.shape[1:] != shape:
        raise DataError(
            f"{where}: images must be uint8 of shape (N, {', '.join(map(str, shape))}); got "
            f"{array.dtype} of shape {array.shape}"
        )
    if len(array) == 0:
        raise DataError(f"{where}: there are no images in it")
    return torch.from_numpy(np.ascontiguousarray(array) if array.flags.writeable else array.copy())
