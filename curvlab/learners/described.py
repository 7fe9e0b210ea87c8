"""Descriptions of functions and networks that can be saved with a run and compared."""

from collections.abc import Callable
from dataclasses import asdict, is_dataclass
from functools import partial
from hashlib import blake2b
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def described(function: Callable[..., Any]) -> Any:
    """A JSON-able description that differs when the function or one of its settings does.

    A frozen dataclass with ``__call__`` and a ``functools.partial`` are told apart by their
    settings; a function by its name, its code, its defaults and what it closes over.
    """
    if is_dataclass(function) and not isinstance(function, type):
        return {"name": _name(type(function)), **plain(asdict(function))}
    if isinstance(function, partial):
        given = {"given": plain(function.args), "named": plain(function.keywords)}
        return {"of": described(function.func), **given}
    code = getattr(function, "__code__", None)
    if code is None:
        own = type(function) if not hasattr(function, "__qualname__") else function
        return {"name": _name(own), **plain(getattr(function, "__dict__", {}))}
    closed = [c.cell_contents for c in function.__closure__ or () if not _holds(c, function)]
    defaults = [plain(function.__defaults__), plain(function.__kwdefaults__)]
    found = {"name": _name(function), "code": (_digest(code), *defaults, plain(closed))}
    owner = getattr(function, "__self__", None)  # of a method: its settings
    return found if owner is None else {**found, "of": plain(getattr(owner, "__dict__", {}))}


def structure(model: nn.Module) -> dict[str, str]:
    """The class and plain settings of every module; the code of functions is not inspected."""
    return {name or "itself": _module(module) for name, module in model.named_modules()}


def _module(module: nn.Module) -> str:
    kept = {}
    for name, value in vars(module).items():
        if name == "training" or name.startswith("_"):
            continue
        parts = value if isinstance(value, tuple) else (value,)
        if all(isinstance(one, bool | int | float | str | torch.dtype | None) for one in parts):
            kept[name] = value
        elif callable(value):
            kept[name] = getattr(value, "__qualname__", type(value).__qualname__)
    given = [f"{name}={kept[name]!r}" for name in sorted(kept)]
    return f"{type(module).__name__}({', '.join(filter(None, [module.extra_repr(), *given]))})"


def _holds(cell: Any, function: Any) -> bool:
    """Whether a function closes over itself (recursion), or over a name not yet assigned."""
    try:
        return cell.cell_contents is function
    except ValueError:
        return True


def _name(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"


def _digest(code: CodeType) -> str:
    constants = [
        _digest(one)
        if isinstance(one, CodeType)
        else sorted(map(repr, one))
        if isinstance(one, frozenset)  # its order changes by process
        else one
        for one in code.co_consts
    ]
    text = f"{code.co_code!r}{constants!r}{code.co_names!r}"
    return blake2b(text.encode(), digest_size=6).hexdigest()


def plain(value: Any) -> Any:
    """As JSON has it: lists, dictionaries, numbers and strings; functions as :func:`described`."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, Tensor | np.ndarray | np.generic):
        whole = value if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
        held = whole.detach().cpu()
        raw = held.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        text = f"{held.dtype}{tuple(held.shape)}".encode()
        return blake2b(text + raw, digest_size=6).hexdigest()
    if isinstance(value, torch.dtype):
        return str(value)
    return described(value) if callable(value) else f"a {type(value).__name__}"
