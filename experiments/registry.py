"""Every experiment, in the order of the paper; a new module is added here."""

from difflib import get_close_matches

from experiments import (
    assumptions,
    cartoon,
    cifar10,
    cifar100,
    comparison,
    energy,
    extension,
    extension_cifar10,
    fine_tuning,
    half_precision,
    long_stream,
    low_rank,
    other_architectures,
    perturbation,
    perturbation_networks,
    perturbation_sizes,
    random_matrices,
    ranks,
    recursion,
    taylor,
    violation,
)
from experiments.experiment import Experiment

EXPERIMENTS: tuple[Experiment, ...] = (
    cartoon.EXPERIMENT,
    taylor.EXPERIMENT,
    recursion.EXPERIMENT,
    perturbation_sizes.EXPERIMENT,
    perturbation.EXPERIMENT,
    perturbation_networks.RESNET,
    perturbation_networks.VIT,
    comparison.EXPERIMENT,
    violation.EXPERIMENT,
    assumptions.EXPERIMENT,
    random_matrices.EXPERIMENT,
    other_architectures.EXPERIMENT,
    cifar10.EXPERIMENT,
    cifar100.EXPERIMENT,
    low_rank.EXPERIMENT,
    energy.EXPERIMENT,
    ranks.EXPERIMENT,
    extension.EXPERIMENT,
    extension_cifar10.EXPERIMENT,
    long_stream.EXPERIMENT,
    fine_tuning.EXPERIMENT,
    half_precision.EXPERIMENT,
)


def find(label: str) -> Experiment:
    """The experiment that answers ``label``."""
    by_label = {name: one for one in EXPERIMENTS for name in one.labels}
    if label in by_label:
        return by_label[label]
    lower = {name.lower(): name for name in by_label}
    near = get_close_matches(label.lower(), lower, n=1, cutoff=0.4)
    hint = f" Did you mean {lower[near[0]]!r}?" if near else ""
    raise ValueError(
        f"no experiment answers {label!r}.{hint} `python -m experiments list` shows all labels"
    )
