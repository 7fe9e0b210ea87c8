"""What can be measured, each by a module of its own, and how it is called at each size.

``small`` takes seconds and shows that everything works; its rows carry other names than those the
targets measure. ``standard`` measures what the targets need, with as few contenders and
rounds as that needs, in about a quarter of an hour for all subjects on two cores. ``full`` measures
everything.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Size = Literal["small", "standard", "full"]
SIZES: tuple[Size, ...] = ("small", "standard", "full")


@dataclass(frozen=True, slots=True)
class Subject:
    """A module of benchmarks.

    Attributes:
        what: One line.
        arguments: Of the module, by size; a size that is missing is not measured.
        seconds: About how long that takes on two cores at 2.8 GHz.
        folder: Whether ``--out`` is a folder, in which the rows are ``<name>.csv``.
    """

    what: str
    arguments: Mapping[Size, tuple[str, ...]]
    seconds: Mapping[Size, int]
    folder: bool = False


FULL = ("--size", "full")
SMALL = ("--size", "small")
# in this order: if time runs out, what no target needs goes first
SUBJECTS: dict[str, Subject] = {
    "products": Subject(
        "Hessian and Gauss-Newton products: every engine and peer, three networks",
        {
            "small": (*SMALL, "--rounds", "3"),
            "standard": (*FULL, "--rounds", "3", "--only", "auto", "rebuilt", "mlp,"),
            "full": FULL,
        },
        {"small": 15, "standard": 150, "full": 900},
    ),
    "dense_hessian": Subject(
        "the dense Hessian of an MLP against vmapped jvp(grad)",
        {
            "small": (*SMALL, "--rounds", "1"),
            "standard": (*FULL, "--rounds", "1"),
            "full": FULL,
        },
        {"small": 5, "standard": 30, "full": 60},
    ),
    "conformance": Subject(
        "eigensolvers on prescribed spectra: products, and who is silently wrong",
        {"small": SMALL, "standard": FULL, "full": FULL},
        {"small": 5, "standard": 25, "full": 25},
    ),
    "eigensolvers": Subject(
        "eigensolvers on trained networks to the same residual, peers included",
        {
            "small": (*SMALL, "--rounds", "1", "--operators", "outliers", "mlp"),
            "standard": (
                *FULL,
                "--rounds",
                "2",
                "--threads",
                "2/1",  # so that no two pools of threads spin; full tries others too
                "--operators",
                "mlp",
                "resnet",
                "--only",
                "lanczos",
                "scipy eigsh",
                "deflated",
            ),
            "full": (*FULL, "--curve"),
        },
        {"small": 30, "standard": 165, "full": 3600},
        folder=True,
    ),
    "orthogonalisation": Subject(
        "what an eigensolver spends outside the operator",
        {
            "small": (*SMALL, "--rounds", "2"),
            "standard": (*FULL, "--rounds", "3"),
            "full": FULL,
        },
        {"small": 5, "standard": 60, "full": 90},
    ),
    "append": Subject(
        "adding vectors to the memory: orthonormality and cost",
        {"small": SMALL, "standard": FULL, "full": FULL},
        {"small": 5, "standard": 30, "full": 30},
    ),
    "projection": Subject(
        "gradient projection: dtypes, tiers, layouts, styles of public code",
        {"small": SMALL, "standard": ("--size", "standard"), "full": FULL},
        {"small": 15, "standard": 120, "full": 900},
        folder=True,
    ),
    "learners": Subject(
        "a training step of every learner at 1 and 5 seeds against a naive loop",
        {
            "small": ("--seeds", "2", "--rounds", "3", "--only", "SGD-dagger, 20"),
            "standard": (
                "--rounds",
                "7",
                "--only",
                "SGD",
                "OGD-GTL eps=.01",
                "OGD-GTL eps=.001, 1",
            ),
            "full": (),
        },
        {"small": 15, "standard": 100, "full": 300},
    ),
    "energy": Subject(
        "choosing k by spectral energy against the whole eigendecomposition",
        {"small": SMALL, "standard": FULL, "full": (*FULL, "--whole")},
        {"small": 15, "standard": 55, "full": 900},
    ),
    "learner_networks": Subject(
        "the projection beside a training step of the ResNet and the ViT",
        {
            "small": (*SMALL, "--rows", "5", "--rounds", "2"),
            "standard": (*FULL, "--rows", "20", "--dtype", "float32"),
            "full": (*FULL, "--networks", "resnet", "vit"),
        },
        {"small": 5, "standard": 20, "full": 120},
    ),
    "protection": Subject(
        "AdamW's step on a GPT, plain and protected by layer bases",
        {
            "small": (*SMALL, "--rounds", "2"),
            "full": (*FULL, "--rounds", "7"),
        },
        {"small": 5, "full": 120},
    ),
    "budget": Subject(
        "whether products keep to their memory budget",
        {
            "small": ("--networks", "resnet", "--samples", "24", "--budgets", "0.3"),
            "full": ("--samples", "1000"),
        },
        {"small": 15, "full": 1200},
    ),
    "distributed": Subject(
        "bytes, messages and memory of a product, a projection and a step over several ranks",
        {
            "small": ("--ranks", "1", "2", "--samples", "64", "--rows", "8", "--repeat", "2"),
            "standard": ("--ranks", "1", "2"),
            "full": ("--ranks", "1", "2", "4", "8"),
        },
        {"small": 15, "standard": 25, "full": 90},
    ),
    "growth": Subject(
        "cost against P, N, m, k and tasks, with fitted exponents",
        {"small": (*SMALL, "--rounds", "3"), "full": FULL},
        {"small": 20, "full": 240},
    ),
}


def command(name: str, size: Size, out: str) -> list[str]:
    """The arguments of ``python -m`` that measure a subject and leave its rows under ``out``."""
    subject = SUBJECTS[name]
    target = out if subject.folder else f"{out}/{name}.csv"
    return [f"benchmarks.{name}", *subject.arguments[size], "--out", target]
