"""Models side by side: stacked MLPs against autograd, and any other module with its policies."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from curvlab.learners import SGD, Learner, Population
from curvlab.learners.stacked import StackedMLP, plain_mlp, population_of
from curvlab.nets import mlp, slim_resnet18
from curvlab.parameters import parameter_vector
from curvlab.tasks.samples import Samples, Task
from curvlab.training import Schedule, learn
from tests.small_problems import make_tasks, resnet, vit

# relative error of a gradient
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6}


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
        nn.Sequential(nn.Linear(3, 3).requires_grad_(False), nn.ReLU(), nn.Linear(3, 2)),
        slim_resnet18(2, nf=2, norm="none"),
    ],
    ids=["gelu", "ends in relu", "dropout", "frozen", "resnet"],
)
def test_other_networks_are_not_taken_for_plain_mlps(model):
    assert plain_mlp(model) is None


def doubled_gradient(model):
    model[0].weight.register_hook(lambda gradient: 2 * gradient)


def doubled_output(model):
    model[2].forward = lambda inputs: 2 * nn.Linear.forward(model[2], inputs)


@pytest.mark.parametrize("change", [doubled_gradient, doubled_output])
def test_what_a_user_hangs_on_an_mlp_is_trained_as_autograd_does(change, generator):
    model = mlp((4, 5, 3))
    change(model)
    population = population_of([model], [0])
    assert isinstance(population, Population)
    inputs = torch.randn(6, 4, generator=generator)
    targets = torch.randint(0, 3, (6,), generator=generator)
    exact = torch.autograd.grad(cross_entropy(model(inputs), targets), list(model.parameters()))
    population.gradient_(inputs.unsqueeze(0), targets.unsqueeze(0), 0)
    assert torch.equal(population.gradients[0], torch.cat([g.flatten() for g in exact]))


@pytest.mark.parametrize("change", [doubled_gradient, doubled_output])
def test_a_change_after_the_population_was_made_is_refused(change):
    population = population_of([mlp((6, 5, 3))], [0])
    change(population.models[0])
    with pytest.raises(ValueError, match="no longer a plain MLP"):
        learn(population, make_tasks(1), SGD(), Schedule(0.1))


@pytest.mark.parametrize(
    ("build", "batchnorm"),
    [
        (resnet, "freeze"),
        (vit, None),
        (lambda seed: vit(seed).double(), None),
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
    population = Population([seeded(Spiky)(1)], [1])
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
