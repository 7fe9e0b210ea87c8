"""The planner against what happened: ``python -m benchmarks.planner [--size small|full] [--k 10]``.

For each of the three networks, trained: the plan of ``lanczos(Hessian(...), k)`` from a few
samples, then the solve itself, its peak memory and its time. Memory should be right within 25 %,
time within a factor of two. The peak is of resident memory, in one process for each network.
"""

import argparse
import json
import subprocess
import sys
import time

import torch

from benchmarks.measure import format_table, peak_memory
from benchmarks.trained import SIZES, trained
from curvlab.eigen import lanczos
from curvlab.operators import Hessian
from curvlab.plan import plan


def one(size: str, name: str, k: int, threads: int) -> dict[str, float | str]:
    """Plan and measure one network."""
    torch.set_num_threads(threads)
    network = trained(SIZES[size][name])
    data = (network.inputs, network.targets)
    # first use of everything, on a few samples and with an operator that costs nothing: buffers
    # and compiled loops of the libraries are not the plan's
    few = (network.inputs[:2], network.targets[:2])
    lanczos(Hessian(network.model, network.loss, few), 1, tol=0.1, max_products=6, progress=False)
    values = torch.linspace(0.0, 1.0, network.n) ** 9
    most = 60 if network.n < 1_000_000 else 8
    lanczos((lambda v: values * v, network.n), k, max_products=most, dense=False, progress=False)
    planned = plan(network.model, network.loss, data, k=k, tol=1e-3)
    took: dict[str, float] = {}

    def solve() -> None:
        began = time.perf_counter()
        pairs = lanczos(Hessian(network.model, network.loss, data), k, tol=1e-3, progress=False)
        took["seconds"], took["products"] = time.perf_counter() - began, pairs.matvecs

    peak = peak_memory(solve, threads=threads)
    return {
        "network": name,
        "n": network.n,
        "samples": network.samples,
        "planned bytes": planned.peak,
        "peak bytes": peak,
        "planned products": planned.products,
        "products": took["products"],
        "planned seconds": planned.seconds,
        "seconds": took["seconds"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--networks", nargs="+", default=["mlp", "resnet", "vit"])
    parser.add_argument("--k", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options.size, options.one, options.k, options.threads)))
        return 0
    lines, good = [], True
    for name in options.networks:
        command = [sys.executable, "-m", "benchmarks.planner", "--one", name]
        command += ["--size", options.size, "--k", str(options.k)]
        command += ["--threads", str(options.threads)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        row = json.loads(done.stdout.splitlines()[-1])
        memory = row["planned bytes"] / row["peak bytes"]
        seconds = row["planned seconds"] / row["seconds"]
        right = 0.75 <= memory <= 1.25 and 0.5 <= seconds <= 2.0
        good &= right
        lines.append(
            [
                f"{name}, n = {row['n']:,}, N = {row['samples']}",
                f"{row['planned bytes'] / 1e6:.1f} / {row['peak bytes'] / 1e6:.1f}",
                f"{memory:.2f}",
                f"{row['planned products']} / {row['products']:.0f}",
                f"{row['planned seconds']:.2f} / {row['seconds']:.2f}",
                f"{seconds:.2f}",
                "yes" if right else "no",
            ]
        )
    header = ["planned / measured", "MB", "ratio", "products", "seconds", "ratio", "within"]
    print(format_table(header, lines))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
