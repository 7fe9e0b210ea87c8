"""Do all ranks mean the same thing? Facts that must agree are compared, and the odd rank is named.

A sum over ranks of products at different parameters, with different losses or over differently
chosen parameters is a matrix that belongs to nothing. So before the first product the ranks compare
digests; what they hold of the data must differ, since two ranks with the same samples count them
twice.
"""

from collections import Counter
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from curvlab.batches import sample_count, tensors
from curvlab.distributed.group import Group
from curvlab.distributed.watch import RankError
from curvlab.operators import Curvature, Operator
from curvlab.parameters import Layout
from curvlab.probe import LinearOperator, OperatorError
from curvlab.storage import tensor_digest

ACCIDENT = 8  # samples on two ranks that nobody is told of
FAILED, NOT_FINITE = -1.0, -2.0  # in place of a fingerprint
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
            "parameters": tensor_digest(named[name] for name in sorted(named)),
            "buffers": tensor_digest(problem.buffers[name] for name in sorted(problem.buffers)),
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
    """Raise if two ranks hold the same samples: all of them, or many, as after other shuffles."""
    held, samples = None, torch.zeros(0, dtype=torch.int64)
    if isinstance(part, Curvature):
        joined = part.problem.batches.joined
        held = tensor_digest(t for batch in joined for t in tensors(batch))
        samples = torch.cat([samples, *(_each(batch) for batch in joined)])
    seen: dict[str, int] = {}
    for rank, digest in enumerate(group.facts(held, "a comparison of data")):
        if digest is not None and seen.setdefault(digest, rank) != rank:
            raise RankError(
                f"ranks {seen[digest]} and {rank} hold the same data: give each rank its own share "
                "(samples[rank::size]), or none"
            )
    _require_apart(group, samples)


def _require_apart(group: Group, samples: Tensor) -> None:
    """Raise if many ``samples``, hashes ``(N,)``, are on two ranks.

    Data sets have duplicates of their own. Those that a rank holds twice tell how many: of the
    others ``R - 1`` times as many fall on two of ``R`` ranks.
    """
    once = torch.unique(samples)
    counts = group.facts([len(once), len(samples) - len(once)], "a comparison of samples")
    padded = torch.zeros(max(length for length, _ in counts), dtype=torch.int64)
    padded[: len(once)] = once
    hashes = group.gather(padded, "a comparison of samples")
    found = torch.cat([row[:length] for row, (length, _) in zip(hashes, counts, strict=True)])
    owner = torch.repeat_interleave(torch.tensor([length for length, _ in counts]))
    ordered, order = found.sort(stable=True)
    twice = (ordered[1:] == ordered[:-1]).nonzero().flatten()
    own = sum(repeated for _, repeated in counts)
    if len(twice) > ACCIDENT + 3 * (group.size - 1) * own:
        a, b = (int(owner[order[twice[0] + i]]) for i in (0, 1))
        raise RankError(
            f"{len(twice)} samples are on two ranks, such as ranks {a} and {b}, and would count "
            "twice: shuffle with one seed on all ranks, or divide before shuffling"
        )


def _each(batch: object) -> Tensor:
    """A hash of every sample ``(N,)``; none where samples cannot be told apart."""
    count = sample_count(batch) or 0
    total = torch.zeros(count, dtype=torch.int64)
    generator = torch.Generator().manual_seed(0)
    for tensor in tensors(batch) if count else []:
        if tensor.dim() == 0:
            continue
        flat = tensor.detach().reshape(count, -1)
        factors = torch.randint(-(2**62), 2**62, (flat.shape[1],), generator=generator)
        step = max(1, (1 << 20) // max(1, flat.shape[1]))
        for first in range(0, len(flat), step):
            some = flat[first : first + step].cpu()
            exact = some.double().view(torch.int64) if some.is_floating_point() else some.long()
            total[first : first + step] += (exact * factors).sum(1)  # int64 wraps around
    return total


class Said:
    """What this rank tells the others of its product."""

    def __init__(self, mark: float, error: Exception | None = None) -> None:
        self.mark, self.error = mark, error

    def compare(self, marks: Tensor, group: Group) -> None:
        """Raise on every rank unless all ``marks`` ``(ranks,)`` are the same and good."""
        said = marks.tolist()
        if all(mark == said[0] for mark in said) and said[0] > 0:
            return
        failed = [rank for rank, mark in enumerate(said) if mark == FAILED]
        if failed:
            own = None if self.error is None else f"{type(self.error).__name__}: {self.error}"
            reasons = group.facts(own, "what failed")
            if self.error is not None:
                raise self.error
            group.require_none(reasons, "a product")
        wrong = [rank for rank, mark in enumerate(said) if mark == NOT_FINITE]
        if wrong:
            raise OperatorError(
                f"the product of rank {wrong[0]} holds NaN or infinity: look at that rank's "
                "parameters and data"
            )
        usual = Counter(said).most_common(1)[0][0]
        odd = [rank for rank, mark in enumerate(said) if mark != usual]
        raise RankError(
            f"rank {odd[0]} multiplies another vector, or has made another number of products, "
            f"than rank {said.index(usual)}: every rank must run the same program with the same "
            "seeds, on the same kind of processor"
        )


def fingerprint(vectors: Tensor) -> int:
    """A number below 2**22 of the bits of ``vectors``."""
    kind = torch.int64 if vectors.dtype == torch.float64 else torch.int32
    total = int(vectors.contiguous().view(kind).sum(dtype=torch.int64))
    # The upper bits of a product with an odd constant depend on all bits of the sum.
    return (total * 0x9E3779B97F4A7C15 % 2**64) >> 42


def _name(loss: object) -> str:
    named = getattr(loss, "__qualname__", None)
    return str(named) if named else repr(loss)


def _short(value: str) -> str:
    return value if len(value) <= 80 else f"{value[:77]}..."
