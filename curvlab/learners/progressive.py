"""Progressive networks: a new column per task, the old ones frozen.

The model (:func:`curvlab.nets.progressive.progressive_mlp`) holds all columns; this learner lets
task ``t`` move column ``t`` alone. Forgetting is exactly zero, to the bit.
"""

import re

from torch import Tensor

from curvlab.learners.ownership import Ownership
from curvlab.learners.population import Population
from curvlab.tasks.samples import Samples

COLUMN = re.compile(r"(?:^|\.)columns\.(\d+)\.")


class Progressive(Ownership):
    """Column ``t`` belongs to task ``t``: its layers and its adapters."""

    def before_task(self, population: Population, task: int, samples: Samples) -> None:
        super().before_task(population, task, samples)
        owner = self.owner.clone()
        for name, where in population.layout.slices().items():
            found = COLUMN.search(name)
            if found is None:
                raise ValueError(
                    f"Progressive needs a model made of columns.0, columns.1, ...: parameter "
                    f"{name!r} is in none (curvlab.nets.progressive.progressive_mlp makes one)"
                )
            owner[:, where] = int(found[1]) + 1
        if not bool((owner == task + 1).any()):
            raise ValueError(f"the model has no column for task {task}: build it with more tasks")
        self.own_(population, owner)

    def weights_for(self, population: Population, task: int) -> Tensor:
        del task  # the model itself uses columns up to the task and no later one
        return population.parameters
