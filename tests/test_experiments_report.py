"""The report page: made from results alone, whole in itself, escaped, right about sizes."""

import base64
import csv
import re
from dataclasses import dataclass, replace
from html.parser import HTMLParser

import pytest

from experiments.experiment import Experiment, file_name
from experiments.figures import panels, save
from experiments.findings import findings_of
from experiments.markup import Markup, joined, tag
from experiments.registry import EXPERIMENTS
from experiments.report import write
from experiments.shelf import Training
from experiments.store import Store, StoreError, make_result
from experiments.tables import Table
from experiments.verdicts import Claim, Quote, holds

PAPER = "tab:VOC"  # a label with published numbers
ROW = "lr 1e-5, GPM"
HOSTILE = "<script>alert('x')</script> & \"quoted\""


@dataclass(frozen=True)
class Config:
    stream: str = "rotated_mnist"
    steps: int = 10


def tables(_config, metrics):
    found = Table(PAPER, "violation", ("VNC", "a_tt"))
    found.add(ROW, "VNC", [one["vnc"] for one in metrics.values()])
    found.add(ROW, "a_tt", [one["a_tt"] for one in metrics.values()])
    found.add("a row that the paper has not", "VNC", [0.5])
    return [found]


HALF, ZERO = Quote("Section 1", "below one half"), Quote("tab:VOC", "below zero", "GPM")
MARS, MOON = Quote("Section 2", "on Mars"), Quote("Section 2", "on the Moon")


def claims(_config, metrics, _tables):
    values = [one["vnc"] for one in metrics.values()]
    return [
        holds(HALF, values, lambda *v: max(v) < 0.5),
        holds(ZERO, values, lambda *v: max(v) < 0.0, reading="the mean"),
        Claim(MOON, "undecided", "-"),
    ]


def figure(_config, metrics, path):
    picture, (axes,) = panels(1)
    axes.plot([one["vnc"] for one in metrics.values()])
    save(picture, path)


def experiment(label=PAPER, **changes):
    sizes = {"demo": Config(steps=1), "scaled": Config(steps=5), "full": Config(steps=10)}
    facts = {"what": "a test", "data": "mnist", "sizes": sizes, "cost": {"demo": "2 s"}}
    functions = {"run": lambda *_: {}, "tables": tables, "claims": claims, "figure": figure,
                 "quotes": (HALF, ZERO, MARS, MOON)}  # fmt: skip
    return Experiment(label=label, **(facts | functions | changes))


def add(store, one, size, seeds=(11, 13), a_tt=0.9, vnc=0.004, command="python -m it", version="1"):
    store.append([
        make_result(one.label, size, seed, one.sizes[size], {"vnc": vnc, "a_tt": a_tt}, 61.5,
                    version, command)
        for seed in seeds
    ])  # fmt: skip


class Reader(HTMLParser):
    """Checks that tags close in order; keeps texts, links and ids."""

    VOID = ("meta", "img", "wbr")

    def __init__(self, text):
        super().__init__()
        self.open, self.texts, self.links, self.ids, self.sources = [], [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        facts = dict(attrs)
        self.links += [facts["href"]] if "href" in facts else []
        self.ids += [facts["id"]] if "id" in facts else []
        self.sources += [facts["src"]] if "src" in facts else []
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def page(store, out, *experiments):
    path = write(store, out, experiments)
    assert path == out / "index.html"
    text = path.read_text(encoding="utf-8")
    return text, Reader(text)


def test_an_empty_store_makes_a_page_that_says_how_to_begin(tmp_path):
    text, read = page(Store(tmp_path / "none"), tmp_path / "out", *EXPERIMENTS)
    assert "There are no results yet" in text
    assert "python -m experiments run all" in " ".join(read.texts)
    for one in EXPERIMENTS:
        assert all(label in "".join(read.texts) for label in one.labels)
    assert not (tmp_path / "none").exists(), "a page may not write into the results"


def test_the_verdict_counts_every_statement_also_of_labels_that_were_not_run(tmp_path):
    store, one = Store(tmp_path / "r"), experiment()
    add(store, one, "full")
    text, read = page(store, tmp_path / "out", one, experiment("tab:other-arch"))
    assert "Of 8 statements of the paper, at its own size" in text
    assert "1 agrees<" in text
    assert "1 disagrees<" in text
    assert "1 is undecided<" in text
    assert "and 5 are not tested." in text, "one without a verdict, four of the label not run"
    marks = re.findall(r'class="count (\w+)" title="[^"]*">. (\d+)', text)
    counts = {style: sum(int(n) for s, n in marks if s == style) for style, _ in marks}
    assert counts == {"agree": 1, "disagree": 1, "undecided": 1, "untested": 5}
    assert "What disagrees" in text
    assert "“below zero” (tab:VOC): GPM" in " ".join(read.texts)
    assert "Read as: the mean." in text
    assert text.index("What disagrees") < text.index("python -m it"), "disagreements stand on top"
    assert "1 experiment not run" in text


def test_ours_stands_beside_the_papers_with_the_command_that_made_it(tmp_path):
    store, one = Store(tmp_path / "r"), experiment()
    add(store, one, "full", seeds=(11,), command="python -m made eleven")
    add(store, one, "full", seeds=(13,), vnc=0.006, command="python -m made thirteen")
    text, read = page(store, tmp_path / "out", one)
    cell = re.search(r'<a href="#(made-[^"]+)" title="([^"]*)" class="ours">([^<]*)</a>', text)
    assert cell is not None
    assert cell[1] in read.ids
    assert cell[2] == "python -m made eleven\npython -m made thirteen"
    assert cell[3] == "0.0050 ± 0.0010"
    assert "0.0040 ± 0.0040" in text, "the published number"
    assert "violation (mean ± standard deviation; below it the paper's)" in text.replace(
        "&#x27;", "'"
    )
    assert "≈ 1/1" in text, "0.005 ± 0.001 is near 0.004 ± 0.004"
    for fact in ("seeds 11 13", "commit ", "torch ", "2 min (2 seeds, measured)", "date "):
        assert fact in text


def test_checks_beyond_the_paper_are_not_counted_as_the_papers(tmp_path):
    def with_own(*known):
        return [*claims(*known), Claim("not vacuous", "agree", "0.9")]

    store, one = Store(tmp_path / "r"), experiment(claims=with_own)
    add(store, one, "full")
    text, _ = page(store, tmp_path / "out", one)
    assert "Of 4 statements of the paper" in text
    assert "Apart from these, 1 of 1 checks of our own hold" in text
    assert text.index("Checks of our own") < text.index("not vacuous")


def test_numbers_of_smaller_sizes_are_not_called_near(tmp_path):
    store, one = Store(tmp_path / "r"), experiment()
    add(store, one, "scaled")
    text, read = page(store, tmp_path / "out", one)
    assert "≈" not in text
    assert "and 4 are not tested." in text, "nor do their verdicts count"
    assert "Smaller than the paper" in text
    assert f"python -m experiments run {PAPER} --size full --data DIR" in read.texts


def test_of_several_sizes_the_largest_is_shown_and_the_others_are_folded(tmp_path):
    store, one = Store(tmp_path / "r"), experiment()
    add(store, one, "demo", vnc=0.7)
    add(store, one, "scaled", seeds=(11,), vnc=0.3)
    text, read = page(store, tmp_path / "out", one)
    assert [found.size for found in findings_of(store, one)] == ["scaled", "demo"]
    shown, folded = text.split("the same at size demo, 2 seeds")
    assert "0.300" in shown
    assert "0.700" in folded
    assert "0.700" not in shown
    assert {"tab-VOC-scaled", "tab-VOC-demo"} <= set(read.ids)


def test_the_page_needs_nothing_but_itself(tmp_path):
    store, one = Store(tmp_path / "r"), experiment()
    add(store, one, "full")
    text, read = page(store, tmp_path / "out", one)
    assert all(source.startswith("data:image/png;base64,") for source in read.sources)
    picture = base64.b64decode(read.sources[0].split(",")[1])
    assert picture == (tmp_path / "out" / "figures" / "tab-VOC-full.png").read_bytes()
    assert "http" not in text
    assert "url(" not in text
    assert "@import" not in text
    for link in read.links:
        target = link.removeprefix("#")
        assert target in read.ids if link.startswith("#") else (tmp_path / "out" / link).is_file()
    assert len(set(read.ids)) == len(read.ids)


def test_tables_are_there_as_csv(tmp_path):
    store, one = Store(tmp_path / "r"), experiment()
    add(store, one, "full")
    page(store, tmp_path / "out", one)
    lines = list(csv.DictReader((tmp_path / "out/tables/tab-VOC-full.csv").open()))
    assert [line["column"] for line in lines] == ["VNC", "a_tt", "VNC"]
    assert float(lines[0]["mean"]) == pytest.approx(0.004)
    assert float(lines[0]["paper"]) == 0.004


def test_equal_results_make_equal_files(tmp_path):
    store, one = Store(tmp_path / "r"), experiment()
    add(store, one, "full")
    for name in ("first", "second"):
        page(store, tmp_path / name, one)
    files = [path.relative_to(tmp_path / "first") for path in (tmp_path / "first").rglob("*.*")]
    assert len(files) == 4
    for file in files:
        assert (tmp_path / "first" / file).read_bytes() == (tmp_path / "second" / file).read_bytes()


def test_everything_is_escaped(tmp_path):
    def hostile_tables(_config, metrics):
        found = Table(HOSTILE, HOSTILE, (HOSTILE, "a_tt"))
        found.add(HOSTILE, HOSTILE, [one["vnc"] for one in metrics.values()])
        return [found]

    one = experiment(
        HOSTILE, what=HOSTILE, also=(HOSTILE + "2",), cost={"demo": HOSTILE},
        tables=hostile_tables, claims=lambda *_: [Claim(HOSTILE, "disagree", HOSTILE)],
        quotes=(Quote(HOSTILE, HOSTILE, HOSTILE),),
    )  # fmt: skip
    store = Store(tmp_path / "r")
    add(store, one, "full", command=HOSTILE)
    text, read = page(store, tmp_path / "out", one, replace(one, label=HOSTILE + "3"))
    assert "<script" not in text
    assert "script" not in read.open
    assert sum(HOSTILE in "".join(data) for data in read.texts) >= 6
    assert "below it" not in text, "the paper has no such table"
    assert all(re.fullmatch(r"[#\w./-]+", link) for link in read.links)


def test_a_run_that_learned_nothing_is_marked(tmp_path):
    store, one = Store(tmp_path / "r"), experiment()
    add(store, one, "full", a_tt=0.39)  # a third of the way from 0.1 to 1 is 0.4
    add(store, one, "demo", a_tt=0.41)
    text, _ = page(store, tmp_path / "out", one)
    assert "⚠ 0.39 to 0.39: barely" in text
    assert text.count("they learned little") == 1
    assert findings_of(store, one)[1].learned() == ([0.41], False)


def test_chance_is_that_of_the_stream_and_not_of_the_data(tmp_path):
    store = Store(tmp_path / "r")
    one = experiment(data="cifar100", sizes={"demo": Config("split_cifar10")})
    add(store, one, "demo", a_tt=0.6)
    assert findings_of(store, one)[0].learned()[1], "0.6 of two classes is little"
    other = replace(one, label="other", sizes={"demo": Config("split_cifar100")})
    add(store, other, "demo", a_tt=0.6)
    assert not findings_of(store, other)[0].learned()[1], "0.6 of five classes is not"


def test_results_of_another_configuration_are_counted_and_not_shown(tmp_path):
    store, one = Store(tmp_path / "r"), experiment()
    add(store, one, "full", vnc=0.123, version="0")
    text, _ = page(store, tmp_path / "out", one)
    assert "0.123" not in text
    assert "2 results of other configurations" in text
    assert "There are no results yet" in text


def test_trainings_are_listed_with_their_time(tmp_path):
    store, one = Store(tmp_path / "r"), experiment()
    add(store, one, "full")
    training = Training("rotated_mnist", "mlp_tiny")
    for seed in (11, 13):
        store.append([make_result("run", "", seed, training, {"test_accuracy": [[0.5], [0.1, 0.7]]},
                                  60.0, "1", "")])  # fmt: skip
    text, _ = page(store, tmp_path / "out", one)
    assert "1 training, shared" in text
    assert "0.600" in text
    assert "2 min" in text
    assert "other configurations" not in text


def test_a_damaged_results_file_is_an_error_that_names_the_line(tmp_path):
    store, one = Store(tmp_path / "r"), experiment()
    add(store, one, "full")
    with store.file.open("a") as file:
        file.write('{"key": "ab\n')
    with pytest.raises(StoreError, match="line 3"):
        write(store, tmp_path / "out", [one])


def test_markup_escapes_all_but_markup():
    assert tag("p", "a < b", tag("b", "&"), None) == "<p>a &lt; b<b>&amp;</b></p>"
    assert tag("a", class_='"x"', aria_label="y", title=None) == (
        '<a class="&quot;x&quot;" aria-label="y"></a>'
    )
    assert joined(["<", Markup("<i>")], "&") == "&lt;&amp;<i>"
    assert tag("img", src="x") == '<img src="x">'
    with pytest.raises(ValueError, match="no content"):
        tag("img", "x")


def test_labels_of_the_paper_become_names_of_files():
    names = [file_name(one.label) for one in EXPERIMENTS]
    assert all(re.fullmatch(r"[\w-]+", name) for name in names)
    assert len(set(names)) == len(names)
