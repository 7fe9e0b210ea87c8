"""The verbs: one table, each with what it does, who does it, its arguments and examples."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from curvlab.cli import arguments as add

MODEL = "--model curvlab.nets:mlp --data curvlab.cli.demo:digits"


@dataclass(frozen=True, slots=True)
class Verb:
    """One subcommand.

    Attributes:
        summary: One line for the table.
        home: ``module:function`` of what runs; loaded when it is needed.
        arguments: Adds its arguments to a parser.
        examples: Commands, for ``--help``.
    """

    summary: str
    home: str
    arguments: Callable[[ArgumentParser], None]
    examples: tuple[str, ...]

    def load(self) -> Callable[[Namespace], int]:
        """The function that runs the verb and returns the exit code."""
        module, _, function = self.home.partition(":")
        found: Callable[[Namespace], int] = getattr(import_module(module), function)
        return found


VERBS: dict[str, Verb] = {
    "eig": Verb(
        "top eigenpairs of a model's curvature, with proof: file, table, picture",
        "curvlab.cli.spectrum:eig",
        add.eig,
        (
            f"curvlab eig {MODEL} --k 5",
            "curvlab eig --model nets.py:make --checkpoint model.safetensors --data nets.py:batches"
            " --k 20 --curvature ggn --out top.safetensors --picture top.png top.svg",
            "curvlab eig --model nets.py:make --data nets.py:batches --select 'head.*' --json",
        ),
    ),
    "density": Verb(
        "spectral density by stochastic Lanczos quadrature",
        "curvlab.cli.spectrum:density",
        add.density,
        (f"curvlab density {MODEL} --probes 4 --steps 40 --picture density.png",),
    ),
    "trace": Verb(
        "trace of the curvature with its standard error",
        "curvlab.cli.spectrum:trace",
        add.trace,
        (f"curvlab trace {MODEL} --probes 48",),
    ),
    "layers": Verb(
        "top eigenvalues of each layer: table, picture",
        "curvlab.cli.spectrum:layers",
        add.layers,
        (f"curvlab layers {MODEL} --k 3 --picture layers.png",),
    ),
    "compare": Verb(
        "overlap of two saved bases or eigenpairs",
        "curvlab.cli.results:compare",
        add.compare,
        ("curvlab compare before.safetensors after.safetensors --picture overlap.png",),
    ),
    "plot": Verb(
        "the picture of any saved result",
        "curvlab.cli.results:plot",
        add.plot,
        ("curvlab plot top.safetensors --picture top.png top.svg",),
    ),
    "doctor": Verb(
        "what would make curvature of this model wrong or slow, and the cure",
        "curvlab.cli.advice:doctor",
        add.doctor,
        (f"curvlab doctor {MODEL}", "curvlab doctor --model nets.py:make --data nets.py:loader"),
    ),
    "plan": Verb(
        "memory, products and time before you start; what fits",
        "curvlab.cli.advice:plan",
        add.plan,
        (
            f"curvlab plan {MODEL} --k 20 --memory 8G",
            "curvlab plan --model nets.py:make --data nets.py:batches --counted --machine a100"
            " --ranks 8 --samples 10000",
        ),
    ),
    "profile": Verb(
        "times of product engines, projections and protected steps",
        "curvlab.cli.profile:profile",
        add.profile,
        (f"curvlab profile {MODEL} --rows 20",),
    ),
    "bench eig": Verb(
        "compare eigensolvers, also your own, on your model: table, picture, leaderboard",
        "curvlab.cli.bench:eig",
        add.bench_eig,
        (
            f"curvlab bench eig {MODEL} --k 5 --picture solvers.png",
            "curvlab bench eig --model nets.py:make --data nets.py:loader --k 20"
            " --solver mine.py:solve --out leaderboard.jsonl",
        ),
    ),
    "bench merge": Verb(
        "merge leaderboards of curvlab bench eig",
        "curvlab.cli.bench:merge",
        add.bench_merge,
        ("curvlab bench merge mine.jsonl yours.jsonl --out both.jsonl --picture both.png",),
    ),
    "demo": Verb(
        "learn three tasks with and without the projection: spectrum, table, pictures",
        "curvlab.cli.demo:demo",
        add.demo,
        ("curvlab demo --out demo",),
    ),
    "rerun": Verb(
        "compute a saved result again and compare; runs what the file names",
        "curvlab.cli.results:rerun",
        add.rerun,
        ("curvlab rerun top.safetensors",),
    ),
    "version": Verb(
        "versions of curvlab and what it runs on",
        "curvlab.cli.advice:version",
        add.version,
        ("curvlab version --json",),
    ),
}
