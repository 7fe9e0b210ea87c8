"""A-GEM: a step may not raise, to first order, the mean loss on samples of earlier tasks.

With g the batch's gradient and r that of the loss on samples drawn from the memory: if g'r < 0, g
loses its part along r. After each task as many of its samples as of every other are kept.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from curvlab.checks import whole
from curvlab.learners.base import Learner
from curvlab.learners.population import Population
from curvlab.learners.seeds import derived_generator, drawn
from curvlab.storage import series
from curvlab.tasks.samples import Samples, Task


class AGEM(Learner):
    """Averaged gradient episodic memory.

    Args:
        size: Samples kept per run at the end of the stream, the same number of every task.
        batch: Samples drawn in every step for the gradient r.
    """

    serves_later_tasks = True
    settings = ("size", "batch")

    def __init__(self, size: int = 200, *, batch: int = 10) -> None:
        super().__init__()
        whole(size=size, batch=batch)
        self.size, self.batch = size, batch
        self._per_task = 0
        self._kept: list[tuple[Tensor, Tensor]] = []  # by task: (S, m, ...) and (S, m)

    def expect(self, population: Population, tasks: Sequence[Task]) -> None:
        del population
        self._per_task = self.size // len(tasks)
        if self._per_task < 1:
            raise ValueError(
                f"size={self.size} leaves no sample for each of {len(tasks)} tasks: raise it"
            )

    def transform_(self, population: Population) -> None:
        if not self._kept or population.batch is None:
            return
        reference = self._reference(population)
        gradients = population.gradients
        # float64: where g and r nearly cancel, rounding would decide the sign
        along = (gradients.double() * reference).sum(1)
        square = reference.square().sum(1)
        # nothing to remove where they agree; where r is 0, so is the product
        part = along.clamp(max=0.0) / square.masked_fill(square == 0.0, 1.0)
        gradients.sub_((part.unsqueeze(1) * reference).to(gradients.dtype))

    def _reference(self, population: Population) -> Tensor:
        """The gradient ``(S, P)``, float64, of the mean loss on samples of the memory."""
        batch = population.batch
        if batch is None:
            raise RuntimeError("called outside a step: only learn() calls it")
        at = (batch.step.task, batch.step.step)
        # how many of which task: the same for every run, so a function of the position alone
        which = torch.randint(0, len(self._kept), (self.batch,),
                              generator=derived_generator(0, "agem tasks", *at))  # fmt: skip
        parts = []
        for task, count in enumerate(torch.bincount(which, minlength=len(self._kept)).tolist()):
            inputs, targets = self._kept[task]
            chosen = torch.stack([
                torch.randint(0, targets.shape[1], (count,),
                              generator=derived_generator(seed, "agem", *at, task))
                for seed in population.seeds
            ]).to(targets.device)  # fmt: skip
            runs = torch.arange(len(targets), device=targets.device).unsqueeze(1)
            parts.append((task, inputs[runs, chosen], targets[runs, chosen]))
        if not population.by_task:
            _, inputs_of, targets_of = zip(*parts, strict=True)
            parts = [(batch.step.task, torch.cat(inputs_of, 1), torch.cat(targets_of, 1))]
        total = torch.zeros_like(population.gradients, dtype=torch.float64)
        for task, inputs, targets in parts:
            if targets.shape[1]:
                found = population.gradient_of(inputs, targets, task, batch.step.step)
                total += found.double() * (targets.shape[1] / self.batch)
        return total

    def after_task(self, population: Population, task: int, samples: Samples) -> None:
        chosen = [
            drawn(samples, self._per_task, seed, "agem memory", task) for seed in population.seeds
        ]
        inputs = torch.stack([one.inputs for one in chosen])
        targets = torch.stack([one.targets for one in chosen])
        self._kept.append((inputs, targets))
        sizes = [t.numel() * t.element_size() for pair in self._kept for t in pair]
        kept = sum(targets.shape[1] for _, targets in self._kept)
        self.notes.append({"kept": kept, "memory_bytes": sum(sizes) // population.size})

    def state(self) -> dict[str, Tensor]:
        return {
            f"{name}/{task}": tensor
            for task, pair in enumerate(self._kept)
            for name, tensor in zip(("inputs", "targets"), pair, strict=True)
        }

    def load_state(self, population: Population, tensors: dict[str, Tensor]) -> None:
        here = {name: tensor.to(population.device) for name, tensor in tensors.items()}
        self._kept = list(zip(series(here, "inputs"), series(here, "targets"), strict=True))
