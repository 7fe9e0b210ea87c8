"""Thin adapters to other tools, one module each; a tool that is not installed is left out.

The ``peers`` extra installs them. They ask for torchvision, whose newest build would bring another
torch: install with a constraint, ``pip install -c constraints.txt curvlab[peers]`` where
``constraints.txt`` holds the torch version in use.
"""

import importlib
from importlib import util
from types import ModuleType

from torch import nn

from curvlab.bench.timing import version_of

NAMES = {  # adapter -> what has to be importable
    "curvlinops": "curvlinops",
    "hessian_eigenthings": "hessian_eigenthings",
    "py_hessian": "pyhessian",
    "jax_products": "jax",
    "kept_graph": "torch",
}

DISTRIBUTIONS = (
    "curvlinops-for-pytorch",
    "hessian-eigenthings",
    "PyHessian",
    "jax",
    "scipy",
    "primme",
)


def summary() -> str:
    """Which other tools are here, with their versions, and which are not."""
    versions = {name: version_of(name) for name in DISTRIBUTIONS}
    found = [f"{name} {version}" for name, version in versions.items() if version]
    absent = [name for name, version in versions.items() if not version]
    words = f"peers: {', '.join(found) or 'none'}"
    return f"{words}; not installed: {', '.join(absent)}" if absent else words


def absent() -> list[str]:
    """Tools with an adapter that are not installed."""
    return [module for module in NAMES.values() if not util.find_spec(module)]


def installed(model: nn.Module, kind: str = "hessian") -> list[ModuleType]:
    """The adapters whose tool can be imported here, for a model and a kind of product.

    Each has ``NAME`` and ``DISTRIBUTION`` (for tables and for pip), ``BLOCKS`` (whether vectors in
    a block share work), if it cannot do every model ``fits(model)``, and builders ``hessian(model,
    loss, batches)`` and, if it has one, ``gauss_newton(...)`` that return a product ``(b, n) ->
    (b, n)``. One with an eigensolver of its own has ``eigenpairs(model, loss, batches, k)``, a
    function of the effort, and ``efforts(k)``, the first its default.
    """
    found = []
    for name, module in NAMES.items():
        if util.find_spec(module):
            adapter = importlib.import_module(f"{__name__}.{name}")
            fits = not hasattr(adapter, "fits") or adapter.fits(model)
            if fits and hasattr(adapter, kind):
                found.append(adapter)
    return found
