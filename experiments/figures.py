"""How figures are drawn: one palette that colour-blind readers can tell apart, PNG and PDF."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

DPI = 150

# Okabe and Ito's colours, each with a marker and a line of its own: grey prints stay readable.
STYLES: tuple[dict[str, Any], ...] = (
    {"color": "#000000", "marker": "o", "linestyle": "-"},
    {"color": "#0072B2", "marker": "s", "linestyle": "--"},
    {"color": "#D55E00", "marker": "^", "linestyle": "-."},
    {"color": "#009E73", "marker": "D", "linestyle": ":"},
    {"color": "#CC79A7", "marker": "v", "linestyle": "-"},
    {"color": "#E69F00", "marker": "P", "linestyle": "--"},
    {"color": "#56B4E9", "marker": "X", "linestyle": "-."},
)


def panels(count: int, *, width: float = 4.0, height: float = 3.4) -> tuple[Any, list[Any]]:
    """A figure and ``count`` axes beside each other, without a display."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    size = (width * count, height)
    figure, axes = plt.subplots(1, count, figsize=size, layout="constrained", squeeze=False)
    return figure, list(axes[0])


def save(figure: Any, path: Path) -> None:
    """Write ``path.png`` and ``path.pdf`` (``path`` has no suffix) and let the figure go."""
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    for suffix in ("png", "pdf"):
        # without a date, so that the same results give the same bytes
        facts = {"CreationDate": None} if suffix == "pdf" else {"Software": None}
        figure.savefig(path.with_name(f"{path.name}.{suffix}"), dpi=DPI, metadata=facts)
    plt.close(figure)


def legend(axes: Any, title: str | None = None) -> None:
    """What the lines are, beside the axes: inside it would hide curves."""
    axes.legend(title=title, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))


def curve(
    axes: Any, x: Sequence[float], samples: Sequence[Sequence[float]], style: int, label: str
) -> None:
    """The mean over ``samples`` (one curve per seed) with a band of one standard deviation.

    A NaN in a curve leaves that seed out at that place.
    """
    import numpy as np

    values = np.ma.masked_invalid(np.asarray(samples, dtype=float))
    mean, deviation = values.mean(0), values.std(0)
    look = STYLES[style % len(STYLES)]
    axes.plot(x, mean, label=label, markersize=4, **look)
    # no lower than the lowest sample: on a logarithmic scale a band below zero would hide the rest
    low = np.ma.maximum(mean - deviation, values.min(0))
    axes.fill_between(x, low, mean + deviation, color=look["color"], alpha=0.15, lw=0)
