"""Curvature through training, sent to any logger.

A :class:`Watch` measures; in a loop of one's own it is asked at every step::

    watch = Watch(model, cross_entropy, batch, every=100, log=tensorboard(writer))
    for step, (x, y) in enumerate(loader):
        ...
        watch.at(step)

``curvlab.callbacks.transformers`` is the same for transformers' Trainer, and
``curvlab.callbacks.lightning`` for Lightning; each needs that package (extras of these names).
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from curvlab.basis import Basis
from curvlab.batches import read
from curvlab.checks import whole
from curvlab.eigen import SpectrumTracker, trace
from curvlab.operators import Hessian, Objective
from curvlab.operators.objective import Loss
from curvlab.operators.policy import unwrap
from curvlab.parameters import parameter_vector

Log = Callable[[Mapping[str, float], int], None]

__all__ = ["Log", "Watch", "tensorboard", "wandb"]


class Watch:
    """Sharpness, trace and protection of a model, measured at regular steps on the same data.

    Args:
        model: The model that is trained; wrapped ones are unwrapped.
        loss: As for :class:`curvlab.Hessian`.
        data: As for :class:`curvlab.Hessian`; read once, now.
        every: Steps between measurements; the first is at step 0.
        tol: The relative tolerance of the sharpness.
        probes: Products for the trace; 0 leaves it out.
        basis: Protected directions; reports which share of the path from here lies in them.
        log: Called with the figures and the step.
        options: The options of the Hessian; ``mode="eval"`` unless they say otherwise.

    Attributes:
        tracker: The spectra so far; each solve starts from the one before.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss | Objective | None,
        data: Any,
        *,
        every: int = 100,
        tol: float = 1e-2,
        probes: int = 0,
        basis: Basis | None = None,
        log: Log | None = None,
        **options: Any,
    ) -> None:
        whole(every=every)
        self.model, self.loss = unwrap(model), loss
        bare = loss is None or isinstance(loss, Objective)
        self.data = read(data, bare=bare)
        self.every, self.probes, self.basis, self.log = every, probes, basis, log
        self.options = {"mode": "eval", **options}
        self.tracker = SpectrumTracker(k=1, tol=tol, which="LA")
        self._start = parameter_vector(self.model) if basis is not None else None

    def at(self, step: int) -> dict[str, float]:
        """The figures of ``step``, which are also logged; empty when it is not its turn."""
        if step % self.every:
            return {}
        operator = Hessian(self.model, self.loss, self.data, **self.options)
        pairs = self.tracker.update(operator, step, progress=False)
        figures = {"curvature/sharpness": float(pairs.values[0]), "curvature/loss": operator.loss}
        if self.probes:
            estimate = trace(operator, probes=self.probes, progress=False)
            figures["curvature/trace"] = estimate.value
            figures["curvature/trace_error"] = estimate.error
        if self.basis is not None and self._start is not None:
            change = parameter_vector(self.model) - self._start
            moved = bool(change.any())
            figures["curvature/leak"] = float(self.basis.leak(change)) if moved else 0.0
        if self.log is not None:
            self.log(figures, step)
        return figures


def tensorboard(writer: Any) -> Log:
    """Into a ``SummaryWriter``."""

    def log(figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            writer.add_scalar(name, value, step)

    return log


def wandb(run: Any) -> Log:
    """Into a run of Weights & Biases."""
    return lambda figures, step: run.log(dict(figures), step=step)
