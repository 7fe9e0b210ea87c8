"""SpaceNet: allocation, rewiring, reserved neurons."""

import pytest
import torch

from curvlab.learners.population import ModulePopulation
from curvlab.learners.spacenet import SpaceNet
from curvlab.learners.stacked import population_of
from curvlab.nets import mlp
from curvlab.nets.kwinners import kwinners_mlp
from curvlab.training import Schedule, learn
from tests.isolated_learning import SIZES, Watcher, spacenet
from tests.small_problems import cloud_tasks

SEEDS = (1, 2)
SCHEDULE = Schedule(lr=0.2, epochs=6)


def test_spacenet_keeps_the_number_of_connections_while_it_rewires():
    tasks, learner = cloud_tasks(2), spacenet()
    population = population_of([mlp(SIZES, seed=s) for s in SEEDS], SEEDS)
    seen = []
    original = learner.after_step

    def after_step(population, step):
        before = learner.owner.clone()
        original(population, step)
        if not torch.equal(before, learner.owner):
            seen.append((step.epoch, before, learner.owner.clone()))

    learner.after_step = after_step
    learn(population, tasks, learner, SCHEDULE)
    assert [epoch for epoch, *_ in seen] == list(range(5)) * 2  # every epoch but the last
    for number, (_, before, after) in enumerate(seen):
        mine = 1 + number // 5
        for layer, count in zip(learner._layers, learner.connections, strict=True):
            for s in range(2):
                old, new = (layer.weight_of(x[s]) == mine for x in (before, after))
                assert int(new.sum()) == count
                grown = int((new & ~old).sum())
                assert 0 < grown <= int(0.2 * count)  # fewer where no place is open
    free = learner.weights_for(population, 1)[learner.owner == 0]
    assert bool((free == 0).all())


def test_spacenet_drops_the_least_important_and_grows_between_important_neurons():
    population = population_of([mlp((4, 4, 2), bias=False)], [0])
    learner = SpaceNet((3,), (1,), (6, 4), dropped=0.34)
    learner.before_task(population, 0, cloud_tasks(1, width=4)[0].train)
    layer = learner._layers[0]
    importance = layer.weight_of(learner._importance)[0]
    mine = layer.weight_of(learner.owner)[0] == 1
    rows, columns = mine.nonzero().unbind(1)
    for rank, (r, c) in enumerate(zip(rows.tolist(), columns.tolist(), strict=True), start=1):
        importance[r, c] = float(rank)
    allowed = learner._allowed(0, 0) & ~mine
    score = torch.outer(importance.sum(1), importance.sum(0)).masked_fill(~allowed, -1.0)
    expected_grown = set(score.flatten().argsort(descending=True)[:2].tolist())
    owner = learner.owner.clone()
    learner._rewire(population, 0, 0, owner)
    after = layer.weight_of(owner)[0] == 1
    dropped = (mine & ~after).nonzero().tolist()
    assert dropped == [[int(rows[i]), int(columns[i])] for i in (0, 1)]
    grown = set((after & ~mine).flatten().nonzero().flatten().tolist())
    assert grown == expected_grown
    assert bool((layer.weight_of(population.parameters)[0][~mine] == 0).all())


def test_no_later_task_connects_to_a_reserved_neuron():
    tasks, learner = cloud_tasks(3), spacenet()
    population = population_of([mlp(SIZES, seed=0)], [0])
    reserved = []
    original = learner.after_task

    def after_task(population, task, samples):
        original(population, task, samples)
        reserved.append([taken.clone() for taken in learner._taken])

    learner.after_task = after_task
    learn(population, tasks, learner, SCHEDULE)
    assert [int(taken.sum()) for taken in reserved[0]] == [4, 3]
    for hidden in range(2):
        into = learner._layers[hidden].weight_of(learner.owner)[0]
        out = learner._layers[hidden + 1].weight_of(learner.owner)[0]
        for task in range(2):
            neurons = reserved[task][hidden][0]
            assert int(into[neurons].max()) <= task + 1
            if hidden == 0:  # the last layer is laid anew for every task
                assert int(out[:, neurons].max()) <= task + 1


def test_as_published_later_tasks_disturb_earlier_ones_through_shared_neurons():
    tasks = cloud_tasks(3)
    equal = {}
    for isolate in (True, False):
        learner = spacenet(isolate=isolate)
        watcher = Watcher(learner, tasks)
        learn(lambda seed: mlp(SIZES, seed=seed), tasks, learner, SCHEDULE, seeds=[1])
        equal[isolate] = watcher.equal
    assert equal[True] == [True] * 3
    assert False in equal[False]


def test_spacenet_refuses_what_it_cannot_allocate():
    samples = cloud_tasks(1)[0].train
    population = population_of([mlp(SIZES, seed=0)], [0])
    with pytest.raises(ValueError, match="not reserved"):
        SpaceNet((25, 5), (0, 0), (10, 10, 5)).before_task(population, 0, samples)
    with pytest.raises(ValueError, match="fewer than connections=31"):
        SpaceNet((6, 5), (0, 0), (30, 31, 5)).before_task(population, 0, samples)
    with pytest.raises(ValueError, match="4 numbers for a model of 3 layers"):
        SpaceNet((6, 5, 5), (0, 0, 0), (9, 9, 9, 9)).before_task(population, 0, samples)
    net = ModulePopulation([kwinners_mlp(SIZES)], [0])
    with pytest.raises(ValueError, match="plain MLP"):
        spacenet().before_task(net, 0, samples)
    with pytest.raises(ValueError, match="cannot exceed"):
        SpaceNet((3,), (4,), (1, 1))
