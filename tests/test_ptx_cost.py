"""The model of issue and byte times, and the command that runs every check from PTX."""

import pytest
import torch

pytest.importorskip("triton")
from curvlab_kernels.audit import cost, execution

pytestmark = pytest.mark.aot


def test_blocks_that_were_not_executed_are_counted_too(monkeypatch):
    project = cost.operations(40_003, 8, torch.float32)["project"]
    sampled = cost.cost(project, 90)
    monkeypatch.setattr(cost, "SAMPLED", 10**6)
    whole = cost.cost(project, 90)
    assert sampled.moved == whole.moved
    assert sampled.issue == pytest.approx(whole.issue, rel=0.1)  # blocks at the ends do less


def test_more_rows_take_longer_to_move_and_to_issue():
    few, many = (
        cost.cost(cost.operations(40_003, m, torch.float32)["project"], 90) for m in (8, 32)
    )
    assert many.moved > 3 * few.moved
    assert many.issue > 2 * few.issue


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("operation", ["project", "project list"])
def test_rows_of_one_byte_are_limited_by_memory_and_not_by_issue(operation, architecture):
    found = cost.cost(cost.operations(500_003, 20, torch.int8)[operation], architecture)
    assert found.issue <= 0.8 * found.moved


def test_slow_conversions_are_told_from_others():
    slow = ("cvt.rn.f32.s16", "cvt.rn.f32.f64", "cvt.f64.f32", "cvt.rzi.s32.f32")
    others = ("cvt.f32.f16", "cvt.u64.u32", "cvt.rn.f16x2.e5m2x2", "mov.b64", "add.f64")
    assert all(cost._converts(opcode) for opcode in slow)
    assert not any(cost._converts(opcode) for opcode in others)


def test_the_command_reports_what_it_executed(capsys):
    assert execution.main(["--arch", "90", "--only", "norm-float32", "--n"]) == 0
    printed = capsys.readouterr().out
    assert "sm_90: 1 checks" in printed
    assert "0 failed" in printed


def test_the_command_fails_with_a_check_that_fails(capsys, monkeypatch):
    def wrong(_device):
        raise AssertionError("wrong on purpose")

    monkeypatch.setattr(execution, "checks", lambda: iter([execution.Check("made up", wrong)]))
    assert execution.main(["--arch", "90", "--n"]) == 1
    assert "FAIL sm_90 made up: wrong on purpose" in capsys.readouterr().out


def test_a_dtype_is_left_out_where_the_architecture_lacks_it():
    names = {arch: [check.name for check in execution.chosen(arch)] for arch in (80, 90)}
    assert not any("e4m3" in name for name in names[80])
    assert any("e4m3" in name for name in names[90])
