"""A solve's state in a file: killed at any point and resumed, it ends with the same bits.

The file is written beside its place and renamed (:mod:`curvlab.storage`), and the one it replaces
is kept as ``<name>.previous``: a full disk leaves both as they were, and if the file is damaged
later the error says that the previous one is there. What the solve was asked for is stored too, so
that a file is not resumed with other options. The operator itself cannot be stored; the first
product after resuming is checked against the coefficients that were saved, as every product is.
"""

import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from curvlab.eigen.hidden import Chain
from curvlab.eigen.result import certificate_facts, certificate_from
from curvlab.eigen.selection import Edge
from curvlab.eigen.solver import Solver
from curvlab.probe import Certificate
from curvlab.storage import StorageError, load_tensors, save_tensors, write_atomically

KIND = "lanczos checkpoint"
_NUMBERS = (
    "multiplied",
    "frontier",
    "restarts",
    "norm",
    "chained",
    "asymmetry_squares",
    "asymmetry_count",
    "lost",
)


def previous(path: str | Path) -> Path:
    """Where the checkpoint before the last one is kept."""
    path = Path(path)
    return path.with_name(path.name + ".previous")


def write_checkpoint(
    path: str | Path,
    solver: Solver,
    *,
    asked: dict[str, Any],
    certificate: Certificate | None,
    seconds: float,
) -> None:
    """Save the state between two steps.

    Args:
        asked: What identifies the solve; compared on resuming.
        seconds: Time spent so far.
    """
    path = Path(path)
    krylov = solver.krylov
    krylov.settle()
    size = krylov.size
    tensors = {
        "rows": krylov.rows[:size, : krylov.n],
        "coupling": krylov.coupling[:size, : krylov.multiplied],
        "aside": krylov.aside[:, : krylov.n],
        "aside coupling": krylov.aside_coupling,
    }
    facts = {
        "asked": asked,
        "krylov": {name: getattr(krylov, name) for name in _NUMBERS},
        "products": solver.products.count,
        "draws": solver.draws,
        "queued": solver.queued,
        "finds": solver.finds,
        "doubt": solver.doubt,
        "converged_at": solver.converged_at,
        "exhausted": solver.exhausted,
        "chain": None if solver.chain is None else asdict(solver.chain),
        "certificate": certificate_facts(certificate),
        "seconds": seconds,
    }
    if path.exists():
        write_atomically(previous(path), lambda temporary: _link(path, temporary))
    save_tensors(path, KIND, tensors, facts)


def read_checkpoint(
    path: str | Path, solver: Solver, *, asked: dict[str, Any]
) -> tuple[Certificate | None, float]:
    """Put a saved state into a fresh ``solver``.

    Returns:
        The operator's certificate at the start, and the seconds spent before.
    """
    path = Path(path)
    try:
        tensors, facts = load_tensors(path, KIND)
    except StorageError as error:
        kept = previous(path)
        if kept.exists():
            raise StorageError(
                f"{error}. The checkpoint before it is in {kept}: move it to {path} to resume from "
                "there, or delete both to start again"
            ) from error
        raise StorageError(f"{error}. Delete it to start again") from error
    differing = [name for name in asked if facts["asked"].get(name) != asked[name]]
    if differing:
        details = "; ".join(
            f"{name} was {facts['asked'].get(name)!r} and is {asked[name]!r}" for name in differing
        )
        raise ValueError(
            f"{path} is a checkpoint of another solve: {details}. Use another file, delete this "
            "one, or ask for the same"
        )
    _restore(solver, tensors, facts)
    return certificate_from(facts["certificate"]), float(facts["seconds"])


def _restore(solver: Solver, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    krylov = solver.krylov
    for name, value in facts["krylov"].items():
        setattr(krylov, name, value)
    size = krylov.size
    krylov.rows[:size, : krylov.n] = tensors["rows"].to(krylov.rows.device)
    krylov.coupling[:size, : krylov.multiplied] = tensors["coupling"]
    krylov.aside = krylov.rows.new_zeros(len(tensors["aside"]), krylov.rows.shape[1])
    krylov.aside[:, : krylov.n] = tensors["aside"].to(krylov.rows.device)
    krylov.aside_coupling = tensors["aside coupling"]
    solver.products.count = facts["products"]
    solver.draws = facts["draws"]
    solver.queued = facts["queued"]
    solver.finds = facts["finds"]
    solver.doubt = facts["doubt"]
    solver.converged_at = facts["converged_at"]
    solver.exhausted = facts["exhausted"]
    if facts["chain"] is not None:
        chain = facts["chain"]
        chain["edges"] = [Edge(**edge) for edge in chain["edges"]]
        chain["known"] = [[(value, room) for value, room in side] for side in chain["known"]]
        solver.chain = Chain(**chain)


def _link(source: Path, target: str) -> None:
    Path(target).unlink()
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)
