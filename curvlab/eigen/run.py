"""One solve from its first product to its result: checkpoints, progress, Ctrl-C."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from curvlab.eigen.checkpoint import read_checkpoint, write_checkpoint
from curvlab.eigen.finish import eigenpairs
from curvlab.eigen.options import Options
from curvlab.eigen.products import Products
from curvlab.eigen.progress import Progress
from curvlab.eigen.result import Eigenpairs
from curvlab.eigen.solver import Solver
from curvlab.eigen.space import Space
from curvlab.probe import Certificate
from curvlab.rows import Rows


@dataclass(frozen=True, slots=True)
class Keeping:
    """Where and how often the state is saved, and whether progress is shown."""

    checkpoint: Path | None = None
    every: int = 50
    progress: bool | None = None

    def resumes(self, space: Space) -> bool:
        """Whether there is a checkpoint to go on from."""
        return self.checkpoint is not None and space.exists(self.checkpoint)


def run(
    products: Products,
    options: Options,
    *,
    start: Tensor | None,
    explicit: bool,
    certificate: Certificate | None,
    keeping: Keeping,
    method: str,
) -> Eigenpairs:
    """Solve; a checkpoint that exists is resumed.

    Args:
        start: Rows ``(b, n)`` to start from, or ``None`` for random ones.
        explicit: Compute every residual from a product.
    """
    began = time.perf_counter()
    solver = Solver(products, options)
    asked = _identity(products, options, start) if keeping.checkpoint is not None else {}
    if keeping.checkpoint is not None and keeping.resumes(products.space):
        certificate, spent = read_checkpoint(keeping.checkpoint, solver, asked=asked)
        began -= spent
        if certificate is not None:
            products.trust(certificate)
    else:
        solver.start(start)

    def save() -> None:
        if keeping.checkpoint is not None:
            seconds = time.perf_counter() - began
            write_checkpoint(
                keeping.checkpoint, solver, asked=asked, certificate=certificate, seconds=seconds
            )

    iterate(solver, keeping, save, method)
    return eigenpairs(
        solver,
        explicit=explicit,
        certificate=certificate,
        seconds=lambda: time.perf_counter() - began,
        method=method,
    )


def iterate(solver: Solver, keeping: Keeping, save: Callable[[], None], method: str) -> None:
    """Step until the solve has ended; ``save`` is called now and then, and on Ctrl-C."""
    space = solver.products.space
    line = Progress(method, keeping.progress if space.leads else False)
    saved = solver.products.count
    try:
        while not solver.finished:
            if solver.products.count - saved >= keeping.every:
                save()
                saved = solver.products.count
            solver.step()
            line.update(solver.products.count, solver.found, solver.options.k, solver.stage)
    except KeyboardInterrupt:
        if space.shared:  # other ranks may be a product further: what they all saved is what counts
            raise
        # Between the product and its bookkeeping nothing is half done: rows count only afterwards.
        solver.krylov.settle()
        save()
        solver.finish("interrupted by Ctrl-C")
    finally:
        line.close()


def _identity(products: Products, options: Options, start: Tensor | None) -> dict[str, Any]:
    """What must agree for a checkpoint to belong to this solve."""
    deflation = products.deflation
    rows = deflation.rows() if isinstance(deflation, Rows) else None
    return {
        **{name: value for name, value in asdict(options).items() if name != "max_products"},
        "n": products.n,
        "dtype": str(products.operator.dtype),
        "deflated": 0 if deflation is None else deflation.size,
        "deflated digest": products.space.digest(rows),
        "start digest": products.space.digest(start),
    }
