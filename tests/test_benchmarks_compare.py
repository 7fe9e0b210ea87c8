"""The regression guard: slower and less exact are both caught, by counts, without flaking."""

import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks import compare, guard
from benchmarks.measure import row, write_rows

ROOT = Path(__file__).parents[1]
MORE_PRODUCTS = """

_right = lanczos


def lanczos(operator, k, **more):
    for _ in range(5):
        operator @ torch.ones(operator.n, dtype=operator.dtype)
    return _right(operator, k, **more)
"""
TWICE = """

_right = project_


def project_(rows, vectors, factor=None, scales=None):
    _right(rows, vectors, factor, scales)
    return _right(rows, vectors, factor, scales)
"""
BLUNT = """

_right = project_


def project_(rows, vectors, factor=None, scales=None):
    before = vectors.clone()
    removed = _right(rows, vectors, factor, scales)
    vectors.add_(before - vectors, alpha=1e-5)
    return removed
"""


def entry(metric, value, contender="it", unit="u"):
    return row("guard", contender, metric, unit, "small", value, threads=1)


def worse(before, after, metric, *, timed=False):
    found = compare.changes([entry(metric, before)], [entry(metric, after)])
    return found[0].worse(timed)


@pytest.mark.parametrize(
    ("metric", "before", "after", "expected"),
    [
        ("products", 100, 105, False),
        ("products", 100, 106, True),
        ("moved", 1e6, 1.06e6, True),
        ("allocated", 1e6, 1.2e6, True),
        ("error float64", 1e-16, 9e-15, False),  # rounding
        ("error float64", 1e-16, 1e-13, True),
        ("error float32", 2e-7, 3e-6, True),
        ("leak", 2e-8, 9e-8, False),
        ("leak", 1e-4, 1.6e-4, True),
        ("residual", 0.2, 0.99, False),  # within the tolerance both
        ("residual", 0.2, 1.1, True),
        ("missing", 0, 1, True),
        ("fails", 0, 1, True),
        ("leak", 2e-8, float("nan"), True),
        ("unheard of", 1, 100, False),
    ],
)
def test_thresholds(metric, before, after, expected):
    assert worse(float(before), float(after), metric) is expected


def test_time_decides_only_when_asked():
    assert not worse(1.0, 5.0, "time")
    assert worse(1.0, 5.0, "time", timed=True)
    assert worse(2.0, 1.0, "speed", timed=True)
    assert not worse(1.0, 5.0, "speed", timed=True)


def test_a_row_that_is_gone_is_worse_and_a_new_failure_too():
    assert compare.changes([entry("products", 1.0)], [])[0].worse(timed=False)
    new = compare.changes([], [entry("fails", 1.0), entry("products", 9.0)])
    assert [change.worse(timed=False) for change in new] == [True]


def test_two_files_are_compared_and_the_exit_code_says_how(tmp_path, capsys):
    old, new = tmp_path / "old.csv", tmp_path / "new.json"
    write_rows(old, [entry("products", 50.0), entry("time", 1.0)])
    write_rows(new, [entry("products", 51.0), entry("time", 9.0)])
    assert compare.main([str(old), str(new)]) == 0
    assert "2 figures compared, 0 worse; time, median ratio 9.00 (does not decide)" in (
        capsys.readouterr().out
    )
    assert compare.main([str(old), str(new), "--time"]) == 1
    assert "WORSE" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("base", "head", "words"),
    [("rows.csv", "HEAD", "two files of rows or two revisions"), ("nonsense", ".", "neither")],
)
def test_what_cannot_be_compared_is_refused_with_advice(base, head, words, capsys):
    with pytest.raises(SystemExit):
        compare.main([base, head])
    assert words in capsys.readouterr().err


def test_a_folder_without_the_package_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        compare.main([str(tmp_path), str(tmp_path)])
    assert "not a checkout of this project" in capsys.readouterr().err


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A repository with this tree as ``good``, and it made slower or less exact as other tags."""
    folder = tmp_path_factory.mktemp("repository")
    for name in ("curvlab", "kernels"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))

    def git(*arguments):
        identity = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
        subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)

    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "-m", "good")
    git("tag", "good")
    solver = folder / "curvlab/eigen/lanczos.py"
    kernels = folder / "kernels/curvlab_kernels/_cpu/products.py"
    right = {path: path.read_text() for path in (solver, kernels)}
    spoiled = {"slow": {solver: MORE_PRODUCTS, kernels: TWICE}, "blunt": {kernels: BLUNT}}
    for tag, changed in spoiled.items():
        for path, text in right.items():
            path.write_text(text + changed.get(path, ""))
        git("commit", "--quiet", "-am", tag)
        git("tag", tag)
    return folder


@pytest.fixture(scope="module")
def measured(repository):
    """Rows of the guard: good and slow, then good again and blunt."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(repository)
        good, slow = compare.measured("good", "slow", 1, ["solvers", "memory"], plain=True)
        again, blunt = compare.measured("good", "blunt", 1, ["memory"], plain=True)
    return {"good": good, "slow": slow, "again": again, "blunt": blunt}


@pytest.mark.parametrize(
    ("base", "head", "figures"),
    [
        ("good", "slow", ["lanczos, outliers: products", "projection, float32: moved"]),
        ("again", "blunt", ["projection, float32: leak"]),
    ],
)
def test_a_deliberate_slow_down_or_loss_of_accuracy_is_caught(
    measured, base, head, figures, tmp_path, capsys
):
    files = [tmp_path / f"{side}.csv" for side in (base, head)]
    for path in files:
        write_rows(path, measured[path.stem])
    assert compare.main([str(path) for path in files]) == 1
    assert "WORSE" in capsys.readouterr().out
    found = compare.changes(measured[base], measured[head])
    worse = {f"{change.key[1]}: {change.key[2]}" for change in found if change.worse(timed=False)}
    assert set(figures) <= worse
    assert {entry.commit for entry in measured[head]} == {head}


def test_the_same_revision_twice_gives_the_same_counts(measured):
    found = compare.changes(measured["again"], measured["good"])
    assert len(found) > 20
    different = [c.key for c in found if c.ratio != 1.0 and not (c.rule and c.rule.timed)]
    assert different == []


def test_a_part_that_fails_is_recorded_not_hidden(monkeypatch, capsys):
    def broken():
        raise AttributeError("an older revision has no such name")
        yield

    monkeypatch.setitem(guard.PARTS, "dense", broken)
    rows = guard.measure(1, ["dense"])
    assert [(one.contender, one.metric, one.p50) for one in rows] == [("dense", "fails", 1.0)]
    assert "dense fails: AttributeError" in capsys.readouterr().out
