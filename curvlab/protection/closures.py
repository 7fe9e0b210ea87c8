"""Closures that give projected gradients: what LBFGS, or any optimizer given one, works with."""

from collections.abc import Callable
from typing import Any


def with_closure(arguments: Any, options: Any, project: Callable[[], None]) -> Any:
    """Arguments of ``optimizer.step`` whose closure ends with ``project()``; ``None`` without one.

    What a hook before a step returns are its new arguments; the first is the optimizer itself.
    """
    own, *rest = arguments
    closure = rest[0] if rest else options.get("closure")
    if closure is None:
        return None

    def projected() -> Any:
        found = closure()
        project()
        return found

    if rest:
        return (own, projected, *rest[1:]), options
    return arguments, {**options, "closure": projected}
