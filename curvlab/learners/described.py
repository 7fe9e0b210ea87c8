"""Functions given to ``learn``, in words that can be kept with a run and compared."""

from collections.abc import Callable
from dataclasses import asdict, is_dataclass
from functools import partial
from hashlib import blake2b
from types import CodeType
from typing import Any


def described(function: Callable[..., Any]) -> Any:
    """A JSON-able description that differs when the function or one of its settings does.

    A frozen dataclass with ``__call__`` and a ``functools.partial`` are told apart by their
    settings; a function by its name, its code, its defaults and what it closes over.
    """
    if is_dataclass(function) and not isinstance(function, type):
        return {"name": _name(type(function)), **_plain(asdict(function))}
    if isinstance(function, partial):
        given = {"given": _plain(function.args), "named": _plain(function.keywords)}
        return {"of": described(function.func), **given}
    code = getattr(function, "__code__", None)
    if code is None:
        own = type(function) if not hasattr(function, "__qualname__") else function
        return {"name": _name(own), **_plain(getattr(function, "__dict__", {}))}
    closed = [cell.cell_contents for cell in function.__closure__ or ()]
    inside = (_digest(code), _plain(function.__defaults__), _plain(closed))
    return {"name": _name(function), "code": inside}


def _name(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"


def _digest(code: CodeType) -> str:
    constants = [_digest(one) if isinstance(one, CodeType) else one for one in code.co_consts]
    text = f"{code.co_code!r}{constants!r}{code.co_names!r}"
    return blake2b(text.encode(), digest_size=6).hexdigest()


def _plain(value: Any) -> Any:
    """Lists, dictionaries, numbers and strings; functions as themselves, others by their type."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return described(value) if callable(value) else f"a {type(value).__name__}"
