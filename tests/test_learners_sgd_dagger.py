"""SGD-dagger: the eigenvectors that it keeps, against dense Hessians, and how many."""

import pytest
import torch

from curvlab.learners import SGDDagger
from curvlab.learners.seeds import derived_generator
from curvlab.learners.sgd_dagger import task_hessian
from curvlab.tasks.samples import subset
from curvlab.training import Schedule, learn
from tests.small_problems import make_tasks, small, trained

SCHEDULE = Schedule(0.1, epochs=2)


def test_sgd_dagger_keeps_the_largest_eigenvalues_of_either_sign():
    population, task = trained()
    learner = SGDDagger(k=5, samples=25, tol=1e-9)
    learner.before_task(population, 0, task.train)
    learner.after_task(population, 0, task.train)
    for s in range(2):
        dense = task_hessian(population, s, 0, task.train, 25).dense()
        values, vectors = torch.linalg.eigh(dense)
        order = values.abs().argsort(descending=True)[:5]
        kept = learner.memory.bases[s]
        assert kept.segments[0].values == pytest.approx(values[order].tolist(), rel=1e-6)
        angles = torch.linalg.svdvals(kept.rows() @ vectors[:, order])
        assert float((angles - 1.0).abs().max()) <= 1e-9
    first = learner.memory.bases[0].segments[0].values
    assert min(first) < 0.0 < max(first)  # the case that ordering by sign would get wrong


def test_sgd_dagger_keeps_as_many_as_hold_the_energy():
    population, task = trained()
    kept = []
    for epsilon in (0.5, 0.1, 0.01):
        learner = SGDDagger(epsilon=epsilon, samples=25, tol=1e-6)
        learner.before_task(population, 0, task.train)
        learner.after_task(population, 0, task.train)
        for s in range(2):
            values = torch.linalg.eigvalsh(task_hessian(population, s, 0, task.train, 25).dense())
            squares = values.square().sort(descending=True).values
            shares = squares.cumsum(0) / squares.sum()
            exact = int((shares < 1.0 - epsilon).sum()) + 1
            least, most = learner.notes[0]["least"][s], learner.notes[0]["most"][s]
            assert least <= exact <= max(most, learner.notes[0]["k"][s])
            assert abs(learner.notes[0]["k"][s] - exact) <= 1 + most - least
        kept.append(learner.notes[0]["k"][0])
    assert kept == sorted(kept)
    assert kept[0] < kept[-1]


def test_sgd_dagger_draws_its_subset_from_the_seed():
    population, task = trained()
    before = [task_hessian(population, s, 0, task.train, 25).dense() for s in (0, 1)]
    again = task_hessian(population, 0, 0, task.train, 25).dense()
    assert torch.equal(before[0], again)
    inputs = subset(task.train, 25, seed=derived_generator(1, "hessian", 0)).inputs
    assert not torch.equal(
        inputs, subset(task.train, 25, seed=derived_generator(1, "hessian", 1)).inputs
    )


def test_sgd_dagger_stores_narrow_vectors_with_a_small_leak():
    learner = SGDDagger(k=4, samples=30, storage=torch.float16)
    (run,) = learn(small, make_tasks(2), learner, SCHEDULE, seeds=1)
    moved = (run.snapshots[1] - run.snapshots[0]).double()
    rows = learner.memory.bases[0].rows().double()[:4]
    assert float((rows @ moved).norm() / moved.norm()) <= 1e-4
    assert run.notes[0]["memory_bytes"] < 4 * run.snapshots.shape[1] * 4


def test_sgd_dagger_refuses_two_rules_and_none():
    for arguments in ({}, {"k": 3, "epsilon": 0.1}, {"k": -1}, {"epsilon": 1.5}):
        with pytest.raises(ValueError, match=r"k=|epsilon="):
            SGDDagger(**arguments)
