"""Embedded data: content, balance and size, the build, and damaged files."""

import hashlib
import json
import os
import shutil
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch

from curvlab.tasks import (
    DataError,
    cifar10,
    embedded_cifar10,
    embedded_mnist,
    mnist,
)
from curvlab.tasks.embedded import decode, load
from experiments.embed import build, encode, halve, select, spread, write
from tests.made_up_data import pictures


def test_the_embedded_digits_are_balanced_and_small():
    data = embedded_mnist()
    assert data.train_images.shape == (5000, 1, 14, 14)
    assert data.test_images.shape == (1000, 1, 14, 14)
    assert data.train_labels.bincount().tolist() == [500] * 10
    assert data.test_labels.bincount().tolist() == [100] * 10
    assert 0.1 < float(data.train_images.float().mean()) / 255 < 0.16
    assert (files("curvlab.tasks.embedded") / "mnist14.xz").stat().st_size < 0.45e6


def test_the_embedded_pictures_are_balanced_and_small():
    data = embedded_cifar10()
    assert data.train_images.shape == (1250, 3, 32, 32)
    assert data.test_images.shape == (500, 3, 32, 32)
    assert data.train_labels.bincount().tolist() == [125] * 10
    assert data.test_labels.bincount().tolist() == [50] * 10
    assert data.classes[3] == "cat"
    assert (files("curvlab.tasks.embedded") / "cifar10.xz").stat().st_size <= 3_000_000


@pytest.mark.parametrize(
    ("name", "read"), [("mnist14", embedded_mnist), ("cifar10", embedded_cifar10)]
)
def test_the_embedded_pixels_are_those_of_the_manifest(name, read):
    data = read()
    pixels = torch.cat([data.train_images, data.test_images]).numpy().tobytes()
    manifest = json.loads((files("curvlab.tasks.embedded") / "manifest.json").read_text())
    assert hashlib.sha256(pixels).hexdigest() == manifest[name]["pixels_sha256"]


def test_a_damaged_embedded_file_is_refused(tmp_path):
    folder = Path(str(files("curvlab.tasks.embedded")))
    for name in ("manifest.json", "mnist14.xz"):
        shutil.copy(folder / name, tmp_path / name)
    assert len(load(tmp_path, "mnist14").train_labels) == 5000
    content = bytearray((tmp_path / "mnist14.xz").read_bytes())
    content[1000] ^= 1
    (tmp_path / "mnist14.xz").write_bytes(content)
    with pytest.raises(DataError, match=r"mnist14\.xz is damaged.*Reinstall"):
        load(tmp_path, "mnist14")


@pytest.mark.parametrize(
    ("count", "channels", "side"), [(1, 1, 1), (3, 1, 14), (1, 3, 1), (5, 3, 7)]
)
def test_encoding_loses_nothing(count, channels, side):
    images = np.random.default_rng(0).integers(0, 256, (count, channels, side, side), np.uint8)
    assert np.array_equal(decode(encode(images)), images)


def test_a_set_written_by_the_build_is_read_back(tmp_path):
    data = pictures(20, name="cifar10")
    entry = write(tmp_path, "cifar10", data)
    (tmp_path / "manifest.json").write_text(json.dumps({"cifar10": entry}))
    back = load(tmp_path, "cifar10")
    assert torch.equal(back.train_images, data.train_images)
    assert torch.equal(back.test_labels, data.test_labels)


def test_the_build_takes_every_class_at_even_distances_and_halves_by_rounding():
    labels = torch.tensor([0, 1] * 10)
    assert spread(labels, 2, 2).tolist() == [0, 1, 10, 11]
    with pytest.raises(DataError, match="class 0 has 10 images; 11 are needed"):
        spread(labels, 11, 2)
    assert halve(torch.tensor([[[[1, 2], [2, 1]]]], dtype=torch.uint8)).item() == 2  # 1.5 rounds up
    assert halve(torch.tensor([[[[1, 1], [2, 1]]]], dtype=torch.uint8)).item() == 1


def test_the_embedded_files_are_what_the_build_makes_of_the_real_data():
    root = os.environ.get("CURVLAB_DATA")
    if not root:
        pytest.skip("set CURVLAB_DATA to a folder with MNIST and CIFAR-10")
    for name, full, embedded in (
        ("mnist14", mnist(root), embedded_mnist()),
        ("cifar10", cifar10(root), embedded_cifar10()),
    ):
        expected = select(full, name)
        assert torch.equal(embedded.train_images, expected.train_images)
        assert torch.equal(embedded.train_labels, expected.train_labels)
        assert torch.equal(embedded.test_images, expected.test_images)
        assert torch.equal(embedded.test_labels, expected.test_labels)


@pytest.mark.slow
def test_the_build_from_the_real_data_repeats_the_manifest(tmp_path):
    root = os.environ.get("CURVLAB_DATA")
    if not root:
        pytest.skip("set CURVLAB_DATA to a folder with MNIST and CIFAR-10")
    committed = json.loads((files("curvlab.tasks.embedded") / "manifest.json").read_text())
    made = build(Path(root), tmp_path)
    for name, entry in committed.items():
        # compressed bytes may differ between versions of liblzma; pixels may not
        for key in ("pixels_sha256", "source_pixels_sha256", "train", "test", "shape", "classes"):
            assert made[name][key] == entry[key]
