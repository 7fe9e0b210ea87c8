"""The benchmark suite: verdicts, curves, the page and the front say what the rows say."""

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import (
    __main__ as front,
    append,
    conformance,
    front as front_page,
    growth,
    page,
    products,
    verdicts,
)
from benchmarks.measure import Row, as_small, read_rows, row, write_rows
from benchmarks.networks import SMALL
from benchmarks.stacked import Stack, stacked
from benchmarks.subjects import SIZES, SUBJECTS, command
from benchmarks.tally import Tally
from benchmarks.targets import AT_LEAST, AT_MOST, TARGETS, Figure, Target
from curvlab import __version__
from curvlab.bench import peers
from curvlab.bench.peers import kept_graph
from curvlab.nets import mlp
from curvlab.tasks import limit, rotated_mnist
from curvlab.training.batches import seed_batches

ROOT = Path(__file__).parents[1]


def entry(contender="ours", value=1.0, x="mlp", subject="s", metric="time", unit="u") -> Row:
    return row(subject, contender, metric, unit, x, value, threads=1)


def target(sense=AT_MOST, limit=2.0, x=("mlp",), **more) -> Target:
    return Target(
        "products", "what", sense, limit, "u", Figure("s", "ours", "time", "u", x), **more
    )


def verdict(rows, one):
    return verdicts.judge(rows, [one])[0]


@pytest.mark.parametrize(
    ("sense", "value", "expected"),
    [
        (AT_MOST, 2.0, verdicts.MET),
        (AT_MOST, 2.1, verdicts.MISSED),
        (AT_LEAST, 2.0, verdicts.MET),
        (AT_LEAST, 1.9, verdicts.MISSED),
        (AT_MOST, math.nan, verdicts.MISSED),
        (AT_LEAST, math.nan, verdicts.MISSED),
    ],
)
def test_a_verdict_follows_the_measured_median(sense, value, expected):
    assert verdict([entry(value=value)], target(sense)).verdict == expected


def test_what_was_not_measured_is_said_to_be_so():
    assert verdict([entry(x="resnet")], target()).verdict == verdicts.ABSENT
    assert verdict([], target()).measured is None


def test_rows_of_small_problems_never_decide():
    assert verdict(as_small([entry()]), target()).verdict == verdicts.ABSENT
    names = {name for make in (SMALL,) for name in (build().shown for build in make.values())}
    assert names == {"small mlp", "small resnet", "small vit"}


def test_the_worst_of_several_points_counts_and_missing_points_are_named():
    rows = [entry(x="a", value=1.0), entry(x="b", value=3.0)]
    found = verdict(rows, target(x=("a", "b")))
    assert (found.measured, found.at, found.verdict) == (3.0, "b", verdicts.MISSED)
    partly = verdict(rows[:1], target(x=("a", "b")))
    assert partly.verdict == verdicts.PARTLY
    assert verdicts.cells(partly)[-1] == "met at 1 of 2 points"
    assert verdict(rows, target(AT_LEAST, x=("a", "b"))).measured == 1.0


def test_ratios_go_the_way_the_target_says():
    rows = [entry(value=2.0), entry("theirs", 6.0)]
    assert verdict(rows, target(per="theirs")).measured == pytest.approx(1 / 3)
    assert verdict(rows, target(per="theirs", inverse=True)).measured == pytest.approx(3.0)


def test_one_timed_sample_is_said_to_be_one_and_a_count_is_not():
    assert "one sample" in verdicts.cells(verdict([entry(value=1.0)], target()))[2]
    counted = Target("products", "what", AT_MOST, 2.0, "u", Figure("s", "ours", "k", "u", ("mlp",)))
    assert verdicts.cells(verdict([entry(value=1.0, metric="k")], counted))[2] == "1"
    several = replace(entry(value=1.0), samples=5)
    assert verdicts.cells(verdict([several], target()))[2] == "1"


def test_a_rival_that_was_wrong_is_named_as_the_reason():
    rows = [entry(), entry("theirs", 0.2, metric="residual", unit="relative")]
    found = verdict(rows, target(per="theirs"))
    assert found.verdict == verdicts.ABSENT
    assert "the other is wrong: residual 0.2" in verdicts.cells(found)[2]


def test_the_later_of_two_rows_counts():
    assert verdict([entry(value=1.0), entry(value=5.0)], target()).measured == 5.0


def test_every_target_belongs_to_a_subject_and_is_named_once():
    assert {one.command for one in TARGETS} <= set(SUBJECTS)
    names = [one.what + one.unit for one in TARGETS]
    assert len(set(names)) == len(names)
    assert all(math.isfinite(one.limit) and one.figure.x for one in TARGETS)


def test_targets_find_the_rows_of_the_modules_that_measure_them(monkeypatch):
    """Under their full-size names, rows of a small run are what the targets look for."""
    monkeypatch.setitem(append.SIZES, "small", append.Size(400, (8, 300), (300, 4, 2), 1))
    monkeypatch.setattr(conformance, "spectra", lambda: {"few": torch.linspace(1, 9, 90).double()})
    rows = append.main(["--size", "small"]) + conformance.main(["--size", "small"])
    rows = [replace(one, x=str(one.x).removeprefix("small ")) for one in rows]
    full = {"n=400": "n=12400000", "n=300 held=4 added=2": "n=1100000 held=40 added=20"}
    rows = [replace(one, x=full.get(one.x, one.x)) for one in rows]
    found = [v for v in verdicts.judge(rows) if v.target.command in ("append", "conformance")]
    assert len(found) == 6
    sized = [v for v in found if "BCGS2" in v.target.what or "ARPACK" in v.target.what]
    assert [v.points for v in sized] == [1, 1]  # whether it is enough is not for this size
    assert {v.verdict for v in found if v not in sized} == {verdicts.MET}


@pytest.mark.parametrize("power", [0.0, 1.0, 2.5])
def test_a_power_law_has_its_exponent(power):
    slope, error = growth.exponent([1, 2, 4, 8], [3 * x**power for x in (1, 2, 4, 8)])
    assert slope == pytest.approx(power, abs=1e-12)
    assert error < 1e-7


def test_an_exponent_needs_two_sizes():
    with pytest.raises(ValueError, match="two or more sizes"):
        growth.exponent([3], [1.0])
    assert growth.exponent([1, 10], [1.0, 100.0]) == (pytest.approx(2.0), math.inf)


def test_a_curve_yields_points_and_a_fit_that_the_table_shows():
    calls = {size: lambda size=size: sum(range(size)) for size in (2_000, 20_000, 200_000)}
    curve = growth.Curve("adding", "P", 1.0, calls, {2: 4.0, 4: 16.0, 8: 64.0}, "products")
    rows = list(growth.measure(curve, rounds=3, threads=1))
    fits = {one.metric: one.p50 for one in rows if one.unit == "fitted"}
    assert fits["exponent of products against P"] == pytest.approx(2.0)
    assert 0.5 < fits["exponent of time against P"] < 1.5
    assert "adding" in growth.table(rows)


def test_a_peer_that_is_wrong_is_shown_with_its_error_and_not_timed(monkeypatch):
    def off(*given):
        right = kept_graph.hessian(*given)
        return lambda block: right(block) * 1.001

    peer = SimpleNamespace(NAME="peer", DISTRIBUTION="peer", BLOCKS=False, hessian=off)
    monkeypatch.setattr(peers, "installed", lambda *_: [peer])
    options = SimpleNamespace(compiled=False, only=["auto"], threads=[1], rounds=1, cpu_time=False)
    rows = products.measure(SMALL["mlp"](), "hessian", options)
    of = {(one.contender, one.metric): one.p50 for one in rows}
    assert of["peer", "error in float64"] == pytest.approx(1e-3, rel=1e-3)
    assert ("peer", "time per vector") not in of
    assert ("curvlab auto", "time per vector") in of
    assert "WRONG" in products.table(rows)


@pytest.mark.parametrize("directions", [0, 3])
def test_the_stack_written_by_hand_is_a_rival_that_is_right(directions):
    seeds, task = (1, 2), limit(rotated_mnist(), train=40)[1]
    models = [mlp((196, 7, 5, 10), seed=seed).double() for seed in seeds]
    double = replace(task, train=replace(task.train, inputs=task.train.inputs.double()))
    stack = Stack(models)
    inputs, targets = next(seed_batches(double.train, seeds, 10, task=1, epoch=0))
    for s, model in enumerate(models):
        loss = torch.nn.functional.cross_entropy(model(inputs[s]), targets[s])
        exact = torch.cat(
            [g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]
        )
        assert float((stack.gradients(inputs, targets)[s] - exact).norm() / exact.norm()) <= 1e-12
    singles = [mlp((196, 7, 5, 10), seed=seed) for seed in seeds]
    assert stacked(singles, task, seeds, directions, 10)[1] <= 1e-5


def test_the_tally_counts_the_same_twice_and_sees_double_work():
    a = torch.ones(50, 50)

    def count(times):
        with Tally() as tally:
            for _ in range(times):
                (a @ a).t().add(1.0)
        return tally

    once, again, twice = count(1), count(1), count(2)
    assert (once.calls, once.moved, once.allocated) == (again.calls, again.moved, again.allocated)
    assert once.calls == 2  # the transpose moves nothing
    assert once.moved == 4 * 2500 * 5
    assert once.allocated == 4 * 2500 * 2
    assert (twice.calls, twice.moved) == (2 * once.calls, 2 * once.moved)
    assert once.peak <= once.allocated


def test_folding_replaces_what_was_measured_again_and_keeps_the_rest(tmp_path):
    def some(value, x, contender="curvlab auto"):
        return entry(contender, value, x, "hessian", "time per vector", "gradients")

    page.fold(tmp_path, [some(1.0, "mlp"), some(9.0, "mlp", "old"), some(2.0, "resnet")])
    page.fold(tmp_path, [some(3.0, "mlp"), *as_small([some(4.0, "vit")])])
    rows = read_rows(tmp_path / "products.csv")
    assert {(one.contender, one.x, one.p50) for one in rows} == {
        ("curvlab auto", "mlp", 3.0),
        ("curvlab auto", "resnet", 2.0),
    }
    models = [entry(f"GPT of {n} M", n, "planned first", "large", "seconds", "s") for n in (1, 3)]
    page.fold(tmp_path, models)
    page.fold(tmp_path, [replace(models[0], p50=2.0)])  # one model was run again
    assert {one.p50 for one in read_rows(tmp_path / "large.csv")} == {2.0, 3.0}
    with pytest.raises(ValueError, match=r"no section .* 'nonsense'"):
        page.fold(tmp_path, [entry(subject="nonsense")])


def test_a_section_holds_rows_of_one_processor(tmp_path):
    def some(value, x, processor="A"):
        one = entry("curvlab auto", value, x, "hessian", "time per vector", "gradients")
        return replace(one, environment=f"{processor} (2 cores); no GPU; 2 threads")

    page.fold(tmp_path, [some(1.0, "mlp"), some(2.0, "resnet")])
    page.fold(tmp_path, [some(3.0, "mlp", "B")])
    rows = read_rows(tmp_path / "products.csv")
    assert [(one.x, one.p50) for one in rows] == [("mlp", 3.0)]
    text = page.targets([*rows, replace(some(1.0, "resnet"), commit="abc")])
    assert "A: B (2 cores). B: A (2 cores)." in text
    assert "| met | B abc |" in text
    with pytest.raises(ValueError, match="rows of products are of 2 processors"):
        page.fold(tmp_path, [some(1.0, "mlp"), some(2.0, "resnet", "B")])


def test_the_page_shows_wrong_contenders_and_is_the_same_twice(tmp_path):
    def product(contender, metric, unit, value):
        return entry(contender, value, "mlp", "hessian", metric, unit)

    rows = [
        product("curvlab auto", "time per vector", "gradients", 1.2),
        product("curvlab auto", "error in float64", "relative", 1e-16),
        product("a|b", "error in float64", "relative", 0.02),
        product("c", "error in float64", "relative", math.inf),
    ]
    rows += [entry("walk", 2.0**k, 4.0**k, "growth", "time against P", "seconds") for k in (1, 2)]
    rows.append(entry("walk", 0.5, "all", "growth", "exponent of time against P", "fitted"))
    source = tmp_path / "measured.csv"
    write_rows(source, rows)
    given = ["--folder", str(tmp_path), "--rows", str(source)]
    assert page.main(given) == 0
    first = (tmp_path / "RESULTS.md").read_bytes()
    picture = (tmp_path / "pictures" / "growth.png").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    assert page.main(given) == 0
    assert (tmp_path / "RESULTS.md").read_bytes() == first
    assert (tmp_path / "pictures" / "growth.png").read_bytes() == picture
    text = first.decode()
    for words in ("wrong: 0.02", "a\\|b", f"| c {__version__} | fails |",
                  "at most 1.3 gradients | 1.2 (one sample) |", "0.50",
                  "pictures/products.png"):  # fmt: skip
        assert words in text


def test_a_page_without_rows_or_from_no_file_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        page.main(["--folder", str(tmp_path)])
    assert "fold some in with --rows" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        page.main(["--rows", str(tmp_path / "none.csv")])
    assert "no file" in capsys.readouterr().err


def test_the_committed_page_is_what_the_committed_rows_give(tmp_path):
    own = ROOT / "benchmarks"
    (tmp_path / "rows").mkdir()
    for path in (own / "rows").iterdir():
        (tmp_path / "rows" / path.name).write_bytes(path.read_bytes())
    assert page.build(tmp_path).read_text() == (own / "RESULTS.md").read_text()
    pictures = {path.name for path in (tmp_path / "pictures").iterdir()}
    assert pictures == {path.name for path in (own / "pictures").iterdir()}


def test_the_readme_shows_what_the_committed_rows_say():
    rows = [e for p in sorted((ROOT / "benchmarks" / "rows").glob("*.csv")) for e in read_rows(p)]
    assert front_page.block(rows) in (ROOT / "README.md").read_text(), "python -m benchmarks page"


def test_the_comparison_of_the_readme_is_made_of_rows(tmp_path):
    def solve(contender, metric, unit, value):
        return replace(entry(contender, value, "mlp", front_page.TOP, metric, unit), samples=3)

    rows = [
        solve("lanczos", "products", "products", 61.0),
        solve("lanczos", "time", "gradients", 107.25),
        solve(front_page.EIGSH, "time over that of lanczos", "ratio", 0.8),
        solve(front_page.EIGSH, "time over that of lanczos, uncertified", "ratio", 1.25),
        entry("curvlinops-for-pytorch", 2.5e-4, "vit", "hessian", "error in float64", "relative"),
    ]
    text = front_page.block(rows)
    assert "| curvlab, certified |  |  |  | 61 | 107 |" in text
    assert "takes 1.25 and 0.8 of its time on the MLP" in text
    assert "not timed: off by 2.5e-04 in float64" in text
    assert f"Measured on {rows[0].environment.partition(';')[0]}; no GPU; Linux" in text
    at = rows[0].commit
    assert f"; products at {at}, solves at {at}; where nothing else is said, every" in text
    old = front_page.block([replace(e, samples=0, commit="abc") for e in rows])
    assert "products at abc (two threads for everybody), solves at abc (two threads" in old
    elsewhere = [replace(e, environment="another; no GPU", commit="xyz") for e in rows[:2]]
    assert front_page.block([*rows, *elsewhere]) == text  # the products decide which machine
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{front_page.BEGIN}\nold\n{front_page.END}\nafter\n")
    assert front_page.write(readme, rows)
    assert readme.read_text() == f"before\n{text}\nafter\n"
    assert not front_page.write(readme, rows)
    readme.write_text("no place")
    with pytest.raises(ValueError, match="no place for the comparison"):
        front_page.write(readme, rows)


def test_primme_is_asked_for_residuals_relative_to_the_values_as_others_are(monkeypatch):
    asked = []

    def primme(operator, _, tol, **__):
        asked.append(tol)
        return operator.product(torch.ones(operator.n)), torch.eye(operator.n)

    monkeypatch.setattr(conformance, "primme", primme)
    monkeypatch.setattr(conformance.util, "find_spec", lambda _: True)
    solve = conformance.solvers()["primme"][1]
    solve(conformance.Diagonal(torch.tensor([100.0, 50.0, 1.0, 0.0])), 3, 0)
    solve(conformance.Diagonal(torch.tensor([100.0, 0.0, 0.0, 0.0])), 3, 0)
    assert asked == pytest.approx([0.01 * conformance.TOL, conformance.TOL])


def test_a_library_that_gives_up_is_not_silently_wrong(monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("no convergence")

    monkeypatch.setattr(conformance, "arpack", fails)
    solve = conformance.solvers()["scipy eigsh"][1]
    found = conformance._run(solve, torch.linspace(1, 9, 90).double(), (4,), (0,))
    assert found[1:] == (0, 1)


def test_what_was_written_before_an_interrupt_counts(tmp_path, capsys, monkeypatch):
    figure = TARGETS[0].figure
    one = row(figure.subject, figure.contender, figure.metric, figure.unit, figure.x[0], 1.0,
              threads=2)  # fmt: skip

    def interrupted(*_):
        write_rows(tmp_path / "products.csv", [one])
        raise KeyboardInterrupt

    monkeypatch.setattr(front, "_measure", interrupted)
    assert front.main(["products", "append", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert f"{len(TARGETS)} targets: 1 met" in printed
    assert "left out: products and what comes after it (interrupted)" in printed


def test_the_front_lists_every_subject_with_its_module(capsys):
    assert front.main(["list"]) == 0
    printed = capsys.readouterr().out
    for name, subject in SUBJECTS.items():
        assert name in printed
        assert (ROOT / "benchmarks" / f"{name}.py").is_file()
        assert set(subject.arguments) == set(subject.seconds) <= set(SIZES)
    standard = sum(s.seconds.get("standard", 0) for s in SUBJECTS.values())
    assert standard <= 22 * 60
    first = list(SUBJECTS)[:7]  # make bench has 18 minutes: these always fit, the others if they do
    assert first == ["eigensolvers", "products", "projection", "append", "energy", "learners",
                     "conformance"]  # fmt: skip
    assert sum(SUBJECTS[name].seconds["standard"] for name in first) <= 16 * 60


def test_the_front_runs_a_subject_and_ends_with_verdicts(tmp_path):
    given = ["dense_hessian", "--size", "small", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, "-m", "benchmarks", *given], cwd=ROOT,
                          capture_output=True, text=True, check=True)  # fmt: skip
    assert (
        f"== python -m {' '.join(command('dense_hessian', 'small', str(tmp_path)))}" in done.stdout
    )
    assert f"{len(TARGETS)} targets: {len(TARGETS)} not measured here" in done.stdout
    assert {one.subject for one in read_rows(tmp_path / "dense_hessian.csv")} == {"dense hessian"}


def test_the_front_refuses_unknown_subjects_and_leaves_out_what_does_not_fit(tmp_path, capsys):
    with pytest.raises(SystemExit):
        front.main(["projektion"])
    assert "no subject 'projektion'; there are eigensolvers" in capsys.readouterr().err
    assert front.main(["--minutes", "0", "--size", "standard", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("peers: ")
    assert "scipy" in printed.splitlines()[0]
    assert "left out: eigensolvers (about" in printed
    assert "budget (not at size standard)" in printed


def test_a_subject_that_takes_too_long_is_stopped():
    assert front._measure(["timeit", "-n1", "-r1", "1"], 60.0) == 0
    assert front._measure(["timeit", "-n1", "-r1", "import time; time.sleep(60)"], 0.1) is None


def test_verdicts_of_files_are_printed(tmp_path, capsys):
    figure = TARGETS[0].figure
    write_rows(tmp_path / "a.csv", [row(figure.subject, figure.contender, figure.metric,
                                        figure.unit, figure.x[0], 1.0, threads=2)])  # fmt: skip
    assert front.main(["verdicts", str(tmp_path / "a.csv")]) == 0
    assert f"{len(TARGETS)} targets: 1 met" in capsys.readouterr().out


@pytest.mark.parametrize("content", [None, "# no rows\n1\n"])
def test_a_file_without_rows_is_named_where_verdicts_are_asked_for(content, tmp_path, capsys):
    path = tmp_path / "rows.csv"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit) as ended:
        front.main(["verdicts", str(path)])
    assert ended.value.code == 2
    assert str(path) in capsys.readouterr().err
