"""What learners that project or penalise have in common: their promises, and both extremes."""

import pytest
import torch

from curvlab.learners import EWC, GPM, OGD, SGD, SGDDagger
from curvlab.training import Schedule, learn
from tests.small_problems import make_tasks, resnet, small, vit

# of a relative leak: |M d| / |d|, or of logits that should not have moved
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}
SCHEDULE = Schedule(0.1, epochs=2)
LEARNERS = {
    "SGD-dagger": lambda: SGDDagger(k=4, samples=30),
    "OGD-GTL": lambda: OGD(0.0, samples=12),
    "OGD-GTL dense": lambda: OGD(0.0, samples=12, structured=False),
    "OGD": lambda: OGD(0.0, samples=5, logits="all"),
}


def memory_rows(learner, s):
    if isinstance(learner, OGD):
        return learner.directions()[s]
    return learner.memory.bases[s].rows().double()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", LEARNERS)
@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.9, 0.05)])
def test_a_whole_task_stays_orthogonal_to_the_memory(name, dtype, momentum, decay):
    """With momentum and weight decay too: they act on the two sides of the projection."""
    held = {}

    def remember(learner):
        after = learner.after_task

        def wrapped(population, task, samples):
            after(population, task, samples)
            held[task] = [memory_rows(learner, s).clone() for s in range(population.size)]

        learner.after_task = wrapped
        return learner

    learner = remember(LEARNERS[name]())
    runs = learn(
        lambda seed: small(seed, dtype), make_tasks(3, dtype=dtype), learner, SCHEDULE,
        seeds=(1, 2), momentum=momentum, weight_decay=decay,
    )  # fmt: skip
    for s, run in enumerate(runs):
        for t in (1, 2):
            rows = held[t - 1][s]
            unit = rows @ rows.T - torch.eye(len(rows), dtype=torch.float64)
            assert float(unit.abs().max()) <= TOLERANCE[dtype]
            moved = run.snapshots[t].double() - run.snapshots[t - 1].double()
            assert float(moved.norm()) > 1e-2  # it did learn
            assert float((rows @ moved).norm() / moved.norm()) <= TOLERANCE[dtype]
        assert len(held[1][s]) > len(held[0][s])


@pytest.mark.parametrize(
    "learner",
    [
        SGDDagger(k=0),
        SGDDagger(epsilon=1.0),
        OGD(1.0, samples=10),
        OGD(1.0, samples=10, structured=False),
        GPM(0.0, bias="augmented"),
        EWC(0.0, samples=10),
    ],
    ids=["k=0", "epsilon=1", "OGD", "OGD dense", "GPM", "EWC"],
)
def test_protecting_nothing_is_sgd_bit_for_bit(learner):
    plain = learn(small, make_tasks(3), SGD(), SCHEDULE, seeds=(1, 2), momentum=0.3)
    runs = learn(small, make_tasks(3), learner, SCHEDULE, seeds=(1, 2), momentum=0.3)
    for run, other in zip(runs, plain, strict=True):
        assert torch.equal(run.snapshots, other.snapshots)


@pytest.mark.parametrize(
    "learner", [SGDDagger(k=10**6), SGDDagger(epsilon=0.0)], ids=["k=P", "epsilon=0"]
)
def test_protecting_everything_makes_the_update_zero(learner):
    for run in learn(small, make_tasks(3), learner, SCHEDULE, seeds=(1, 2), momentum=0.3):
        assert torch.equal(run.snapshots[1:], run.snapshots[:1].expand(2, -1))
        assert run.notes[-1]["directions"] == run.snapshots.shape[1]


@pytest.mark.parametrize(
    ("build", "size", "batchnorm"),
    [(resnet, 8, "freeze"), (vit, 32, None)],
    ids=["resnet", "vit"],
)
@pytest.mark.parametrize(
    "make",
    [
        lambda: SGDDagger(k=2, samples=6, tol=1e-2),
        lambda: OGD(0.01, samples=6),
        lambda: GPM(0.9, samples=6, bias="augmented"),
        lambda: EWC(1.0, samples=6),
    ],
    ids=["SGD-dagger", "OGD", "GPM", "EWC"],
)
def test_learners_train_networks_that_are_no_mlps(build, size, batchnorm, make):
    tasks = make_tasks(2, train=12, test=4, shape=(3, size, size))
    learner = make()
    runs = learn(
        build, tasks, learner, Schedule(0.1), seeds=(1, 2), batch_size=4, batchnorm=batchnorm
    )
    for s, run in enumerate(runs):
        moved = run.snapshots[1].double() - run.snapshots[0].double()
        assert float(moved.norm()) > 0.0
        if isinstance(learner, SGDDagger | OGD):
            rows = memory_rows(learner, s)[: run.notes[0]["directions"]]
            assert float((rows @ moved).norm() / moved.norm()) <= TOLERANCE[torch.float32]
