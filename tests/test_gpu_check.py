"""The logic of ``make gpu-check`` on the pretend device; and, on a GPU, the check and the flows."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from curvlab_kernels.audit import gpu_check, gpu_grid

from tests import pretend_device

HERE = Path(pretend_device.__file__).parent
PATH = f"{HERE.parent.parent}:{HERE.parent.parent / 'kernels'}"
COMMAND = [sys.executable, str(HERE / "gpu_check.py")]
needs_compiler = pytest.mark.skipif(
    pretend_device.compiler() is None, reason="the pretend device needs g++ or clang++"
)


@pytest.fixture
def root_on_path(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", PATH)
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


@needs_compiler
@pytest.mark.usefixtures("root_on_path")
def test_every_operation_of_the_grid_is_gated_and_measured_on_the_device():
    done = subprocess.run(
        [*COMMAND, "--grid"], capture_output=True, text=True, timeout=300, check=False
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr[-3000:]
    assert {each["operation"] for each in found} == set(gpu_grid.OPERATIONS)
    assert all("of a copy" in each["line"] and each["good"] for each in found)
    broken = found[-1]
    assert broken["broken"].startswith("WRONG")


def test_a_time_outside_the_limits_is_named():
    class Clock:
        """Times in turn: ours, torch's, a copy's."""

        def __init__(self, *times):
            self.times = list(times)

        def __call__(self, _run, _device):
            return self.times.pop(0)

    bench = gpu_grid.Bench(list, list, gpu_grid.ENOUGH, lambda: (torch.ones(2), torch.ones(2)))
    case = gpu_grid.data(100, 5, torch.float32, torch.device("cpu"))
    for times, good, words in (
        ((1.0, 1.0, 0.7), True, "0.70 of a copy, 1.00 of torch"),
        ((1.0, 1.0, 0.5), False, "less than 0.6 of a copy"),
        ((1.2, 1.0, 1.0), False, "more than 1.1 of torch"),
    ):
        line, within = gpu_grid.judged(bench, case, torch.device("cpu"), Clock(*times))
        assert within == good
        assert words in line


def test_a_case_without_room_is_a_row_and_no_failure():
    command = [sys.executable, "-c", "import sys; print('out of memory'); sys.exit(3)"]
    row = gpu_check.run_apart("large", command, 60.0)
    assert (row.outcome, row.good) == ("no room", True)


@needs_compiler
@pytest.mark.usefixtures("root_on_path")
def test_flows_are_rows_of_the_page(tmp_path):
    script = tmp_path / "flows.py"
    script.write_text(
        "import json, sys\n"
        "rows = {'sound': (1e-7, ''), 'far off': (0.5, ''), 'broken': (0.0, 'Traceback')}\n"
        "if sys.argv[1] == '--names': print('\\n'.join(rows))\n"
        "else: print(json.dumps(dict(zip(('error', 'failure'), rows[sys.argv[1]]))))\n"
    )
    assert gpu_check.check_all(["false"], "none of them", 60.0, tmp_path, script) == 2
    found = json.loads((tmp_path / "gpu-check.json").read_text())["rows"]
    assert [row["outcome"] for row in found] == ["ok", "failed", "failed"]
    assert "flow: far off" in (tmp_path / "gpu-check.html").read_text()


@pytest.mark.parametrize(
    ("script", "outcomes"),
    [
        ("import sys; print('no torch', file=sys.stderr); sys.exit(2)", ["crashed"]),
        ("import sys; print('one') if '--names' in sys.argv else print('not JSON')", ["failed"]),
        ("import sys; print('one') if '--names' in sys.argv else None", ["failed"]),
    ],
)
def test_flows_that_cannot_run_are_rows_and_not_the_end(script, outcomes, tmp_path):
    path = tmp_path / "flows.py"
    path.write_text(script)
    assert gpu_check.check_all(["false"], "none of them", 60.0, tmp_path, path) == len(outcomes)
    found = json.loads((tmp_path / "gpu-check.json").read_text())["rows"]
    assert [row["outcome"] for row in found] == outcomes


def test_a_traceback_behind_a_warning_is_a_crash_with_its_words():
    code = "import sys, warnings; warnings.warn('old driver'); raise RuntimeError('misaligned')"
    row = gpu_check.run_apart("name", [sys.executable, "-c", code], 60.0)
    assert row.outcome == "crashed"
    assert "misaligned" in row.detail


def test_the_flows_name_themselves():
    done = subprocess.run(
        [sys.executable, str(HERE / "flows.py"), "--names"],
        env={**os.environ, "PYTHONPATH": PATH},
        capture_output=True,
        text=True,
        check=True,
    )
    for name in ("lanczos", "basis in host memory", "training with SGDDagger"):
        assert name in done.stdout.splitlines()


def test_a_check_that_takes_too_long_is_a_row():
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert gpu_check.run_apart("sleep", command, 1.0).outcome == "timed out"


def test_the_grid_covers_operations_dtypes_lengths_and_rows():
    names = [name for name in gpu_check.table() if name.startswith("speed")]
    assert len(names) == (6 * 7 + 3 * 2) * 3
    assert gpu_grid.ROWS == (5, 20, 100, 400)


def test_without_a_gpu_nothing_is_claimed(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu_check.main([]) == 2
    assert "nothing is claimed" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.usefixtures("root_on_path")
def test_a_gpu_agrees(tmp_path):
    flows = ["--flows", str(HERE / "flows.py")]
    assert gpu_check.main(["--out", str(tmp_path), *flows]) == 0
