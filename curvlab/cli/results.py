"""``compare``, ``plot`` and ``rerun``: what can be done with saved files."""

import math
import shlex
from argparse import Namespace
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from curvlab.basis import Basis
from curvlab.cli.output import emit, say
from curvlab.cli.parser import UsageError, parse
from curvlab.cli.target import require_free
from curvlab.eigen import Density, Eigenpairs
from curvlab.storage import StorageError, read_manifest
from curvlab.training import Run

LOADERS: dict[str, Callable[[str], Any]] = {
    "eigenpairs": Eigenpairs.load,
    "basis": Basis.load,
    "density": Density.load,
    "run": Run.load,
}


def load(name: str, *kinds: str) -> Any:
    """A saved result of one of ``kinds``; the file's checksum is verified."""
    try:
        kind = read_manifest(name)["kind"]
        if kind in kinds:
            return LOADERS[kind](name)
    except StorageError as error:
        raise UsageError(str(error)) from error
    raise UsageError(f"{name} holds a {kind}; this needs {' or '.join(kinds)}")


def compare(options: Namespace) -> int:
    """Principal angles between two spans, and vector by vector."""
    from curvlab.plots import overlap, squared_cosines, write

    first, second = (load(n, "basis", "eigenpairs") for n in (options.first, options.second))
    try:
        matrix = squared_cosines(first, second)
    except ValueError as error:
        raise UsageError(f"{options.first} and {options.second}: {error}") from error
    angles = _basis(first).principal_angles(_basis(second))
    smaller = min(matrix.shape)
    shared = float(angles.cos().square().sum()) / smaller
    names = [Path(options.first).stem, Path(options.second).stem]
    pictures = write(overlap(matrix, *names), *options.picture) if options.picture else []
    degrees = [math.degrees(angle) for angle in angles.tolist()]
    lines = [
        f"overlap of the spans  {shared:.6f} (1: the smaller lies in the larger)",
        f"rows                  {matrix.shape[0]} and {matrix.shape[1]}",
        f"principal angles      {', '.join(f'{angle:.4g}' for angle in degrees[:10])}"
        f"{', ...' if len(degrees) > 10 else ''} degrees",
        *(f"picture               {path}" for path in pictures),
    ]
    facts = {
        "overlap": shared,
        "rows": list(matrix.shape),
        "angles": degrees,
        "cosines": matrix.tolist(),
        "pictures": [str(path) for path in pictures],
    }
    emit(options, facts, "\n".join(lines))
    return 0


def plot(options: Namespace) -> int:
    """One picture of one or several files of the same kind."""
    from curvlab import plots

    found = [load(name, "eigenpairs", "density", "run") for name in options.files]
    kinds = {type(thing) for thing in found}
    if len(kinds) > 1:
        kinds_found = ", ".join(type(thing).__name__ for thing in found)
        raise UsageError(f"plot takes files of one kind at a time; got {kinds_found}")
    labels = [Path(name).stem for name in options.files]
    if isinstance(found[0], Eigenpairs):
        figure = plots.scree(found, labels if len(found) > 1 else ())
    elif isinstance(found[0], Run):
        figure = plots.forgetting(found)
    elif len(found) == 1:
        figure = plots.density(found[0])
    else:
        raise UsageError("plot takes one density at a time")
    written = [str(path) for path in plots.write(figure, *options.picture)]
    emit(options, {"pictures": written}, "\n".join(written))
    return 0


def rerun(options: Namespace) -> int:
    """Run the command that made a file again, beside it, and compare."""
    from curvlab.cli.verbs import VERBS

    old = load(options.file, "eigenpairs", "density", "run")
    manifest = read_manifest(options.file)
    again = _command(options.file, manifest)
    path = Path(options.file)
    if isinstance(old, Run):
        new = path.parent / "rerun" / path.name
        again.out = str(new.parent)
    else:
        new = path.with_name(f"{path.stem}.rerun.safetensors")
        again.out = str(new)
    shown = shlex.join(["curvlab", *again.arguments])
    say(options, f"the file says that it was made by: {shown}", True)
    named = {option: getattr(again, option, None) or "" for option in _PLACES}
    # names in torch are not code
    foreign = [f"--{o} {given}" for o, given in named.items() if ":" in given and given not in _OWN]
    if foreign and not options.yes:
        raise UsageError(
            f"running that again calls {', '.join(foreign)}, code that the file names and that is "
            "not one of curvlab's own networks, data or losses. If you trust it, add --yes"
        )
    again.picture, again.quiet, again.json, again.progress = [], True, True, False
    # The file of an earlier rerun is replaced, whatever its model: reruns are for showing changes.
    again.overwrite = options.overwrite
    require_free(again, new, manifest["kind"])
    again.overwrite = True
    before = new.stat().st_ino if new.exists() else None
    with redirect_stdout(StringIO()):  # the result here is the comparison
        code = VERBS[again.verb].load()(again)
    if not new.exists() or new.stat().st_ino == before:  # a file that is written is a new one
        say(options, "it did not finish", True)
        return max(code, 1)
    fresh = load(str(new), manifest["kind"])
    changed = _changed(manifest["about"], read_manifest(new)["about"])
    difference = _difference(old, fresh)
    same = difference <= _allowed(old)
    facts = {"file": str(new), "difference": difference, "same": same, "changed": changed}
    lines = [
        f"largest difference  {difference:.3g} ({'the same' if same else 'not the same'})",
        *(f"changed             {line}" for line in changed),
        f"file                {new}",
    ]
    emit(options, facts, "\n".join(lines))
    return 0 if same else 1


def _command(name: str, manifest: dict[str, Any]) -> Namespace:
    """The options of the command that made a file; only verbs that make such files are taken."""
    about = manifest.get("about", {})
    given = about.get("arguments") if isinstance(about, dict) else None
    if not given:
        raise UsageError(
            f"{name} was written from Python, so there is no curvlab command to run again; "
            f"it came from: {manifest.get('command', 'an unknown command')}"
        )
    if not isinstance(given, list) or not all(isinstance(word, str) for word in given):
        raise UsageError(f"{name} does not say by which command it was made: {given!r}")
    if given[0] not in ("eig", "density", "demo"):
        raise UsageError(
            f"{name} says that it was made by curvlab {given[0]}, which makes no files"
        )
    try:
        return parse(given)
    except SystemExit as end:
        raise UsageError(f"{name} holds a command that this curvlab does not know") from end


_PLACES = ("model", "data", "loss", "count")
# What a file may have run without asking: these functions, not all that can be reached from theirs.
_OWN = {
    *(f"curvlab.nets:{n}" for n in ("gpt", "kwinners_mlp", "mlp", "slim_resnet18", "vit_cifar")),
    *(f"curvlab.cli.demo:{name}" for name in ("digits", "network")),
    *(f"curvlab.losses:{name}" for name in ("next_token", "sequence")),
}


def _changed(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    names = {"parameters": "the parameters", "data": "the data", "engine": "the engine"}
    return [
        f"{words}: {old.get(name)} -> {new.get(name)}"
        for name, words in names.items()
        if old.get(name) != new.get(name)
    ]


def _difference(old: Any, new: Any) -> float:
    """Largest difference of what the result is about, absolute."""

    def of(result: Any) -> Tensor:
        if isinstance(result, Eigenpairs):
            return result.values.cpu()
        if isinstance(result, Density):
            return result.nodes
        return torch.tensor([]) if not isinstance(result, Run) else result.test_loss.nan_to_num()

    first, second = of(old), of(new)
    if first.shape != second.shape:
        return math.inf
    return float((first - second).abs().max()) if first.numel() else 0.0


def _allowed(old: Any) -> float:
    """What two correct computations may differ by."""
    if isinstance(old, Eigenpairs):
        return 2.0 * float(old.residuals.max()) + old.floor
    if isinstance(old, Density):
        return 1e-3 * float(old.nodes.abs().max())
    return 1e-4


def _basis(thing: Basis | Eigenpairs) -> Basis:
    if isinstance(thing, Basis):
        return thing
    wide = torch.float64 if thing.vectors.dtype == torch.float64 else torch.float32
    basis = Basis(thing.n, max(1, len(thing)), dtype=wide)
    basis.extend(thing.vectors.to(wide).cpu())
    return basis
