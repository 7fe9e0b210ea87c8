"""Launch shapes: a table in one place, measured ones from a file, and how they are measured."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from curvlab_kernels import _triton, use_shapes
from curvlab_kernels._triton import shapes
from curvlab_kernels._triton.launch import recorded
from curvlab_kernels._triton.shapes import Shapes, Tile, Use
from curvlab_kernels.audit import tune
from curvlab_kernels.audit.model import traffic

from tests import pretend_device

HERE = Path(pretend_device.__file__).parent
PATH = f"{HERE.parent.parent}:{HERE.parent.parent / 'kernels'}"
DOT = Use("dot", 1, 4)


@pytest.fixture
def table(monkeypatch):
    monkeypatch.setattr(shapes, "_table", dict(shapes._table))


def launches(n, m=20, dtype=torch.int8):
    rows = torch.empty(m, -(-n // 16) * 16, dtype=dtype, device="meta")
    scales = torch.empty(m, -(-n // 64), device="meta") if dtype == torch.int8 else None
    with recorded() as found:
        _triton.project_(rows, torch.empty(n, device="meta"), None, scales)
    return found


@pytest.mark.usefixtures("table")
def test_a_file_of_measured_shapes_is_taken_on_its_architecture(tmp_path):
    faster = Shapes({**Shapes().tiles, DOT: Tile(16, 256, 2)}, warps=4096, least=8)
    shapes.save(tmp_path / "shapes.json", 80, faster)
    before = launches(4_000_003)[0]
    use_shapes(tmp_path / "shapes.json")
    after = launches(4_000_003)[0]
    assert (before.constants["ROWS"], before.constants["BLOCK"]) == (8, 512)
    assert (after.constants["ROWS"], after.constants["BLOCK"]) == (16, 256)
    assert after.options["num_warps"] == 2
    assert shapes._table[80] == faster
    assert shapes._table[90] == Shapes()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tiles": {"dot, 1, 4": [7, 512, 1]}}, "powers of two"),
        ({"tiles": {"dot, 1, 4": [8, 64, 1]}}, "at least 128 columns"),
        ({"tiles": {"dot, 1, 4": [8, 512, 1, 300]}}, "255 registers"),
        ({"tiles": {"unheard of, 1, 4": [8, 512, 1]}}, "no launch can take"),
        ({"tiles": {"dot": [8, 512, 1]}}, "no table of launch shapes"),
        ({"tiles": {"dot, 1, 4": [8, 512]}}, "no table of launch shapes"),
        ({"architecture": 75}, "out of range"),
        ({"least": 0}, "out of range"),
        ({"least": "many"}, "out of range"),
    ],
)
@pytest.mark.usefixtures("table")
def test_a_file_that_is_no_table_is_refused_and_changes_nothing(change, words, tmp_path):
    path = tmp_path / "shapes.json"
    shapes.save(path, 90, Shapes())
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=words):
        use_shapes(path)
    assert all(each == Shapes() for each in shapes._table.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_the_passes_of_a_short_vector_reach_the_processors_of_an_a100(dtype):
    passes = launches(18_010, dtype=dtype)
    # Two launches, the second adds up the sums of the first by itself; and two that return at once
    # unless the vector lies almost inside the span.
    assert [traffic(launch).total() > 0 for launch in passes] == [True, True, False, False]
    assert all(launch.programs >= 108 for launch in passes)


def test_programs_of_a_long_vector_pay_for_their_start_and_end():
    for n in (500_003, 4_000_003):
        first = launches(n)[0]
        groups = -(-20 // first.constants["ROWS"])
        tiles = -(-n // first.constants["BLOCK"]) * groups
        assert tiles / first.programs > 3.9


def test_every_tile_of_the_table_loads_16_bytes_at_once():
    for use, tile in Shapes().tiles.items():
        assert tile.rows * tile.columns * use.stored >= 16 * 32 * tile.warps, use


def test_candidates_load_16_bytes_at_once_and_fit_into_registers():
    for use in Shapes().tiles:
        for tile in tune.candidates(use):
            elements = tile.rows * tile.columns // (32 * tile.warps)
            assert 16 <= elements <= 128
            assert elements * use.stored >= 16


@pytest.mark.skipif(pretend_device.compiler() is None, reason="the pretend device needs g++")
@pytest.mark.aot
def test_the_fastest_tile_that_gives_right_numbers_is_kept():
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PATH}
    done = subprocess.run(
        [sys.executable, str(HERE / "gpu_check.py"), "--tune"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    # by a clock that counts programs: the larger of two tiles, and a wider one for short vectors
    wider, larger = ["sum short", 1, 4, 16, 256, 4, 0], ["dot", 4, 4, 32, 512, 8, 0]
    assert sorted(found["changed"]) == [larger, wider]
    assert len(found["lines"]) == 2


def test_without_a_gpu_nothing_is_written(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert tune.main(["--out", str(tmp_path / "shapes.json")]) == 2
    assert not (tmp_path / "shapes.json").exists()
    assert "nothing was written" in capsys.readouterr().out
