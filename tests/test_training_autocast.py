"""Training in bfloat16: gradients alone are rounded, and the run is still one run to its bits."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from curvlab.learners import SGD, SGDDagger
from curvlab.nets import mlp, vit_cifar
from curvlab.training import Schedule, learn
from tests.small_problems import make_tasks

SCHEDULE = Schedule(0.1, 0.05, epochs=2)


def build(seed):
    return vit_cifar(3, hidden=16, depth=1, heads=2, mlp=32, side=8, patch=4, seed=seed)


def tasks():
    return make_tasks(2, train=24, shape=(3, 8, 8))


def test_the_first_step_is_a_gradient_under_autocast():
    task = make_tasks(1, train=10, shape=(3, 8, 8))
    [run] = learn(build, task, SGD(), Schedule(0.1, epochs=1), seeds=[11], autocast=torch.bfloat16)
    model = build(11)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(task[0].train.inputs)
    cross_entropy(logits.float(), task[0].train.targets).backward()
    rounded = torch.cat([p.grad.flatten() for p in model.parameters()])
    change = run.snapshots[0] - run.initial
    # one batch: only the order of its samples differs, which autocast's own rounding covers
    assert torch.allclose(change, -0.1 * rounded, atol=2e-2 * float(change.abs().max()))
    model.zero_grad()
    cross_entropy(model(task[0].train.inputs), task[0].train.targets).backward()
    exact = torch.cat([p.grad.flatten() for p in model.parameters()])
    off = float((change + 0.1 * exact).norm() / (0.1 * exact.norm()))
    assert 1e-4 < off < 5e-2, "rounded to bfloat16, and no more than that"


def test_parameters_evaluation_and_memory_keep_their_dtype():
    learner = SGDDagger(k=2, samples=10)
    [run] = learn(build, tasks(), learner, SCHEDULE, seeds=[11], autocast=torch.bfloat16)
    [exact] = learn(build, tasks(), SGDDagger(k=2, samples=10), SCHEDULE, seeds=[11])
    assert run.snapshots.dtype == torch.float32
    assert torch.unique(run.snapshots.view(torch.int32) & 0xFFFF).numel() > 100
    assert run.config["autocast"] == "torch.bfloat16"
    assert "autocast" not in exact.config
    assert not torch.equal(run.snapshots, exact.snapshots)
    assert float((run.test_loss[-1] - exact.test_loss[-1]).abs().max()) < 0.1


def test_a_branch_and_a_plain_mlp_train_in_bfloat16_too():
    whole = learn(build, tasks(), SGD(), SCHEDULE, seeds=[11, 13], autocast=torch.bfloat16)
    first = learn(build, tasks()[:1], SGD(), SCHEDULE, seeds=[11, 13], autocast=torch.bfloat16)
    branch = learn(
        build, tasks(), SGD(), SCHEDULE, seeds=[11, 13], autocast=torch.bfloat16, first=first
    )
    assert all(torch.equal(a.snapshots, b.snapshots) for a, b in zip(whole, branch, strict=True))
    with pytest.raises(ValueError, match="another autocast"):
        learn(build, tasks(), SGD(), SCHEDULE, seeds=[11, 13], first=first)
    dense = make_tasks(1, train=24)
    runs = [
        learn(lambda seed: mlp((6, 8, 3), seed=seed), dense, SGD(), SCHEDULE, seeds=[11], **options)
        for options in ({}, {"autocast": torch.bfloat16})
    ]
    assert not torch.equal(runs[0][0].snapshots, runs[1][0].snapshots)


def test_other_dtypes_are_refused_by_name():
    with pytest.raises(ValueError, match=r"None or torch\.bfloat16; got torch\.float16"):
        learn(build, tasks(), SGD(), SCHEDULE, seeds=[11], autocast=torch.float16)
