"""What every eigensolver returns: the pairs, how good each one is, and what the answer cost.

Values and residuals are float64; vectors are orthonormal rows in the operator's precision, each
with its largest element positive. ``residuals`` are upper bounds of ``||A v - value v||`` for these
vectors and exact products: rounding is in them as far as it is known or was measured. With
``deflate=``, ``A`` stands for ``P A P``, where ``P`` removes the deflated directions.

A pair has converged when its residual is at most ``tol * |value|`` (``relative_to="value"``) or
``tol * ||A||`` (``relative_to="norm"``). A value that the operator's precision cannot tell from
zero (at most ``floor``) cannot meet a relative tolerance; it counts as converged when its residual
is also at most ``floor``, and ``reason`` says how many such pairs there are.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from curvlab.eigen.outcome import Outcome
from curvlab.html import block, spark
from curvlab.manifest import COUNT, Shape, require_facts, require_tensors
from curvlab.probe import Certificate
from curvlab.rows import Space, Whole
from curvlab.rows.files import refuse_shards
from curvlab.storage import Pieces, load_tensors

if TYPE_CHECKING:
    from curvlab.eigen.functions import SpectralFunction

RelativeTo = Literal["value", "norm"]
_TENSORS = ("values", "vectors", "residuals", "converged")

# What the file of a result holds besides the vectors.
SMALL: dict[str, Shape] = {
    "values": (torch.float64, "k"),
    "residuals": (torch.float64, "k"),
    "converged": (torch.bool, "k"),
}
CERTIFICATE = {
    **dict.fromkeys(("symmetry", "repeatability", "linearity", "limit"), float),
    "products": COUNT,
}
_FORM: dict[str, Any] = {
    "complete": bool,
    **dict.fromkeys(("doubt", "orthogonality", "norm", "floor", "asymmetry"), float),
    "matvecs": COUNT,
    "restarts": COUNT,
    "seconds": float,
    "outcome": frozenset(outcome.name for outcome in Outcome),
    **dict.fromkeys(("reason", "method"), str),
    "which": frozenset(("LM", "LA", "SA", "both")),
    "tol": float,
    "relative_to": frozenset(("value", "norm")),
    "certificate": (None, CERTIFICATE),
}


class NotConvergedError(RuntimeError):
    """A solve ended before every pair met its tolerance; the message says what to change."""


@dataclass(frozen=True, slots=True, eq=False)
class Eigenpairs:
    """Eigenvalues, eigenvectors and the evidence for them.

    Attributes:
        values: Shape ``(k,)``, float64, in the order that was asked for.
        vectors: Shape ``(k, width)``, orthonormal rows; ``width`` is ``n``, but in shards.
        residuals: Shape ``(k,)``, float64, upper bounds of ``||A v - value v||``.
        converged: Shape ``(k,)``, bool.
        complete: Whether no eigenvalue is missing that lies further out than the last of these by
            more than its tolerance, copies included, except with probability ``doubt``. One that is
            nearer to the last (``reason`` says so where one is in sight) may stand in its place: of
            1.1085 and -1.1087 at ``tol=1e-3`` either may be called the larger. Where a tolerance
            spans several eigenvalues, it is places that are right: the j-th value is the j-th
            eigenvalue, off by no more than the residuals taken together, and one vector may stand
            for two of them. False means that it was not checked or could not be shown.
        doubt: Bound on the probability that ``complete`` is wrong; 0 when every direction of the
            space was examined, 1 when completeness was not shown.
        orthogonality: Largest element of ``|V V' - I|``.
        norm: Largest ``|value|`` of ``A`` that was seen.
        floor: Residual below which the operator's precision shows nothing.
        asymmetry: Operator error seen during the solve, relative to ``norm``: drift, noise or a
            wrong derivative would show here.
        matvecs: Products with the operator, all of them (probes and checks included).
        restarts: How often the basis was compressed.
        seconds: Wall-clock time, operator included.
        outcome: How the solve ended.
        reason: The same in words, with the figures.
        method: Which solver, and what it decided for itself.
        which: The part of the spectrum that was asked for.
        tol: The tolerance that was asked for.
        relative_to: What ``tol`` multiplies: each pair's own ``"value"``, or the ``"norm"``.
        certificate: The operator's probe at the start; ``None`` if a caller's choice left it out.
        space: Where the vectors live.
    """

    values: Tensor
    vectors: Tensor
    residuals: Tensor
    converged: Tensor
    complete: bool
    doubt: float
    orthogonality: float
    norm: float
    floor: float
    asymmetry: float
    matvecs: int
    restarts: int
    seconds: float
    outcome: Outcome
    reason: str
    method: str
    which: str
    tol: float
    relative_to: RelativeTo
    certificate: Certificate | None
    space: Space

    def __len__(self) -> int:
        return self.values.shape[0]

    @property
    def n(self) -> int:
        return self.space.n

    @property
    def tolerances(self) -> Tensor:
        """What each residual was compared with, shape ``(k,)``."""
        return tolerances(self.values, self.tol, self.relative_to, self.norm)

    def require_converged(self, *, complete: bool = False) -> "Eigenpairs":
        """These pairs, or :class:`NotConvergedError` with advice.

        Args:
            complete: Also require that no eigenvalue is missing from the set.
        """
        advice = self.outcome.advice(self.vectors.dtype)
        if not bool(self.converged.all()):
            late = (~self.converged).nonzero().flatten()
            asked, worst = self.tolerances[late], self.residuals[late]
            i = int((worst / asked).argmax())
            raise NotConvergedError(
                f"{len(late)} of {len(self)} pairs have not converged (positions "
                f"{_some(late.tolist())}; the worst has a residual of {float(worst[i]):.1e} where "
                f"{float(asked[i]):.1e} was asked for): {self.reason}. {advice}"
            )
        if complete and not self.complete:
            raise NotConvergedError(
                f"the pairs converged, but it was not shown that none is missing: {self.reason}. "
                f"{advice}"
            )
        return self

    def head(self, k: int) -> "Eigenpairs":
        """The first ``k`` pairs; completeness holds for ``"LM"``, ``"LA"`` and ``"SA"``."""
        if not 0 <= k <= len(self):
            raise ValueError(f"head(k) needs 0 <= k <= {len(self)}; got {k}")
        kept: dict[str, Any] = {name: getattr(self, name)[:k] for name in _TENSORS}
        return replace(self, **kept)

    def function(
        self,
        function: Callable[[Tensor], Tensor],
        *,
        damping: float = 0.0,
        semidefinite: bool = False,
    ) -> "SpectralFunction":
        """``f(A + damping)`` as far as these pairs know it: an operator, with error bounds.

        Args:
            function: Of tensors, element by element: ``torch.reciprocal``, ``torch.sqrt``,
                ``torch.log``, ...
            damping: Added to every eigenvalue; outside the pairs the function is taken at it.
            semidefinite: Whether A has no negative eigenvalues (Gauss-Newton, Fisher): its bounds
                are tighter then.
        """
        from curvlab.eigen.functions import SpectralFunction

        return SpectralFunction(self, function, damping, semidefinite)

    def table(self, most: int = 40) -> str:
        """One line per pair: value, residual, tolerance, converged or not."""
        lines = [f"{'':>4} {'value':>14} {'residual':>10} {'allowed':>10}"]
        for i, (value, residual, allowed, good) in enumerate(
            zip(
                self.values.tolist(),
                self.residuals.tolist(),
                self.tolerances.tolist(),
                self.converged.tolist(),
                strict=True,
            )
        ):
            if i == most:
                lines.append(f"     ... {len(self) - most} more")
                break
            mark = "" if good else "  not converged"
            lines.append(f"{i:>4} {value:>14.7g} {residual:>10.2e} {allowed:>10.2e}{mark}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        good = int(self.converged.sum())
        known = f"complete (doubt {self.doubt:.0e})" if self.complete else "completeness not shown"
        return (
            f"Eigenpairs({len(self)} of n={self.n}, {self.which!r}, {good} converged to "
            f"tol={self.tol:g} of the {self.relative_to}, {known}; {self.method}, "
            f"{self.matvecs} products, {self.restarts} restarts, {self.seconds:.2f} s; "
            f"{self.reason})\n{self.table(most=10)}"
        )

    def _repr_html_(self) -> str:
        """In a notebook: the first ten pairs, and all values as bars."""
        known = f"complete, doubt {self.doubt:.0e}" if self.complete else "completeness not shown"
        title = f"{len(self)} of {self.n:,} eigenpairs ({self.reason}; {known})"
        columns = (self.values, self.residuals, self.tolerances, self.converged)
        rows = [
            [str(i), f"{value:.7g}", f"{residual:.2e}", f"{allowed:.2e}", "yes" if good else "no"]
            for i, (value, residual, allowed, good) in enumerate(
                zip(*(column.tolist() for column in columns), strict=True)
            )
        ]
        header = ["", "value", "residual", "allowed", "converged"]
        return block(title, header, rows[:10], spark(self.values.tolist()))

    def gather(self) -> "Eigenpairs":
        """The pairs with whole vectors ``(k, n)``; of shards, every rank calls this."""
        return replace(self, vectors=self.space.gather(self.vectors), space=Whole(self.n))

    def save(self, path: str | Path, about: Mapping[str, Any] | None = None) -> Path:
        """Write one ``.safetensors`` file with a checksum, or a folder of the ranks' shards.

        Args:
            about: More facts for the manifest (JSON), such as ``operator.about()``.
        """
        facts = {**self.facts(), "about": dict(about or {})}
        small = {name: Pieces.of(getattr(self, name)) for name in SMALL}
        vectors = {"vectors": Pieces.of(self.vectors)}
        self.space.save_rows(Path(path), "eigenpairs", vectors, small, facts)
        return Path(path)

    @classmethod
    def load(
        cls, path: str | Path, device: torch.device | str = "cpu", *, space: Space | None = None
    ) -> "Eigenpairs":
        """Read what :meth:`save` wrote.

        Args:
            space: By default whole vectors in this process. ``Shards.saved(path)`` reads each
                rank's columns of what any number of ranks saved, one included.
        """
        if space is None:
            refuse_shards(Path(path))
            tensors, manifest = load_tensors(path, "eigenpairs")
        else:
            with space.open_rows(Path(path), "eigenpairs") as (pieces, manifest):
                tensors = {name: stored.whole() for name, stored in pieces.items()}
        width = "n" if space is None else space.width
        require_tensors(path, tensors, {**SMALL, "vectors": (None, "k", width)})
        placed: dict[str, Any] = {name: tensors[name].to(device) for name in _TENSORS}
        where = Whole(tensors["vectors"].shape[1]) if space is None else space
        return cls(**placed, **facts_from(path, manifest), space=where)

    def facts(self) -> dict[str, Any]:
        """Everything but the tensors, as JSON."""
        facts = {f.name: getattr(self, f.name) for f in fields(Eigenpairs)}
        facts = {name: fact for name, fact in facts.items() if name not in (*_TENSORS, "space")}
        certificate = certificate_facts(self.certificate)
        return {**facts, "outcome": self.outcome.name, "certificate": certificate}


def facts_from(path: str | Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What :meth:`Eigenpairs.facts` gave, as it was; the manifest of ``path`` may hold more."""
    facts = {name: fact for name, fact in manifest.items() if name in _FORM}
    require_facts(path, facts, _FORM)
    facts["outcome"] = Outcome[facts["outcome"]]
    facts["certificate"] = certificate_from(facts["certificate"])
    return facts


def tolerances(values: Tensor, tol: float, relative_to: RelativeTo, norm: float) -> Tensor:
    """The residual allowed for each of ``values`` ``(k,)``."""
    scale = values.abs() if relative_to == "value" else torch.full_like(values, norm)
    return tol * scale


@dataclass(frozen=True, slots=True)
class Judgement:
    """Which pairs have converged, bool ``(k,)``, and how many of them are zero to the precision."""

    converged: Tensor
    zeros: int

    @property
    def note(self) -> str:
        """What a reason says of zeros."""
        if not self.zeros:
            return ""
        are = "value is" if self.zeros == 1 else "values are"
        return f" ({self.zeros} {are} zero to the operator's precision)"


def judge(
    values: Tensor,
    residuals: Tensor,
    *,
    tol: float,
    relative_to: RelativeTo,
    norm: float,
    floor: float,
) -> Judgement:
    """The rule of the file's header, for every solver."""
    zero = (values.abs() <= floor) & (residuals <= floor)
    converged = (residuals <= tolerances(values, tol, relative_to, norm)) | zero
    return Judgement(converged, int(zero.sum()))


def canonical_signs_(vectors: Tensor) -> Tensor:
    """Flip rows ``(k, n)`` in place so that the element of largest magnitude is positive."""
    for row in vectors if vectors.shape[-1] else ():
        low, high = torch.aminmax(row)
        if float(low) == -float(high):  # the first of them decides
            low, high = row[row.abs().argmax()], -row[row.abs().argmax()]
        if float(low) < -float(high):
            row.neg_()
    return vectors


def certificate_facts(certificate: Certificate | None) -> dict[str, float] | None:
    """A certificate as JSON."""
    if certificate is None:
        return None
    return {f.name: getattr(certificate, f.name) for f in fields(certificate)}


def certificate_from(facts: dict[str, Any] | None) -> Certificate | None:
    """A certificate from JSON."""
    return None if facts is None else Certificate(**{name: facts[name] for name in CERTIFICATE})


def _some(positions: Sequence[int], most: int = 8) -> str:
    shown = ", ".join(map(str, positions[:most]))
    return shown if len(positions) <= most else f"{shown}, ..."
