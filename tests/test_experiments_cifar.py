"""The CIFAR labels and the stream of 20 tasks, each through a whole run at a tiny size."""

import json
import math
import struct
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from curvlab.metrics import accuracy_forgetting, average_accuracy, average_forgetting
from curvlab.parameters import parameter_count
from experiments import (
    cifar10,
    cifar100,
    half_precision,
    long_stream,
    low_rank,
    other_architectures,
    perturbation,
    perturbation_networks,
)
from experiments.choices import NETWORKS
from experiments.cifar import RESNET_10, RESNET_100, VIT_10, VIT_100, Network, rows_of
from experiments.experiment import SIZES
from experiments.paper import TABLES
from experiments.registry import find
from experiments.report import write
from experiments.rotated import square
from experiments.shelf import Shelf, Training
from experiments.store import Store
from experiments.verdicts import VERDICTS

SEEDS = (11, 13)
TINY = Training(
    "split_cifar10", "resnet_tiny", rates="{0.1, 0.05}", epochs="{2, 1}", tasks=3, train=20,
    test=20, samples=10, batchnorm="freeze", embedded=True,
)  # fmt: skip
RESNET = Network("ResNet", TINY, ks=(2, 4))
VIT = Network("ViT", replace(TINY, network="vit_tiny", batchnorm=None), ks=(2,))


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """One folder for all tests: what one trained, the others find."""
    return Store(tmp_path_factory.mktemp("results"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_cifar100(folder / "cifar-100-python")
    return folder


def finish(experiment, config, store, data=None, seeds=SEEDS, verdicts=VERDICTS):
    """Run it, put it through JSON as the store does; returns metrics, tables by label, claims."""
    found = experiment.run(config, seeds, Shelf(store, data, progress=False))
    assert list(found) == list(seeds)
    metrics = {seed: json.loads(json.dumps(one)) for seed, one in found.items()}
    tables = {table.label: table for table in experiment.tables(config, metrics)}
    claims = experiment.claims(config, metrics, list(tables.values()))
    assert claims
    for claim in claims:
        assert claim.verdict in verdicts, claim
    return metrics, tables, claims


def write_cifar100(folder):
    """Files of the published format: pickles as Python 2 wrote them, 5 + 2 images of each class."""

    def text(value):
        size = bytes([len(value)]) if len(value) < 256 else struct.pack("<i", len(value))
        return (b"U" if len(value) < 256 else b"T") + size + value

    def array(value):
        kind = b"cnumpy\ndtype\n" + text(b"u1") + b"K\0K\1\x87R"
        kind += b"(K\3" + text(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb"
        shape = b"".join(b"M" + struct.pack("<H", size) for size in value.shape) + b"\x86"
        made = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85" + text(b"b")
        return made + b"\x87R(K\1" + shape + kind + b"\x89" + text(value.tobytes()) + b"tb"

    folder.mkdir()
    draw = np.random.default_rng(0)
    for name, copies in (("train", 5), ("test", 2)):
        labels = np.repeat(np.arange(100), copies)
        images = draw.integers(0, 256, (len(labels), 3072), dtype=np.uint8)
        images[np.arange(len(labels)), labels % 5] = 255
        numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
        body = text(b"fine_labels") + numbers + text(b"data") + array(images)
        (folder / name).write_bytes(b"\x80\x02}(" + body + b"u.")


def test_forgetting_and_accuracy_on_cifar10_follow_from_the_matrices(store):
    config = cifar10.Config((RESNET, VIT))
    metrics, tables, _ = finish(cifar10.EXPERIMENT, config, store)
    forgotten, reached = tables["Table:forg-C10-extended"], tables["Table:acc-C10"]
    assert list(forgotten.rows) == list(rows_of(config.networks))
    for row in forgotten.rows:
        matrix = torch.stack([square(one[row]["accuracy"]) for one in metrics.values()])
        lost = average_forgetting(accuracy_forgetting(matrix), "t").mean(0)
        got = average_accuracy(matrix).mean(0)
        for t in range(3):
            assert math.isclose(reached.mean(row, f"a({t + 1})"), got[t], abs_tol=1e-9)
            if t:
                assert math.isclose(forgotten.mean(row, f"E({t + 1})"), lost[t], abs_tol=1e-9)
        assert "a_tt" in forgotten.rows[row]
    assert forgotten.columns == ("E(2)", "E(3)", "a_tt")


def test_the_first_task_is_the_same_for_every_k(store):
    metrics, *_ = finish(cifar10.EXPERIMENT, cifar10.Config((RESNET,)), store)
    for one in metrics.values():
        assert len({one[row]["accuracy"][0][0] for row in one}) == 1
        for k in (2, 4):
            assert one[f"ResNet, SGD-dagger-{k}"]["directions"] == [k, 2 * k]


def test_other_architectures_share_the_runs_of_cifar10(store, data):
    finish(cifar10.EXPERIMENT, cifar10.Config((RESNET, VIT)), store)
    before = {path.name for path in (store.folder / "runs").iterdir()}
    files = {"stream": "split_cifar100", "test": None, "embedded": False}
    tiny = replace(VIT, training=replace(VIT.training, **files))
    config = other_architectures.Config((RESNET, VIT), (tiny,))
    metrics, tables, claims = finish(other_architectures.EXPERIMENT, config, store, data)
    added = {path.name for path in (store.folder / "runs").iterdir()} - before
    # of each seed SGD, SGD-dagger, the first task that they share and its eigenpairs
    assert len(added) == 4 * len(SEEDS), "only those of CIFAR-100"
    table = tables["tab:other-arch"]
    one = {seed: entry["cifar10"] for seed, entry in metrics.items()}
    lost = torch.stack([
        accuracy_forgetting(square(entry["ResNet, SGD"]["accuracy"])) for entry in one.values()
    ])  # fmt: skip
    for column, norm in (("cifar10", "pairs"), ("1/t cifar10", "t"), ("1/(t-1) cifar10", "t-1")):
        expected = float(average_forgetting(lost, norm)[:, -1].mean())
        assert math.isclose(table.mean("ResNet, SGD", column), expected, abs_tol=1e-9)
    assert math.isnan(table.mean("ResNet, SGD", "cifar100")), "there is no such training here"
    assert not math.isnan(table.mean("ViT, SGD", "cifar100"))
    assert len(claims) == 4, "SGD-dagger against SGD for each, and more against fewer k of one"


def test_cifar100_runs_from_files_of_the_published_format(store, data, tmp_path):
    training = replace(
        VIT.training, stream="split_cifar100", epochs="1", tasks=None, test=None, embedded=False
    )
    config = cifar100.Config((replace(VIT, training=training, ks=(1,)),))
    metrics, tables, claims = finish(cifar100.EXPERIMENT, config, store, data, seeds=(11,))
    matrix = metrics[11]["ViT, SGD"]["accuracy"]
    assert [len(row) for row in matrix] == list(range(1, 21)), "twenty tasks"
    table = tables["Table:acc-C100"]
    assert len(table.rows["ViT, SGD"]["a(T)"].samples) == 20
    gap = table.mean("ViT, SGD", "a_tt") - table.mean("ViT, SGD", "a(T)")
    assert math.isclose(gap, table.mean("ViT, SGD", "E(T)"), abs_tol=1e-9)
    assert len(claims) == 3
    cifar100.EXPERIMENT.figure(config, metrics, tmp_path / "picture")
    for suffix in ("png", "pdf"):
        assert (tmp_path / f"picture.{suffix}").stat().st_size > 5000


def test_cifar100_without_files_says_what_to_get(store, tmp_path):
    training = replace(TINY, stream="split_cifar100", embedded=False)
    config = cifar100.Config((replace(RESNET, training=training),))
    with pytest.raises(ValueError, match=r"cifar-100-python\.tar\.gz"):
        cifar100.EXPERIMENT.run(config, SEEDS, Shelf(store, tmp_path))


def test_predictions_of_full_rank_are_those_of_the_exact_hessian(store):
    training = Training("rotated_mnist", "mlp_tiny", rates="0.1", epochs="1", tasks=3, train=30,
                        test=20, samples=8, embedded=True)  # fmt: skip
    config = low_rank.Config(training, ranks=(2, 5, 40), tol=1e-4)
    metrics, tables, _ = finish(low_rank.EXPERIMENT, config, store)
    errors = metrics[11]["errors"]
    assert list(errors) == ["r = 2", "r = 5", "r = 40", "r = inf"]
    for term in ("first", "second", "taylor", "recursion"):
        # 8 samples of 10 classes: nearly all of the Hessian is in 40 eigenpairs
        assert np.allclose(errors["r = 40"][term], errors["r = inf"][term], atol=2e-2)
    assert errors["r = 2"]["first"] == errors["r = inf"]["first"], "the gradient has no rank"
    assert errors["r = 2"]["second"] != errors["r = inf"]["second"]
    assert len(errors["r = 2"]["second"]) == 3
    assert len(errors["r = 2"]["recursion"]) == 2
    assert len(metrics[11]["a_tt"]) == 3
    assert {"tab:RNC100TAYLOR", "tab:RNC100EQ3"} == set(tables)


def test_low_rank_of_a_resnet_says_that_it_is_not_cifar100(store):
    _, tables, claims = finish(low_rank.EXPERIMENT, low_rank.Config(TINY, (2, 4)), store)
    assert "where the paper has CIFAR-100" in tables["tab:RNC100TAYLOR"].title
    assert list(tables["tab:RNC100EQ3"].rows) == ["r = 2", "r = 4", "r = inf"]
    assert len(claims) == 3


@pytest.mark.parametrize("experiment", [perturbation_networks.RESNET, perturbation_networks.VIT])
def test_perturbation_of_both_networks(store, tmp_path, experiment):
    training = TINY if experiment.label == "fig:PTBRN" else VIT.training
    config = perturbation.Config(training, tasks=1, directions=2, random=2, per_decade=1, tol=0.1)
    # far out the tiny ViT predicts what it did before: then there is no score, and no verdict
    some = ("agree", "disagree", "not tested")
    metrics, _, _ = finish(experiment, config, store, verdicts=some)
    assert len(metrics[11]["tasks"][0]["loss"]["mean"]) == 8
    experiment.figure(config, metrics, tmp_path / "picture")
    assert (tmp_path / "picture.png").exists()


def test_the_check_of_bfloat16_trains_one_epoch_both_ways(store):
    config = half_precision.Config(VIT.training)
    metrics, tables, _ = finish(half_precision.EXPERIMENT, config, store, seeds=(11,))
    table, one = tables["ViT in bfloat16"], metrics[11]
    assert one["float32"]["loss"] == pytest.approx(one["bfloat16"]["loss"], rel=0.05)
    assert 0.0 < one["apart"] < 0.1
    assert table.mean("bfloat16", "test loss") == one["bfloat16"]["loss"]
    assert one["steps"] == 2  # 20 samples in batches of 10


def test_twenty_rotations_are_twenty_tasks(store, tmp_path):
    training = Training("rotated_mnist_20", "mlp_tiny", rates="{0.1, 0.01}", epochs="{2, 1}",
                        train=30, test=20, samples=10, embedded=True)  # fmt: skip
    config = long_stream.Config((Network("MLP", training, ks=(1,)),))
    metrics, tables, _ = finish(long_stream.EXPERIMENT, config, store, seeds=(11,))
    assert len(metrics[11]["MLP, SGD"]["accuracy"]) == 20
    table = tables["20 rotations"]
    assert "not in the paper" in table.title
    assert table.mean("MLP, SGD-dagger-1", "directions") == 19
    assert table.mean("MLP, SGD", "directions") == 0
    long_stream.EXPERIMENT.figure(config, metrics, tmp_path / "picture")
    assert (tmp_path / "picture.pdf").exists()


def test_the_page_of_these_labels_is_made_from_the_results_alone(store, tmp_path):
    config = cifar10.Config((RESNET, VIT))
    experiment = replace(cifar10.EXPERIMENT, sizes={"demo": config})
    metrics, *_ = finish(experiment, config, store)
    results = Store(tmp_path / "results")  # without runs/
    results.append(
        [experiment.result("demo", seed, one, 1.0, "typed") for seed, one in metrics.items()]
    )
    text = write(results, tmp_path / "out", [experiment]).read_text()
    assert "Table:acc-C10" in text
    assert "ResNet, SGD†-4" in text
    assert not (tmp_path / "results" / "runs").exists()


def test_full_sizes_are_the_papers():
    for network, steps in ((RESNET_10, 24_000), (VIT_10, 24_000), (RESNET_100, 65_000),
                           (VIT_100, 53_750)):  # fmt: skip
        schedule = network.training.schedule()
        tasks, images = (5, 10_000) if network.training.stream == "split_cifar10" else (20, 2500)
        assert sum(schedule.epochs_of(t) for t in range(tasks)) * images // 10 == steps
        assert (schedule.lr, schedule.lr_later) == (0.1, 0.001)
        assert network.training.train is network.training.tasks is None
        assert network.training.samples == 1000
    for label, networks in (
        ("Table:forg-C10-extended", cifar10.FULL.networks),
        ("Table:acc-C10", cifar10.FULL.networks),
        ("Table:acc-C100", cifar100.FULL.networks),
        ("tab:other-arch", other_architectures.FULL.cifar10),
        ("tab:other-arch", other_architectures.FULL.cifar100),
    ):
        assert list(TABLES[label]) == list(rows_of(networks)), label
    assert list(TABLES["tab:RNC100EQ3"]) == [f"r = {r}" for r in low_rank.FULL.ranks]
    for name, count in (("resnet", 480_902), ("vit", 12_466_946)):
        assert parameter_count(NETWORKS[name].build(0, 2, 5)) == count


def test_smaller_sizes_keep_rate_times_steps_of_the_later_tasks():
    images = {"demo": 250, "scaled": None}
    for size, config in (("demo", cifar10.DEMO), ("scaled", cifar10.SCALED)):
        for network in config.networks:
            schedule = network.training.schedule()
            steps = (images[size] or network.training.train) // 10 * schedule.epochs_of(1)
            assert schedule.lr_at(1, 0) * steps == pytest.approx(0.001 * 1000)
    for config in (cifar100.SCALED, long_stream.DEMO, long_stream.SCALED, long_stream.FULL):
        for network in config.networks:
            schedule = network.training.schedule()
            steps = (network.training.train or 0) // 10 * schedule.epochs_of(1)
            assert schedule.lr_at(1, 0) * steps == pytest.approx(0.001 * 2500, rel=0.05)


def test_every_label_of_these_modules_is_registered_with_its_cost():
    labels = ("tab:other-arch", "Table:forg-C10-extended", "Table:acc-C10", "Table:acc-C100",
              "fig:C100FRN", "fig:C100VITF", "tab:RNC100TAYLOR", "tab:RNC100EQ3", "fig:PTBRN",
              "fig:PTBvit", "20 rotations")  # fmt: skip
    for label in labels:
        experiment = find(label)
        assert set(experiment.cost) == set(experiment.sizes)
        assert set(experiment.sizes) <= set(SIZES)
        assert "not run" in experiment.cost["full"]
        assert len({repr(config) for config in experiment.sizes.values()}) == len(experiment.sizes)
        for before, after in pairwise(size for size in SIZES if size in experiment.sizes):
            assert experiment.sizes[before] != experiment.sizes[after]
