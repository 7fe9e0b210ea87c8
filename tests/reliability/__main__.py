"""The table: ``python -m tests.reliability [--kills 30] [--interrupts 200] [--mutants 500]``."""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch

from tests.reliability.loaders import READERS, fuzz
from tests.reliability.strikes import BAD, strikes, unharmed
from tests.reliability.subjects import SUBJECTS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.reliability", description=__doc__)
    parser.add_argument("--kills", type=int, default=30, help="of each computation (30)")
    parser.add_argument("--interrupts", type=int, default=200, help="of each computation (200)")
    parser.add_argument("--full-disks", type=int, default=30, help="for each computation (30)")
    parser.add_argument("--mutants", type=int, default=500, help="of each kind, for each reader")
    parser.add_argument("--only", nargs="+", default=[], help="names of computations or readers")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    counts = {
        "kill": options.kills,
        "interrupt": options.interrupts,
        "full disk": options.full_disks,
    }
    good = True
    print(f"{'computation':<14}{'strike':<11}{'hits':>6}" + "".join(f"{b:>11}" for b in BAD))
    for name, subject in _chosen(SUBJECTS, options.only):
        for kind, count in counts.items():
            with tempfile.TemporaryDirectory() as folder:
                began = time.monotonic()
                found = strikes(kind, subject, count, Path(folder), options.seed)
            row = "".join(f"{found[bad]:>11}" for bad in BAD)
            seconds = time.monotonic() - began
            print(f"{name:<14}{kind:<11}{found['struck']:>6}{row}   ({seconds:.0f} s)", flush=True)
            good = good and unharmed(found) and found["struck"] >= count
    print(f"\n{'reader':<26}{'files':>7}{'refused':>9}{'read':>7}{'wrong':>7}{'raw error':>11}")
    for name, reader in _chosen(READERS, options.only):
        with tempfile.TemporaryDirectory() as folder:
            found = fuzz(reader, Path(folder), options.mutants, options.seed)
        others = found.total() - found["said"] - found["right"] - found["wrong"]
        print(
            f"{name:<26}{found.total():>7}{found['said']:>9}{found['right']:>7}"
            f"{found['wrong']:>7}{others:>11}",
            flush=True,
        )
        for outcome in found:
            if outcome not in ("said", "right", "wrong"):
                print(f"    {outcome}", file=sys.stderr)
        good = good and others == found["wrong"] == 0
    print("\nnothing lost, nothing wrong, no raw error" if good else "\nNOT SOUND")
    return 0 if good else 1


def _chosen(named, only):
    unknown = [name for name in only if name not in {**SUBJECTS, **READERS}]
    if unknown:
        names = ", ".join([*SUBJECTS, *READERS])
        raise SystemExit(f"there is no {', '.join(unknown)}; the names are: {names}")
    return [(name, one) for name, one in named.items() if not only or name in only]


if __name__ == "__main__":
    sys.exit(main())
