"""The command as a process: in a terminal, in a pipe, interrupted; and what its parser accepts."""

import contextlib
import json
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from curvlab import Eigenpairs
from curvlab.cli import main
from curvlab.cli.arguments import size
from curvlab.cli.parser import parse
from curvlab.cli.verbs import VERBS

ROOT = Path(__file__).parent.parent
# Products that take their time, so that there is something to see and to interrupt.
SLOW = """
import time
import torch
from torch import nn

class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 4))

    def forward(self, x):
        return _Wait.apply(self.body(x))

class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, seed):
        return _Back.apply(seed)

class _Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx, seed):
        return seed.clone()

    @staticmethod
    def backward(ctx, seed):
        time.sleep(0.03)
        return seed

def data():
    g = torch.Generator().manual_seed(0)
    return torch.randn(30, 20, generator=g), torch.randint(4, (30,), generator=g)
"""
EIG = ["eig", "--model", "slow.py:Slow", "--data", "slow.py:data", "--k", "8", "--tol", "1e-4"]


@pytest.fixture
def place(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    return tmp_path


def command(*words):
    return [sys.executable, "-m", "curvlab", *words]


def environment():
    return {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"}


def read_until(terminal, process, pattern, least=0, seconds=90):
    """What the process writes to its terminal, until a pattern's number is at least ``least``."""
    text, end = "", time.monotonic() + seconds
    while time.monotonic() < end:
        ready, _, _ = select.select([terminal], [], [], 0.2)
        if ready:
            try:
                text += os.read(terminal, 4096).decode(errors="replace")
            except OSError:  # the other side is closed
                break
        if any(int(number or 0) >= least for number in re.findall(pattern, text)):
            return text
        if not ready and process.poll() is not None:
            break
    raise AssertionError(f"{pattern!r} did not come: {text[-500:]}")


def in_terminal(place, words):
    own, other = pty.openpty()
    process = subprocess.Popen(
        command(*words), cwd=place, env=environment(), stdin=other, stdout=other, stderr=other,
        start_new_session=True,
    )  # fmt: skip
    os.close(other)
    return own, process


def stop(terminal, process):
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    process.wait()
    os.close(terminal)


def test_a_terminal_shows_a_bar_and_ctrl_c_leaves_what_the_same_command_resumes(place):
    terminal, process = in_terminal(place, EIG)
    try:
        text = read_until(terminal, process, r"(\d+) products", 15)
        assert "[" in text
        assert "of 8 pairs" in text
        process.send_signal(signal.SIGINT)
        text = read_until(terminal, process, "resume with:()")
        process.wait(timeout=60)
    finally:
        stop(terminal, process)
    assert process.returncode == 1
    assert "Traceback" not in text
    assert (place / "eig.safetensors.partial").exists()
    assert not (place / "eig.safetensors").exists()
    done = subprocess.run(
        command(*EIG, "--json"), cwd=place, env=environment(), capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "resuming from eig.safetensors.partial" in done.stderr
    assert not (place / "eig.safetensors.partial").exists()
    whole = subprocess.run(
        command(*EIG, "--json", "--out", "whole.safetensors"), cwd=place, env=environment(),
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert whole.stderr == "", "a pipe gets no bar"
    interrupted, straight = json.loads(done.stdout), json.loads(whole.stdout)
    assert interrupted["values"] == straight["values"]
    # one product in each call tells whose file it is
    assert interrupted["products"] == straight["products"] + 1
    assert len(Eigenpairs.load(place / "eig.safetensors")) == 8


def test_ctrl_c_in_a_density_keeps_the_finished_vectors(place):
    words = ["density", *EIG[1:5], "--probes", "4", "--steps", "12", "--json"]
    terminal, process = in_terminal(place, words)
    try:
        read_until(terminal, process, r"(\d+) of 48 products", 26)
        process.send_signal(signal.SIGINT)
        text = read_until(terminal, process, "resume with:()")
        process.wait(timeout=60)
    finally:
        stop(terminal, process)
    assert process.returncode == 1
    assert "Traceback" not in text
    done = subprocess.run(
        command(*words), cwd=place, env=environment(), capture_output=True, text=True, timeout=120,
        check=True,
    )  # fmt: skip
    assert "resuming" in done.stderr
    assert json.loads(done.stdout)["products"] >= 48


def test_a_terminal_shows_what_is_being_profiled(place):
    words = ["profile", *EIG[1:5], "--rounds", "1", "--rows", "2"]
    terminal, process = in_terminal(place, words)
    try:
        text = read_until(terminal, process, "protecting a step of AdamW()")
    finally:
        stop(terminal, process)
    seen = re.findall(r"(\d+) of (\d+) measured (\w+)", text)
    assert [int(done) for done, *_ in seen] == list(range(int(seen[0][1])))
    assert {what for *_, what in seen} >= {"the", "product", "projection", "layer", "Kronecker"}


# What a value of each option may look like: right ones, and what people type.
VALUES = {
    "--k": st.integers(1, 500).map(str),
    "--tol": st.floats(0.0, 0.5).map(repr),
    "--seed": st.integers(0, 2**30).map(str),
    "--which": st.sampled_from(["LM", "LA", "SA", "both"]),
    "--curvature": st.sampled_from(["hessian", "ggn", "fisher"]),
    "--select": st.sampled_from(["head.*", "*", "0.weight"]),
    "--dtype": st.sampled_from(["float32", "float64"]),
    "--samples": st.integers(1, 10**6).map(str),
}


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(VALUES)), st.none()).flatmap(
    lambda chosen: st.fixed_dictionaries({name: VALUES[name] for name in chosen})
), st.randoms())  # fmt: skip
def test_right_options_in_any_order_are_understood(options, random):
    pairs = [["--model", "a:b"], ["--data", "a:c"], *([name, v] for name, v in options.items())]
    random.shuffle(pairs)
    words = ["eig", *(word for pair in pairs for word in pair)]
    found = parse(words)
    assert found.verb == "eig"
    assert found.arguments == words
    for name, value in options.items():
        kept = getattr(found, name.strip("-").replace("-", "_"))
        assert kept in (value, [value]) or kept == type(kept)(value)
    assert parse(shlex.split(shlex.join(words))) == found


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(["", *VERBS]),
    st.lists(
        st.one_of(
            st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12),
            st.sampled_from([*VALUES, "--json", "--out", "--picture", "--memory", "-v", "-q"]),
        ),
        max_size=5,
    ),
)
def test_no_words_make_the_parser_do_anything_but_parse_or_exit(verb, words):
    try:
        found = parse([verb, *words] if verb else words)
    except SystemExit as end:
        assert end.code in (0, 2)  # noqa: PT017
    else:
        assert found.verb in VERBS


@settings(max_examples=60, deadline=None)
@given(st.floats(1, 999), st.sampled_from(["", "K", "M", "G", "T", "GB", "MiB", "k"]))
def test_sizes_are_bytes(number, unit):
    factor = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}[unit[:1].upper()]
    assert size(f"{number:.6f}{unit}") == pytest.approx(number * factor, abs=1 + 1e-5 * factor)


def test_nothing_heavy_is_loaded_for_help():
    code = (
        "import sys; from curvlab.cli import main; main(['--help']); main(['eig', '--help']);"
        "print([m for m in ('torch', 'numpy', 'matplotlib') if m in sys.modules])"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert shown.stdout.splitlines()[-1] == "[]"


def test_without_a_verb_the_table_is_shown_and_it_counts_as_a_mistake(capsys):
    assert main([]) == 2
    shown = capsys.readouterr().out
    for verb in VERBS:
        assert f"\n  {verb}" in shown


def test_a_reader_that_has_seen_enough_is_no_error(place):
    done = subprocess.run(
        f"{shlex.join(command('version'))} | true", shell=True, cwd=place, env=environment(),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr
