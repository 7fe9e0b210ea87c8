"""How much memory this process may still take: what the machine has, and what it is allowed.

A container (docker, Kubernetes) and a job of a scheduler (SLURM) are control groups with a limit of
their own, often far below what ``/proc/meminfo`` shows; beyond it the kernel kills the process. A
limit anywhere above the process counts. Both versions of control groups are read.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import torch


def free_bytes(device: torch.device) -> int:
    """Memory that can be had now without pushing anything else out."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + cached)
    return free_on_host(Path("/"))


def free_on_host(root: Path) -> int:
    """The least of what the machine has free and every control group leaves.

    Args:
        root: Where ``proc`` and ``sys`` are.
    """
    return max(0, min([_of_machine(root), *_of_groups(root)]))


def _of_machine(root: Path) -> int:
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return int(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def _of_groups(root: Path) -> Iterator[int]:
    """What the limit of each group above this process leaves; cached files can be dropped."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:  # version 2
            for group in _upwards(root / "sys/fs/cgroup", path):
                limits = [_number(group / name) for name in ("memory.max", "memory.high")]
                used = _number(group / "memory.current")
                yield from _left(limits, used, group, "inactive_file")
        elif "memory" in controllers.split(","):
            for group in _upwards(root / "sys/fs/cgroup/memory", path):
                limits = [_number(group / "memory.limit_in_bytes")]
                used = _number(group / "memory.usage_in_bytes")
                yield from _left(limits, used, group, "total_inactive_file")


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    """The group and those above it; a container may see only the last of them, as the mount."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for length in range(len(parts), -1, -1):
        yield mount.joinpath(*parts[:length])


def _left(limits: list[int | None], used: int | None, group: Path, cached: str) -> Iterator[int]:
    known = [limit for limit in limits if limit is not None]
    if not known or used is None:
        return
    fields = (line.split() for line in _text(group / "memory.stat").splitlines())
    files = sum(int(field[1]) for field in fields if field[0] == cached)
    yield min(known) - max(0, used - files)


def _number(path: Path) -> int | None:
    """The number in a file; ``None`` if there is no such file, or no limit in it ("max")."""
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # not Linux, or not to be seen from in here
        return ""
