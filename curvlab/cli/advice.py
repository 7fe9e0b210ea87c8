"""``doctor``, ``plan``, ``profile``, ``bench`` and ``version``: advice before and about work."""

import importlib.util
import logging
import platform
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from curvlab.basis import Basis
from curvlab.batches import freeze, rows, sample_count
from curvlab.cli.load import CURVATURES, case
from curvlab.cli.output import emit, say, table
from curvlab.cli.parser import UsageError
from curvlab.doctor import doctor as visit
from curvlab.operators import Curvature
from curvlab.plan import MACHINES, plan_counted
from curvlab.plan import plan as plan_measured
from curvlab.probe import OperatorError

log = logging.getLogger("curvlab")

CHECKOUT = (
    "the benchmarks are not installed with the package: clone the repository and run this in its "
    "folder, or python -m benchmarks there"
)


def doctor(options: Namespace) -> int:
    """Findings; exit code 1 if something must be cured first."""
    given = case(options)
    report = visit(given.model, given.loss, given.data, **given.options)
    emit(options, report.to_json(), str(report))
    return 0 if report.healthy else 1


def plan(options: Namespace) -> int:
    """Memory, products and time; exit code 1 if it does not fit."""
    shared: dict[str, Any] = {
        "k": options.k,
        "tol": options.tol,
        "tasks": options.tasks,
        "memory": options.memory,
        "ranks": options.ranks,
        "bandwidth": options.bandwidth,
    }
    if options.device in MACHINES and options.device != "cpu":  # a machine that is not here
        options.counted, options.machine = True, options.machine or options.device
    if options.counted:
        name = options.machine or "cpu"
        if name not in MACHINES:
            raise UsageError(f"--machine is one of {', '.join(MACHINES)}; got {name!r}")
        wanted, options.samples = options.samples, None
        given = case(options, meta=True)
        batch = freeze(given.data, bare=given.bare).pieces(8)[0]
        samples = wanted or freeze(given.data, bare=given.bare).samples or 1
        found = plan_counted(
            given.model,
            given.loss,
            batch,
            samples=samples,
            machine=MACHINES[name],
            select=options.select,
            **shared,
        )
    elif options.machine:
        raise UsageError("--machine goes with --counted; without it, this machine is measured")
    else:
        given = case(options)
        kind = CURVATURES[options.curvature]
        found = plan_measured(
            given.model, given.loss, given.data, curvature=kind, **shared, **given.options
        )
    emit(options, found.to_json(), str(found))
    return 0 if found.fits else 1


def profile(options: Namespace) -> int:
    """Every engine's product and every storage's projection, in gradients."""
    given = case(options)
    kind = CURVATURES[options.curvature]
    batches = freeze(given.data, bare=given.bare)
    some = [rows(batch, slice(0, options.samples or 64)) for batch in batches.pieces(None)[:1]]
    shared: dict[str, Any] = {"precision": options.precision, **given.options}

    def made(engine: Any) -> Curvature:
        return kind(given.model, given.loss, some, engine=engine, **shared)

    base = made("auto")
    unit = _seconds(base.gradient, options.rounds)
    vector = torch.ones(base.n, dtype=base.dtype, device=base.device)
    results: dict[str, float | None] = {}
    missing: list[str] = []
    for engine in ("mlp", "retained", "rebuilt", "linearised"):
        try:
            one = made(engine)
        except (ValueError, OperatorError, RuntimeError) as error:
            log.info("%s: %s", engine, str(error).splitlines()[0])
            missing.append(engine)
            continue
        results[f"product, {engine}"] = _seconds(partial(one.__matmul__, vector), options.rounds)
    for dtype in (torch.float32, torch.float16, torch.int8):
        memory = Basis(base.n, options.rows, dtype=dtype, device=base.device)
        generator = torch.Generator().manual_seed(0)
        memory.extend(torch.randn(options.rows, base.n, generator=generator).to(base.device))
        flat = vector.float().clone()
        name = f"projection, {options.rows} rows, {str(dtype).removeprefix('torch.')}"
        results[name] = _seconds(partial(memory.project_out_, flat), options.rounds)
    count = sample_count(some[0])
    facts = {"samples": count, "n": base.n, "gradient_seconds": unit, "seconds": results}
    lines = [
        [name, f"{1e3 * seconds:.3f}", f"{seconds / unit:.2f}"]
        for name, seconds in results.items()
        if seconds is not None
    ]
    head = (
        f"n = {base.n:,}, {count} samples, one gradient {1e3 * unit:.3f} ms; chosen: {base.engine}"
    )
    emit(options, facts, f"{head}\n" + table(["what", "ms", "gradients"], lines))
    if missing:
        say(options, f"not for this model: {', '.join(missing)} (-v says why)")
    if _benchmarks() is None:
        say(options, f"for the sweep over sizes and peers: {CHECKOUT}")
    return 0


def bench(options: Namespace) -> int:
    """Pass on to ``python -m benchmarks`` of a checkout."""
    folder = _benchmarks()
    if folder is None:
        raise UsageError(CHECKOUT)
    rest = [word for word in options.rest if word != "--"]
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *rest], cwd=folder, check=False
    ).returncode


def version(options: Namespace) -> int:
    """Versions, as a bug report needs them."""
    from curvlab import __version__

    extras = {
        name: importlib.util.find_spec(name) is not None
        for name in ("matplotlib", "numba", "scipy", "triton")
    }
    facts = {
        "curvlab": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cuda": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "extras": extras,
    }
    installed = ", ".join(name for name, there in extras.items() if there) or "none"
    lines = [f"{name:<8} {value}" for name, value in facts.items() if name != "extras"]
    emit(options, facts, "\n".join([*lines, f"extras   {installed}"]))
    return 0


def _benchmarks() -> Path | None:
    """The checkout that holds curvlab's own benchmarks: here, or around the package."""
    for folder in (Path.cwd(), Path(__file__).resolve().parents[2]):
        if (folder / "benchmarks" / "measure.py").is_file() and (folder / "curvlab").is_dir():
            return folder
    return None


def _seconds(call: Callable[[], Any], rounds: int) -> float:
    call()
    best = float("inf")
    for _ in range(rounds):
        began = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return best
