"""What is checked of a problem before it is differentiated: is it one function, summed how?"""

import logging
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from curvlab.batches import leaves, map_tensors, rows, sample_count, tensors
from curvlab.operators.objective import Reduction
from curvlab.operators.products.blocks import REMEDY
from curvlab.probe import OperatorError
from curvlab.refusals import Refusal, Trap

if TYPE_CHECKING:
    from curvlab.operators.frozen import Chunk
    from curvlab.operators.problem import Problem

log = logging.getLogger("curvlab")

FEW = 4  # samples of the first look
MIXED = 48  # samples picked from all over the data
# Rounding happens in every operation, the parameters' is measured. A wrong reduction, a coupling of
# samples or a wrong engine is off by far more than this, wherever there is anything but rounding.
MARGIN = 30.0
COARSE = 1e5  # times the rounding of the parameters' own dtype
# How far from the parameters blocks are compared once more, relative to their size. The second is
# for models that have no value at the first, as a logarithm of a parameter may have none.
DISTANCES = (0.1, 1e-3)
AWAY = " at a random distance from the parameters, where more terms have one,"
REDUCTIONS: tuple[Reduction, Reduction] = ("mean", "sum")


def require_deterministic(problem: "Problem") -> None:
    """Raise if the loss is random, or does not depend on the selected parameters."""
    batch = problem.batches.first(None if problem.whole else FEW)
    copied = map_tensors(batch, torch.clone)
    once = problem.depend(copied)
    problem.inputs_change = any(tensor._version for tensor in tensors(copied))
    again = problem.value(batch, 0 if problem.masks_frozen else 1)
    problem.watching = False
    if math.isfinite(once) and not same(problem, batch, once, again):
        frozen = 'mode="frozen-masks", which draws the same numbers for a batch every time'
        evaluating = not any(problem.flags.values())
        cure = (
            f"Pass {frozen}"
            if evaluating
            else f'Call model.eval(), or pass mode="eval" or {frozen}'
        )
        anyway = ", in eval mode too" if evaluating else ""
        raise Refusal(
            f"the loss of the same samples is {once:.9g}, then {again:.9g}: the model or the loss "
            f"draws random numbers{anyway} (functional dropout, noise, sampling, a diffusion "
            f"loss). {cure}",
            Trap.RANDOM,
        )
    if len(problem.unused) == len(problem.layout.names):
        raise Refusal(
            "none of the selected parameters affects the loss: select= names parameters that the "
            "forward pass does not use, or the forward pass detaches them",
            Trap.NO_DEPENDENCE,
        )
    if problem.unused:
        log.info("%s have no gradient: unused, or detached", ", ".join(problem.unused))


def settle_reduction(
    problem: "Problem", given: Reduction | None, stated: Reduction | None
) -> Reduction:
    """Mean or sum: as given, as the loss says, or as it behaves; verified unless batches are whole.

    The samples compared are picked from all over the data: data sorted by class would hide class
    weights from a look at neighbours.
    """
    if given not in (None, "mean", "sum"):
        raise ValueError(f'reduction= is "mean" or "sum"; got {given!r}')
    claimed = given or stated
    if problem.whole:
        return claimed or "mean"
    for batch in problem.batches.joined:
        samples = sample_count(batch) or 1
        step = max(1, samples // MIXED)
        all_of_it = step == 1
        mixed = (
            batch
            if all_of_it
            else rows(batch, torch.arange(0, samples, step, device=problem.device))
        )
        value = problem.value(mixed, 0)
        if all_of_it and not problem.draws:
            problem.known[id(batch)] = value  # and that it adds up: it need not be found out again
        if claimed is None and samples > 1 and math.isfinite(value):
            parts = _parts(problem, mixed)
            mean, total = (_adds_up(problem, mixed, value, parts, how) for how in REDUCTIONS)
            claimed = "sum" if total and not mean else "mean"
            if mean or total:
                continue
        require_additive(problem, mixed, value, claimed or "mean")
    if claimed is None and problem.batches.samples == 1:
        return _of_one(problem)
    return claimed or "mean"


def _of_one(problem: "Problem") -> Reduction:
    """Mean or sum, of a single sample: other ranks may have more, and count on knowing it."""
    (batch,) = problem.batches.joined
    twice = rows(batch, torch.zeros(2, dtype=torch.int64, device=problem.device))
    value, doubled = problem.value(batch, 0), problem.value(twice, 0)
    mean, total = (same(problem, batch, doubled, times * value) for times in (1, 2))
    return "sum" if total and not mean else "mean"


def require_additive(problem: "Problem", batch: Any, value: float, reduction: Reduction) -> None:
    """Raise unless ``value``, the loss of ``batch``, is the mean (sum) of its samples' losses."""
    samples = sample_count(batch)
    if problem.whole or samples is None or samples < 2 or not math.isfinite(value):
        return
    if _adds_up(problem, batch, value, _parts(problem, batch), reduction):
        return
    raise Refusal(
        f"the loss of {describe(batch)} is not the {reduction} over its samples: cut in two, the "
        "parts make another value. Usual causes and cures: class weights or ignore_index divide by "
        "something else than the number of samples (pass count=, a function of a batch that gives "
        'what its mean divides by, or a loss with reduction="sum"); reduction= is not what the '
        "loss does; the samples of a batch are coupled (a contrastive loss, a graph), or do not "
        'lie along the first dimension (pass chunk="batch": batches are then never cut, and their '
        "means are weighed by count=)",
        Trap.NOT_ADDITIVE,
    )


def settle_whole(problem: "Problem", failure: Exception) -> None:
    """Never cut batches, if ``failure`` came of cutting and a whole one can be computed.

    One batch is its own objective. How the means of several are to be weighed, the user has to say.
    """
    batches = problem.batches.pieces(None)
    problem.use_own_modules()  # whatever the failure left
    try:
        problem.value(batches[0], 0)
    except Exception as error:  # the user's own error, not a matter of cutting
        _refuse_swapped(problem, batches[0])
        given = " and ".join(_described(leaf) for leaf in leaves(batches[0]))
        error.add_note(f"The model or the loss fails so on a batch of {given}: does data= fit?")
        raise
    said = f"{type(failure).__name__}: {str(failure).splitlines()[0] if str(failure) else ''}"
    if len(batches) > 1:
        raise Refusal(
            f"a batch can be computed whole but not in parts ({said}): its samples are coupled, as "
            'the nodes of a graph are. Pass chunk="batch": batches are then never cut, and their '
            "means are weighed by count=, by default their number of samples",
            Trap.COUPLED,
        ) from failure
    log.info("the batch can be computed whole but not in parts (%s): it is never cut", said)
    problem.whole = True


def _refuse_swapped(problem: "Problem", batch: Any) -> None:
    """Say so if a batch that fails can be computed as ``(targets, inputs)``."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        return
    problem.use_own_modules()
    try:
        problem.value((batch[1], batch[0]), 0)
    except Exception:  # then the batch is wrong in another way, and its own error says how
        return
    first, second = (_described(one) for one in batch)
    raise Refusal(
        f"the data seem to be (targets, inputs): the model fails on the first of a batch ({first}) "
        f"and can be computed on the second ({second}). Give (inputs, targets)",
        Trap.UNUSABLE_DATA,
    )


def _described(thing: Any) -> str:
    if not isinstance(thing, Tensor):
        return type(thing).__name__
    return f"{tuple(thing.shape)} of {str(thing.dtype).removeprefix('torch.')}"


def _parts(problem: "Problem", batch: Any) -> list[tuple[float, float]]:
    """Count and loss of a third of ``batch`` and of the rest."""
    samples = sample_count(batch) or 0
    cut = max(1, samples // 3)
    parts = [rows(batch, slice(0, cut)), rows(batch, slice(cut, samples))]
    counts = [problem.count_of(part) for part in parts]
    # a part that counts nothing (all targets ignored) has no mean
    return [(n, problem.value(part, 0)) for part, n in zip(parts, counts, strict=True) if n]


def _adds_up(
    problem: "Problem",
    batch: Any,
    value: float,
    parts: list[tuple[float, float]],
    reduction: str,
) -> bool:
    """Whether the parts make up ``value``, to rounding."""
    if reduction == "sum":
        return same(problem, batch, value, math.fsum(term for _, term in parts))
    counts = math.fsum(count for count, _ in parts)
    return same(problem, batch, value, math.fsum(n * term for n, term in parts) / counts)


def same(problem: "Problem", batch: Any, one: float, other: float) -> bool:
    """Whether two values of the loss of ``batch`` differ by no more than rounding explains.

    Where they differ by more than rounding of well-scaled numbers leaves, the rounding of this loss
    at these parameters is measured: near a perfect fit a loss can be all rounding.
    """
    gap = abs(one - other)
    if gap <= problem.tolerance * max(abs(one), abs(other)):
        return True
    return gap <= MARGIN * rounding(problem, batch)


def rounding(problem: "Problem", batch: Any) -> float:
    """How far the loss of ``batch`` moves when all parameters move by as much as they are rounded.

    Arithmetic inside the model that is coarser than the parameters' own counts too, and the dtype
    of the loss.
    """
    here = problem.value(batch, 0)
    if abs(problem.value(batch, 0) - here) > problem.tolerance * abs(here):
        return 0.0  # random: that is not rounding
    own = float(torch.finfo(problem.computed_in).eps) * abs(here)
    return max(own, *_moves(problem, batch, here))


def coarse(problem: "Problem", batch: Any) -> bool:
    """Whether something inside the model is computed with fewer digits than the parameters have.

    A loss near 0 tells nothing: it may be all rounding in any precision.
    """
    here = problem.value(batch, 0)
    unit = float(torch.finfo(problem.dtype).eps)
    moves = max(_moves(problem, batch, here))
    return abs(here) > unit**0.25 and moves > COARSE * unit * abs(here)


def _moves(problem: "Problem", batch: Any, here: float) -> tuple[float, float]:
    """What is not smooth over a larger step; and the move with the rounding of the parameters."""
    unit = float(torch.finfo(problem.dtype).eps)

    def at(step: float) -> float:
        with problem.moved(step):
            return problem.value(batch, 0)

    step = 0.1 * unit**0.5
    rough = 0.5 * abs((at(step) - here) + (at(-step) - here))
    return rough, max(abs(at(unit) - here), abs(at(-unit) - here))


def require_same_gradient(problem: "Problem", chunk: "Chunk") -> None:
    """Raise unless the first sample's gradient in blocks is the one without them, to rounding.

    At the parameters and at a distance from them: what blocks leave out may have no gradient just
    here and curvature all the same, as the square of a branch that starts at 0 has.
    """
    whole = problem.whole or sample_count(chunk.batch) is None
    sample = replace(chunk, batch=chunk.batch if whole else rows(chunk.batch, slice(0, 1)))
    with problem.arithmetic():
        plain = problem.plain_gradient(sample)
        if plain is None:
            return
        _compare_gradients(problem, sample, plain, "")
        for distance in DISTANCES:
            with problem.displaced(distance):
                try:
                    plain = problem.plain_gradient(sample)
                except (RuntimeError, ValueError) as error:  # it has no value there
                    log.info("no gradient at a distance of %g: %s", distance, error)
                    plain = None
                sound = plain is not None and bool(plain.isfinite().all())
                if problem.everywhere(sound) and plain is not None:
                    _compare_gradients(problem, sample, plain, AWAY)
                    return
    log.info("the gradient in blocks is compared at the parameters only: no other is finite")


def _compare_gradients(problem: "Problem", sample: "Chunk", plain: Tensor, where: str) -> None:
    def in_blocks() -> Tensor:
        with problem.in_blocks(second=False):
            return problem.gradient_of(sample)

    found = in_blocks()
    gap = found - problem.factor(plain, found) * plain.to(found.dtype)
    error, length = problem.lengths(gap, found)
    limit = 1e3 * max(float(torch.finfo(v.dtype).eps) for v in (plain, found)) * length
    if not error <= limit:
        with problem.moved(float(torch.finfo(problem.dtype).eps)):
            limit = max(limit, MARGIN * problem.lengths(in_blocks() - found)[0])
    if not error <= limit:
        named = problem.layout.slices()
        gaps = dict(zip(named, problem.lengths(*(gap[at] for at in named.values())), strict=True))
        raise OperatorError(
            f"computed again block by block, the gradient{where} differs by {error:.1e} (limit "
            f"{limit:.1e}), most of all that of {max(gaps, key=gaps.__getitem__)}. {REMEDY}"
        )


def require_finite_loss(chunk: "Chunk", value: float) -> None:
    """Raise if ``value``, the loss of ``chunk``, is not a number to differentiate."""
    if not math.isfinite(value):
        named = describe(chunk.batch)
        named = f"chunk {chunk.number} ({named})" if chunk.number >= 0 else named
        raise Refusal(
            f"the loss of {named} is {value}: there is no curvature there. Look at these samples "
            "and the learning rate",
            Trap.NOT_FINITE,
        )


def describe(batch: Any) -> str:
    count = sample_count(batch)
    return "one batch" if count is None else f"{count} samples"
