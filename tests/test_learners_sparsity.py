"""Learners by sparsity: k-winners with heterogeneous dropout, and powerpropagation."""

import copy
import math

import pytest
import torch
from torch import nn

from curvlab.learners import SGD
from curvlab.learners.gpm import GPM
from curvlab.learners.kwinners import HeterogeneousDropout, winning_counts
from curvlab.learners.packnet import prunable
from curvlab.learners.population import Population
from curvlab.learners.powerprop import Powerpropagation
from curvlab.learners.stacked import population_of
from curvlab.nets import mlp, slim_resnet18
from curvlab.nets.kwinners import KWinners, kwinners_mlp, top_units
from curvlab.nets.powerprop import power, powerpropagate, root
from curvlab.training import Schedule, learn
from tests.small_problems import cloud_tasks

SIZES = (8, 16, 12, 3)
SEEDS = (1, 2)
SCHEDULE = Schedule(lr=0.2, epochs=6)


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


def test_until_a_period_has_passed_the_duty_is_the_mean_over_all_that_was_seen(generator):
    layer = KWinners(10, 0.3, boost=0.0, period=20)
    batches = [torch.rand(size, 10, generator=generator) for size in (4, 5, 6, 8)]
    won = [(layer(x) > 0).double() for x in batches]
    everything = torch.cat(won[:3]).mean(0)  # 15 samples: fewer than a period
    before = KWinners(10, 0.3, boost=0.0, period=20)
    for x in batches[:3]:
        before(x)
    torch.testing.assert_close(before.duty.double(), everything, rtol=1e-5, atol=1e-6)
    expected = (everything * 12 + won[3].sum(0)) / 20  # nupic.torch's rule once there are 20
    torch.testing.assert_close(layer.duty.double(), expected, rtol=1e-5, atol=1e-6)


def test_images_have_winners_over_the_whole_image_and_one_duty_per_channel(generator):
    layer = KWinners(5, 0.2, boost=4.0, period=50)
    images = torch.rand(6, 5, 3, 4, generator=generator) + 0.1
    out = layer(images)
    assert (out > 0).flatten(1).sum(1).tolist() == [12] * 6
    torch.testing.assert_close(layer.duty, (out > 0).float().mean((0, 2, 3)))
    layer.duty.copy_(torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0]))
    boosted = images * torch.exp(-4.0 * layer.duty).view(1, 5, 1, 1)
    expected = boosted.flatten(1).topk(12, dim=1).indices.sort(1).values
    found = (layer(images) > 0).flatten(1)
    assert torch.equal(found.nonzero()[:, 1].view(6, 12), expected)
    layer.keep.copy_(torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0]))
    assert bool((layer(images)[:, 0] == 0).all())
    layer.eval()
    assert (layer(images) > 0).flatten(1).sum(1).tolist() == [18] * 6
    with pytest.raises(ValueError, match=r"images \(N, 5, H, W\)"):
        layer(images[:, :4])


class Convolutional(nn.Module):
    """A convolution and k-winners over its images."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3, bias=False)
        self.winners = KWinners(6, 0.2, boost_decay=0.5, period=30)
        self.head = nn.Linear(24, 3, bias=False)

    def forward(self, images):
        return self.head(self.winners(self.conv(images)).flatten(1))


def test_the_boost_decays_with_every_epoch_and_convolutions_learn_over_gpm():
    tasks = cloud_tasks(2, samples=24, width=16, shape=(1, 4, 4))
    learner = HeterogeneousDropout(GPM(0.9, samples=24))

    def build(seed):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return Convolutional()

    (run,) = learn(build, tasks, learner, Schedule(lr=0.2, epochs=3), seeds=[1])
    assert run.buffers["winners.strength"].tolist() == [0.5**3, 0.5**6]
    assert run.buffers["winners.seen"].tolist() == [72.0, 144.0]
    assert run.buffers["winners.count"].shape == (2, 6)
    assert float(run.test_accuracy.diagonal().min()) > 0.5  # guessing gives a third


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


def test_where_fewer_than_k_units_take_part_the_dropped_do_not_fill_up(generator):
    layer = KWinners(10, 0.5, boost=0.0)
    layer.keep.copy_(torch.tensor([1.0, 1.0] + [0.0] * 8))
    out = layer(torch.rand(6, 10, generator=generator) + 0.5)
    assert (out > 0).sum(1).tolist() == [2] * 6


def _won(layer, x, seed):
    layer.reseed(seed)
    return (layer(x) > 0).any(0)


def test_heterogeneous_dropout_steers_later_tasks_to_other_units():
    tasks = cloud_tasks(2)

    def overlap(alpha):
        population = Population(
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
    tasks = cloud_tasks(2, samples=40)
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
    tasks = cloud_tasks(2, samples=12, width=30)
    learner = HeterogeneousDropout(GPM(1.0, samples=12), alpha=1.0)
    population = Population([kwinners_mlp((30, 40, 3), 0.3, seed=0, dtype=torch.float64)], [0])
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
            lambda seed: mlp(SIZES, seed=seed), cloud_tasks(1), HeterogeneousDropout(SGD()),
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
    w = power(phi.detach(), alpha).requires_grad_()
    nn.functional.linear(x, w, model[0].bias.detach()).square().sum().backward()
    torch.testing.assert_close(phi.grad, w.grad * alpha * phi.detach().abs() ** (alpha - 1))
    assert phi.grad[0, 0] == 0  # a weight pruned to zero would never move again
    assert w.grad[0, 0] != 0


def test_free_weights_start_again_from_their_initial_values_not_from_zero():
    tasks, learner = cloud_tasks(2), Powerpropagation(0.6)
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
    used = torch.cat([power(w.detach(), 2.0).flatten() for w in model.parameters()]).abs()
    learner = Powerpropagation(0.5)
    learner.before_task(population, 0, cloud_tasks(1)[0].train)
    learner.prune_(population)
    for where in prunable(population):
        kept = learner.owner[0, where] == 1
        assert used[where][kept].min() >= used[where][~kept].max()


def test_powerpropagation_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match="powerpropagate"):
        learn(
            lambda seed: mlp(SIZES, seed=seed), cloud_tasks(1), Powerpropagation(), SCHEDULE,
            seeds=[0],
        )  # fmt: skip
    with pytest.raises(ValueError, match="alpha= must lie in"):
        powerpropagate(mlp(SIZES), 0.5)
    with pytest.raises(ValueError, match="found no"):
        powerpropagate(nn.Sequential(nn.ReLU()))
