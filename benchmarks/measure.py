"""What was measured, row by row, what it needed, and whether it was right before it was timed.

A benchmark asks for four things and writes rows of one schema::

    errors = gate({"ours": ours(), "theirs": theirs()}, truth)          # right first ...
    seconds = interleave({"one gradient": gradient, "ours": ours})      # ... then fast
    ratio = quantiles(per_round_ratio(seconds["ours"], seconds["one gradient"]))
    rows.append(row("hvp", "ours", "time", "gradients", "mlp", ratio, threads=2))
    write_rows("results/hvp.csv", rows)

Time is taken by :mod:`curvlab.bench.timing`, which ``curvlab bench eig`` uses too.
"""

import csv
import ctypes
import gc
import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from curvlab.bench.timing import (
    Call,
    Quantiles,
    command,
    environment,
    pinned_threads,
    version_of,
)
from curvlab.cli.output import table
from curvlab.storage import write_atomically

_DONTNEED = 4  # MADV_DONTNEED on Linux: the pages are empty when next touched
TRIED = "numbers of torch's threads that everybody is tried with; each is timed with its best"
SMALL = "small "  # begins the x of every row of a problem below its full size


@dataclass(frozen=True, slots=True)
class Row:
    """One measured figure; every benchmark writes these columns.

    Attributes:
        x: What the figure is drawn against (a network's name, a size, a block width).
        environment: Machine, threads and libraries.
        samples: How many the quantiles are of: 1 is a single measurement or a count, 0 unknown.
        command: What was typed to measure it.
    """

    subject: str
    contender: str
    version: str
    metric: str
    unit: str
    x: float | str
    p20: float
    p50: float
    p80: float
    environment: str
    commit: str
    samples: int
    command: str


def peak_memory(call: Call, *, device: torch.device | str = "cpu", threads: int = 2) -> int:
    """Bytes that ``call`` needed on top of what was in use before it, at its worst moment.

    On CUDA the allocator's own peak. On the CPU the growth of the process's own resident memory
    (Linux: the kernel's high-water mark, reset just before, less the pages of files), which also
    sees NumPy and C code. The kernel drops pages of libraries and mapped files as it likes and
    reads them again when they are used: they are not counted, and as the mark hides growth beneath
    those that were dropped, what the process has of its own is watched as well.
    Build everything that should count inside ``call``; call it once before if first-use buffers of
    the libraries should not count. Measure in a fresh process: in one that has worked for long,
    memory that malloc kept may be reused unseen.
    """
    gc.collect()
    with pinned_threads(threads):
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            call()
            torch.cuda.synchronize(device)
            return torch.cuda.max_memory_allocated(device) - before
        if not sys.platform.startswith("linux"):
            raise RuntimeError(
                "peak_memory on the CPU reads /proc and needs Linux; leave the memory column out"
            )
        _hand_back_freed_memory()
        Path("/proc/self/clear_refs").write_text("5")
        own, files = status_bytes("RssAnon"), status_bytes("RssFile")
        before = own + status_bytes("RssShmem")
        with Watch() as watch:
            call()
        files = max(files, watch.most["RssFile"], status_bytes("RssFile"))
        return max(0, status_bytes("VmHWM") - files - before, watch.most["RssAnon"] - own)


class Watch:
    """Looks every hundredth of a second at the memory of this process, in a thread.

    Attributes:
        most: Bytes of ``RssAnon``, its own, and of ``RssFile``, pages of files.
    """

    def __init__(self) -> None:
        self.most = {"RssAnon": 0, "RssFile": 0}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        while not self._done.wait(0.01):
            self.most = {kind: max(most, status_bytes(kind)) for kind, most in self.most.items()}

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


class _Malloc(ctypes.Structure):
    """glibc's ``struct mallinfo2``; ``keepcost`` is the free block at the end of the heap."""

    # arena, ordblks, smblks, hblks, hblkhd, usmblks, fsmblks, uordblks, fordblks; then keepcost
    _fields_ = [("others", ctypes.c_size_t * 9), ("keepcost", ctypes.c_size_t)]


def _hand_back_freed_memory() -> None:
    """Return to the system what malloc keeps of freed memory: it would be reused unseen.

    ``malloc_trim`` returns all but the block at the heap's end, which it can only cut off by moving
    the program break; once something is mapped right behind the heap (where depends on the
    process's random addresses) that is impossible. So the block is taken, emptied and freed.
    """
    libc = ctypes.CDLL(None)
    libc.malloc_trim(0)
    if not hasattr(libc, "mallinfo2"):  # glibc before 2.33: the end of the heap may stay
        return
    libc.mallinfo2.restype = _Malloc
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    page = os.sysconf("SC_PAGE_SIZE")
    last = libc.mallinfo2().keepcost
    size = last - page
    taken: list[int] = []
    # A block of a list may fit better than the last one: take those too until the last one is gone.
    while size > page and libc.mallinfo2().keepcost == last and len(taken) < 64:
        block = libc.malloc(size)
        start = -(-block // page) * page
        libc.madvise(start, (block + size - start) // page * page, _DONTNEED)
        taken.append(block)
    for block in taken:
        libc.free(block)


def status_bytes(field: str) -> int:
    """A figure of this process in Linux's ``/proc/self/status``, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def read(tensor: Tensor) -> Tensor:
    """One reading of a tensor: the unit of memory-bound work in every benchmark.

    A sum: torch computes it with vector instructions and on all of its threads. At 360,000 elements
    a dot product of the halves was somewhat faster, at 44 million slower.
    """
    return tensor.sum()


def relative_error(value: Tensor, truth: Tensor) -> float:
    """``‖value - truth‖ / ‖truth‖`` in float64; NaN or a wrong shape counts as infinite."""
    if value.shape != truth.shape:
        return float("inf")
    exact = truth.detach().double().cpu()
    error = float((value.detach().double().cpu() - exact).norm())
    scale = float(exact.norm())
    if error == 0.0:
        return 0.0
    return error / scale if math.isfinite(error) and scale > 0.0 else float("inf")


def gate(results: Mapping[str, Tensor], truth: Tensor) -> dict[str, float]:
    """Relative error of each contender's result: measured before any of them is timed."""
    return {name: relative_error(result, truth) for name, result in results.items()}


def row(
    subject: str,
    contender: str,
    metric: str,
    unit: str,
    x: float | str,
    value: Quantiles | float,
    *,
    threads: int,
    version: str | None = None,
) -> Row:
    """A :class:`Row` with environment, commit and (by default curvlab's) version filled in."""
    spread = value if isinstance(value, Quantiles) else Quantiles(value, value, value)
    return Row(
        subject=subject,
        contender=contender,
        version=version_of("curvlab") if version is None else version,
        metric=metric,
        unit=unit,
        x=x,
        p20=spread.p20,
        p50=spread.p50,
        p80=spread.p80,
        environment=environment(threads),
        commit=commit(),
        samples=spread.samples,
        command=command(),
    )


def threads_of(entry: Row) -> str:
    """With how many of torch's threads a row was measured."""
    return next((p.split()[0] for p in entry.environment.split("; ") if " thread" in p), "?")


def machine_of(entry: Row) -> str:
    """The machine and libraries of a row, without the threads, which are each contender's own."""
    return "; ".join(p for p in entry.environment.split("; ") if not p.endswith(" threads"))


def processor_of(entry: Row) -> str:
    """The processor of a row, with its cores: times of two of them are not comparable."""
    return entry.environment.partition(";")[0]


def as_small(rows: Iterable[Row]) -> list[Row]:
    """The rows of a smaller problem than that of the targets: ``x`` says so."""
    return [replace(entry, x=f"{SMALL}{entry.x}") for entry in rows]


@cache
def commit() -> str:
    """The checkout's commit, with ``+`` if files differ from it; ``""`` outside a checkout."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=here, capture_output=True, text=True, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    name = git("rev-parse", "--short", "HEAD")
    changed = git("status", "--porcelain", "--untracked-files=no")
    return f"{name}+" if name and changed else name


def write_rows(path: str | Path, rows: Iterable[Row]) -> Path:
    """Write ``rows`` to ``path``: CSV or JSON by its suffix, all or nothing."""
    path = Path(path)
    records = [asdict(entry) for entry in rows]
    if path.suffix not in (".csv", ".json"):
        raise ValueError(f"write_rows writes .csv or .json; got {path.name!r}")

    def write(temporary: str) -> None:
        with Path(temporary).open("w", newline="", encoding="utf-8") as file:
            if path.suffix == ".json":
                json.dump(records, file, indent=1)
            else:
                writer = csv.DictWriter(file, [column.name for column in fields(Row)])
                writer.writeheader()
                writer.writerows(records)

    write_atomically(path, write)
    return path


def read_rows(path: str | Path) -> list[Row]:
    """Rows written by :func:`write_rows`; an ``x`` that reads as a number becomes one."""
    path = Path(path)
    with path.open(newline="", encoding="utf-8") as file:
        records = json.load(file) if path.suffix == ".json" else list(csv.DictReader(file))
    names = [column.name for column in fields(Row)]
    rows = []
    for record in records:
        if list(record) != names:
            raise ValueError(f"{path} has columns {list(record)}; rows need {names}")
        numbers = {name: float(record[name]) for name in ("p20", "p50", "p80")}
        x, samples = _number_or_text(record["x"]), int(record["samples"])
        rows.append(Row(**{**record, **numbers, "x": x, "samples": samples}))
    return rows


def _number_or_text(text: str | float) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def format_table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A plain text table with a line under its header."""
    head, *rest = table(list(header), [list(line) for line in lines]).splitlines()
    return "\n".join([head, "-" * max(map(len, (head, *rest))), *rest])
