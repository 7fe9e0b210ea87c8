"""GPM: stored outputs stand still for any step, thresholds count the whole energy, refusals."""

import pytest
import torch
from torch import nn

from curvlab.basis import Basis
from curvlab.layerwise.spans import extend_to_share
from curvlab.learners import GPM, population_of
from curvlab.learners.seeds import derived_generator
from curvlab.tasks.samples import subset
from curvlab.training import Schedule, learn
from tests.small_problems import make_tasks, resnet, small

SCHEDULE = Schedule(0.1, epochs=2)


def stored_logits(population, task, samples, t=0):
    chosen = [
        subset(task.train, samples, seed=derived_generator(seed, "gpm", t))
        for seed in population.seeds
    ]
    return [
        population.logits_of(s, one.inputs, t, population.parameters[s]).detach()
        for s, one in enumerate(chosen)
    ]


class ConvNet(nn.Module):
    """Convolutions with stride, padding and dilation, a shortcut and a head, with biases."""

    def __init__(self, bias=True):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1, bias=bias)
        self.second = nn.Conv2d(4, 5, 3, stride=2, padding=2, dilation=2, bias=bias)
        self.shortcut = nn.Conv2d(4, 5, 1, stride=2, bias=bias)
        self.head = nn.Linear(5, 3, bias=bias)

    def forward(self, images):
        hidden = torch.relu(self.first(images))
        return self.head(torch.relu(self.second(hidden) + self.shortcut(hidden)).mean((2, 3)))


@pytest.mark.parametrize("lr", [0.1, 30.0])
@pytest.mark.parametrize(
    ("models", "shape", "options"),
    [
        (lambda: [small(s, torch.float64) for s in (1, 2)], (6,), {"bias": "augmented"}),
        (lambda: [small(s, torch.float64, bias=False) for s in (1, 2)], (6,), {}),
        (lambda: [ConvNet().double()], (3, 6, 6), {"bias": "augmented"}),
        (lambda: [ConvNet(bias=False).double()], (3, 6, 6), {}),
    ],
    ids=["mlp", "mlp no bias", "conv", "conv no bias"],
)
def test_gpm_freezes_stored_outputs_for_any_step_size(models, shape, options, lr):
    """Stronger than second order: the layers' outputs on stored inputs cannot move at all."""
    tasks = make_tasks(2, train=30, shape=shape, dtype=torch.float64)
    models = models()
    population = population_of(models, range(len(models)))
    samples = 2 if len(shape) == 3 else 4  # few, so that the layers keep free directions
    learner = GPM(1.0, samples=samples, **options)
    learner.before_task(population, 0, tasks[0].train)
    before = stored_logits(population, tasks[0], samples)
    learner.after_task(population, 0, tasks[0].train)
    start = population.parameters.clone()
    for step in range(3):
        rows = slice(step, step + 10)
        inputs = tasks[1].train.inputs[rows].expand(len(models), *tasks[1].train.inputs[rows].shape)
        targets = tasks[1].train.targets[rows].expand(len(models), -1)
        population.gradient_(inputs, targets, 1)
        learner.transform_(population)
        population.parameters.sub_(population.gradients, alpha=lr)
    assert float((population.parameters - start).norm()) > 1e-3
    after = stored_logits(population, tasks[0], samples)
    scale = max(1.0, float(population.parameters.abs().max()) ** 3)
    for old, new in zip(before, after, strict=True):
        assert float((new - old).abs().max()) <= 1e-11 * scale


def test_free_biases_would_break_gpm_and_are_refused():
    tasks = make_tasks(2, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"have biases.*bias='augmented'"):
        learn(lambda seed: small(seed, torch.float64), tasks, GPM(), SCHEDULE, seeds=1)
    # what the refusal prevents: project the weights as GPM does, leave the biases alone
    population = population_of([small(1, torch.float64)], [1])
    learner = GPM(1.0, samples=4, bias="augmented")
    learner.before_task(population, 0, tasks[0].train)
    before = stored_logits(population, tasks[0], 4)[0]
    learner.after_task(population, 0, tasks[0].train)
    population.gradient_(tasks[1].train.inputs[None, :10], tasks[1].train.targets[None, :10], 1)
    free = population.gradients.clone()
    learner.transform_(population)
    for name, where in population.layout.slices().items():
        if name.endswith("bias"):
            population.gradients[:, where] = free[:, where]
    population.parameters -= population.gradients
    assert float((stored_logits(population, tasks[0], 4)[0] - before).abs().max()) > 1e-2


def test_gpm_counts_directions_by_the_whole_energy_from_the_first_task_on():
    """Public code stops one vector short of the threshold in the first task."""
    generator = torch.Generator().manual_seed(4)
    scales = 0.7 ** torch.arange(12, dtype=torch.float64)
    rows = torch.randn(40, 12, generator=generator, dtype=torch.float64) * scales

    def extended(basis, data, threshold):
        found = Basis.exactly(basis, 12)
        extend_to_share(found, data, threshold)
        return found.rows()

    def share(basis, data):
        return float((data @ basis.T).square().sum() / data.square().sum())

    empty = torch.zeros(0, 12, dtype=torch.float64)
    for threshold in (0.5, 0.9, 0.99, 0.9999):
        first = extended(empty, rows, threshold)
        assert share(first, rows) >= threshold > share(first[:-1], rows)
    later = torch.randn(30, 12, generator=generator, dtype=torch.float64) * scales
    first = extended(empty, rows, 0.8)
    assert share(first, later) < 0.97  # of the whole energy, not of what the basis misses
    second = extended(first, later, 0.97)
    assert torch.equal(second[: len(first)], first)
    assert share(second, later) >= 0.97 > share(second[:-1], later)
    assert torch.equal(extended(first, later, 0.5), first)  # held already: nothing is added
    full = extended(second, torch.eye(12, dtype=torch.float64), 1.0)
    assert len(full) == 12
    assert len(extended(full, rows, 1.0)) == 12  # never more than the width
    assert float((full @ full.T - torch.eye(12)).abs().max()) <= 1e-12


def test_gpm_keeps_every_real_direction_at_threshold_one():
    rows = torch.zeros(5, 6, dtype=torch.float64)
    rows[0, 0], rows[1, 1], rows[2, 2] = 1.0, 1e-6, 1e-12
    found = Basis(6, 6, dtype=torch.float64)
    extend_to_share(found, rows, 1.0)
    assert len(found) == 3


def test_thresholds_may_depend_on_layer_or_task():
    tasks = make_tasks(2)
    (run,) = learn(small, tasks, GPM([0.5, 0.9, 1.0], bias="augmented"), SCHEDULE, seeds=1)
    (other,) = learn(
        small, tasks, GPM(lambda t: 0.5 + 0.4 * t, bias="augmented"), SCHEDULE, seeds=1
    )
    assert run.notes[0]["ranks"][0] == other.notes[0]["ranks"][0] < run.notes[0]["ranks"][2]
    assert other.config["threshold_by_task"] == [0.5, 0.9]
    table = [0.5, 0.9]  # as long as the stream, and asked for no more
    (listed,) = learn(small, tasks, GPM(lambda t: table[t], bias="augmented"), SCHEDULE, seeds=1)
    assert torch.equal(listed.snapshots, other.snapshots)
    with pytest.raises(ValueError, match="2 entries, but the model has 3 layers"):
        learn(small, tasks, GPM([0.5, 0.9], bias="augmented"), SCHEDULE, seeds=1)


def test_gpm_refuses_batchnorm_that_moves_and_freezes_what_has_no_inputs():
    tasks = make_tasks(2, train=20, test=4, shape=(3, 8, 8))
    for policy, norm in (("running", "batch"), (None, "batch_untracked")):
        with pytest.raises(ValueError, match="batchnorm='freeze'"):
            learn(
                lambda seed, norm=norm: resnet(seed, norm), tasks, GPM(bias="augmented"), SCHEDULE,
                seeds=1, batchnorm=policy,
            )  # fmt: skip
    for policy in ("freeze", "per_task"):
        learner = GPM(0.9, samples=10, bias="augmented")
        population = population_of([resnet(1)], [1], batchnorm=policy)
        (run,) = learn(population, tasks, learner, Schedule(0.01))
        moved = run.snapshots[1] - run.snapshots[0]
        norms = [w for name, w in population.layout.slices().items() if "norm" in name]
        assert norms
        assert all(bool((moved[where] == 0.0).all()) for where in norms)
        assert float(moved.norm()) > 0.0


def test_gpm_holds_old_logits_still_through_frozen_batchnorm():
    tasks = make_tasks(2, train=20, test=4, shape=(3, 8, 8), dtype=torch.float64)
    population = population_of([resnet(1).double()], [1], batchnorm="freeze")
    learner, kept = GPM(1.0, samples=1, bias="augmented"), {}
    after = learner.after_task

    def remember(runs, t, samples):
        kept.setdefault("logits", stored_logits(runs, tasks[0], 1)[0])
        after(runs, t, samples)

    learner.after_task = remember
    (run,) = learn(population, tasks, learner, Schedule(0.05))
    assert float((run.snapshots[1] - run.snapshots[0]).norm()) > 1e-3
    drift = stored_logits(population, tasks[0], 1)[0] - kept["logits"]
    assert float(drift.abs().max()) <= 1e-10
