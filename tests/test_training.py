"""The training loop: equal to plain loops and to separate runs, its matrices, moments and files."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from curvlab.learners import SGD, Learner, Population, Step
from curvlab.learners.stacked import population_of
from curvlab.nets import mlp
from curvlab.parameters import parameter_vector
from curvlab.training import Evaluation, Run, Schedule, evaluate, learn
from curvlab.training.batches import seed_batches
from tests.dense_truth import relative
from tests.small_problems import make_tasks, resnet

# relative error of parameters after a few hundred steps
DRIFT = {torch.float64: 1e-11, torch.float32: 2e-4}


@pytest.mark.parametrize("dtype", DRIFT, ids=str)
@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "modules"])
@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.9, 0.01)])
def test_learn_is_a_plain_torch_loop_for_every_seed(dtype, stacked, momentum, decay):
    tasks, seeds = make_tasks(dtype=dtype), (11, 13)
    schedule = Schedule(0.1, 0.02, epochs=3, decay_at=(2,))
    models = [mlp((6, 8, 8, 3), seed=seed, dtype=dtype) for seed in seeds]
    population = population_of(models, seeds) if stacked else Population(models, seeds)
    runs = learn(
        population, tasks, SGD(), schedule, batch_size=5, momentum=momentum, weight_decay=decay
    )
    for run, seed in zip(runs, seeds, strict=True):
        model = mlp((6, 8, 8, 3), seed=seed, dtype=dtype)
        assert torch.equal(run.initial, parameter_vector(model))
        for t, task in enumerate(tasks):
            optimizer = torch.optim.SGD(
                model.parameters(), lr=1.0, momentum=momentum, weight_decay=decay
            )
            for epoch in range(3):
                optimizer.param_groups[0]["lr"] = schedule.lr_at(t, epoch)
                for inputs, targets in seed_batches(task.train, [seed], 5, task=t, epoch=epoch):
                    optimizer.zero_grad()
                    cross_entropy(model(inputs[0]), targets[0]).backward()
                    optimizer.step()
            assert relative(run.snapshots[t], parameter_vector(model)) <= DRIFT[dtype]
            loss = cross_entropy(model(task.test.inputs), task.test.targets).detach()
            assert run.test_loss[t, t] == pytest.approx(float(loss), rel=DRIFT[dtype])


@pytest.mark.parametrize("dtype", DRIFT, ids=str)
def test_runs_side_by_side_equal_separate_runs_to_rounding(dtype):
    tasks, seeds = make_tasks(dtype=dtype), (11, 13, 21, 33, 55)
    schedule = Schedule(0.1, epochs=4)

    def build(seed):
        return mlp((6, 12, 12, 3), seed=seed, dtype=dtype)

    together = learn(build, tasks, SGD(), schedule, seeds=seeds)
    for run in together:
        (alone,) = learn(build, tasks, SGD(), schedule, seeds=run.seed)
        assert relative(run.snapshots, alone.snapshots) <= DRIFT[dtype]
        assert torch.allclose(
            run.test_loss, alone.test_loss, rtol=DRIFT[dtype], atol=0, equal_nan=True
        )
    assert not torch.allclose(together[0].snapshots, together[1].snapshots)


@pytest.mark.parametrize("future", [False, True])
def test_matrices_are_evaluations_of_the_snapshots(future):
    tasks = make_tasks(3)
    evaluation = Evaluation(train=17, future=future)
    (run,) = learn(
        mlp((6, 8, 3), seed=1), tasks, SGD(), Schedule(0.1), seeds=1, evaluation=evaluation
    )
    population = population_of([mlp((6, 8, 3), seed=1)], [1])
    for t in range(3):
        for o in range(3):
            entries = [run.train_loss, run.train_accuracy, run.test_loss, run.test_accuracy]
            found = [float(matrix[t, o]) for matrix in entries]
            if o > t and not future:
                assert all(math.isnan(value) for value in found)
                continue
            weights = run.snapshots[t : t + 1]
            exact = [
                float(value)
                for samples in (tasks[o].train[:17], tasks[o].test)
                for value in evaluate(population, weights, samples, o)
            ]
            assert found == pytest.approx(exact, rel=1e-6)


def test_the_order_of_moments_is_decay_transform_momentum():
    """Projecting before momentum keeps a forbidden direction still; so does it for weight decay."""

    class Forbid(Learner):
        def transform_(self, population):
            population.gradients[:, 0] = 0.0

    population = population_of([mlp((6, 5, 3), seed=1)], [1])
    start = population.parameters.clone()
    learn(population, make_tasks(), Forbid(), Schedule(0.1), momentum=0.9, weight_decay=0.1)
    moved = population.parameters - start
    assert moved[0, 0] == 0.0
    assert (moved[0, 1:] != 0.0).all()


def test_learners_see_every_step_and_its_place():
    seen = []

    class Watch(Learner):
        def after_step(self, population, step):  # noqa: ARG002
            seen.append(step)

    schedule = Schedule(0.1, 0.01, epochs=2, epochs_later=1)
    learn(mlp((6, 5, 3), seed=1), make_tasks(train=25), Watch(), schedule, seeds=1)
    assert [(s.task, s.step, s.epoch) for s in seen] == [
        *[(0, i, i // 3) for i in range(6)],
        *[(1, i, 0) for i in range(3)],
    ]
    assert [s.ends_epoch for s in seen] == [False, False, True] * 3
    assert seen[-1] == Step(task=1, step=2, steps=3, epoch=0, epochs=1, lr=0.01)


def test_divergence_is_reported_with_its_seed():
    with pytest.raises(FloatingPointError, match=r"seed .*diverged.*lower the learning rate"):
        learn(
            lambda seed: mlp((6, 8, 8, 3), seed=seed),
            make_tasks(),
            SGD(),
            Schedule(1e6, epochs=20),
            seeds=(1, 2),
        )


def test_a_run_survives_its_file(tmp_path):
    tasks = make_tasks(2, train=8, test=4, shape=(3, 8, 8))
    run = learn(resnet, tasks, SGD(), Schedule(0.1), seeds=(1, 2), batchnorm="running")[1]
    loaded = Run.load(run.save(tmp_path / "run.safetensors"))
    assert (loaded.seed, loaded.tasks, loaded.notes) == (run.seed, run.tasks, run.notes)
    for name in ("train_loss", "test_loss", "train_accuracy", "test_accuracy", "snapshots"):
        assert torch.equal(
            getattr(loaded, name).nan_to_num(-1.0), getattr(run, name).nan_to_num(-1.0)
        )
    assert loaded.buffers.keys() == run.buffers.keys() != set()
    assert loaded.config["schedule"]["lr"] == 0.1


def test_progress_is_quiet_in_a_pipe_unless_asked(capsys):
    learn(mlp((6, 3)), make_tasks(), SGD(), Schedule(0.1), seeds=1)
    assert capsys.readouterr() == ("", "")
    learn(mlp((6, 3)), make_tasks(), SGD(), Schedule(0.1), seeds=1, progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 2
    assert "\r" not in err


def test_wrong_arguments_are_answered_with_advice():
    model, tasks = mlp((6, 3)), make_tasks()
    for message, arguments in {
        "needs seeds=": {},
        "one model per seed": {"seeds": (1, 2)},
        "batch_size=": {"seeds": 1, "batch_size": 0},
        "momentum=": {"seeds": 1, "momentum": 1.0},
    }.items():
        with pytest.raises(ValueError, match=message):
            learn(model, tasks, SGD(), Schedule(0.1), **arguments)
    with pytest.raises(ValueError, match="3 classes, but the model only 2 outputs"):
        learn(mlp((6, 2)), tasks, SGD(), Schedule(0.1), seeds=1)
    with pytest.raises(ValueError, match="at least one task"):
        learn(model, [], SGD(), Schedule(0.1), seeds=1)
    used = SGD()
    learn(mlp((6, 3)), tasks, used, Schedule(0.1), seeds=1)
    with pytest.raises(ValueError, match="make a new one"):
        learn(mlp((6, 3)), tasks, used, Schedule(0.1), seeds=1)
