"""A check before a long computation: what would make the curvature of this model wrong or slow?

    print(doctor(model, cross_entropy, loader))

The model, the data and the global generators stay as they are. Every trap found comes with its cure
and with who applies it: curvlab by itself, curvlab once you choose (it refuses until then), or you.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from curvlab.doctor import data as data_checks, modules, trial
from curvlab.doctor.report import Finding, Report, report
from curvlab.operators import Objective
from curvlab.operators.objective import Loss, Reduction
from curvlab.operators.policy import Mode, modes, unwrap
from curvlab.operators.problem import ChunkSize, Count
from curvlab.parameters import Selection

__all__ = ["Finding", "Report", "doctor"]


def doctor(
    model: nn.Module,
    loss: Loss | Objective | None,
    data: Any,
    *,
    select: Selection = None,
    mode: Mode | Sequence[Mode] | None = None,
    reduction: Reduction | None = None,
    count: Count | None = None,
    chunk: ChunkSize = None,
    dtype: torch.dtype | None = None,
) -> Report:
    """Look for what would make curvature wrong or slow; arguments as for :class:`curvlab.Hessian`.

    The data are read twice. What ``mode`` and ``dtype`` settle is reported as handled.
    """
    inner = unwrap(model)
    policies = modes(mode)
    findings = list(modules.look(model, policies))
    if dtype is not None:
        settled = {"mixed dtypes", "half precision"}
        findings = [
            Finding(f.trap, f.what, f"none needed: dtype={dtype} does it", level=f.level)
            if f.trap in settled
            else f
            for f in findings
        ]
    parameter = next(iter(inner.parameters()), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    bare = loss is None or isinstance(loss, Objective)
    together = chunk == "batch" or bool(policies - {"eval"})
    seen, batches = data_checks.look(data, bare, device, together=together)
    findings += seen
    # What stands in the way of a trial; other findings do not, because it has settings of its own.
    blocking = {
        "uninitialised parameters", "nothing to differentiate", "mixed dtypes", "half precision",
        "several devices", "NaN in parameters", "NaN in data",
    }  # fmt: skip
    stopped = any(finding.open and finding.trap in blocking for finding in findings)
    if batches is not None and not stopped:
        options = {"select": select, "dtype": dtype, "count": count, "reduction": reduction}
        findings += trial.look(inner, loss, batches, policies, chunk, options)
    return report(findings)
