"""SGD-dagger on a ResNet and a ViT (tab:other-arch).

The table's CIFAR-10 column is headed E(5); its numbers are the mean of E_o(t) over all pairs
o <= t. Its CIFAR-100 column is E(20), divided by t. All of them stand here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from curvlab.metrics import Norm, accuracy_forgetting, average_forgetting, current_accuracy
from experiments import cifar10
from experiments.cifar import (
    RESNET_100,
    VIT_100,
    Network,
    accuracies,
    by_seed,
    caption,
    guard,
    measure,
    rows_of,
)
from experiments.experiment import BySeed, Experiment
from experiments.shelf import Shelf
from experiments.tables import Metrics, Table
from experiments.verdicts import Claim, Quote, ordered

NORMS = ("pairs", "1/t", "1/(t-1)")
PUBLISHED = {"cifar10": "pairs", "cifar100": "1/t"}  # which of them a column of the paper is


EVERY = [(net, stream) for stream in ("cifar10", "cifar100") for net in ("ResNet", "ViT")]
REDUCED = {
    (net, stream): Quote("Section 5.3", "We observe a reduction in final forgetting when using "
                         "SGD† during training", f"{net}, {stream}")
    for net, stream in EVERY
}  # fmt: skip
STRONGER = {
    (net, stream): Quote("Section 5.3", "the effect is stronger when using 20 instead of 10 "
                         "dimensions", f"{net}, {stream}")
    for net, stream in EVERY
}  # fmt: skip


@dataclass(frozen=True)
class Config:
    cifar10: tuple[Network, ...]
    cifar100: tuple[Network, ...] = ()  # its files are not embedded: at full size only

    def streams(self) -> dict[str, tuple[Network, ...]]:
        """The networks by the table's column."""
        return {name: nets for name, nets in (("cifar10", self.cifar10),
                                              ("cifar100", self.cifar100)) if nets}  # fmt: skip


DEMO = Config(cifar10.DEMO.networks)
SCALED = Config(cifar10.SCALED.networks)
TENTH = Config(cifar10.TENTH.networks)
HALF = Config(cifar10.HALF.networks)
FEW = Config(cifar10.FEW.networks)
# the table has no k = 40
FULL = Config(cifar10.FULL.networks, (replace(RESNET_100, ks=(10, 20)), VIT_100))


def run(config: Config, seeds: Sequence[int], shelf: Shelf) -> dict[int, Metrics]:
    found = {name: measure(nets, seeds, shelf) for name, nets in config.streams().items()}
    return {seed: {name: found[name][seed] for name in found} for seed in seeds}


def matrices_of(config: Config, metrics: BySeed) -> dict[str, dict[str, Tensor]]:
    """Accuracy matrices ``(S, T, T)`` by column and row."""
    return {
        name: {row: accuracies({s: m[name] for s, m in metrics.items()}, row)
               for row in rows_of(nets)}
        for name, nets in config.streams().items()
    }  # fmt: skip


def tables(config: Config, metrics: BySeed) -> list[Table]:
    columns = [
        column for name in config.streams()
        for column in (name, *(f"{norm} {name}" for norm in NORMS if norm != PUBLISHED[name]),
                       f"a_tt {name}")
    ]  # fmt: skip
    what = "; ".join(
        f"{name}: {caption(nets, {seed: one[name] for seed, one in metrics.items()})}"
        for name, nets in config.streams().items()
    )
    found = Table("tab:other-arch", f"forgetting over a whole stream; {what}", tuple(columns))
    for name, matrices in matrices_of(config, metrics).items():
        for row, accuracy in matrices.items():
            lost = accuracy_forgetting(accuracy)
            samples = {
                "pairs": torch.cat([lost[:, t, : t + 1].flatten() for t in range(lost.shape[-1])]),
                "1/t": lost[:, -1].flatten(),
                "1/(t-1)": lost[:, -1, :-1].flatten(),
            }
            for norm, entries in samples.items():
                column = name if norm == PUBLISHED[name] else f"{norm} {name}"
                found.add(row, column, entries.tolist())
            found.add(row, f"a_tt {name}", current_accuracy(accuracy).flatten().tolist())
    return [found]


def claims(config: Config, metrics: BySeed, tables: list[Table]) -> list[Claim]:
    del tables
    found = []
    for name, networks in config.streams().items():
        norm: Norm = "pairs" if PUBLISHED[name] == "pairs" else "t"
        own = {seed: one[name] for seed, one in metrics.items()}
        for network in networks:
            plain, *daggers = network.rows()

            def lost(row: str, own: BySeed = own, norm: Norm = norm) -> dict[int, float]:
                return by_seed(
                    own, row, lambda a: average_forgetting(accuracy_forgetting(a), norm)[-1]
                )

            why = guard(own, [plain, *daggers])
            reading = f"E(T) as the table's column has it ({PUBLISHED[name]})"
            found.append(ordered(
                REDUCED[network.name, name], [(lost(row), lost(plain)) for row in daggers],
                guard=why, reading=f"{reading}, every k below SGD",
            ))  # fmt: skip
            if len(daggers) > 1:
                pairs = [(lost(more), lost(less)) for less, more in pairwise(daggers)]
                stronger = STRONGER[network.name, name]
                found.append(ordered(stronger, pairs, guard=why, reading=reading))
    return found


EXPERIMENT = Experiment(
    label="tab:other-arch",
    what="Forgetting of SGD and SGD-dagger-k with a ResNet and a ViT on Split CIFAR-10 and -100",
    data="cifar10",
    sizes={"demo": DEMO, "scaled": SCALED, "tenth": TENTH, "half": HALF, "few": FEW, "full": FULL},
    run=run,
    tables=tables,
    claims=claims,
    quotes=(*REDUCED.values(), *STRONGER.values()),
    trainings=lambda config: [
        training for nets in config.streams().values() for training in rows_of(nets).values()
    ],
    cost={
        "demo": "about 3 min, shared with Table:forg-C10-extended",
        "scaled": "20 min on 2 cores, shared with Table:forg-C10-extended",
        "tenth": "nothing beyond Table:forg-C10-extended, whose runs it shares",
        "half": "nothing beyond Table:forg-C10-extended, whose runs it shares",
        "few": "nothing beyond Table:forg-C10-extended, whose runs it shares",
        "full": "nothing beyond Table:forg-C10-extended and Table:acc-C100, whose runs it shares: "
        "about 24 h on one A100 of 80 GB, --device cuda; CIFAR-100's files (estimate, not run)",
    },
)
