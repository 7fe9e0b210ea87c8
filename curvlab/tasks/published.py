"""Names, digests and addresses of the public files.

One table, used by the readers' error messages, by ``verify=True`` and by the download. Digests are
those of the files as published; a file someone repacked has another digest and still reads.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from curvlab.tasks.images import DataError


@dataclass(frozen=True, slots=True)
class Published:
    """One file: digests as ``"algorithm:hex"`` (any of them is right), and where it is served."""

    name: str
    digests: tuple[str, ...]
    urls: tuple[str, ...] = ()


def _mnist(name: str, sha256: str) -> Published:
    mirrors = (
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
    )
    return Published(name, (f"sha256:{sha256}",), tuple(mirror + name for mirror in mirrors))


def _cifar(name: str, sha256: str) -> Published:
    return Published(name, (f"sha256:{sha256}",), (f"https://www.cs.toronto.edu/~kriz/{name}",))


# What `download` fetches, by data set.
DOWNLOADS: dict[str, tuple[Published, ...]] = {
    "mnist": (
        _mnist(
            "train-images-idx3-ubyte.gz",
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        ),
        _mnist(
            "train-labels-idx1-ubyte.gz",
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        ),
        _mnist(
            "t10k-images-idx3-ubyte.gz",
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        ),
        _mnist(
            "t10k-labels-idx1-ubyte.gz",
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        ),
    ),
    "cifar10": (
        _cifar(
            "cifar-10-python.tar.gz",
            "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
        ),
    ),
    "cifar100": (
        _cifar(
            "cifar-100-python.tar.gz",
            "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
        ),
    ),
}

# Other forms the readers take. CIFAR's authors published MD5 digests of the unpacked batches.
_OTHERS = (
    Published(
        "mnist.npz",
        (
            "sha256:094b831e432331f1f6d6829ab9bfff4551410a81e1f816c9cce482d3e9b3ba57",
            "sha256:731c5ac602752760c8e48fbffcf8c3b850d9dc2a2aedcf2cc48468fc17b673d1",  # Keras's
        ),
    ),
    Published(
        "cifar10_webp.npz",
        ("sha256:41f3fd2e49b9de6e75aab3df9b8831b79b9423c3b31a256ef0bb9a99c51fbffe",),
    ),
    Published("data_batch_1", ("md5:c99cafc152244af753f735de768cd75f",)),
    Published("data_batch_2", ("md5:d4bba439e000b95fd0a9bffe97cbabec",)),
    Published("data_batch_3", ("md5:54ebc095f3ab1f0389bbae665268c751",)),
    Published("data_batch_4", ("md5:634d18415352ddfa80567beed471001a",)),
    Published("data_batch_5", ("md5:482c414d41f54cd18b22e5b47cb7c3cb",)),
    Published("test_batch", ("md5:40351d587109b95175f43aff81a1287e",)),
    Published("train", ("md5:16019d7e3df5f24257cddd939b257f8d",)),
    Published("test", ("md5:f0ef6b0ae62326f3e7ffdfab6717acfc",)),
)

FILES: dict[str, Published] = {
    file.name: file for file in (*(f for files in DOWNLOADS.values() for f in files), *_OTHERS)
}


def verify_file(path: Path) -> None:
    """Raise :class:`DataError` unless ``path`` has a digest published for a file of its name."""
    if path.name not in FILES:
        raise DataError(
            f"{path}: no digest is published for a file called {path.name}, so verify=True cannot "
            f"check it; known are {', '.join(FILES)}"
        )
    expected = FILES[path.name].digests
    found = [digest_of(path, digest.partition(":")[0]) for digest in expected]
    if not set(found) & set(expected):
        raise DataError(
            f"{path} is not the published file: its digest is {found[0]}, expected "
            f"{' or '.join(expected)}. Get it again, or read it without verify=True"
        )


def digest_of(path: Path, algorithm: str) -> str:
    """``"algorithm:hex"`` of a file's bytes."""
    with path.open("rb") as file:
        return f"{algorithm}:{hashlib.file_digest(file, algorithm).hexdigest()}"
