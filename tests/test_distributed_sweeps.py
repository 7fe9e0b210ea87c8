"""Sweeps over machines that share a results folder: nothing is lost, nothing computed twice."""

import subprocess
import sys
from pathlib import Path

import pytest

from experiments.store import Store

pytestmark = pytest.mark.slow

LABEL = "fig:cartoon_forgetting"


def test_shards_of_a_sweep_may_run_at_once_on_one_folder(tmp_path):
    asked = [sys.executable, "-m", "experiments", "run", LABEL, "--size", "demo", "--quiet"]
    asked += ["--seeds", "1", "2", "3", "--results", str(tmp_path)]
    # two machines with a half each, and one that was told to do everything
    shards = ("1/2", "2/2", "1/1")
    running = [
        subprocess.Popen(
            [*asked, "--shard", shard],
            cwd=Path(__file__).parent.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for shard in shards
    ]
    for process in running:
        said, _ = process.communicate(timeout=300)
        assert process.returncode == 0, said
    seeds = [result.seed for result in Store(tmp_path).results() if result.label == LABEL]
    assert sorted(seeds) == [1, 2, 3]
