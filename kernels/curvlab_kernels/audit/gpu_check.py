"""What only a GPU can confirm: ``python -m curvlab_kernels.audit.gpu_check`` on a CUDA machine.

Without a GPU the kernels' source runs in Triton's interpreter, their compiled PTX is executed and
checked for races (``audit.execution``), and their machine code is read (``audit``). Unverified
until this command passes on a machine with a GPU:

1. what the assembler and the driver make of the PTX: agreement with the reference on the hardware,
2. bitwise equal results of repeated runs; compute-sanitizer's memcheck, racecheck and initcheck,
3. addresses beyond 2^31 elements, lists of tensors that move, a second device,
4. time: every operation against a copy and torch's products, over dtypes, lengths and rows,
5. with ``--flows tests/pretend_device/flows.py``, curvlab's own flows against the CPU: products,
   solves, tiers of bases, learners, on an MLP, a ResNet and a ViT.

Each check has a process of its own, so that a crash or an exhausted memory is a row and not the
end. It writes ``gpu-check.json`` and ``gpu-check.html`` and exits with 1 if a check fails, with 2
if there is no GPU.
"""

import argparse
import html
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from curvlab_kernels.audit import gpu_checks, gpu_grid

NO_ROOM = 3  # exit code of a check that the GPU's memory is too small for
FLOW_ERROR = 1e-4  # relative, between GPU and CPU
AGREEMENT = "agreement"  # all comparisons at once, under a sanitizer
TOOLS = ("memcheck", "racecheck", "initcheck")
_MISSING = (
    "no CUDA device is present, so nothing was checked and nothing is claimed.\n"
    "Without a GPU: `make audit` reads and executes the compiled kernels, and\n"
    "`pytest tests/test_triton_kernels.py` runs their source in Triton's interpreter."
)


@dataclass(frozen=True, slots=True)
class Row:
    """What became of one check: ok, failed, crashed, timed out or no room, and in words."""

    name: str
    outcome: str
    detail: str

    @property
    def good(self) -> bool:
        """Whether nothing is wrong: a memory that is too small for a case is no defect."""
        return self.outcome in ("ok", "no room")


def table() -> dict[str, Callable[[torch.device], str]]:
    """Every check by name, the times last."""
    return gpu_checks.table() | dict(gpu_grid.grid())


def run_here(name: str, device: torch.device) -> int:
    """Run one check in this process; prints what it measured."""
    if not gpu_checks.available(name, device):
        print("the device does not have this dtype")
        return 0
    check = gpu_checks.agreement if name == AGREEMENT else table()[name]
    try:
        print(check(device))
    except AssertionError as error:
        print(error)
        return 1
    except torch.OutOfMemoryError as error:
        print(str(error).splitlines()[0])
        return NO_ROOM
    return 0


def run_apart(name: str, command: Sequence[str], seconds: float) -> Row:
    """Run one check in a process of its own; ``command`` is what precedes its name."""
    try:
        done = subprocess.run(
            [*command, name], capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return Row(name, "timed out", f"after {seconds:.0f} s")
    if done.returncode == 0:
        return Row(name, "ok", done.stdout.strip())
    if done.returncode == NO_ROOM:
        return Row(name, "no room", done.stdout.strip()[-1000:])
    if done.returncode == 1 and "Traceback (most recent call last)" not in done.stderr:
        return Row(name, "failed", done.stdout.strip()[-1000:])
    return Row(name, "crashed", f"exit code {done.returncode}: {done.stderr.strip()[-1000:]}")


def sanitized(command: Sequence[str], seconds: float) -> Iterator[Row]:
    """The comparisons under each tool of compute-sanitizer, if that is installed."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        yield Row("compute-sanitizer", "ok", "not installed: not run")
        return
    for name in TOOLS:
        watched = [tool, "--tool", name, "--error-exitcode", "1", *command]
        row = run_apart(AGREEMENT, watched, seconds)
        yield Row(f"compute-sanitizer {name}", row.outcome, row.detail)


def flows(script: Path, seconds: float) -> Iterator[Row]:
    """The flows of a script, on CUDA and on the CPU, one process each.

    ``script --names`` prints their names, ``script NAME`` a line of JSON with ``error`` (relative,
    between the two) and ``failure`` (a traceback, or nothing).
    """
    listed = run_apart("--names", [sys.executable, str(script)], seconds)
    if listed.outcome != "ok":
        yield Row(f"flows of {script}", listed.outcome, listed.detail)
        return
    for name in listed.detail.splitlines():
        row = run_apart(name, [sys.executable, str(script)], seconds)
        if row.outcome == "ok":
            try:
                found = json.loads(row.detail.splitlines()[-1])
            except (ValueError, IndexError):
                yield Row(f"flow: {name}", "failed", f"no line of JSON: {row.detail[-1000:]}")
                continue
            wrong = found["failure"] or not found["error"] <= FLOW_ERROR
            detail = found["failure"][-1000:] or f"differs from the CPU by {found['error']:.1e}"
            row = Row(name, "failed" if wrong else "ok", detail)
        yield Row(f"flow: {name}", row.outcome, row.detail)


def machine() -> dict[str, str]:
    """Versions, and the GPU with its driver."""
    facts = {"python": sys.version.split()[0], "torch": torch.__version__}
    facts["cuda"] = str(torch.version.cuda)
    tool = shutil.which("nvidia-smi")
    if tool is not None:
        query = [tool, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        facts["GPUs"] = subprocess.run(query, capture_output=True, text=True, check=False).stdout
    return facts


def page(facts: dict[str, str], rows: Sequence[Row]) -> str:
    """A page with everything; what is not ok comes first."""
    ordered = sorted(rows, key=lambda row: (row.good, row.outcome == "ok"))
    cells = "\n".join(
        f"<tr><td>{html.escape(row.outcome)}<td>{html.escape(row.name)}"
        f"<td>{html.escape(row.detail)}"
        for row in ordered
    )
    about = html.escape(", ".join(f"{name} {value.strip()}" for name, value in facts.items()))
    bad = sum(not row.good for row in rows)
    return (
        "<!doctype html><meta charset=utf-8><title>gpu-check</title>"
        "<style>body{font:15px sans-serif}td{padding:2px 12px;border-bottom:1px solid #ddd}</style>"
        f"<h1>gpu-check: {len(rows)} checks, {bad} not ok</h1><p>{about}</p>"
        f"<table>{cells}</table>\n"
    )


def check_all(
    command: Sequence[str], only: str, seconds: float, out: Path, script: Path | None = None
) -> int:
    """Every check whose name contains ``only``, one process each; returns how many are not ok."""
    rows = []

    def rows_of() -> Iterator[Row]:
        for name in table():
            if only in name:
                yield run_apart(name, command, seconds)
        if not only:
            yield from sanitized(command, 10 * seconds)
        if script is not None:
            yield from flows(script, seconds)

    for row in rows_of():
        rows.append(row)
        print(f"{row.outcome:9} {row.name}: {row.detail}", flush=True)
    facts = machine()
    out.mkdir(parents=True, exist_ok=True)
    found = {"machine": facts, "rows": [asdict(row) for row in rows]}
    (out / "gpu-check.json").write_text(json.dumps(found, indent=1))
    (out / "gpu-check.html").write_text(page(facts, rows))
    bad = sum(not row.good for row in rows)
    print(f"{len(rows)} checks, {bad} not ok; {out / 'gpu-check.html'}")
    return bad


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every check; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="curvlab_kernels.audit.gpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", default="", help="checks whose name contains this")
    parser.add_argument("--seconds", type=float, default=600.0, help="allowed for one check")
    parser.add_argument("--out", type=Path, default=Path(), help="folder for the results")
    parser.add_argument("--flows", type=Path, help="a script with flows to run as well")
    parser.add_argument("--run", metavar="NAME", help="run one check in this process")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(_MISSING)
        return 2
    if options.run:
        return run_here(options.run, torch.device("cuda", torch.cuda.current_device()))
    command = [sys.executable, "-m", "curvlab_kernels.audit.gpu_check", "--run"]
    os.environ["FLOWS_ON"] = "cuda"
    bad = check_all(command, options.only, options.seconds, options.out, options.flows)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
