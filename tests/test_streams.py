"""Streams of tasks: the paper's, permuted, split and the toy one; their errors."""

import pytest
import torch
from torch.nn.functional import avg_pool2d, cross_entropy

from curvlab.nets import mlp
from curvlab.tasks import (
    ANGLES,
    CIFAR_NORMALISATION,
    MNIST_NORMALISATION,
    ImageData,
    embedded_cifar10,
    embedded_mnist,
    joined,
    limit,
    permuted_mnist,
    rotated_mnist,
    split_cifar10,
    split_cifar100,
    split_classes,
    toy_challenge,
)
from curvlab.tasks.rotation import rotated
from tests.made_up_data import pictures

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}


def test_rotated_mnist_is_the_stream_of_the_paper():
    tasks = rotated_mnist()
    assert [task.name for task in tasks] == [f"rotated by {a:g}" for a in ANGLES]
    assert ANGLES == (-45.0, -22.5, 0.0, 22.5, 45.0)
    data = embedded_mnist()
    for task in tasks:
        assert task.train.inputs.shape == (5000, 196)
        assert task.train.inputs.dtype == torch.float32
        assert task.classes == 10
        assert torch.equal(task.train.targets, data.train_labels)
        assert -1e-6 <= float(task.train.inputs.min()) <= float(task.train.inputs.max()) <= 1 + 1e-6
    upright = data.train_images.float().flatten(1) / 255
    assert (tasks[2].train.inputs - upright).abs().max() < TOLERANCE[torch.float32]


def test_the_full_images_are_rotated_before_they_are_shrunk():
    data = pictures(6, channels=1, side=28)
    [task] = rotated_mnist(data, angles=[22.5])
    expected = rotated(data.train_images, [22.5], 28)[0].view(-1, 1, 28, 28)
    expected = avg_pool2d(expected, 2).flatten(1)
    assert (task.train.inputs - expected).abs().max() < TOLERANCE[torch.float32]


@pytest.mark.parametrize("count", [1, 3, 12])
def test_a_stream_has_as_many_tasks_as_angles_or_permutations(count):
    data = pictures(10, channels=1, side=4)
    turned = rotated_mnist(data, angles=torch.linspace(-90, 90, count).tolist(), side=4)
    assert len(turned) == len(permuted_mnist(data, tasks=count, side=2)) == count


def test_images_may_keep_their_shape():
    data = pictures(10, channels=1, side=4)
    flat, shaped = (rotated_mnist(data, side=2, flat=flat)[0].test.inputs for flat in (True, False))
    assert shaped.shape == (10, 1, 2, 2)
    assert torch.equal(flat, shaped.flatten(1))


def test_normalisation_subtracts_the_mean_and_divides_by_the_deviation():
    plain, normal = (
        rotated_mnist(normalise=n)[1].train.inputs for n in (None, MNIST_NORMALISATION)
    )
    assert (normal - (plain - 0.1307) / 0.3081).abs().max() < 1e-5
    plain, normal = (
        split_cifar10(normalise=n)[1].train.inputs for n in (None, CIFAR_NORMALISATION)
    )
    mean, deviation = (torch.tensor(f).view(3, 1, 1) for f in CIFAR_NORMALISATION)
    assert (normal - (plain - mean) / deviation).abs().max() < 1e-5
    assert normal.mean((0, 2, 3)).abs().max() < 0.5


def test_permuted_mnist_keeps_the_first_task_and_permutes_the_others():
    tasks, again, other = (permuted_mnist(tasks=3, seed=seed) for seed in (0, 0, 1))
    upright = rotated_mnist(angles=[0.0])[0]
    assert torch.equal(tasks[0].train.inputs, upright.train.inputs)
    assert not torch.equal(tasks[1].train.inputs, tasks[2].train.inputs)
    for part in ("train", "test"):
        first, second = (getattr(tasks[i], part).inputs for i in (0, 1))
        assert not torch.equal(first, second)
        assert torch.equal(first.sort(dim=1).values, second.sort(dim=1).values)
    assert torch.equal(tasks[1].train.inputs, again[1].train.inputs)
    assert not torch.equal(tasks[1].train.inputs, other[1].train.inputs)


def test_one_permutation_serves_train_and_test():
    data = pictures(10, channels=1, side=2)
    same = ImageData("same", data.train_images, data.train_labels, data.train_images,
                     data.train_labels, data.classes)  # fmt: skip
    task = permuted_mnist(same, tasks=2, side=2)[1]
    assert torch.equal(task.train.inputs, task.test.inputs)


def test_split_cifar10_is_five_tasks_of_two_consecutive_classes():
    data = embedded_cifar10()
    tasks = split_cifar10()
    assert len(tasks) == 5
    assert tasks[1].name == "embedded cifar10: bird, cat"
    for index, task in enumerate(tasks):
        assert task.classes == 2
        member = (data.train_labels // 2) == index
        assert torch.equal(task.train.inputs, data.train_images[member].float() / 255)
        assert torch.equal(task.train.targets, data.train_labels[member] - 2 * index)
        assert task.train.targets.bincount().tolist() == [125, 125]
        assert task.test.inputs.shape == (100, 3, 32, 32)


def test_split_cifar100_is_twenty_tasks_of_five_classes():
    tasks = split_cifar100(pictures(200, side=8, classes=100))
    assert len(tasks) == 20
    assert all(task.train.targets.unique().tolist() == [0, 1, 2, 3, 4] for task in tasks)


def test_classes_are_dealt_out_in_the_given_order():
    data = pictures(40)
    tasks = split_classes(data, 2, order=[7, 1, 4, 0])
    assert len(tasks) == 2
    assert torch.equal(tasks[0].train.inputs[tasks[0].train.targets == 0],
                       data.train_images[data.train_labels == 7].float() / 255)  # fmt: skip
    assert torch.equal(tasks[1].test.inputs[tasks[1].test.targets == 1],
                       data.test_images[data.test_labels == 0].float() / 255)  # fmt: skip


def test_the_toy_challenge_lies_where_the_figure_says():
    centre, low, high = toy_challenge()
    assert [len(task.train) for task in (centre, low, high)] == [400, 400, 400]
    assert centre.train.inputs.mean(0).abs().max() < 0.1
    assert low.train.inputs.max() < 0 < high.train.inputs.min()
    for task, other in zip(toy_challenge(seed=3), toy_challenge(seed=3), strict=True):
        assert task.train.targets.bincount().tolist() == [200, 200]
        assert torch.equal(task.train.inputs, other.train.inputs)


def test_the_toy_challenge_is_forgotten_in_sequence_and_solved_jointly():
    tasks = toy_challenge(seed=11)
    model = mlp((2, 50, 50, 2), seed=11)
    first = []
    for task in tasks:
        train(model, task.train, 300)
        first.append(accuracy(model, tasks[0].test))
        assert accuracy(model, task.test) > 0.93
    assert first[0] > 0.98
    assert max(first[1:]) < 0.7
    together = mlp((2, 50, 50, 2), seed=11)
    train(together, joined(tasks).train, 2000)
    assert min(accuracy(together, task.test) for task in tasks) > 0.95


def test_streams_work_under_another_default_device():
    with torch.device("meta"):
        streams = [
            rotated_mnist(angles=[10.0]),
            permuted_mnist(tasks=2),
            split_cifar10(),
            limit(toy_challenge(samples=6), train=4),
        ]
    assert all(task.test.inputs.device.type == "cpu" for tasks in streams for task in tasks)


def test_a_limited_stream_keeps_names_and_classes():
    tasks = limit(rotated_mnist(angles=[0.0, 5.0]), train=30, test=20, seed=1)
    assert [len(task.train) for task in tasks] == [30, 30]
    assert [len(task.test) for task in tasks] == [20, 20]
    assert tasks[1].train.targets.bincount().tolist() == [3] * 10
    assert tasks[1].name == "rotated by 5"
    assert not torch.equal(tasks[0].train.targets, tasks[1].train.targets)
    assert len(limit(tasks, test=7, balanced=False)[0].test) == 7
    assert limit(tasks, test=10)[0].train is tasks[0].train


GREY = pictures(10, channels=1, side=4)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: joined([*toy_challenge(4), *rotated_mnist(GREY, side=4)]), "inputs of one shape"),
        (lambda: rotated_mnist(GREY, angles=[]), "angles= is empty"),
        (lambda: rotated_mnist(GREY, angles=[float("nan")], side=2), "must be finite"),
        (lambda: rotated_mnist(GREY, side=3), "side= must divide the images' side of 4"),
        (lambda: rotated_mnist(pictures(10)), r"rotation needs images \(N, 1, S, S\)"),
        (lambda: rotated_mnist(GREY, side=2, normalise=CIFAR_NORMALISATION), "for 1 channels"),
        (lambda: rotated_mnist(GREY, side=2, normalise=((0.1,), (0.0,))), "deviations above 0"),
        (lambda: permuted_mnist(GREY, tasks=0), "tasks= must be at least 1"),
        (lambda: split_classes(pictures(10), 3), "must divide the 10 classes; got 3"),
        (lambda: split_classes(pictures(10), 2, order=[0, 0]), "each at most once"),
        (lambda: split_classes(pictures(10), 2, order=[0, 10]), r"order= must name classes 0\.\.9"),
        (lambda: split_classes(pictures(10), 2, order=[]), "must divide the 0 classes"),
        (lambda: split_classes(pictures(5), 2), "no train images of class 5; leave it out"),
        (lambda: toy_challenge(1), "at least 2"),
    ],
)
def test_errors_name_the_argument_and_the_cure(call, words):
    with pytest.raises((ValueError, TypeError), match=words):
        call()


def train(model, samples, steps):
    optimiser = torch.optim.SGD(model.parameters(), lr=0.2)
    generator = torch.Generator().manual_seed(0)
    done = 0
    while done < steps:
        order = torch.randperm(len(samples), generator=generator)
        for chosen in order[: len(order) // 20 * 20].split(20):
            batch = samples[chosen]
            optimiser.zero_grad()
            cross_entropy(model(batch.inputs), batch.targets).backward()
            optimiser.step()
            done += 1


def accuracy(model, samples):
    with torch.no_grad():
        return float((model(samples.inputs).argmax(1) == samples.targets).float().mean())
