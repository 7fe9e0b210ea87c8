"""The gradient against differences of the loss, in float64.

An operator compares its own products with differences of gradients when it is made. A gradient that
is not the derivative of the loss passes there where it is consistent in itself, such as one that a
layer scales: only the loss can tell.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from curvlab.doctor.report import Finding
from curvlab.operators.frozen import Chunk
from curvlab.operators.problem import Problem
from curvlab.operators.verify import coarse
from curvlab.refusals import Trap

TRIES = 3  # a step over a kink of ReLU makes one difference meaningless, hardly all of them
# Steps relative to the parameters and the errors that differences over them may have, for a loss
# that is computed in float64, and for one that a model computes in float32 whatever it is given.
STEPS = {torch.float64: (1e-6, 1e-3), torch.float32: (3e-3, 5e-2)}


def compare(problem: Problem) -> Iterator[Finding]:
    """Compare the gradient on the first samples with central differences."""
    batch = problem.batches.first(None if problem.whole else 16)
    inside = problem.computed_in
    if inside == torch.float64 and coarse(problem, batch):
        inside = torch.float32  # in a layer, and converted back
    if inside not in STEPS:
        yield _inside(inside, "too coarse for differences: derivatives were not compared")
        return
    if inside != torch.float64:
        yield _inside(inside, "compared with differences to a few per cent only")
    step, limit = STEPS[inside]
    with problem.arithmetic():
        error = _gradient_error(problem, Chunk(batch), step)
    if not error <= limit:
        yield Finding(
            Trap.ESTIMATOR.title,
            f"the gradient differs from differences of the loss by {error:.1e}: the forward pass "
            "and its derivative belong to different functions (a straight-through estimator, "
            "rounding, a custom autograd.Function)",
            "curvature of such a model is not that of its loss: replace the layer",
            level="wrong",
            handled="no",
        )


def _inside(dtype: torch.dtype, what: str) -> Finding:
    return Finding(
        "loss computed in " + str(dtype).removeprefix("torch."),
        f"the model computes its loss in {dtype} inside, also where it is given float64: {what}",
        "none needed: limits follow that precision; dtype=torch.float64 brings no more digits",
    )


def _gradient_error(problem: Problem, chunk: Chunk, relative: float) -> float:
    """The relative error of the gradient along a direction, the least of some."""
    layout, flat = problem.layout, problem.layout.flatten(problem.parameters)
    leaves = [piece.detach().clone().requires_grad_() for piece in layout.unflatten(flat)]
    gradient = problem.slope(problem.terms.whole, chunk, leaves)
    step = relative * max(1.0, float(flat.norm()))

    def loss(place: Tensor) -> float:
        with torch.no_grad():
            return float(problem.loss(chunk, layout.unflatten(place)))

    generator = torch.Generator().manual_seed(0)
    errors = []
    for _ in range(TRIES):
        vector = torch.randn(layout.n, generator=generator, dtype=flat.dtype).to(flat.device)
        vector /= vector.norm()
        rise = (loss(flat + step * vector) - loss(flat - step * vector)) / (2 * step)
        slope = float(gradient @ vector)
        # along a random direction a slope may be near zero: compare at the gradient's own scale
        scale = max(abs(slope), float(gradient.norm()) / layout.n**0.5, 1e-300)
        errors.append(abs(rise - slope) / scale if rise != slope else 0.0)
    return min(errors)
