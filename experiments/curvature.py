"""Curvature along a run: Hessians at the tasks' solutions, and what they say about the updates."""

from functools import lru_cache

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from curvlab.metrics import Expansion, OuterProducts, expand
from curvlab.operators import GaussNewton
from curvlab.parameters import layout_of, select_parameters
from curvlab.training import Run
from experiments.shelf import Shelf, Training


def gauss_newton(shelf: Shelf, training: Training, run: Run, task: int) -> GaussNewton:
    """H^O_o at theta_o, on the samples of :meth:`Shelf.hessian`."""
    chosen = shelf.hessian_samples(training, run.seed, task)
    model = shelf.model_after(training, run, task)
    return GaussNewton(model, cross_entropy, (chosen.inputs, chosen.targets))


def stored_gradients(shelf: Shelf, training: Training, run: Run, task: int) -> OuterProducts:
    """The mean outer product of the true-label logit gradients that OGD stores at theta_o."""
    chosen = shelf.hessian_samples(training, run.seed, task, "ogd")
    model = shelf.model_after(training, run, task)
    named = select_parameters(model)
    layout = layout_of(named)

    def logit(parameters: Tensor, inputs: Tensor, target: Tensor) -> Tensor:
        values = dict(zip(layout.names, layout.unflatten(parameters), strict=True))
        logits: Tensor = functional_call(model, values, (inputs.unsqueeze(0),))[0]
        return logits.gather(0, target.unsqueeze(0)).squeeze(0)

    rows = vmap(grad(logit), in_dims=(None, 0, 0), chunk_size=100)
    flat = layout.flatten(named.values()).detach()
    with torch.no_grad():
        return OuterProducts(rows(flat, chosen.inputs, chosen.targets).detach())


@lru_cache(maxsize=64)
def expansion(shelf: Shelf, training: Training, seed: int, drawn_for: str = "hessian") -> Expansion:
    """The quadratic model of every task's loss along a run: once for all labels that ask.

    Gradients and Hessians are of the same 1,000 training samples; what they are to predict is
    measured on test samples.
    """
    [run] = shelf.runs(training, [seed])
    operators = [shelf.hessian(training, run, o, drawn_for) for o in range(len(run.tasks) - 1)]
    return expand(run.snapshots, [one.gradient() for one in operators], operators)
