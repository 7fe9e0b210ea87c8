"""What runs on the pretend device, each beside the same on the CPU: ``python flows.py NAME ...``.

Torch keeps a device for the life of a process, so flows run in a process of their own; a line of
JSON tells what each gave. A flow returns relative errors and numbers of waits and products, which
``test_pretend_device.py`` judges.
"""

import contextlib
import json
import os
import sys
import time
import traceback

import torch
from curvlab_kernels.audit.ptx import executed

from tests import pretend_device
from tests.pretend_device import memories, products, solves, trainings
from tests.pretend_device.flow import FLOWS, HERE, flow

__all__ = ["FLOWS", "memories", "products", "solves", "trainings"]
ARCHITECTURE = 90


@flow
def mixing_devices():
    """What a GPU would refuse, and what it would make the host wait for."""

    def attempt(run):
        try:
            run()
        except RuntimeError as refusal:
            return "raised" if "Expected" in str(refusal) else str(refusal)
        return "nothing"

    here, there = torch.ones(3), torch.ones(3).to(HERE.device)
    result = {
        "error": 0.0,
        "mixed": attempt(lambda: here + there),
        "generator": attempt(lambda: there.normal_(generator=torch.Generator())),
    }
    pretend_device.reset()
    there.sum().item()
    there.cpu()
    (there > 0).nonzero()
    there.add_(1.0)
    return result | {"counts": dict(pretend_device.waits())}


def counts():
    """Waits and launches since the last reset; a real GPU counts none."""
    if HERE.device.type == "cuda":
        return {}, {}
    return pretend_device.waits(), pretend_device.launches()


def main(names):
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # which also fills torch.empty with NaN
    if os.environ.get("FLOWS_ON") == "cuda":
        HERE.device = torch.device("cuda", 0)
        pretend_device.reset, pretend_device.waits = (lambda: None), dict
        execution = contextlib.nullcontext([])
    else:
        HERE.device = pretend_device.device()
        pretend_device.treat_as_gpu()
        execution = executed(ARCHITECTURE, races=False)
    with execution as reports:
        HERE.kernels = reports
        for name in names:
            reports.clear()
            pretend_device.reset()
            begun, result = time.process_time(), {}
            try:
                result = dict(FLOWS[name]())
                result["failure"] = ""
            except Exception:
                result["failure"] = traceback.format_exc()[-3000:]
            result |= {
                "name": name,
                "kernels": len(reports),
                "launches": sum(counts()[1].values()),
                "where": dict(counts()[0]),
                "seconds": time.process_time() - begun,
            }
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["--names"]:
        print("\n".join(FLOWS))
    else:
        main(sys.argv[1:] or list(FLOWS))
