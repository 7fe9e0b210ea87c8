"""What is committed: it belongs to the present code and makes the page without any run."""

import re
import shlex

import pytest

from experiments import shelf
from experiments.__main__ import _parser, main
from experiments.findings import findings_of
from experiments.registry import EXPERIMENTS, find
from experiments.runner import results_of
from experiments.shelf import LABEL
from experiments.store import COMMITTED, Store
from experiments.verdicts import VERDICTS

LABELS = [
    "fig:cartoon_forgetting",
    "fig:cartoon_forgetting2",
    "Table:Taylor-apprx",
    "Table:Taylor-apprx-full",
    "tab:Our-approx-full",
    "fig:forgettingratio1",
    "fig:PTBRM",
    "fig:PTBRN",
    "fig:PTBvit",
    "fig:comparisonRM",
    "tab:VOC",
    "tab:ASSMPT",
    "tab:other-arch",
    "Table:forg-C10-extended",
    "Table:acc-C10",
    "Table:acc-C100",
    "fig:C100FRN",
    "fig:C100VITF",
    "fig:HEM",
    "fig:HRRM",
    "tab:RNC100TAYLOR",
    "tab:RNC100EQ3",
]


@pytest.fixture(scope="module")
def store():
    return Store(COMMITTED)


def test_the_committed_results_belong_to_the_present_configurations(store):
    results = [result for result in store.results() if result.label != LABEL]
    assert results
    for result in results:
        known = results_of(store, find(result.label), result.size, earlier=True)
        assert result.seed in known, f"{result.label} at {result.size} was changed: run it again"


def test_the_committed_results_make_the_page_without_data_or_training(store, tmp_path, monkeypatch):
    def refuse(*arguments, **_):
        raise AssertionError(f"the page asked for a run or for data: {arguments}")

    monkeypatch.setattr(shelf, "learn", refuse)
    monkeypatch.setattr(shelf, "stream_of", refuse)
    monkeypatch.delenv("CURVLAB_DATA", raising=False)
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "results.jsonl").write_bytes(store.file.read_bytes())
    out = tmp_path / "page"
    assert main(["report", "--results", str(folder), "--out", str(out)]) == 0
    text = (out / "index.html").read_text()
    for one in EXPERIMENTS:
        for found in findings_of(store, one):
            assert f'id="{found.anchor}"' in text
            for claim in found.claims:
                assert claim.verdict in VERDICTS
            for name, _ in found.files():
                assert (out / "tables" / f"{name}.csv").stat().st_size > 0
            if one.figure is not None:
                assert (out / "figures" / f"{found.anchor}.png").stat().st_size > 5000
                assert (out / "figures" / f"{found.anchor}.pdf").stat().st_size > 5000
    assert not (folder / "runs").exists()
    assert re.search(r"Of \d+ statements of the paper", text)


def test_every_label_of_the_paper_is_answered_once():
    answered = [label for one in EXPERIMENTS for label in one.labels]
    assert len(set(answered)) == len(answered)
    assert set(LABELS) <= set(answered)


def test_the_commands_in_the_guide_are_commands():
    text = (COMMITTED.parent.parent / "curvlab" / "guide" / "paper.md").read_text()
    lines = re.findall(r"^python -m experiments (run .*)$", text, re.MULTILINE)
    assert len(lines) >= 8
    for line in lines:
        words = shlex.split(line, comments=True)
        options = _parser().parse_args([word.replace("cuda", "cpu") for word in words])
        for label in options.labels:
            assert label == "all" or options.size in find(label).sizes


def test_every_size_says_what_it_costs():
    for one in EXPERIMENTS:
        assert set(one.cost) == set(one.sizes), one.label


def test_results_are_small_enough_to_be_committed():
    files = [path for path in COMMITTED.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 4_000_000
    assert all(path.suffix in (".jsonl", ".md", ".png", ".pdf", ".csv") for path in files)
