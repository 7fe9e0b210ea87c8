"""A solve's state in a file: killed at any point and resumed, it ends with the same bits.

The file is written beside its place and renamed (:mod:`curvlab.storage`), and the one it replaces
is kept as ``<name>.previous``: a full disk leaves both as they were, and if the file is damaged
later the error says that the previous one is there. What the solve was asked for is stored too, so
that a file is not resumed with other options, and what is known of the operator
(:mod:`curvlab.eigen.identity`), so that it is not resumed for another one.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from curvlab.eigen.certifying import Account, Proof
from curvlab.eigen.hidden import Chain
from curvlab.eigen.identity import require_same
from curvlab.eigen.outcome import Outcome
from curvlab.eigen.result import CERTIFICATE, certificate_facts, certificate_from
from curvlab.eigen.selection import Edge
from curvlab.eigen.solver import Solver
from curvlab.eigen.work import State
from curvlab.manifest import COUNT, FINITE, Shape, require_facts, require_tensors
from curvlab.storage import StorageError

KIND = "lanczos checkpoint"
_NUMBERS = {
    "multiplied": COUNT,
    "restarts": COUNT,
    "norm": FINITE,
    "chained": bool,
    "asymmetry_squares": FINITE,
    "asymmetry_count": COUNT,
    "rounding": FINITE,
    "ragged": FINITE,
    "lost": FINITE,
}
_EDGE = {"number": COUNT, "point": FINITE, "side": int}
_CHAIN = {
    "first": COUNT,
    "edges": [_EDGE],
    "alphas": [FINITE],
    "betas": [FINITE],
    "gone": COUNT,
}
_PLAIN = {
    "draws": COUNT,
    "next_look": COUNT,
    "exhausted": bool,
    "reason": str,
}
_ACCOUNT = {"product": FINITE, "closed": COUNT, "again": COUNT, "doubt": FINITE}
_PROOF = {
    "chain": (None, _CHAIN),
    "accounts": [_ACCOUNT],
    "converged_at": (None, COUNT),
    "finds": COUNT,
    "lost": COUNT,
}
_STATE = {
    "krylov": _NUMBERS,
    **_PLAIN,
    "outcome": (None, frozenset(Outcome.__members__)),
    "proof": _PROOF,
}
_FORM = {
    "asked": dict,
    "products": COUNT,
    "overhead": COUNT,
    "certificate": (None, {**CERTIFICATE, "exponent": int, "size": FINITE}),
    "seconds": FINITE,
}


def write_checkpoint(
    path: str | Path, solver: Solver, *, asked: dict[str, Any], seconds: float
) -> None:
    """Save the state between two steps.

    Args:
        asked: What identifies the solve; compared on resuming.
        seconds: Time spent so far.
    """
    state = state_of(solver)
    facts = {
        "asked": asked,
        **state.facts,
        "products": solver.spent,
        "overhead": solver.products.count - solver.spent,
        "certificate": certificate_facts(solver.certificate),
        "seconds": seconds,
    }
    solver.products.space.save(Path(path), KIND, state.rows, state.others, facts)


def read_checkpoint(path: str | Path, solver: Solver, *, asked: dict[str, Any]) -> float:
    """Put a saved state into a fresh ``solver``.

    Returns:
        The seconds spent before.
    """
    tensors, facts = solver.products.space.load(Path(path), KIND)
    require_facts(path, facts, _FORM)
    solver.certificate = certificate_from(facts["certificate"])
    if solver.certificate is not None:
        # in which unit the products in the file are
        unit = {name: facts["certificate"][name] for name in ("exponent", "size")}
        solver.certificate = replace(solver.certificate, **unit)
        solver.products.trust(solver.certificate)
    rounding = max(solver.products.eps, solver.products.error)
    require_same(path, "solve", facts["asked"], asked, rounding)
    restore(path, solver, tensors, facts)
    solver.products.resume(facts["products"], facts["overhead"])
    solver.spent = facts["products"]
    return float(facts["seconds"])


def state_of(solver: Solver) -> State:
    """What a solver has between two steps, as a file keeps it."""
    krylov = solver.krylov
    krylov.settle()
    whole = krylov.rows.whole  # where they are: a copy may be more than the memory has
    held = krylov.rows.rows() if whole is None else whole[0][:, : krylov.rows.width]
    chain = solver.proof.chain
    sums = chain is not None and chain.gone > 0
    rows = {"rows": held, "aside": krylov.aside.rows, "sum": krylov.spare[None][: int(sums)]}
    others = {
        "coupling": krylov.coupling[: krylov.size, : krylov.multiplied],
        "aside coupling": krylov.aside.coupling,
        "dropped": krylov.dropped,
        "tilt": krylov.aside.tilt,
    }
    facts = {
        "krylov": {name: getattr(krylov, name) for name in _NUMBERS},
        **{name: getattr(solver, name) for name in _PLAIN},
        "outcome": None if solver.outcome is None else solver.outcome.name,
        "proof": _proof_facts(solver.proof),
    }
    return State(rows, others, facts, solver.spent)


def _proof_facts(proof: Proof) -> dict[str, Any]:
    chain = None if proof.chain is None else _chain_facts(proof.chain)
    accounts = [asdict(account) for account in proof.accounts]
    plain = {name: getattr(proof, name) for name in _PROOF}
    return {**plain, "chain": chain, "accounts": accounts}


def _chain_facts(chain: Chain) -> dict[str, Any]:
    edges = [
        {"number": number, "point": edge.point, "side": edge.side}
        for number, edge in chain.edges.items()
    ]
    return {**{name: getattr(chain, name) for name in _CHAIN}, "edges": edges}


def _require_tensors(
    path: str | Path, solver: Solver, tensors: Mapping[str, Tensor], facts: dict[str, Any]
) -> None:
    rows, multiplied = solver.krylov.rows, facts["krylov"]["multiplied"]
    shapes: dict[str, Shape] = {
        "rows": (rows.dtype, "size", rows.width),
        "aside": (rows.dtype, "aside", rows.width),
        "sum": (rows.dtype, "sums", rows.width),
        "coupling": (torch.float64, "size", multiplied),
        "aside coupling": (torch.float64, "aside", rows.capacity),
        "dropped": (torch.float64, rows.capacity),
        "tilt": (torch.float64, "tilt", "tilt"),
    }
    sizes = require_tensors(path, tensors, shapes)
    size = sizes["size"]
    good = multiplied <= size <= rows.capacity
    if (chain := facts["proof"]["chain"]) is not None:
        good = good and len(chain["edges"]) > 0 and chain["first"] <= multiplied
        good = good and sizes["tilt"] == sizes["aside"]
        good = good and all(
            edge["side"] in (-1, 1) and edge["number"] < len(facts["proof"]["accounts"])
            for edge in chain["edges"]
        )
        good = good and len(chain["alphas"]) == len(chain["betas"])
        good = good and chain["gone"] <= max(0, len(chain["alphas"]) - 1)
        good = good and sizes["sums"] == int(chain["gone"] > 0)
    if not good:
        raise StorageError(f"{path} is damaged: its figures contradict each other")


def restore(
    path: str | Path, solver: Solver, tensors: Mapping[str, Tensor], facts: dict[str, Any]
) -> None:
    """Put what :func:`state_of` returned into a fresh ``solver``; products are not counted here.

    Args:
        path: Where it comes from, for errors.
        tensors: Long and small ones.
    """
    require_facts(path, facts, _STATE)
    _require_tensors(path, solver, tensors, facts)
    krylov = solver.krylov
    for name in _NUMBERS:
        setattr(krylov, name, facts["krylov"][name])
    for index, row in enumerate(tensors["rows"]):
        krylov.rows.put(index, row)
    krylov.rows.admit(len(tensors["rows"]))
    for row in tensors["sum"]:
        krylov.spare.copy_(row)
    krylov.coupling[: krylov.size, : krylov.multiplied] = tensors["coupling"]
    krylov.aside.rows = tensors["aside"].to(krylov.rows.device)
    krylov.aside.coupling = tensors["aside coupling"]
    krylov.dropped = tensors["dropped"]
    krylov.aside.lean(tensors["tilt"])
    for name in _PLAIN:
        setattr(solver, name, facts[name])
    solver.outcome = None if facts["outcome"] is None else Outcome[facts["outcome"]]
    proof = {name: facts["proof"][name] for name in _PROOF}
    proof["accounts"] = [Account(**account) for account in proof["accounts"]]
    if (chain := proof["chain"]) is not None:
        edges = {edge["number"]: Edge(edge["point"], edge["side"]) for edge in chain["edges"]}
        proof["chain"] = Chain(**{**{name: chain[name] for name in _CHAIN}, "edges": edges})
    solver.proof = Proof(**proof)
