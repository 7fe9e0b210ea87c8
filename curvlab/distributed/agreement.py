"""Do all ranks mean the same thing? Facts that must agree are compared, and the odd rank is named.

A sum over ranks of products at different parameters, with different losses or over differently
chosen parameters is a matrix that belongs to nothing. So before the first product the ranks compare
digests; what they hold of the data must differ, since two ranks with the same samples count them
twice.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from curvlab.batches import tensors
from curvlab.distributed.group import Group
from curvlab.distributed.watch import RankError
from curvlab.operators import Curvature, Operator
from curvlab.parameters import Layout
from curvlab.probe import LinearOperator

_CURES = {
    "parameters": "load or broadcast one set of parameters to all ranks",
    "buffers": "broadcast the buffers (BatchNorm statistics) of one rank to all",
    "reduction": "use one loss on all ranks",
    "loss": "use one loss on all ranks",
}


def facts_of(part: LinearOperator) -> dict[str, Any]:
    """What must be the same on every rank, as JSON."""
    facts: dict[str, Any] = {
        "n": part.n,
        "dtype": str(part.dtype),
        "kind": type(part).__name__,
        "device": torch.device(part.device).type,
        "limit": getattr(part, "limit", None),
    }
    if isinstance(part, Operator) and part.layout is not None:
        facts["names"] = list(part.layout.names)
        facts["shapes"] = [list(shape) for shape in part.layout.shapes]
    if isinstance(part, Curvature):
        problem = part.problem
        named = problem.named()
        facts |= {
            "parameters": _digest(named[name] for name in sorted(named)),
            "buffers": _digest(problem.buffers[name] for name in sorted(problem.buffers)),
            "reduction": problem.reduction,
            "loss": _name(problem.terms.loss),
            "precision": problem.precision,
        }
    return facts


def require_same(group: Group, facts: Mapping[str, Any] | None) -> dict[str, Any]:
    """The facts on which all ranks agree; ``None`` from a rank that has nothing to say."""
    everyone = group.facts(None if facts is None else dict(facts), "a comparison of ranks")
    known = {rank: found for rank, found in enumerate(everyone) if found is not None}
    if not known:
        raise ValueError("no rank has any data: give at least one rank a part")
    for name in next(iter(known.values())):
        said = {rank: repr(found.get(name)) for rank, found in known.items()}
        usual, count = Counter(said.values()).most_common(1)[0]
        if count == len(said):
            continue
        odd = [rank for rank, value in said.items() if value != usual]
        first = next(rank for rank, value in said.items() if value == usual)
        raise RankError(
            f"rank {odd[0]} differs from rank {first} in its {name}: {_short(said[odd[0]])} "
            f"instead of {_short(usual)}" + (f" (and ranks {odd[1:]} differ)" if odd[1:] else "")
            + f"; {_CURES.get(name, 'every rank must make its part in the same way')}"
        )  # fmt: skip
    return dict(next(iter(known.values())))


def layout_from(facts: Mapping[str, Any]) -> Layout | None:
    """The layout that other ranks have, for one without a part."""
    if "names" not in facts:
        return None
    shapes = tuple(torch.Size(shape) for shape in facts["shapes"])
    offsets = tuple(accumulate((shape.numel() for shape in shapes[:-1]), initial=0))
    return Layout(tuple(facts["names"]), shapes, offsets, facts["n"])


def require_distinct(group: Group, part: LinearOperator | None) -> None:
    """Raise if two ranks hold the same data."""
    held = None
    if isinstance(part, Curvature):
        held = _digest(t for batch in part.problem.batches.joined for t in tensors(batch))
    seen: dict[str, int] = {}
    for rank, digest in enumerate(group.facts(held, "a comparison of data")):
        if digest is not None and seen.setdefault(digest, rank) != rank:
            raise RankError(
                f"ranks {seen[digest]} and {rank} hold the same data: give each rank its own share "
                "(samples[rank::size]), or none"
            )


def fingerprint(vectors: Tensor) -> int:
    """A number below 2**22 of the bits of ``vectors``."""
    kind = torch.int64 if vectors.dtype == torch.float64 else torch.int32
    total = int(vectors.contiguous().view(kind).sum(dtype=torch.int64))
    # The upper bits of a product with an odd constant depend on all bits of the sum.
    return (total * 0x9E3779B97F4A7C15 % 2**64) >> 42


def _digest(found: Iterable[Tensor]) -> str:
    total = hashlib.sha256()
    for tensor in found:
        total.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        data = tensor.detach().cpu().contiguous().reshape(-1)
        total.update(data.view(torch.uint8).numpy().data)
    return total.hexdigest()


def _name(loss: object) -> str:
    named = getattr(loss, "__qualname__", None)
    return str(named) if named else repr(loss)


def _short(value: str) -> str:
    return value if len(value) <= 80 else f"{value[:77]}..."
