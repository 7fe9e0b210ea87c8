"""A seed trained beside others is the same bits as alone: every learner, any shape, both dtypes."""

import re
import threading

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from curvlab.learners import (
    EWC,
    GPM,
    OGD,
    SGD,
    HeterogeneousDropout,
    PackNet,
    Powerpropagation,
    Progressive,
    SGDDagger,
    SpaceNet,
    StackedMLP,
    population_of,
)
from curvlab.learners.rooms import aligned, product, results, rooms
from curvlab.nets import kwinners_mlp, mlp, powerpropagate, progressive_mlp
from curvlab.training import Schedule, learn
from curvlab.training.run import MATRICES
from tests.small_problems import make_tasks

ODD = (11, 7, 5, 3)  # rows of 132 numbers; activations and gradients at odd addresses


def network(dtype, **options):
    return lambda seed: mlp(ODD, seed=seed, dtype=dtype, **options)


# how to make a learner, and its network for a dtype
LEARNERS = {
    "SGD": (SGD, network),
    "SGD-dagger": (lambda: SGDDagger(k=3, samples=20), network),
    "SGD-dagger by energy": (lambda: SGDDagger(epsilon=0.2, samples=20), network),
    "OGD": (lambda: OGD(0.1, samples=15), network),
    "OGD, every direction": (lambda: OGD(0.0, samples=15), network),
    "OGD, all logits, rows": (lambda: OGD(0.1, samples=9, logits="all", structured=False), network),
    "GPM": (lambda: GPM(0.9, samples=9, bias="augmented"), network),
    "GPM without biases": (lambda: GPM(0.9, samples=9), lambda d: network(d, bias=False)),
    "EWC": (lambda: EWC(10.0, samples=15), network),
    "PackNet": (PackNet, network),
    "SpaceNet": (lambda: SpaceNet((3, 3), (1, 1), (12, 5, 5)), network),
    "Powerpropagation": (
        Powerpropagation,
        lambda d: lambda seed: powerpropagate(mlp(ODD, seed=seed, dtype=d)),
    ),
    "k-winners": (
        lambda: HeterogeneousDropout(GPM(0.9, samples=9)),
        lambda d: lambda seed: kwinners_mlp(ODD, 0.4, seed=seed, dtype=d),
    ),
    "Progressive": (
        Progressive,
        lambda d: lambda seed: progressive_mlp((11, 5, 3), tasks=2, seed=seed, dtype=d),
    ),
}


def assert_same_run(one, other):
    for name in (*MATRICES, "initial", "snapshots"):
        torch.testing.assert_close(
            getattr(one, name), getattr(other, name), rtol=0.0, atol=0.0, equal_nan=True, msg=name
        )
    for mine, theirs in zip(one.notes, other.notes, strict=True):
        assert {k: v for k, v in mine.items() if "seconds" not in k} == {
            k: v for k, v in theirs.items() if "seconds" not in k
        }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", LEARNERS)
def test_every_learner_trains_a_seed_to_the_same_bits_alone_and_beside_others(name, dtype):
    make, networks = LEARNERS[name]
    tasks = make_tasks(2, train=43, test=20, shape=(11,), dtype=dtype)
    settings = {"batch_size": 7, "momentum": 0.5, "weight_decay": 0.01}
    schedule = Schedule(0.1, epochs=2)
    build = networks(dtype)
    together = learn(build, tasks, make(), schedule, seeds=(1, 2, 3), **settings)
    for run in together[1:]:
        (alone,) = learn(build, tasks, make(), schedule, seeds=run.seed, **settings)
        assert_same_run(run, alone)


sizes = st.lists(st.integers(1, 80), min_size=2, max_size=4)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    sizes=sizes,
    wide=st.booleans(),
    batch=st.integers(1, 33),
    runs=st.integers(2, 6),
    bias=st.booleans(),
    activation=st.sampled_from([torch.nn.ReLU, torch.nn.Tanh]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_gradients_and_predictions_of_any_mlp_are_the_same_bits_alone_and_stacked(
    sizes, wide, batch, runs, bias, activation, dtype
):
    sizes = [sizes[0] + 150 * wide, *sizes[1:]]
    generator = torch.Generator().manual_seed(sum(sizes) + batch)
    options = {"bias": bias, "activation": activation, "dtype": dtype}
    seeds = tuple(range(runs))
    together = population_of([mlp(sizes, seed=seed, **options) for seed in seeds], seeds)
    assert isinstance(together, StackedMLP)
    inputs = torch.randn(runs, batch, sizes[0], generator=generator, dtype=dtype)
    targets = torch.randint(0, sizes[-1], (runs, batch), generator=generator)
    together.gradient_(inputs, targets, 0)
    predicted = together.logits(inputs[0], 0)
    for s in seeds:
        alone = population_of([mlp(sizes, seed=s, **options)], [s])
        alone.gradient_(inputs[s : s + 1], targets[s : s + 1], 0)
        assert torch.equal(together.gradients[s], alone.gradients[0])
        assert torch.equal(predicted[s], alone.logits(inputs[0], 0)[0])


@pytest.mark.parametrize("threads", [1, 2])
def test_products_too_large_for_one_thread_are_the_same_bits_too(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        generator = torch.Generator().manual_seed(0)
        for m, k, n in [(6, 213, 208), (300, 400, 500), (1, 700, 64), (129, 1, 257)]:
            left, right = (rooms(3, *s, like=torch.zeros(0)) for s in [(m, k), (k, n)])
            out = results(3, m, n, small=False, like=left)
            left.copy_(torch.randn(3, m, k, generator=generator))
            right.copy_(torch.randn(3, k, n, generator=generator))
            product(left, right, out)()
            for s in range(3):
                mine = [rooms(1, *x.shape[1:], like=x).copy_(x[s : s + 1]) for x in (left, right)]
                alone = results(1, m, n, small=False, like=out)
                product(*mine, alone)()
                assert torch.equal(alone[0], out[s])
    finally:
        torch.set_num_threads(before)


def test_rooms_never_make_one_block_and_what_lies_otherwise_is_copied():
    for shape in [(5,), (16,), (4, 16), (3, 7)]:
        room = rooms(3, *shape, like=torch.zeros(0))
        assert not room.is_contiguous()
        assert all(part.data_ptr() % 64 == 0 and part.is_contiguous() for part in room)
        assert aligned(room) is room
        packed = torch.zeros(3, *shape)
        assert not aligned(packed).is_contiguous()


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class InTheMiddle(SGD):
    """Runs ``action`` in a thread of its own during the first step, and keeps what it raised."""

    def __init__(self, action):
        super().__init__()
        self.action, self.raised = action, None

    def after_step(self, population, step):
        del population
        if (step.task, step.step) == (0, 0):
            thread = threading.Thread(target=self.attempt, name="second")
            thread.start()
            thread.join()

    def attempt(self):
        try:
            self.action()
        except RuntimeError as error:
            self.raised = error


@pytest.mark.usefixtures("two_threads")
def test_a_second_thread_that_would_train_is_refused_by_name():
    tasks = make_tasks(1, shape=(11,))
    train = lambda learner: learn(network(torch.float32), tasks, learner, Schedule(0.1), seeds=1)  # noqa: E731
    learner = InTheMiddle(lambda: train(SGD()))
    (run,) = train(learner)
    assert re.search(r"'MainThread'.*is training.*'second'.*another process", str(learner.raised))
    assert torch.get_num_threads() == 2
    (alone,) = train(SGD())  # the refusal has left nothing behind
    assert torch.equal(run.snapshots, alone.snapshots)


@pytest.mark.usefixtures("two_threads")
def test_the_cure_for_two_threads_works():
    torch.set_num_threads(1)
    tasks = make_tasks(1, shape=(11,))
    train = lambda learner: learn(network(torch.float32), tasks, learner, Schedule(0.1), seeds=1)  # noqa: E731
    others = []
    learner = InTheMiddle(lambda: others.append(train(SGD())[0]))
    (run,) = train(learner)
    assert learner.raised is None
    assert torch.equal(run.snapshots, others[0].snapshots)
