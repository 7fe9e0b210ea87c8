"""What a file must contain, field by field, before anything is built from it.

A checksum tells damage; it does not tell a file that another program, another version or an editor
wrote. So every reader states the form of the facts and tensors that it needs, and a file that does
not fit is refused with its name and the first field that is wrong.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from curvlab.storage import StorageError

# A form is a type (float takes whole numbers too; bool is no number), FINITE, COUNT, None, a list
# of one form or of one for each element, a dictionary of them (others may be there too), a tuple of
# alternatives, or a frozenset of the texts that are allowed.
Form = Any
FINITE = "a finite number"
COUNT = "a whole number of at least 0"
# Of a tensor: its dtype (None is any float), then its extents; the same word is the same extent.
Shape = tuple[torch.dtype | int | str | None, ...]


def require_facts(path: str | Path, facts: Any, form: Mapping[str, Form]) -> dict[str, Any]:
    """``facts``, or :class:`StorageError` with the first that is not as ``form`` says."""
    if not isinstance(facts, dict):
        raise StorageError(f"{path} is damaged: its facts are {facts!r:.60}")
    for name, wanted in form.items():
        if name not in facts:
            raise StorageError(f"{path} is damaged: it lacks its {name!r}")
        if not fits(facts[name], wanted):
            raise StorageError(f"{path} is damaged: its {name!r} is {facts[name]!r:.60}")
    return facts


def require_tensors(
    path: str | Path,
    tensors: Mapping[str, Tensor],
    shapes: Mapping[str, Shape],
    *,
    finite: bool = True,
) -> dict[str, int]:
    """The extents by their names, or :class:`StorageError` with the first that is wrong.

    Args:
        finite: Whether NaN and infinity are wrong too.
    """
    extents: dict[str, int] = {}
    for name, (dtype, *wanted) in shapes.items():
        tensor = tensors.get(name)
        if tensor is None:
            raise StorageError(f"{path} is damaged: it lacks the tensor {name!r}")
        good = tensor.is_floating_point() if dtype is None else tensor.dtype == dtype
        good = good and tensor.dim() == len(wanted)
        for extent, have in zip(wanted, tensor.shape, strict=False):
            known = extents.setdefault(extent, have) if isinstance(extent, str) else extent
            good = good and known == have
        if not good:
            raise StorageError(
                f"{path} is damaged: its tensor {name!r} is {tensor.dtype} {tuple(tensor.shape)}"
            )
        if finite:
            require_finite(path, name, tensor)
    return extents


def require_finite(path: str | Path, name: str, tensor: Tensor) -> None:
    """Raise if the tensor holds NaN or infinity."""
    wide = tensor.float() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor
    if not bool(wide.isfinite().all()):
        raise StorageError(f"{path} is damaged: its tensor {name!r} holds NaN or infinity")


def fits(value: Any, form: Form) -> bool:
    """Whether ``value``, from JSON, has the form."""
    if isinstance(form, tuple):
        return any(fits(value, one) for one in form)
    if isinstance(form, list):
        if not isinstance(value, list) or (len(form) > 1 and len(value) != len(form)):
            return False
        forms = form * len(value) if len(form) == 1 else form
        return all(fits(one, wanted) for one, wanted in zip(value, forms, strict=True))
    if isinstance(form, dict):
        return isinstance(value, dict) and all(
            name in value and fits(value[name], one) for name, one in form.items()
        )
    if isinstance(form, frozenset):
        return isinstance(value, str) and value in form
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if form == COUNT:
        return number and isinstance(value, int) and 0 <= value < 2**63
    if form in (float, FINITE):
        usual = number and not (isinstance(value, int) and abs(value) > 2**63)
        return usual and (form is float or math.isfinite(value))
    if form is None or form is bool:
        return value is None if form is None else isinstance(value, bool)
    return isinstance(value, form)
