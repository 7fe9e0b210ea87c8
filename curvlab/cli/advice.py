"""``doctor``, ``plan`` and ``version``: advice before and about work."""

import importlib.util
from argparse import Namespace
from typing import Any

import torch

from curvlab.batches import freeze
from curvlab.cli.load import CURVATURES, case
from curvlab.cli.output import emit, in_shell
from curvlab.cli.parser import UsageError
from curvlab.doctor import doctor as visit
from curvlab.plan import MACHINES, plan as plan_measured, plan_counted
from curvlab.storage import versions


def doctor(options: Namespace) -> int:
    """Findings; exit code 1 if something must be cured first."""
    given = case(options)
    report = visit(given.model, given.loss, given.data, **given.options)
    emit(options, report.to_json(), in_shell(str(report), options))
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


def version(options: Namespace) -> int:
    """Versions, as a bug report needs them."""
    extras = {
        name: importlib.util.find_spec(name) is not None
        for name in ("matplotlib", "numba", "scipy", "triton")
    }
    facts = {
        **versions(),
        "cuda": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "extras": extras,
    }
    installed = ", ".join(name for name, there in extras.items() if there) or "none"
    lines = [f"{name:<8} {value}" for name, value in facts.items() if name != "extras"]
    emit(options, facts, "\n".join([*lines, f"extras   {installed}"]))
    return 0
