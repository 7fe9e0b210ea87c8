"""curvlab end to end on a pretend GPU: devices are never mixed, and how often the host waits.

Every flow runs beside the same on the CPU, with each kernel launch executed from its compiled PTX.
The device is built with a C++ compiler; without one these tests are skipped by name.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import pretend_device

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(
        pretend_device.compiler() is None, reason="the pretend device needs g++ or clang++"
    ),
]
FLOWS = Path(pretend_device.__file__).parent / "flows.py"
ROOT = FLOWS.parent.parent.parent
TOLERANCE = 1e-5  # float32 on both sides, summed in another order
PROCESSES = 2


def start(names):
    path = f"{ROOT}:{ROOT / 'kernels'}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return subprocess.Popen(
        [sys.executable, str(FLOWS), *names],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


SLOW = ("SGDDagger by energy", "SGDDagger in float16")  # several solves each


def names(kind=""):
    from tests.pretend_device.flows import FLOWS

    return [
        pytest.param(name, marks=pytest.mark.slow if name.endswith(SLOW) else ())
        for name in FLOWS
        if name.startswith(kind)
    ]


@pytest.fixture(scope="module")
def outcomes(wanted):
    """What the selected flows gave, by name."""
    pretend_device.build()
    found = {}
    for process in [start(wanted[first::PROCESSES]) for first in range(PROCESSES)]:
        output, errors = process.communicate(timeout=600)
        for line in output.splitlines():
            outcome = json.loads(line)
            found[outcome["name"]] = outcome
        found["died"] = found.get("died", "") + (errors[-3000:] if process.returncode else "")
    return found


def outcome(outcomes, name):
    assert name in outcomes, f"the process died before this flow:\n{outcomes['died']}"
    assert not outcomes[name]["failure"], outcomes[name]["failure"]
    return outcomes[name]


@pytest.mark.parametrize("name", names())
def test_a_flow_gives_on_the_device_what_it_gives_on_the_cpu(name, outcomes):
    assert outcome(outcomes, name)["error"] <= TOLERANCE


@pytest.mark.parametrize("name", names("training"))
def test_no_training_step_waits_for_the_device(name, outcomes):
    result = outcome(outcomes, name)
    assert result["steps"] == 20  # ten on the CPU, ten on the device
    # PackNet prunes in the middle of a task: once for each of two tasks, two runs, three layers.
    # Heads are not pruned, which leaves two layers.
    prunes = {"PackNet": 12, "Powerpropagation": 12, "PackNet and several heads": 8}
    assert result["waits"] == prunes.get(name.removeprefix("training with "), 0)


@pytest.mark.parametrize("name", ["protected optimizer", "protected optimizer of many tensors"])
def test_no_step_of_a_protected_optimizer_waits_for_the_device(name, outcomes):
    assert outcome(outcomes, name)["waits"] == 0


@pytest.mark.parametrize("name", ["protected optimizer of many tensors"])
def test_a_protected_step_makes_few_launches_however_many_tensors(name, outcomes):
    """A projection and a step of two passes each make eight; three copies around them."""
    assert outcome(outcomes, name)["extra"] <= 11


@pytest.mark.parametrize(
    "name", ["lanczos", "lanczos without certification", "density", "power iteration"]
)
def test_an_estimate_waits_no_more_than_it_says(name, outcomes):
    result = outcome(outcomes, name)
    assert result["waits"] <= result["most"], result["where"]


@pytest.mark.parametrize("name", ["mixing devices"])
def test_mixing_devices_raises_and_waits_are_counted(name, outcomes):
    """The device itself: without this, that the flows pass would mean nothing."""
    result = outcome(outcomes, name)
    assert result["mixed"] == "raised"
    assert result["generator"] == "raised"
    assert result["counts"] == {"item": 1, "copy to the host": 1, "aten::nonzero": 1}
