"""Whether the ViT trains alike in bfloat16 and in float32: its first thousand steps (one epoch).

Not an experiment of the paper: it stands behind size ``half`` of the labels with the ViT. Rounding
grows over many steps, so what counts is what was learned; how far the two runs are apart is shown.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from experiments.cifar import VIT_10
from experiments.cifar10 import DEMO as TOYS
from experiments.experiment import BySeed, Experiment
from experiments.shelf import Shelf, Training
from experiments.tables import Metrics, Table
from experiments.verdicts import Claim, holds

LABEL = "ViT in bfloat16"
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Config:
    training: Training

    def trainings(self) -> dict[str, Training]:
        """The same epoch in both dtypes."""
        first = replace(self.training, tasks=1, epochs="1", samples=0)
        half = replace(first, autocast="bfloat16")
        return dict(zip(DTYPES, (first, half), strict=True))


def run(config: Config, seeds: Sequence[int], shelf: Shelf) -> dict[int, Metrics]:
    """Loss and accuracy on the test set after the epoch; how far apart the two runs are."""
    metrics: dict[int, Metrics] = {}
    by_dtype = {dtype: shelf.runs(one, seeds) for dtype, one in config.trainings().items()}
    for plain, half in zip(*by_dtype.values(), strict=True):
        moved = float((plain.snapshots[0] - plain.initial).norm())
        apart = float((half.snapshots[0] - plain.snapshots[0]).norm())
        metrics[plain.seed] = {"apart": apart / moved, "steps": plain.notes[0]["steps"]} | {
            dtype: {
                "accuracy": float(one.test_accuracy[0, 0]),
                "loss": float(one.test_loss[0, 0]),
                "seconds_a_step": one.notes[0]["cpu_seconds"] / one.notes[0]["steps"],
            }
            for dtype, one in zip(DTYPES, (plain, half), strict=True)
        }
    return metrics


def tables(config: Config, metrics: BySeed) -> list[Table]:
    steps = next(iter(metrics.values()))["steps"]
    columns = {"loss": "test loss", "accuracy": "a_tt", "seconds_a_step": "CPU s a step"}
    found = Table(
        LABEL, f"the first {steps} steps of {config.training.network} (not in the paper)",
        (*columns.values(), "distance / distance moved"),
    )  # fmt: skip
    for dtype in DTYPES:
        for name, column in columns.items():
            found.add(dtype, column, [one[dtype][name] for one in metrics.values()])
    found.add("bfloat16", "distance / distance moved", [one["apart"] for one in metrics.values()])
    return [found]


def claims(config: Config, metrics: BySeed, tables: list[Table]) -> list[Claim]:
    del config, tables
    off = [abs(one["bfloat16"]["accuracy"] - one["float32"]["accuracy"])
           for one in metrics.values()]  # fmt: skip
    return [
        holds("accuracy after the epoch within .02 of float32's", [max(off)],
              lambda worst: worst <= 0.02)
    ]  # fmt: skip


EXPERIMENT = Experiment(
    label=LABEL,
    what="Extension, not in the paper: the ViT's first thousand steps in bfloat16 and float32",
    data="cifar10",
    sizes={"demo": Config(TOYS.networks[1].training), "full": Config(VIT_10.training)},
    run=run,
    tables=tables,
    claims=claims,
    trainings=lambda config: list(config.trainings().values()),
    cost={"demo": "10 s", "full": "about 15 min a seed on one core"},
)
