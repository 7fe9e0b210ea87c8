"""An operator tried on a few samples when it is made: what it takes, and whether it is right.

A few samples from all over the data show a wrong derivative as well as all of them would, at a
fraction of the cost: products with random vectors are compared for symmetry, repeatability and
linearity, an engine that is not plain autograd with plain autograd, and one product with a
difference of gradients in float64, which sees a second derivative that is wrong but symmetric.
"""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from curvlab.batches import rows, sample_count
from curvlab.operators.frozen import Chunk
from curvlab.operators.problem import TRIED
from curvlab.operators.products import sizing
from curvlab.operators.products.autograd import Product
from curvlab.operators.verify import MARGIN, require_finite_loss
from curvlab.probe import Certificate, OperatorError, probe
from curvlab.refusals import Trap

if TYPE_CHECKING:
    from curvlab.operators.curvature import Curvature

log = logging.getLogger("curvlab")

FEW = 2  # samples; more where two of them say nothing
# Steps relative to the parameters, and the error that differences over them may have. The first is
# small enough not to cross the kinks of a ReLU network. The other is for arithmetic inside a model
# that is coarser than float64.
STEPS = ((1e-7, 1e-3), (1e-3, 5e-2))
FIRST = 1e-2  # what a difference of losses may be off, relative to the gradient's norm


@dataclass(frozen=True, slots=True)
class Trial:
    """A product of few samples, kept and used once; and what a chunk takes, at most."""

    chunk: Chunk
    product: Product
    vector: Tensor  # random signs, (n,)
    image: Tensor
    bound: sizing.Cost
    units: int  # samples, or 1 for a whole batch


def attempt(operator: "Curvature") -> Trial:
    """Make a product of a few samples and use it once."""
    problem = operator.problem
    with problem.arithmetic():
        try:
            return _attempt(operator)
        except CheckpointError as error:
            problem.recompute(error)
            return attempt(operator)
        except NotImplementedError as error:
            raise OperatorError(
                f"torch cannot differentiate a layer of this model twice: {error} Write that "
                "layer with others that it can (EmbeddingBag as Embedding and a mean)",
                Trap.ONCE_ONLY,
            ) from error


def _attempt(operator: "Curvature") -> Trial:
    samples = None if operator.problem.whole else operator.problem.batches.samples
    size = min(FEW, samples or FEW)
    generator = torch.Generator().manual_seed(1)
    signs = torch.randint(0, 2, (operator.n,), generator=generator, dtype=torch.int8)
    vector = signs.to(operator.device, operator.dtype).mul_(2).sub_(1)
    for row in constant_rows(operator):
        vector[row] = 0.0
    while True:
        chunk = Chunk(_some(operator, samples, size), number=TRIED)
        units = size if samples is not None else 1
        product, image, bound = _measured(operator, chunk, vector, units)
        finite = bool(image.isfinite().all())
        if samples is None or size == samples or (finite and bool((image != 0).any())):
            if not finite:
                require_finite_loss(chunk, operator.problem.value(chunk.batch, 0))
            return Trial(chunk, product, vector, image, bound, units)
        size = min(samples, 8 * size)


def _measured(
    operator: "Curvature", chunk: Chunk, vector: Tensor, units: int
) -> tuple[Product, Tensor, sizing.Cost]:
    """The chunk's product, its image of ``vector``, and what chunks take, at most."""
    if operator.plan is not None and operator._engine == "mlp":
        # Counting every tensor takes longer than the product, and the layers tell as much.
        product = operator._build(chunk)
        return product, product(vector[None])[0], operator.plan.cost(operator.dtype.itemsize)
    with sizing.LiveBytes() as live:
        product = operator._build(chunk)
        kept = live.live
        image = product(vector[None])[0]
    return product, image, sizing.Cost(0.0, kept / units, 0.0, live.peak / units)


def constant_rows(operator: "Curvature") -> Iterator[slice]:
    """The padding rows of embeddings: torch gives them no gradient although the loss moves."""
    places = {} if operator.layout is None else operator.layout.slices()
    for name, module in operator.problem.model.named_modules():
        where = places.get(f"{name}.weight" if name else "weight")
        if isinstance(module, nn.Embedding) and module.padding_idx is not None and where:
            width = module.embedding_dim
            start = where.start + module.padding_idx * width
            yield slice(start, start + width)


def _some(operator: "Curvature", samples: int | None, size: int) -> Any:
    """``size`` samples from all over the largest batch; the largest batch itself if it is whole."""
    problem = operator.problem
    batches = problem.batches.pieces(None) if samples is None else problem.batches.joined
    largest = max(batches, key=lambda batch: sample_count(batch) or 0)
    count = sample_count(largest)
    if samples is None or count is None or count <= size:
        return largest
    return rows(largest, torch.arange(size, device=operator.device) * (count // size))


def certify(operator: "Curvature", trial: Trial) -> Certificate:
    """The certificate of the trial's product; raises :class:`OperatorError` if it is not right."""
    with operator.problem.arithmetic():
        certificate = probe(_Part(operator, trial.product), limit=operator.limit)
        certificate.require()
        if operator._engine not in ("retained", "rebuilt", "blockwise"):
            _compare_engines(operator, trial, certificate.limit)
        if operator.plan is None:
            compare_differences(operator, trial)
    return certificate


def _compare_engines(operator: "Curvature", trial: Trial, limit: float) -> None:
    """Raise unless an engine that is not plain autograd agrees with it on one vector."""
    plain = operator._retained(trial.chunk)(trial.vector[None])[0]
    error = _distance(operator, trial.image, plain)
    if not error <= limit:
        # near a perfect fit, plain autograd may have no more digits than this
        with operator.problem.moved(float(torch.finfo(operator.dtype).eps)):
            moved = operator._retained(trial.chunk)(trial.vector[None])[0]
        limit = max(limit, MARGIN * _distance(operator, moved, plain))
    if not error <= limit:
        raise OperatorError(
            f"engine {operator._engine!r} and plain autograd differ by {error:.1e} (limit "
            f'{limit:.1e}): pass engine="retained" and report this model'
        )


def compare_differences(operator: "Curvature", trial: Trial) -> None:
    """Raise if a product is not the difference of gradients that it should be.

    Differences up and down that do not agree (a kink, coarse arithmetic) decide nothing.
    """
    problem = operator.problem
    copies = 6 * 8 * problem.layout.n  # the parameters, moved ones and gradients in float64
    if problem.precision != "exact" or not problem.everywhere(copies < operator._room):
        return
    for step, limit in STEPS[1:] if problem.draws else STEPS:
        try:
            error = difference(operator, trial, step, limit)
        except RuntimeError as failure:  # a layer that insists on its dtype
            log.info("no differences in float64: %s", str(failure).splitlines()[0])
            return
        if error is not None and error <= limit:
            return
        if error is not None:
            _refuse_derivative(operator, trial, step, error, limit)
    log.info("differences of gradients do not agree with each other and decide nothing")


def _refuse_derivative(
    operator: "Curvature", trial: Trial, step: float, error: float, limit: float
) -> NoReturn:
    """Say whether it is the second derivative that is wrong, or the first one already."""
    problem = operator.problem
    with _finely(operator) as dtype:
        chunk, size = problem.fine(trial.chunk), problem.distance(step)
        value = problem.loss(chunk, problem.parameters)
        pieces = torch.autograd.grad(value, problem.parameters, allow_unused=True)
        gradient = problem.layout.flatten(pieces, like=problem.parameters[0])
        flat, along = problem.layout.flatten(problem.parameters).detach(), trial.vector.to(dtype)
        for where, piece in zip(problem.layout.slices().values(), pieces, strict=True):
            along[where] *= piece is not None  # what is detached is named below
        moves = (flat + sign * size * along for sign in (1.0, -1.0))
        with torch.no_grad():
            up, down = (problem.loss(chunk, problem.layout.unflatten(x)) for x in moves)
        parts = [(up - down) / (2 * size), gradient @ along, gradient @ gradient]
        rate, slope, square = problem.added(torch.stack([p.double() for p in parts])).tolist()
        off = abs(rate - slope) / max(abs(slope), math.sqrt(square))
    if off > FIRST:
        raise OperatorError(
            f"the gradient of this model is not the derivative of its loss (off by {off:.1e}): the "
            "forward pass rounds, quantises or detaches and its derivative does not, as with a "
            "straight-through estimator. Such a loss has no curvature. check=False takes second "
            "derivatives as autograd gives them, through the estimator; or replace the layer",
            Trap.ESTIMATOR,
        )
    unused = problem.unused
    named = f" {', '.join(unused[:5])} have no gradient." if unused else ""
    raise OperatorError(
        f"products differ from differences of gradients by {error:.1e} (limit {limit:.0e}): a part "
        f"of the model is not differentiated twice.{named} Usual causes and cures: a reentrant "
        "activation checkpoint (pass use_reentrant=False), a custom autograd.Function whose "
        "backward detaches or uses .data (write it with torch operations), .detach() or .data in "
        "forward. check=False takes products as they are"
    )


@contextmanager
def _finely(operator: "Curvature") -> Iterator[torch.dtype]:
    """The model in float64; in its own dtype if it draws numbers, which would be others there."""
    problem = operator.problem
    blocks = problem.in_blocks(second=False) if operator._engine == "blockwise" else nullcontext()
    dtype = operator.dtype if problem.draws else torch.float64
    with problem.cast(dtype), blocks:
        yield dtype


def difference(operator: "Curvature", trial: Trial, step: float, limit: float) -> float | None:
    """The relative error of the trial's product against central differences in float64.

    ``None`` if it is above ``limit`` and differences up and down are as far from each other.
    """
    problem = operator.problem
    with _finely(operator) as dtype:
        chunk, size = problem.fine(trial.chunk), problem.distance(step)
        along = trial.vector.to(dtype) * size
        up, down = operator._moved(chunk, along), operator._moved(chunk, -along)
        image = trial.image.double()
        error = _distance(operator, image, operator._rate(chunk, (up - down) / (2 * size)))
        if error <= limit:
            return error
        here = operator._moved(chunk, torch.zeros_like(along))
        rates = [operator._rate(chunk, rise / size) for rise in (up - here, here - down)]
        return error if _distance(operator, *rates) <= limit else None


def _distance(operator: "Curvature", one: Tensor, other: Tensor) -> float:
    # float64, in which the squares of a nearly fitted model's products do not vanish
    one, other = one.double(), other.double()
    gap, length = operator.problem.lengths(one - other, other)
    return gap / max(length, 1e-300)


class _Part:
    """A product as an operator, for the probe."""

    def __init__(self, whole: "Curvature", product: Product) -> None:
        self.n, self.dtype, self.device = whole.n, whole.dtype, whole.device
        self._product = product

    def __matmul__(self, vectors: Tensor) -> Tensor:
        return self._product(vectors.reshape(-1, self.n)).reshape(vectors.shape)
