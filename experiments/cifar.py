"""What the CIFAR labels share: two networks, SGD and SGD-dagger with k eigenvectors, accuracies.

Choices that the paper leaves open: BatchNorm's statistics are those of the first task (forgetting
would leak through them otherwise); no augmentation, no normalisation; rates decay by 0.1.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from experiments.choices import Algorithm
from experiments.experiment import BySeed
from experiments.rotated import frozen, lower_rows, square
from experiments.shelf import Shelf, Training
from experiments.tables import Metrics
from experiments.verdicts import first_reason, unlearned


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
# A quarter of the time on a processor with bfloat16; the Hessian's samples are a fifth, and k = 20,
# whose eigensolves take twice as long as those of k = 10, is left to the full size.
VIT_HALF = Network(
    "ViT", replace(VIT_10.training, samples=200, autocast="bfloat16"), ks=(10,)
)  # fmt: skip
# The paper's network on a tenth of its images: hours of one core, nearly all of it eigensolves.
# The later rate times the steps is the paper's, 0.001 x 1,000 = 0.01 x 100.
VIT_TENTH = Network("ViT", Training(
    "split_cifar10", "vit", rates="{0.1, 0.01}", epochs="{14/20, 1}", train=1000, test=500,
    samples=100,
), ks=(10,))  # fmt: skip
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
                "frozen": frozen(shelf, training, run),
                "unconverged": sum(
                    note["k"] - note["converged"] for note in run.notes if "converged" in note
                ),
            }
    return metrics


def guard(metrics: BySeed, rows: Iterable[str]) -> str:
    """Why forgetting in ``rows`` would mean nothing; empty where all learned every task."""
    return first_reason(*(unlearned(row, [one[row] for one in metrics.values()]) for row in rows))


def by_seed(metrics: BySeed, row: str, value: Callable[[Tensor], Tensor]) -> dict[int, float]:
    """A number of every seed's accuracy matrix ``(T, T)``."""
    return {seed: float(value(square(one[row]["accuracy"]))) for seed, one in metrics.items()}


def caption(networks: Sequence[Network], metrics: BySeed) -> str:
    """What a table's title says of the networks and their training."""
    first = next(iter(metrics.values()))
    return "; ".join(
        f"{one.name} of {first[next(iter(one.rows()))]['parameters']:,} parameters, "
        f"{one.training.train or 'all'} {'embedded images' if one.training.embedded else 'images'} "
        f"a task, rates {one.training.rates}, epochs {one.training.epochs}" + _halved(one.training)
        for one in networks
    )


def _halved(training: Training) -> str:
    """What size ``half`` does otherwise than the paper."""
    if training.autocast is None:
        return ""
    return f", trained in {training.autocast}, Hessians of {training.samples} samples"


def accuracies(metrics: BySeed, row: str) -> Tensor:
    """The matrices ``(S, T, T)`` of a row."""
    return torch.stack([square(entry[row]["accuracy"]) for entry in metrics.values()])
