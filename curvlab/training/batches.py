"""Which samples each run sees, in which order: a function of (seed, task, epoch) alone."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from curvlab.learners.seeds import derived_generator
from curvlab.tasks.samples import Samples

# Steps gathered at once: one gather per slab and views after that. Slabs start at fixed steps, so
# that a resumed run sees every batch at the same place in memory (BLAS rounds by alignment).
SLAB = 64


def steps_per_epoch(samples: Samples, batch_size: int) -> int:
    """Batches in one pass over ``samples``; the last may be short."""
    return -(-len(samples) // batch_size)


def seed_batches(
    samples: Samples,
    seeds: Sequence[int],
    batch_size: int,
    *,
    task: int,
    epoch: int,
    start: int = 0,
) -> Iterator[tuple[Tensor, Tensor]]:
    """One epoch of ``(inputs (S, B, ...), targets (S, B))``; each seed has its own permutation.

    Args:
        samples: Resident data, shared by the seeds.
        seeds: The seeds of the runs; the order of one does not depend on which others are there.
        batch_size: B; the last batch may be shorter.
        task: Index of the task.
        epoch: Its number in the task.
        start: Steps of the epoch to leave out.
    """
    count, runs = len(samples), len(seeds)
    orders = [
        torch.randperm(count, generator=derived_generator(seed, "order", task, epoch))
        for seed in seeds
    ]
    order = torch.stack(orders).to(samples.targets.device)
    whole = count // batch_size
    for first in range(start // SLAB * SLAB, whole, SLAB):
        steps = min(SLAB, whole - first)
        index = order[:, first * batch_size : (first + steps) * batch_size]
        index = index.reshape(runs, steps, batch_size).transpose(0, 1).reshape(-1)
        lead = (steps, runs, batch_size)
        # index_select copies whole rows: several times as fast as samples.inputs[index]
        inputs = samples.inputs.index_select(0, index).view(*lead, *samples.inputs.shape[1:])
        targets = samples.targets.index_select(0, index).view(lead)
        for step in range(max(start - first, 0), steps):
            yield inputs[step], targets[step]
    if count % batch_size and start <= whole:
        rest = order[:, whole * batch_size :]
        yield samples.inputs[rest], samples.targets[rest]
