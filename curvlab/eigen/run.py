"""One solve from its first product to its result: checkpoints, progress, Ctrl-C."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import Tensor

from curvlab.eigen.checkpoint import read_checkpoint, write_checkpoint
from curvlab.eigen.finish import eigenpairs
from curvlab.eigen.identity import identity
from curvlab.eigen.outcome import Outcome
from curvlab.eigen.products import Products
from curvlab.eigen.progress import Progress
from curvlab.eigen.request import Checkpoint, Request
from curvlab.eigen.result import Eigenpairs
from curvlab.eigen.solver import Solver
from curvlab.eigen.starting import start
from curvlab.eigen.work import Interrupted
from curvlab.signals import Stop, noted


def run(
    products: Products,
    asked: Request,
    *,
    vectors: Tensor | None,
    keeping: Checkpoint | None,
    progress: bool | None,
    method: str,
) -> Eigenpairs:
    """Solve; a checkpoint that exists is resumed.

    Args:
        vectors: Rows ``(b, n)`` to start from, or ``None`` for random ones.
    """
    began = time.perf_counter()
    resumes = keeping is not None and products.space.exists(keeping.path)
    # before the certificate says in which unit products are
    whose: dict[str, Any] = {}
    if keeping is not None:
        products.space.require_writable(keeping.path)
        whose = {**asked.identity(), **identity(products)}
        whose |= {
            "deflated": products.n - products.room,
            "start digest": products.space.digest(vectors),
        }
    certificate = None if resumes else products.probe(asked.seed)
    solver = Solver(products, asked, certificate)
    if keeping is not None and resumes:
        began -= read_checkpoint(keeping.path, solver, asked=whose)
    else:
        start(solver, vectors)

    def save() -> None:
        if keeping is not None:
            seconds = time.perf_counter() - began
            write_checkpoint(keeping.path, solver, asked=whose, seconds=seconds)

    every = None if keeping is None else keeping.every
    return iterate(solver, save, began=began, every=every, progress=progress, method=method)


def iterate(
    solver: Solver,
    save: Callable[[], None],
    *,
    began: float,
    every: int | None,
    progress: bool | None,
    method: str,
) -> Eigenpairs:
    """Step until the solve has ended; returns its result.

    A signal to stop waits for the end of the step; a second one breaks into it. What is saved and
    returned is always a state between two steps, or one whose next product has not come back.

    Args:
        save: Called every so many products, and when the solve is stopped.
        began: When, by :func:`time.perf_counter`.
    """
    space = solver.products.space
    line = Progress(method, progress if space.leads else False)
    saved = solver.products.spent
    found: Eigenpairs | None = None
    try:
        with nullcontext(Stop()) if space.shared else noted() as stop:
            while solver.outcome is None:
                if stop.requested:
                    raise KeyboardInterrupt
                if every is not None and solver.products.spent - saved >= every:
                    solver.settle()
                    save()
                    saved = solver.products.spent
                solver.step()
                stage = "searching" if solver.proof.chain is None else "looking for hidden copies"
                line.update(solver.products.count, solver.found, solver.request.k, stage)
            found = eigenpairs(solver, began=began, method=method)
    except KeyboardInterrupt as error:
        if space.shared:  # other ranks may be a product further: what they all saved is what counts
            raise
        made = f"{method} was interrupted after {solver.products.count} products"
        if not solver.whole:
            raise Interrupted(f"{made}, within a step: nothing was saved of it", None) from error
        save()
        if found is None:
            solver.finish(Outcome.INTERRUPTED, made)
            found = eigenpairs(solver, began=began, method=method)
        raise Interrupted(f"{made}. {Outcome.INTERRUPTED.value}", found) from error
    finally:
        line.close()
    return found
