"""MNIST and CIFAR from the files users have; nothing in them is ever executed.

The folder is ``root=``, or else the environment variable ``CURVLAB_DATA``. Forms, first found
first taken:

- MNIST: the four idx files, gzipped or not, in ``root``, ``root/mnist`` or ``root/MNIST/raw``;
  ``mnist.npz`` (``x_train y_train x_test y_test``).
- CIFAR-10: the python batches in ``root/cifar-10-batches-py`` or ``root``; the archive
  ``cifar-10-python.tar.gz`` as published (read in place, never unpacked); ``cifar10.npz`` (arrays
  named as for MNIST, images ``(N, 32, 32, 3)``); ``cifar10_webp.npz`` (sprites; needs Pillow).
- CIFAR-100: ``root/cifar-100-python``, ``cifar-100-python.tar.gz``, ``cifar100.npz``; fine labels.
"""

import math
import os
from pathlib import Path

import torch
from torch import Tensor

from curvlab.tasks.images import (
    DataError,
    ImageData,
    MissingDataError,
    image_tensor,
    label_tensor,
    require_same_length,
)
from curvlab.tasks.published import DOWNLOADS, FILES, verify_file
from curvlab.tasks.readers.cifar import content_of, read_cifar_batch, read_cifar_batches
from curvlab.tasks.readers.idx import read_idx
from curvlab.tasks.readers.packs import read_arrays, read_sprites

__all__ = ["cifar10", "cifar100", "data_root", "mnist", "read_cifar_batch", "read_idx"]

CIFAR10_CLASSES = tuple(
    "airplane automobile bird cat deer dog frog horse ship truck".split()  # noqa: SIM905
)
_CIFAR10_BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")

_MOST = 60_000  # images in one part of any of these data sets

Root = str | Path | None


def mnist(root: Root = None, *, verify: bool = False) -> ImageData:
    """All of MNIST: images ``(60000, 1, 28, 28)`` and ``(10000, 1, 28, 28)``.

    Args:
        root: Folder of the files; ``None`` takes ``CURVLAB_DATA``.
        verify: Also compare every file with its published digest.
    """
    folder = data_root(root, "mnist")
    for place in (folder, folder / "mnist", folder / "MNIST" / "raw"):
        paths = _idx_files(place)
        if paths:
            return _mnist_from_idx(paths, verify)
    pack = folder / "mnist.npz"
    if pack.is_file():
        return _from_pack(pack, "mnist", (28, 28), tuple("0123456789"), verify)
    raise _missing("mnist", folder, ["the four idx files, gzipped or not", "mnist.npz"])


def cifar10(root: Root = None, *, verify: bool = False) -> ImageData:
    """All of CIFAR-10: images ``(50000, 3, 32, 32)`` and ``(10000, 3, 32, 32)``.

    Args:
        root: Folder of the files; ``None`` takes ``CURVLAB_DATA``.
        verify: Also compare every file with its published digest.
    """
    folder = data_root(root, "cifar10")
    read = _read_batches(folder, "cifar-10-batches-py", _CIFAR10_BATCHES, "cifar-10-python.tar.gz",
                         "labels", 10, verify)  # fmt: skip
    if read is not None:
        return _cifar("cifar10", read, CIFAR10_CLASSES)
    pack, sprites = folder / "cifar10.npz", folder / "cifar10_webp.npz"
    if pack.is_file():
        return _from_pack(pack, "cifar10", (32, 32, 3), CIFAR10_CLASSES, verify)
    if sprites.is_file():
        if verify:
            verify_file(sprites)
        return ImageData("cifar10", *read_sprites(sprites), CIFAR10_CLASSES)
    raise _missing(
        "cifar10",
        folder,
        [
            f"cifar-10-batches-py/ with {', '.join(_CIFAR10_BATCHES)}",
            "cifar-10-python.tar.gz",
            "cifar10.npz",
            "cifar10_webp.npz",
        ],
    )


def cifar100(root: Root = None, *, verify: bool = False) -> ImageData:
    """All of CIFAR-100, fine labels: images ``(50000, 3, 32, 32)`` and ``(10000, 3, 32, 32)``.

    Args:
        root: Folder of the files; ``None`` takes ``CURVLAB_DATA``.
        verify: Also compare every file with its published digest.
    """
    folder = data_root(root, "cifar100")
    classes = tuple(str(label) for label in range(100))
    read = _read_batches(folder, "cifar-100-python", ("train", "test"), "cifar-100-python.tar.gz",
                         "fine_labels", 100, verify)  # fmt: skip
    if read is not None:
        return _cifar("cifar100", read, classes)
    pack = folder / "cifar100.npz"
    if pack.is_file():
        return _from_pack(pack, "cifar100", (32, 32, 3), classes, verify)
    forms = ["cifar-100-python/ with train, test", "cifar-100-python.tar.gz", "cifar100.npz"]
    raise _missing("cifar100", folder, forms)


def data_root(root: Root, name: str) -> Path:
    """The folder to read from: ``root``, or ``CURVLAB_DATA``; it must exist."""
    chosen = os.environ.get("CURVLAB_DATA") if root is None else root
    if not chosen:
        raise DataError(
            f"where is {name}? Pass root=FOLDER or set CURVLAB_DATA=FOLDER; "
            f"`python -m curvlab.tasks.download {name} --root FOLDER` fills it. "
            "embedded_mnist() and embedded_cifar10() need no folder"
        )
    folder = Path(chosen).expanduser()
    if not folder.is_dir():
        said = "CURVLAB_DATA" if root is None else "root="
        raise MissingDataError(f"{said} names {folder}, which is not a folder")
    return folder


def _missing(name: str, folder: Path, forms: list[str]) -> MissingDataError:
    files = DOWNLOADS[name]
    known = [FILES[form] for form in forms if form in FILES and FILES[form] not in files]
    listed = "\n".join(
        f"  {file.name}  {' or '.join(file.digests)}"
        + (f"\n    from {' or '.join(file.urls)}" if file.urls else "")
        for file in (*files, *known)
    )
    return MissingDataError(
        f"{name} was not found in {folder}. It may be there as: {'; '.join(forms)}.\n{listed}\n"
        f"`python -m curvlab.tasks.download {name} --root {folder}` gets it with its digest checked"
    )


def _idx_files(place: Path) -> list[Path]:
    """The four idx files of a folder; an error if only some are there, [] if none is."""
    found, absent = [], []
    for file in DOWNLOADS["mnist"]:
        plain = file.name.removesuffix(".gz")
        names = (file.name, plain, plain.replace("-idx", ".idx"))
        path = next((place / name for name in names if (place / name).is_file()), None)
        if path is None:
            absent.append(file.name)
        else:
            found.append(path)
    if found and absent:
        raise DataError(
            f"{place} holds part of MNIST ({', '.join(p.name for p in found)}) but lacks "
            f"{', '.join(absent)}; `python -m curvlab.tasks.download mnist --root {place}` "
            "adds what is missing"
        )
    return found


def _mnist_from_idx(paths: list[Path], verify: bool) -> ImageData:
    def read(images_path: Path, labels_path: Path) -> tuple[Tensor, Tensor]:
        if verify:
            verify_file(images_path)
            verify_file(labels_path)
        images = image_tensor(read_idx(images_path), str(images_path), (28, 28))
        labels = label_tensor(read_idx(labels_path), str(labels_path), 10)
        require_same_length(images, labels, f"{images_path} and {labels_path.name}")
        return images.unsqueeze(1), labels

    return ImageData("mnist", *read(*paths[:2]), *read(*paths[2:]), tuple("0123456789"))


def _read_batches(
    root: Path,
    folder: str,
    names: tuple[str, ...],
    archive: str,
    key: str,
    classes: int,
    verify: bool,
) -> list[tuple[Tensor, Tensor]] | None:
    for place in (root / folder, root):
        paths = [place / name for name in names]
        absent = [path.name for path in paths if not path.is_file()]
        if not absent:
            if verify:
                for path in paths:
                    verify_file(path)
            return [read_cifar_batch(content_of(p), str(p), key, classes) for p in paths]
        if len(absent) < len(names) and place != root:
            raise DataError(f"{place} holds part of the batches but lacks {', '.join(absent)}")
    path = root / archive
    if not path.is_file():
        return None
    if verify:
        verify_file(path)
    return read_cifar_batches(path, [f"{folder}/{name}" for name in names], key, classes)


def _cifar(name: str, batches: list[tuple[Tensor, Tensor]], classes: tuple[str, ...]) -> ImageData:
    *train, (test_images, test_labels) = batches
    images = torch.cat([images for images, _ in train])
    labels = torch.cat([labels for _, labels in train])
    return ImageData(name, images, labels, test_images, test_labels, classes)


def _from_pack(
    path: Path, name: str, shape: tuple[int, ...], classes: tuple[str, ...], verify: bool
) -> ImageData:
    if verify:
        verify_file(path)
    keys = ("x_train", "y_train", "x_test", "y_test")
    image = math.prod(shape)
    arrays = read_arrays(path, {key: _MOST * (image if key[0] == "x" else 8) for key in keys})

    def checked(part: str) -> tuple[Tensor, Tensor]:
        images = image_tensor(arrays[f"x_{part}"], f"{path}: x_{part}", shape)
        images = images.unsqueeze(1) if len(shape) == 2 else images.permute(0, 3, 1, 2).contiguous()
        labels = label_tensor(arrays[f"y_{part}"], f"{path}: y_{part}", len(classes))
        require_same_length(images, labels, f"{path}: x_{part} and y_{part}")
        return images, labels

    return ImageData(name, *checked("train"), *checked("test"), classes)
