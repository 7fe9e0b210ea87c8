"""Curvature along a run: Hessians at the tasks' solutions, and what they say about the updates."""

from torch.nn.functional import cross_entropy

from curvlab.metrics import Expansion, expand
from curvlab.operators import GaussNewton
from curvlab.training import Run
from experiments.shelf import Shelf, Training


def gauss_newton(shelf: Shelf, training: Training, run: Run, task: int) -> GaussNewton:
    """H^O_o at theta_o, on the samples of :meth:`Shelf.hessian`."""
    chosen = shelf.hessian_samples(training, run.seed, task)
    model = shelf.model_after(training, run, task)
    return GaussNewton(model, cross_entropy, (chosen.inputs, chosen.targets))


def expansion(shelf: Shelf, training: Training, run: Run) -> Expansion:
    """The quadratic model of every task's loss along the run.

    Gradients and Hessians are of the same 1,000 training samples; what they are to predict is
    measured on test samples.
    """
    operators = [shelf.hessian(training, run, o) for o in range(len(run.tasks) - 1)]
    return expand(run.snapshots, [one.gradient() for one in operators], operators)
