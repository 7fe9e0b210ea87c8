"""Damaged and hostile data files: a clean error that names the file, or the right data; never more.

Mutants are drawn with a seed: bits flipped, pieces cut out, sizes replaced by extreme ones.
"""

import gzip
import io
import random
import struct
import tarfile
import tracemalloc
import zipfile

import numpy as np
import pytest

from curvlab.tasks import DataError, cifar10, mnist
from curvlab.tasks.readers import read_idx
from tests.made_up_data import CIFAR10_NAMES, arrays, cifar_files

MUTANTS = 150
EXTREMES = [0, 1, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1]


def idx(folder):
    names = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte",
             "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")  # fmt: skip
    for name, array in zip(names, (*arrays(7), *arrays(3, seed=1)), strict=True):
        head = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
        (folder / name).write_bytes(head + array.astype(np.uint8).tobytes())
    return folder / names[0]


def zipped_idx(folder):
    first = idx(folder)
    for path in list(folder.iterdir()):
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    return first.with_name(first.name + ".gz")


def pack(folder, compressed=True):
    train, test = arrays(7), arrays(3, seed=1)
    save = np.savez_compressed if compressed else np.savez
    save(folder / "mnist.npz", x_train=train[0], y_train=train[1], x_test=test[0], y_test=test[1])
    return folder / "mnist.npz"


def plain_pack(folder):
    return pack(folder, compressed=False)


def batches(folder):
    contents, _ = cifar_files(CIFAR10_NAMES)
    place = folder / "cifar-10-batches-py"
    place.mkdir()
    for name, content in contents.items():
        (place / name).write_bytes(content)
    return place / "data_batch_1"


def archive(folder):
    contents, _ = cifar_files(CIFAR10_NAMES)
    path = folder / "cifar-10-python.tar.gz"
    with tarfile.open(path, "w:gz") as files:
        for name, content in contents.items():
            info = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            info.size = len(content)
            files.addfile(info, io.BytesIO(content))
    return path


FORMS = {
    "idx": (idx, mnist),
    "idx.gz": (zipped_idx, mnist),
    "npz": (pack, mnist),
    "npz, stored": (plain_pack, mnist),
    "batches": (batches, cifar10),
    "tar.gz": (archive, cifar10),
}


def mutant(content, draw):
    """Other bytes, made from ``content`` in one of five ways."""
    content = bytearray(content)
    how = draw.randrange(5)
    # headers are where sizes are: every second change is in the first or last few hundred bytes
    edge = min(300, len(content))
    places = [draw.randrange(len(content)), draw.randrange(edge), -1 - draw.randrange(edge)]
    at = places[draw.randrange(3)] % len(content)
    if how == 0:
        content[at] ^= 1 << draw.randrange(8)
    elif how == 1:
        content[at] = draw.randrange(256)
    elif how == 2:
        del content[at : at + draw.randrange(1, 64)]
    elif how == 3:
        value = draw.choice(EXTREMES)
        order, size = draw.choice(["little", "big"]), draw.choice([2, 4, 8])
        content[at : at + size] = (value % 256**size).to_bytes(size, order)
    else:
        del content[at:]
    return bytes(content)


def same(first, second):
    parts = ("train_images", "train_labels", "test_images", "test_labels")
    return all(getattr(first, part).equal(getattr(second, part)) for part in parts)


@pytest.mark.parametrize("form", FORMS)
def test_a_mutant_is_refused_by_name_or_reads_as_images_and_labels(form, tmp_path):
    make, read = FORMS[form]
    path = make(tmp_path)
    whole, content = read(tmp_path), path.read_bytes()
    draw = random.Random(form)
    refused = unchanged = 0
    said = []
    for _ in range(MUTANTS):
        path.write_bytes(mutant(content, draw))
        try:
            found = read(tmp_path)
        except DataError as error:
            refused += 1
            said.append(str(error))
            continue
        unchanged += same(found, whole)
        # formats without a checksum cannot tell another pixel or label from the right one
        assert found.train_images.shape[1:] == whole.train_images.shape[1:]
        assert 0 <= int(found.train_labels.min()) <= int(found.train_labels.max()) < 10
    assert refused > MUTANTS / 10
    assert all(path.name in message or "lacks" in message for message in said)
    if form in ("idx.gz", "npz", "tar.gz"):  # these have one
        assert refused + unchanged == MUTANTS


def limited(call, megabytes):
    """Run ``call``; fail if Python's own allocations pass ``megabytes``."""
    tracemalloc.start()
    try:
        call()
    finally:
        peak = tracemalloc.get_traced_memory()[1] / 1e6
        tracemalloc.stop()
    assert peak < megabytes, f"{peak:.0f} MB"


@pytest.mark.parametrize("shape", [(2**32 - 1,) * 3, (2**31, 28, 28), (60_001, 28, 28)])
@pytest.mark.parametrize("zipped", [True, False])
def test_an_idx_header_that_announces_more_than_mnist_allocates_nothing(shape, zipped, tmp_path):
    content = struct.pack(">BBBB3I", 0, 0, 8, 3, *shape) + bytes(100)
    path = tmp_path / "images"
    path.write_bytes(gzip.compress(content) if zipped else content)

    def read():
        with pytest.raises(DataError, match="images announces an array"):
            read_idx(path)

    limited(read, 1.0)


def zeros(count):
    """Gzip of ``count`` zeros, made in pieces."""
    target = io.BytesIO()
    with gzip.GzipFile(fileobj=target, mode="wb", compresslevel=1) as file:
        for _ in range(count >> 20):
            file.write(bytes(1 << 20))
    return target.getvalue()


def test_a_gzip_bomb_is_read_no_further_than_its_header_says(tmp_path):
    head = struct.pack(">BBBB3I", 0, 0, 8, 3, 10, 28, 28)
    path = tmp_path / "images"
    path.write_bytes(gzip.compress(head) + zeros(1 << 28))  # members of a gzip file follow on

    def read():
        with pytest.raises(DataError, match="longer than its header"):
            read_idx(path)

    limited(read, 2.0)


def test_an_npz_bomb_is_unpacked_no_further_than_the_published_size(tmp_path):
    pack(tmp_path)
    bomb = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        bomb, {"descr": "|u1", "fortran_order": False, "shape": (1 << 19, 28, 28)}
    )
    path = tmp_path / "mnist.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        for name in ("y_train", "x_test", "y_test"):
            file.writestr(f"{name}.npy", b"")
        with file.open("x_train.npy", "w") as member:
            member.write(bomb.getvalue())
            for _ in range(400):
                member.write(bytes(1 << 20))

    def read():
        with pytest.raises(DataError, match=r"mnist\.npz .*x_train unpacks to more than 47"):
            mnist(tmp_path)

    limited(read, 150.0)  # the 47 MB that it may have, twice while they are joined


def test_a_tar_bomb_ends_where_the_published_archives_are_long_over(tmp_path):
    path = tmp_path / "cifar-10-python.tar.gz"
    info = tarfile.TarInfo("junk")
    info.size = 400 << 20
    path.write_bytes(gzip.compress(info.tobuf()) + zeros(400 << 20))

    def read():
        with pytest.raises(DataError, match=r"python\.tar\.gz is damaged: it unpacks to more than"):
            cifar10(tmp_path)

    limited(read, 20.0)


def test_a_member_of_an_npz_that_needs_a_password_or_another_method_is_refused(tmp_path):
    path = pack(tmp_path)
    content = bytearray(path.read_bytes())
    central = content.index(b"PK\x01\x02")
    for offset, value in ((8, 1), (10, 99)):  # flags: encrypted; method: unknown
        changed = bytearray(content)
        changed[central + offset] = value
        path.write_bytes(bytes(changed))
        with pytest.raises(DataError, match=r"mnist\.npz is damaged"):
            mnist(tmp_path)


def test_missing_files_are_also_file_not_found_errors(tmp_path):
    for read in (lambda: read_idx(tmp_path / "none"), lambda: mnist(tmp_path), lambda: mnist("no")):
        with pytest.raises(FileNotFoundError) as caught:
            read()
        assert isinstance(caught.value, DataError)
