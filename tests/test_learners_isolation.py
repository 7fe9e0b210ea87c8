"""Isolation learners: old tasks' logits keep their bits, and each known defect has its test."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from curvlab.learners import SGD
from curvlab.learners.gpm import GPM
from curvlab.learners.kwinners import HeterogeneousDropout, winning_counts
from curvlab.learners.packnet import PackNet, prunable
from curvlab.learners.population import ModulePopulation
from curvlab.learners.powerprop import Powerpropagation
from curvlab.learners.progressive import Progressive
from curvlab.learners.spacenet import SpaceNet
from curvlab.learners.stacked import population_of
from curvlab.nets import mlp, slim_resnet18
from curvlab.nets.kwinners import KWinners, kwinners_mlp, top_units
from curvlab.nets.powerprop import effective_weights, power, powerpropagate, root
from curvlab.nets.progressive import progressive_mlp
from curvlab.tasks import Samples, Task
from curvlab.training import Schedule, learn


@pytest.fixture(autouse=True)
def one_thread(pinned_threads):  # noqa: ARG001 (after it)
    torch.set_num_threads(1)  # the steps are far too small to share: threads only wait


SIZES = (8, 16, 12, 3)
SEEDS = (1, 2)
SCHEDULE = Schedule(lr=0.2, epochs=6)


def make_tasks(count=3, samples=60, width=8, classes=3, shape=None):
    """Separable clouds; each task has its own middles, so that one task's solution fails others."""
    tasks = []
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        middles = torch.randn(classes, width, generator=generator) * 1.5

        def draw(size, generator=generator, middles=middles):
            targets = torch.arange(size) % classes
            noise = torch.randn(size, width, generator=generator) * 0.3
            inputs = middles[targets] + noise
            return Samples(inputs if shape is None else inputs.reshape(size, *shape), targets)

        tasks.append(Task(f"task {number}", draw(samples), draw(30), classes))
    return tasks


def spacenet(**options):
    return SpaceNet((6, 5), (3, 2), (30, 16, 10), **options)


# learner, model: every strict isolation learner
STRICT = {
    "packnet": (lambda: PackNet(0.5), lambda seed: mlp(SIZES, seed=seed)),
    "spacenet": (spacenet, lambda seed: mlp(SIZES, seed=seed)),
    "progressive": (Progressive, lambda seed: progressive_mlp(SIZES, 3, seed=seed)),
    "powerprop": (
        lambda: Powerpropagation(0.6),
        lambda seed: powerpropagate(mlp(SIZES, seed=seed), 2.0),
    ),
}


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


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "weight_decay": 1e-2}], ids=str)
@pytest.mark.parametrize("name", STRICT)
def test_old_tasks_keep_their_logits_to_the_bit_and_new_ones_are_learned(name, options):
    make_learner, make_model = STRICT[name]
    tasks, learner = make_tasks(), make_learner()
    watcher = Watcher(learner, tasks)
    schedule = Schedule(lr=0.04 if options else 0.2, epochs=6)
    runs = learn(make_model, tasks, learner, schedule, seeds=SEEDS, **options)
    assert watcher.equal == [True] * 3
    assert not torch.equal(watcher.parameters[0], watcher.parameters[1])
    for run in runs:
        assert float(run.test_accuracy.diagonal().min()) > 0.6, run.test_accuracy
        for o in range(3):  # no forgetting in any measure: the column is one number
            assert run.test_loss[o:, o].unique().numel() == 1


@pytest.mark.parametrize("name", STRICT)
def test_without_the_mask_on_gradients_the_bits_change(name):
    """The check above can fail."""
    make_learner, make_model = STRICT[name]
    tasks, learner = make_tasks(2), make_learner()
    learner.transform_ = id  # leaves the gradients alone
    watcher = Watcher(learner, tasks)
    learn(make_model, tasks, learner, Schedule(lr=0.1, epochs=2), seeds=[1], weight_decay=1e-2)
    assert watcher.equal == [False]


@pytest.mark.parametrize("name", STRICT)
def test_a_run_stopped_inside_a_task_goes_on_to_the_same_bits(name, tmp_path):
    make_learner, make_model = STRICT[name]
    tasks = make_tasks(2, samples=40)
    schedule = Schedule(lr=0.05, epochs=4)
    options = {"seeds": SEEDS, "momentum": 0.5, "weight_decay": 1e-3}
    (whole, _) = learn(make_model, tasks, make_learner(), schedule, **options)

    stopping = make_learner()
    original, done = stopping.after_step, []

    def after_step(population, step):
        original(population, step)
        done.append(step)
        if len(done) == 27:  # in the second task, after its pruning or first rewiring
            raise RuntimeError("stop")

    stopping.after_step = after_step
    files = {"checkpoint": tmp_path / "run.safetensors", "checkpoint_every": 5}
    with pytest.raises(RuntimeError, match="stop"):
        learn(make_model, tasks, stopping, schedule, **options, **files)
    assert done[-1].task == 1
    (again, _) = learn(make_model, tasks, make_learner(), schedule, **options, **files)
    assert torch.equal(whole.snapshots, again.snapshots)
    assert torch.equal(whole.test_loss.nan_to_num(), again.test_loss.nan_to_num())


# ---- PackNet -------------------------------------------------------------------------------------


def trained_packnet(tasks, model=None, **options):
    learner = PackNet(**options)
    population = population_of(
        [mlp(SIZES, seed=s) if model is None else model(s) for s in SEEDS], SEEDS
    )
    learn(population, tasks, learner, SCHEDULE)
    return learner, population


def test_packnet_prunes_a_fixed_share_of_what_the_task_owns_in_every_layer():
    learner, population = trained_packnet(make_tasks(1), fraction=0.75)
    for where in prunable(population):
        owner = learner.owner[:, where]
        size = where.stop - where.start
        assert (owner == 0).sum(1).tolist() == [int(0.75 * size)] * 2
        pruned = population.parameters[:, where][owner == 0]
        assert bool((pruned == 0).all())


def test_packnet_prunes_the_smallest():
    population = population_of([mlp((4, 3, 2), bias=False)], [0])
    learner = PackNet(0.5)
    learner.before_task(population, 0, make_tasks(1)[0].train)
    before = population.parameters.clone()
    learner.prune_(population)
    for where in prunable(population):
        kept = learner.owner[0, where] == 1
        assert before[0, where][kept].abs().min() >= before[0, where][~kept].abs().max()


def test_ties_do_not_prune_more_and_a_count_of_zero_prunes_nothing():
    """By threshold, all weights that tie with it go; and the 0-th smallest does not exist."""
    population = population_of([mlp((4, 3, 1), bias=False)], [0])
    population.parameters.zero_()
    learner = PackNet(0.3)
    learner.before_task(population, 0, make_tasks(1)[0].train)
    learner.prune_(population)
    first, last = prunable(population)
    assert int((learner.owner[0, first] == 0).sum()) == 3  # of 12 equal ones
    assert int((learner.owner[0, last] == 0).sum()) == 0  # int(0.3 * 3)


def test_biases_and_normalisation_belong_to_the_first_task():
    learner, population = trained_packnet(make_tasks(2))
    weights = torch.zeros(population.n, dtype=torch.bool)
    for where in prunable(population):
        weights[where] = True
    assert bool((learner.owner[:, ~weights] == 1).all())
    tasks = make_tasks(2, samples=20, width=48, shape=(3, 4, 4))
    net = ModulePopulation(
        [slim_resnet18(3, nf=4, blocks=(1, 1), norm="group", seed=0).float()], [0]
    )
    learner = PackNet(0.5)
    watcher = Watcher(learner, tasks)
    learn(net, tasks, learner, Schedule(lr=0.05, epochs=2))
    slices = net.layout.slices()
    norms = [where for name, where in slices.items() if "norm" in name or "bias" in name]
    assert norms
    for where in norms:
        assert torch.equal(watcher.parameters[0][:, where], watcher.parameters[1][:, where])
    assert watcher.equal == [True]


def test_batch_norm_is_isolated_when_frozen_and_refused_when_it_would_leak():
    tasks = make_tasks(2, samples=20, width=48, shape=(3, 4, 4))

    def model(seed):
        return slim_resnet18(3, nf=4, blocks=(1, 1), seed=seed)

    schedule = Schedule(lr=0.05, epochs=2)
    for policy in ("freeze", "per_task"):
        learner = PackNet(0.5)
        watcher = Watcher(learner, tasks)
        learn(model, tasks, learner, schedule, seeds=[0], batchnorm=policy)
        assert watcher.equal == [True]
    with pytest.raises(ValueError, match="batchnorm='freeze'"):
        learn(model, tasks, PackNet(0.5), schedule, seeds=[0], batchnorm="running")


def test_pruned_weights_stay_zero_while_momentum_fine_tunes_the_rest():
    tasks, learner = make_tasks(1), PackNet(0.5, prune_at=0.5)
    population = population_of([mlp(SIZES, seed=0)], [0])
    learn(population, tasks, learner, SCHEDULE, momentum=0.9, weight_decay=1e-2)
    assert bool((population.parameters[learner.owner == 0] == 0).all())
    assert int((learner.owner == 0).sum()) > 0


def test_a_gradient_that_is_not_finite_does_not_reach_a_frozen_weight():
    learner, population = trained_packnet(make_tasks(1))
    learner.before_task(population, 1, make_tasks(1)[0].train)
    population.gradients.fill_(float("nan"))
    learner.transform_(population)
    assert bool((population.gradients[learner.owner != 2] == 0).all())
    assert bool(population.gradients[learner.owner == 2].isnan().all())


def test_packnet_says_when_nothing_is_free_and_refuses_impossible_settings():
    tasks = make_tasks(2)
    with pytest.raises(ValueError, match="larger fraction than 0"):
        trained_packnet(tasks, fraction=0.0)
    with pytest.raises(ValueError, match="fraction"):
        PackNet(1.0)
    with pytest.raises(ValueError, match="prune_at"):
        PackNet(0.5, prune_at=0.0)


def test_a_task_is_predicted_with_its_own_and_earlier_weights_only():
    learner, population = trained_packnet(make_tasks(3))
    for task in range(3):
        used = learner.weights_for(population, task) != 0
        assert not bool(used[(learner.owner == 0) | (learner.owner > task + 1)].any())
    assert learner.notes[2]["owned"] == (learner.owner == 3).sum(1).tolist()


# ---- SpaceNet ------------------------------------------------------------------------------------


def test_spacenet_keeps_the_number_of_connections_while_it_rewires():
    tasks, learner = make_tasks(2), spacenet()
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
                old, new = before[s, layer.weight] == mine, after[s, layer.weight] == mine
                assert int(new.sum()) == count
                grown = int((new & ~old).sum())
                assert 0 < grown <= int(0.2 * count)  # fewer where no place is open
    free = learner.weights_for(population, 1)[learner.owner == 0]
    assert bool((free == 0).all())


def test_spacenet_drops_the_least_important_and_grows_between_important_neurons():
    population = population_of([mlp((4, 4, 2), bias=False)], [0])
    learner = SpaceNet((3,), (1,), (6, 4), dropped=0.34)
    learner.before_task(population, 0, make_tasks(1, width=4)[0].train)
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
    tasks, learner = make_tasks(3), spacenet()
    population = population_of([mlp(SIZES, seed=0)], [0])
    reserved = []
    original = learner.after_task

    def after_task(population, task, samples):
        original(population, task, samples)
        reserved.append([taken.clone() for taken in learner._taken])

    learner.after_task = after_task
    learn(population, tasks, learner, SCHEDULE)
    assert [int(taken.sum()) for taken in reserved[0]] == [3, 2]
    for hidden in range(2):
        into = learner._layers[hidden].weight_of(learner.owner)[0]
        out = learner._layers[hidden + 1].weight_of(learner.owner)[0]
        for task in range(2):
            neurons = reserved[task][hidden][0]
            assert int(into[neurons].max()) <= task + 1
            if hidden == 0:  # the last layer is laid anew for every task
                assert int(out[:, neurons].max()) <= task + 1


def test_as_published_later_tasks_disturb_earlier_ones_through_shared_neurons():
    tasks = make_tasks(3)
    equal = {}
    for isolate in (True, False):
        learner = spacenet(isolate=isolate)
        watcher = Watcher(learner, tasks)
        learn(lambda seed: mlp(SIZES, seed=seed), tasks, learner, SCHEDULE, seeds=[1])
        equal[isolate] = watcher.equal
    assert equal[True] == [True] * 3
    assert False in equal[False]


def test_spacenet_refuses_what_it_cannot_allocate():
    samples = make_tasks(1)[0].train
    population = population_of([mlp(SIZES, seed=0)], [0])
    with pytest.raises(ValueError, match="not reserved"):
        SpaceNet((17, 5), (0, 0), (10, 10, 5)).before_task(population, 0, samples)
    with pytest.raises(ValueError, match="fewer than connections=31"):
        SpaceNet((6, 5), (0, 0), (30, 31, 5)).before_task(population, 0, samples)
    with pytest.raises(ValueError, match="4 numbers for a model of 3 layers"):
        SpaceNet((6, 5, 5), (0, 0, 0), (9, 9, 9, 9)).before_task(population, 0, samples)
    net = ModulePopulation([kwinners_mlp(SIZES)], [0])
    with pytest.raises(ValueError, match="plain MLP"):
        spacenet().before_task(net, 0, samples)
    with pytest.raises(ValueError, match="cannot exceed"):
        SpaceNet((3,), (4,), (1, 1))


# ---- Progressive nets ----------------------------------------------------------------------------


def test_the_lateral_connections_run():
    """In a known code the list of old columns stays empty and no lateral is ever evaluated."""
    model = progressive_mlp(SIZES, 3, seed=0)
    inputs = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    before = model(inputs, 2).detach()
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.columns[0].layers[0].weight.mul_(2.0)
    assert not torch.equal(other(inputs, 2), before)
    cross_entropy(model(inputs, 2), torch.tensor([0, 1, 2, 0, 1])).backward()
    for adapter in model.columns[2].adapters:
        for parameter in adapter.parameters():
            assert float(parameter.grad.abs().max()) > 0
    for earlier in model.columns[:2]:
        assert all(parameter.grad is None for parameter in earlier.parameters())


def test_a_column_is_the_published_formula():
    model = progressive_mlp((4, 5, 3), 2, seed=3, dtype=torch.float64)
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    first, second = model.columns
    adapter = second.adapters[0]
    hidden = first.layers[0](x).relu()
    lateral = adapter.reduce(adapter.alpha * hidden).relu() @ adapter.expand.weight.T
    expected = second.layers[1](second.layers[0](x).relu()) + lateral
    torch.testing.assert_close(model(x, 1), expected)
    assert adapter.alpha.tolist() == pytest.approx([0.01])


def test_a_progressive_network_needs_a_column_per_task():
    tasks = make_tasks(3)
    with pytest.raises(ValueError, match="no column for task 2"):
        learn(
            lambda seed: progressive_mlp(SIZES, 2, seed=seed), tasks, Progressive(), SCHEDULE,
            seeds=[0],
        )  # fmt: skip
    with pytest.raises(ValueError, match=r"columns\.0"):
        learn(lambda seed: mlp(SIZES, seed=seed), tasks, Progressive(), SCHEDULE, seeds=[0])
    with pytest.raises(ValueError, match=r"tasks 0\.\.1"):
        progressive_mlp(SIZES, 2)(torch.zeros(1, 8), 2)


# ---- k-winners -----------------------------------------------------------------------------------


def test_exactly_k_units_win_even_when_they_tie():
    assert top_units(torch.zeros(4, 10), 3).sum(1).tolist() == [3] * 4
    threshold = torch.zeros(4, 10) >= torch.zeros(4, 10).kthvalue(8, dim=1).values[:, None]
    assert threshold.sum(1).tolist() == [10] * 4  # what a threshold would have let through


def test_the_largest_units_pass_unchanged_and_more_of_them_in_evaluation(generator):
    layer = KWinners(40, 0.1, boost=0.0)
    x = torch.rand(7, 40, generator=generator) + 0.1
    for training, k in ((True, 4), (False, 6)):
        layer.train(training)
        out = layer(x)
        assert (out > 0).sum(1).tolist() == [k] * 7
        assert torch.equal(out[out > 0], x[out > 0])
        assert bool((torch.where(out > 0, x, math.inf).min(1).values
                     >= torch.where(out > 0, -math.inf, x).max(1).values).all())  # fmt: skip


def test_boosting_chooses_but_does_not_scale_and_is_absent_in_evaluation(generator):
    layer = KWinners(20, 0.25, boost=5.0)
    x = torch.rand(9, 20, generator=generator) + 1.0
    layer.duty[:10] = 1.0  # the first half has won always
    out = layer(x)
    assert bool((out[:, :10] == 0).all())
    assert torch.equal(out[out > 0], x[out > 0])
    layer.eval()
    before = layer(x)
    layer.duty.zero_()
    assert torch.equal(layer(x), before)


def test_duty_follows_the_winners_in_training_only(generator):
    layer = KWinners(10, 0.2, boost=0.0, period=1)
    x = torch.rand(8, 10, generator=generator)
    wins = (layer(x) > 0).float().mean(0)
    torch.testing.assert_close(layer.duty, wins)
    layer.eval()
    layer(-x)
    torch.testing.assert_close(layer.duty, wins)


def test_busy_units_take_part_with_probability_exp_minus_alpha_times_their_share():
    layer = KWinners(4, 0.5)
    layer.discourage(torch.tensor([0.0, 5.0, 10.0, 0.0]), alpha=2.0)
    expected = [1.0, math.exp(-1.0), math.exp(-2.0), 1.0]
    assert layer.keep.tolist() == pytest.approx(expected)
    layer.discourage(torch.tensor([20.0, 0.0, 0.0, 0.0]), alpha=2.0)  # counts add up over tasks
    expected = [math.exp(-2.0), math.exp(-0.5), math.exp(-1.0), 1.0]
    assert layer.keep.tolist() == pytest.approx(expected)


def test_a_dropped_unit_cannot_win_and_masks_follow_the_seed(generator):
    layer = KWinners(200, 0.5, boost=0.0)
    layer.keep.copy_(torch.tensor([0.0, 0.5, 1.0, 1.0]).repeat(50))
    x = torch.rand(3, 200, generator=generator) + 0.5
    layer.reseed(5)
    first, second = layer(x), layer(x)
    assert bool((first[:, ::4] == 0).all())
    assert not torch.equal(first, second)
    layer.reseed(5)
    assert torch.equal(layer(x), first)
    other = KWinners(200, 0.5, boost=0.0, layer=1)
    other.keep.copy_(layer.keep)
    other.reseed(5)
    assert not torch.equal(other(x), first)  # layers of one network drop different units
    share = torch.stack([_won(layer, x, seed)[1::4].float().mean() for seed in range(40)]).mean()
    assert 0.3 < float(share) < 0.6


def _won(layer, x, seed):
    layer.reseed(seed)
    return (layer(x) > 0).any(0)


def test_heterogeneous_dropout_steers_later_tasks_to_other_units():
    tasks = make_tasks(2)

    def overlap(alpha):
        population = ModulePopulation(
            [kwinners_mlp((8, 60, 60, 3), 0.1, bias=True, seed=s) for s in SEEDS], SEEDS
        )
        learn(population, tasks, HeterogeneousDropout(SGD(), alpha), Schedule(lr=0.2, epochs=5))
        total = 0.0
        for s in range(2):
            counts = [winning_counts(population, s, o, tasks[o].train.inputs) for o in range(2)]
            a, b = (torch.cat(one).double() for one in counts)
            total += float(a @ b / a.norm() / b.norm())
        return total / 2

    assert overlap(8.0) < overlap(0.0)


def test_heterogeneous_dropout_wraps_a_learner_and_resumes(tmp_path):
    tasks = make_tasks(2, samples=40)
    options = {"seeds": SEEDS, "checkpoint_every": 3}

    def model(seed):
        return kwinners_mlp((8, 30, 3), 0.2, seed=seed)

    schedule = Schedule(lr=0.05, epochs=3)
    whole = learn(model, tasks, HeterogeneousDropout(SGD(), 2.0), schedule, **options)
    (mean,) = whole[0].notes[0]["keep"]  # of the one layer
    assert math.exp(-2.0) < mean < 1.0
    stopping = HeterogeneousDropout(SGD(), 2.0)
    original, done = stopping.after_step, []

    def after_step(population, step):
        original(population, step)
        done.append(step.task)
        if len(done) == 17:
            raise RuntimeError("stop")

    stopping.after_step = after_step
    options["checkpoint"] = tmp_path / "run.safetensors"
    with pytest.raises(RuntimeError, match="stop"):
        learn(model, tasks, stopping, schedule, **options)
    assert done[-1] == 1
    again = learn(model, tasks, HeterogeneousDropout(SGD(), 2.0), schedule, **options)
    assert torch.equal(whole[1].snapshots, again[1].snapshots)
    for name, value in whole[0].buffers.items():
        assert torch.equal(value, again[0].buffers[name]), name


def test_on_top_of_gpm_the_stored_inputs_keep_their_outputs():
    tasks = make_tasks(2, samples=12, width=30)
    learner = HeterogeneousDropout(GPM(1.0, samples=12), alpha=1.0)
    population = ModulePopulation(
        [kwinners_mlp((30, 40, 3), 0.3, seed=0, dtype=torch.float64)], [0]
    )
    stored = tasks[0].train.inputs.double()
    kept = []
    original = learner.after_task

    def after_task(population, task, samples):
        original(population, task, samples)
        kept.append(population.logits(stored, 0).clone())

    learner.after_task = after_task
    before = population.parameters.clone()
    runs = learn(population, tasks, learner, SCHEDULE)
    torch.testing.assert_close(kept[1], kept[0], atol=1e-11, rtol=0)
    assert float((runs[0].snapshots[1] - runs[0].snapshots[0]).norm()) > 0.05
    assert not torch.equal(before, population.parameters)
    assert set(runs[0].notes[0]) >= {"ranks", "keep"}


def test_heterogeneous_dropout_needs_k_winners():
    with pytest.raises(ValueError, match="KWinners"):
        learn(
            lambda seed: mlp(SIZES, seed=seed), make_tasks(1), HeterogeneousDropout(SGD()),
            SCHEDULE, seeds=[0],
        )  # fmt: skip


# ---- Powerpropagation ----------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [1.0, 2.0, 3.5])
def test_reparametrising_keeps_the_function(alpha, generator):
    weight = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(power(root(weight, alpha), alpha), weight)
    plain = mlp(SIZES, seed=0, dtype=torch.float64)
    x = torch.randn(6, 8, generator=generator, dtype=torch.float64)
    expected = plain(x).detach()
    powered = powerpropagate(copy.deepcopy(plain), alpha)
    torch.testing.assert_close(powered(x), expected)
    assert [n for n, _ in powered.named_parameters()] == [n for n, _ in plain.named_parameters()]
    net = slim_resnet18(3, nf=4, blocks=(1, 1), norm="group", seed=0, dtype=torch.float64)
    images = torch.randn(2, 3, 4, 4, generator=generator, dtype=torch.float64)
    expected = net(images).detach()
    torch.testing.assert_close(powerpropagate(net, alpha)(images), expected)


def test_gradients_are_scaled_by_the_weight_and_vanish_at_zero(generator):
    alpha = 3.0
    model = powerpropagate(nn.Sequential(nn.Linear(4, 3).double()), alpha)
    phi = model[0].weight
    with torch.no_grad():
        phi[0, 0] = 0.0
    x = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    model(x).square().sum().backward()
    w = effective_weights(model)["0"].requires_grad_()
    nn.functional.linear(x, w, model[0].bias.detach()).square().sum().backward()
    torch.testing.assert_close(phi.grad, w.grad * alpha * phi.detach().abs() ** (alpha - 1))
    assert phi.grad[0, 0] == 0  # a weight pruned to zero would never move again
    assert w.grad[0, 0] != 0


def test_free_weights_start_again_from_their_initial_values_not_from_zero():
    tasks, learner = make_tasks(2), Powerpropagation(0.6)
    population = population_of([powerpropagate(mlp(SIZES, seed=0), 2.0)], [0])
    initial = population.parameters.clone()
    learn(population, tasks[:1], learner, SCHEDULE)
    free = learner.owner == 0
    assert bool((population.parameters[free] == 0).all())
    learner.before_task(population, 1, tasks[1].train)
    assert torch.equal(population.parameters[free], initial[free])
    assert bool((learner.owner[free] == 2).all())


def test_pruning_goes_by_the_size_of_the_weight_that_the_layer_uses():
    model = powerpropagate(mlp((6, 5, 2), seed=1, bias=False), 2.0)
    population = population_of([model], [0])
    used = torch.cat([w.flatten() for w in effective_weights(model).values()]).abs()
    learner = Powerpropagation(0.5)
    learner.before_task(population, 0, make_tasks(1)[0].train)
    learner.prune_(population)
    for where in prunable(population):
        kept = learner.owner[0, where] == 1
        assert used[where][kept].min() >= used[where][~kept].max()


def test_powerpropagation_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match="powerpropagate"):
        learn(
            lambda seed: mlp(SIZES, seed=seed), make_tasks(1), Powerpropagation(), SCHEDULE,
            seeds=[0],
        )  # fmt: skip
    with pytest.raises(ValueError, match="alpha must be 1"):
        powerpropagate(mlp(SIZES), 0.5)
    with pytest.raises(ValueError, match="found no"):
        powerpropagate(nn.Sequential(nn.ReLU()))
