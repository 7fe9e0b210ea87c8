"""Thin adapters to other tools, one module each; a tool that is not installed is left out.

The ``peers`` extra installs them. They ask for torchvision, whose newest build would bring another
torch: install with a constraint, ``pip install -c constraints.txt curvlab[peers]`` where
``constraints.txt`` holds the torch version in use.
"""

import importlib
from importlib import util
from types import ModuleType

from benchmarks.measure import version_of

NAMES = {  # adapter -> what has to be importable
    "curvlinops": "curvlinops",
    "hessian_eigenthings": "hessian_eigenthings",
    "py_hessian": "pyhessian",
    "jax_products": "jax",
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


def installed(network: str | None = None, kind: str = "hessian") -> list[ModuleType]:
    """The adapters whose tool can be imported here, for a network's name and a kind of product.

    Each has ``DISTRIBUTION`` (its name for pip), ``BLOCKS`` (whether vectors in a block share
    work), ``NETWORKS`` (those it can do, or None for any) and builders ``hessian(model, loss,
    inputs, targets)`` and, if it has one, ``gauss_newton(...)`` that return a product
    ``(b, n) -> (b, n)``. One with an eigensolver of its own has ``eigenpairs(model, loss, inputs,
    targets, k)``: a solver, and the efforts it may be run with, the first its default.
    """
    found = []
    for name, module in NAMES.items():
        if util.find_spec(module):
            adapter = importlib.import_module(f"{__name__}.{name}")
            fits = network is None or adapter.NETWORKS is None or network in adapter.NETWORKS
            if fits and hasattr(adapter, kind):
                found.append(adapter)
    return found
