"""What protecting what a model knows costs beside a training step of a GPT.

    python -m benchmarks.protection [--size small|full] [--energy 0.99] [--rounds 5] [--out F.csv]

AdamW on batches of text, plain and protected by layer bases of the same text (this machine's own
Python source), interleaved: forward, backward and the optimizer's step. The weights are those that
the network starts with; what a step costs depends on ranks, which are shown. Gate: what a protected
step leaves along the bases, which must be below 1e-6 of the weights.
"""

import argparse
import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.measure import Row, as_small, format_table, row, write_rows
from curvlab import LayerBases, layer_bases, protect
from curvlab.bench.timing import environment, interleave, per_round_ratio, quantiles
from curvlab.losses import sequence
from curvlab.nets import gpt
from curvlab.protection import LayerProtection

SUBJECT = "protection"
WRONG = 1e-6  # of the weights' norm, left along what is protected


@dataclass(frozen=True, slots=True)
class Size:
    """A GPT, and the text that a step and the bases read."""

    hidden: int
    depth: int
    context: int
    batch: int
    stored: int  # windows that the bases are made of


SIZES = {"small": Size(48, 2, 32, 4, 8), "full": Size(384, 6, 128, 8, 16)}  # full: 10.9 M


def windows(size: Size, count: int, start: int) -> tuple[Tensor, Tensor]:
    """Bytes of a text that every Python has, and the bytes after them, ``(count, context)``."""
    text = torch.tensor(list(inspect.getsource(inspect).encode()))
    pieces = text[start : start + count * size.context + 1]
    return pieces[:-1].view(count, -1), pieces[1:].view(count, -1)


def stepping(
    size: Size, bases: LayerBases | None, gradients: bool
) -> tuple[Callable[[], object], LayerProtection | None]:
    """A training step of a new network, and its protection."""
    model = gpt(hidden=size.hidden, depth=size.depth, context=size.context, heads=6)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    inputs, targets = windows(size, size.batch, 60_000)
    handle = None
    if bases is not None:
        handle = protect(optimizer, bases, model, gradients=gradients)

    def step() -> None:
        optimizer.zero_grad()
        sequence(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step, handle


def measure(size: Size, energy: float, rounds: int, threads: int) -> list[Row]:
    """Rows of all figures."""
    model = gpt(hidden=size.hidden, depth=size.depth, context=size.context, heads=6)
    count = sum(p.numel() for p in model.parameters())
    found: list[Row] = []
    x = f"GPT, P={count}, energy {energy:g}"

    def note(contender: str, metric: str, unit: str, values: list[float]) -> None:
        entry = row(SUBJECT, contender, metric, unit, x, quantiles(values), threads=threads)
        found.append(entry)

    bases = layer_bases(model, windows(size, size.stored, 0), energy=energy)
    plain, _ = stepping(size, None, False)
    both, handle = stepping(size, bases, True)
    change, _ = stepping(size, bases, False)
    if handle is None:
        raise AssertionError("a protected step has a handle")
    contenders = {
        "AdamW": plain,
        "AdamW, protected": both,
        "AdamW, protected, gradients as they are": change,
    }
    seconds = interleave(contenders, rounds=rounds, threads=threads, shortest=0.0)
    for name, samples in seconds.items():
        note(name, "step", "plain steps", per_round_ratio(samples, seconds["AdamW"]))
    leak = handle.leak
    note("AdamW, protected", "leak", "of the weights", [leak])
    note("AdamW, protected", "kept", "MB", [bases.bytes / 1e6])
    note("AdamW, protected", "room", "MB", [handle.bytes / 1e6])
    held = [len(one.into) / one.into.n for one in bases.layers.values() if one.into]
    note("AdamW, protected", "rows held", "of the width", held)
    if not leak <= WRONG:
        raise AssertionError(f"a protected step leaves {leak:.1e} along the bases: do not time it")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--energy", type=float, default=0.99)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", help="write the rows to this .csv or .json")
    options = parser.parse_args()
    print(environment(options.threads))
    rows = measure(SIZES[options.size], options.energy, options.rounds, options.threads)
    rows = rows if options.size == "full" else as_small(rows)
    lines = [[r.contender, r.metric, f"{r.p50:.3g}", r.unit, str(r.x)] for r in rows]
    print(format_table(["contender", "metric", "median", "unit", "of"], lines))
    if options.out:
        print("rows in", write_rows(options.out, rows))


if __name__ == "__main__":
    main()
