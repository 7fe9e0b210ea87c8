"""The command line: what is finished stays, what is shared is trained once, errors are advice."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from curvlab.storage import StorageError
from experiments import registry
from experiments.choices import NETWORKS
from experiments.findings import findings_of
from experiments.provenance import provenance
from experiments.runner import Place, Work, measure, results_of, shard, trainings_of
from experiments.shelf import LABEL, Shelf
from experiments.store import Store
from tests.tiny_experiment import TINY, command, experiment, run


@pytest.fixture
def tiny(monkeypatch):
    """Two labels that share their runs."""
    found = (experiment(also=("tab:alias",)), experiment("tab:square", power=2))
    monkeypatch.setattr(registry, "EXPERIMENTS", found)
    monkeypatch.setattr("experiments.__main__.EXPERIMENTS", found)
    return found


@pytest.mark.usefixtures("tiny")
def test_a_finished_label_prints_its_table_and_is_not_computed_again(tmp_path, capsys):
    assert command("run", "tab:alias", "--seeds", "1", "2", results=tmp_path) == 0
    said = capsys.readouterr().out
    assert "tab:tiny: accuracy" in said
    assert "agree" in said
    before = (tmp_path / "results.jsonl").read_bytes()
    assert command("run", "tab:tiny", "--seeds", "2", "1", results=tmp_path) == 0
    assert (tmp_path / "results.jsonl").read_bytes() == before


def test_labels_share_their_runs_and_a_new_seed_adds_only_itself(tiny, tmp_path):
    assert command("run", "all", "--seeds", "1", results=tmp_path) == 0
    assert command("run", "all", "--seeds", "1", "2", results=tmp_path) == 0
    lines = [(r.label, r.seed) for r in Store(tmp_path).results()]
    assert sorted(lines) == sorted(
        (label, seed) for label in (LABEL, LABEL, "tab:tiny", "tab:square") for seed in (1, 2)
    )
    square, plain = (results_of(Store(tmp_path), one, "demo") for one in reversed(tiny))
    for seed in (1, 2):
        assert square[seed].metrics["accuracy"] == plain[seed].metrics["accuracy"] ** 2


@pytest.mark.usefixtures("tiny")
def test_results_of_another_configuration_or_version_do_not_count(tmp_path):
    place = Place(tmp_path)
    measure(Work("tab:tiny", "demo", (1,)), place)
    for changed in (experiment(version="2"), experiment(power=3)):
        assert results_of(place.store, changed, "demo") == {}
    assert list(results_of(place.store, experiment(), "demo")) == [1]


@pytest.mark.usefixtures("tiny")
def test_results_do_not_count_once_a_training_behind_them_has_a_new_version(tmp_path, monkeypatch):
    place = Place(tmp_path)
    measure(Work("tab:tiny", "demo", (1,)), place)
    [training] = experiment().trainings(experiment().sizes["demo"])
    name = training.network
    monkeypatch.setitem(NETWORKS, name, replace(NETWORKS[name], version="newer"))
    assert results_of(place.store, experiment(), "demo") == {}
    assert list(results_of(place.store, experiment(), "demo", earlier=True)) == [1]
    [shown] = findings_of(place.store, experiment())
    assert shown.earlier == [1]
    assert "earlier version" in provenance(shown)
    measure(Work("tab:tiny", "demo", (1,)), place)  # makes it again
    [shown] = findings_of(place.store, experiment())
    assert shown.earlier == []


@pytest.mark.usefixtures("tiny")
def test_seeds_that_were_measured_stay_when_the_next_one_fails(tmp_path, capsys, monkeypatch):
    def fails(config, seeds, shelf):
        if seeds == [2]:
            raise ValueError("seed 2 is out of order")
        return run(config, seeds, shelf)

    broken = (replace(experiment(), run=fails),)
    monkeypatch.setattr(registry, "EXPERIMENTS", broken)
    monkeypatch.setattr("experiments.__main__.EXPERIMENTS", broken)
    assert command("run", "all", "--seeds", "1", "2", "3", results=tmp_path) == 1
    assert "seed 2 is out of order" in capsys.readouterr().err
    assert list(results_of(Store(tmp_path), broken[0], "demo")) == [1]


def test_a_run_is_the_same_alone_and_among_others(tmp_path):
    alone = Shelf(Store(tmp_path / "a")).runs(TINY, [2])[0]
    among = Shelf(Store(tmp_path / "b")).runs(TINY, [1, 2, 3])[1]
    assert torch.allclose(alone.snapshots, among.snapshots, atol=1e-5)


def test_a_damaged_run_is_named_with_its_cure(tmp_path):
    shelf = Shelf(Store(tmp_path))
    shelf.runs(TINY, [1])
    shelf.file(TINY, 1).write_bytes(b"damaged")
    with pytest.raises(StorageError, match=r"damaged.*Delete the file, and the run is trained"):
        shelf.runs(TINY, [1])


@pytest.mark.usefixtures("tiny")
def test_a_damaged_line_stops_the_command_and_repair_keeps_the_rest(tmp_path, capsys):
    assert command("run", "tab:tiny", "--seeds", "1", results=tmp_path) == 0
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"key": 1}\n')
    assert command("run", "tab:tiny", "--seeds", "1", results=tmp_path) == 2
    assert "results.jsonl, line 4 is not a result" in capsys.readouterr().err
    assert command("repair", results=tmp_path) == 0
    assert "1 damaged lines" in capsys.readouterr().out
    assert command("run", "tab:tiny", "--seeds", "1", results=tmp_path) == 0
    assert [r.label for r in Store(tmp_path).results()] == [LABEL, LABEL, "tab:tiny"]


@pytest.mark.usefixtures("tiny")
def test_shards_of_two_machines_merge_to_the_whole(tmp_path, capsys):
    folders = [tmp_path / "a", tmp_path / "b"]
    for index, folder in enumerate(folders, start=1):
        part = ["--shard", f"{index}/2", "--seeds", "1", "2"]
        assert command("run", "all", *part, results=folder) == 0
    assert command("merge", *map(str, folders), results=tmp_path) == 0
    assert command("merge", *map(str, folders), results=tmp_path) == 0  # adds nothing
    lines = [(r.label, r.seed) for r in Store(tmp_path).results()]
    assert sorted(lines) == sorted(
        (label, seed) for label in (LABEL, LABEL, "tab:tiny", "tab:square") for seed in (1, 2)
    )
    capsys.readouterr()
    assert command("merge", str(tmp_path / "none"), results=tmp_path) == 2
    assert "holds no results.jsonl" in capsys.readouterr().err


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["run", "tab:tinny"], "Did you mean 'tab:tiny'?"),
        (["run", "tab:tiny", "--size", "full"], "has no size 'full', only demo"),
        (["run", "tab:tiny", "--shard", "3/2"], "needs 1 <= I <= N; got '3/2'"),
        (["run", "tab:tiny", "--shard", "half"], "reads I/N, such as 1/4"),
        (["run", "tab:tiny", "--jobs", "0"], "must be 1 or more; got '0'"),
        (["run", "tab:tiny", "--device", "gpu"], "'gpu' is not available here"),
        (["report"], "holds no results.jsonl"),
        (["repair"], "holds no results.jsonl"),
    ],
)
def test_a_wrong_argument_is_answered_with_advice(arguments, advice, tmp_path, capsys):
    try:
        code = command(*arguments, results=tmp_path)
    except SystemExit as stopped:  # argparse's own way
        code = stopped.code
    assert code == 2
    assert advice in capsys.readouterr().err


def test_a_file_where_the_page_is_to_lie_is_named_and_kept(tmp_path, capsys):
    (tmp_path / "taken").write_text("mine")
    (tmp_path / "results.jsonl").touch()
    assert command("report", "--out", str(tmp_path / "taken"), results=tmp_path) == 2
    said = capsys.readouterr().err
    assert f"{tmp_path / 'taken'}" in said
    assert "--out" in said
    assert (tmp_path / "taken").read_text() == "mine"


def test_missing_data_is_answered_with_what_to_download(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("CURVLAB_DATA", raising=False)
    wants = experiment(training=replace(TINY, embedded=False))
    monkeypatch.setattr(registry, "EXPERIMENTS", (wants,))
    monkeypatch.setattr("experiments.__main__.EXPERIMENTS", (wants,))
    assert command("run", "tab:tiny", results=tmp_path) == 1
    assert "python -m curvlab.tasks.download mnist" in capsys.readouterr().err
    assert command("run", "tab:tiny", "--data", str(tmp_path), results=tmp_path) == 1
    assert "train-images-idx3-ubyte.gz" in capsys.readouterr().err


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 10, 13])
def test_shards_share_nothing_and_leave_nothing_out(count):
    work = [Work(f"label {i}", "demo", (11, 13, 21, 33, 55)) for i in range(2)]
    parts = [shard(work, index, count) for index in range(1, count + 1)]
    pairs = [(one.label, seed) for part in parts for one in part for seed in one.seeds]
    assert sorted(pairs) == sorted((one.label, seed) for one in work for seed in one.seeds)
    sizes = [sum(len(one.seeds) for one in part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


def test_up_to_as_many_shards_as_seeds_no_seed_is_on_more_than_two_machines():
    work = [Work(f"label {i}", "demo", (11, 13, 21, 33, 55)) for i in range(6)]
    assert [{one.seeds for one in shard(work, i, 5)} for i in range(1, 6)] == [
        {(11,)}, {(13,)}, {(21,)}, {(33,)}, {(55,)},
    ]  # fmt: skip


def test_several_jobs_train_a_shared_run_once(tiny, tmp_path):
    place = Place(tmp_path)
    work = [Work(one.label, "demo", (1, 2)) for one in tiny]
    first = trainings_of(work, place)
    assert [(one.training, one.seeds) for one in first] == [(TINY, (1, 2))]
    measure(first[0], place)
    assert trainings_of(work, place) == []


def test_different_seeds_of_one_training_do_not_wait_for_each_other(tmp_path, monkeypatch):
    both, train = threading.Barrier(2, timeout=20), Shelf._train

    def meet(self, training, seeds):
        both.wait()  # breaks unless the other one is training too
        train(self, training, seeds)

    monkeypatch.setattr(Shelf, "_train", meet)
    shelf = Shelf(Store(tmp_path))
    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(shelf.runs, TINY, [seed]) for seed in (1, 2)]
    assert [one.seed for done in found for one in done.result()] == [1, 2]


def test_different_seeds_of_one_label_do_not_wait_for_each_other(tmp_path, monkeypatch):
    inside = threading.Barrier(2, timeout=60)  # broken, and so an error, unless both come

    def together(config, seeds, shelf):
        inside.wait()
        return run(config, seeds, shelf)

    monkeypatch.setattr(registry, "EXPERIMENTS", (replace(experiment(), run=together),))
    place = Place(tmp_path)
    with ThreadPoolExecutor(2) as pool:
        found = list(
            pool.map(lambda seed: measure(Work("tab:tiny", "demo", (seed,)), place), (1, 2))
        )
    assert [set(one) for one in found] == [{1}, {2}]
