"""What a step gets: each seed's own order of samples, and the learning rates of a schedule."""

import math

import pytest
import torch

from curvlab.tasks.samples import Samples
from curvlab.training import Schedule
from curvlab.training.batches import seed_batches
from tests.small_problems import make_tasks


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
