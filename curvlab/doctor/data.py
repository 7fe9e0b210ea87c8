"""What the data show: will every product use the same samples, each of them once?"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from curvlab.batches import Batches, freeze, read, tensors
from curvlab.doctor.report import Finding
from curvlab.loaders import IN_ORDER
from curvlab.refusals import Refusal, Trap


def look(
    data: Any, bare: bool, device: torch.device, *, together: bool
) -> tuple[list[Finding], Batches | None]:
    """Findings about the data, and the data frozen (``None`` if they cannot be read)."""
    findings: list[Finding] = []
    if isinstance(data, DataLoader) and data.drop_last:
        findings.append(
            Finding(
                "dropped samples",
                "the DataLoader has drop_last=True: samples of a short last batch are left out",
                "drop_last=False: short batches are weighed by their samples",
                handled="no",
            )
        )
    batches: Batches | None = None
    try:
        batches = read(data, bare=bare, together=together)
    except (TypeError, ValueError) as error:
        trap = error.trap if isinstance(error, Refusal) else Trap.UNUSABLE_DATA
        findings.append(
            Finding(trap.title, str(error), trap.cure, level="wrong", handled="refused")
        )
        try:
            batches = freeze(data, bare=bare)  # to look further
        except (TypeError, ValueError):
            return findings, None
    findings += _contents(batches, device)
    return findings, batches


def _contents(batches: Batches, device: torch.device) -> Iterator[Finding]:
    if batches.taken == IN_ORDER:
        yield Finding(
            "shuffling loader",
            "the DataLoader gives the same samples in another order each time",
            "none needed: they are read once, in the data set's own order, and kept",
        )
    for sizes in batches.sizes:
        if sizes is None:
            yield Finding(
                "samples that cannot be counted",
                "a batch has no common first dimension: it is never cut",
                "count=, a function of a batch, says how its mean is weighed",
                handled="yes" if len(batches) == 1 else "refused",
            )
        elif len(set(sizes)) > 1:
            yield Finding(
                "partial batches",
                f"batches have {min(sizes)} to {max(sizes)} samples: the mean of their means would "
                "weigh the short ones too much",
                "none needed: the mean is over samples",
            )
    everything = [tensor for batch in batches.joined for tensor in tensors(batch)]
    floats = [tensor for tensor in everything if tensor.is_floating_point()]
    if not all(bool(tensor.isfinite().all()) for tensor in floats):
        yield Finding(
            "NaN in data",
            "a batch holds NaN or infinity",
            "drop those samples",
            level="wrong",
            handled="refused",
        )
    elsewhere = {str(tensor.device) for tensor in everything if tensor.device != device}
    if elsewhere:
        yield Finding(
            "data on another device",
            f"data are on {', '.join(sorted(elsewhere))}, the model on {device}",
            "none needed: data are moved once, when the operator is made",
            level="slow",
        )
