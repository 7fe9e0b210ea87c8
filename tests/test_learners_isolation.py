"""Isolation learners: old tasks' logits keep their bits, and each known defect has its test."""

import copy

import pytest
import torch
from torch.nn.functional import cross_entropy

from curvlab.learners.packnet import PackNet, prunable
from curvlab.learners.population import Population
from curvlab.learners.powerprop import Powerpropagation
from curvlab.learners.progressive import Progressive
from curvlab.learners.stacked import population_of
from curvlab.nets import mlp, slim_resnet18, vit_cifar
from curvlab.nets.powerprop import powerpropagate
from curvlab.nets.progressive import progressive_mlp
from curvlab.training import Schedule, learn
from tests.isolated_learning import SIZES, Watcher, spacenet
from tests.small_problems import cloud_tasks

SEEDS = (1, 2)
SCHEDULE = Schedule(lr=0.2, epochs=6)


# learner, model: every strict isolation learner
STRICT = {
    "packnet": (lambda: PackNet(0.6), lambda seed: mlp(SIZES, seed=seed)),
    "spacenet": (spacenet, lambda seed: mlp(SIZES, seed=seed)),
    "progressive": (Progressive, lambda seed: progressive_mlp(SIZES, 3, seed=seed)),
    "powerprop": (
        lambda: Powerpropagation(0.75),
        lambda seed: powerpropagate(mlp(SIZES, seed=seed), 2.0),
    ),
}


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "weight_decay": 1e-2}], ids=str)
@pytest.mark.parametrize("name", STRICT)
def test_old_tasks_keep_their_logits_to_the_bit_and_new_ones_are_learned(name, options):
    make_learner, make_model = STRICT[name]
    tasks, learner = cloud_tasks(), make_learner()
    watcher = Watcher(learner, tasks)
    schedule = Schedule(lr=0.02 if options else 0.2, epochs=10)
    runs = learn(make_model, tasks, learner, schedule, seeds=SEEDS, **options)
    assert watcher.equal == [True] * 3
    assert not torch.equal(watcher.parameters[0], watcher.parameters[1])
    for run in runs:
        assert float(run.test_accuracy.diagonal().min()) > 0.6, run.test_accuracy
        for o in range(3):  # no forgetting in any measure: the column is one number
            assert run.test_loss[o:, o].unique().numel() == 1


# old columns of a progressive network get neither a gradient nor decay, mask or not
@pytest.mark.parametrize("name", sorted(set(STRICT) - {"progressive"}))
def test_without_the_mask_on_gradients_the_bits_change(name):
    """The check above can fail."""
    make_learner, make_model = STRICT[name]
    tasks, learner = cloud_tasks(2), make_learner()
    learner.transform_ = id  # leaves the gradients alone
    watcher = Watcher(learner, tasks)
    learn(make_model, tasks, learner, Schedule(lr=0.1, epochs=2), seeds=[1], weight_decay=1e-2)
    assert watcher.equal == [False]


@pytest.mark.parametrize("name", STRICT)
def test_a_run_stopped_inside_a_task_goes_on_to_the_same_bits(name, tmp_path):
    make_learner, make_model = STRICT[name]
    tasks = cloud_tasks(2, samples=40)
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
    learner, population = trained_packnet(cloud_tasks(1), fraction=0.75)
    for where in prunable(population):
        owner = learner.owner[:, where]
        size = where.stop - where.start
        assert (owner == 0).sum(1).tolist() == [int(0.75 * size)] * 2
        pruned = population.parameters[:, where][owner == 0]
        assert bool((pruned == 0).all())


def test_packnet_prunes_the_smallest():
    population = population_of([mlp((4, 3, 2), bias=False)], [0])
    learner = PackNet(0.5)
    learner.before_task(population, 0, cloud_tasks(1)[0].train)
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
    learner.before_task(population, 0, cloud_tasks(1)[0].train)
    learner.prune_(population)
    first, last = prunable(population)
    assert int((learner.owner[0, first] == 0).sum()) == 3  # of 12 equal ones
    assert int((learner.owner[0, last] == 0).sum()) == 0  # int(0.3 * 3)


def test_biases_and_normalisation_belong_to_the_first_task():
    learner, population = trained_packnet(cloud_tasks(2))
    weights = torch.zeros(population.n, dtype=torch.bool)
    for where in prunable(population):
        weights[where] = True
    assert bool((learner.owner[:, ~weights] == 1).all())
    tasks = cloud_tasks(2, samples=20, width=48, shape=(3, 4, 4))
    net = Population([slim_resnet18(3, nf=4, blocks=(1, 1), norm="group", seed=0).float()], [0])
    learner = PackNet(0.5)
    watcher = Watcher(learner, tasks)
    learn(net, tasks, learner, Schedule(lr=0.05, epochs=2))
    slices = net.layout.slices()
    norms = [where for name, where in slices.items() if "norm" in name or "bias" in name]
    assert norms
    for where in norms:
        assert torch.equal(watcher.parameters[0][:, where], watcher.parameters[1][:, where])
    assert watcher.equal == [True]


def test_packnet_isolates_tasks_in_a_transformer():
    tasks = cloud_tasks(2, samples=20, width=48, shape=(3, 4, 4))

    def model(seed):
        return vit_cifar(3, hidden=12, depth=1, heads=2, side=4, patch=2, seed=seed)

    learner = PackNet(0.5)
    watcher = Watcher(learner, tasks)
    (run,) = learn(model, tasks, learner, Schedule(lr=0.05, epochs=3), seeds=[0])
    assert watcher.equal == [True]
    assert not torch.equal(*run.snapshots)


def test_batch_norm_is_isolated_when_frozen_and_refused_when_it_would_leak():
    tasks = cloud_tasks(2, samples=20, width=48, shape=(3, 4, 4))

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
    tasks, learner = cloud_tasks(1), PackNet(0.5, prune_at=0.5)
    population = population_of([mlp(SIZES, seed=0)], [0])
    learn(population, tasks, learner, SCHEDULE, momentum=0.9, weight_decay=1e-2)
    assert bool((population.parameters[learner.owner == 0] == 0).all())
    assert int((learner.owner == 0).sum()) > 0


def test_a_gradient_that_is_not_finite_does_not_reach_a_frozen_weight():
    learner, population = trained_packnet(cloud_tasks(1))
    learner.before_task(population, 1, cloud_tasks(1)[0].train)
    population.gradients.fill_(float("nan"))
    learner.transform_(population)
    assert bool((population.gradients[learner.owner != 2] == 0).all())
    assert bool(population.gradients[learner.owner == 2].isnan().all())


def test_packnet_says_when_nothing_is_free_and_refuses_impossible_settings():
    tasks = cloud_tasks(2)
    with pytest.raises(ValueError, match="larger fraction than 0"):
        trained_packnet(tasks, fraction=0.0)
    with pytest.raises(ValueError, match="fraction"):
        PackNet(1.0)
    with pytest.raises(ValueError, match="prune_at"):
        PackNet(0.5, prune_at=0.0)


def test_a_task_is_predicted_with_its_own_and_earlier_weights_only():
    learner, population = trained_packnet(cloud_tasks(3))
    for task in range(3):
        used = learner.weights_for(population, task) != 0
        assert not bool(used[(learner.owner == 0) | (learner.owner > task + 1)].any())
    assert learner.notes[2]["owned"] == (learner.owner == 3).sum(1).tolist()


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
    tasks = cloud_tasks(3)
    with pytest.raises(ValueError, match=r"columns for tasks 0\.\.1; got task 2"):
        learn(
            lambda seed: progressive_mlp(SIZES, 2, seed=seed), tasks, Progressive(), SCHEDULE,
            seeds=[0],
        )  # fmt: skip
    with pytest.raises(ValueError, match=r"columns\.0"):
        learn(lambda seed: mlp(SIZES, seed=seed), tasks, Progressive(), SCHEDULE, seeds=[0])
    with pytest.raises(ValueError, match=r"tasks 0\.\.1"):
        progressive_mlp(SIZES, 2)(torch.zeros(1, 8), 2)
