"""The logic of ``make gpu-check`` on the pretend device; and, on a GPU, the check and the flows."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
from curvlab_kernels.audit import gpu_check, gpu_checks

from tests import pretend_device

HERE = Path(pretend_device.__file__).parent
COMMAND = [sys.executable, str(HERE / "gpu_check.py")]
needs_compiler = pytest.mark.skipif(
    pretend_device.compiler() is None, reason="the pretend device needs g++ or clang++"
)


@pytest.fixture
def root_on_path(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE.parent.parent))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@needs_compiler
@pytest.mark.usefixtures("root_on_path")
def test_a_check_that_dies_or_fails_is_a_row_and_not_the_end(monkeypatch, tmp_path):
    monkeypatch.setenv("DIE_IN", "norm-float64")
    monkeypatch.setenv("BREAK", "1")
    assert gpu_check.check_all(COMMAND, "norm-float", 300.0, tmp_path) == 2
    found = json.loads((tmp_path / "gpu-check.json").read_text())
    outcomes = {row["name"]: row["outcome"] for row in found["rows"]}
    assert outcomes == {"norm-float32": "failed", "norm-float64": "crashed"}
    assert "2 not ok" in (tmp_path / "gpu-check.html").read_text()
    assert found["machine"]["torch"]


@needs_compiler
@pytest.mark.usefixtures("root_on_path")
def test_a_sound_check_passes_and_the_grid_runs():
    assert gpu_check.run_apart("norm-float32", COMMAND, 300.0).outcome == "ok"
    row = gpu_check.run_apart("speed of coefficients float32 5x18010", COMMAND, 300.0)
    assert row.outcome == "ok", row.detail
    assert "of a copy" in row.detail


def test_a_check_that_takes_too_long_is_a_row():
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert gpu_check.run_apart("sleep", command, 1.0).outcome == "timed out"


def test_the_grid_covers_lengths_rows_and_dtypes():
    names = [name for name in gpu_checks.table() if name.startswith("speed")]
    assert len(names) == 2 * 7 * 3 * 4


def test_without_a_gpu_nothing_is_claimed(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu_check.main([]) == 2
    assert "nothing is claimed" in capsys.readouterr().out


@pytest.mark.gpu
def test_a_gpu_agrees(tmp_path):
    assert gpu_check.main(["--out", str(tmp_path)]) == 0


@pytest.mark.gpu
def test_every_flow_gives_on_a_gpu_what_it_gives_on_the_cpu():
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent.parent), "FLOWS_ON": "cuda"}
    done = subprocess.run(
        [sys.executable, str(HERE / "flows.py")], env=environment, capture_output=True, text=True
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert rows, done.stderr[-3000:]
    assert not [row["name"] for row in rows if row["failure"] or not row["error"] <= 1e-4]
