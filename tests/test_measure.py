"""The measuring method: rounds pair up, memory is seen, rows survive a file."""

import math
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import measure
from curvlab.bench import timing

ROOT = Path(measure.__file__).parents[1]


def test_every_round_times_every_contender_once_and_ratios_pair_rounds():
    seconds = timing.interleave(
        {"one": lambda: time.sleep(0.002), "three": lambda: time.sleep(0.006)},
        rounds=5,
        shortest=0.0,
    )
    assert {name: len(samples) for name, samples in seconds.items()} == {"one": 5, "three": 5}
    ratio = timing.quantiles(timing.per_round_ratio(seconds["three"], seconds["one"]))
    assert ratio.p20 <= ratio.p50 <= ratio.p80
    assert timing.per_round_ratio([3.0, 8.0, 5.0], [1.0, 2.0, 5.0]) == [3.0, 4.0, 1.0]


def test_ratios_of_different_runs_are_refused():
    with pytest.raises(ValueError):
        timing.per_round_ratio([1.0, 2.0], [1.0])


def test_short_calls_are_repeated_until_the_clock_can_see_them():
    calls = []
    timing.interleave({"short": lambda: calls.append(1)}, rounds=2, shortest=0.001)
    assert len(calls) > 100


def test_the_order_of_contenders_rotates():
    order = []
    contenders = {name: lambda name=name: order.append(name) for name in "abc"}
    timing.interleave(contenders, rounds=3, warmup=0, shortest=0.0)
    assert order[3:] == list("abc" + "bca" + "cab")  # the first three calibrate


def test_threads_are_pinned_during_and_restored_after():
    seen = []
    before = torch.get_num_threads()
    timing.interleave({"look": lambda: seen.append(torch.get_num_threads())}, rounds=1, threads=1)
    assert set(seen) == {1}
    assert torch.get_num_threads() == before


def test_every_contender_may_have_its_own_threads():
    seen = {"one": [], "two": []}
    calls = {name: lambda of=of: of.append(torch.get_num_threads()) for name, of in seen.items()}
    timing.interleave(calls, rounds=2, threads={"one": 1, "two": 2}, shortest=0.0)
    assert (set(seen["one"]), set(seen["two"])) == ({1}, {2})


def test_the_best_threads_are_those_of_the_shortest_sample():
    def slow_with(count):
        return lambda: time.sleep(0.004 if torch.get_num_threads() == count else 0.0)

    calls = {"alone": slow_with(2), "together": slow_with(1)}
    assert timing.best_threads(calls, [2, 1]) == {"alone": 1, "together": 2}
    assert timing.best_threads(calls, [2]) == {"alone": 2, "together": 2}


def test_quantiles_of_known_samples():
    assert timing.quantiles([0.0, 1.0, 2.0, 3.0, 4.0, 5.0]) == timing.Quantiles(1.0, 2.5, 4.0, 6)
    assert timing.quantiles([7.0]) == timing.Quantiles(7.0, 7.0, 7.0)
    with pytest.raises(ValueError, match="at least one"):
        timing.quantiles([])


# Each in a process of its own, as benchmarks are: what thousands of tests before left in malloc's
# heaps was reused unseen now and then.
MEASURED = """
import torch
from benchmarks.measure import peak_memory

kept = torch.ones(64 * 2**18)
for megabytes in (24, 24, 96, 96):
    print(peak_memory(lambda: torch.ones(megabytes * 2**18).sum() + kept[0]) / 2**20)
print(peak_memory(lambda: [torch.ones(4096) for _ in range(4096)]) / 2**20)
"""


def printed(program: str) -> list[float]:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return [float(line) for line in done.stdout.split()]


def test_peak_memory_sees_temporaries_and_not_what_was_there_before():
    *found, pieces = printed(MEASURED)
    for megabytes, seen in zip((24, 24, 96, 96), found, strict=True):
        # once freed, the same memory is seen again, not hidden in malloc's free lists
        assert 0.9 * megabytes < seen < 1.1 * megabytes + 8
    assert 60 < pieces < 90


DROPPED = """
import mmap, tempfile, time
import torch
from benchmarks.measure import peak_memory

peak_memory(lambda: torch.ones(2**18))  # torch's own buffers
with tempfile.TemporaryFile() as file:
    file.write(bytes(64 << 20))
    file.flush()
    pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    for when in ("before", "first", "last"):
        pages[::4096]
        if when == "before":
            pages.madvise(mmap.MADV_DONTNEED)

        def call():
            if when == "before":
                pages[::4096]
            if when == "first":
                pages.madvise(mmap.MADV_DONTNEED)
            kept = torch.ones(24 * 2**18)
            time.sleep(0.1)
            if when == "last":
                pages.madvise(mmap.MADV_DONTNEED)

        print(peak_memory(call) / 2**20)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_pages_of_files_that_the_kernel_drops_and_reads_again_are_not_growth():
    assert printed(DROPPED) == pytest.approx([24.0] * 3, abs=2.0)


BLOCKED_HEAP = """
import ctypes
import torch
from benchmarks.measure import peak_memory

libc = ctypes.CDLL(None)
libc.sbrk.restype = libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + 3 * [ctypes.c_int] + [ctypes.c_long]
end = -(-libc.sbrk(0) // 4096) * 4096
MAP_PRIVATE, MAP_ANONYMOUS, MAP_FIXED_NOREPLACE = 0x2, 0x20, 0x100000
flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE
assert libc.mmap(end, 4096, 3, flags, -1, 0) == end
for _ in range(4):
    print(peak_memory(lambda: torch.ones(24 * 2**18).sum()) / 2**20)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_peak_memory_sees_reused_memory_when_the_heap_cannot_shrink():
    first, *others = printed(BLOCKED_HEAP)  # the first also sees torch's own buffers
    assert first > 23
    assert others == pytest.approx([24.0] * 3, abs=1.0)


def test_the_gate_measures_errors_and_never_passes_nan_or_a_wrong_shape():
    truth = torch.tensor([3.0, 4.0])
    errors = measure.gate(
        {
            "exact": truth.clone(),
            "off": torch.tensor([3.0, 4.5]),
            "nan": torch.tensor([3.0, math.nan]),
            "short": torch.tensor([3.0]),
        },
        truth,
    )
    assert errors["exact"] == 0.0
    assert errors["off"] == pytest.approx(0.1)
    assert math.isinf(errors["nan"])
    assert math.isinf(errors["short"])
    assert math.isinf(measure.relative_error(truth, torch.zeros(2)))


@pytest.mark.parametrize("suffix", [".csv", ".json"])
def test_rows_survive_a_file(tmp_path, suffix):
    rows = [
        measure.row("hvp", "ours, best", "time", "gradients", "mlp", 1.25, threads=2),
        measure.row(
            "hvp",
            "peer",
            "error",
            "",
            16.0,
            timing.Quantiles(0.1, 1 / 3, 0.5),
            threads=2,
            version="9",
        ),
    ]
    path = measure.write_rows(tmp_path / f"rows{suffix}", rows)
    assert measure.read_rows(path) == rows


def test_rows_say_where_they_come_from():
    entry = measure.row("hvp", "ours", "time", "gradients", 1.0, 2.0, threads=2)
    assert f"torch {torch.__version__}" in entry.environment
    assert "2 threads" in entry.environment
    assert entry.version == timing.version_of("curvlab") != ""
    assert timing.version_of("no-such-distribution") == ""


def test_a_foreign_file_and_an_unknown_suffix_are_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"\.csv or \.json"):
        measure.write_rows(tmp_path / "rows.txt", [])
    (tmp_path / "foreign.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="columns"):
        measure.read_rows(tmp_path / "foreign.csv")


def test_a_table_lines_up():
    text = measure.format_table(["engine", "time"], [["retained graph", "1.2"], ["mlp", "10.0"]])
    assert len({len(line) for line in text.splitlines()}) == 1
