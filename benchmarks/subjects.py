"""What can be measured, each by a module of its own, and how it is called at each size.

``small`` takes seconds and shows that everything works; its rows carry other names than those the
targets measure. ``standard`` measures what most targets need, with as few contenders and rounds as
that needs, in about twenty minutes for all subjects on two cores. ``full`` measures everything: the
ViT's solves, memory budgets and large models are only there.
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
# Most important first: what does not fit into the time is left out from the end.
SUBJECTS: dict[str, Subject] = {
    "eigensolvers": Subject(
        "eigensolvers on trained networks to the same residual, peers included",
        {
            "small": (*SMALL, "--rounds", "1", "--operators", "outliers", "mlp"),
            "standard": (
                *FULL,
                "--rounds",
                "2",
                "--threads",
                "2/1",
                "1/1",  # full tries 2/2 too, where two pools of threads spin
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
        {"small": 30, "standard": 300, "full": 3600},
        folder=True,
    ),
    "products": Subject(
        "Hessian and Gauss-Newton products: every engine and peer, three networks",
        {
            "small": (*SMALL, "--rounds", "3"),
            "standard": (*FULL, "--rounds", "3", "--only", "auto", "rebuilt", "mlp,"),
            "full": FULL,
        },
        {"small": 15, "standard": 200, "full": 900},
    ),
    "projection": Subject(
        "gradient projection: dtypes, tiers, layouts, styles of public code",
        {
            "small": (*SMALL, "--alone"),
            "standard": ("--size", "standard", "--alone"),
            "full": (*FULL, "--alone"),
        },
        {"small": 15, "standard": 150, "full": 1200},
        folder=True,
    ),
    "append": Subject(
        "adding vectors to the memory: orthonormality and cost; norms",
        {"small": SMALL, "standard": FULL, "full": FULL},
        {"small": 5, "standard": 40, "full": 40},
    ),
    "energy": Subject(
        "choosing k by spectral energy against the dense matrix",
        {"small": SMALL, "standard": FULL, "full": (*FULL, "--whole")},
        {"small": 15, "standard": 75, "full": 900},
    ),
    "learners": Subject(
        "a training step of every learner at 1 and 5 seeds against a naive loop and a stack",
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
        {"small": 15, "standard": 110, "full": 330},
    ),
    "conformance": Subject(
        "eigensolvers on prescribed spectra: products, and who is silently wrong",
        {"small": SMALL, "standard": FULL, "full": FULL},
        {"small": 5, "standard": 25, "full": 25},
    ),
    "orthogonalisation": Subject(
        "what an eigensolver spends outside the operator",
        {"small": (*SMALL, "--rounds", "2"), "standard": (*FULL, "--rounds", "3"), "full": FULL},
        {"small": 5, "standard": 60, "full": 90},
    ),
    "protection": Subject(
        "AdamW's step on a GPT, plain and protected by layer bases",
        {
            "small": (*SMALL, "--rounds", "2"),
            "standard": (*FULL, "--rounds", "3"),
            "full": (*FULL, "--rounds", "7"),
        },
        {"small": 5, "standard": 60, "full": 120},
    ),
    "dense_hessian": Subject(
        "the dense Hessian of an MLP against vmapped jvp(grad)",
        {"small": (*SMALL, "--rounds", "1"), "standard": (*FULL, "--rounds", "1"), "full": FULL},
        {"small": 5, "standard": 30, "full": 60},
    ),
    "kernels": Subject(
        "GPU kernels by their compiled code: is memory the limit? a model",
        {"small": SMALL, "standard": FULL, "full": FULL},
        {"small": 5, "standard": 10, "full": 10},
    ),
    "distributed": Subject(
        "bytes, messages and memory of a product, a projection and a step over several ranks",
        {
            "small": ("--ranks", "1", "2", "--samples", "64", "--rows", "8", "--repeat", "2"),
            "standard": ("--ranks", "1", "2", "4"),
            "full": ("--ranks", "1", "2", "4", "8"),
        },
        {"small": 15, "standard": 40, "full": 90},
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
    "growth": Subject(
        "cost against P, N, m, k and tasks, with fitted exponents",
        {"small": (*SMALL, "--rounds", "3"), "standard": (*FULL, "--rounds", "3"), "full": FULL},
        {"small": 20, "standard": 150, "full": 240},
    ),
    "budget": Subject(
        "whether products keep to their memory budget",
        {
            "small": ("--networks", "resnet", "--samples", "24", "--budgets", "0.3"),
            "full": ("--samples", "1000"),
        },
        {"small": 15, "full": 1200},
    ),
    "large": Subject(
        "models of 12 to 355 million parameters within a limit, planned first",
        {"small": SMALL, "full": FULL},
        {"small": 30, "full": 3600},
    ),
}


def command(name: str, size: Size, out: str) -> list[str]:
    """The arguments of ``python -m`` that measure a subject and leave its rows under ``out``."""
    subject = SUBJECTS[name]
    target = out if subject.folder else f"{out}/{name}.csv"
    return [f"benchmarks.{name}", *subject.arguments[size], "--out", target]
