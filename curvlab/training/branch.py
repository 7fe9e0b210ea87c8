"""Whether training may continue from given runs of the first task."""

import json
from collections.abc import Sequence
from typing import Any

import torch

from curvlab.learners import SGD, Population
from curvlab.training.run import Run

# settings that must agree between the runs of the first task and those that continue from them
SETTINGS = (
    "schedule",
    "batch_size",
    "momentum",
    "weight_decay",
    "batchnorm",
    "dtype",
    "data",
    "autocast",
    "loss",
    "augment",
)


def check_branch(runs: Sequence[Run], population: Population, config: dict[str, Any]) -> None:
    """Refuse runs that are not what training ``population`` on its first task would give.

    Args:
        runs: The runs of the first task.
        population: Before training.
        config: Settings of the run that continues; ``"data"`` is the digest of the first task.
    """
    if [run.seed for run in runs] != list(population.seeds):
        raise ValueError(
            f"first= needs one run per seed, {list(population.seeds)}; "
            f"got those of {[run.seed for run in runs]}"
        )
    for s, run in enumerate(runs):
        if run.tasks != (config["tasks"][0],) or len(run.snapshots) != 1:
            raise ValueError(
                f"first= takes runs of the task {config['tasks'][0]!r} alone, with their "
                f"snapshot; got one of {run.tasks} with {len(run.snapshots)}"
            )
        wanted = {name: config.get(name) for name in SETTINGS} | {"learner": SGD.__name__}
        # the round trip gives both sides JSON's types: one may come from a file
        ours, theirs = (json.loads(json.dumps(one)) for one in (wanted, run.config))
        other = [name for name, value in ours.items() if theirs.get(name) != value]
        if other:
            raise ValueError(
                f"the run of seed {run.seed} in first= was trained with another "
                f"{', '.join(other)}: train the first task with the settings of the rest"
            )
        if not torch.equal(run.initial, population.parameters[s].cpu()):
            raise ValueError(
                f"the run of seed {run.seed} in first= started from a different network"
            )
