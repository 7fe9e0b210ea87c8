"""Who solves: curvlab's solvers, SciPy and PRIMME on the same product, and what peers bring.

Every solver is a function of its effort (a tolerance, or a number of steps) and returns values
``(k,)``, vectors ``(k, n)`` and how many products it took. A contender lists the efforts it may try
in order: the first is what its own documentation would have one use for the wanted tolerance. What
a user pays before the first product, an operator or a graph that is kept, is its ``prepare``.

SciPy has a BLAS with threads of its own, which spin against torch's: on two cores that alone made
it two to four times slower. So every contender is tried with several numbers of threads for each
(``threadpoolctl`` sets the BLAS's), and SciPy is a contender only where that can be done.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import util
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from benchmarks import peers
from benchmarks.measure import pinned_threads, version_of
from benchmarks.networks import Network
from benchmarks.plain import kept_hessian
from benchmarks.trained import SIZES, trained
from curvlab.eigen import Eigenpairs, block_lanczos, lanczos, power_iteration
from curvlab.operators import Hessian
from curvlab.probe import LinearOperator

Answer = tuple[Tensor, Tensor, int]  # values (k,), vectors (k, n), products
Solver = Callable[[float], Answer]
Product = Callable[[Tensor], Tensor]  # (n,) -> (n,), and (b, n) -> (b, n) for solvers with blocks
MOST = 2_000  # products of one solve by a library that is not ours
TIGHTER = (1.0, 1 / 3, 1 / 9, 1 / 27)  # tolerances tried, in units of the wanted one


class Diagonal:
    """A prescribed spectrum: as cheap as an operator can be."""

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.n, self.dtype, self.device = len(values), values.dtype, values.device

    def __matmul__(self, vectors: Tensor) -> Tensor:
        return vectors * self.values


@dataclass(slots=True)
class Problem:
    """An operator, what one gradient costs beside it, and the network it belongs to.

    ``make`` builds the operator anew, as its user has to; ``operator`` is one that is there.
    """

    name: str
    make: Callable[[], LinearOperator]
    operator: LinearOperator
    gradient: Callable[[], object] | None
    network: Network | None


@dataclass(frozen=True, slots=True)
class Threads:
    """How many threads torch and the BLAS of NumPy and SciPy may use."""

    torch: int
    blas: int

    def __str__(self) -> str:
        return f"{self.torch}/{self.blas}"

    @contextmanager
    def pinned(self) -> Iterator[None]:
        with pinned_threads(self.torch):
            if not util.find_spec("threadpoolctl"):  # then nobody here uses that BLAS
                yield
                return
            from threadpoolctl import threadpool_limits

            with threadpool_limits(self.blas, user_api="blas"):
                yield


@dataclass(frozen=True, slots=True)
class Contender:
    """A solver of one problem and the efforts at which it may be run, the first its default.

    ``prepare`` makes what the solver needs before its first product, and returns the solver.
    """

    version: str
    prepare: Callable[[], Solver]
    efforts: Sequence[float]


def outliers(n: int = 100_000) -> Diagonal:
    """Hessian-shaped: thirty outliers, a decaying bulk, small negative values."""
    top = torch.logspace(2, 0.3, 30, dtype=torch.float64)
    bulk = torch.logspace(0, -6, n - 1030, dtype=torch.float64)
    negative = -torch.logspace(-1.5, -6, 1000, dtype=torch.float64)
    return Diagonal(torch.cat([top, bulk, negative]).float())


def problem(name: str, size: str, samples: int | None = None) -> Problem:
    """The operator called ``name``; what is not at its full size says so in its name.

    Args:
        samples: Of the Hessian, in place of the usual number; that too is said in its name.
    """
    shown = name if size == "full" else f"small {name}"
    shown = shown if samples is None else f"{shown} N={samples}"
    if name == "outliers":
        spectrum = outliers(100_000 if size == "full" else 10_000)
        return Problem(shown, lambda: spectrum, spectrum, None, None)
    network = trained(SIZES[size][name], samples=samples)
    parameters = list(network.model.parameters())

    def gradient() -> object:
        value = network.loss(network.model(network.inputs), network.targets)
        return torch.autograd.grad(value, parameters)

    def make() -> Hessian:
        return Hessian(network.model, network.loss, (network.inputs, network.targets))

    return Problem(shown, make, make(), gradient, network)


def ours(
    solve: Callable[..., Eigenpairs], operator: LinearOperator, k: int, **more: bool
) -> Solver:
    def run(tol: float) -> Answer:
        pairs = solve(operator, k, tol=tol, progress=False, **more)
        return pairs.values, pairs.vectors, pairs.matvecs

    return run


class Counted:
    """A product as NumPy code calls it: columns in, columns out, and how many there were.

    A solver that asks for more than ``MOST`` is stopped: some never give up.
    """

    def __init__(self, product: Product) -> None:
        self.product = product
        self.count = 0

    def vector(self, vector: np.ndarray) -> np.ndarray:
        return self._image(vector.reshape(-1), 1)

    def columns(self, block: np.ndarray) -> np.ndarray:
        """All columns in one product: an operator may share work between them."""
        return self._image(block.T, block.shape[1]).T

    def _image(self, given: np.ndarray, products: int) -> np.ndarray:
        self.count += products
        if self.count > MOST:
            raise RuntimeError(f"not done after {MOST} products")
        image = self.product(torch.from_numpy(np.ascontiguousarray(given)))
        return np.asarray(image.detach().numpy())


def _sorted(values: np.ndarray, columns: np.ndarray, products: int) -> Answer:
    order = np.argsort(-np.abs(values))
    vectors = torch.from_numpy(np.ascontiguousarray(columns.T[order]))
    return torch.from_numpy(values[order].astype(np.float64)), vectors, products


def _start(n: int, columns: int, dtype: torch.dtype, seed: int) -> np.ndarray:
    generator = torch.Generator().manual_seed(seed)
    return np.asarray(torch.randn(n, columns, generator=generator, dtype=dtype).numpy())


def scipy_solver(
    product: Product,
    n: int,
    k: int,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Solver:
    """ARPACK around a product of one vector of ``dtype``."""
    from scipy.sparse.linalg import LinearOperator as Scipy
    from scipy.sparse.linalg import eigsh

    def run(tol: float) -> Answer:
        counted = Counted(product)
        start = _start(n, 1, dtype, seed)
        wrapped = Scipy((n, n), matvec=counted.vector, dtype=start.dtype)
        values, columns = eigsh(wrapped, k=k, which="LM", tol=tol, v0=start[:, 0])
        return _sorted(values, columns, counted.count)

    return run


def lobpcg_solver(product: Product, n: int, k: int, scale: float) -> Solver:
    """SciPy's LOBPCG with a block of k: largest values only, and an absolute tolerance."""
    from scipy.sparse.linalg import LinearOperator as Scipy
    from scipy.sparse.linalg import lobpcg

    def run(tol: float) -> Answer:
        counted = Counted(product)
        start = _start(n, k, torch.float32, 0)
        wrapped = Scipy((n, n), matvec=counted.vector, matmat=counted.columns, dtype=np.float32)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it did not converge is for the gate to say
            values, columns = lobpcg(wrapped, start, tol=tol * scale, maxiter=40, largest=True)
        return _sorted(values, columns, counted.count)

    return run


def primme_solver(
    product: Product,
    n: int,
    k: int,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Solver:
    """PRIMME at its defaults; its tolerance is relative to the operator's norm."""
    import primme
    from scipy.sparse.linalg import LinearOperator as Scipy

    def run(tol: float) -> Answer:
        counted = Counted(product)
        start = _start(n, 1, dtype, seed)
        wrapped = Scipy((n, n), matvec=counted.vector, matmat=counted.columns, dtype=start.dtype)
        values, columns = primme.eigsh(wrapped, k=k, which="LM", tol=tol, v0=start)
        return _sorted(values, columns, counted.count)

    return run


def contenders(
    found: Problem, k: int, tol: float, truth: Tensor, *, whole: bool
) -> dict[str, Contender]:
    """Ours, those of other libraries on our product, and what peers are installed.

    Args:
        truth: The wanted values ``(k,)``, largest magnitude first.
        whole: Also those that need hundreds or thousands of products.
    """
    tolerances = [tol * factor for factor in TIGHTER]
    own, n = version_of("curvlab"), found.operator.n

    def our(solve: Callable[..., Eigenpairs], **more: bool) -> Contender:
        return Contender(own, lambda: ours(solve, found.make(), k, **more), tolerances)

    table = {
        "lanczos": our(lanczos),
        "lanczos, uncertified": our(lanczos, certify=False),
        "block lanczos": our(block_lanczos),
    }
    if whole:
        table["deflated power iteration"] = our(_power)
    if not util.find_spec("threadpoolctl") or not util.find_spec("scipy"):
        return table
    scipy, least = version_of("scipy"), float(truth.abs().min())

    def product() -> Product:
        operator = found.make()
        return lambda vectors: operator @ vectors

    table["scipy eigsh, our product"] = Contender(
        scipy, lambda: scipy_solver(product(), n, k), tolerances
    )
    if util.find_spec("primme"):
        share = least / float(truth.abs().max())  # from relative to a value to relative to the norm
        table["primme, our product"] = Contender(
            version_of("primme"),
            lambda: primme_solver(product(), n, k),
            [share * one for one in tolerances],
        )
    if whole:
        table["scipy lobpcg, our product"] = Contender(
            scipy, lambda: lobpcg_solver(product(), n, k, least), tolerances
        )
    if found.network is not None:
        net = found.network
        table["scipy eigsh, kept graph"] = Contender(
            scipy, lambda: scipy_solver(kept_hessian(net), n, k), tolerances
        )
        table.update(_from_peers(net, n, k, tolerances))
    return table


def _power(operator: LinearOperator, k: int, *, tol: float, progress: bool) -> Eigenpairs:
    del progress  # it has no bar
    return power_iteration(operator, k, tol=tol, stop="residual", max_products=100_000)


def _from_peers(net: Network, n: int, k: int, tolerances: Sequence[float]) -> dict[str, Contender]:
    """ARPACK on each peer's product, and the peer's own solver where it has one."""
    table: dict[str, Contender] = {}
    data = (net.model, net.loss, net.inputs, net.targets)
    for peer in peers.installed(net.name):
        version = version_of(peer.DISTRIBUTION)
        peer.hessian(*data)(torch.ones(1, n))  # what is compiled at first use is nobody's time

        def prepare(peer: ModuleType = peer) -> Solver:
            product = peer.hessian(*data)
            return scipy_solver(lambda vector: product(vector[None])[0], n, k)

        table[f"scipy eigsh, {peer.DISTRIBUTION}"] = Contender(version, prepare, tolerances)
        if hasattr(peer, "eigenpairs"):

            def own(peer: ModuleType = peer) -> Solver:
                solve: Solver = peer.eigenpairs(*data, k)[0]
                return solve

            efforts = peer.eigenpairs(*data, k)[1]
            table[f"{peer.DISTRIBUTION}, own solver"] = Contender(version, own, efforts)
    return table
