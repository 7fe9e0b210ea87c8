"""A learner that projects off a basis moves its parameters in one call, to its parts' bits."""

import sys

import pytest
import torch

from curvlab.learners import OGD, Learner, SGDDagger, Step, population_of
from curvlab.nets import mlp
from curvlab.training import Schedule, learn
from curvlab.training.step import take_step
from tests.small_problems import make_tasks, small

LEARNERS = {
    "SGD-dagger": (SGDDagger, {"k": 4, "samples": 30}),
    "SGD-dagger, float16": (SGDDagger, {"k": 4, "samples": 30, "storage": torch.float16}),
    "OGD, few directions": (OGD, {"epsilon": 0.3, "samples": 30}),
    "OGD dense": (OGD, {"epsilon": 0.0, "samples": 12, "structured": False}),
}


def trained(learner, dtype=torch.float32, **settings):
    return learn(
        lambda seed: small(seed, dtype), make_tasks(3, dtype=dtype), learner,
        Schedule(0.1, epochs=2), seeds=(1, 2), **settings,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", LEARNERS)
@pytest.mark.parametrize(("momentum", "weight_decay"), [(0.0, 0.0), (0.9, 0.05)])
def test_a_step_in_one_call_has_the_bits_of_decay_projection_momentum_and_update(
    name, dtype, momentum, weight_decay
):
    """Results of earlier versions, which took the step in parts, stay valid."""
    kind, options = LEARNERS[name]

    class InParts(kind):
        step_ = Learner.step_

    settings = {"momentum": momentum, "weight_decay": weight_decay}
    together = trained(kind(**options), dtype, **settings)
    for run, other in zip(together, trained(InParts(**options), dtype, **settings), strict=True):
        assert torch.equal(run.snapshots, other.snapshots)


@pytest.mark.parametrize("name", LEARNERS)
def test_a_subclass_that_changes_gradients_further_is_asked_in_every_step(name):
    kind, options = LEARNERS[name]

    class Frozen(kind):
        def transform_(self, population):
            super().transform_(population)
            population.gradients[:, :5] = 0.0

    for run in trained(Frozen(**options)):
        assert torch.equal(run.snapshots[-1][:5], run.initial[:5])
        assert not torch.equal(run.snapshots[-1], run.initial)


def filled(runs, rows):
    """A population with ``rows`` random directions in the memory of each run."""
    population = population_of([mlp((6, 8, 3), seed=s) for s in range(runs)], list(range(runs)))
    learner, task = SGDDagger(k=rows), make_tasks(1)[0]
    learner.before_task(population, 0, task.train)
    for s in range(runs):
        vectors = torch.randn(rows, population.n, generator=torch.Generator().manual_seed(s))
        learner.memory.extend(s, vectors, task=0, values=torch.ones(rows))
    population.begin_task(1)
    inputs = torch.stack([task.train.inputs[:4]] * runs)
    return population, learner, inputs, torch.stack([task.train.targets[:4]] * runs)


def test_from_take_step_to_the_loop_over_the_memory_there_are_at_most_eight_calls():
    pytest.importorskip("numba")
    population, learner, inputs, targets = filled(runs=2, rows=5)
    arguments = (population, learner, inputs, targets, Step(1, 0, 1, 0, 1, 0.1))
    take_step(*arguments)  # whatever is compiled, or imported, is there
    chains, depth = [], []

    def watch(frame, event, _argument):
        if event == "call" and (depth or frame.f_code is take_step.__code__):
            depth.append(frame.f_code.co_name)
            if frame.f_code.co_filename.endswith("team.py") and frame.f_code.co_name == "run":
                chains.append(list(depth))
        elif event == "return" and depth:
            depth.pop()

    sys.setprofile(watch)
    try:
        take_step(*arguments)
    finally:
        sys.setprofile(None)
    assert len(chains) == population.size, "the fused step was not taken"
    for chain in chains:
        assert chain[0] == "take_step"
        assert len(chain) <= 8, chain  # the calls after take_step, and that of the loop
