"""Pictures of results, readable as they are: ``write(scree(pairs), "scree.png", "scree.svg")``.

Each function takes a result and returns a ``matplotlib.figure.Figure``; matplotlib (the extra
``plot``) is loaded when one is called, without pyplot and without choosing a back end. Colours are
Okabe and Ito's, which colour-blind readers can tell apart, and never the only difference: markers
and line styles differ too.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from curvlab.basis import Basis
from curvlab.eigen import Density, Eigenpairs, LayerSpectra
from curvlab.metrics import Perturbation
from curvlab.storage import write_atomically
from curvlab.surface import Landscape
from curvlab.training import Run

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
MARKERS = "osD^vP*X"
LINES = ("-", "--", "-.", ":")
SUFFIXES = (".png", ".svg", ".pdf")


def scree(results: Eigenpairs | Sequence[Eigenpairs], labels: Sequence[str] = ()) -> Any:
    """Eigenvalues in order with bars of their residuals; a pair that has not converged is hollow.

    Args:
        results: One result, or several to compare.
        labels: Their names.
    """
    several = [results] if isinstance(results, Eigenpairs) else list(results)
    _require(several, "scree needs at least one Eigenpairs with a pair in it", len)
    figure, axes = _axes()
    for index, pairs in enumerate(several):
        values, bars = pairs.values.tolist(), pairs.residuals.tolist()
        positions = list(range(1, len(pairs) + 1))
        colour, marker = COLOURS[index % 8], MARKERS[index % 8]
        axes.errorbar(
            positions, values, yerr=bars, fmt="none", ecolor=colour, capsize=4, elinewidth=1.2
        )
        good = pairs.converged.tolist()
        axes.scatter(
            positions,
            values,
            marker=marker,
            s=34,
            facecolors=[colour if fine else "white" for fine in good],
            edgecolors=colour,
            label=_named(labels, index),
            zorder=3,
        )
        if not all(good):
            axes.scatter(
                [], [], marker=marker, facecolors="white", edgecolors=colour, label="not converged"
            )
    everything = [v for pairs in several for v in pairs.values.tolist()]
    _scale(axes, everything)
    first = several[0]
    axes.set(xlabel="position", ylabel="eigenvalue")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_title(
        f"{len(first)} of {first.n:,} eigenvalues; bars are residuals (tolerance {first.tol:g})"
    )
    _legend(axes)
    return figure


def density(result: Density, *, width: float | None = None) -> Any:
    """The spectral density on a logarithmic scale, with the Ritz values of all random vectors.

    Args:
        result: From :func:`curvlab.spectral_density`.
        width: The width of the smoothing; see :meth:`curvlab.Density.curve`.
    """
    figure, axes = _axes()
    x, y = result.curve(800, width=width)
    least = 0.1 / (result.n * max(float(x[1] - x[0]), 1e-300) * 50)  # a tenth of one eigenvalue
    axes.semilogy(x.tolist(), y.clamp_min(least).tolist(), color=COLOURS[0], lw=1.6)
    axes.fill_between(x.tolist(), least, y.clamp_min(least).tolist(), color=COLOURS[0], alpha=0.15)
    nodes = result.nodes[result.weights > 0.0].flatten().tolist()
    axes.plot(
        nodes,
        [0.02] * len(nodes),
        "|",
        color=COLOURS[1],
        ms=10,
        alpha=0.7,
        transform=axes.get_xaxis_transform(),
        label=f"Ritz values of {len(result.nodes)} random vectors",
    )
    axes.set(xlabel="eigenvalue", ylabel="density", ylim=(least, None))
    axes.set_title(f"spectral density of n = {result.n:,}, {result.products} products")
    _legend(axes)
    return figure


def decades(result: Density) -> Any:
    """Eigenvalues per decade of magnitude, positive and negative ones apart, both axes logarithmic.

    Args:
        result: From :func:`curvlab.spectral_density`.
    """
    figure, axes = _axes()
    x, *curves = result.decades(800)
    least = 0.1  # of an eigenvalue
    for index, (curve, name) in enumerate(zip(curves, ("positive", "negative"), strict=True)):
        if bool((curve > least).any()):
            axes.loglog(
                x.tolist(), curve.clamp_min(least).tolist(), LINES[index], color=COLOURS[index],
                lw=1.6, label=name,
            )  # fmt: skip
    axes.set(xlabel="magnitude", ylabel="eigenvalues per decade", ylim=(least, None))
    axes.set_title(f"{result.n:,} eigenvalues by magnitude, {result.products} products")
    _legend(axes)
    return figure


def layers(result: LayerSpectra) -> Any:
    """The outer eigenvalues of every layer, side by side in the model's order.

    Args:
        result: From :func:`curvlab.layer_spectra`.
    """
    _require([result], "layers needs a LayerSpectra with a layer in it", len)
    figure, axes = _axes(max(5.6, 1.2 + 0.45 * len(result)), 4.8)
    for position, pairs in enumerate(result.layers.values()):
        values = pairs.values.tolist()
        axes.scatter([position] * len(values), values, marker="o", s=28, color=COLOURS[0], zorder=3)
        axes.plot([position] * 2, [min(values), max(values)], color=COLOURS[0], lw=1.0, alpha=0.5)
    _scale(axes, [v for pairs in result.layers.values() for v in pairs.values.tolist()])
    axes.set_xticks(range(len(result)), result.layers, rotation=60, ha="right", fontsize=8)
    axes.set(xlabel="layer", ylabel="eigenvalue")
    most = max(map(len, result.layers.values()))
    axes.set_title(f"outer eigenvalues of {len(result)} layers, up to {most} each")
    return figure


def overlap(matrix: Tensor, rows: str = "first", columns: str = "second") -> Any:
    """A heat map of squared cosines ``(k1, k2)``, as from :func:`squared_cosines`."""
    if matrix.dim() != 2 or not matrix.numel():
        raise ValueError(f"overlap needs a matrix (k1, k2); got {tuple(matrix.shape)}")
    figure, axes = _axes(5.6, 4.8)
    picture = axes.imshow(matrix.double().tolist(), cmap="cividis", vmin=0.0, vmax=1.0)
    figure.colorbar(picture, ax=axes, label="squared cosine")
    axes.set(xlabel=f"eigenvector of {columns}", ylabel=f"eigenvector of {rows}")
    shared = float(matrix.sum()) / min(matrix.shape)
    axes.set_title(f"overlap of the spans: {shared:.3f} (1 is the same)")
    for axis in (axes.xaxis, axes.yaxis):
        axis.get_major_locator().set_params(integer=True)
    _numbers(axes, matrix)
    return figure


def squared_cosines(first: Any, second: Any) -> Tensor:
    """Squared cosines ``(k1, k2)`` between the vectors of two results, float64.

    Args:
        first: A ``Basis``, ``Eigenpairs`` or rows ``(k, n)``.
        second: The same.
    """
    rows = [_rows(thing) for thing in (first, second)]
    if rows[0].shape[1] != rows[1].shape[1]:
        raise ValueError(
            f"vectors of {rows[0].shape[1]} and of {rows[1].shape[1]} elements have no angle: they "
            "belong to different models or selections"
        )
    unit = [r / torch.linalg.vector_norm(r, dim=1, keepdim=True).clamp_min(1e-300) for r in rows]
    cosines: Tensor = unit[0] @ unit[1].T
    return cosines.square()


def forgetting(runs: Run | Sequence[Run], what: str = "test_accuracy") -> Any:
    """The matrix of a stream: on task ``o`` after learning task ``t``, the mean over seeds.

    Args:
        runs: One run, or one per seed.
        what: ``"test_accuracy"``, ``"train_accuracy"``, ``"test_loss"`` or ``"train_loss"``.
    """
    several = [runs] if isinstance(runs, Run) else list(runs)
    _require(several, "forgetting needs at least one Run", lambda run: len(run.tasks))
    if what not in ("test_accuracy", "train_accuracy", "test_loss", "train_loss"):
        raise ValueError(f"what= names a matrix of a Run, such as 'test_accuracy'; got {what!r}")
    matrix = torch.stack([getattr(run, what) for run in several]).mean(0)
    names = several[0].tasks
    figure, axes = _axes(1.2 + 0.85 * len(names) + 2.0, 1.4 + 0.7 * len(names) + 0.6)
    accuracy = what.endswith("accuracy")
    picture = axes.imshow(matrix.tolist(), cmap="cividis", vmin=0.0, vmax=1.0 if accuracy else None)
    figure.colorbar(picture, ax=axes, label=what.replace("_", " "))
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right")
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="on task", ylabel="after learning")
    axes.set_title(f"{what.replace('_', ' ')}, {len(several)} seed{'s'[: len(several) > 1]}")
    _numbers(axes, matrix)
    return figure


def perturbation(result: Perturbation, labels: Sequence[str] = ()) -> Any:
    """The perturbation score s(r) of each direction against the radius."""
    figure, axes = _axes()
    score = result.score()
    for index, curve in enumerate(score):
        axes.loglog(
            result.radii.tolist(),
            curve.clamp_min(1e-12).tolist(),
            LINES[index % 4],
            color=COLOURS[index % 8],
            marker=MARKERS[index % 8],
            ms=3.5,
            lw=1.3,
            label=_named(labels, index) or f"direction {index + 1}",
        )
    axes.axhline(1.0, color="0.5", lw=1.0)
    axes.annotate(
        "a random direction", (0.99, 1.0), xycoords=axes.get_yaxis_transform(), ha="right",
        va="bottom", fontsize=8, color="0.35",
    )  # fmt: skip
    axes.set(xlabel="distance r", ylabel="score s(r)")
    axes.set_title(
        f"loss change along directions, relative to random ones (loss {result.loss:.3g})"
    )
    _legend(axes)
    return figure


def landscape(result: Landscape, labels: Sequence[str] = ("first", "second")) -> Any:
    """The loss on a line beside its quadratic prediction, or on a plane as contours.

    Args:
        result: From :func:`curvlab.landscape`.
        labels: Names of the directions.
    """
    figure, axes = _axes()
    steps = result.steps.tolist()
    axes.set_xlabel(f"step along the {labels[0]} direction")
    if result.losses.dim() == 1:
        axes.plot(steps, result.losses.tolist(), color=COLOURS[0], marker="o", ms=3, label="loss")
        bent = result.quadratic.tolist()
        axes.plot(steps, bent, LINES[1], color=COLOURS[1], label="second order")
        axes.set(ylabel="loss", title="the loss along a direction")
        _legend(axes)
        return figure
    drawn = axes.contourf(steps, steps, result.losses.T.tolist(), levels=24, cmap="cividis")
    axes.contour(steps, steps, result.quadratic.T.tolist(), levels=8, colors="white",
                 linewidths=0.7, linestyles="--")  # fmt: skip
    axes.plot([0.0], [0.0], marker="x", color="white", ms=9, mew=2)
    figure.colorbar(drawn, ax=axes, label="loss")
    axes.set(
        ylabel=f"step along the {labels[1]} direction", title="the loss; dashed: to second order"
    )
    return figure


def contest(
    names: Sequence[str],
    times: Sequence[tuple[tuple[float, float, float], tuple[float, float, float]]],
    products: Sequence[int],
    *,
    wrong: Sequence[str] = (),
    unit: str = "gradients",
    title: str = "",
) -> Any:
    """Eigensolvers side by side: time with set-up and with the operator reused, fastest on top.

    Args:
        times: The quantiles (20, 50, 80 %) of each solver with set-up, then with the operator
            reused.
        products: How many products each solver took.
        wrong: Names of those that missed the accuracy and so have no time.
    """
    _require(names, "contest needs at least one solver that is right", bool)
    figure, axes = _axes(height=1.6 + 0.42 * len(names))
    for index, label in enumerate(("with set-up", "operator reused")):
        medians = [of[index][1] for of in times]
        bars = [[of[index][1] - of[index][0] for of in times]]
        bars.append([of[index][2] - of[index][1] for of in times])
        places = [place + 0.24 * (index - 0.5) for place in range(len(names))]
        axes.errorbar(
            medians, places, xerr=bars, fmt=MARKERS[index], ms=5, color=COLOURS[index], label=label
        )
    axes.set_yticks(
        range(len(names)), [f"{n} ({p})" for n, p in zip(names, products, strict=True)], fontsize=8
    )
    axes.invert_yaxis()
    everything = [value for of in times for spread in of for value in spread]
    if max(everything) > 10 * min(everything):
        axes.set_xscale("log")
        readable(axes.xaxis)
    missed = f"\nnot accurate enough: {'; '.join(wrong)}" if wrong else ""
    axes.set_xlabel(f"{unit} (products in brackets){missed}", fontsize=8)
    axes.set_title(title, fontsize=10)
    _legend(axes)
    return figure


def readable(axis: Any) -> None:
    """Ticks of a logarithmic axis as plain numbers: 1, 2 and 5 of every decade.

    Call it when everything is drawn: an axis shorter than a decade gets ticks at equal distances, a
    longer one fewer of each decade, or their numbers would run into each other on a phone.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    low, high = sorted(axis.get_view_interval())
    if low > 0.0 and high < 8.0 * low:
        axis.set_major_locator(MaxNLocator(5))
    else:
        decades = math.log10(high / low) if low > 0.0 else math.inf
        of_each = (1.0, 2.0, 5.0) if decades < 1.3 else (1.0, 3.0) if decades < 2.0 else (1.0,)
        axis.set_major_locator(LogLocator(base=10, subs=of_each, numticks=5))
    axis.set_major_formatter(FuncFormatter(_plain))
    axis.set_minor_formatter(NullFormatter())


def _plain(value: float, _: int) -> str:
    return f"{value:,.10g}" if value < 1e4 else f"{value / 1e3:,.10g}k"


def write(figure: Any, *paths: str | Path) -> list[Path]:
    """Write ``figure`` to each of ``paths``: PNG, SVG or PDF by the suffix, all or nothing."""
    targets = [Path(path) for path in paths]
    for path in targets:
        if path.suffix not in SUFFIXES:
            raise ValueError(f"a picture ends in {', '.join(SUFFIXES)}; got {path.name!r}")
    for path in targets:
        kind = path.suffix[1:]
        write_atomically(path, lambda name, k=kind: figure.savefig(name, format=k, dpi=160))  # type: ignore[misc]
    return targets


def _axes(width: float = 7.0, height: float = 4.4) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("pictures need matplotlib: pip install 'curvlab[plot]'") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(visible=True, alpha=0.25, lw=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _numbers(axes: Any, matrix: Tensor, most: int = 12) -> None:
    """Entries as text, where there is room for them; the grid is in their way."""
    axes.grid(visible=False)
    if max(matrix.shape) > most:
        return
    low, high = axes.images[0].get_clim()
    for i, row in enumerate(matrix.tolist()):
        for j, value in enumerate(row):
            if not math.isnan(value):
                dark = (value - low) / max(high - low, 1e-300) < 0.55
                colour = "white" if dark else "black"
                axes.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=8, color=colour)


def _scale(axes: Any, values: list[float]) -> None:
    """A logarithmic axis for values over more than a decade; a symmetric one for both signs."""
    sizes = [abs(value) for value in values if value]
    if not sizes or max(sizes) < 10.0 * min(sizes):
        return
    if min(values) > 0.0:
        axes.set_yscale("log")
    else:
        # a power of ten, half a decade from zero: the ticks around zero do not run into each other
        linear = 10.0 ** math.floor(math.log10(min(sizes)))
        axes.set_yscale("symlog", linthresh=linear, linscale=0.5)
        axes.axhline(0.0, color="0.6", lw=0.8)


def _rows(thing: Any) -> Tensor:
    if isinstance(thing, Basis):
        return thing.rows().double().cpu()
    if isinstance(thing, Eigenpairs):
        return thing.vectors.double().cpu()
    if isinstance(thing, Tensor) and thing.dim() == 2:
        return thing.double().cpu()
    raise TypeError(f"overlap takes a Basis, Eigenpairs or rows (k, n); got {type(thing).__name__}")


def _named(labels: Sequence[str], index: int) -> str | None:
    return labels[index] if index < len(labels) else None


def _legend(axes: Any) -> None:
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=8, frameon=False)


def _require(things: Sequence[Any], message: str, fine: Any) -> None:
    if not things or not all(fine(thing) for thing in things):
        raise ValueError(message)
