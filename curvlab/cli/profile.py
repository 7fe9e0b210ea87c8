"""``profile``: what products, projections and protected steps take on a model and machine."""

import copy
import dataclasses
import logging
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from curvlab.basis import Basis
from curvlab.batches import freeze, rows, sample_count
from curvlab.bench.timing import seconds_of
from curvlab.cli.load import CURVATURES, case
from curvlab.cli.output import emit, say, table
from curvlab.eigen.progress import Progress
from curvlab.layerwise import LayerBases, Side, layer_bases
from curvlab.operators import Curvature
from curvlab.parameters import layout_of, parameter_vector, select_parameters
from curvlab.probe import OperatorError
from curvlab.protection import LayerProtection, protect

log = logging.getLogger("curvlab")

STEPS = 20  # after which a leak is measured
ENGINES = ("mlp", "retained", "rebuilt", "linearised")
STORED = (torch.float32, torch.float16, torch.int8)  # rows that are projected
GUARDED = (torch.float32, torch.int8)  # rows that an optimizer's steps are held to
SIDES: tuple[tuple[Side, str], ...] = (("inputs", "layer bases"), ("both", "Kronecker bases"))
MEASURED = 1 + len(ENGINES) + len(STORED) + len(GUARDED) + len(SIDES)


@dataclass(frozen=True, slots=True)
class Protected:
    """What one memory costs an AdamW step of a model.

    Attributes:
        kept: Bytes of the memory itself.
        room: Bytes that its protection needs beside it.
        seconds: What it adds to a step of the optimizer.
        leak: After ``STEPS`` steps, what moved along what is protected, relative to the weights.
    """

    name: str
    kept: int
    room: int
    seconds: float
    leak: float


def profile(options: Namespace) -> int:
    """Every engine's product, every storage's projection, every protection of a step."""
    given = case(options)
    kind = CURVATURES[options.curvature]
    batches = freeze(given.data, bare=given.bare)
    some = [rows(batch, slice(0, options.samples or 64)) for batch in batches.pieces(None)[:1]]
    shared: dict[str, Any] = {"precision": options.precision, **given.options}

    line = _Line(options)

    def made(engine: Any) -> Curvature:
        return kind(given.model, given.loss, some, engine=engine, **shared)

    line.at("the operator")
    base = made("auto")
    unit = _seconds(base.gradient, options.rounds)
    vector = torch.ones(base.n, dtype=base.dtype, device=base.device)
    results: dict[str, float] = {}
    missing: list[str] = []
    for engine in ENGINES:
        line.at(f"product, {engine}")
        try:
            one = made(engine)
        except (ValueError, OperatorError, RuntimeError) as error:
            log.info("%s: %s", engine, str(error).splitlines()[0])
            missing.append(engine)
            continue
        results[f"product, {engine}"] = _seconds(partial(one.__matmul__, vector), options.rounds)
    for dtype in STORED:
        name = f"projection, {options.rows} rows, {str(dtype).removeprefix('torch.')}"
        line.at(name)
        memory = _random_basis(base, options.rows, dtype)
        flat = vector.float().clone()
        results[name] = _seconds(partial(memory.project_out_, flat), options.rounds)
    count = sample_count(some[0])
    facts: dict[str, Any] = {
        "samples": count,
        "n": base.n,
        "gradient_seconds": unit,
        "seconds": results,
    }
    lines = [
        [name, f"{1e3 * seconds:.3f}", f"{seconds / unit:.2f}"] for name, seconds in results.items()
    ]
    head = (
        f"n = {base.n:,}, {count} samples, one gradient {1e3 * unit:.3f} ms; chosen: {base.engine}"
    )
    protections = list(_protections(options, line, given.model, given.loss, some, base))
    line.close()
    facts["protections"] = [dataclasses.asdict(one) for one in protections]
    text = f"{head}\n" + table(["what", "ms", "gradients"], lines)
    emit(options, facts, f"{text}\n\n{_compared(protections, unit)}")
    if missing:
        say(options, f"not for this model: {', '.join(missing)} (-v says why)")
    return 0


class _Line:
    """What is being measured, on the terminal; nothing is written while a time is taken."""

    def __init__(self, options: Namespace) -> None:
        self.progress = Progress("profile", options.progress)
        self.done = 0

    def at(self, name: str) -> None:
        self.progress.latest = 0.0  # few and far between: each is shown
        self.progress.update(None, self.done, MEASURED, name, "measured")
        self.done += 1

    def close(self) -> None:
        self.progress.close()


def _protections(
    options: Namespace, line: _Line, model: nn.Module, loss: Any, data: Any, base: Curvature
) -> Iterator[Protected]:
    """Dense rows beside layer bases, each protecting AdamW's steps with the model's gradient."""
    gradient = base.gradient()
    alone = _stepping(model, gradient, options.select, None)[0]
    plain = _seconds(alone, options.rounds)
    for dtype in GUARDED:
        name = f"{options.rows} dense rows, {str(dtype).removeprefix('torch.')}"
        line.at(name)
        basis = _random_basis(base, options.rows, dtype)
        yield _protected(name, model, gradient, options, basis, plain)
    for side, name in SIDES:
        line.at(name)
        try:
            bases = layer_bases(
                model, data, side=side, loss=loss, energy=options.energy, select=options.select
            )
        except (ValueError, TypeError) as error:
            line.close()
            say(options, f"{name}: {str(error).splitlines()[0]}")
            continue
        full = f"{name}, energy {options.energy:g}"
        yield _protected(full, model, gradient, options, bases, plain)


def _protected(
    name: str,
    model: nn.Module,
    gradient: Tensor,
    options: Namespace,
    memory: Basis | LayerBases,
    plain: float,
) -> Protected:
    step, trained, handle = _stepping(model, gradient, options.select, memory)
    before = parameter_vector(trained, options.select).double()
    for _ in range(STEPS):
        step()
    if isinstance(handle, LayerProtection):
        leak, room = handle.leak, handle.bytes
    else:
        change = parameter_vector(trained, options.select).double() - before
        along = memory.rows().double() @ change  # type: ignore[union-attr]
        leak, room = float(along.norm() / before.norm()), 2 * 4 * len(change)
    seconds = _seconds(step, options.rounds) - plain
    return Protected(name, memory.bytes, room, max(seconds, 0.0), leak)


def _stepping(
    model: nn.Module, gradient: Tensor, select: Any, memory: Basis | LayerBases | None
) -> tuple[Callable[[], Any], nn.Module, Any]:
    """A step of AdamW on a copy of the model, protected by ``memory`` if there is one."""
    trained = copy.deepcopy(model).float().eval()  # it only steps: no statistics may move
    chosen = select_parameters(trained, select)
    pieces = layout_of(chosen).unflatten(gradient.float())
    for parameter, piece in zip(chosen.values(), pieces, strict=True):
        parameter.grad = piece.clone()
    optimizer = AdamW(chosen.values(), lr=1e-4)
    handle: Any = None
    if isinstance(memory, LayerBases):
        handle = protect(optimizer, memory, trained)
    elif memory is not None:
        handle = protect(optimizer, memory, trained, select=select)
    return optimizer.step, trained, handle


def _compared(protections: list[Protected], unit: float) -> str:
    head = ["protecting a step of AdamW", "kept, MB", "room, MB", "ms added", "gradients", "leak"]
    lines = [
        [
            one.name,
            f"{one.kept / 1e6:.2f}",
            f"{one.room / 1e6:.2f}",
            f"{1e3 * one.seconds:.3f}",
            f"{one.seconds / unit:.2f}",
            f"{one.leak:.0e}",
        ]
        for one in protections
    ]
    return table(head, lines)


def _random_basis(base: Curvature, rows: int, dtype: torch.dtype) -> Basis:
    basis = Basis(base.n, rows, dtype=dtype, device=base.device)
    generator = torch.Generator().manual_seed(0)
    basis.extend(torch.randn(rows, base.n, generator=generator).to(base.device))
    return basis


def _seconds(call: Callable[[], Any], rounds: int) -> float:
    call()
    return min(seconds_of(call, 1) for _ in range(rounds))
