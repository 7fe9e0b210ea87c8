"""Free memory: the machine's, or what the limit of a container or a job leaves."""

from pathlib import Path

import pytest
import torch

from curvlab.operators.products.free import free_bytes, free_on_host

GIB = 1 << 30


def tree(root: Path, files: dict[str, str]) -> Path:
    files = {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {16 * GIB // 1024} kB\n", **files}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def unified(group: str, limit: str, used: int, files: int = 0, high: str = "max") -> dict[str, str]:
    place = f"sys/fs/cgroup/{group}".rstrip("/")
    stat = f"anon {used - files}\ninactive_file {files}\n"
    return {
        f"{place}/memory.max": f"{limit}\n",
        f"{place}/memory.high": f"{high}\n",
        f"{place}/memory.current": f"{used}\n",
        f"{place}/memory.stat": stat,
    }


def first_version(group: str, limit: int, used: int, files: int = 0) -> dict[str, str]:
    place = f"sys/fs/cgroup/memory/{group}".rstrip("/")
    return {
        f"{place}/memory.limit_in_bytes": f"{limit}\n",
        f"{place}/memory.usage_in_bytes": f"{used}\n",
        f"{place}/memory.stat": f"inactive_file 7\ntotal_inactive_file {files}\n",
    }


UNLIMITED = 0x7FFFFFFFFFFFF000  # what version 1 says
CASES = {
    "no groups": ({}, 16 * GIB),
    "no limit": ({"proc/self/cgroup": "0::/\n", **unified("", "max", GIB)}, 16 * GIB),
    "docker, version 2": (
        {"proc/self/cgroup": "0::/\n", **unified("", str(4 * GIB), 3 * GIB, files=GIB)},
        2 * GIB,
    ),
    "SLURM: the job above the step": (
        {
            "proc/self/cgroup": "0::/slurm/job_7/step_0/task_0\n",
            **unified("slurm/job_7", str(8 * GIB), 2 * GIB),
            **unified("slurm/job_7/step_0", "max", GIB),
            **unified("slurm/job_7/step_0/task_0", "max", GIB),
        },
        6 * GIB,
    ),
    "slowed down before it is killed": (
        {"proc/self/cgroup": "0::/a\n", **unified("a", str(8 * GIB), GIB, high=str(3 * GIB))},
        2 * GIB,
    ),
    "version 1": (
        {
            "proc/self/cgroup": "9:name=systemd:/\n4:memory:/box/x\n0::/\n",
            **first_version("box/x", UNLIMITED, GIB),
            **first_version("box", 5 * GIB, 3 * GIB, files=GIB),
        },
        3 * GIB,
    ),
    "a container that sees only its own group": (
        {"proc/self/cgroup": "4:cpu,memory:/docker/abc\n", **first_version("", 2 * GIB, GIB)},
        GIB,
    ),
    "more is used than allowed": (
        {"proc/self/cgroup": "0::/\n", **unified("", str(GIB), 2 * GIB)},
        0,
    ),
    "a limit above the machine's": (
        {"proc/self/cgroup": "0::/\n", **unified("", str(64 * GIB), GIB)},
        16 * GIB,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_tightest_limit_counts(name: str, tmp_path: Path) -> None:
    files, free = CASES[name]
    assert free_on_host(tree(tmp_path, files)) == free


def test_this_machine_has_a_sensible_amount() -> None:
    assert 2**26 < free_bytes(torch.device("cpu")) < 2**50
