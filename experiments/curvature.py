"""Curvature along a run: Hessians at the tasks' solutions, and what they say about the updates."""

from torch.nn.functional import cross_entropy

from curvlab.learners.seeds import derived_generator
from curvlab.metrics import Expansion, expand
from curvlab.operators import GaussNewton, Hessian
from curvlab.tasks import Samples, subset
from curvlab.training import Run
from experiments.shelf import Shelf, Training


def hessian_samples(shelf: Shelf, training: Training, seed: int, task: int) -> Samples:
    """The random training samples of a task on which its Hessian is taken.

    They are those that SGD-dagger takes for the same seed and task.
    """
    train = shelf.tasks(training)[task].train
    generator = derived_generator(seed, "hessian", task)
    return subset(train, min(training.samples, len(train)), seed=generator).to(shelf.device)


def hessian(shelf: Shelf, training: Training, run: Run, task: int) -> Hessian:
    """H_o at theta_o."""
    chosen = hessian_samples(shelf, training, run.seed, task)
    model = shelf.model_after(training, run, task)
    return Hessian(model, cross_entropy, (chosen.inputs, chosen.targets))


def gauss_newton(shelf: Shelf, training: Training, run: Run, task: int) -> GaussNewton:
    """H^O_o at theta_o, on the samples of :func:`hessian`."""
    chosen = hessian_samples(shelf, training, run.seed, task)
    model = shelf.model_after(training, run, task)
    return GaussNewton(model, cross_entropy, (chosen.inputs, chosen.targets))


def expansion(shelf: Shelf, training: Training, run: Run) -> Expansion:
    """The quadratic model of every task's loss along the run.

    Gradients and Hessians are of the same 1,000 training samples; what they are to predict is
    measured on test samples.
    """
    operators = [hessian(shelf, training, run, o) for o in range(len(run.tasks) - 1)]
    return expand(run.snapshots, [one.gradient() for one in operators], operators)
