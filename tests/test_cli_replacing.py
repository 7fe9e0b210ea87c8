"""Result files of the command line: what one command may replace of another's."""

# ruff: noqa: F811  (the fixtures of the command's other tests are this file's too)

import pytest
import torch
from safetensors.torch import save_file

from curvlab import Interrupted
from curvlab.storage import read_manifest
from tests.test_cli import NET, place, run  # noqa: F401

OTHER = ("--model", "user.py:Language", "--data", "user.py:text")


@pytest.mark.parametrize(
    ("verb", "few"), [("eig", ("--k", 2)), ("density", ("--probes", 1, "--steps", 4))]
)
def test_a_result_is_replaced_by_itself_only_unless_overwrite_is_said(run, place, verb, few):
    file = place / "kept.safetensors"
    words = (verb, *few, "--out", file.name)
    assert run(*words, *NET)[0] == 0
    made = file.read_bytes()
    for others, difference in (
        ((*OTHER,), "parameters was "),
        ((*NET, "--seed", 3), "seed was 0 and is 3"),
        ((*NET, "--loss", "torch.nn.functional:cross_entropy"), "loss was 'cross_entropy' and is"),
        ((*NET, "--samples", 8), "data was "),
        ((*NET, "--curvature", "ggn"), "curvature was 'hessian' and is 'ggn'"),
    ):
        code, out, err = run(*words, *others)
        assert code == 2
        assert (out, len(err.splitlines())) == ("", 1)
        assert f"--out: {file.name} holds another result" in err
        assert difference in err
        assert "--overwrite" in err
        assert file.read_bytes() == made
        assert [path.name for path in place.glob("kept*")] == [file.name], "nothing was begun"
    inode = file.stat().st_ino
    assert run(*words, *NET, "--json", "-q")[0] == 0  # the same again
    assert file.stat().st_ino != inode
    assert run(*words, *OTHER, "--overwrite")[0] == 0
    assert read_manifest(file)["about"]["model"] == "Language"


def test_files_of_another_kind_and_of_other_programs_are_not_replaced(run, place):
    few = ("--probes", 1, "--steps", 4, "--out", "kept.safetensors")
    assert run("eig", *NET, "--k", 1, "--out", "kept.safetensors")[0] == 0
    code, _, err = run("density", *NET, *few)
    assert code == 2
    assert "kept.safetensors holds 'eigenpairs', not 'density'" in err
    save_file({"weight": torch.zeros(3)}, "kept.safetensors")
    code, _, err = run("density", *NET, *few)
    assert code == 2
    assert "kept.safetensors is not a result of curvlab (" in err
    (place / "kept.safetensors").write_bytes(b"")
    assert run("eig", *NET, "--k", 1, "--out", "kept.safetensors")[0] == 2
    assert run("density", *NET, *few, "--overwrite")[0] == 0


def test_a_demo_begins_nothing_where_another_result_stands(run, place):
    assert run("eig", *NET, "--k", 1, "--out", "demo/spectrum.safetensors")[0] == 0
    code, _, err = run("demo", "--out", "demo")
    assert code == 2
    assert "spectrum.safetensors holds another result: verb was 'eig' and is 'demo'" in err
    assert [path.name for path in (place / "demo").iterdir()] == ["spectrum.safetensors"]


def test_rerun_replaces_what_rerun_left_and_nothing_else(run):
    run("eig", *NET, "--k", 2, "--out", "a.safetensors")
    run("density", *NET, "--probes", 1, "--steps", 4, "--out", "a.rerun.safetensors")
    code, _, err = run("rerun", "a.safetensors", "--yes")
    assert code == 2
    assert "a.rerun.safetensors holds 'density'" in err
    assert run("rerun", "a.safetensors", "--yes", "--overwrite")[0] == 0
    assert run("rerun", "a.safetensors", "--yes")[0] == 0


def test_a_rerun_that_does_not_finish_is_not_compared_with_an_older_one(run, monkeypatch):
    run("eig", *NET, "--k", 2, "--out", "a.safetensors")
    assert run("rerun", "a.safetensors", "--yes")[0] == 0

    def stopped(*_, **__):
        raise Interrupted("stopped", None)

    monkeypatch.setattr("curvlab.cli.spectrum.lanczos", stopped)
    code, out, err = run("rerun", "a.safetensors", "--yes")
    assert (code, out) == (1, "")
    assert "it did not finish" in err
