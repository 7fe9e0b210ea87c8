"""Experiments in processes of their own: stopped, killed, on a full disk, side by side."""

import contextlib
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from curvlab.storage import StorageError, load_tensors
from experiments.__main__ import main
from experiments.shelf import LABEL, Shelf
from experiments.store import Store, StoreError, make_result
from tests.tiny_experiment import LONG

ROOT = Path(__file__).parent.parent

OWN_LABELS = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}]
from tests import tiny_experiment as own
from experiments import registry, __main__ as command
registry.EXPERIMENTS = command.EXPERIMENTS = (own.experiment("tab:long", own.LONG),)
sys.exit(command.main(sys.argv[1:]))
"""  # fmt: skip


def start(results, *arguments, own=True):
    """The real command in a process of its own, with the labels of this file or the real ones."""
    program = ["-c", OWN_LABELS] if own else ["-m", "experiments"]
    line = [sys.executable, *program, "run", *arguments, "--results", str(results)]
    return subprocess.Popen(
        line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # the tests themselves may run in the background of a shell, with Ctrl-C ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip


def checkpoints(results):
    return list((results / "runs").glob("*.checkpoint"))


def branches(results):
    """Checkpoints of runs that are past their first task."""
    found = []
    for path in checkpoints(results):
        with contextlib.suppress(StorageError, FileNotFoundError):  # it was just replaced
            manifest = load_tensors(path, "training")[1]
            found += [path] if manifest["task"] and len(manifest["config"]["tasks"]) > 1 else []
    return found


def runs(results):
    return list((results / "runs").glob("*.safetensors"))


def stop_in_second_task(process, results, how=signal.SIGINT):
    """A signal as soon as a run has branched from the first task's; returns what was said."""
    while process.poll() is None and not (runs(results) and branches(results)):
        time.sleep(0.02)
    process.send_signal(how)
    return process.communicate(timeout=60)[1]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    torch.set_num_threads(1)
    return Shelf(Store(tmp_path_factory.mktemp("whole"))).runs(LONG, [1])[0]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "kill"])
def test_a_stopped_run_goes_on_from_its_checkpoint_and_gives_the_same(how, whole, tmp_path):
    process = start(tmp_path, "tab:long", "--seeds", "1")
    said = stop_in_second_task(process, tmp_path, how)
    if how == signal.SIGINT:
        assert process.returncode == 130, said
        assert "Go on with\n  python -m experiments run tab:long" in said
    [checkpoint] = checkpoints(tmp_path)
    assert load_tensors(checkpoint, "training")[1]["task"] == 1
    [first] = runs(tmp_path)
    before, lines = first.stat().st_mtime_ns, Store(tmp_path).results()
    assert [line.config["tasks"] for line in lines] == [1], "the first task is finished work"
    resumed = Shelf(Store(tmp_path)).runs(LONG, [1])[0]
    assert torch.equal(resumed.snapshots, whole.snapshots)
    assert first.stat().st_mtime_ns == before, "the first task was trained again"
    assert checkpoints(tmp_path) == []


def test_ctrl_c_reaches_the_processes_of_several_jobs(tmp_path):
    process = start(
        tmp_path, "fig:PTBRM", "--seeds", "1", "--size", "demo", "--jobs", "2", own=False
    )
    said = stop_in_second_task(process, tmp_path)
    assert process.returncode == 130, said
    assert len(checkpoints(tmp_path)) == 1
    assert {line.label for line in Store(tmp_path).results()} == {LABEL}


def test_the_processes_of_several_jobs_end_when_their_parent_is_killed(tmp_path):
    process = start(
        tmp_path, "fig:PTBRM", "--seeds", "1", "--size", "demo", "--jobs", "2", own=False
    )
    while process.poll() is None and not (runs(tmp_path) and branches(tmp_path)):
        time.sleep(0.02)
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    children = [int(word) for word in listed.split()]
    process.kill()
    assert children
    waited = time.monotonic() + 60
    while any(alive(child) for child in children) and time.monotonic() < waited:
        time.sleep(0.05)
    assert not any(alive(child) for child in children)
    assert len(checkpoints(tmp_path)) == 1, "they saved what was done"


def alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_disk_that_is_full_leaves_the_results_as_they_were(tmp_path):
    store = Store(tmp_path)
    result = make_result("a", "demo", 1, LONG, {"x": 1.0}, 1.0, "1", "made")
    store.append([result])
    before = store.file.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 40, hard))
    try:
        with pytest.raises(StoreError, match="could not be written"):
            store.append([result])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert store.file.read_bytes() == before


def test_half_a_line_is_cut_off_where_nothing_more_can_be_written(tmp_path):
    store = Store(tmp_path)
    result = make_result("a", "demo", 1, LONG, {"x": 1.0}, 1.0, "1", "made")
    store.append([result])
    before = store.file.read_bytes()
    store.file.write_bytes(before + before[: len(before) // 2])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        assert store.repair() == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert store.file.read_bytes() == before


@pytest.mark.slow
def test_several_jobs_bring_results_and_errors_home(tmp_path):
    process = start(
        tmp_path, "random baselines", "fig:PTBRM", "--seeds", "1", "--size", "full", "--jobs",
        "2", "--data", str(tmp_path), own=False,
    )  # fmt: skip
    out, said = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "D and S of 100 x 100 Gaussian matrices" in out
    assert "python -m curvlab.tasks.download mnist" in said
    assert "not done: fig:PTBRM" in said


def test_two_processes_on_one_folder_train_once_and_agree(tmp_path):
    both = [start(tmp_path, "tab:long", "--seeds", "1") for _ in range(2)]
    said = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert [r.label for r in Store(tmp_path).results()] == [LABEL, LABEL, "tab:long"]
    assert all("tab:tiny: accuracy" in out for out, _ in said)


def test_the_command_leaves_signals_as_they_were(capsys):
    main(["list"])
    assert "tab:VOC" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
