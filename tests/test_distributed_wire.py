"""What ranks say they send, beside what a network device has counted.

The ranks run in a network namespace of their own, so that nothing else is on its loopback device;
skipped by name where that is not allowed. ``python -m tests.test_distributed_wire RANKS`` prints
the figures.
"""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from curvlab.distributed import DataParallel, Sharded, launch
from curvlab.operators import Dense

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
N = 2_400_000  # elements: beyond what gloo sends in one segment
SMALL = 1000  # of the operators


def sent_by_all() -> int:
    """Bytes that the loopback device has sent."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("lo:"):
            return int(line.split()[9])
    raise RuntimeError("there is no loopback device")


def calls(group: Any) -> dict[str, Any]:
    vector = torch.ones(N)
    part = torch.ones(N // group.size)
    dense = Dense(torch.eye(SMALL))
    whole = DataParallel(dense, samples=1.0)
    shards = Sharded(whole)
    # of many vectors at once: their bytes must show beside headers
    block, pieces = torch.ones(200, SMALL), torch.zeros(200, shards.vector_space.width)
    pieces[:, : shards.vector_space.held] = 1.0
    return {
        "sum": lambda: group.sum_(vector),
        "begun sum": lambda: group.begin_sum(vector)(),
        "sum to rank 0": lambda: group.begin_sum_to(0, vector)(),
        "sum to the last rank": lambda: group.begin_sum_to(group.size - 1, vector)(),
        "broadcast from rank 0": lambda: group.begin_broadcast(0, vector, "")(),
        "broadcast from rank 1": lambda: group.begin_broadcast(1, vector, "")(),
        "gather": lambda: group.gather(part),
        "scattered sum": lambda: group.sum_scatter(vector.view(group.size, -1)),
        "products": lambda: whole @ block,
        "products in shards": lambda: shards @ pieces,
    }


def measure(group: Any) -> dict[str, tuple[int, int]]:
    """For every call: bytes claimed by all ranks, and counted by the device."""
    found = {}
    for name, call in calls(group).items():
        claimed, counted = 0, []
        for _ in range(2):  # retransmissions and heartbeats only add: the least counts
            dist.barrier()
            time.sleep(0.3)
            before, said = sent_by_all(), group.traffic.bytes
            time.sleep(0.1)
            call()
            time.sleep(0.4)
            counted.append(sent_by_all() - before)
            claimed = group.traffic.bytes - said
            dist.barrier()
        claimed = sum(group.facts(claimed))
        found[name] = claimed, min(counted)
    return found


def separate(ranks: int) -> dict[str, tuple[int, int]]:
    """:func:`measure` in a namespace of its own."""
    command = f"ip link set lo up && {sys.executable} -m tests.test_distributed_wire {ranks}"
    root = Path(__file__).parents[1]
    shown = subprocess.run(
        ["unshare", "--net", "sh", "-c", command], capture_output=True, text=True, cwd=root
    )
    if shown.returncode and "Operation not permitted" in shown.stderr:
        pytest.skip("network namespaces are not allowed here")
    assert shown.returncode == 0, shown.stderr
    return json.loads(shown.stdout.splitlines()[-1])


@pytest.mark.skipif(not (shutil.which("unshare") and shutil.which("ip")), reason="needs unshare")
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_send_the_bytes_that_they_say(ranks: int) -> None:
    for name, (claimed, counted) in separate(ranks).items():
        assert claimed > 200_000, name
        # headers of TCP and gloo, and the heartbeats of the watch, come on top
        assert claimed <= counted <= 1.02 * claimed + 20_000 * ranks, name


if __name__ == "__main__":
    print(json.dumps(launch(measure, int(sys.argv[1]), timeout=240)[0]))
