"""Readers of users' files: every standard form is read, nothing in a file is executed."""

import gzip
import io
import os
import pickle
import struct
import sys
import tarfile

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from curvlab.tasks import DataError, cifar10, cifar100, mnist
from curvlab.tasks.readers import read_cifar_batch, read_idx
from curvlab.tasks.readers.cifar import _GLOBALS

IDX_NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
CIFAR10_NAMES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")


def arrays(count=7, shape=(28, 28), classes=10, seed=0):
    draw = np.random.default_rng(seed)
    return (
        draw.integers(0, 256, (count, *shape), dtype=np.uint8),
        draw.integers(0, classes, count, dtype=np.int64),
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


class Python2:
    """Pickles as cPickle of Python 2 wrote them: byte strings, arrays through ``_reconstruct``."""

    def text(self, value: bytes) -> bytes:
        if len(value) < 256:
            return b"U" + bytes([len(value)]) + value + b"q\x01"  # everything is memoised
        return b"T" + struct.pack("<i", len(value)) + value + b"r\x00\x01\x00\x00"

    def integer(self, value: int) -> bytes:
        return b"K" + bytes([value])

    def items(self, values) -> bytes:
        return b"](" + b"".join(values) + b"e"

    def array(self, value) -> bytes:
        dtype = b"cnumpy\ndtype\n" + self.text(b"u1") + b"K\0K\1\x87R"
        dtype += b"(K\3" + self.text(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb"
        rows, columns = (b"M" + struct.pack("<H", size) for size in value.shape)
        made = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85" + self.text(b"b")
        return (
            made + b"\x87R(K\1" + rows + columns + b"\x86" + dtype + b"\x89"
            + self.text(value.tobytes()) + b"tb"
        )  # fmt: skip

    def batch(self, images, labels, key=b"labels", extra=()) -> bytes:
        pairs = [
            (b"batch_label", self.text(b"training batch 1 of 5")),
            (key, self.items(self.integer(int(label)) for label in labels)),
            *extra,
            (b"data", self.array(images)),
            (b"filenames", self.items(self.text(f"{i}.png".encode()) for i in range(len(labels)))),
        ]
        body = b"".join(self.text(name) + value for name, value in pairs)
        return b"\x80\x02}(" + body + b"u."


def cifar_files(names, key=b"labels", classes=10):
    contents, truth = {}, []
    for index, name in enumerate(names):
        images, labels = arrays(4, (3072,), classes, seed=index)
        coarse = [(b"coarse_labels", Python2().items([Python2().integer(0)] * 4))]
        extra = coarse if classes == 100 else []
        contents[name] = Python2().batch(images, labels, key, extra)
        truth.append((images, labels))
    return contents, truth


def assert_cifar(data, truth):
    *train, test = truth
    expected = np.concatenate([images for images, _ in train]).reshape(-1, 3, 32, 32)
    assert np.array_equal(data.train_images.numpy(), expected)
    assert data.train_labels.tolist() == [int(x) for _, labels in train for x in labels]
    assert np.array_equal(data.test_images.numpy(), test[0].reshape(-1, 3, 32, 32))
    assert data.test_labels.tolist() == test[1].tolist()


# MNIST


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
        (gzip.compress(b"abc")[:-4] + b"\0\0\0\1", "damaged"),
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


# .npz packs


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


# CIFAR's python batches


@pytest.mark.parametrize("place", ["cifar-10-batches-py", "."])
def test_cifar10_is_read_from_python_batches(tmp_path, place):
    contents, truth = cifar_files(CIFAR10_NAMES)
    (tmp_path / place).mkdir(exist_ok=True)
    for name, content in contents.items():
        (tmp_path / place / name).write_bytes(content)
    data = cifar10(tmp_path)
    assert_cifar(data, truth)
    assert data.classes[6] == "frog"
    with pytest.raises(DataError, match="not the published file: its digest is md5:"):
        cifar10(tmp_path, verify=True)


def test_cifar100_is_read_from_python_batches_with_fine_labels(tmp_path):
    contents, truth = cifar_files(("train", "test"), b"fine_labels", 100)
    (tmp_path / "cifar-100-python").mkdir()
    for name, content in contents.items():
        (tmp_path / "cifar-100-python" / name).write_bytes(content)
    assert_cifar(cifar100(tmp_path), truth)


def test_cifar_is_read_from_the_archive_in_place(tmp_path):
    contents, truth = cifar_files(CIFAR10_NAMES)
    write_archive(tmp_path / "cifar-10-python.tar.gz", "cifar-10-batches-py", contents)
    assert_cifar(cifar10(tmp_path), truth)
    assert [path.name for path in tmp_path.iterdir()] == ["cifar-10-python.tar.gz"]


def test_a_damaged_archive_is_an_error_that_names_it(tmp_path):
    contents, _ = cifar_files(CIFAR10_NAMES)
    path = tmp_path / "cifar-10-python.tar.gz"
    write_archive(path, "cifar-10-batches-py", contents)
    whole = path.read_bytes()
    for damaged in (
        whole[: len(whole) // 2],
        b"no archive",
        whole[:3000] + b"\0" * 99 + whole[3099:],
    ):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"cifar-10-python\.tar\.gz"):
            cifar10(tmp_path)
    del contents["test_batch"]
    write_archive(path, "cifar-10-batches-py", contents)
    with pytest.raises(DataError, match="lacks cifar-10-batches-py/test_batch"):
        cifar10(tmp_path)


def test_a_folder_that_lacks_batches_names_them(tmp_path):
    contents, _ = cifar_files(CIFAR10_NAMES)
    (tmp_path / "cifar-10-batches-py").mkdir()
    for name in CIFAR10_NAMES[:4]:
        (tmp_path / "cifar-10-batches-py" / name).write_bytes(contents[name])
    with pytest.raises(DataError, match="lacks data_batch_5, test_batch"):
        cifar10(tmp_path)


def test_a_batch_pickled_by_python_3_is_read_too():
    images, labels = arrays(3, (3072,))
    for shaped in (images, np.asfortranarray(images)):
        content = pickle.dumps({"data": shaped, "labels": labels.tolist()}, protocol=2)
        read, targets = read_cifar_batch(content, "batch")
        assert np.array_equal(read.numpy().reshape(3, 3072), images)
        assert targets.tolist() == labels.tolist()


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"labels": [1]}, "has no 'data'"),
        ({"data": np.zeros((1, 3072), np.uint8)}, "has no 'labels'"),
        ({"data": np.zeros((1, 3071), np.uint8), "labels": [1]}, r"shape \(N, 3072\)"),
        ({"data": np.zeros((1, 3072), np.float32), "labels": [1]}, "CIFAR batches hold bytes"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [1]}, "2 images but 1 labels"),
        ({"data": np.zeros((1, 3072), np.uint8), "labels": [10]}, r"must lie in 0\.\.9"),
        (
            {"data": np.zeros((1, 3072), np.uint8), "labels": [[1], [1, 2]]},
            "must be a list of integers",
        ),
        ({"data": "text", "labels": [1]}, "uint8 of shape"),
        ([1, 2], "holds a list"),
    ],
)
def test_a_pickle_that_is_no_batch_is_an_error_that_names_it(batch, words):
    with pytest.raises(DataError, match=words) as caught:
        read_cifar_batch(pickle.dumps(batch, protocol=2), "some/batch")
    assert "some/batch" in str(caught.value)


def mark(path):
    """What a malicious pickle would call: leaves a file behind."""
    path = path.decode() if isinstance(path, bytes) else path
    open(path, "w").close()  # noqa: PTH123


class Payload:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def payloads(target):
    command = f"touch {target}"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        yield pickle.dumps(Payload(os.system, command), protocol)
        yield pickle.dumps({"data": Payload(eval, f"open({str(target)!r}, 'w')")}, protocol)
    name = Python2().text(str(target).encode())
    yield b"cposix\nsystem\n" + Python2().text(command.encode()) + b"\x85R."
    yield b"(" + Python2().text(command.encode()) + b"iposix\nsystem\n."  # INST
    yield b"(cposix\nsystem\n" + Python2().text(command.encode()) + b"o."  # OBJ
    yield (
        b"\x80\x04\x8c\x05posix\x8c\x06system\x93"
        + b"\x8c"
        + bytes([len(command)])
        + (command.encode() + b"\x85R.")
    )  # STACK_GLOBAL
    yield b"cbuiltins\ngetattr\ncnumpy\ndtype\n" + name + b"\x86R."
    yield b"\x80\x04\x8c\x05numpy\x8c\x0ef2py.os.system\x93."  # a dotted path
    # allowed names, used to reach something else: attributes, state, instantiation
    yield b"cnumpy.core.multiarray\n_reconstruct\n}" + name + b"K\1s" + b"b."
    yield b"cnumpy\nndarray\n(N}U\x05_makecposix\nsystem\nstb."
    yield b"cnumpy\ndtype\n)\x81."
    yield b"c_codecs\nencode\n" + name + b"U\x03hex\x86R."


def test_a_malicious_batch_executes_nothing(tmp_path):
    target = tmp_path / "executed"
    attempts = list(payloads(target))
    assert len(attempts) > 15
    for content in attempts:
        before = dict(_GLOBALS)
        with pytest.raises(DataError):
            read_cifar_batch(content, "batch")
        assert not target.exists()
        assert before == _GLOBALS


def test_the_payloads_are_real_for_the_ordinary_unpickler(tmp_path):
    target = tmp_path / "executed"
    ran = 0
    for content in list(payloads(target))[: 2 * (pickle.HIGHEST_PROTOCOL + 1) + 3]:
        pickle.loads(content, encoding="bytes")
        ran += target.exists()
        target.unlink(missing_ok=True)
    assert ran == 2 * (pickle.HIGHEST_PROTOCOL + 1) + 3


def test_a_malicious_file_in_the_folder_is_refused_by_name(tmp_path):
    contents, _ = cifar_files(CIFAR10_NAMES)
    contents["data_batch_3"] = pickle.dumps(Payload(mark, str(tmp_path / "executed")), 2)
    (tmp_path / "cifar-10-batches-py").mkdir()
    for name, content in contents.items():
        (tmp_path / "cifar-10-batches-py" / name).write_bytes(content)
    with pytest.raises(DataError, match=r"data_batch_3 is not a readable .*mark.*malicious"):
        cifar10(tmp_path)
    assert not (tmp_path / "executed").exists()


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**31), st.integers(0, 255), st.booleans())
def test_a_damaged_batch_is_read_or_refused_but_never_fails_otherwise(place, value, cut):
    images, labels = arrays(1, (3072,))
    content = bytearray(Python2().batch(images, labels))
    # the structure is at both ends; the pixels in between are as good as any others
    ends = [*range(200), *range(len(content) - 60, len(content))]
    where = ends[place % len(ends)]
    content = content[:where] if cut else content[:where] + bytes([value]) + content[where + 1 :]
    try:
        read, targets = read_cifar_batch(bytes(content), "batch")
    except DataError:
        return
    assert read.shape[1:] == (3, 32, 32)
    assert len(read) == len(targets)


def write_archive(path, folder, contents):
    with tarfile.open(path, "w:gz") as archive:
        for name, content in contents.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


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
