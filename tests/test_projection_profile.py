"""The projection profiler runs, measures what it says, and its contenders do project."""

from dataclasses import replace

import pytest
import torch

from benchmarks import projection
from benchmarks.measure import read_rows
from benchmarks.projection_contenders import contenders, problem, torch_rows

# What each contender may leave behind at P = 3000, m = 6, with half of the gradient in the span.
LEAK = {"float16": 1e-4, "bfloat16": 1e-3, "int8": 3e-3}


def test_every_contender_projects(tmp_path):
    given = problem(3003, 6)
    size = float((given.rows[:, :3003].double() @ given.gradient.double()).norm())
    assert size == pytest.approx(float(given.gradient.double().norm()) * 0.5**0.5, rel=0.1)
    names = []
    for build in [lambda: torch_rows(given), *contenders(given, tmp_path)]:
        contender = build()
        names.append(contender.name)
        allowed = next((x for key, x in LEAK.items() if f" {key}" in contender.name), 1e-5)
        assert contender.leak <= allowed, contender.name
        assert contender.moved > 0
        contender.run()
    assert len(set(names)) == len(names)
    assert {"python loop over directions", "torch float32, columns (P, m)"} <= set(names)


def test_the_byte_model_counts_two_readings_of_the_basis():
    given = problem(3200, 5)
    assert torch_rows(given).moved == 2 * 5 * 3200 * 4 + 12 * 3200


def test_a_basis_that_was_not_protected_leaks():
    given = problem(3003, 6)
    assert given.leak(lambda vector: vector) > 0.5
    torch.testing.assert_close(given.leak(torch.Tensor.neg_), 0.5**0.5, atol=0.05, rtol=0)


def test_the_profiler_writes_table_rows_and_picture(tmp_path, capsys, monkeypatch):
    tiny = projection.Sweep(((500, 3),), 2, 1 << 16, "small", 3, (2000, 5), 1e-4)
    monkeypatch.setitem(projection.SWEEPS, "small", tiny)
    projection.run("small", tmp_path, threads=1, alone=True)
    printed = capsys.readouterr().out
    for words in (
        "torch's best way with 1 threads",
        "curvlab int8",
        "training step",
        "A basis of 5 x 2000",
        "80 GB",
    ):
        assert words in printed
    rows = read_rows(tmp_path / "projection.csv")
    assert {row.metric for row in rows} == {
        "speed",
        "speed, one thread",
        "torch's best way",
        "speed, one thread, torch's best way",
        "bandwidth",
        "moved",
        "leak",
        "overhead",
        "around the kernel",
    }
    for metric in ("speed", "speed, one thread"):
        speeds = {row.contender: row for row in rows if row.metric == metric}
        torchs = {name: row.p50 for name, row in speeds.items() if name.startswith("torch float32")}
        ways = {name for name in torchs if "columns" not in name}
        assert len(ways) == 3
        assert max(torchs[name] for name in ways) == 1.0  # the unit is the best of them


def test_a_way_of_torch_that_leaks_is_not_what_others_are_compared_with(monkeypatch):
    tiny = projection.Sweep(((500, 3),), 2, 1 << 16, "small", 3, (2000, 5), 1e-4)
    lazy = replace(torch_rows(problem(500, 3)), run=lambda: None, leak=0.5, name="lazy")
    monkeypatch.setattr(projection, "torch_rows", lambda _: lazy)
    best, ways = projection.torch_at_its_best(problem(500, 3), tiny, 1)
    assert best.name != "lazy"
    assert {way.name for way, _, _ in ways} == {
        "torch float32, rows, mm",
        "torch float32, rows, in threads",
    }


def test_the_profiler_leaves_nothing_behind(tmp_path, monkeypatch):
    tiny = projection.Sweep(((500, 3),), 2, 1 << 16, "small", 3, (2000, 5), 1e-4)
    monkeypatch.setitem(projection.SWEEPS, "small", tiny)
    projection.run("small", tmp_path, threads=1)
    assert (tmp_path / "projection.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        "projection.csv",
        "projection.png",
    ]
