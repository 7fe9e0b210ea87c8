"""Who solves: curvlab's solvers, SciPy and PRIMME on the same product, and what peers bring.

A solver is a function of an operator (vectors are rows), of k and of a tolerance; it returns the k
eigenvalues of largest magnitude ``(k,)`` and unit vectors ``(k, n)``. That is also the signature of
a user's own (``curvlab bench eig --solver``). A contender lists the efforts that it may try in
order (tolerances; for some peers a number of steps): the first is what its own documentation would
have one use. Work that a user pays for before the first product, such as an operator or a retained
graph, belongs into its ``prepare``.

SciPy has a BLAS with threads of its own, which spin against torch's: on two cores that alone made
it two to four times slower. So every contender is tried with several numbers of threads for each
(``threadpoolctl`` sets the BLAS's), and SciPy is a contender only where that can be done.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import util
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvlab.bench import peers
from curvlab.bench.problem import Answer, Plain, Problem, Product
from curvlab.bench.timing import version_of
from curvlab.eigen import Eigenpairs, block_lanczos, lanczos, power_iteration
from curvlab.probe import LinearOperator

Solve = Callable[[LinearOperator, int, float], tuple[Tensor, Tensor]]
Solver = Callable[[float], Answer]  # of the effort
MOST = 2_000  # products of one solve by a library that is not ours
TIGHTER = (1.0, 1 / 3, 1 / 9, 1 / 27)  # tolerances tried, in units of the wanted one


@dataclass(frozen=True, slots=True)
class Contender:
    """A solver of one problem and the efforts at which it may be run, the first its default.

    ``prepare`` makes what the solver needs before its first product, and returns the solver.
    """

    version: str
    prepare: Callable[[], Solver]
    efforts: Sequence[float]


class Counted:
    """An operator that counts its products, and stops a solver that never gives up."""

    def __init__(self, operator: LinearOperator, product: Product | None = None) -> None:
        self.n, self.dtype, self.device = operator.n, operator.dtype, operator.device
        self.product = operator.__matmul__ if product is None else product
        self.count = 0

    def __matmul__(self, vectors: Tensor) -> Tensor:
        self.count += 1 if vectors.dim() == 1 else len(vectors)
        if self.count > MOST:
            raise RuntimeError(f"not done after {MOST} products")
        return self.product(vectors)


def counted(make: Callable[[], LinearOperator], solve: Solve, k: int) -> Callable[[], Solver]:
    """The ``prepare`` of a solver that is given an operator."""

    def prepare() -> Solver:
        operator = make()

        def run(effort: float) -> Answer:
            counting = Counted(operator)
            found = solve(counting, k, effort)
            if not isinstance(found, tuple | list) or len(found) != 2:
                raise TypeError(
                    f"a solver returns values (k,) and vectors (k, n); got {type(found).__name__}"
                )
            return found[0], found[1], counting.count

        return run

    return prepare


def ours(
    solve: Callable[..., Eigenpairs], operator: LinearOperator, k: int, **more: bool
) -> Solver:
    def run(tol: float) -> Answer:
        pairs = solve(operator, k, tol=tol, progress=False, **more)
        return pairs.values, pairs.vectors, pairs.matvecs

    return run


def _numpy(operator: LinearOperator) -> Any:
    """The operator as SciPy calls it: columns, a block of them in one product."""
    from scipy.sparse.linalg import LinearOperator as Scipy

    def image(given: np.ndarray) -> np.ndarray:
        rows = torch.from_numpy(np.ascontiguousarray(given)).to(operator.device)
        return np.asarray((operator @ rows).detach().cpu().numpy())

    kind = np.float64 if operator.dtype == torch.float64 else np.float32
    return Scipy(
        (operator.n, operator.n),
        matvec=lambda vector: image(vector.reshape(-1)),
        matmat=lambda block: image(block.T).T,
        dtype=kind,
    )


def _start(operator: LinearOperator, columns: int, seed: int) -> np.ndarray:
    generator = torch.Generator().manual_seed(seed)
    shape = (operator.n, columns)
    return np.asarray(torch.randn(shape, generator=generator, dtype=operator.dtype).numpy())


def _sorted(operator: LinearOperator, found: tuple[Any, Any]) -> tuple[Tensor, Tensor]:
    values, columns = found
    order = np.argsort(-np.abs(values))
    vectors = torch.from_numpy(np.ascontiguousarray(columns.T[order])).to(operator.device)
    return torch.from_numpy(values[order].astype(np.float64)), vectors


def arpack(operator: LinearOperator, k: int, tol: float, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """SciPy's ``eigsh``."""
    from scipy.sparse.linalg import eigsh

    start = _start(operator, 1, seed)[:, 0]
    return _sorted(operator, eigsh(_numpy(operator), k=k, which="LM", tol=tol, v0=start))


def lobpcg(operator: LinearOperator, k: int, tol: float) -> tuple[Tensor, Tensor]:
    """SciPy's LOBPCG with a block of k: largest values only, and ``tol`` is absolute."""
    from scipy.sparse.linalg import lobpcg as solve

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it did not converge is for the gate to say
        start = _start(operator, k, 0)
        found = solve(_numpy(operator), start, tol=tol, maxiter=40, largest=True)
    return _sorted(operator, found)


def primme(operator: LinearOperator, k: int, tol: float, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """PRIMME at its defaults; ``tol`` is relative to the operator's norm."""
    from primme import eigsh

    start = _start(operator, 1, seed)
    return _sorted(operator, eigsh(_numpy(operator), k=k, which="LM", tol=tol, v0=start))


def contenders(
    found: Problem,
    k: int,
    tol: float,
    truth: Tensor,
    *,
    whole: bool,
    own: Mapping[str, Solve] | None = None,
) -> tuple[dict[str, Contender], dict[str, str]]:
    """Our solvers, other libraries on our product, installed peers and the user's own solvers.

    Args:
        truth: The wanted values ``(k,)``, largest magnitude first.
        whole: Also those that need hundreds or thousands of products.
        own: A user's solvers by name.

    Returns:
        Contenders by name, and for those that cannot take part the reason.
    """
    tolerances = [tol * factor for factor in TIGHTER]
    version, absent = version_of("curvlab"), {}

    def our(solve: Callable[..., Eigenpairs], **more: bool) -> Contender:
        return Contender(version, lambda: ours(solve, found.make(), k, **more), tolerances)

    table = {
        "lanczos": our(lanczos),
        "lanczos, uncertified": our(lanczos, certify=False),
        "block lanczos": our(block_lanczos),
    }
    if whole:
        table["deflated power iteration"] = our(_power)
    for name, solve in (own or {}).items():
        table[name] = Contender("", counted(found.make, solve, k), tolerances)
    if not util.find_spec("threadpoolctl") or not util.find_spec("scipy"):
        absent["scipy and what needs it"] = "pip install scipy threadpoolctl"
        return table, absent
    scipy, least = version_of("scipy"), float(truth.abs().min())
    table["scipy eigsh, our product"] = Contender(scipy, counted(found.make, arpack, k), tolerances)
    if util.find_spec("primme"):
        share = least / float(truth.abs().max())  # from relative to a value to relative to the norm
        table["primme, our product"] = Contender(
            version_of("primme"),
            counted(found.make, primme, k),
            [share * one for one in tolerances],
        )
    else:
        absent["primme"] = "not installed"
    if bool((truth < 0).any()):
        absent["scipy lobpcg"] = "it finds the largest values, and some wanted ones are negative"
    elif whole:
        table["scipy lobpcg, our product"] = Contender(
            scipy, counted(found.make, lobpcg, k), [least * one for one in tolerances]
        )
    if found.plain is None:
        absent["other tools"] = "they take neither this data, loss, mode nor selection"
    else:
        table.update(_from_peers(found.operator, found.plain, k, tolerances))
        absent.update(dict.fromkeys(peers.absent(), "not installed"))
    return table, absent


def _power(operator: LinearOperator, k: int, *, tol: float, progress: bool) -> Eigenpairs:
    del progress  # it has no bar
    return power_iteration(operator, k, tol=tol, stop="residual", max_products=100_000)


def _from_peers(
    operator: LinearOperator, plain: Plain, k: int, tolerances: Sequence[float]
) -> dict[str, Contender]:
    """ARPACK on each peer's product, and the peer's own solver where it has one."""
    table: dict[str, Contender] = {}
    for peer in peers.installed(plain.model, plain.kind):
        version = version_of(peer.DISTRIBUTION)
        build = getattr(peer, plain.kind)

        def make(build: Callable[..., Product] = build) -> LinearOperator:
            product = build(*plain.arguments)
            return Counted(operator, lambda v: product(v) if v.dim() == 2 else product(v[None])[0])

        # compiling at first use does not count
        make() @ torch.ones(operator.n, dtype=operator.dtype, device=operator.device)
        table[f"scipy eigsh, {peer.NAME}"] = Contender(
            version, counted(make, arpack, k), tolerances
        )
        if plain.kind == "hessian" and hasattr(peer, "eigenpairs"):

            def own(peer: ModuleType = peer) -> Solver:
                solve: Solver = peer.eigenpairs(*plain.arguments, k)
                return solve

            table[f"{peer.NAME}, own solver"] = Contender(version, own, peer.efforts(k))
    return table
