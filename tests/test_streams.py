"""Embedded data and streams: content, labels, rotation against independent truth, and errors."""

import hashlib
import json
import os
import shutil
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import affine_grid, avg_pool2d, cross_entropy, grid_sample

from curvlab.nets import mlp
from curvlab.storage import StorageError
from curvlab.tasks import (
    ANGLES,
    CIFAR_NORMALISATION,
    MNIST_NORMALISATION,
    DataError,
    ImageData,
    Samples,
    Task,
    cifar10,
    embedded_cifar10,
    embedded_mnist,
    joined,
    limit,
    minibatches,
    mnist,
    permuted_mnist,
    rotated_mnist,
    split_cifar10,
    split_cifar100,
    split_classes,
    subset,
    toy_challenge,
)
from curvlab.tasks.embedded import decode, encode, load
from curvlab.tasks.embedded.build import build, halve, select, spread, write
from curvlab.tasks.rotation import resampling_matrix, rotated

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}


def pictures(count=40, channels=3, side=32, classes=10, seed=0, name="pictures"):
    """Random images; every class equally often in both parts."""
    draw = torch.Generator().manual_seed(seed)
    shape = (count, channels, side, side)
    images = torch.randint(0, 256, (2, *shape), generator=draw, dtype=torch.uint8)
    labels = torch.arange(count) % classes
    labels = labels[torch.randperm(count, generator=draw)]
    return ImageData(
        name, images[0], labels, images[1], labels.flip(0), tuple(str(c) for c in range(classes))
    )


def points(count=20, classes=4, width=3):
    inputs = torch.arange(count * width, dtype=torch.float32).view(count, width)
    return Samples(inputs, torch.arange(count) % classes)


# Embedded data


def test_the_embedded_digits_are_balanced_and_small():
    data = embedded_mnist()
    assert data.train_images.shape == (5000, 1, 14, 14)
    assert data.test_images.shape == (1000, 1, 14, 14)
    assert data.train_labels.bincount().tolist() == [500] * 10
    assert data.test_labels.bincount().tolist() == [100] * 10
    assert 0.1 < float(data.train_images.float().mean()) / 255 < 0.16
    assert (files("curvlab.tasks.embedded") / "mnist14.xz").stat().st_size < 0.45e6


def test_the_embedded_pictures_are_balanced_and_small():
    data = embedded_cifar10()
    assert data.train_images.shape == (1250, 3, 32, 32)
    assert data.test_images.shape == (500, 3, 32, 32)
    assert data.train_labels.bincount().tolist() == [125] * 10
    assert data.test_labels.bincount().tolist() == [50] * 10
    assert data.classes[3] == "cat"
    assert (files("curvlab.tasks.embedded") / "cifar10.xz").stat().st_size <= 3_000_000


@pytest.mark.parametrize(
    ("name", "read"), [("mnist14", embedded_mnist), ("cifar10", embedded_cifar10)]
)
def test_the_embedded_pixels_are_those_of_the_manifest(name, read):
    data = read()
    pixels = torch.cat([data.train_images, data.test_images]).numpy().tobytes()
    manifest = json.loads((files("curvlab.tasks.embedded") / "manifest.json").read_text())
    assert hashlib.sha256(pixels).hexdigest() == manifest[name]["pixels_sha256"]


def test_a_damaged_embedded_file_is_refused(tmp_path):
    folder = Path(str(files("curvlab.tasks.embedded")))
    for name in ("manifest.json", "mnist14.xz"):
        shutil.copy(folder / name, tmp_path / name)
    assert len(load(tmp_path, "mnist14").train_labels) == 5000
    content = bytearray((tmp_path / "mnist14.xz").read_bytes())
    content[1000] ^= 1
    (tmp_path / "mnist14.xz").write_bytes(content)
    with pytest.raises(DataError, match=r"mnist14\.xz is damaged.*Reinstall"):
        load(tmp_path, "mnist14")


@pytest.mark.parametrize(
    ("count", "channels", "side"), [(1, 1, 1), (3, 1, 14), (1, 3, 1), (5, 3, 7)]
)
def test_encoding_loses_nothing(count, channels, side):
    images = np.random.default_rng(0).integers(0, 256, (count, channels, side, side), np.uint8)
    assert np.array_equal(decode(encode(images)), images)


def test_a_set_written_by_the_build_is_read_back(tmp_path):
    data = pictures(20, name="cifar10")
    entry = write(tmp_path, "cifar10", data)
    (tmp_path / "manifest.json").write_text(json.dumps({"cifar10": entry}))
    back = load(tmp_path, "cifar10")
    assert torch.equal(back.train_images, data.train_images)
    assert torch.equal(back.test_labels, data.test_labels)


def test_the_build_takes_every_class_at_even_distances_and_halves_by_rounding():
    labels = torch.tensor([0, 1] * 10)
    assert spread(labels, 2, 2).tolist() == [0, 1, 10, 11]
    with pytest.raises(DataError, match="class 0 has 10 images; 11 are needed"):
        spread(labels, 11, 2)
    assert halve(torch.tensor([[[[1, 2], [2, 1]]]], dtype=torch.uint8)).item() == 2  # 1.5 rounds up
    assert halve(torch.tensor([[[[1, 1], [2, 1]]]], dtype=torch.uint8)).item() == 1


def test_the_embedded_files_are_what_the_build_makes_of_the_real_data():
    root = os.environ.get("CURVLAB_DATA")
    if not root:
        pytest.skip("set CURVLAB_DATA to a folder with MNIST and CIFAR-10")
    for name, full, embedded in (
        ("mnist14", mnist(root), embedded_mnist()),
        ("cifar10", cifar10(root), embedded_cifar10()),
    ):
        expected = select(full, name)
        assert torch.equal(embedded.train_images, expected.train_images)
        assert torch.equal(embedded.train_labels, expected.train_labels)
        assert torch.equal(embedded.test_images, expected.test_images)
        assert torch.equal(embedded.test_labels, expected.test_labels)


@pytest.mark.slow
def test_the_build_from_the_real_data_repeats_the_manifest(tmp_path):
    root = os.environ.get("CURVLAB_DATA")
    if not root:
        pytest.skip("set CURVLAB_DATA to a folder with MNIST and CIFAR-10")
    committed = json.loads((files("curvlab.tasks.embedded") / "manifest.json").read_text())
    made = build(Path(root), tmp_path)
    for name, entry in committed.items():
        # compressed bytes may differ between versions of liblzma; pixels may not
        for key in ("pixels_sha256", "source_pixels_sha256", "train", "test", "shape", "classes"):
            assert made[name][key] == entry[key]


# Rotation


@pytest.mark.parametrize("size", [1, 2, 7, 14, 28])
@pytest.mark.parametrize("turns", [-2, -1, 0, 1, 2, 3, 4])
def test_quarter_turns_are_exact_and_counter_clockwise(size, turns):
    image = torch.arange(size * size, dtype=torch.float64).view(size, size)
    turned = resampling_matrix(size, size, 90.0 * turns) @ image.flatten()
    assert torch.equal(turned.view(size, size), torch.rot90(image, turns))


@pytest.mark.parametrize("degrees", [-45.0, -22.5, 0.0, 13.7, 22.5, 45.0, 170.0, 400.0])
@pytest.mark.parametrize(("size", "side"), [(28, 14), (14, 14), (28, 28), (9, 3), (12, 1)])
def test_rotation_then_shrinking_agrees_with_grid_sample_and_pooling(size, side, degrees):
    draw = torch.Generator().manual_seed(0)
    images = torch.rand(3, 1, size, size, generator=draw, dtype=torch.float64)
    angle = torch.deg2rad(torch.tensor(degrees, dtype=torch.float64))
    rows = torch.stack([torch.cos(angle), -torch.sin(angle), torch.sin(angle), torch.cos(angle)])
    theta = torch.cat([rows.view(2, 2), torch.zeros(2, 1, dtype=torch.float64)], dim=1)
    grid = affine_grid(theta.expand(3, 2, 3), list(images.shape), align_corners=False)
    turned = grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    expected = avg_pool2d(turned, size // side).flatten(1)
    result = images.flatten(1) @ resampling_matrix(size, side, degrees).T
    assert (result - expected).abs().max() < TOLERANCE[torch.float64]


def test_rotation_agrees_with_pillow_to_its_rounding():
    image_module = pytest.importorskip("PIL.Image")
    digit = embedded_mnist().train_images[17, 0]
    [turned] = rotated(digit.view(1, 1, 14, 14), [22.5], 14)
    expected = np.asarray(
        image_module.fromarray(digit.numpy()).rotate(22.5, image_module.Resampling.BILINEAR)
    )
    inside = slice(2, -2)  # Pillow blends differently where the image ends
    difference = turned.view(14, 14) * 255 - torch.from_numpy(expected.astype(np.float32))
    assert difference[inside, inside].abs().max() <= 1.0


def test_many_images_are_rotated_as_each_alone(monkeypatch):
    monkeypatch.setattr("curvlab.tasks.rotation.CHUNK", 4)
    images = pictures(9, channels=1, side=6, classes=3).train_images
    together = rotated(images, [10.0, -30.0], 3)
    assert together.shape == (2, 9, 9)
    assert together.dtype == torch.float32
    for index in range(9):
        alone = rotated(images[index : index + 1], [-30.0], 3)[0, 0]
        assert (together[1, index] - alone).abs().max() < TOLERANCE[torch.float32]


# Streams


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


def test_a_cached_stream_is_the_built_one_and_follows_its_content(tmp_path):
    data = pictures(10, channels=1, side=4)
    built = rotated_mnist(data, side=2, cache=tmp_path)
    [first] = tmp_path.iterdir()
    written = first.stat().st_mtime_ns
    again = rotated_mnist(data, side=2, cache=tmp_path)
    assert first.stat().st_mtime_ns == written
    for task, other in zip(built, again, strict=True):
        assert task.name == other.name
        assert torch.equal(task.train.inputs, other.train.inputs)
        assert torch.equal(task.test.inputs, other.test.inputs)
    rotated_mnist(data, side=4, cache=tmp_path)
    rotated_mnist(data, side=2, angles=[1.0], cache=tmp_path)
    rotated_mnist(data, side=2, normalise=MNIST_NORMALISATION, cache=tmp_path)
    rotated_mnist(pictures(10, channels=1, side=4, seed=1), side=2, cache=tmp_path)
    assert len(list(tmp_path.iterdir())) == 5
    first.write_bytes(first.read_bytes()[:-3])
    with pytest.raises(StorageError, match="damaged"):
        rotated_mnist(data, side=2, cache=tmp_path)


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
    torch.set_num_threads(1)  # the network is tiny
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
        batch = next(minibatches(streams[0][0].train, 10, seed=0))
    assert batch[0].device.type == "cpu"
    assert all(task.test.inputs.device.type == "cpu" for tasks in streams for task in tasks)


# Samples, batches, subsets


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("batch_size", [1, 3, 7, 20, 100])
def test_an_epoch_visits_every_sample_once(seed, batch_size, monkeypatch):
    monkeypatch.setattr("curvlab.tasks.samples.SLAB", 2)
    samples = points()
    batches = list(minibatches(samples, batch_size, seed=seed))
    sizes = [len(targets) for _, targets in batches]
    assert sizes == [batch_size] * (20 // batch_size) + [20 % batch_size] * (20 % batch_size > 0)
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    order = (inputs[:, 0] / 3).long()
    assert sorted(order.tolist()) == list(range(20))
    assert torch.equal(targets, samples.targets[order])
    assert (order.tolist() == list(range(20))) == (seed is None)


def test_batches_repeat_with_a_seed_and_differ_between_epochs_of_a_generator():
    def order(seed):
        return torch.cat([inputs for inputs, _ in minibatches(points(), 4, seed=seed)])

    assert torch.equal(order(5), order(5))
    generator = torch.Generator().manual_seed(5)
    first, second = order(generator), order(generator)
    assert torch.equal(first, order(5))
    assert not torch.equal(first, second)


def test_the_short_last_batch_can_be_dropped():
    assert [len(t) for _, t in minibatches(points(), 6, seed=0, drop_last=True)] == [6, 6, 6]


def test_nothing_touches_the_global_generator():
    before = torch.get_rng_state()
    tasks = limit(permuted_mnist(tasks=2), train=50, test=20, seed=1)
    list(minibatches(tasks[0].train, 10, seed=0))
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


def test_a_limited_stream_keeps_names_and_classes():
    tasks = limit(rotated_mnist(angles=[0.0, 5.0]), train=30, test=20, seed=1)
    assert [len(task.train) for task in tasks] == [30, 30]
    assert [len(task.test) for task in tasks] == [20, 20]
    assert tasks[1].train.targets.bincount().tolist() == [3] * 10
    assert tasks[1].name == "rotated by 5"
    assert not torch.equal(tasks[0].train.targets, tasks[1].train.targets)
    assert len(limit(tasks, test=7, balanced=False)[0].test) == 7
    assert limit(tasks, test=10)[0].train is tasks[0].train


def test_samples_move_to_another_dtype():
    task = toy_challenge(samples=4)[0].to(dtype=torch.float64)
    assert task.train.inputs.dtype == task.test.inputs.dtype == torch.float64
    assert task.train.targets.dtype == torch.int64


INPUTS, TARGETS = torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64)
GREY = pictures(10, channels=1, side=4)


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
        (lambda: minibatches(points(), 0), "batch_size= must be at least 1"),
        (lambda: minibatches(points(), 21, drop_last=True), "leaves nothing of 20"),
        (lambda: subset(points(), 21, seed=0), "between 1 and 20"),
        (lambda: subset(points(), 0, seed=0), "between 1 and 20"),
        (lambda: subset(points(), 3, seed=0, balanced=True), "at least 4 classes; got 3"),
        (lambda: subset(uneven(), 6, seed=0, balanced=True), "needs 3 samples of class 1, but"),
        (lambda: joined([]), "at least one task"),
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
        (lambda: toy_challenge(spread=0.0), "must be positive"),
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


def train(model, samples, steps):
    optimiser = torch.optim.SGD(model.parameters(), lr=0.2)
    generator = torch.Generator().manual_seed(0)
    done = 0
    while done < steps:
        for inputs, targets in minibatches(samples, 20, seed=generator, drop_last=True):
            optimiser.zero_grad()
            cross_entropy(model(inputs), targets).backward()
            optimiser.step()
            done += 1


def accuracy(model, samples):
    with torch.no_grad():
        return float((model(samples.inputs).argmax(1) == samples.targets).float().mean())
