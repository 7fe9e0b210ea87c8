"""What can be seen of the data: will every product see the same, and each sample once?"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from curvlab.batches import Batches, freeze, read, tensors
from curvlab.doctor.report import Finding


def look(data: Any, bare: bool, device: torch.device) -> tuple[list[Finding], Batches | None]:
    """Findings about the data, and the data frozen (``None`` if they cannot be read)."""
    findings: list[Finding] = []
    if isinstance(data, DataLoader) and data.drop_last:
        findings.append(
            Finding(
                "dropped samples",
                "note",
                "the DataLoader has drop_last=True: samples of a short last batch are left out",
                "drop_last=False: short batches are weighed by their samples",
                "no",
            )
        )
    batches: Batches | None = None
    try:
        batches = read(data, bare=bare)
    except (TypeError, ValueError) as error:
        findings.append(_unreadable(str(error)))
        try:
            batches = freeze(data, bare=bare)  # to look further
        except (TypeError, ValueError):
            return findings, None
    findings += _contents(batches, device)
    return findings, batches


def _unreadable(message: str) -> Finding:
    changing = "shuffles" in message or "read again" in message
    return Finding(
        "changing data" if changing else "unusable data",
        "wrong",
        message,
        "shuffle=False and no augmentation, or curvlab.freeze(loader) to take one pass as the data"
        if changing
        else "pass (inputs, targets), a list of batches, a dict or a DataLoader",
        "refused",
    )


def _contents(batches: Batches, device: torch.device) -> Iterator[Finding]:
    for sizes in batches.sizes:
        if sizes is None:
            yield Finding(
                "samples that cannot be counted",
                "note",
                "a batch has no common first dimension: it is never cut",
                "count=, a function of a batch, says how its mean is weighed",
                "yes" if len(batches) == 1 else "refused",
            )
        elif len(set(sizes)) > 1:
            yield Finding(
                "partial batches",
                "note",
                f"batches have {min(sizes)} to {max(sizes)} samples: the mean of their means would "
                "weigh the short ones too much",
                "nothing: the mean is over samples",
                "yes",
            )
    everything = [tensor for batch in batches.joined for tensor in tensors(batch)]
    floats = [tensor for tensor in everything if tensor.is_floating_point()]
    if not all(bool(tensor.isfinite().all()) for tensor in floats):
        yield Finding(
            "NaN in data", "wrong", "a batch holds NaN or infinity", "drop those samples", "refused"
        )
    elsewhere = {str(tensor.device) for tensor in everything if tensor.device != device}
    if elsewhere:
        yield Finding(
            "data on another device",
            "slow",
            f"data are on {', '.join(sorted(elsewhere))}, the model on {device}",
            "nothing: data are moved once, when the operator is made",
            "yes",
        )
