"""Result files: what a command writes into one, and which ones it may replace.

A file is replaced silently only by the same result: the same kind, the same request, the same model
and data. Anything else may be the only copy of hours of work and takes ``--overwrite``. Pictures
are always replaced: they can be drawn again.
"""

from argparse import Namespace
from pathlib import Path
from typing import Any

from curvlab.cli.parser import UsageError
from curvlab.eigen.identity import MEASURED, shown
from curvlab.operators import Curvature
from curvlab.storage import StorageError, read_manifest

# Options that do not change a result, or that the digests of model and data already cover.
_NO_PART = {
    "arguments", "budget", "checkpoint", "data", "device", "json", "log", "model", "out",
    "overwrite", "picture", "progress", "quiet", "samples", "verbose",
}  # fmt: skip
_TOLD = ("request", "arguments", "cwd")  # how it was requested, not what it is a result of


def provenance(options: Namespace, curvature: Curvature | None = None) -> dict[str, Any]:
    """What a result file says of where it came from, for ``rerun`` and :func:`require_free`."""
    return {
        **({} if curvature is None else curvature.about()),
        "request": {n: fact for n, fact in vars(options).items() if n not in _NO_PART},
        "arguments": options.arguments,
        "cwd": str(Path.cwd()),
    }


def require_free(
    options: Namespace, path: Path, kind: str, curvature: Curvature | None = None
) -> None:
    """Raise unless ``path`` is absent, holds what is about to be written, or may be overwritten.

    Args:
        kind: The kind of the file that is to be written.
        curvature: What it will be of; ``None`` if only the request is to be the same.
    """
    if options.overwrite or not path.exists():
        return
    try:
        found = read_manifest(path)
    except (StorageError, OSError) as error:
        raise _occupied(path, f"is not a result of curvlab ({error})") from error
    if found["kind"] != kind:
        raise _occupied(path, f"holds {found['kind']!r}, not {kind!r}")
    old = found["about"] if isinstance(found.get("about"), dict) else {}
    new = provenance(options, curvature)
    request = old["request"] if isinstance(old.get("request"), dict) else {"verb": None}
    differing = []
    if curvature is not None:
        named = [name for name in new if name not in (*_TOLD, *MEASURED)]
        differing = _differences(*({n: about.get(n) for n in named} for about in (old, new)))
    differing += _differences(request, new["request"])
    if differing:
        raise _occupied(path, f"holds another result: {'; '.join(differing)}")


def _differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    names = [*old, *(name for name in new if name not in old)]
    if old.get("verb") != new.get("verb"):  # then every option differs
        names = ["verb"]
    return [
        f"{name} was {shown(old.get(name))} and is {shown(new.get(name))}"
        for name in names
        if old.get(name) != new.get(name)
    ]


def _occupied(path: Path, why: str) -> UsageError:
    return UsageError(f"--out: {path} {why}. Name another file, or replace it with --overwrite")
