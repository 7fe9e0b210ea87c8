"""Branching: a run that takes its first task over from plain SGD is the run trained alone."""

from dataclasses import replace

import pytest
import torch

from curvlab.learners import EWC, GPM, OGD, SGD, PackNet, SGDDagger
from curvlab.nets import mlp
from curvlab.training import Run, Schedule, learn
from tests.small_problems import make_tasks, resnet

SEEDS = (11, 13)
SCHEDULE = Schedule(0.1, 0.05, epochs=2)
LEARNERS = {
    "SGD": SGD,
    "SGD-dagger": lambda: SGDDagger(k=3, samples=20),
    "OGD": lambda: OGD(0.01, samples=12),
    "GPM": lambda: GPM(0.9, samples=20, bias="augmented"),
    "EWC": lambda: EWC(10.0, samples=20),
}


def three_tasks():
    return make_tasks(3, train=36)


def build(seed):
    return mlp((6, 8, 8, 3), seed=seed)


def first_task(**settings):
    return learn(build, three_tasks()[:1], SGD(), SCHEDULE, seeds=SEEDS, **settings)


def assert_same(runs, others):
    for run, other in zip(runs, others, strict=True):
        assert torch.equal(run.snapshots, other.snapshots)
        assert torch.equal(run.test_loss.nan_to_num(), other.test_loss.nan_to_num())
        assert run.buffers.keys() == other.buffers.keys()
        assert all(torch.equal(run.buffers[name], other.buffers[name]) for name in run.buffers)


@pytest.mark.parametrize("name", LEARNERS)
def test_a_branch_has_the_bits_of_training_alone(name):
    alone = learn(build, three_tasks(), LEARNERS[name](), SCHEDULE, seeds=SEEDS)
    branch = learn(
        build, three_tasks(), LEARNERS[name](), SCHEDULE, seeds=SEEDS, first=first_task()
    )
    assert_same(alone, branch)
    assert all(run.notes[0]["steps"] == alone[0].notes[0]["steps"] for run in branch)


@pytest.mark.parametrize("policy", ["freeze", "per_task", "running"])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_a_branch_takes_over_running_statistics_and_momentum(policy, momentum, tmp_path):
    tasks = make_tasks(3, train=12, shape=(3, 8, 8))
    options = {"seeds": SEEDS, "batchnorm": policy, "momentum": momentum}

    def dagger():
        return SGDDagger(k=2, samples=6)

    alone = learn(resnet, tasks, dagger(), SCHEDULE, **options)
    first = learn(resnet, tasks[:1], SGD(), SCHEDULE, **options)
    kept = [Run.load(run.save(tmp_path / f"{run.seed}.safetensors")) for run in first]
    assert_same(alone, learn(resnet, tasks, dagger(), SCHEDULE, first=kept, **options))


def test_a_branch_resumes_from_its_checkpoint_without_the_first_task(tmp_path):
    class Stops(SGDDagger):
        def before_task(self, population, task, samples):
            super().before_task(population, task, samples)
            if task == 2:
                raise KeyboardInterrupt

    Stops.__name__ = "SGDDagger"  # by which its file knows it

    def dagger(kind=SGDDagger):
        return kind(k=3, samples=20)

    options = {"seeds": SEEDS, "first": first_task()}
    whole = learn(build, three_tasks(), dagger(), SCHEDULE, **options)
    file = tmp_path / "stopped"
    with pytest.raises(KeyboardInterrupt):
        learn(build, three_tasks(), dagger(Stops), SCHEDULE, checkpoint=file, **options)
    assert_same(whole, learn(build, three_tasks(), dagger(), SCHEDULE, checkpoint=file, **options))


def test_the_last_task_needs_no_hessian():
    runs = learn(build, three_tasks(), SGDDagger(k=3, samples=20), SCHEDULE, seeds=SEEDS,
                 after_last=False)  # fmt: skip
    whole = learn(build, three_tasks(), SGDDagger(k=3, samples=20), SCHEDULE, seeds=SEEDS)
    assert_same(whole, runs)
    for run in runs:
        assert [note.get("products", 0) > 0 for note in run.notes] == [True, True, False]


def test_eigenpairs_of_the_first_task_serve_every_smaller_k():
    class Solves(SGDDagger):
        """Keeps the pairs that it found, by task."""

        def _leading(self, hessian, seed):
            found = super()._leading(hessian, seed)
            self.found = [*getattr(self, "found", []), found[0]]
            return found

    larger = Solves(k=4, samples=20)
    learn(build, three_tasks(), larger, SCHEDULE, seeds=SEEDS)
    smaller = SGDDagger(k=2, samples=20, first=larger.found[:2])
    runs = learn(build, three_tasks(), smaller, SCHEDULE, seeds=SEEDS)
    for s, run in enumerate(runs):
        assert run.notes[0]["products"] == 0 < run.notes[1]["products"]
        shared = larger.found[s].vectors[:2].double()
        kept = smaller.memory.bases[s].rows().double()[:2]
        assert float((kept @ shared.T).det().abs()) == pytest.approx(1.0, abs=1e-5)
    with pytest.raises(ValueError, match="at least that many pairs"):
        SGDDagger(k=5, samples=20, first=larger.found[:2])


def test_what_is_not_the_first_task_of_the_same_training_is_refused():
    first = first_task()

    def branch(first, *, learner=None, tasks=None, **settings):
        learn(build, tasks or three_tasks(), learner or SGD(), SCHEDULE, seeds=SEEDS, first=first,
              **settings)  # fmt: skip

    with pytest.raises(ValueError, match="one run per seed"):
        branch(first[:1])
    with pytest.raises(ValueError, match="another batch_size"):
        branch(first, batch_size=9)
    with pytest.raises(ValueError, match="another data"):
        branch(first, tasks=make_tasks(3, train=35))
    with pytest.raises(ValueError, match="a different network"):
        branch([replace(run, initial=run.initial + 1) for run in first])
    with pytest.raises(ValueError, match="alone"):
        branch(learn(build, three_tasks(), SGD(), SCHEDULE, seeds=SEEDS))
    with pytest.raises(ValueError, match="another learner"):
        branch(learn(build, three_tasks()[:1], EWC(1.0, samples=9), SCHEDULE, seeds=SEEDS))
    with pytest.raises(ValueError, match="PackNet does not"):
        branch(first, learner=PackNet(0.5))
