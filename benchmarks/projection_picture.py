"""A roofline: how much of the machine each projection uses."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from curvlab.plots import readable
from curvlab.storage import write_atomically


@dataclass(frozen=True, slots=True)
class Point:
    """One contender at one size: ``intensity`` in flop per byte, ``speed`` in flop per second."""

    name: str
    size: str
    intensity: float
    speed: float
    ours: bool


def draw_roofline(
    path: Path, points: Sequence[Point], bandwidth: float, peak: float, environment: str
) -> Path:
    """Write the picture to ``path``.

    Args:
        bandwidth: Of one reading, bytes per second: the slanted part of the roof.
        peak: Of a float32 matrix product, flop per second: the flat part.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 5.5), layout="constrained")
    low = 0.5 * min(point.intensity for point in points)
    high = 4 * max(point.intensity for point in points)
    ridge = peak / bandwidth
    corners = [low, ridge, max(high, 2 * ridge)]
    roof = [low * bandwidth, peak, peak]
    label = f"one reading {bandwidth / 1e9:.0f} GB/s, GEMM {peak / 1e9:.0f} Gflop/s"
    axes.loglog(corners, [y / 1e9 for y in roof], color="black", linewidth=1.5, label=label)
    names = list(dict.fromkeys(point.name for point in points))
    sizes = list(dict.fromkeys(point.size for point in points))
    markers = "osD^vP*X"
    colours = plt.get_cmap("tab20")
    for point in points:
        axes.scatter(
            point.intensity,
            point.speed / 1e9,
            color=colours(names.index(point.name) % 20),
            marker=markers[sizes.index(point.size) % len(markers)],
            s=55 if point.ours else 30,
            edgecolor="black" if point.ours else "none",
            linewidth=0.6,
        )
    for name in names:
        axes.scatter([], [], color=colours(names.index(name) % 20), label=name)
    for index, size in enumerate(sizes):
        axes.scatter([], [], color="grey", marker=markers[index % len(markers)], label=size)
    readable(axes.xaxis)
    readable(axes.yaxis)
    axes.set_xlabel("flop per byte moved (byte model)")
    axes.set_ylabel("Gflop/s")
    axes.set_title(f"Projection g - M'Mg: achieved against the machine\n{environment}", fontsize=8)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    axes.grid(visible=True, which="both", alpha=0.2)

    def write(temporary: str) -> None:
        figure.savefig(temporary, format=path.suffix.lstrip(".") or "png", dpi=150)

    write_atomically(path, write)
    plt.close(figure)
    return path
