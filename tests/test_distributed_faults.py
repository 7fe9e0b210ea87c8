"""A rank that dies, fails or goes another way ends the job and is named; nobody hangs."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, nll_loss

from curvlab.basis import Basis
from curvlab.distributed import (
    DataParallel,
    Group,
    RankError,
    Sharded,
    Shards,
    join,
    launch,
)
from curvlab.eigen import lanczos
from curvlab.operators import Dense, FromFunction, GaussNewton, Hessian
from curvlab.probe import OperatorError

pytestmark = pytest.mark.distributed


def network(seed=0):
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.5 * torch.randn(p.shape, generator=generator))
    return model


def samples(seed, count=12):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 6, generator=generator)
    return inputs, torch.randint(3, (count,), generator=generator)


def part(group, *, seed=0, loss=cross_entropy, kind=Hessian, data=None):
    return kind(network(seed), loss, samples(group.rank) if data is None else data)


def disagreements(group):
    """What is said, on this rank, when one rank differs; the group goes on after each."""
    last = group.rank == group.size - 1
    said = {}

    def tried(name, call):
        try:
            call()
            said[name] = "nothing"
        except (ValueError, TypeError, RuntimeError) as error:
            said[name] = f"{type(error).__name__}: {error}"

    def log_loss(output, target):
        return nll_loss(output.log_softmax(1), target)

    tried("parameters", lambda: DataParallel(part(group, seed=int(last))))
    tried("loss", lambda: DataParallel(part(group, loss=log_loss if last else cross_entropy)))
    tried("kind", lambda: DataParallel(part(group, kind=GaussNewton if last else Hessian)))
    tried("same data", lambda: DataParallel(part(group, data=samples(0))))
    tried("no data", lambda: DataParallel(None))
    tried("no operator", lambda: DataParallel("Hessian" if last else part(group)))
    tried("no count", lambda: DataParallel(Dense(torch.eye(3)) if last else part(group)))
    tried("bad count", lambda: DataParallel(part(group), samples=-1.0))

    def not_finite(vector):
        return vector * float("nan") if last else vector

    def failing(vector):
        if last:
            raise OperatorError("the loss of chunk 0 was 1 and is 2 now")
        return vector

    def watched(hook):
        """A product in pieces, in whose backward pass one rank meets ``hook`` after the others."""
        own = Hessian(network(), cross_entropy, samples(group.rank, 9), engine="retained")
        if last:
            own.problem.parameters[0].register_hook(hook)
        return DataParallel(own, overlap=128)

    def fails(_):
        raise OperatorError("the pass broke off")

    in_pieces = watched(fails)
    assert in_pieces.piece is not None
    tried("failing in pieces", lambda: in_pieces @ torch.ones(in_pieces.n))
    tried("nan in pieces", lambda: watched(lambda g: g * float("nan")) @ torch.ones(in_pieces.n))
    healthy = watched(lambda _: None)
    said["works in pieces"] = bool((healthy @ torch.ones(in_pieces.n)).isfinite().all())

    inputs, targets = samples(0, 60)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(group.rank))
    mine = order[group.rank :: group.size]
    tried("other order", lambda: DataParallel(part(group, data=(inputs[mine], targets[mine]))))
    tried("overlap", lambda: DataParallel(part(group), overlap=1024 if last else None))
    tried("bad overlap", lambda: DataParallel(part(group), overlap=0))

    with_nan = DataParallel(FromFunction(not_finite, 5), samples=3)
    tried("nan", lambda: with_nan @ torch.ones(5))
    raising = DataParallel(FromFunction(failing, 5), samples=3)
    tried("failing", lambda: raising @ torch.ones(5))
    sound = DataParallel(FromFunction(lambda v: v, 5), samples=1 + group.rank)
    tried("another vector", lambda: sound @ torch.full((5,), 1.0 + last))
    tried("no loss", lambda: sound.loss)
    tried("no gradient", sound.gradient)
    said["still works"] = (sound @ torch.ones(5)).tolist()

    basis = Basis(Shards(300), 4)
    basis.extend(basis.space.take(torch.eye(300)[:2]))
    shard = torch.zeros(basis.width)
    if last:
        shard[0] = float("nan")
    tried("nan gradient", lambda: basis.sgd_step_([torch.zeros(300)], [shard], [], 0.1))
    tried("no momenta", lambda: basis.sgd_step_([torch.zeros(300)], [shard], [], 0.1, 0.0, 0.9))
    tried("whole vectors", lambda: basis.extend(torch.ones(1, basis.width)) if last else None)
    tried("list", lambda: basis.project_out_([torch.zeros(7)]))

    sharded = Sharded(Dense(torch.diag(torch.arange(300.0))))
    tried("not a shard", lambda: sharded @ torch.ones(300))
    tried("dense", lambda: lanczos(sharded, 2, dense=True))
    tried("take", lambda: Shards(300).take(torch.ones(299)))
    tried("not an operator", lambda: Sharded("Hessian"))
    return said


def going_wrong(group, how, victim):
    group.sum_(torch.ones(100), "a first sum")
    if group.rank == victim and how == "raises":
        raise ValueError("sample 17 is damaged")
    if group.rank == victim and how == "leaves":
        return
    if group.rank == victim and how == "hangs":
        time.sleep(600)
    if group.rank == victim and how == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if group.rank == victim and how == "goes another way":
        group.gather(torch.ones(100), "another collective")
    group.sum_(torch.ones(100), "a second sum")


def sleeping(group, folder):
    (folder / f"{group.rank}").write_text(str(os.getpid()))
    time.sleep(600)


@pytest.fixture(scope="module")
def said():
    return launch(disagreements, 2, timeout=90, patience=20)


SAYS = {
    "parameters": "rank 1 differs from rank 0 in its parameters",
    "loss": "rank 1 differs from rank 0 in its loss",
    "kind": "rank 1 differs from rank 0 in its kind: 'GaussNewton' instead of 'Hessian'",
    "same data": "ranks 0 and 1 hold the same data",
    "no data": "no rank has any data",
    "no operator": "a part is an operator or None; got str",
    "no count": "pass samples=",
    "bad count": "samples= is a positive number; got -1.0",
    "nan": "the product of rank 1 holds NaN or infinity",
    "failing": "the loss of chunk 0 was 1 and is 2 now",
    "another vector": "rank 1 multiplies another vector",
    "failing in pieces": "the pass broke off",
    "nan in pieces": "the product of rank 1 holds NaN or infinity",
    "other order": "samples are on two ranks, such as ranks 0 and 1",
    "overlap": "rank 1 differs from rank 0 in its overlap",
    "bad overlap": "overlap= is a number of bytes, or None; got 0",
    "no loss": "the parts are not made from a model, a loss and data",
    "no gradient": "the parts are not made from a model, a loss and data",
    "nan gradient": "vectors of ranks [1] hold NaN",
    "no momenta": "momentum=0.9 needs momenta",
    "list": "gradients have 7 elements together; the basis holds vectors of 300",
    "not a shard": "this takes shards of shape (192,)",
    "dense": "dense=True needs whole vectors",
    "take": "whole vectors have 300 elements",
    "not an operator": "Sharded takes a DataParallel or another operator; got str",
}


@pytest.mark.parametrize("name", SAYS)
def test_a_disagreement_is_refused_on_every_rank_with_the_rank_named(said, name):
    for rank, found in enumerate(said):
        assert SAYS[name] in found[name], rank


def test_a_rank_hears_of_another_ranks_failure_and_the_job_goes_on(said):
    assert said[0]["failing"].startswith("RankError: rank 1 failed in a product: OperatorError")
    assert said[1]["failing"].startswith("OperatorError: the loss")
    assert said[0]["no operator"].startswith("RankError: rank 1 failed in making a part")
    assert said[1]["whole vectors"].startswith("ValueError: rank 1 holds 108 elements")
    assert said[0]["failing in pieces"].startswith("RankError: rank 1 failed in a product")
    assert said[1]["failing in pieces"].startswith("OperatorError: the pass")
    assert all(found["works in pieces"] for found in said)
    assert said[0]["still works"] == pytest.approx([1.0] * 5)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("raises", "rank {other}: rank {victim} failed: ValueError: sample 17 is damaged"),
        ("leaves", "rank {victim}: done"),
        ("goes another way", "rank {victim}: in collective 2 (another collective)"),
    ],
)
def test_a_rank_that_fails_or_goes_another_way_ends_the_job(how, text):
    victim = 1
    began = time.monotonic()
    with pytest.raises(RankError) as error:
        launch(going_wrong, 2, how, victim, timeout=60, patience=3)
    assert text.format(victim=victim, other=1 - victim) in str(error.value)
    assert time.monotonic() - began < 40


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "victim"), [(2, 1), (4, 0), (4, 3), (8, 5)])
@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("raises", "rank {victim} failed: ValueError: sample 17"),
        ("is killed", "rank {victim} gave no sign of life"),
        ("hangs", "rank {victim}: after collective 1"),
        ("goes another way", "rank {victim}: in collective 2"),
    ],
)
def test_the_right_one_of_many_ranks_is_named(how, text, ranks, victim):
    began = time.monotonic()
    with pytest.raises(RankError) as error:
        launch(going_wrong, ranks, how, victim, timeout=90, patience=5)
    assert text.format(victim=victim) in str(error.value)
    assert time.monotonic() - began < 60


PROGRAM = """
import torch
from curvlab.distributed import join

with join(timeout=20) as group:
    group.sum_(torch.ones(8), "a first sum")
    if group.rank == 1:
        raise ValueError("sample 17 is damaged")
    group.sum_(torch.ones(8), "a second sum")
"""


def test_a_rank_that_raises_ends_with_its_own_traceback(tmp_path):
    """Not with SIGABRT, from a thread that torch holds when Python ends."""
    (tmp_path / "program.py").write_text(PROGRAM)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, "program.py"], cwd=tmp_path, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                 "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [rank.communicate(timeout=90)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1], said
    assert "Traceback" in said[1]
    assert "ValueError: sample 17 is damaged\n" in said[1]
    assert "RankError: rank 1 failed: ValueError: sample 17 is damaged" in said[0]
    assert not any("terminate called" in text for text in said)


def test_no_process_outlives_its_time(tmp_path):
    with pytest.raises(RankError, match=r"ranks \[0, 1\] did not finish within 4 s"):
        launch(sleeping, 2, tmp_path, timeout=4)
    pids = [int(file.read_text()) for file in tmp_path.iterdir()]
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_without_a_launcher_a_program_runs_alone_and_sends_nothing():
    with join() as group:
        operator = Sharded(DataParallel(part(group)))
        pairs = lanczos(operator, 2)
        assert group.size == 1
        assert group.traffic.messages == 0
    whole = lanczos(part(group), 2)
    assert torch.allclose(pairs.gather().values, whole.values)


def test_outside_a_job_the_cure_is_named():
    with pytest.raises(ValueError, match="start it with torchrun"):
        Group()
    with pytest.raises(ValueError, match="at least one rank"):
        launch(going_wrong, 0)


@pytest.mark.slow
def test_the_documented_program_runs_under_torchrun(tmp_path):
    text = (Path(__file__).parent.parent / "curvlab" / "guide" / "distributed.md").read_text()
    program = tmp_path / "spectrum.py"
    program.write_text(text.partition("```python\n")[2].partition("```")[0])
    ranks = ["--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *ranks, program.name],
        cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=90,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 2 holds 9024 elements" in done.stdout
    assert sorted(path.name for path in (tmp_path / "memory" / "state-1").iterdir()) == [
        "shard-00000-of-00002.safetensors",
        "shard-00001-of-00002.safetensors",
    ]
