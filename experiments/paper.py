"""The numbers the paper publishes, as (mean, standard deviation), by table, row and column.

Copied once, by hand, from the tables of arXiv 2310.01165; no driver may hold a published number of
its own. Figures have no numbers to copy. Row names are those that the drivers print.
"""

from collections.abc import Mapping

Published = Mapping[str, Mapping[str, tuple[float, float]]]

LOW, HIGH = "lr 1e-5", "lr 1e-2"


def _columns(names: str, *values: tuple[float, float]) -> dict[str, tuple[float, float]]:
    return dict(zip(names.split(), values, strict=True))


_TAYLOR = "first second taylor E_o distance"

TABLES: dict[str, Published] = {
    "Table:Taylor-apprx-full": {
        f"{LOW}, all o": _columns(
            _TAYLOR, (0.43, 0.30), (0.26, 0.16), (0.15, 0.15), (0.30, 0.30), (1.23, 0.51)
        ),
        f"{HIGH}, all o": _columns(
            _TAYLOR, (2.33, 1.87), (1.49, 1.31), (1.55, 1.32), (2.26, 1.85), (8.19, 2.56)
        ),
        f"{LOW}, o = t-1": _columns(
            _TAYLOR, (0.16, 0.07), (0.19, 0.09), (0.05, 0.02), (0.018, 0.02), (0.71, 0.13)
        ),
        f"{HIGH}, o = t-1": _columns(
            _TAYLOR, (0.39, 0.06), (0.09, 0.05), (0.13, 0.05), (0.33, 0.05), (5.48, 0.17)
        ),
    },
    "tab:Our-approx-full": {
        f"{LOW}, t = 2": _columns("error E", (0.047, 0.01), (0.024, 0.01)),
        f"{LOW}, t = 3": _columns("error E", (0.049, 0.005), (0.122, 0.02)),
        f"{LOW}, t = 4": _columns("error E", (0.073, 0.02), (0.255, 0.03)),
        f"{LOW}, t = 5": _columns("error E", (0.068, 0.05), (0.48, 0.07)),
        f"{HIGH}, t = 2": _columns("error E", (0.062, 0.07), (0.36, 0.06)),
        f"{HIGH}, t = 3": _columns("error E", (0.74, 0.105), (1.27, 0.06)),
        f"{HIGH}, t = 4": _columns("error E", (1.17, 0.24), (2.45, 0.23)),
        f"{HIGH}, t = 5": _columns("error E", (0.80, 0.13), (3.09, 0.14)),
    },
    "tab:VOC": {
        f"{LOW}, GPM": _columns("VNC", (0.004, 0.004)),
        f"{LOW}, OGD": _columns("VNC", (0.0001, 0.0004)),
        f"{LOW}, SGD": _columns("VNC", (0.27, 0.10)),
        f"{HIGH}, GPM": _columns("VNC", (0.14, 0.11)),
        f"{HIGH}, OGD": _columns("VNC", (0.25, 0.05)),
        f"{HIGH}, SGD": _columns("VNC", (0.59, 0.07)),
    },
    "tab:ASSMPT": {
        LOW: _columns("D S", (-0.04, 0.12), (0.70, 0.08)),
        HIGH: _columns("D S", (-0.11, 0.13), (0.69, 0.02)),
    },
    # The column is headed E(5); its arithmetic is the mean of E_o(t) over all pairs o <= t.
    "tab:other-arch": {
        "ResNet, SGD": _columns("cifar10 cifar100", (0.025, 0.034), (0.29, 0.14)),
        "ResNet, SGD-dagger-10": _columns("cifar10 cifar100", (0.017, 0.024), (0.22, 0.14)),
        "ResNet, SGD-dagger-20": _columns("cifar10 cifar100", (0.014, 0.021), (0.16, 0.12)),
        "ViT, SGD": _columns("cifar10 cifar100", (0.031, 0.044), (0.25, 0.13)),
        "ViT, SGD-dagger-10": _columns("cifar10 cifar100", (0.007, 0.014), (0.16, 0.13)),
        "ViT, SGD-dagger-20": _columns("cifar10 cifar100", (0.006, 0.014), (0.11, 0.11)),
    },
    "Table:forg-C10-extended": {
        "ResNet, SGD": _columns(
            "E(2) E(3) E(4) E(5)",
            (0.0127, 0.0200), (0.0186, 0.0196), (0.0375, 0.0515), (0.0285, 0.0267),
        ),
        "ResNet, SGD-dagger-10": _columns(
            "E(2) E(3) E(4) E(5)",
            (0.0100, 0.0177), (0.0092, 0.0145), (0.0201, 0.0198), (0.0261, 0.0313),
        ),
        "ResNet, SGD-dagger-20": _columns(
            "E(2) E(3) E(4) E(5)",
            (0.0094, 0.0169), (0.0076, 0.0167), (0.0171, 0.0172), (0.0213, 0.0262),
        ),
        "ViT, SGD": _columns(
            "E(2) E(3) E(4) E(5)",
            (0.0306, 0.0329), (0.0249, 0.0383), (0.0476, 0.0669), (0.0264, 0.0282),
        ),
        "ViT, SGD-dagger-10": _columns(
            "E(2) E(3) E(4) E(5)",
            (0.0122, 0.0153), (0.0073, 0.0147), (0.0081, 0.0161), (0.0057, 0.0118),
        ),
        "ViT, SGD-dagger-20": _columns(
            "E(2) E(3) E(4) E(5)",
            (0.0126, 0.0173), (0.0061, 0.0160), (0.0077, 0.0154), (0.0048, 0.0110),
        ),
    },
    "Table:acc-C10": {
        "ResNet, SGD": _columns(
            "a(1) a(2) a(3) a(4) a(5)",
            (0.942, 0.01), (0.777, 0.15), (0.714, 0.14), (0.654, 0.11), (0.685, 0.16),
        ),
        "ResNet, SGD-dagger-10": _columns(
            "a(1) a(2) a(3) a(4) a(5)",
            (0.942, 0.01), (0.778, 0.15), (0.713, 0.16), (0.656, 0.16), (0.675, 0.17),
        ),
        "ResNet, SGD-dagger-20": _columns(
            "a(1) a(2) a(3) a(4) a(5)",
            (0.942, 0.01), (0.779, 0.16), (0.720, 0.15), (0.664, 0.15), (0.684, 0.17),
        ),
        "ViT, SGD": _columns(
            "a(1) a(2) a(3) a(4) a(5)",
            (0.903, 0.003), (0.766, 0.08), (0.739, 0.07), (0.693, 0.04), (0.7233, 0.10),
        ),
        "ViT, SGD-dagger-10": _columns(
            "a(1) a(2) a(3) a(4) a(5)",
            (0.903, 0.003), (0.785, 0.09), (0.751, 0.09), (0.713, 0.10), (0.7264, 0.09),
        ),
        "ViT, SGD-dagger-20": _columns(
            "a(1) a(2) a(3) a(4) a(5)",
            (0.903, 0.003), (0.783, 0.10), (0.748, 0.09), (0.705, 0.11), (0.719, 0.10),
        ),
    },
    "Table:acc-C100": {
        "ResNet, SGD": _columns("a(T) a_tt", (0.2215, 0.09), (0.5068, 0.10)),
        "ResNet, SGD-dagger-10": _columns("a(T) a_tt", (0.2366, 0.09), (0.4660, 0.11)),
        "ResNet, SGD-dagger-20": _columns("a(T) a_tt", (0.2487, 0.09), (0.4185, 0.11)),
        "ResNet, SGD-dagger-40": _columns("a(T) a_tt", (0.2542, 0.08), (0.3703, 0.12)),
        "ViT, SGD": _columns("a(T) a_tt", (0.2258, 0.09), (0.4789, 0.09)),
        "ViT, SGD-dagger-10": _columns("a(T) a_tt", (0.2452, 0.09), (0.4089, 0.11)),
        "ViT, SGD-dagger-20": _columns("a(T) a_tt", (0.2577, 0.06), (0.3726, 0.12)),
    },
    "tab:RNC100TAYLOR": {
        f"r = {r}": _columns(_TAYLOR, (0.63, 0.31), second, taylor, (0.57, 0.39), (2.15, 0.89))
        for r, second, taylor in (
            (10, (0.54, 0.38), (0.60, 0.30)),
            (20, (0.50, 0.37), (0.54, 0.30)),
            (30, (0.41, 0.30), (0.42, 0.26)),
            (40, (0.27, 0.20), (0.21, 0.16)),
        )
    },
    "tab:RNC100EQ3": {
        f"r = {r}": _columns("error E", error, (0.57, 0.13))
        for r, error in (
            (10, (0.37, 0.17)), (20, (0.36, 0.16)), (30, (0.34, 0.14)), (40, (0.30, 0.11)),
        )
    },
    "random baselines": {"random": _columns("D S", (-0.001, 0.02), (-0.0002, 0.01))},
}  # fmt: skip


def published(label: str, row: str, column: str) -> tuple[float, float] | None:
    """The paper's (mean, standard deviation) for one cell; ``None`` where it prints none."""
    return TABLES.get(label, {}).get(row, {}).get(column)
