"""Stopping and going on: every resumed run is the uninterrupted one, bit for bit."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from curvlab.learners import EWC, GPM, OGD, SGD, SGDDagger
from curvlab.nets import mlp
from curvlab.signals import noted
from curvlab.storage import StorageError, load_tensors, save_tensors
from curvlab.training import Schedule, learn
from tests.small_problems import make_tasks, resnet

SEEDS = (11, 13)
SCHEDULE = Schedule(0.1, 0.05, epochs=2)

LEARNERS = {
    "SGD": SGD,
    "SGD-dagger": lambda: SGDDagger(k=3, samples=20),
    "OGD-GTL structured": lambda: OGD(0.01, samples=12),
    "OGD-GTL dense": lambda: OGD(0.01, samples=12, structured=False),
    "OGD all logits": lambda: OGD(0.0, samples=4, logits="all"),
    "GPM": lambda: GPM(0.9, samples=20, bias="augmented"),
    "EWC": lambda: EWC(10.0, samples=20),
}


def three_tasks():
    """Eight steps each: four an epoch, the last of them short."""
    return make_tasks(3, train=36)


def build(seed):
    return mlp((6, 8, 8, 3), seed=seed)


class Interrupt:
    """Presses Ctrl-C during chosen steps (task, step) of any learner."""

    def __init__(self, learner, *moments):
        after_step = learner.after_step

        def pressed(population, step):
            after_step(population, step)
            if (step.task, step.step) in moments:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0)  # the handler runs between two bytecodes

        learner.after_step = pressed
        self.learner = learner


def same(runs, others):
    for run, other in zip(runs, others, strict=True):
        assert torch.equal(run.snapshots, other.snapshots)
        assert torch.equal(run.initial, other.initial)
        assert run.buffers.keys() == other.buffers.keys()
        for name, buffer in run.buffers.items():
            assert torch.equal(buffer, other.buffers[name])
        for name in ("train_loss", "train_accuracy", "test_loss", "test_accuracy"):
            ours, theirs = getattr(run, name), getattr(other, name)
            assert torch.equal(ours.nan_to_num(-1.0), theirs.nan_to_num(-1.0))
        for note, theirs in zip(run.notes, other.notes, strict=True):
            assert {k: v for k, v in note.items() if not k.endswith("seconds")} == {
                k: v for k, v in theirs.items() if not k.endswith("seconds")
            }


@pytest.mark.parametrize("name", LEARNERS)
def test_ctrl_c_inside_any_task_loses_nothing(name, tmp_path):
    make = LEARNERS[name]
    whole = learn(build, three_tasks(), make(), SCHEDULE, seeds=SEEDS, momentum=0.5)
    file = tmp_path / "run.safetensors"
    for moment in ((0, 2), (1, 0), (2, 5), (2, 7)):
        interrupted = Interrupt(make(), moment).learner
        with pytest.raises(KeyboardInterrupt):
            learn(
                build, three_tasks(), interrupted, SCHEDULE,
                seeds=SEEDS, momentum=0.5, checkpoint=file,
            )  # fmt: skip
    resumed = learn(
        build, three_tasks(), make(), SCHEDULE, seeds=SEEDS, momentum=0.5, checkpoint=file
    )
    same(resumed, whole)
    # and a finished file gives the runs again, without a step
    again = learn(
        build, three_tasks(), make(), SCHEDULE, seeds=SEEDS, momentum=0.5, checkpoint=file
    )
    same(again, whole)


@pytest.mark.parametrize("policy", ["running", "freeze", "per_task"])
def test_statistics_of_batchnorm_are_part_of_the_checkpoint(policy, tmp_path):
    tasks = make_tasks(2, train=16, test=6, shape=(3, 8, 8))
    options = {"seeds": SEEDS, "batch_size": 4, "batchnorm": policy}
    whole = learn(resnet, tasks, SGD(), SCHEDULE, **options)
    file = tmp_path / "run.safetensors"
    for moment in ((0, 3), (1, 2)):
        with pytest.raises(KeyboardInterrupt):
            learn(
                resnet, tasks, Interrupt(SGD(), moment).learner, SCHEDULE,
                checkpoint=file, **options,
            )  # fmt: skip
    same(learn(resnet, tasks, SGD(), SCHEDULE, checkpoint=file, **options), whole)


class Crash(Exception):
    pass


def test_a_crash_costs_only_the_steps_since_the_last_checkpoint(tmp_path):
    """Killed without warning, in a step and in the work after a task."""

    class Dies(GPM):
        at = (1, 6)

        def after_step(self, population, step):  # noqa: ARG002
            if (step.task, step.step) == self.at:
                raise Crash

    class DiesLater(GPM):
        def after_task(self, population, task, samples):
            if task == 2:
                raise Crash
            super().after_task(population, task, samples)

    def arguments():
        return build, three_tasks()

    options = {"seeds": SEEDS, "checkpoint": tmp_path / "run.safetensors", "checkpoint_every": 3}
    whole = learn(*arguments(), GPM(0.9, bias="augmented"), SCHEDULE, seeds=SEEDS)
    seen = []

    class Counts(GPM):
        def after_step(self, population, step):  # noqa: ARG002
            seen.append((step.task, step.step))

    Dies.__name__ = DiesLater.__name__ = Counts.__name__ = "GPM"  # by which their file knows them
    for kind in (Dies, DiesLater):
        with pytest.raises(Crash):
            learn(*arguments(), kind(0.9, bias="augmented"), SCHEDULE, **options)
    same(learn(*arguments(), Counts(0.9, bias="augmented"), SCHEDULE, **options), whole)
    assert seen == []  # the last file held every step; only the work after the task was repeated


def test_a_checkpoint_of_other_settings_is_refused(tmp_path):
    file = tmp_path / "run.safetensors"
    learn(build, make_tasks(1), EWC(10.0), SCHEDULE, seeds=SEEDS, checkpoint=file)
    for changed, call in {
        "strength was 10.0, is 20.0": lambda: learn(
            build, make_tasks(1), EWC(20.0), SCHEDULE, seeds=SEEDS, checkpoint=file
        ),
        "seeds was": lambda: learn(
            build, make_tasks(1), EWC(10.0), SCHEDULE, seeds=(1, 2), checkpoint=file
        ),
        "data was": lambda: learn(
            build, make_tasks(1, train=37), EWC(10.0), SCHEDULE, seeds=SEEDS, checkpoint=file
        ),
        "schedule: epochs was 2, is 1": lambda: learn(
            build, make_tasks(1), EWC(10.0), Schedule(0.1), seeds=SEEDS, checkpoint=file
        ),
        "initial was": lambda: learn(
            lambda seed: build(seed + 1), make_tasks(1), EWC(10.0), SCHEDULE,
            seeds=SEEDS, checkpoint=file,
        ),
    }.items():  # fmt: skip
        with pytest.raises(StorageError, match=changed):
            call()


def test_ctrl_c_after_the_last_step_of_a_task_is_not_lost():
    """There is no step left that could act on it."""
    before, reached = signal.getsignal(signal.SIGINT), []

    def body():
        with noted() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            reached.append(stop.requested)

    with pytest.raises(KeyboardInterrupt):
        body()
    assert reached == [True]
    assert signal.getsignal(signal.SIGINT) is before


def test_without_a_checkpoint_ctrl_c_interrupts_at_once():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        learn(build, three_tasks(), Interrupt(SGD(), (1, 3)).learner, SCHEDULE, seeds=SEEDS)
    assert signal.getsignal(signal.SIGINT) is before


SCRIPT = """
import sys, time, torch
from curvlab.learners import SGD
from curvlab.nets import mlp
from curvlab.signals import noted
from curvlab.tasks.samples import Samples, Task
from curvlab.training import Schedule, learn

class Slow(SGD):
    def after_step(self, population, step):  # noqa: ARG002
        if step.step == 3:
            print("training", flush=True)
        time.sleep(0.002)

inputs = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
samples = Samples(inputs, (inputs[:, 0] > 0).long())
task = Task("one", samples, samples, 2)
learn(mlp((4, 5, 2), seed=1), [task], Slow(), Schedule(0.1, epochs=1000), seeds=1,
      checkpoint=sys.argv[1])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_process_stopped_from_outside_leaves_a_checkpoint(number, tmp_path):
    file = tmp_path / "run.safetensors"
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(file)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout.readline() == b"training\n"
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert b"KeyboardInterrupt" in errors
    assert process.returncode != 0
    from safetensors import safe_open

    with safe_open(file, framework="pt") as stored:
        manifest = json.loads(stored.metadata()["curvlab"])
    assert manifest["task"] == 0
    assert 0 < manifest["step"] < 4000


class Network(torch.nn.Module):
    """Parameters of one shape and one start, whatever else it does."""

    def __init__(self, activation=torch.tanh, module=None, dropout=0.0, frozen=1.0, table=1.0):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first, self.last = torch.nn.Linear(6, 8), torch.nn.Linear(8, 3)
        self.activation, self.module, self.dropout = activation, module, dropout
        self.frozen = torch.nn.Parameter(torch.full((8,), frozen), requires_grad=False)
        self.register_buffer("table", torch.full((8,), table))

    def forward(self, inputs):
        hidden = self.activation(self.first(inputs)) * self.frozen * self.table
        hidden = hidden if self.module is None else self.module(hidden)
        return self.last(torch.nn.functional.dropout(hidden, self.dropout, self.training))


OTHERS = {
    "an activation": ({}, {"activation": torch.relu}, r"activation='.*tanh'.*activation='.*relu'"),
    "a function": (
        {"activation": lambda x: torch.tanh(x)},
        {"activation": lambda x: torch.tanh(1.5 * x)},
        "answered otherwise",
    ),
    "a module": (
        {"module": torch.nn.GELU("tanh")},
        {"module": torch.nn.GELU()},
        r"model: module was \"GELU\(approximate='tanh'.*, is \"GELU\(approximate='none'",
    ),
    "dropout in training": ({}, {"dropout": 0.3}, r"dropout=0\.3"),
    "a frozen parameter": ({}, {"frozen": 1.1}, "answered otherwise.*frozen parameter"),
    "a buffer": ({}, {"table": 1.1}, "answered otherwise.*a buffer"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_network_with_the_same_parameters_does_not_go_on(tmp_path, name):
    first, changed, words = OTHERS[name]
    path, tasks = tmp_path / "run.safetensors", make_tasks(2, train=20)
    options = {"schedule": Schedule(0.1), "seeds": 1, "checkpoint": path}
    learn(Network(**first), tasks, SGD(), **options)
    learn(Network(**first), tasks, SGD(), **options)  # the same goes on
    with pytest.raises(StorageError, match=rf"belongs to another run.*{words}"):
        learn(Network(**changed), tasks, SGD(), **options)


def test_a_file_from_before_networks_were_kept_goes_on(tmp_path):
    from curvlab.storage import load_tensors, save_tensors

    path, tasks = tmp_path / "run.safetensors", make_tasks(2, train=20)
    options = {"schedule": Schedule(0.1), "seeds": 1, "checkpoint": path}
    (run,) = learn(Network(), tasks, SGD(), **options)
    tensors, facts = load_tensors(path, "training")
    del facts["config"]["model"]
    older = {name: one for name, one in tensors.items() if not name.startswith("answers/")}
    assert len(older) == len(tensors) - 2
    save_tensors(path, "training", older, facts)
    (again,) = learn(Network(), tasks, SGD(), **options)
    assert torch.equal(run.snapshots, again.snapshots)


@pytest.mark.parametrize("name", ["curve/0", "curve/part"])
def test_a_checkpoint_with_losses_of_other_runs_is_refused_by_name(name, tmp_path):
    options = {"seeds": (1,), "checkpoint": tmp_path / "state"}
    tasks, schedule = make_tasks(1, train=8), Schedule(0.1, epochs=1)
    learn(build, tasks, SGD(), schedule, **options)
    tensors, manifest = load_tensors(tmp_path / "state", "training")
    tensors[name] = tensors[name][:0]
    save_tensors(tmp_path / "state", "training", tensors, manifest)
    with pytest.raises(StorageError, match=r"state is damaged.*losses are"):
        learn(build, tasks, SGD(), schedule, **options)
