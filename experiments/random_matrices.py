"""What D and S are worth on random matrices (the baselines quoted beside tab:ASSMPT).

The paper does not state its matrices. 100 x 100 with independent Gaussian entries and five equal
blocks gives its numbers; symmetric ones would move D to about +0.02.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from curvlab.learners.seeds import derived_generator
from curvlab.metrics import block_diagonality, spectral_similarity
from experiments.experiment import BySeed, Experiment, rounded
from experiments.paper import published
from experiments.shelf import Shelf
from experiments.tables import Metrics, Table
from experiments.verdicts import Claim, Quote, holds

LABEL = "random baselines"
QUOTES = {
    "D": Quote("Appendix C", "On random matrices, the score evaluates to -0.001 (±0.02), over 1000 "
               "trials"),
    "S": Quote("Appendix C", "We test the score on pairs of random matrices, and obtain an average "
               "of -0.0002 (±0.01) over 1000 trials"),
}  # fmt: skip


@dataclass(frozen=True)
class Config:
    n: int = 100
    blocks: int = 5
    trials: int = 200  # per seed: the paper's 1,000 with its five seeds


def run(config: Config, seeds: Sequence[int], shelf: Shelf) -> dict[int, Metrics]:
    del shelf  # nothing is trained
    labels = torch.arange(config.n) * config.blocks // config.n
    found: dict[int, Metrics] = {}
    for seed in seeds:
        generator = derived_generator(seed, "random matrices")
        scores: dict[str, list[float]] = {"D": [], "S": []}
        for _ in range(config.trials):
            first, second = torch.randn(
                2, config.n, config.n, dtype=torch.float64, generator=generator
            )
            scores["D"].append(block_diagonality(first, labels).value)
            scores["S"].append(spectral_similarity(first, second).value)
        found[seed] = rounded(scores)
    return found


def tables(config: Config, metrics: BySeed) -> list[Table]:
    table = Table(LABEL, f"D and S of {config.n} x {config.n} Gaussian matrices", ("D", "S"))
    for score in ("D", "S"):
        table.add("random", score, [value for one in metrics.values() for value in one[score]])
    return [table]


def claims(config: Config, metrics: BySeed, tables: list[Table]) -> list[Claim]:
    del config, metrics
    [table] = tables
    found = []
    for score, quote in QUOTES.items():
        theirs, cell = published(LABEL, "random", score), table.rows["random"][score]
        if theirs is not None:
            found.append(holds(quote, [cell.mean, cell.std], _near(theirs[1]),
                               reading="mean 0 and the published spread"))  # fmt: skip
    return found


def _near(spread: float):  # type: ignore[no-untyped-def]
    def holds(mean: float, std: float) -> bool:
        return abs(mean) < 0.25 * spread and 0.7 * spread < std < 1.4 * spread

    return holds


EXPERIMENT = Experiment(
    label=LABEL,
    what="D and S of random matrices, the zero against which tab:ASSMPT is read",
    data="none",
    sizes={"demo": Config(trials=40), "scaled": Config(), "full": Config()},
    run=run,
    tables=tables,
    claims=claims,
    quotes=tuple(QUOTES.values()),
    cost={"demo": "2 s", "scaled": "10 s", "full": "10 s"},
)
