"""Derivatives against differences, in float64: the one check that sees a wrong derivative as such.

The operator's own probe sees an asymmetric product. A layer whose second derivative is wrong
element by element leaves the product symmetric, so that only the function itself can tell.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from curvlab.doctor.report import Finding
from curvlab.operators.frozen import Chunk
from curvlab.operators.policy import arithmetic
from curvlab.operators.problem import Problem
from curvlab.operators.products.autograd import kept
from curvlab.operators.verify import coarse

TRIES = 3  # a step over a kink of ReLU makes one difference meaningless, hardly all of them
# Steps relative to the parameters and the errors that differences over them may have, for a loss
# that is computed in float64, and for one that a model computes in float32 whatever it is given.
STEPS = {torch.float64: (1e-6, 1e-3), torch.float32: (3e-3, 5e-2)}


def compare(problem: Problem) -> Iterator[Finding]:
    """Compare first and second derivatives on the first samples with central differences."""
    batch = problem.batches.first(None if problem.whole else 16)
    chunk = Chunk(batch)
    inside = problem.computed_in
    if inside == torch.float64 and coarse(problem, batch):
        inside = torch.float32  # in a layer, and converted back
    if inside not in STEPS:
        yield _inside(inside, "too coarse for differences: derivatives were not compared")
        return
    if inside != torch.float64:
        yield _inside(inside, "compared with differences to a few per cent only")
    step, limit = STEPS[inside]
    with arithmetic(problem.device, problem.precision):
        first, second = errors(problem, chunk, step, float(torch.finfo(inside).eps))
    if not first <= limit:
        yield Finding(
            "wrong first derivative",
            "wrong",
            f"the gradient differs from differences of the loss by {first:.1e}: the forward pass "
            "and its derivative belong to different functions (a straight-through estimator, "
            "rounding, a custom autograd.Function)",
            "curvature of such a model is not that of its loss: replace the layer",
            "no",
        )
    elif not second <= limit:
        yield Finding(
            "wrong second derivative",
            "wrong",
            f"Hessian products differ from differences of gradients by {second:.1e}",
            "a custom autograd.Function whose backward detaches or saves too little: write it with "
            "torch operations",
            "no",
        )


def _inside(dtype: torch.dtype, what: str) -> Finding:
    return Finding(
        "loss computed in " + str(dtype).removeprefix("torch."),
        "note",
        f"the model computes its loss in {dtype} inside, also where it is given float64: {what}",
        "nothing: limits are set from that precision; dtype=torch.float64 brings no more digits",
        "yes",
    )


def errors(problem: Problem, chunk: Chunk, relative: float, unit: float) -> tuple[float, float]:
    """Relative errors of gradient and Hessian product, each the least of some directions.

    A direction in which differences up and down do not agree (a kink between them) says nothing of
    the product.
    """
    parameters, layout = problem.parameters, problem.layout
    flat = layout.flatten(parameters)
    product = kept(
        lambda: problem.loss(chunk, parameters), parameters, layout, around=problem.around
    )
    gradient = _gradient(problem, chunk, flat)
    generator = torch.Generator().manual_seed(0)
    step = relative * max(1.0, float(flat.norm()))
    firsts, seconds = [], []
    for _ in range(TRIES):
        vector = torch.randn(layout.n, generator=generator, dtype=flat.dtype).to(flat.device)
        vector /= vector.norm()
        up, down = flat + step * vector, flat - step * vector
        rise = (_value(problem, chunk, up) - _value(problem, chunk, down)) / (2 * step)
        slope = float(gradient @ vector)
        # along a random direction a slope may be near zero: compare at the gradient's own scale
        scale = max(abs(slope), float(gradient.norm()) / layout.n**0.5, 1e-300)
        firsts.append(abs(rise - slope) / scale if rise != slope else 0.0)
        above, below = (_gradient(problem, chunk, place) for place in (up, down))
        bend, turn = (above - below) / (2 * step), (above + below - 2 * gradient) / step
        image = product(vector[None])[0]
        # what the rounding of the two gradients leaves of their difference
        noise = 1e3 * unit * float(gradient.norm()) / step
        size = max(float(image.norm()), float(bend.norm()), noise, 1e-300)
        off = float((image - bend).norm())
        # a wrong product is off by more than the two sides differ
        seconds.append(off / size if off > float(turn.norm()) else 0.0)
    return min(firsts), min(seconds)


def _value(problem: Problem, chunk: Chunk, flat: Tensor) -> float:
    with torch.no_grad():
        return float(problem.loss(chunk, problem.layout.unflatten(flat)))


def _gradient(problem: Problem, chunk: Chunk, flat: Tensor) -> Tensor:
    leaves: Sequence[Tensor] = [
        piece.detach().clone().requires_grad_() for piece in problem.layout.unflatten(flat)
    ]
    return problem.slope(problem.terms.whole, chunk, leaves)
