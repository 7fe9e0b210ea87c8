"""Does a product keep to its memory budget? Peak memory against ``budget=``, chunk by chunk.

    python -m benchmarks.budget [--networks resnet vit] [--samples 1000] [--budgets 2 8] [--out F]

Each line builds a Hessian on that many samples and makes two products, one vector at a time. The
peak is the growth of the process's resident memory over the whole of it, set-up included.
"""

import argparse
import gc
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

from benchmarks.measure import Row, format_table, peak_memory, row, write_rows
from curvlab.bench.timing import environment
from curvlab.nets import slim_resnet18, vit_cifar
from curvlab.operators import Hessian

THREADS = 2
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "resnet": lambda: slim_resnet18(2, seed=0),
    "vit": lambda: vit_cifar(2, seed=0),
}


def measure(name: str, samples: int, gibibytes: float) -> tuple[list[str], list[Row]]:
    """One line of the table and its rows."""
    generator = torch.Generator().manual_seed(0)
    model = NETWORKS[name]().eval()
    inputs = torch.randn(samples, 3, 32, 32, generator=generator)
    targets = torch.randint(2, (samples,), generator=generator)
    vector = torch.randn(sum(p.numel() for p in model.parameters()), generator=generator)
    seconds: list[float] = []

    def products() -> None:
        hessian = Hessian(
            model,
            nn.CrossEntropyLoss(),
            (inputs, targets),
            budget=int(gibibytes * 2**30),
            check=False,
        )
        for _ in range(2):
            began = time.perf_counter()
            hessian @ vector
            seconds.append(time.perf_counter() - began)

    peak = peak_memory(products, threads=THREADS)
    gc.collect()
    share = peak / (gibibytes * 2**30)
    line = [name, str(samples), f"{gibibytes:g}", f"{peak / 2**30:.2f}", f"{share:.2f}"]
    rows = [
        row("memory budget", name, "peak", "budgets", gibibytes, share, threads=THREADS),
        row("memory budget", name, "product", "seconds", gibibytes, seconds[1], threads=THREADS),
    ]
    return [*line, f"{seconds[0]:.1f}", f"{seconds[1]:.1f}"], rows


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.budget",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--budgets", nargs="+", type=float, default=[2.0, 8.0], help="in GiB")
    default = Path("results") / "benchmarks" / "budget.csv"
    parser.add_argument("--out", type=Path, default=default)
    options = parser.parse_args(arguments)
    torch.set_num_threads(THREADS)
    print(environment(THREADS))
    lines, rows = [], []
    for name in options.networks:
        for budget in options.budgets:
            line, found = measure(name, options.samples, budget)
            print("  ".join(line), flush=True)
            lines.append(line)
            rows += found
    header = ["network", "samples", "budget GiB", "peak GiB", "peak/budget", "first s", "second s"]
    print("\n" + format_table(header, lines))
    print(f"rows: {write_rows(options.out, rows)}")
    return rows


if __name__ == "__main__":
    main()
