"""Thin adapters to other tools, one module each; a tool that is not installed is left out.

The ``peers`` extra installs them. They ask for torchvision, whose newest build would bring another
torch: install with a constraint, ``pip install -c constraints.txt curvlab[peers]`` where
``constraints.txt`` holds the torch version in use.
"""

import importlib
from importlib import util
from types import ModuleType

NAMES = ("curvlinops", "hessian_eigenthings")


def installed() -> list[ModuleType]:
    """The adapters whose tool can be imported here.

    Each has ``DISTRIBUTION`` (its name for pip), ``BLOCKS`` (whether vectors in a block share work)
    and builders ``hessian(model, loss, inputs, targets)`` and ``gauss_newton(...)`` that return a
    product ``(b, n) -> (b, n)``.
    """
    return [importlib.import_module(f"{__name__}.{name}") for name in NAMES if util.find_spec(name)]
