"""The perturbation score of the larger networks (fig:PTBRN: ResNet, fig:PTBvit: ViT).

Measures, claims and figure are those of :mod:`experiments.perturbation`. The paper's ResNet learns
Split CIFAR-100; the smaller sizes here take Split CIFAR-10.
"""

from experiments import cifar10
from experiments.cifar import RESNET_10, RESNET_100, VIT_10, VIT_HALF
from experiments.perturbation import Config, experiment
from experiments.shelf import Training
from experiments.verdicts import Quote

EXTENDS = {
    network: Quote("Appendix C", "The observations from our perturbation analysis on Rotated-MNIST "
                   "largely extend to these latter settings", network)
    for network in ("ResNet", "ViT")
}  # fmt: skip


def _quick(training: Training) -> Config:
    return Config(training, tasks=2, directions=5, random=5, per_decade=1, tol=1e-2)


def _scaled(training: Training) -> Config:
    return Config(training, per_decade=2, tol=1e-2)


RESNET = experiment(
    "fig:PTBRN",
    "perturbation score around the solutions of Split CIFAR, ResNet, in loss and in error rate",
    "cifar100",
    {
        "demo": _quick(cifar10.DEMO.networks[0].training),
        "scaled": _scaled(cifar10.SCALED.networks[0].training),
        # Split CIFAR-10 in place of CIFAR-100, whose images are not available here
        "few": _scaled(RESNET_10.training),
        "full": Config(RESNET_100.training),
    },
    {
        "demo": "1 min",
        "scaled": "10 min on 2 cores",
        "few": "about 40 min a seed on one core, after Table:forg-C10-extended",
        "full": "about 2 h on one A100, --device cuda (estimate, not run)",
    },
    (EXTENDS["ResNet"],),
)
VIT = experiment(
    "fig:PTBvit",
    "perturbation score around the solutions of Split CIFAR-10, ViT, in loss and in error rate",
    "cifar10",
    {
        "demo": _quick(cifar10.DEMO.networks[1].training),
        "scaled": _scaled(cifar10.SCALED.networks[1].training),
        "half": _scaled(VIT_HALF.training),
        "full": Config(VIT_10.training),
    },
    {
        "demo": "1 min",
        "scaled": "10 min on 2 cores",
        "half": "about 4 h a seed on one core, after Table:forg-C10-extended (estimate, not run)",
        "full": "about 4 h on one A100, --device cuda (estimate, not run)",
    },
    (EXTENDS["ViT"],),
)
