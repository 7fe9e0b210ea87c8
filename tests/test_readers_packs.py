"""The .npz packs of MNIST and CIFAR, plain or as WebP sprites: read, or refused by name."""

import io
import sys

import numpy as np
import pytest

from curvlab.tasks import DataError, cifar10, cifar100, mnist
from tests.made_up_data import arrays


@pytest.mark.parametrize("label_type", [np.int64, np.uint8])
def test_mnist_is_read_from_an_npz_pack(tmp_path, label_type):
    (x, y), (u, v) = arrays(7), arrays(3, seed=1)
    np.savez(
        tmp_path / "mnist.npz",
        x_train=x, y_train=y.astype(label_type), x_test=u, y_test=v.astype(label_type),
    )  # fmt: skip
    data = mnist(tmp_path)
    assert np.array_equal(data.test_images[:, 0].numpy(), u)
    assert data.train_labels.tolist() == y.tolist()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"y_train": None}, "lacks y_train"),
        ({"x_train": np.zeros((7, 28, 28), np.float32)}, "uint8 of shape"),
        ({"y_train": np.zeros(7, np.float32)}, "array of integers"),
        ({"y_test": np.zeros(2, np.int64)}, "3 images but 2 labels"),
        ({"y_test": np.array([{}, {}, {}], dtype=object)}, "damaged or not an"),
    ],
)
def test_a_wrong_npz_pack_is_an_error_that_names_it(tmp_path, change, words):
    (x, y), (u, v) = arrays(7), arrays(3)
    pack = {"x_train": x, "y_train": y, "x_test": u, "y_test": v} | change
    np.savez(tmp_path / "mnist.npz", **{k: a for k, a in pack.items() if a is not None})
    with pytest.raises(DataError, match=words) as caught:
        mnist(tmp_path)
    assert "mnist.npz" in str(caught.value)


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "npy"])
def test_a_damaged_npz_pack_is_an_error_that_names_it(tmp_path, damage):
    (x, y), (u, v) = arrays(7), arrays(3)
    path = tmp_path / "mnist.npz"
    np.savez_compressed(path, x_train=x, y_train=y, x_test=u, y_test=v)
    content = bytearray(path.read_bytes())
    if damage == "cut":
        content = content[: len(content) // 2]
    elif damage == "flip":
        content[400] ^= 0xFF
    elif damage == "empty":
        content = bytearray()
    else:
        buffer = io.BytesIO()
        np.save(buffer, x)
        content = bytearray(buffer.getvalue())
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"mnist\.npz is"):
        mnist(tmp_path)


@pytest.mark.parametrize(
    ("read", "name", "classes"), [(cifar10, "cifar10", 10), (cifar100, "cifar100", 100)]
)
def test_cifar_is_read_from_a_plain_npz_pack(tmp_path, read, name, classes):
    (x, y), (u, v) = arrays(5, (32, 32, 3), classes), arrays(3, (32, 32, 3), classes)
    np.savez(tmp_path / f"{name}.npz", x_train=x, y_train=y, x_test=u, y_test=v)
    data = read(tmp_path)
    assert np.array_equal(data.train_images.numpy(), x.transpose(0, 3, 1, 2))
    assert len(data.classes) == classes


def webp_pack(path, pixels, **change):
    image = pytest.importorskip("PIL.Image")
    buffer = io.BytesIO()
    image.fromarray(pixels).save(buffer, "WEBP", lossless=True, method=0, quality=0)
    sprite = np.frombuffer(buffer.getvalue(), np.uint8)
    pack = {f"train_webp_{i}": sprite for i in range(5)} | {"test_webp": sprite}
    labels = {"y_train": np.arange(50_000) % 10, "y_test": np.arange(10_000) % 10}
    np.savez(path, **(pack | labels | change))


def test_cifar10_is_read_from_webp_sprites(tmp_path):
    pixels = np.zeros((3200, 3200, 3), np.uint8)
    pixels[32:64, 64:96] = arrays(1, (32, 32, 3))[0][0]  # row 1, column 2 of the tiles
    webp_pack(tmp_path / "cifar10_webp.npz", pixels)
    data = cifar10(tmp_path)
    assert data.train_images.shape == (50_000, 3, 32, 32)
    expected = pixels[32:64, 64:96].transpose(2, 0, 1)
    assert np.array_equal(data.train_images[10_102].numpy(), expected)
    assert int(data.test_images.sum()) == int(pixels.sum())


@pytest.mark.parametrize(
    ("size", "change", "words"),
    [
        (64, {}, "the sprite is"),
        (64, {"train_webp_0": np.zeros(99, np.uint8)}, "train_webp_0 is damaged"),
        (64, {"y_train": np.zeros(3)}, "the sprite is"),
    ],
)
def test_a_wrong_sprite_is_an_error_that_names_it(tmp_path, size, change, words):
    webp_pack(tmp_path / "cifar10_webp.npz", np.zeros((size, size, 3), np.uint8), **change)
    with pytest.raises(DataError, match=words):
        cifar10(tmp_path)


def test_without_pillow_the_sprites_say_what_to_install(tmp_path, monkeypatch):
    webp_pack(tmp_path / "cifar10_webp.npz", np.zeros((64, 64, 3), np.uint8))
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match=r"pip install 'curvlab\[data\]'"):
        cifar10(tmp_path)
