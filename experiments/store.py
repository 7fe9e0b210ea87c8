"""Results as JSON lines, addressed by what produced them.

One folder holds ``results.jsonl`` (a line per label, configuration and seed), ``runs/`` (trained
runs that several labels share) and ``locks/``. A result's key is a digest of everything that can
change it: the label, its configuration, the seed and the version numbers of the code that computes
it. Asking for a key that is there costs nothing, so an interrupted sweep goes on where it stopped.

Processes on one folder are safe with each other: a line is appended whole under a lock, and a key
is computed under its own lock, so that a second process waits and then finds the result.
"""

import fcntl
import hashlib
import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from curvlab.storage import versions

COMMITTED = Path(__file__).parent / "results"  # the results folder that the repository keeps


class StoreError(ValueError):
    """A results file holds a line that is not a result."""


@dataclass(frozen=True, slots=True)
class Result:
    """One line: what was computed, from what, where and how many processor seconds it took."""

    key: str
    label: str
    size: str
    seed: int
    config: dict[str, Any]
    metrics: dict[str, Any]
    seconds: float
    commit: str
    versions: dict[str, str]
    command: str


@dataclass(frozen=True, slots=True)
class Store:
    """The results folder; see the module's header."""

    folder: Path

    @property
    def file(self) -> Path:
        return self.folder / "results.jsonl"

    def results(self) -> list[Result]:
        """Every result, oldest first; a damaged line is an error that names it."""
        if not self.file.exists():
            return []
        found = []
        # bytes: what a disk or an editor damaged need not be text
        for number, line in enumerate(self.file.read_bytes().split(b"\n"), start=1):
            if line.strip():
                found.append(_parse(line, f"{self.file}, line {number}"))
        return found

    def append(self, results: Sequence[Result]) -> None:
        """Add lines, each whole; a crash leaves at most one unfinished line at the end."""
        text = "".join(json.dumps(asdict(result), sort_keys=True) + "\n" for result in results)
        self.folder.mkdir(parents=True, exist_ok=True)
        # without a buffer: what a full disk did not take must not be tried again on closing
        with self.locked("append"), self.file.open("a+b", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            content = text.encode()
            if end > 0:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # a writer died inside its line: do not join ours to it
                    content = b"\n" + content
            try:
                while content:
                    content = content[file.write(content) or 0 :]
                os.fsync(file.fileno())
            except OSError as error:
                os.ftruncate(file.fileno(), end)
                raise StoreError(
                    f"{self.file} could not be written: {error}. It is as it was before"
                ) from error

    def merge(self, other: "Store") -> int:
        """Add the results of another folder that are not here yet; returns how many."""
        known = {result.key for result in self.results()}
        new = [result for result in other.results() if result.key not in known]
        if new:
            self.append(new)
        return len(new)

    def repair(self) -> int:
        """Move damaged lines to ``results.jsonl.rejected``; returns how many there were."""
        if not self.file.exists():
            return 0
        with self.locked("append"):
            content = self.file.read_bytes()
            whole = content.rfind(b"\n") + 1
            if whole < len(content) and not _readable(content[whole:]):
                os.truncate(self.file, whole)  # half a line: needs no room on the disk
                return 1 + self._reject()
            return self._reject()

    def _reject(self) -> int:
        good, bad = list[bytes](), list[bytes]()
        for line in self.file.read_bytes().split(b"\n"):
            try:
                if line.strip():
                    _parse(line, "")
                    good.append(line)
            except StoreError:
                bad.append(line)
        if bad:
            with Path(f"{self.file}.rejected").open("ab") as rejected:
                rejected.writelines(line + b"\n" for line in bad)
                rejected.flush()
                os.fsync(rejected.fileno())
            beside = Path(f"{self.file}.repaired")
            beside.write_bytes(b"".join(line + b"\n" for line in good))
            beside.replace(self.file)
        return len(bad)

    @contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Hold the lock ``name``; it is released even when the process is killed."""
        locks = self.folder / "locks"
        locks.mkdir(parents=True, exist_ok=True)
        with (locks / f"{name}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def key_of(label: str, config: object, seed: int, version: str) -> str:
    """A digest of all that decides a result; equal on every machine."""
    facts = {"label": label, "config": plain(config), "seed": seed, "version": version}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]


def plain(config: object) -> dict[str, Any]:
    """A configuration as JSON: the fields of a frozen dataclass, with tuples as lists.

    What is ``None`` is left out: a new option that is ``None`` by default leaves old results valid.
    """
    if not is_dataclass(config) or isinstance(config, type):
        raise TypeError(f"a configuration is a dataclass instance; got {type(config).__name__}")
    value: dict[str, Any] = json.loads(json.dumps(asdict(config, dict_factory=_set_ones)))
    return value


def _set_ones(fields: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in fields if value is not None}


def make_result(
    label: str, size: str, seed: int, config: object, metrics: Mapping[str, Any],
    seconds: float, version: str, command: str,
) -> Result:  # fmt: skip
    """A :class:`Result` of this checkout, now."""
    return Result(
        key_of(label, config, seed, version), label, size, seed, plain(config), dict(metrics),
        round(seconds, 2), commit(), {**versions(), "code": version,
        "date": time.strftime("%Y-%m-%d")}, command,
    )  # fmt: skip


@cache
def commit() -> str:
    """The checkout's commit, with ``+`` when the work tree differs; ``unknown`` outside git."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    head = git("rev-parse", "--short", "HEAD")
    return (head + ("+" if git("status", "--porcelain") else "")) if head else "unknown"


KINDS: dict[str, type | tuple[type, ...]] = {
    "key": str, "label": str, "size": str, "seed": int, "config": dict, "metrics": dict,
    "seconds": (int, float), "commit": str, "versions": dict, "command": str,
}  # fmt: skip


def _readable(line: bytes) -> bool:
    try:
        _parse(line, "")
    except StoreError:
        return False
    return True


def _parse(line: bytes, where: str) -> Result:
    try:
        result = Result(**json.loads(line))
        for name, kind in KINDS.items():
            if not isinstance(getattr(result, name), kind):
                raise TypeError(f"its {name} is {getattr(result, name)!r}")
        return result
    except (ValueError, TypeError, RecursionError) as error:  # ValueError: no JSON, no UTF-8
        raise StoreError(
            f"{where} is not a result ({error}). `python -m experiments repair` moves such lines "
            "to a file beside it and keeps the others"
        ) from error
