"""Two hosts that lose each other: the survivor ends in time, names the rank, and the file resumes.

The hosts are two network namespaces with a cable (a veth pair) between them. Where the system does
not allow that, the tests are skipped and say so.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from curvlab.eigen import Eigenpairs

ROOT = Path(__file__).parent.parent
pytestmark = [pytest.mark.distributed, pytest.mark.slow]
TIMEOUT = 8  # of join(): what a rank waits for others
LIMIT = TIMEOUT + 45  # the roll call, and a busy machine
PROGRAM = f"""
import os, resource, signal, sys, time
import torch
from curvlab.distributed import Sharded, join
from curvlab.eigen import Checkpoint, lanczos
from curvlab.operators import FromFunction

torch.set_num_threads(1)
values = torch.linspace(0.0, 1.0, 400, dtype=torch.float64) ** 3
slow = float(sys.argv[2])

made = 0

def product(vector):
    global made
    made += 1
    if made == 25 and os.environ.get("RANK") == os.environ.get("FULL", "none"):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    time.sleep(slow)
    return values * vector

with join(timeout={TIMEOUT}) as group:
    print("begun", flush=True)
    operator = Sharded(FromFunction(product, 400, dtype=torch.float64))
    keeping = Checkpoint(sys.argv[1], every=5)
    pairs = lanczos(operator, 3, tol=1e-10, dense=False, checkpoint=keeping)
    pairs.gather().save(sys.argv[1] + f"-{{group.rank}}.safetensors")
"""


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=False)


@pytest.fixture
def hosts():
    """Names of two namespaces, 10.77.0.1 and 10.77.0.2, joined by a cable."""
    if shutil.which("ip") is None:
        pytest.skip("needs ip (iproute2) for network namespaces")
    names = [f"curvlab{os.getpid()}{end}" for end in "ab"]
    made = [ip("netns", "add", name) for name in names]
    cable = [f"cl{os.getpid() % 100000}{end}" for end in "ab"]
    made.append(ip("link", "add", cable[0], "type", "veth", "peer", "name", cable[1]))
    for number, (name, end) in enumerate(zip(names, cable, strict=True), start=1):
        made += [
            ip("link", "set", end, "netns", name),
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", end),
            ip("-n", name, "link", "set", end, "up"),
            ip("-n", name, "link", "set", "lo", "up"),
        ]
    wrong = [done.stderr.strip() for done in made if done.returncode]
    try:
        if wrong:
            pytest.skip(f"network namespaces are not allowed here: {wrong[0]}")
        yield list(zip(names, cable, strict=True))
    finally:
        for name in names:
            ip("netns", "del", name)


class Job:
    """The program on both hosts."""

    def __init__(self, hosts, folder, slow=0.03):
        self.hosts, self.state = hosts, folder / "state"
        program = folder / "program.py"
        program.write_text(PROGRAM)
        self.ranks = []
        for rank, (name, end) in enumerate(hosts):
            environment = {
                **os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "10.77.0.1",
                "MASTER_PORT": "29511", "GLOO_SOCKET_IFNAME": end, "TP_SOCKET_IFNAME": end,
                "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}",
            }  # fmt: skip
            self.ranks.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", name, sys.executable, str(program), str(self.state),
                     str(slow)],
                    env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                )
            )  # fmt: skip

    def until_saved(self):
        """Wait until there is something to resume from."""
        end = time.monotonic() + 120
        while not (self.state / "current.json").exists():
            assert time.monotonic() < end, "nothing was saved"
            assert all(rank.poll() is None for rank in self.ranks), self.said(0) + self.said(1)
            time.sleep(0.05)

    def said(self, rank):
        """What the rank says at its end, which must come within its time."""
        return self.ranks[rank].communicate(timeout=LIMIT)[1]

    def end(self):
        for rank in self.ranks:
            if rank.poll() is None:
                rank.send_signal(signal.SIGCONT)
                rank.kill()
                rank.wait()


@pytest.fixture
def job(hosts, tmp_path):
    started = Job(hosts, tmp_path)
    yield started
    started.end()


def resumes_alone(job):
    """What one process makes of the two hosts' file."""
    program = job.state.parent / "program.py"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    line = [sys.executable, str(program), str(job.state), "0"]
    subprocess.run(line, env=environment, timeout=120, check=True)
    pairs = Eigenpairs.load(f"{job.state}-0.safetensors")
    true = torch.linspace(0.0, 1.0, 400, dtype=torch.float64).pow(3).flip(0)[:3]
    assert torch.allclose(pairs.values, true, rtol=1e-9)
    assert bool(pairs.converged.all())


def test_two_hosts_solve_together(job):
    said = [job.said(rank) for rank in range(2)]
    assert [rank.returncode for rank in job.ranks] == [0, 0], said
    first, second = (Eigenpairs.load(f"{job.state}-{rank}.safetensors") for rank in range(2))
    assert torch.equal(first.values, second.values)


def test_a_cut_link_ends_both_ranks_in_time(job):
    job.until_saved()
    name, end = job.hosts[1]
    ip("-n", name, "link", "set", end, "down")
    said = [job.said(rank) for rank in range(2)]
    assert "rank 1 gave no sign of life" in said[0]
    assert "rank 0, which keeps the job's store, does not answer" in said[1]
    resumes_alone(job)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_host_is_named(job, victim):
    job.until_saved()
    job.ranks[victim].kill()
    said = job.said(1 - victim)
    gone = "rank 0, which keeps the job's store, is gone", "rank 1 gave no sign of life"
    assert gone[victim] in said
    resumes_alone(job)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_host_is_named(job, victim):
    job.until_saved()
    job.ranks[victim].send_signal(signal.SIGSTOP)
    said = job.said(1 - victim)
    named = "rank 0, which keeps the job's store, does not answer", "rank 1 gave no sign of life"
    assert named[victim] in said
    job.end()
    resumes_alone(job)


def test_a_full_disk_on_one_host_is_named_by_both(hosts, tmp_path, monkeypatch):
    monkeypatch.setenv("FULL", "1")  # from its 25th product on, rank 1 can write nothing more
    job = Job(hosts, tmp_path)
    try:
        said = [job.said(rank) for rank in range(2)]
    finally:
        job.end()
    assert "StorageError: could not write" in said[1]
    assert "rank 1 failed in saving" in said[0]
    monkeypatch.delenv("FULL")
    resumes_alone(job)
