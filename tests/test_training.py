"""The training loop: gradients, equality with plain loops and separate runs, matrices, policies."""

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from curvlab.learners import SGD, Learner, ModulePopulation, Step
from curvlab.learners.stacked import StackedMLP, plain_mlp, population_of
from curvlab.nets import mlp, slim_resnet18, vit_cifar
from curvlab.parameters import parameter_vector
from curvlab.tasks.samples import Samples, Task
from curvlab.training import Evaluation, Run, Schedule, evaluate, learn
from curvlab.training.batches import seed_batches

# relative error of a gradient, and of parameters after a few hundred steps
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6}
DRIFT = {torch.float64: 1e-11, torch.float32: 2e-4}


def make_tasks(count=2, train=43, test=20, shape=(6,), classes=3, dtype=torch.float32):
    generator = torch.Generator().manual_seed(5)
    tasks = []
    for t in range(count):
        inputs = torch.randn(train + test, *shape, generator=generator, dtype=torch.float64)
        scores = inputs.flatten(1)[:, t : t + classes]
        samples = Samples(inputs.to(dtype), scores.argmax(1))
        tasks.append(Task(f"task{t}", samples[:train], samples[train:], classes))
    return tasks


def relative(value, truth):
    exact = truth.detach().double()
    error = float((value.detach().double() - exact).norm())
    return 0.0 if error == 0.0 else error / float(exact.norm())  # dead units: both may be zero


class Spiky(nn.Module):
    """A network that is no plain MLP: it takes the task, and an argument-less layer."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.first, self.second = nn.Linear(6, 7), nn.Linear(7, 3)
        self.drop, self.scales = nn.Dropout(dropout), nn.Parameter(torch.ones(2, 7))

    def forward(self, inputs, task):
        return self.second(self.drop(torch.tanh(self.first(inputs)) * self.scales[task]))


def seeded(make):
    """A builder from a seed for modules that draw from the global generator."""

    def build(seed):
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        model = make()
        torch.set_rng_state(state)
        return model

    return build


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((196, 50, 50, 50, 50, 10), {}),
        ((7, 5, 4, 3), {"bias": False}),
        ((7, 9, 3), {"activation": nn.Tanh}),
        ((1, 1, 2), {}),
        ((4, 3), {}),
    ],
    ids=["paper", "no bias", "tanh", "width one", "linear"],
)
@pytest.mark.parametrize("batch", [1, 10])
def test_stacked_gradients_are_those_of_autograd(sizes, options, batch, dtype, generator):
    seeds = (11, 13, 21)
    models = [mlp(sizes, seed=seed, dtype=dtype, **options) for seed in seeds]
    population = population_of(models, seeds)
    assert isinstance(population, StackedMLP)
    inputs = torch.randn(3, batch, sizes[0], generator=generator, dtype=dtype)
    targets = torch.randint(0, sizes[-1], (3, batch), generator=generator)
    population.gradient_(inputs, targets, 0)
    for s, seed in enumerate(seeds):
        model = mlp(sizes, seed=seed, dtype=dtype, **options).double()
        loss = cross_entropy(model(inputs[s].double()), targets[s])
        exact = torch.autograd.grad(loss, list(model.parameters()))
        exact = torch.cat([piece.flatten() for piece in exact])
        assert relative(population.gradients[s], exact) <= TOLERANCE[dtype]
        logits = population.logits(inputs[s], 0)[s]
        assert relative(logits, model(inputs[s].double())) <= TOLERANCE[dtype]


def test_models_stay_views_of_the_population():
    population = population_of([mlp((6, 5, 3), seed=seed) for seed in (1, 2)], (1, 2))
    population.parameters[1] += 1.0
    assert torch.equal(parameter_vector(population.models[1]), population.parameters[1])
    population.models[0][0].weight.grad.fill_(7.0)
    assert population.gradients[0, 0] == 7.0


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(3, 3), nn.GELU(), nn.Linear(3, 2)),
        nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2), nn.ReLU()),
        nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Dropout(0.5), nn.Linear(3, 2)),
        nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)),
        nn.Sequential(nn.Linear(3, 3).requires_grad_(False), nn.ReLU(), nn.Linear(3, 2)),
        slim_resnet18(2, nf=2, norm="none"),
    ],
    ids=["gelu", "ends in relu", "dropout", "two activations", "frozen", "resnet"],
)
def test_other_networks_are_not_taken_for_plain_mlps(model):
    assert plain_mlp(model) is None


@pytest.mark.parametrize("dtype", DRIFT, ids=str)
@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "modules"])
@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.9, 0.01)])
def test_learn_is_a_plain_torch_loop_for_every_seed(dtype, stacked, momentum, decay):
    tasks, seeds = make_tasks(dtype=dtype), (11, 13)
    schedule = Schedule(0.1, 0.02, epochs=3, decay_at=(2,))
    models = [mlp((6, 8, 8, 3), seed=seed, dtype=dtype) for seed in seeds]
    population = population_of(models, seeds) if stacked else ModulePopulation(models, seeds)
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


def test_each_seed_has_its_own_order_whoever_is_beside_it():
    samples = make_tasks(train=43)[0].train

    def order(seeds, s, **position):
        batches = seed_batches(samples, seeds, 5, **position)
        return torch.cat([inputs[s] for inputs, _ in batches])

    alone = order([7], 0, task=1, epoch=2)
    assert torch.equal(alone, order([3, 7, 9], 1, task=1, epoch=2))
    assert torch.equal(alone.sort(0).values, samples.inputs.sort(0).values)
    for other in (
        order([8], 0, task=1, epoch=2),
        order([7], 0, task=0, epoch=2),
        order([7], 0, task=1, epoch=1),
    ):
        assert not torch.equal(alone, other)


@pytest.mark.parametrize("count", [1, 4, 5, 64 * 5, 64 * 5 + 3, 150 * 5 + 1])
def test_an_epoch_can_start_at_any_step(count):
    samples = Samples(torch.arange(count, dtype=torch.float32).unsqueeze(1), torch.arange(count))
    whole = list(seed_batches(samples, [1, 2], 5, task=0, epoch=0))
    assert len(whole) == math.ceil(count / 5)
    for start in {0, 1, len(whole) // 2, len(whole) - 1, len(whole)}:
        rest = list(seed_batches(samples, [1, 2], 5, task=0, epoch=0, start=start))
        assert len(rest) == len(whole) - start
        for (inputs, targets), (same, labels) in zip(rest, whole[start:], strict=True):
            assert torch.equal(inputs, same)
            assert torch.equal(targets, labels)


def test_schedules_read_the_papers_notation():
    resnet = Schedule.parse("{0.1, 0.001}", "{30/60/70, 10}")
    assert [resnet.epochs_of(t) for t in (0, 1, 5)] == [70, 10, 10]
    rates = [resnet.lr_at(0, epoch) for epoch in (0, 29, 30, 59, 60, 69)]
    assert rates == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001, 0.001])
    assert [resnet.lr_at(3, epoch) for epoch in (0, 9)] == [0.001, 0.001]
    vit = Schedule.parse("{0.1, 0.001}", "{15/25, 5/10}")
    assert vit.lr_at(2, 5) == pytest.approx(1e-4)
    plain = Schedule.parse("0.01", "5")
    assert plain == Schedule(0.01, epochs=5)
    assert plain.lr_at(4, 4) == 0.01


@pytest.mark.parametrize(
    ("rates", "epochs"), [("0.1, 0.2, 0.3", "1"), ("fast", "1"), ("0.1", "5/3"), ("0", "1")]
)
def test_schedules_refuse_what_they_cannot_mean(rates, epochs):
    with pytest.raises(ValueError, match=r"must"):
        Schedule.parse(rates, epochs)


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


@pytest.mark.parametrize(
    ("build", "batchnorm"),
    [
        (lambda seed: slim_resnet18(3, nf=2, blocks=(1, 1), seed=seed), "freeze"),
        (lambda seed: vit_cifar(3, hidden=8, heads=2, depth=1, mlp=8, seed=seed), None),
        (lambda seed: vit_cifar(3, hidden=8, heads=2, depth=1, mlp=8, seed=seed).double(), None),
    ],
    ids=["resnet", "vit", "vit float64"],
)
def test_any_module_trains_and_each_seed_as_if_alone(build, batchnorm):
    tasks = make_tasks(train=12, test=5, shape=(3, 32, 32))
    options = {"batch_size": 4, "batchnorm": batchnorm}
    runs = learn(build, tasks, SGD(), Schedule(0.05), seeds=(1, 2), **options)
    (alone,) = learn(build, tasks, SGD(), Schedule(0.05), seeds=2, **options)
    assert torch.equal(runs[1].snapshots, alone.snapshots)
    assert runs[1].snapshots.isfinite().all()


def test_modules_that_take_the_task_get_it():
    population = ModulePopulation([seeded(Spiky)(1)], [1])
    learn(population, make_tasks(1), SGD(), Schedule(0.1))
    scales = population.models[0].scales
    assert (scales[0] != 1.0).any()
    assert (scales[1] == 1.0).all()


def test_dropout_follows_the_seed_and_leaves_the_global_generator_alone():
    build = seeded(lambda: Spiky(dropout=0.5))
    torch.manual_seed(3)
    before = torch.get_rng_state()
    runs = learn(build, make_tasks(), SGD(), Schedule(0.1), seeds=(1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(4)
    (again,) = learn(build, make_tasks(), SGD(), Schedule(0.1), seeds=2)
    assert torch.equal(runs[1].snapshots, again.snapshots)
    (without,) = learn(seeded(Spiky), make_tasks(), SGD(), Schedule(0.1), seeds=2)
    assert not torch.equal(again.snapshots, without.snapshots)


def resnet(seed):
    return slim_resnet18(3, nf=2, blocks=(1,), seed=seed)


def test_batchnorm_wants_a_policy_and_records_it():
    tasks = make_tasks(train=8, test=4, shape=(3, 8, 8))
    with pytest.raises(ValueError, match="choose batchnorm='freeze'"):
        learn(resnet, tasks, SGD(), Schedule(0.1), seeds=1)
    with pytest.raises(ValueError, match="batchnorm= must be one of"):
        learn(resnet, tasks, SGD(), Schedule(0.1), seeds=1, batchnorm="moving")
    (run,) = learn(resnet, tasks, SGD(), Schedule(0.1), seeds=1, batchnorm="per_task")
    assert run.config["batchnorm"] == "per_task"
    (run,) = learn(mlp((6, 3)), make_tasks(), SGD(), Schedule(0.1), seeds=1)
    assert run.config["batchnorm"] == "none"


def frozen_loss(policy):
    """The change of task 0's loss while task 1 is learned with all parameters held still."""

    class Still(Learner):
        def transform_(self, population):
            population.gradients.zero_()

    tasks = make_tasks(train=40, test=20, shape=(3, 8, 8))
    shifted = Samples(tasks[1].train.inputs * 3.0 + 1.0, tasks[1].train.targets)
    tasks[1] = Task("shifted", shifted, tasks[1].test, 3)
    (run,) = learn(resnet, tasks, Still(), Schedule(0.1), seeds=1, batchnorm=policy)
    moved = {name: bool((b[0] != b[1]).any()) for name, b in run.buffers.items()}
    return float((run.test_loss[1, 0] - run.test_loss[0, 0]).abs()), any(moved.values())


def test_running_statistics_leak_and_the_other_policies_do_not():
    change, moved = frozen_loss("running")
    assert moved
    assert change > 1e-3  # forgetting without any change of a parameter
    change, moved = frozen_loss("freeze")
    assert not moved
    assert change == 0.0
    change, moved = frozen_loss("per_task")
    assert moved
    assert change == 0.0


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
