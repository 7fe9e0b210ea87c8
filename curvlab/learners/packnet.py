"""PackNet: train all free weights, prune the smallest, fine-tune the rest, freeze, go on.

Pruned weights are set to zero and become free; the next task starts from these zeros, beside the
frozen weights of the tasks before it. Biases and the parameters of normalisation layers belong to
the first task that uses them and are frozen after it. A head of one task alone is that task's and
is not pruned: nobody else could use what is freed. Which task a sample comes from must be known to
predict it.
"""

from torch import Tensor

from curvlab.checks import inside
from curvlab.learners.ownership import Ownership
from curvlab.learners.population import Population
from curvlab.learners.step import Step
from curvlab.tasks.samples import Samples


class PackNet(Ownership):
    """Pruning inside the task, per layer, by magnitude.

    Args:
        fraction: The share of the task's own weights in each layer that is pruned and freed: .5, or
            .75 for long streams. A layer with fewer than ``1 / fraction`` of them prunes none.
        prune_at: The part of the task's steps after which to prune; the rest fine-tunes.
    """

    settings = ("fraction", "prune_at")

    def __init__(self, fraction: float = 0.5, prune_at: float = 0.5) -> None:
        super().__init__()
        inside("[0, 1)", fraction=fraction)  # a task keeps something
        inside("(0, 1]", prune_at=prune_at)
        self.fraction, self.prune_at = fraction, prune_at

    def before_task(self, population: Population, task: int, samples: Samples) -> None:
        super().before_task(population, task, samples)
        used = population.uses.mask(task, population.device)
        if task == 0:
            owner = self.owner.masked_fill(used, 1)
        else:
            free = (self.owner == 0) & used
            if not bool(free.any(dim=1).all()):
                raise ValueError(
                    f"no free weights are left for task {task}: prune a larger fraction than "
                    f"{self.fraction}, or use a larger model"
                )
            owner = self.owner.masked_fill(free, task + 1)
            self.start_(population, free)
        self.own_(population, owner)

    def start_(self, population: Population, free: Tensor) -> None:
        """Give free weights the values a new task starts from: they are zero already."""

    def after_step(self, population: Population, step: Step) -> None:
        if step.step + 1 == max(1, round(self.prune_at * step.steps)):
            self.prune_(population)

    def prune_(self, population: Population) -> None:
        """Free the smallest of the task's own weights in every layer, and zero them."""
        owner = self.owner.clone()
        for where in prunable(population):
            sizes = population.parameters[:, where].abs()
            mine = self.owner[:, where] == self.task + 1
            for s in range(population.size):
                places = mine[s].nonzero().flatten()
                # By count, not by threshold: a k-th value does not exist for count 0, and
                # "<= threshold" prunes every weight that ties with it (all those still at zero).
                count = int(self.fraction * len(places))
                smallest = sizes[s, places].argsort(stable=True)[:count]
                owner[s, where][places[smallest]] = 0
        # only what is freed now: a head whose task is still to come keeps its values
        population.parameters.masked_fill_(owner != self.owner, 0.0)
        self.own_(population, owner)


def prunable(population: Population) -> list[slice]:
    """Where the layers' weight matrices and kernels lie that tasks share.

    Biases, scales and tokens do not count, nor do heads of one task.
    """
    slices = population.layout.slices()
    found = []
    for name, shape in zip(population.layout.names, population.layout.shapes, strict=True):
        matrix = name.rpartition(".")[2] == "weight" and len(shape) >= 2
        if matrix and not population.uses.alone(name):
            found.append(slices[name])
    if not found:
        raise ValueError(
            "PackNet found nothing to prune: no parameter called 'weight' has two dimensions"
        )
    return found
