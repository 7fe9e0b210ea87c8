"""Samples, batches and subsets: each sample once, in an order of the seed; their errors."""

import pytest
import torch

from curvlab.tasks import (
    ImageData,
    Samples,
    Task,
    joined,
    limit,
    permuted_mnist,
    subset,
    toy_challenge,
)


def points(count=20, classes=4, width=3):
    inputs = torch.arange(count * width, dtype=torch.float32).view(count, width)
    return Samples(inputs, torch.arange(count) % classes)


def test_nothing_touches_the_global_generator():
    before = torch.get_rng_state()
    limit(permuted_mnist(tasks=2), train=50, test=20, seed=1)
    toy_challenge(seed=1)
    assert torch.equal(before, torch.get_rng_state())


def test_a_subset_has_distinct_samples_and_repeats_with_its_seed():
    chosen = subset(points(), 9, seed=4)
    assert len(chosen.inputs[:, 0].unique()) == len(chosen) == 9
    assert torch.equal(chosen.inputs, subset(points(), 9, seed=4).inputs)
    assert not torch.equal(chosen.inputs, subset(points(), 9, seed=5).inputs)


@pytest.mark.parametrize(("size", "counts"), [(4, [1, 1, 1, 1]), (10, [3, 3, 2, 2]), (20, [5] * 4)])
def test_a_balanced_subset_has_every_class_equally_often(size, counts):
    chosen = subset(points(), size, seed=0, balanced=True)
    assert chosen.targets.bincount().tolist() == counts
    assert len(chosen.inputs[:, 0].unique()) == size


def test_samples_move_to_another_dtype():
    task = toy_challenge(samples=4)[0].to(dtype=torch.float64)
    assert task.train.inputs.dtype == task.test.inputs.dtype == torch.float64
    assert task.train.targets.dtype == torch.int64


INPUTS, TARGETS = torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Samples(INPUTS.to(torch.uint8), TARGETS), r"images\.float\(\) / 255"),
        (lambda: Samples(INPUTS.half(), TARGETS), "float32 or float64; got torch.float16"),
        (lambda: Samples(INPUTS, TARGETS.int()), r"targets\.long\(\)"),
        (lambda: Samples(INPUTS, TARGETS.float()), "must be int64 class numbers"),
        (lambda: Samples(INPUTS.numpy(), TARGETS), "must be a tensor; got ndarray"),
        (lambda: Samples(INPUTS[0], TARGETS), r"inputs \(N, \.\.\.\) and targets \(N,\)"),
        (lambda: Samples(INPUTS, TARGETS.view(4, 1)), r"targets \(N,\)"),
        (lambda: Samples(INPUTS, TARGETS[:3]), "4 inputs and 3 targets"),
        (lambda: Samples(INPUTS[:0], TARGETS[:0]), "Samples is empty"),
        (lambda: Samples(INPUTS.to("meta"), TARGETS), "on one device"),
        (lambda: Task("t", points(), points(width=2), 4), "train and test inputs differ in shape"),
        (lambda: Task("t", points(), points(), 3), r"task 't': train targets run from 0 to 3"),
        (lambda: Task("t", points(classes=2), points(), 2), r"test targets .* 0\.\.1"),
        (lambda: subset(points(), 21, seed=0), "between 1 and 20"),
        (lambda: subset(points(), 0, seed=0), "between 1 and 20"),
        (lambda: subset(points(), 3, seed=0, balanced=True), "at least 4 classes; got 3"),
        (lambda: subset(uneven(), 6, seed=0, balanced=True), "needs 3 samples of class 1, but"),
        (lambda: joined([]), "at least one task"),
        (lambda: image_data(images=torch.zeros(4, 1, 2, 2)), "must be uint8 and int64"),
        (lambda: image_data(images=torch.zeros(4, 2, 2).byte()), r"shapes \(N, C, H, W\)"),
        (lambda: image_data(labels=TARGETS[:2]), r"\(N,\); got"),
        (lambda: image_data(labels=TARGETS + 2), "run from 2 to 2, but there are 2 classes"),
        (lambda: image_data(images=torch.zeros(4, 1, 3, 3).byte()), "differ in shape"),
        (
            lambda: image_data(images=torch.zeros(0, 1, 2, 2).byte(), labels=TARGETS[:0]),
            "are empty",
        ),
    ],
)
def test_errors_name_the_argument_and_the_cure(call, words):
    with pytest.raises((ValueError, TypeError), match=words):
        call()


def uneven():
    return Samples(torch.zeros(8, 2), torch.tensor([0, 0, 0, 0, 0, 0, 1, 1]))


def image_data(images=None, labels=None):
    good = torch.zeros(4, 1, 2, 2, dtype=torch.uint8)
    return ImageData(
        "data",
        good if images is None else images,
        TARGETS if labels is None else labels,
        good,
        TARGETS,
        ("a", "b"),
    )
