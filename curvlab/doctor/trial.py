"""What only shows when the model runs: a small operator is made, used and compared."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from curvlab.batches import Batches, sample_count
from curvlab.doctor.differences import compare
from curvlab.doctor.modules import fused_attention
from curvlab.doctor.report import Finding
from curvlab.operators import Hessian
from curvlab.operators.problem import ChunkSize, Problem
from curvlab.refusals import Refusal

SAMPLES = 48  # of the trial
_FINE = torch.float64


def look(
    model: nn.Module,
    loss: Any,
    batches: Batches,
    policies: frozenset[str],
    chunk: ChunkSize,
    options: dict[str, Any],
) -> Iterator[Finding]:
    """Findings from a trial on the first samples, in eval mode unless ``policies`` say otherwise.

    Args:
        options: ``select``, ``dtype``, ``count`` and ``reduction`` as for an operator.
    """
    mode: Any = sorted(policies) or ["eval"]
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if any(norm.running_mean is None for norm in norms):
        mode = ["batch-statistics", *(["frozen-masks"] if "frozen-masks" in policies else [])]
    whole, few = batches.first(None), batches.first(SAMPLES)
    few = whole if chunk == "batch" or not _runs(model, loss, few, mode, options) else few
    options = {**options, "mode": mode}
    try:
        problem = Problem(model, loss, [few], whole_batches=chunk == "batch", **options)
        yield from _seen(problem)
        operator = Hessian(model, loss, [few], chunk=chunk, **options)
    except (ValueError, TypeError) as error:
        yield _refused(error)
        return
    except (RuntimeError, IndexError, KeyError, AttributeError) as error:
        yield Finding(
            "model does not run",
            f"on {sample_count(few) or 'the first'} samples: {type(error).__name__}: "
            f"{str(error).splitlines()[0]}",
            "run loss(model(inputs), targets) by hand on one batch",
            level="wrong",
            handled="no",
        )
        return
    yield from _derivatives(operator)
    yield from _compared(model, loss, few, options, chunk)


def _runs(model: nn.Module, loss: Any, few: Any, mode: Any, options: Any) -> bool:
    """Whether samples taken out of their batch can be computed, as those of a graph cannot."""
    try:
        Problem(model, loss, [few], mode=mode, **options)
    except (ValueError, TypeError):
        return True  # and refused with a reason, which is told later
    except (LookupError, RuntimeError, AssertionError):
        return False
    return True


def _compared(
    model: nn.Module, loss: Any, few: Any, options: Any, chunk: ChunkSize
) -> Iterator[Finding]:
    """The gradient against differences, in float64."""
    fine = {**options, "dtype": _FINE, "whole_batches": chunk == "batch"}
    try:
        yield from compare(Problem(model, loss, [few], **fine))
    except (RuntimeError, ValueError) as error:
        yield Finding(
            "float64 does not run",
            f"derivatives could not be compared with differences: {str(error).splitlines()[0]}",
            "a layer insists on its own dtype: convert its inputs with .to(weight.dtype)",
            handled="no",
        )


def _seen(problem: Problem) -> Iterator[Finding]:
    modules = any(isinstance(m, nn.MultiheadAttention) for m in problem.model.modules())
    if problem.attention and not modules:
        yield fused_attention(
            "the forward pass calls scaled_dot_product_attention, whose fused back ends have"
        )
    if problem.inputs_change:
        yield Finding(
            "inputs written to",
            "the forward pass changes its inputs in place",
            "none needed: it gets a copy every time",
        )
    if problem.autocast:
        yield Finding(
            "autocast inside",
            "the model turns autocast on in its forward pass, which would round some products and "
            "not others",
            'nothing: it is left out, so that products are exact; precision="bfloat16" uses it',
        )
    if problem.whole and sample_count(problem.batches.joined[0]) is not None and not problem.asked:
        yield Finding(
            "coupled samples",
            "the loss of a batch can be computed whole but not in parts, as a graph's can",
            'nothing for one batch: it is never cut; chunk="batch" for several',
        )
    if problem.reduction == "sum":
        yield Finding(
            "summed loss",
            "the loss adds up over samples: eigenvalues grow with the amount of data",
            "none, if that is wanted",
        )


def _derivatives(operator: Hessian) -> Iterator[Finding]:
    layout = operator.layout
    gradient = operator.gradient()
    vector = torch.randn(
        operator.n, generator=torch.Generator().manual_seed(0), dtype=operator.dtype
    ).to(operator.device)
    image = operator @ vector
    if layout is not None:
        unused = [
            name
            for name, where in layout.slices().items()
            if not bool(gradient[where].any()) and not bool(image[where].any())
        ]
        if unused and len(unused) < len(layout.names):
            yield Finding(
                "unused parameters",
                f"{', '.join(unused[:3])}{' and more' if len(unused) > 3 else ''} did not affect "
                "the loss of the first samples: their rows of the curvature are zero",
                "none needed, or select= without them: vectors get shorter",
            )
    scale = float(torch.linalg.vector_norm(image) / torch.linalg.vector_norm(vector))
    if scale <= 1e-7:
        yield Finding(
            "no curvature",
            f"a product with a random vector is {scale:.1e} of its length: the loss is saturated, "
            "or linear in the parameters",
            "look at the loss and the BatchNorm statistics; an eigensolver would return rounding",
            handled="no",
        )


def _refused(error: ValueError | TypeError) -> Finding:
    if isinstance(error, Refusal):
        return Finding(
            error.trap.title, str(error), error.trap.cure, level="wrong", handled="refused"
        )
    return Finding("refused", str(error), "as the message says", level="wrong", handled="refused")
