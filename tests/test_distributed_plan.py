"""Plans for ranks and machines that are not here."""

import json
from pathlib import Path

import pytest

from benchmarks.measure import read_rows
from benchmarks.scaling import curve
from curvlab.cli import main
from curvlab.plan.formulae import LATENCY, communication, memories, talking_seconds

NETWORK = """
import torch
from curvlab.nets import vit_cifar

def make():
    return vit_cifar(2, hidden=32, depth=1, heads=2)

def batch():
    return torch.zeros(2, 3, 32, 32), torch.zeros(2, dtype=torch.int64)
"""


@pytest.fixture
def plan(tmp_path, capsys):
    file = tmp_path / "network.py"
    file.write_text(NETWORK)

    def run(*arguments):
        given = ["plan", "--model", f"{file}:make", "--data", f"{file}:batch", "--samples", "1000"]
        assert main([*given, "--json", *arguments]) == 0
        return json.loads(capsys.readouterr().out)

    return run


def test_a_device_that_is_not_here_is_counted(plan):
    ours = plan("--device", "h100", "--ranks", "8", "--bandwidth", "50G")
    named = plan("--counted", "--machine", "h100", "--ranks", "8", "--bandwidth", "50G")
    assert ours == named
    assert "counted" in ours["how"]
    assert ours["available"] == 80_000_000_000


def test_slower_links_and_more_ranks_cost_what_the_arithmetic_says(plan):
    fast = plan("--device", "h100", "--ranks", "8", "--bandwidth", "100G")
    slow = plan("--device", "h100", "--ranks", "8", "--bandwidth", "1G")
    alone = plan("--device", "h100")
    waits = fast["products"] * fast["traffic"]["messages"] * LATENCY * 3
    ratio = (slow["communication_seconds"] - waits) / (fast["communication_seconds"] - waits)
    assert ratio == pytest.approx(100.0)
    assert alone["communication_seconds"] == 0.0
    shard = -(-fast["n"] // 8)
    assert fast["solver"] * fast["n"] == alone["solver"] * shard
    assert fast["memories"][0]["bytes"] == pytest.approx(
        alone["memories"][0]["bytes"] / 8, abs=10 * 64 * 4
    )


def test_a_message_costs_time_however_short():
    assert talking_seconds(0.0, 5, 8, 1e9) == pytest.approx(15 * LATENCY)
    assert talking_seconds(1e9, 0, 8, 1e9) == 1.0
    assert talking_seconds(*(0.0, communication(10, 1, 1, 4).messages, 1, 1e9)) == 0.0


def test_more_rows_than_a_rank_has_elements_can_fit():
    assert memories(1000, 10, 10**9, ranks=8)[0].rows_that_fit == 1000


def test_the_guide_shows_what_was_counted():
    root = Path(__file__).parent.parent
    guide = (root / "curvlab" / "guide" / "scaling.md").read_text()
    rows = read_rows(root / "benchmarks" / "rows" / "distributed.csv")
    assert {entry.x for entry in rows} == {1, 2, 4, 8}
    assert curve(rows) in guide
