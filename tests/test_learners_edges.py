"""Learners at their edges: null spaces, solves that fall short, refusals, bounds."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from curvlab.learners import (
    AGEM,
    DER,
    ER,
    EWC,
    GPM,
    OGD,
    SGD,
    LwF,
    Population,
    SGDDagger,
    population_of,
    sample_gradients as rows_of,
)
from curvlab.learners.ewc import diagonal_fisher
from curvlab.learners.sample_gradients import sample_gradients
from curvlab.learners.seeds import derived_generator
from curvlab.nets import mlp
from curvlab.nets.powerprop import power
from curvlab.tasks import Samples, Task
from curvlab.tasks.samples import subset
from curvlab.training import Schedule, learn
from tests.dense_truth import relative
from tests.small_problems import make_tasks, small


def blind_tasks(dtype):
    """The last two inputs are always 0: weights that read them are in the null space."""
    tasks = make_tasks(2, train=30, dtype=dtype)
    for task in tasks:
        for samples in (task.train, task.test):
            samples.inputs[:, 4:] = 0.0
    return tasks


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_sgd_dagger_stores_no_vectors_of_the_null_space(dtype):
    """A softmax layer of 6 inputs, 4 of them used: rank (3 - 1) * (4 + 1) of 21 parameters."""
    build = lambda seed: nn.Sequential(mlp((6, 3), seed=seed, dtype=dtype))  # noqa: E731
    runs = learn(
        build, blind_tasks(dtype), SGDDagger(k=18, samples=30), Schedule(0.1), seeds=(1, 2)
    )
    for run in runs:
        assert run.notes[0]["k"] == 10
        assert run.notes[0]["null"] == 8
        assert run.notes[0]["directions"] == 10


def test_an_energy_that_largest_pairs_do_not_hold_is_noted_and_training_goes_on():
    learner = SGDDagger(epsilon=0.001, samples=30, largest=3)
    (run,) = learn(mlp((20, 12, 3)), make_tasks(2, shape=(20,)), learner, Schedule(0.1), seeds=1)
    assert run.notes[0]["k"] == 3
    assert run.notes[0]["share"] < 0.999
    assert run.snapshots.isfinite().all()


def test_thresholds_of_all_tasks_are_checked_before_training():
    stepped = []

    class Watched(GPM):
        def transform_(self, population):
            stepped.append(population)
            super().transform_(population)

    learner = Watched(lambda t: 0.97 + 0.02 * t, bias="augmented")
    with pytest.raises(ValueError, match=r"for task 2 of 3 it gives 1\.01"):
        learn(mlp((6, 3)), make_tasks(3), learner, Schedule(0.1), seeds=1)
    assert not stepped


class Net(nn.Module):
    """Layers in attributes and a function that calls them."""

    def __init__(self, forward, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.run = forward

    def forward(self, inputs):
        return self.run(self, inputs)


class Standardised(nn.Linear):
    def forward(self, inputs):
        return linear(inputs, self.weight / self.weight.norm(), self.bias)


def tied():
    net = Net(lambda m, x: m.head(torch.tanh(m.second(torch.tanh(m.first(x))))),
              first=L(6, 6), second=L(6, 6), head=L(6, 3))  # fmt: skip
    net.second.weight = net.first.weight
    return net


def tied_to_tokens():
    net = Net(lambda m, x: m.head(torch.tanh(m.first(x) + m.table(x.argmax(1)))),
              first=L(6, 6), table=nn.Embedding(6, 6), head=L(6, 3))  # fmt: skip
    net.table.weight = net.first.weight
    return net


def frozen_bias():
    net = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))
    net[0].bias.requires_grad_(False)
    return net


L = partial(nn.Linear, bias=False)
UNUSUAL = {
    "tied": tied,
    "tied to an embedding": tied_to_tokens,
    "tied by hand": lambda: Net(
        lambda m, x: m.head(torch.tanh(m.first(x) + linear(x.tanh(), m.first.weight))),
        first=L(6, 6), head=nn.Linear(6, 3)),
    "used in a list": lambda: Net(
        lambda m, x: m.head(torch.tanh(m.first(x) + x.tanh() @ torch.cat([m.first.weight]))),
        first=L(6, 6), head=nn.Linear(6, 3)),
    "bias used elsewhere": lambda: Net(
        lambda m, x: m.head(torch.tanh(m.first(x) * m.first.bias)),
        first=nn.Linear(6, 6), head=nn.Linear(6, 3)),
    "a forward of its own": lambda: nn.Sequential(Standardised(6, 9), nn.Tanh(), nn.Linear(9, 3)),
    "forward called by hand": lambda: Net(
        lambda m, x: m.head(torch.tanh(m.first.forward(x))),
        first=nn.Linear(6, 6), head=nn.Linear(6, 3)),
    "TransformerEncoderLayer": lambda: Net(
        lambda m, x: m.head(m.block(x.unsqueeze(1)).squeeze(1)),
        block=nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True),
        head=nn.Linear(6, 3)),
    "LSTM": lambda: Net(
        lambda m, x: m.head(m.block(x.unsqueeze(2))[0][:, -1]),
        block=nn.LSTM(1, 9, batch_first=True), head=nn.Linear(9, 3)),
    "grouped convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 4, 2, groups=2), nn.Tanh(), nn.Flatten(),
        nn.Linear(8, 3)),
    "convolution in one dimension": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 9, 2), nn.Tanh(), nn.Flatten(), nn.Linear(18, 3)),
    "frozen bias": frozen_bias,
}  # fmt: skip


@pytest.mark.parametrize("name", UNUSUAL)
def test_gpm_holds_stored_logits_whatever_a_weight_is_used_for(name):
    torch.manual_seed(0)
    tasks = make_tasks(2, train=20, dtype=torch.float64)
    stored = subset(tasks[0].train, 2, seed=derived_generator(1, "gpm", 0)).inputs
    seen = []

    class Watched(GPM):
        def after_task(self, population, task, samples):
            super().after_task(population, task, samples)
            seen.append(population.logits(stored, 0)[0])

    learner = Watched(1.0, samples=2, bias="augmented")
    (run,) = learn(UNUSUAL[name]().double(), tasks, learner, Schedule(0.3, epochs=3), seeds=1)
    assert float((seen[1] - seen[0]).norm() / seen[0].norm()) < 1e-12
    assert float((run.snapshots[1] - run.snapshots[0]).norm()) > 1e-3, "and it did train"


def test_the_memory_guard_of_ogd_counts_every_logit():
    tasks, rows = make_tasks(2), 20
    size = 4 * sum(p.numel() for p in small(1).parameters())
    for logits, factor in (("true", 1), ("all", 3)):
        fits, short = (
            OGD(samples=rows, logits=logits, structured=False, largest=2 * factor * rows * size - d)
            for d in (0, 1)
        )
        learn(small(1), tasks[:1], fits, Schedule(0.1), seeds=1)
        with pytest.raises(ValueError, match="lower samples="):
            learn(small(1), tasks[:1], short, Schedule(0.1), seeds=1)


def test_gradients_of_samples_come_in_blocks_of_so_many_bytes(monkeypatch):
    population = Population([small(1)], [1])
    samples = make_tasks(1)[0].train
    targets = torch.eye(3)[samples.targets]
    whole = torch.cat(list(sample_gradients(population, 0, samples.inputs, targets, 0)))
    monkeypatch.setattr(rows_of, "BYTES", 3 * 4 * population.n)
    blocks = list(sample_gradients(population, 0, samples.inputs, targets, 0))
    assert max(len(block) for block in blocks) == 3
    assert relative(torch.cat(blocks), whole) <= 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("recurrent", [nn.LSTM, nn.GRU, nn.RNN, nn.GRUCell, nn.LSTMCell])
def test_gradients_of_samples_of_a_recurrent_network_are_those_of_a_loop(recurrent, dtype):
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = recurrent(4, 5), nn.Linear(5, 3)

        def forward(self, inputs):
            if isinstance(self.body, nn.RNNCellBase):
                found = self.body(inputs[:, 0])
                return self.head(found[0] if isinstance(found, tuple) else found)
            return self.head(self.body(inputs.transpose(0, 1))[0][-1])

    torch.manual_seed(0)
    model = Reader().to(dtype)
    inputs, signals = torch.randn(6, 7, 4, dtype=dtype), torch.randn(6, 3, dtype=dtype)
    population = Population([model], [1])
    found = torch.cat(list(sample_gradients(population, 0, inputs, signals, 0)))
    model.double()
    for row, one, signal in zip(found, inputs.double(), signals.double(), strict=True):
        value = (model(one.unsqueeze(0))[0] * signal).sum()
        exact = torch.autograd.grad(value, list(model.parameters()))
        exact = torch.cat([part.flatten() for part in exact])
        assert relative(row.double(), exact) <= (1e-13 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("alpha", [1.0, 1.2, 1.5, 2.0, 3.0])
def test_powers_have_finite_gradients_at_zero(alpha):
    phi = torch.tensor([-0.5, 0.0, 2.0], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(power(phi, alpha).sum(), phi)
    exact = [alpha * abs(x) ** (alpha - 1.0) for x in (-0.5, 0.0, 2.0)]
    torch.testing.assert_close(gradient, torch.tensor(exact, dtype=torch.float64))
    exact = torch.tensor([-(0.5**alpha), 0.0, 2.0**alpha], dtype=torch.float64)
    torch.testing.assert_close(power(phi, alpha).detach(), exact)


def test_nan_in_training_data_is_named_as_such():
    tasks = make_tasks(2)
    inputs = tasks[1].train.inputs.clone()
    inputs[7, 2] = math.nan
    tasks[1] = Task("second", Samples(inputs, tasks[1].train.targets), tasks[1].test, 3)
    with pytest.raises(ValueError, match=r"1 train samples of task 'second' hold NaN .* number 7"):
        learn(small(1), tasks, SGD(), Schedule(0.1), seeds=1)


def test_an_error_for_want_of_memory_says_what_to_reduce():
    class Greedy(SGD):
        def transform_(self, population):
            population.gradients.new_empty(1 << 58)

    with pytest.raises(RuntimeError) as caught:
        learn(small(1), make_tasks(1), Greedy(), Schedule(0.1), seeds=1)
    assert "fewer seeds side by side, lower batch_size=10" in caught.value.__notes__[0]

    class Wrong(SGD):
        def transform_(self, population):
            population.gradients @ population.gradients

    with pytest.raises(RuntimeError) as caught:
        learn(small(1), make_tasks(1), Wrong(), Schedule(0.1), seeds=1)
    assert not hasattr(caught.value, "__notes__")


def test_ewc_that_diverges_names_its_bound():
    with pytest.raises(FloatingPointError, match=r"lr \* strength \* max F < 2"):
        learn(small(1), make_tasks(2), EWC(1e9), Schedule(0.1, epochs=40), seeds=1)


@pytest.mark.parametrize("gamma", [0.0, 0.3, 1.0])
def test_online_ewc_multiplies_old_importances(gamma):
    population = population_of([small(1, torch.float64)], [1])
    learner = EWC(5.0, samples=43, labels="true", gamma=gamma)
    first, second = make_tasks(2, dtype=torch.float64)
    fishers, solutions = [], []
    for t, task in enumerate((first, second)):
        population.parameters.mul_(1.1)
        fishers.append(diagonal_fisher(population, 0, task.train, t, "true"))
        solutions.append(population.parameters[0].clone())
        learner.after_task(population, t, task.train)
    population.gradients.zero_()
    population.parameters.mul_(0.7)
    learner.transform_(population)
    weights = population.parameters[0]
    exact = sum(
        5.0 * factor * fisher * (weights - solution)
        for factor, fisher, solution in zip((gamma, 1.0), fishers, solutions, strict=True)
    )
    assert relative(population.gradients[0], exact) <= 1e-12


def test_sampled_labels_are_the_fisher_on_average_and_follow_the_seed():
    population = population_of([small(1, torch.float64)], [1])
    samples = make_tasks(1, dtype=torch.float64)[0].train[:10]
    exact = diagonal_fisher(population, 0, samples, 0, "model")
    draws = torch.stack(
        [
            diagonal_fisher(population, 0, samples, 0, "sampled", derived_generator(i, "labels", 0))
            for i in range(400)
        ]
    )
    again = diagonal_fisher(population, 0, samples, 0, "sampled", derived_generator(3, "labels", 0))
    assert torch.equal(draws[3], again)
    spread = draws.std(0) / 20.0
    assert float(((draws.mean(0) - exact).abs() / spread.clamp_min(1e-12)).max()) < 5.0


class Dropping(nn.Module):
    """Dropout that no nn.Dropout tells of."""

    def __init__(self, inside):
        super().__init__()
        self.body = nn.GRU(3, 6, 2, dropout=0.4) if inside else nn.Linear(3, 6)
        self.head, self.inside = nn.Linear(6, 3), inside

    def forward(self, inputs):
        hidden = self.body(inputs.unflatten(1, (2, 3)).transpose(0, 1))
        hidden = hidden[0] if self.inside else nn.functional.dropout(hidden, 0.4, self.training)
        return self.head(hidden.mean(0))


@pytest.mark.parametrize("inside", [True, False])
def test_dropout_inside_a_layer_or_a_function_follows_the_seed(inside):
    def build(seed):
        torch.manual_seed(seed)
        return Dropping(inside)

    tasks, schedule = make_tasks(2, train=20), Schedule(0.1, epochs=2)
    assert tasks[0].train.inputs.shape[1] == 6
    together = learn(build, tasks, SGD(), schedule, seeds=(1, 2))
    model = build(2)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    (alone,) = learn([model], tasks, SGD(), schedule, seeds=2)
    assert torch.equal(alone.snapshots, together[1].snapshots)
    assert torch.equal(torch.get_rng_state(), state)  # given back as it was


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: GPM(math.nan), "threshold"),
        (lambda: GPM([0.9, math.nan]), "threshold"),
        (lambda: GPM(0.9, samples=2.5), "samples"),
        (lambda: EWC(math.nan), "strength"),
        (lambda: EWC(math.inf), "strength"),
        (lambda: EWC(samples=0), "samples"),
        (lambda: ER(2.5), "size"),
        (lambda: ER(10, batch=0), "batch"),
        (lambda: DER(alpha=math.nan), "alpha"),
        (lambda: AGEM(size=2.5), "size"),
        (lambda: LwF(math.nan), "strength"),
        (lambda: LwF(temperature=0.0), "temperature"),
        (lambda: OGD(math.nan), "epsilon"),
        (lambda: SGDDagger(k=2.5), "k"),
        (lambda: SGDDagger(epsilon="a"), "epsilon"),
    ],
)
def test_a_learner_made_with_no_number_is_refused_by_name(make, name):
    with pytest.raises((TypeError, ValueError), match=f"^{name}= "):
        make()


def test_numbers_of_numpy_are_numbers():
    assert SGDDagger(k=np.int64(3), samples=np.int32(5)).k == 3
    assert EWC(np.float32(2.0)).strength == 2.0
    assert callable(GPM(lambda task: 0.9 + 0.01 * task).threshold)
