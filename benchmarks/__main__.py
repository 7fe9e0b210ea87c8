"""All benchmarks in turn: ``python -m benchmarks [--size small|full] [--only NAME ...]``.

Each runs in a process of its own, so that none inherits another's memory or compiled code, and
writes its rows under ``--out``. ``small`` shows in minutes that everything works; the targets speak
of ``full``. Nothing else should run on the machine meanwhile.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

COMMANDS: dict[str, list[str]] = {
    "products": ["--size", "{size}", "--out", "{out}/products.csv"],
    "dense_hessian": ["--size", "{size}", "--out", "{out}/dense_hessian.csv"],
    "eigensolvers": ["--size", "{size}", "--out", "{out}"],
    "energy": ["--size", "{size}", "--out", "{out}/energy.csv"],
    "projection": ["--size", "{size}", "--out", "{out}"],
    "learners": ["--out", "{out}/learners.csv"],
}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--size", choices=("small", "full"), default="small")
    parser.add_argument("--only", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    parser.add_argument("--out", type=Path, default=Path("results") / "benchmarks")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in options.only:
        given = [part.format(size=options.size, out=options.out) for part in COMMANDS[name]]
        print(f"\n== python -m benchmarks.{name} {' '.join(given)}", flush=True)
        began = time.perf_counter()
        done = subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *given], check=False)
        print(f"== {name}: {time.perf_counter() - began:.0f} s", flush=True)
        if done.returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
