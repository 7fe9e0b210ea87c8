"""The main job in miniature: spectra, and four learners on Rotated-MNIST at two learning rates.

    python -m experiments.demo --out demo

Embedded data; stream, rates and k are those of ``curvlab demo``, whose two rows are among these. It
prints spectra with their certificate and the table of forgetting with the paper's claims, draws
both, and makes the report page: this run on top, the committed results below it.
Forgetting little is no merit in a run that learned little: a_tt stands beside E(3).
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from curvlab.cli.demo import Stream
from curvlab.eigen import Eigenpairs, lanczos
from curvlab.learners import GPM, OGD, SGD, Learner, SGDDagger
from curvlab.metrics import average_accuracy
from curvlab.nets import mlp
from curvlab.operators import Hessian
from curvlab.parameters import load_parameter_vector
from curvlab.tasks import Task, subset
from curvlab.training import Run, learn
from experiments.experiment import BySeed, Experiment, rounded
from experiments.figures import STYLES, curve, legend, panels, save
from experiments.registry import EXPERIMENTS
from experiments.report import write
from experiments.rotated import forgotten, learned, outcome, square
from experiments.shelf import Shelf
from experiments.store import COMMITTED, Store
from experiments.tables import Metrics, Table
from experiments.verdicts import Claim, Values, ordered

RATES = ("high", "low")
NAMES = ("SGD", "SGD-dagger-20", "OGD", "GPM")


@dataclass(frozen=True)
class Config(Stream):
    epsilon: float = 0.01  # of the energy that OGD and GPM leave out


def learners(config: Config) -> dict[str, Learner]:
    """Fresh learners by the name in the table; GPM's network has no biases, as in the paper."""
    return {
        "SGD": SGD(),
        "SGD-dagger-20": SGDDagger(config.k, samples=config.samples),
        "OGD": OGD(config.epsilon, samples=config.samples),
        "GPM": GPM(1.0 - config.epsilon, samples=config.samples),
    }


def train(config: Config, tasks: list[Task], name: str, rate: str) -> list[Run]:
    return learn(
        lambda seed: mlp(seed=seed, bias=name != "GPM"),
        tasks,
        learners(config)[name],
        config.schedule(config.high if rate == "high" else config.low),
        seeds=config.seeds,
    )


def spectrum(config: Config, run: Run, tasks: list[Task], task: int) -> Eigenpairs:
    """The top of the Hessian at the solution of ``task``, which SGD-dagger protects."""
    model = mlp()
    load_parameter_vector(model, run.snapshots[task])
    some = subset(tasks[task].train, config.samples, seed=0)
    return lanczos(Hessian(model, cross_entropy, some), config.k, tol=1e-3, progress=False)


def measure(config: Config, say: Callable[[str], None] = print) -> dict[int, Metrics]:
    """Train all, take the spectra along SGD's runs at the high rate."""
    tasks = config.tasks()
    found: dict[int, Metrics] = {seed: {rate: {} for rate in RATES} for seed in config.seeds}
    for rate in RATES:
        for name in NAMES:
            runs = train(config, tasks, name, rate)
            for run in runs:
                found[run.seed][rate][name] = outcome(run)
            say(f"{rate} learning rate, {name}: trained")
            if (rate, name) == ("high", "SGD"):
                for run in runs:
                    pairs = [spectrum(config, run, tasks, task) for task in range(len(tasks))]
                    found[run.seed]["spectra"] = [_listed(one) for one in pairs]
                say(f"spectra of {len(runs)} x {len(tasks)} solutions: done\n{pairs[0]}")
    return found


def _listed(pairs: Eigenpairs) -> Metrics:
    values, residuals = pairs.values.tolist(), pairs.residuals.tolist()
    found: Metrics = rounded({"values": values, "residuals": residuals})
    return found


def tables(config: Config, metrics: BySeed) -> list[Table]:
    what = f"{len(config.angles)} rotations of {config.train} embedded images"
    said = "E(3): forgetting; a(3): accuracy at the end; a_tt: on each task, just learned"
    lost = Table("demo", f"{said}; {what}", ("E(3)", "a(3)", "a_tt"))
    for rate in RATES:
        for name in NAMES:
            group, row = [one[rate][name] for one in metrics.values()], f"{rate} rate, {name}"
            lost.add(row, "E(3)", [float(forgotten(one)[-1]) for one in group])
            average = [average_accuracy(square(one["accuracy"])) for one in group]
            lost.add(row, "a(3)", [float(one[-1]) for one in average])
            lost.add(row, "a_tt", [learned(one) for one in group])
    places = [place for place in (1, 5, 10, 20) if place <= config.k]
    columns = (*(f"|eigenvalue| {place}" for place in places), "largest residual")
    top = Table("demo, spectra", "Hessians at the solutions of SGD, high rate", columns)
    for task in range(len(config.angles)):
        group = [one["spectra"][task] for one in metrics.values()]
        for place, column in zip(places, columns[:-1], strict=True):
            top.add(f"task {task + 1}", column, [abs(one["values"][place - 1]) for one in group])
        top.add(f"task {task + 1}", columns[-1], [max(one["residuals"]) for one in group])
    return [lost, top]


def claims(config: Config, metrics: BySeed, tables: list[Table]) -> list[Claim]:
    """The paper's statements on a smaller stream: our own checks, not counted as the paper's."""
    del config, tables

    def lost(rate: str, name: str) -> Values:
        return {seed: float(forgotten(one[rate][name])[-1]) for seed, one in metrics.items()}

    others = [name for name in NAMES if name != "SGD"]
    return [
        ordered("high rate: GPM forgets least",
                [(lost("high", "GPM"), lost("high", name)) for name in NAMES[:-1]]),
        ordered("low rate: SGD-dagger, OGD and GPM forget less than SGD",
                [(lost("low", name), lost("low", "SGD")) for name in others]),
        ordered("all forget less at the low rate",
                [(lost("low", name), lost("high", name)) for name in NAMES]),
    ]  # fmt: skip


def figure(config: Config, metrics: BySeed, path: Path) -> None:
    """Spectra of the first seed with their residuals, then forgetting at the two rates."""
    plots, axes = panels(3)
    spectra = next(iter(metrics.values()))["spectra"]
    for task, (one, dots) in enumerate(zip(spectra, STYLES, strict=False)):
        places, values = range(1, len(one["values"]) + 1), [abs(value) for value in one["values"]]
        look = dots | {"linestyle": "none"}
        axes[0].errorbar(places, values, yerr=one["residuals"], markersize=4, capsize=2, **look,
                         label=f"task {task + 1}")  # fmt: skip
    axes[0].set(title="|eigenvalues| of the Hessian", yscale="log", xlabel="position")
    steps = range(1, len(config.angles) + 1)
    for axis, rate in zip(axes[1:], RATES, strict=True):
        for style, name in enumerate(NAMES):
            curves = [forgotten(one[rate][name]).tolist() for one in metrics.values()]
            curve(axis, steps, curves, style, name.replace("-dagger", "†"))
        axis.set(title=f"{rate} learning rate", xlabel="task t", ylabel="accuracy forgotten, E(t)")
        axis.set(ylim=(-0.06, 0.66), xticks=list(steps))  # one scale: the rates are to be compared
        axis.axhline(0.0, color="0.7", lw=0.8)
    legend(axes[0])
    legend(axes[-1])
    save(plots, path)


def run(config: Config, seeds: Sequence[int], shelf: Shelf) -> dict[int, Metrics]:
    """Nothing is put on the shelf: a demonstration starts from nothing."""
    del shelf
    found = measure(config, lambda _text: None)
    return {seed: found[seed] for seed in seeds}


EXPERIMENT = Experiment(
    label="demo",
    what="make demo: spectra, and four learners at two rates on three rotations (not in the paper)",
    data="none",
    sizes={"demo": Config()},
    run=run,
    tables=tables,
    claims=claims,
    figure=figure,
    cost={"demo": "about 1 min"},
)


def report(config: Config, metrics: BySeed, seconds: float, out: Path) -> Path:
    """The page of this run and of the committed results, in ``out/report``."""
    shown, store = replace(EXPERIMENT, sizes={"demo": config}), Store(out / "results")
    store.file.unlink(missing_ok=True)  # of the last demonstration
    store.append(
        [
            shown.result("demo", seed, one, seconds / len(metrics), "make demo")
            for seed, one in metrics.items()
        ]
    )
    store.merge(Store(COMMITTED))
    return write(store, out / "report", [shown, *EXPERIMENTS])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.demo", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("demo"), help="folder for picture and page"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # these networks are small: a second thread only waits
    config, began = Config(), time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - began:5.0f} s] {text}", flush=True)

    metrics = measure(config, say)
    seconds = time.perf_counter() - began
    made = tables(config, metrics)
    for table in made:
        print(f"\n{table}")
    print("\n" + "\n".join(map(str, claims(config, metrics, made))))
    page = report(config, metrics, seconds, options.out)
    pictures = page.parent / "figures" / "demo-demo.png"
    say(f"page: {page}   picture: {pictures}   tables: {page.parent / 'tables'}")


if __name__ == "__main__":
    main()
