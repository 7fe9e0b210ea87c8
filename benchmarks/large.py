"""Large models within a memory limit, planned first: ``python -m benchmarks.large [--size full]``.

- A GPT-2 of 124 M parameters, random weights, two texts of 16 tokens: its top 5 pairs, certified,
  within 12 GB of its own. The solver's rows, 16 of half a gigabyte, are in a mapped file.
- The paper's ViT of 12.5 M parameters on 1,000 samples: a product within a budget of 4 GB.
- A GPT-2 of 355 M parameters, random weights, one text of 16 tokens: a product within 20 GB.

The operators are not checked when they are made: a check holds five vectors more.

Each runs in a process of its own. The plan comes first and sees a few samples only; memory should
be right within 25 %, time within a factor of 1.5. The memory is what the process grows by, on top
of the model and its data, without mapped pages; the limit counts all that the process has of its
own, and the mapped pages, which the system drops and reads again as it needs, are shown beside it.
Seconds do not pass while other work has the core (:func:`curvlab.plan.cost.clock`), neither in the
plan nor in what it is compared with. ``--size small`` has small models.

``--keep FOLDER`` keeps the plan and the state of a solve there, and the same command goes on from
them. Seconds are then those of the last process, for as many products as all have made, and
its memory includes the state that it has read.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from benchmarks.measure import (
    Row,
    Watch,
    as_small,
    format_table,
    peak_memory,
    row,
    status_bytes,
    write_rows,
)
from curvlab.eigen import Certify, Checkpoint, lanczos
from curvlab.eigen.room import Room
from curvlab.losses import sequence
from curvlab.nets import gpt, vit_cifar
from curvlab.operators import Hessian
from curvlab.plan import plan
from curvlab.plan.cost import clock

MEMORY, TIME = 1.25, 1.5  # factors by which a plan may be off
TOLERANCE = 1e-3
EVERY = 15  # products between two checkpoints
GB = 10**9


@dataclass(frozen=True, slots=True)
class Case:
    """A model, its data, what the process may take, and what is asked of it.

    Attributes:
        limit: Bytes of the process's own.
        budget: Of the operator.
        k: Pairs, with the solver's rows in a mapped file; 0 asks for one product.
        rows: Of the solver; its usual number if ``None``.
        patience: Products that the search for hidden copies may take; the usual ones if ``None``.
        check: Whether the operator is checked when it is made.
        engine: Of the operator.
    """

    make: Callable[[], nn.Module]
    data: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    limit: int
    budget: int
    k: int = 0
    rows: int | None = None
    patience: int | None = None
    check: bool = True
    engine: Literal["auto", "blockwise"] = "auto"


def gpt2(hidden: int, depth: int, heads: int, words: int = 50_257) -> nn.Module:
    """A GPT-2 with random weights, its ends tied as in the original."""
    model: Any = gpt(words, context=1024, hidden=hidden, depth=depth, heads=heads, seed=0)
    model.head.weight = model.tokens.weight
    return model.eval()  # type: ignore[no-any-return]


def text(samples: int, tokens: int, words: int = 50_257) -> tuple[Tensor, Tensor]:
    """Random tokens, each followed by another random one."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(words, (samples, tokens + 1), generator=generator)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def images(samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(samples, 3, 32, 32, generator=generator)
    return drawn, torch.randint(2, (samples,), generator=generator)


FULL = {
    "GPT-2 of 124 M, a product": Case(
        partial(gpt2, 768, 12, 12), partial(text, 2, 16), sequence, limit=12 * GB,
        budget=10 * GB, check=False,
    ),
    "GPT-2 of 124 M, top 5": Case(
        partial(gpt2, 768, 12, 12), partial(text, 2, 16), sequence, limit=12 * GB,
        budget=10 * GB, k=5, rows=16, patience=100, check=False, engine="blockwise",
    ),
    "ViT of 12.5 M, 1,000 samples": Case(
        partial(vit_cifar, 2, seed=0), partial(images, 1000), nn.functional.cross_entropy,
        limit=4 * GB, budget=3 * GB, check=False,
    ),
    "GPT-2 of 355 M, a product": Case(
        partial(gpt2, 1024, 24, 16), partial(text, 1, 16), sequence, limit=20 * GB,
        budget=20 * GB, check=False, engine="blockwise",
    ),
}  # fmt: skip
SMALL = {
    "small GPT-2, top 2": Case(
        partial(gpt2, 64, 2, 2, 500), partial(text, 4, 16, 500), sequence,
        limit=2 * GB, budget=GB // 2, k=2, rows=24,
    ),
    "small ViT": Case(
        partial(vit_cifar, 2, hidden=32, depth=2, heads=2, seed=0), partial(images, 40),
        nn.functional.cross_entropy, limit=2 * GB, budget=GB // 10,
    ),
}  # fmt: skip
SIZES = {"small": SMALL, "full": FULL}


def one(size: str, name: str, threads: int, keep: Path | None) -> dict[str, Any]:
    """Plan and measure one case, in this process."""
    torch.set_num_threads(threads)
    case = SIZES[size][name]
    model, data = case.make(), case.data()
    folder = Path(tempfile.gettempdir()) / "rows"  # a name in the folder of the mapped file
    room = Room(rows=case.rows, file=folder) if case.k else Room()
    state = None if keep is None else Checkpoint(keep / f"{name}.safetensors", every=EVERY)
    planned = _planned(case, model, data, room, None if keep is None else keep / f"{name}.json")
    took: dict[str, Any] = {}

    def work() -> None:
        operator = Hessian(
            model, case.loss, data, budget=case.budget, check=case.check, engine=case.engine
        )
        took["engine"] = operator.engine
        began, share = clock(), 1.0
        if case.k:
            pairs = lanczos(
                operator, case.k, tol=TOLERANCE, room=room, progress=True, checkpoint=state,
                certify=Certify(products=case.patience),
            )  # fmt: skip
            took["products"], took["complete"] = pairs.matvecs, pairs.complete
            took["values"], took["reason"] = pairs.values.tolist(), pairs.reason
            took["residuals"] = pairs.residuals.tolist()
            share = operator.products / pairs.matvecs
        else:
            ones = torch.ones(operator.n)
            if operator._keep:  # graphs are made in the first product
                operator @ ones
            began = clock()
            operator @ ones
        took["seconds"] = (clock() - began) / share

    with Watch() as watch:
        peak = peak_memory(work, threads=threads)
    return {
        **planned,
        "process": watch.most["RssAnon"],
        "mapped": watch.most["RssFile"],
        "whole": status_bytes("VmHWM"),
        "limit": case.limit,
        "peak": peak,
        "products": took.get("products", 1),
        **took,
    }


def _planned(
    case: Case, model: nn.Module, data: tuple[Tensor, Tensor], room: Room, file: Path | None
) -> dict[str, float]:
    """What the plan says; from ``file``, if an earlier process has left it there."""
    if file is not None and file.exists():
        found: dict[str, float] = json.loads(file.read_text())
        return found
    began = clock()
    planned = plan(
        model, case.loss, data, k=case.k, tol=TOLERANCE, memory=case.limit, budget=case.budget,
        room=room, check=case.check, engine=case.engine,
    )  # fmt: skip
    print(planned, f"planned in {clock() - began:.0f} s", sep="\n", file=sys.stderr, flush=True)
    said = {
        "n": planned.n,
        "planned peak": planned.peak,
        "planned seconds": planned.seconds - planned.setup_seconds,
        "planned products": planned.products,
    }
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(said))
    return said


def rows_of(name: str, found: dict[str, Any], threads: int) -> list[Row]:
    """What a case took and what was planned, as rows."""
    figures = {
        "process bytes": (found["process"], "bytes"),
        "mapped bytes": (found["mapped"], "bytes"),
        "whole bytes": (found["whole"], "bytes"),
        "limit": (found["limit"], "bytes"),
        "peak bytes": (found["peak"], "bytes"),
        "planned bytes": (found["planned peak"], "bytes"),
        "seconds": (found["seconds"], "s"),
        "planned seconds": (found["planned seconds"], "s"),
        "products": (found["products"], "products"),
        "planned products": (found["planned products"], "products"),
        "taken": (found["process"] / GB, "GB"),
        "planned memory off by": (_factor(found["planned peak"], found["peak"]), "factor"),
        "planned time off by": (_factor(found["planned seconds"], found["seconds"]), "factor"),
    }
    return [
        row("large", name, metric, unit, "planned first", float(value), threads=threads)
        for metric, (value, unit) in figures.items()
    ]


def _factor(planned: float, taken: float) -> float:
    return max(planned / taken, taken / planned)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--only", nargs="+", help="cases whose names hold one of these")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--keep", type=Path, help="folder from which the same command goes on")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options.size, options.one, options.threads, options.keep)))
        return 0
    lines, rows, failed = [], list[Row](), False
    for name in SIZES[options.size]:
        if options.only and not any(part in name for part in options.only):
            continue
        command = [sys.executable, "-m", "benchmarks.large", "--size", options.size]
        command += ["--threads", str(options.threads), "--one", name]
        command += [] if options.keep is None else ["--keep", str(options.keep)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:  # a killed process is a row that is not there, not the end
            print(f"{name}: ended with {done.returncode}", file=sys.stderr, flush=True)
            failed = True
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        memory = found["planned peak"] / found["peak"]
        seconds = found["planned seconds"] / found["seconds"]
        planned = 1 / MEMORY <= memory <= MEMORY and 1 / TIME <= seconds <= TIME
        shown = planned and found["process"] <= found["limit"] and found.get("complete", True)
        rows += rows_of(name, found, options.threads)
        lines.append(
            [
                name,
                f"{found['n']:,}",
                f"{found['process'] / GB:.2f} of {found['limit'] / GB:.0f}",
                f"{found['mapped'] / GB:.2f}",
                f"{found['planned peak'] / GB:.2f} / {found['peak'] / GB:.2f}",
                f"{memory:.2f}",
                f"{found['planned products']} / {found['products']}",
                f"{found['planned seconds']:.1f} / {found['seconds']:.1f}",
                f"{seconds:.2f}",
                "yes" if shown else "no",
                f"{found['engine']}{', complete' if found.get('complete') else ''}",
            ]
        )
        print(format_table(HEADER, lines[-1:]), flush=True)
        if options.out is not None:  # after each: the next may take long
            write_rows(options.out, as_small(rows) if options.size == "small" else rows)
    return 1 if failed else 0


HEADER = ["model", "n", "GB, own", "mapped", "planned / taken, GB", "ratio", "products",
          "seconds", "ratio", "within", "engine"]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
