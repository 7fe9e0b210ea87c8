"""What the CIFAR labels share: two networks, SGD and SGD-dagger with k eigenvectors, accuracies.

Choices that the paper leaves open: BatchNorm's statistics are those of the first task (forgetting
would leak through them otherwise); no augmentation, no normalisation; rates decay by 0.1.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from experiments.choices import Algorithm
from experiments.experiment import BySeed
from experiments.rotated import lower_rows, square
from experiments.shelf import Shelf, Training
from experiments.tables import Claim, Metrics, claim


@dataclass(frozen=True)
class Network:
    """A network in a table: its name, its training with plain SGD, the k of SGD-dagger."""

    name: str
    training: Training
    ks: tuple[int, ...] = (10, 20)

    def rows(self) -> dict[str, Training]:
        """The trainings by the name of their row."""
        rows = {f"{self.name}, SGD": self.training}
        for k in self.ks:
            dagger = Algorithm("SGD-dagger", k=k, first_k=max(self.ks))
            rows[f"{self.name}, SGD-dagger-{k}"] = replace(self.training, learner=dagger)
        return rows


def rows_of(networks: Iterable[Network]) -> dict[str, Training]:
    """The trainings of all networks by the name of their row."""
    return {row: training for network in networks for row, training in network.rows().items()}


# The paper's: batch 10, 1,000 samples for a Hessian, {rate, later rate}, {epochs, later epochs}.
RESNET_10 = Network("ResNet", Training(
    "split_cifar10", "resnet", rates="{0.1, 0.001}", epochs="{10/20, 1}", batchnorm="freeze",
))  # fmt: skip
VIT_10 = Network("ViT", Training(
    "split_cifar10", "vit", rates="{0.1, 0.001}", epochs="{10/20, 1}",
))  # fmt: skip
RESNET_100 = Network("ResNet", Training(
    "split_cifar100", "resnet", rates="{0.1, 0.001}", epochs="{30/60/70, 10}", batchnorm="freeze",
), ks=(10, 20, 40))  # fmt: skip
VIT_100 = Network("ViT", Training(
    "split_cifar100", "vit", rates="{0.1, 0.001}", epochs="{15/25, 5/10}",
))  # fmt: skip


def measure(networks: Sequence[Network], seeds: Sequence[int], shelf: Shelf) -> dict[int, Metrics]:
    """By row: test accuracies ``[t][o]``, o <= t; directions kept for the later tasks; P."""
    metrics: dict[int, Metrics] = {seed: {} for seed in seeds}
    for row, training in rows_of(networks).items():
        for run in shelf.runs(training, seeds):
            metrics[run.seed][row] = {
                "accuracy": lower_rows(run.test_accuracy),
                "directions": [note.get("directions", 0) for note in run.notes[:-1]],
                "parameters": run.initial.numel(),
            }
    return metrics


def caption(networks: Sequence[Network], metrics: BySeed) -> str:
    """What a table's title says of the networks and their training."""
    first = next(iter(metrics.values()))
    return "; ".join(
        f"{one.name} of {first[next(iter(one.rows()))]['parameters']:,} parameters, "
        f"{one.training.train or 'all'} {'embedded images' if one.training.embedded else 'images'} "
        f"a task, rates {one.training.rates}, epochs {one.training.epochs}"
        for one in networks
    )


def accuracies(metrics: BySeed, row: str) -> Tensor:
    """The matrices ``(S, T, T)`` of a row."""
    return torch.stack([square(entry[row]["accuracy"]) for entry in metrics.values()])


def ordered(
    text: str, by_row: Mapping[str, Tensor], rows: Sequence[str], *, rising: bool = False
) -> Claim:
    """The claim that a quantity falls strictly (or rises) from each of ``rows`` to the next.

    Args:
        text: The claim.
        by_row: The quantity of each seed, ``(S,)``, by row.
        rows: In the order in which the text names them. What is claimed of the means is also
            counted over the seeds: a difference of means between few seeds proves little.
    """
    values = [by_row[row] for row in rows]

    def before(first: Tensor, second: Tensor) -> Tensor:
        return first < second if rising else first > second

    found = claim(
        text,
        [float(value.mean()) for value in values],
        lambda *means: all(
            bool(before(a, b)) for a, b in pairwise(torch.tensor(means, dtype=torch.float64))
        ),
    )
    holds = torch.stack([before(a, b) for a, b in pairwise(values)]).all(0)
    return replace(found, measured=f"{found.measured}; in {int(holds.sum())} of {len(holds)} seeds")
