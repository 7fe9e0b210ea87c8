"""MNIST's idx files, where data is looked for, and what is said when it is absent or wrong."""

import gzip
import os
import struct

import numpy as np
import pytest
import torch

from curvlab.tasks import DataError, cifar10, cifar100, mnist
from curvlab.tasks.readers import read_idx
from tests.made_up_data import arrays

IDX_NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def idx_bytes(array):
    head = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return head + array.astype(np.uint8).tobytes()


def write_mnist(folder, zipped=True, names=IDX_NAMES):
    folder.mkdir(parents=True, exist_ok=True)
    train, test = arrays(7), arrays(3, seed=1)
    for name, array in zip(names, (*train, *test), strict=True):
        content = idx_bytes(array)
        if zipped:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / name).write_bytes(content)
    return train, test


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("place", [".", "mnist", "MNIST/raw"])
def test_mnist_is_read_from_idx_files(tmp_path, zipped, place):
    train, test = write_mnist(tmp_path / place, zipped)
    data = mnist(tmp_path)
    assert data.train_images.shape == (7, 1, 28, 28)
    assert np.array_equal(data.train_images[:, 0].numpy(), train[0])
    assert data.train_labels.tolist() == train[1].tolist()
    assert data.train_labels.dtype == torch.int64
    assert np.array_equal(data.test_images[:, 0].numpy(), test[0])
    assert data.test_labels.tolist() == test[1].tolist()


def test_mnist_is_read_from_files_named_with_a_dot(tmp_path):
    train, _ = write_mnist(tmp_path, False, [name.replace("-idx", ".idx") for name in IDX_NAMES])
    assert mnist(tmp_path).train_labels.tolist() == train[1].tolist()


def test_the_environment_names_the_folder_and_an_argument_overrides_it(tmp_path, monkeypatch):
    train, _ = write_mnist(tmp_path / "a")
    monkeypatch.setenv("CURVLAB_DATA", str(tmp_path / "a"))
    assert mnist().train_labels.tolist() == train[1].tolist()
    (tmp_path / "b").mkdir()
    with pytest.raises(DataError, match="not found in"):
        mnist(tmp_path / "b")
    monkeypatch.setenv("CURVLAB_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=r"CURVLAB_DATA names .*not a folder"):
        mnist()
    monkeypatch.delenv("CURVLAB_DATA")
    with pytest.raises(DataError, match="set CURVLAB_DATA=FOLDER"):
        mnist()


@pytest.mark.parametrize(
    ("read", "words"),
    [
        (mnist, ["train-images-idx3-ubyte.gz", "440fcabf73cc", "mnist.npz", "094b831e4323"]),
        (cifar10, ["cifar-10-python.tar.gz", "6d958be07457", "cifar10_webp.npz", "41f3fd2e49b9"]),
        (cifar100, ["cifar-100-python.tar.gz", "85cd44d02ba6"]),
    ],
)
def test_absent_data_is_named_with_digests_addresses_and_the_command_that_gets_it(
    tmp_path, read, words
):
    with pytest.raises(DataError) as caught:
        read(tmp_path)
    for word in [*words, "https://", f"--root {tmp_path}", "curvlab.tasks.download"]:
        assert word in str(caught.value)


def test_a_partial_set_of_idx_files_is_named(tmp_path):
    write_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError, match=r"lacks t10k-labels-idx1-ubyte\.gz"):
        mnist(tmp_path)


@pytest.mark.parametrize("zipped", [True, False])
def test_an_idx_file_cut_anywhere_is_an_error_that_names_it(tmp_path, zipped):
    content = idx_bytes(arrays(3)[0])
    content = gzip.compress(content) if zipped else content
    path = tmp_path / "images"
    for size in (0, 1, 3, 4, 9, 15, 16, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(DataError, match="images is"):
            read_idx(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"<html>not found</html>", "not an idx file"),
        (b"\0\0\x0d\1\0\0\0\1\0\0\0\0", "idx type 0x0d"),
        (idx_bytes(np.zeros(3)) + b"more", "longer than its header"),
        (b"\0\0\x08\0", "truncated"),
        (gzip.compress(b"abc", mtime=0)[:-4] + b"\0\0\0\1", "damaged"),
    ],
)
def test_a_wrong_idx_file_is_an_error_that_names_it(tmp_path, content, words):
    path = tmp_path / "labels"
    path.write_bytes(content)
    with pytest.raises(DataError, match=words) as caught:
        read_idx(path)
    assert str(path) in str(caught.value)
    with pytest.raises(DataError, match="does not exist"):
        read_idx(tmp_path / "absent")


@pytest.mark.parametrize(
    ("name", "array", "words"),
    [
        ("train-labels-idx1-ubyte", np.full(7, 10), r"must lie in 0\.\.9"),
        ("train-labels-idx1-ubyte", np.zeros(6), "7 images but 6 labels"),
        ("train-images-idx3-ubyte", np.zeros((7, 14, 14)), r"of shape \(N, 28, 28\)"),
        ("t10k-images-idx3-ubyte", np.zeros((0, 28, 28)), "no images"),
        ("t10k-labels-idx1-ubyte", np.zeros((3, 1)), "one-dimensional"),
    ],
)
def test_mnist_files_that_do_not_fit_are_named(tmp_path, name, array, words):
    write_mnist(tmp_path, zipped=False)
    (tmp_path / name).write_bytes(idx_bytes(array))
    with pytest.raises(DataError, match=words) as caught:
        mnist(tmp_path)
    assert name in str(caught.value)


def test_verification_refuses_a_file_that_is_not_the_published_one(tmp_path):
    write_mnist(tmp_path)
    with pytest.raises(DataError, match="not the published file: its digest is sha256:"):
        mnist(tmp_path, verify=True)
    write_mnist(tmp_path / "raw", zipped=False)
    with pytest.raises(DataError, match="no digest is published"):
        mnist(tmp_path / "raw", verify=True)


# The whole data sets, where they are at hand.


def test_the_real_data_are_whole():
    root = os.environ.get("CURVLAB_DATA")
    if not root:
        pytest.skip("set CURVLAB_DATA to a folder with MNIST and CIFAR-10")
    digits = mnist(root)
    assert digits.train_images.shape == (60_000, 1, 28, 28)
    assert digits.train_labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert digits.test_labels.bincount()[0] == 980
    pictures = cifar10(root)
    assert pictures.train_images.shape == (50_000, 3, 32, 32)
    assert pictures.train_labels[:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]
    assert pictures.train_labels.bincount().tolist() == [5000] * 10
    # the means that everyone normalises CIFAR-10 with
    means = pictures.train_images.float().mean((0, 2, 3)) / 255
    assert torch.allclose(means, torch.tensor([0.4914, 0.4822, 0.4465]), atol=1e-4)
