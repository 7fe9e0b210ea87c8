"""What tests of isolation learners share: sizes that SpaceNet fits, and a watcher of old logits."""

import torch

from curvlab.learners.spacenet import SpaceNet

SIZES = (8, 24, 20, 3)


def spacenet(**options):
    """For networks of ``SIZES``: neurons and connections that leave room for three tasks."""
    return SpaceNet((10, 8), (4, 3), (40, 36, 15), **options)


class Watcher:
    """Keeps each task's logits at its end and compares them after every later task."""

    def __init__(self, learner, tasks):
        self.tasks, self.kept, self.equal, self.parameters = tasks, [], [], []
        original = learner.after_task

        def after_task(population, task, samples):
            original(population, task, samples)
            now = [self.logits(population, learner, o) for o in range(task + 1)]
            self.equal += [torch.equal(a, b) for a, b in zip(self.kept, now, strict=False)]
            self.kept.append(now[task])
            self.parameters.append(population.parameters.clone())

        learner.after_task = after_task

    def logits(self, population, learner, o):
        inputs = self.tasks[o].test.inputs.to(population.dtype)
        return population.logits(inputs, o, learner.weights_for(population, o)).clone()
