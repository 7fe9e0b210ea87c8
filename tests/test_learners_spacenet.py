"""SpaceNet: allocation, rewiring, reserved neurons."""

import pytest
import torch

from curvlab.learners.population import Population
from curvlab.learners.spacenet import SpaceNet
from curvlab.learners.stacked import population_of
from curvlab.nets import mlp
from curvlab.nets.kwinners import kwinners_mlp
from curvlab.tasks import Samples, Task
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
    for place, (_, before, after) in enumerate(seen):
        mine = 1 + place // 5
        for number, count in enumerate(learner.connections):
            layer = learner._layers[number]
            for s in range(2):
                old, new = (layer.weight_of(x[s]) == mine for x in (before, after))
                assert int(new.sum()) == count
                grown = int((new & ~old).sum())
                if number < 2:
                    assert 0 < grown <= int(0.2 * count)  # fewer where no place is open
                else:
                    assert grown == 0  # the last layer is not rewired
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
    receivers, senders = torch.tensor([0.5, 3.0, 1.0, 2.0]), torch.tensor([1.0, 7.0, 3.0, 5.0])
    learner._neurons = [senders[None], receivers[None]]
    allowed = learner._allowed(0, 0) & ~mine
    score = torch.outer(receivers, senders).masked_fill(~allowed, -1.0)
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
    net = Population([kwinners_mlp(SIZES)], [0])
    with pytest.raises(ValueError, match="plain MLP"):
        spacenet().before_task(net, 0, samples)
    with pytest.raises(ValueError, match="cannot exceed"):
        SpaceNet((3,), (4,), (1, 1))


def test_a_neurons_importance_is_that_of_what_comes_in_summed_over_the_steps():
    """By hand, from the gradients of three steps."""
    tasks, learner = cloud_tasks(1, samples=30), spacenet()
    population = population_of([mlp(SIZES, seed=0, dtype=torch.float64)], [0])
    changes, original = [], learner.after_step

    def after_step(population, step):
        original(population, step)
        changes.append(step.lr * population.gradients.square().clone())

    learner.after_step = after_step
    learn(population, tasks, learner, Schedule(0.2, epochs=1), batch_size=10)
    so_far = torch.stack(changes).cumsum(0)  # of connections, after each step
    tables = [layer.weight_of(so_far)[:, 0] for layer in learner._layers]
    assert len(so_far) == 3
    torch.testing.assert_close(learner._neurons[0][0], tables[0].sum((0, 1)))
    torch.testing.assert_close(learner._neurons[1][0], tables[0].sum((0, 2)))
    torch.testing.assert_close(learner._neurons[2][0], tables[1].sum((0, 2)))
    taken = learner._taken[0][0].nonzero().flatten()
    best = tables[0].sum((0, 2)).topk(4).indices
    assert set(taken.tolist()) == set(best.tolist())


def test_connections_start_from_one_dense_draw_and_every_task_takes_its_places_of_it():
    tasks, learner = cloud_tasks(2), spacenet()
    population = population_of([mlp(SIZES, seed=s) for s in SEEDS], SEEDS)
    started, original = [], learner.before_task

    def before_task(population, task, samples):
        original(population, task, samples)
        started.append((learner.owner == task + 1, population.parameters.clone()))

    learner.before_task = before_task
    learn(population, tasks, learner, SCHEDULE)
    for mine, parameters in started:
        for layer in learner._layers:
            places = layer.weight_of(mine)
            drawn = layer.weight_of(learner._initial)
            assert torch.equal(layer.weight_of(parameters)[places], drawn[places])
            bound = (6.0 / (layer.inputs + layer.outputs)) ** 0.5
            assert 0.9 * bound < float(drawn.abs().max()) <= bound


@pytest.mark.parametrize("isolate", [True, False])
def test_as_published_the_biases_of_neurons_that_are_not_reserved_go_on_moving(isolate):
    tasks, learner = cloud_tasks(2), spacenet(isolate=isolate)
    population = population_of([mlp(SIZES, seed=1)], [1])
    picked, original = [], learner.after_task

    def after_task(population, task, samples):
        original(population, task, samples)
        picked.append((learner._picked[0][0].clone(), learner._taken[0][0].clone()))

    learner.after_task = after_task
    (run,) = learn(population, tasks, learner, SCHEDULE)
    mine, reserved = picked[0]
    moved = learner._layers[0].bias_of(run.snapshots[1] != run.snapshots[0])
    assert not bool(moved[reserved].any())
    assert bool(moved[mine & ~reserved].any()) == (not isolate)


def test_with_one_head_for_all_classes_a_task_connects_to_its_own():
    tasks = cloud_tasks(2, classes=2)
    whole = [
        Task(task.name, *(Samples(p.inputs, p.targets + 2 * t) for p in (task.train, task.test)),
             4, (2 * t, 2 * t + 1))
        for t, task in enumerate(tasks)
    ]  # fmt: skip
    learner = SpaceNet((10, 8), (4, 3), (40, 36, 10))
    (run,) = learn(lambda seed: mlp((8, 24, 20, 4), seed=seed), whole, learner, SCHEDULE, seeds=[1])
    head = learner._layers[-1]
    for t, snapshot in enumerate(run.snapshots):
        used = head.weight_of(snapshot).abs().sum(1) > 0
        assert used.tolist() == [t == 0, t == 0, t == 1, t == 1]
    assert float(run.task_accuracy[1].min()) > 0.8
