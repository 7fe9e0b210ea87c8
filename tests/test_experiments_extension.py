"""The extension on Split CIFAR-10, and the three networks of fig:forgettingratio1, tiny."""

import json
from dataclasses import replace

import pytest
import torch

from curvlab.parameters import parameter_count
from experiments import extension, extension_cifar10, perturbation, perturbation_sizes
from experiments.choices import LEARNERS, NETWORKS, STREAMS
from experiments.runner import Place, Work, measure
from experiments.shelf import Shelf, Training
from experiments.store import Store

SEEDS = [11]
TINY = Training(
    "split_cifar10_pixels", "pixels", rates="0.1", epochs="2", tasks=3, train=40, test=40,
    samples=10, embedded=True,
)  # fmt: skip
EXTENSION = extension_cifar10.Config(TINY)


def small(stream, network, **changes):
    one = replace(TINY, stream=stream, network=network, tasks=2, train=20, **changes)
    return perturbation.Config(one, tasks=1, directions=2, random=2, per_decade=1, tol=0.1)


NETWORKS_OF_THE_FIGURE = perturbation_sizes.Config((
    small("rotated_mnist", "mlp_tiny"), small("split_cifar10", "vit_tiny"),
    small("split_cifar10", "resnet_tiny", batchnorm="freeze"),
))  # fmt: skip


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    torch.set_num_threads(1)
    return Shelf(Store(tmp_path_factory.mktemp("results")), progress=False)


@pytest.fixture(scope="module")
def metrics(shelf):
    return stored(extension_cifar10.EXPERIMENT.run(EXTENSION, SEEDS, shelf))


def stored(found):
    """As the results file gives them back."""
    return {seed: json.loads(json.dumps(one, sort_keys=True)) for seed, one in found.items()}


def test_the_pixels_are_means_of_two_by_two_in_all_three_colours():
    whole, small = STREAMS["split_cifar10"](True, None), STREAMS["split_cifar10_pixels"](True, None)
    images, pixels = whole[1].test.inputs, small[1].test.inputs.reshape(-1, 3, 16, 16)
    assert torch.equal(small[1].test.targets, whole[1].test.targets)
    for row, column in ((0, 0), (7, 12)):
        block = images[:, :, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2].double()
        assert torch.allclose(pixels[:, :, row, column].double(), block.mean((2, 3)), atol=1e-6)


def test_every_learner_of_the_library_runs_on_cifar10_with_the_network_that_its_row_names(metrics):
    [table] = extension.tables(EXTENSION, metrics)
    for entry, row in zip(EXTENSION.entries, table.rows, strict=True):
        assert row == extension.row_of(entry)
        assert 0.0 <= table.mean(row, "a_tt") <= 1.0
        network = NETWORKS[entry.network].build(0, 2, 3)
        assert table.mean(row, "parameters") == parameter_count(network)
    assert table.label == extension_cifar10.EXPERIMENT.label, "its CSV must not be the other's"
    assert "SGD-dagger (k = 20, MLP)" in table.rows
    assert "SpaceNet, told the task (MLP)" in table.rows
    assert "Progressive, told the task (an MLP per task)" in table.rows
    assert "Split CIFAR-10 as 16 x 16 colours, 3 tasks, 40 embedded images a task" in table.title


def test_the_two_halves_of_the_extension_compare_the_same_learners_and_these_are_all():
    halves = [
        {(extension.shown(entry), entry.told) for entry in entries}
        for entries in (extension.ENTRIES, extension_cifar10.ENTRIES)
    ]
    assert halves[0] == halves[1]
    known = {"SGD-dagger", *(name.removesuffix("-pixels") for name in LEARNERS)}
    assert {name for name, _ in halves[0]} == known


def test_on_cifar10_too_isolation_forgets_exactly_nothing(metrics):
    isolation, below = extension.claims(EXTENSION, metrics, extension.tables(EXTENSION, metrics))
    assert (isolation.verdict, isolation.measured) == ("agree", "0, 0, 0, 0")
    assert below.verdict in ("agree", "disagree")
    assert isolation.ours, "the paper has no such table"
    assert below.ours


def test_the_figure_of_the_extension_is_drawn_from_its_metrics(metrics, tmp_path):
    extension.figure(EXTENSION, metrics, tmp_path / "figure")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_every_size_of_the_cifar10_extension_keeps_rate_times_steps():
    for config in extension_cifar10.EXPERIMENT.sizes.values():
        schedule = config.stream.schedule()
        steps = schedule.epochs_of(1) * (config.stream.train or 10_000) // 10
        assert schedule.lr_at(1, 0) * steps == pytest.approx(100.0)


def test_three_networks_stand_beside_each_other_and_the_ball_is_judged_by_their_size(
    shelf, tmp_path
):
    config = NETWORKS_OF_THE_FIGURE
    found = stored(perturbation_sizes.EXPERIMENT.run(config, SEEDS, shelf))
    [table] = perturbation_sizes.tables(config, found)
    assert list(table.rows) == ["MLP", "ViT", "ResNet"]
    assert table.mean("MLP", "parameters") == parameter_count(NETWORKS["mlp_tiny"].build(0, 10, 2))
    perturbation_sizes.EXPERIMENT.figure(config, found, tmp_path / "figure")
    assert (tmp_path / "figure.pdf").exists()
    reaches = {"MLP": 1.0, "ViT": 2.5, "ResNet": 4.0}
    sizes = {"MLP": 100, "ViT": 200, "ResNet": 400}
    for name, entry in found[11].items():
        entry["parameters"] = sizes[name]
        entry["tasks"][0]["bounded"]["reach"] = reaches[name]

    def verdicts(found):
        tables = perturbation_sizes.tables(config, found)
        return [one.verdict for one in perturbation_sizes.claims(config, found, tables)]

    assert verdicts({11: found[11]}) == ["undecided", "agree"], "of an order one seed says little"
    assert verdicts({11: found[11], 13: found[11]}) == ["agree", "agree"]
    found[11]["ViT"]["tasks"][0]["bounded"]["reach"] = 20.0  # larger than the ResNet's, too large
    assert verdicts({11: found[11], 13: found[11]}) == ["disagree", "disagree"]
    for entry in found[11].values():
        del entry["tasks"][0]["bounded"]
    assert verdicts(found) == ["not tested", "not tested"]


def test_networks_and_samples_are_on_the_device_that_was_asked_for(tmp_path):
    shelf = Shelf(Store(tmp_path), device="meta")  # no such numbers, but a device like any other
    assert {p.device.type for p in shelf.model(TINY, 11).parameters()} == {"meta"}
    assert shelf.hessian_samples(TINY, 11, 0).inputs.device.type == "meta"


def test_a_result_says_on_which_device_it_was_made(tmp_path):
    work = Work("random baselines", "demo", (11,))
    for device, said in (("cpu", work.command), ("cuda", f"{work.command} --device cuda")):
        place = Place(tmp_path / device, device=device)  # nothing of this label runs on a device
        measure(work, place)
        assert [result.command for result in place.store.results()] == [said]
