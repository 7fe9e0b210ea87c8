"""Pictures of the results page, each drawn from rows alone."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import Row
from curvlab.plots import readable
from curvlab.storage import write_atomically

# Okabe and Ito's colours: they can be told apart with any colour vision
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#000000")
MARKERS = "os^Dv*PX"
TOP = "eigensolver k=20 tol=0.001"
OWN = ("curvlab", "lanczos", "block lanczos")
Draw = Callable[[Sequence[Row]], Any]


def draw(name: str, rows: Sequence[Row], folder: Path) -> Path | None:
    """The picture of a section, or None where it has none or its rows are not there."""
    figure = DRAWINGS[name](rows) if name in DRAWINGS else None
    if figure is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.png"

    def write(temporary: str) -> None:
        # no date or version inside: the same rows give the same file
        figure.savefig(temporary, format="png", dpi=130, metadata={"Software": None})

    write_atomically(path, write)
    _plots().close(figure)
    return path


def _plots() -> Any:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _of(rows: Sequence[Row], subject: str, metric: str, unit: str) -> list[Row]:
    return [
        entry
        for entry in rows
        if (entry.subject, entry.metric, entry.unit) == (subject, metric, unit)
    ]


def products(rows: Sequence[Row]) -> Any:
    """Gradients per product, one panel per network, the Hessian's."""
    shown = _of(rows, "hessian", "time per vector", "gradients")
    names = list(dict.fromkeys(str(entry.x) for entry in shown))
    return _panels(shown, names, "gradients per Hessian product") if names else None


def eigensolvers(rows: Sequence[Row]) -> Any:
    """Time of a whole solve, one panel per network; or the curves against accuracy."""
    curves = [entry for entry in rows if entry.subject.startswith("eigensolver curve")]
    if curves:
        return _accuracy(curves)
    shown = _of(rows, TOP, "time", "gradients")
    names = list(dict.fromkeys(str(entry.x) for entry in shown))
    return _panels(shown, names, "gradients per solve", log=True) if names else None


def _panels(shown: Sequence[Row], names: Sequence[str], label: str, log: bool = False) -> Any:
    """Horizontal bars with quantiles, curvlab's in one colour, the others in another.

    Panels share their lines, so that names stand once and stay readable on a small screen.
    """
    plt = _plots()
    lines = list(dict.fromkeys(entry.contender for entry in shown))[::-1]
    size = (2.2 + 2.0 * len(names), 0.9 + 0.3 * len(lines))
    figure, axes = plt.subplots(
        1, len(names), figsize=size, layout="constrained", squeeze=False, sharey=True
    )
    for axis, name in zip(axes[0], names, strict=True):
        bars = [entry for entry in shown if str(entry.x) == name]
        places = [lines.index(entry.contender) for entry in bars]
        spread = [[e.p50 - e.p20 for e in bars], [e.p80 - e.p50 for e in bars]]
        colours = [COLOURS[0] if e.contender.startswith(OWN) else COLOURS[1] for e in bars]
        for at, entry, colour in zip(places, bars, colours, strict=True):
            if log:  # a bar would begin nowhere
                axis.errorbar(entry.p50, at, fmt="o", color=colour)
            else:
                axis.barh(at, entry.p50, color=colour)
        axis.errorbar(
            [e.p50 for e in bars], places, xerr=spread, fmt="none", ecolor="black",
            linewidth=1,
        )  # fmt: skip
        axis.set_yticks(range(len(lines)), lines)
        axis.margins(y=0.08)
        axis.set_title(name, fontsize=11)
        axis.tick_params(labelsize=10)
        axis.grid(alpha=0.3)
        if log:
            axis.set_xscale("log")
            readable(axis.xaxis)
    figure.supxlabel(label, fontsize=11)
    return figure


def _accuracy(curves: Sequence[Row]) -> Any:
    """Products and time against the true residual that was reached, a line of panels each."""
    plt = _plots()
    subjects = list(dict.fromkeys(entry.subject for entry in curves))
    contenders = list(dict.fromkeys(entry.contender for entry in curves))
    size = (4.2 * len(subjects), 6.6)
    figure, axes = plt.subplots(2, len(subjects), figsize=size, layout="constrained", squeeze=False)
    for column, subject in enumerate(subjects):
        for line, metric in enumerate(("products", "time")):
            axis = axes[line][column]
            for index, name in enumerate(contenders):
                points = sorted(
                    (float(e.x), e.p50)
                    for e in curves
                    if (e.subject, e.contender, e.metric) == (subject, name, metric)
                )
                if points:
                    x, y = zip(*points, strict=True)
                    axis.plot(
                        x,
                        y,
                        marker=MARKERS[index % len(MARKERS)],
                        color=COLOURS[index % len(COLOURS)],
                        label=name,
                        linewidth=1,
                    )
            units = [e.unit for e in curves if e.subject == subject and e.metric == metric]
            axis.set(xscale="log", yscale="log", ylabel=units[0] if units else metric)
            readable(axis.yaxis)  # the residuals across are powers of ten
            axis.invert_xaxis()
            axis.grid(alpha=0.3, which="both")
        axes[0][column].set_title(subject.rpartition(", ")[2], fontsize=10)
        axes[1][column].set_xlabel("worst true relative residual")
    shown = {  # not every contender is in every panel
        label: line
        for axis in axes[0]
        for line, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(shown.values(), shown, loc="outside lower center", ncols=3, fontsize=8)
    return figure


def projection(rows: Sequence[Row]) -> Any:
    """Speed against what is left in the span, at each size that was measured."""
    speed = [entry for entry in rows if entry.metric == "speed"]
    leaks = {(e.contender, str(e.x)): e.p50 for e in rows if e.metric == "leak"}
    if not speed:
        return None
    plt = _plots()
    figure, axis = plt.subplots(figsize=(8.6, 4.6), layout="constrained")
    names = list(dict.fromkeys(entry.contender for entry in speed))
    sizes = list(dict.fromkeys(str(entry.x) for entry in speed))
    palette = plt.get_cmap("tab20")
    for entry in speed:
        leak = leaks.get((entry.contender, str(entry.x)))
        if leak:
            axis.scatter(
                leak,
                entry.p50,
                color=palette(names.index(entry.contender) % 20),
                marker=MARKERS[sizes.index(str(entry.x)) % len(MARKERS)],
                edgecolor="black" if entry.contender.startswith("curvlab") else "none",
                s=45,
            )
    for index, name in enumerate(names):
        axis.scatter([], [], color=palette(index % 20), label=name)
    for index, size in enumerate(sizes):
        axis.scatter([], [], color="grey", marker=MARKERS[index % len(MARKERS)], label=size)
    axis.axhline(1.0, color="black", linewidth=0.8)
    axis.set(xscale="log", yscale="log", xlabel="left in the span, |Qg'| / |g'|")
    readable(axis.yaxis)
    axis.set_ylabel("times as fast as torch float32 at its best")
    axis.grid(alpha=0.3, which="both")
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    return figure


def learners(rows: Sequence[Row]) -> Any:
    """Each learner's step in plain SGD's, at one and more seeds, with its limit."""
    shown = _of(rows, "learners", "step", "SGD steps")
    counts = sorted({float(entry.x) for entry in shown})
    if not counts:
        return None
    limits = {(e.contender, float(e.x)): e.p50 for e in rows if e.metric == "limit"}
    plt = _plots()
    size = (5.2 * len(counts), 5.2)
    figure, axes = plt.subplots(1, len(counts), figsize=size, layout="constrained", squeeze=False)
    for axis, count in zip(axes[0], counts, strict=True):
        bars = [entry for entry in shown if float(entry.x) == count][::-1]
        axis.barh([e.contender for e in bars], [e.p50 for e in bars], color=COLOURS[0])
        memory = [(limits.get((e.contender, count)), i) for i, e in enumerate(bars)]
        marks = [(limit, i) for limit, i in memory if limit is not None and limit > 1.02]
        if marks:
            x, y = zip(*marks, strict=True)
            axis.scatter(x, y, marker="|", s=160, color=COLOURS[3], label="limit", zorder=3)
            axis.legend(fontsize=8)
        axis.set_title(f"{count:.0f} seed{'s' if count > 1 else ''}", fontsize=10)
        axis.set(xlabel="step, in plain SGD's", xscale="log")
        readable(axis.xaxis)
        axis.tick_params(labelsize=8)
        axis.grid(axis="x", alpha=0.3, which="both")
    return figure


def _short(size: float) -> str:
    """160000 as 160 k."""
    for unit, name in ((1e6, " M"), (1e3, " k")):
        if size >= unit:
            return f"{size / unit:.3g}{name}"
    return f"{size:.3g}"


def growth(rows: Sequence[Row]) -> Any:
    """Every curve with its fitted line, and the exponent by count beside the fitted one."""
    fits = {(e.contender, e.metric): e for e in rows if e.unit == "fitted"}
    expected = {(e.contender, e.metric): e.p50 for e in rows if e.unit == "expected"}
    if not fits:
        return None
    plt = _plots()
    across = 3
    down = -(-len(fits) // across)
    size = (4.2 * across, 3.0 * down)
    figure, axes = plt.subplots(down, across, figsize=size, layout="constrained", squeeze=False)
    panels = [axis for line in axes for axis in line]
    for axis, ((name, metric), fit) in zip(panels, fits.items(), strict=False):
        what = metric.removeprefix("exponent of ")
        points = [(float(e.x), e) for e in rows if e.contender == name and e.metric == what]
        x = [size for size, _ in points]
        y = [entry.p50 for _, entry in points]
        middle = [sum(map(math.log, values)) / len(values) for values in (x, y)]
        line = [math.exp(middle[1] + fit.p50 * (math.log(size) - middle[0])) for size in x]
        low, high = [e.p50 - e.p20 for _, e in points], [e.p80 - e.p50 for _, e in points]
        axis.errorbar(x, y, yerr=[low, high], fmt="o", color=COLOURS[0], markersize=5)
        theory = expected.get((name, metric))
        label = f"exponent {fit.p50:.2f}" + ("" if theory is None else f", by count {theory:g}")
        axis.plot(x, line, color=COLOURS[3], linewidth=1, label=label)
        kind, _, against = what.partition(" against ")
        axis.set(xscale="log", yscale="log", xlabel=against)
        axis.set_ylabel("seconds" if kind == "time" else kind)
        axis.set_xticks(x, [_short(size) for size in x])
        axis.minorticks_off()
        axis.set_ylim(10 ** math.floor(math.log10(min(y))), 10 ** math.ceil(math.log10(max(y))))
        axis.set_title(name, fontsize=8)
        axis.grid(alpha=0.3, which="both")
        axis.legend(fontsize=8)
    for axis in panels[len(fits) :]:
        axis.axis("off")
    return figure


DRAWINGS: dict[str, Draw] = {
    "products": products,
    "eigensolvers": eigensolvers,
    "projection": projection,
    "learners": learners,
    "growth": growth,
}
