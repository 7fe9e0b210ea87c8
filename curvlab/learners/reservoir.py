"""A few samples of the stream so far, for every run its own, each sample equally likely to be kept.

Which are kept and which are drawn is a function of seed, task and step, so that a run has the same
ones alone, among others and resumed.
"""

import torch
from torch import Tensor

from curvlab.checks import whole
from curvlab.learners.population import Population
from curvlab.learners.seeds import derived_generator
from curvlab.learners.step import Batch


class Reservoir:
    """Room for ``size`` samples of each run: what came in, its target and its task.

    Args:
        size: Samples kept per run.
    """

    def __init__(self, size: int) -> None:
        whole(size=size)
        self.size, self.seen = size, 0
        self.kept: dict[str, Tensor] = {}  # (S, size, ...): inputs, targets, tasks, ...

    def __len__(self) -> int:
        return min(self.seen, self.size)

    @property
    def bytes(self) -> int:
        """Of one run."""
        return sum(one[0].numel() * one.element_size() for one in self.kept.values())

    @torch.no_grad()
    def add(self, population: Population, batch: Batch, **more: Tensor) -> None:
        """Offer a batch; ``more`` is kept beside it, ``(S, B, ...)`` each."""
        runs, count = batch.targets.shape
        tasks = torch.full((runs, count), batch.step.task)  # on the CPU, where draw() reads them
        offered = {"inputs": batch.inputs, "targets": batch.targets, "tasks": tasks, **more}
        if not self.kept:
            self.kept = {
                name: one.new_zeros(runs, self.size, *one.shape[2:])
                for name, one in offered.items()
            }
        numbers = torch.arange(self.seen, self.seen + count)
        for s, seed in enumerate(population.seeds):
            generator = derived_generator(seed, "reservoir", batch.step.task, batch.step.step)
            drawn = torch.rand(count, generator=generator, dtype=torch.float64) * (numbers + 1)
            places = torch.where(numbers < self.size, numbers, drawn.long())
            for sample, place in enumerate(places.tolist()):  # in order: a later one replaces
                if place < self.size:
                    for name, one in offered.items():
                        self.kept[name][s, place] = one[s, sample]
        self.seen += count

    def draw(
        self, population: Population, s: int, count: int, batch: Batch
    ) -> list[tuple[int, dict[str, Tensor]]]:
        """At most ``count`` samples of run ``s``, by task if tasks pass the network apart."""
        step = batch.step
        if not len(self):
            return []
        generator = derived_generator(population.seeds[s], "replay", step.task, step.step)
        chosen = torch.randperm(len(self), generator=generator)[:count]
        parts = {step.task: chosen}
        if population.by_task:
            tasks = self.kept["tasks"][s][chosen]
            parts = {task: chosen[tasks == task] for task in sorted(set(tasks.tolist()))}
        return [
            (task, {name: one[s][places.to(one.device)] for name, one in self.kept.items()})
            for task, places in parts.items()
        ]

    def state(self) -> dict[str, Tensor]:
        """For a checkpoint."""
        return {"seen": torch.tensor(self.seen), **self.kept}

    def load_state(self, population: Population, tensors: dict[str, Tensor]) -> None:
        """Take back what :meth:`state` gave."""
        self.seen = int(tensors["seen"])
        here = {k: v if k == "tasks" else v.to(population.device) for k, v in tensors.items()}
        self.kept = {k: v for k, v in here.items() if k != "seen"}
