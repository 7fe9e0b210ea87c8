"""Get MNIST or CIFAR: ``python -m curvlab.tasks.download mnist --root FOLDER``.

A file is written under its name only when its digest is the published one: a broken connection or
a wrong file leaves nothing behind, and what was there before stays.
"""

import argparse
import hashlib
import http.client
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from curvlab.storage import StorageError, write_atomically
from curvlab.tasks.images import DataError
from curvlab.tasks.published import DOWNLOADS, Published, digest_of

BLOCK = 1 << 20
LIMIT = 1 << 30  # no file in the table is near this size: a server that never stops is cut off


def download(
    name: str, root: str | Path, *, mirror: str | None = None, timeout: float = 60.0
) -> list[Path]:
    """Fetch the files of one data set into ``root``; those already there and right are kept.

    Args:
        name: ``"mnist"``, ``"cifar10"`` or ``"cifar100"``.
        root: Folder; made if missing. The readers take it as their ``root=``.
        mirror: Address of a folder that serves the files, in place of the public ones.
        timeout: Seconds without an answer after which a server is given up.
    """
    if name not in DOWNLOADS:
        raise ValueError(f"name= must be one of {', '.join(DOWNLOADS)}; got {name!r}")
    root = Path(root).expanduser()
    return [fetch(file, root, mirror=mirror, timeout=timeout) for file in DOWNLOADS[name]]


def fetch(
    file: Published, folder: Path, *, mirror: str | None = None, timeout: float = 60.0
) -> Path:
    """Fetch one file of the table unless it is there already; returns its path."""
    target = folder / file.name
    algorithm = file.digests[0].partition(":")[0]
    if target.is_file() and digest_of(target, algorithm) in file.digests:
        return target
    urls = file.urls if mirror is None else (f"{mirror.rstrip('/')}/{file.name}",)
    problems = []
    for url in urls:
        try:
            write_atomically(target, _receiver(url, file, timeout))
        except DataError as error:
            problems.append(str(error))
        else:
            return target
    raise DataError(
        f"could not get {file.name}: {'; '.join(problems)}. Nothing was written; get it by hand, "
        f"put it into {folder}, and check that its digest is {' or '.join(file.digests)}"
    )


def _receiver(url: str, file: Published, timeout: float) -> Callable[[str], None]:
    """What streams ``url`` to a path and compares its digest with the table's."""
    if not url.startswith(("http://", "https://")):
        raise DataError(f"{url}: only http and https addresses are fetched")
    algorithm = file.digests[0].partition(":")[0]

    def receive(path: str) -> None:
        total, received = hashlib.new(algorithm), 0
        # Writing is outside `_blocks`, so that a full disk does not look like a network fault.
        with Path(path).open("wb") as out:
            for block in _blocks(url, timeout):
                received += len(block)
                if received > LIMIT:
                    raise DataError(f"{url} sends more than {LIMIT:,} bytes: not {file.name}")
                total.update(block)
                out.write(block)
        digest = f"{algorithm}:{total.hexdigest()}"
        if digest not in file.digests:
            raise DataError(
                f"{url} sent {received:,} bytes with digest {digest}, expected "
                f"{' or '.join(file.digests)}"
            )

    return receive


def _blocks(url: str, timeout: float) -> Iterator[bytes]:
    """The answer in pieces; every fault of the network is a :class:`DataError` naming ``url``."""
    try:
        request = Request(url, headers={"User-Agent": "curvlab"})
        with urlopen(request, timeout=timeout) as answer:
            expected = answer.headers.get("Content-Length")
            received = 0
            while block := answer.read(BLOCK):
                received += len(block)
                yield block
    except HTTPError as error:
        raise DataError(f"{url} answered {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise DataError(f"{url} could not be read: {error}") from error
    if expected is not None and received != int(expected):
        raise DataError(f"{url} broke off after {received:,} of {int(expected):,} bytes")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m curvlab.tasks.download", description=__doc__)
    parser.add_argument("name", choices=list(DOWNLOADS), nargs="+")
    parser.add_argument("--root", type=Path, required=True, help="folder to put the files into")
    parser.add_argument("--mirror", help="address of a folder that serves the files")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds (default: 60)")
    given = parser.parse_args(arguments)
    try:
        for name in given.name:
            for path in download(name, given.root, mirror=given.mirror, timeout=given.timeout):
                print(f"{path}: complete, digest as published")
    except (DataError, StorageError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
