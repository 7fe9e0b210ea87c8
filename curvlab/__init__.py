"""Certified curvature for PyTorch: operators, eigensolvers, memory bases, continual learning.

``import curvlab`` loads nothing: torch alone takes two seconds, and ``curvlab --help`` has no use
for it. The names of :mod:`curvlab.public` are loaded when one of them is first used.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from curvlab.public import *  # noqa: F403

__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    if name.startswith("__") and name != "__all__":
        raise AttributeError(f"module 'curvlab' has no attribute {name!r}")
    from importlib import import_module
    from importlib.util import find_spec

    public = import_module("curvlab.public")
    names = [one for one in vars(public) if not one.startswith("_")]
    if name == "__all__":
        return [*names, "__version__"]
    if name not in names:
        if not name.startswith("_") and find_spec(f"curvlab.{name}") is not None:
            return import_module(f"curvlab.{name}")  # curvlab.losses, curvlab.plots
        raise AttributeError(f"module 'curvlab' has no attribute {name!r}")
    value = getattr(public, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})


def _function(name: str) -> property:
    """The public function of a name that is also a submodule's.

    Loading a submodule sets it as an attribute of its package; here that must not happen. It stays
    reachable by ``from curvlab.probe import ...``.
    """

    def get(package: ModuleType) -> Any:
        del package
        from curvlab import public

        return getattr(public, name)

    return property(get, lambda package, module: None)  # noqa: ARG005


class _Package(ModuleType):
    """``curvlab.probe`` is the function, though a module of that name is loaded as well."""

    doctor, plan, probe = (_function(name) for name in ("doctor", "plan", "probe"))


sys.modules[__name__].__class__ = _Package
