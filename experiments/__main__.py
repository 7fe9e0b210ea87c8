"""The paper's tables and figures from the command line: list, run, report, merge, repair."""

import argparse
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from curvlab.signals import termination_raises
from experiments.costs import spent
from experiments.experiment import SEEDS, SIZES, file_name
from experiments.registry import EXPERIMENTS, find
from experiments.runner import Place, Work, each, results_of, shard, trainings_of
from experiments.store import COMMITTED, Store

RESULTS = Path("results/experiments")


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        with termination_raises():  # a polite kill stops like Ctrl-C
            return int(options.command(options))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a file where a folder is needed, a full disk
        print(f"error: {error}; name other folders with --results and --out", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        said = sys.argv[1:] if arguments is None else list(arguments)
        again = f"python -m experiments {shlex.join(said)}"
        print(f"\nstopped: what is finished is kept, what was under way has its checkpoint. "
              f"Go on with\n  {again}", file=sys.stderr)  # fmt: skip
        return 130


def _list(options: argparse.Namespace) -> int:
    """Costs are those of the results at hand, here or committed; estimates where there are none."""
    lines = [*Store(COMMITTED).results(), *Store(options.results).results()]
    for one in EXPERIMENTS:
        print(f"{', '.join(one.labels)}\n    {one.what}")
        print(f"    data: {one.data if one.data != 'none' else 'none needed'}")
        for size in one.sizes:
            print(f"    {size:<7} {spent(lines, one, size) or one.cost.get(size, 'not known')}")
    return 0


def _run(options: argparse.Namespace) -> int:
    began, failed = time.perf_counter(), []
    progress = not options.quiet
    place = Place(options.results, options.data, options.threads, progress, options.device)
    place.store.results()  # a damaged line is told of before hours are spent
    work = _work(options)
    first = trainings_of(work, place) if options.jobs > 1 else []
    for number, (one, error) in enumerate(each(first, place, options.jobs), start=1):
        state = "trained" if error is None else f"not trained: {error}"
        print(f"[{time.perf_counter() - began:6.0f} s] run {number}/{len(first)}: {one}: {state}",
              flush=True)  # fmt: skip
    for number, (one, error) in enumerate(each(work, place, options.jobs), start=1):
        print(f"\n[{time.perf_counter() - began:6.0f} s] {number}/{len(work)}: {one}", flush=True)
        if error is None:
            _show(one, place)
        else:
            failed.append(one)
            print(f"error: {error}", file=sys.stderr, flush=True)
    if failed:
        print(f"\nnot done: {', '.join(one.label for one in failed)} (errors above); the rest is "
              f"in {place.store.file}", file=sys.stderr)  # fmt: skip
    return 1 if failed else 0


def _work(options: argparse.Namespace) -> list[Work]:
    """The experiments named on the command line, each once, in the order of the paper."""
    chosen = {e.label for e in EXPERIMENTS} if "all" in options.labels else {
        find(label).label for label in options.labels
    }  # fmt: skip
    seeds = tuple(dict.fromkeys(options.seeds))
    work = []
    for experiment in EXPERIMENTS:
        if experiment.label not in chosen:
            continue
        if options.size in experiment.sizes:
            work.append(Work(experiment.label, options.size, seeds))
        elif "all" in options.labels:
            print(f"{experiment.label} has no size {options.size!r} and is left out")
        else:
            raise ValueError(f"{experiment.label} has no size {options.size!r}, only "
                             f"{', '.join(experiment.sizes)}")  # fmt: skip
    return shard(work, *options.shard)


def _show(one: Work, place: Place) -> None:
    """The tables, claims and figure of a finished label, from all seeds in the store."""
    experiment = find(one.label)
    config = experiment.sizes[one.size]
    known = results_of(place.store, experiment, one.size)
    metrics = {seed: result.metrics for seed, result in known.items()}
    tables, claims = experiment.judged(one.size, metrics)
    for table in tables:
        print(f"\n{table}")
    print()
    for claim in claims:
        print(claim)
    if experiment.figure is not None:
        path = place.results / "figures" / f"{file_name(one.label)}-{one.size}"
        path.parent.mkdir(parents=True, exist_ok=True)
        experiment.figure(config, metrics, path)
        print(f"figure: {path}.png")
    print(f"took {spent(place.store.results(), experiment, one.size)}", flush=True)


def _report(options: argparse.Namespace) -> int:
    from experiments.report import write

    print(f"page: {write(_held(options.results), options.out)}")
    return 0


def _merge(options: argparse.Namespace) -> int:
    store = Store(options.results)
    for folder in options.folders:
        print(f"{folder}: {store.merge(_held(folder))} results added to {store.file}")
    return 0


def _repair(options: argparse.Namespace) -> int:
    store = _held(options.results)
    count = store.repair()
    print(f"{store.file}: {count} damaged lines moved to {store.file.name}.rejected"
          if count else f"{store.file}: nothing to mend")  # fmt: skip
    return 0


def _held(folder: Path) -> Store:
    store = Store(folder)
    if not store.file.exists():
        raise ValueError(f"{folder} holds no {store.file.name}; name a folder that `run` wrote to")
    return store


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m experiments", description=__doc__)
    commands = parser.add_subparsers(required=True)
    listing = commands.add_parser("list", help="labels, what they show, what they cost")
    listing.set_defaults(command=_list)
    run = commands.add_parser("run", help="compute what is missing, print tables and claims")
    run.set_defaults(command=_run)
    run.add_argument("labels", nargs="+", metavar="LABEL", help="as in the paper, or `all`")
    run.add_argument("--size", choices=SIZES, default="demo", help="see `list` (demo)")
    run.add_argument(
        "--seeds", type=int, nargs="+", default=list(SEEDS), help="the paper's five by default"
    )
    run.add_argument("--jobs", type=_count, default=1, help="processes side by side (1)")
    run.add_argument("--threads", type=_count, default=1, help="of each process (1)")
    parts = "part I of N, for N machines; `merge` puts their results together"
    run.add_argument("--shard", type=_shard, default=(1, 1), metavar="I/N", help=parts)
    run.add_argument("--data", type=Path, help="folder of MNIST and CIFAR (or CURVLAB_DATA)")
    run.add_argument("--device", type=_device, default="cpu", help="cpu, cuda, cuda:1, ...")
    run.add_argument("--quiet", action="store_true", help="no line per task while training")
    report = commands.add_parser("report", help="one page with everything in the results folder")
    report.set_defaults(command=_report)
    report.add_argument("--out", type=Path, default=RESULTS / "report", help="folder for the page")
    merge = commands.add_parser("merge", help="add the results of other folders (shards)")
    merge.set_defaults(command=_merge)
    merge.add_argument(
        "folders", nargs="+", type=Path, metavar="FOLDER", help="results of other machines"
    )
    repair = commands.add_parser("repair", help="move damaged lines of the results file aside")
    repair.set_defaults(command=_repair)
    for command in (listing, run, report, merge, repair):
        command.add_argument("--results", type=Path, default=RESULTS, help="results folder")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more; got {text!r}")
    return int(text)


def _device(text: str) -> str:
    try:
        torch.empty(0, device=text)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        reason = str(error).splitlines()[0]
        raise argparse.ArgumentTypeError(f"{text!r} is not available here: {reason}") from error
    return text


def _shard(text: str) -> tuple[int, int]:
    parts = text.split("/")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"reads I/N, such as 1/4; got {text!r}")
    index, count = int(parts[0]), int(parts[1])
    if not 1 <= index <= count:
        raise argparse.ArgumentTypeError(f"needs 1 <= I <= N; got {text!r}")
    return index, count


if __name__ == "__main__":
    sys.exit(main())
