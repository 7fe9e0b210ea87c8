"""CIFAR's python batches, in folders and archives: read, or refused by name."""

import io
import pickle
import tarfile

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from curvlab.tasks import DataError, cifar10, cifar100
from curvlab.tasks.readers import read_cifar_batch
from tests.made_up_data import CIFAR10_NAMES, Python2, arrays, cifar_files


def assert_cifar(data, truth):
    *train, test = truth
    expected = np.concatenate([images for images, _ in train]).reshape(-1, 3, 32, 32)
    assert np.array_equal(data.train_images.numpy(), expected)
    assert data.train_labels.tolist() == [int(x) for _, labels in train for x in labels]
    assert np.array_equal(data.test_images.numpy(), test[0].reshape(-1, 3, 32, 32))
    assert data.test_labels.tolist() == test[1].tolist()


def write_archive(path, folder, contents):
    with tarfile.open(path, "w:gz") as archive:
        for name, content in contents.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


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
