"""What this project set out to reach: one row per promise, and where in the rows it is measured.

Nothing here is computed: :mod:`benchmarks.verdicts` looks the figures up. A target is about the
full-size problems only; rows of smaller ones carry other names in ``x`` and are never mistaken for
them. With several ``x`` the worst one counts.
"""

from dataclasses import dataclass
from typing import Literal

AT_MOST: Literal["at most"] = "at most"
AT_LEAST: Literal["at least"] = "at least"


@dataclass(frozen=True, slots=True)
class Figure:
    """Rows that hold a figure; the median ``p50`` is what counts."""

    subject: str
    contender: str
    metric: str
    unit: str
    x: tuple[float | str, ...]


@dataclass(frozen=True, slots=True)
class Target:
    """A promise.

    Attributes:
        command: The subject of ``python -m benchmarks`` that measures it.
        per: The figure is divided by this contender's, at the same ``x``.
        inverse: Divide the other way round: how many times faster the contender is.
    """

    command: str
    what: str
    sense: Literal["at most", "at least"]
    limit: float
    unit: str
    figure: Figure
    per: str | None = None
    inverse: bool = False


NETWORKS = {
    "mlp": "MLP, N = 1000",
    "resnet": "slim ResNet18, N = 32",
    "vit": "ViT 12.5 M, N = 16",
}
SIZES = tuple(f"P={p} m={m}" for p in (500_000, 12_400_000) for m in (20, 100))
LONG = tuple(f"P=12400000 m={m}" for m in (20, 100))
MLP = 18_010.0
TOP = "eigensolver k=20 tol=0.001"


def _product(kind: str, contender: str, network: str) -> Figure:
    return Figure(kind, contender, "time per vector", "gradients", (network,))


def _products() -> list[Target]:
    found = []
    for network, limit in (("mlp", 1.3), ("resnet", 2.2), ("vit", 2.2)):
        figure = _product("hessian", "curvlab auto", network)
        what = f"Hessian product, {NETWORKS[network]}, graph kept"
        found.append(Target("products", what, AT_MOST, limit, "gradients", figure))
    for network in ("resnet", "vit"):
        figure = _product("hessian", "curvlab rebuilt", network)
        what = f"Hessian product, {NETWORKS[network]}, graph rebuilt"
        found.append(Target("products", what, AT_MOST, 3.1, "gradients", figure))
    figure = _product("hessian", "curvlab mlp, 16 at once", "mlp")
    what = f"Hessian product, {NETWORKS['mlp']}, per vector of 16"
    found.append(Target("products", what, AT_MOST, 1.0, "gradients", figure))
    for network, name in NETWORKS.items():
        figure = _product("gauss_newton", "curvlab auto", network)
        what = f"Gauss-Newton product, {name}"
        found.append(Target("products", what, AT_MOST, 1.5, "gradients", figure))
    for network, name in NETWORKS.items():
        # the best of the others: they keep the graph of the gradient, as ours does
        for rival in ("PyHessian", "kept graph"):
            what = f"Hessian product, {name}, against {rival}"
            metric = f"time over that of {rival}"  # inside the rounds
            beside = Figure("hessian", "curvlab auto", metric, "ratio", (network,))
            found.append(Target("products", what, AT_MOST, 1.0, "of its time", beside))
    for kind, word in (("hessian", "Hessian"), ("gauss_newton", "Gauss-Newton")):
        exact = Figure(kind, "curvlab auto", "error in float64", "relative", tuple(NETWORKS))
        what = f"{word} product, error in float64, three networks"
        found.append(Target("products", what, AT_MOST, 1e-9, "relative", exact))
    return found


def _dense() -> list[Target]:
    time = Figure("dense hessian", "curvlab", "CPU time", "seconds", (MLP,))
    ratio = Figure("dense hessian", "curvlab", "times faster than vmap", "", (MLP,))
    name = "Dense Hessian, 18,010 parameters, N = 1000"
    return [
        Target("dense_hessian", name, AT_MOST, 15.0, "CPU seconds", time),
        Target("dense_hessian", f"{name}, than vmapped jvp(grad)", AT_LEAST, 5.0, "x", ratio),
    ]


def _budget() -> list[Target]:
    found = []
    for network, name in (("resnet", "slim ResNet18"), ("vit", "ViT 12.5 M")):
        peak = Figure("memory budget", network, "peak", "budgets", (2.0, 8.0))
        what = f"Hessian product, {name}, N = 1000 in chunks, budgets of 2 and 8 GiB: peak memory"
        found.append(Target("budget", what, AT_MOST, 1.15, "of the budget", peak))
    return found


def _projection() -> list[Target]:
    found = []
    limits = {"float32": 1.2, "bfloat16": 1.7, "float16": 1.7, "int8": 2.3}
    for dtype, limit in limits.items():
        unit = "x torch float32 at its best"
        for where, name in ((SIZES[:2], "0.5 M"), (SIZES[2:], "12.4 M")):
            figure = Figure("projection", f"curvlab {dtype}", "speed", unit, where)
            what = f"Projection, {dtype} rows, P = {name}, m = 20 and 100"
            found.append(Target("projection", what, AT_LEAST, limit, "x torch's best", figure))
    for where, name in ((SIZES[:2], "0.5 M"), (SIZES[2:], "12.4 M")):
        unit = "x torch float32 at its best"
        figure = Figure("projection", "curvlab float32", "speed, one thread", unit, where)
        what = f"Projection, float32 rows, P = {name}, m = 20 and 100, one thread"
        found.append(Target("projection", what, AT_LEAST, 1.0, "x torch's best", figure))
    for dtype, limit in {"float32": 1e-6, "bfloat16": 1e-4, "float16": 1e-4}.items():
        where = LONG if dtype == "float32" else SIZES
        figure = Figure("projection", f"curvlab {dtype}", "leak", "|Qg'|/|g'|", where)
        what = f"Projection, {dtype} rows, what is left in the span"
        found.append(Target("projection", what, AT_MOST, limit, "of the vector", figure))
    for size, limit in (("P=1000 m=10", 1.15), ("P=18010 m=20", 1.05)):
        unit = "x the bare kernel"
        figure = Figure("projection", "Basis.project_out_", "around the kernel", unit, (size,))
        what = f"Basis.project_out_ around its kernel, {size}"
        found.append(Target("projection", what, AT_MOST, limit, unit, figure))
    norm = Figure("append", "curvlab", "norm error", "relative", ("n=12400000",))
    angles = tuple(f"condition {c}" for c in ("1e2", "1e4", "1e6"))
    append = Figure("append", "curvlab", "orthogonality", "largest |Q Q' - I|", angles)
    ugly = ("Hilbert-like", "Laeuchli", "duplicates", "zeros")
    finite = Figure("append", "curvlab", "not finite", "numbers", ugly)
    long = ("n=1100000 held=40 added=20",)
    textbook = Figure("append", "curvlab, block", "speed", "x BCGS2 + CholeskyQR2 in torch", long)
    return found + [
        Target("append", "Norm of 12.4 M float32 numbers", AT_MOST, 1e-7, "relative", norm),
        Target("append", "Append up to condition 1e6", AT_MOST, 5e-7, "orthogonality", append),
        Target("append", "Append of degenerate vectors", AT_MOST, 0.0, "not finite", finite),
        Target("append", "Append of 20 rows to 40, P = 1.1 M, than BCGS2 + CholeskyQR2", AT_LEAST,
               1.2, "x", textbook),
    ]  # fmt: skip


def _eigen() -> list[Target]:
    found = []
    ratio = Figure("conformance", "lanczos", "products", "products", ("all spectra",))
    wrong = Figure("conformance", "lanczos", "silently wrong", "solves", ("all spectra",))
    what = "Prescribed spectra, products against ARPACK's"
    found += [
        Target(
            "conformance", "Prescribed spectra, silently wrong sets", AT_MOST, 0.0, "solves", wrong
        ),
        Target("conformance", what, AT_MOST, 0.95, "of ARPACK's", ratio, "scipy eigsh"),
    ]

    def solve(metric: str, unit: str, network: str, contender: str = "lanczos") -> Figure:
        return Figure(TOP, contender, metric, unit, (network,))

    for network, name in NETWORKS.items():
        for contender in ("lanczos", "lanczos, uncertified"):
            figure = solve("products", "products", network, contender)
            what = f"Top 20 at 1e-3, {name}, {contender}"
            found.append(Target("eigensolvers", what, AT_MOST, 60, "products", figure))
    for network, limit in (("mlp", 75), ("resnet", 140), ("vit", 125)):
        figure = solve("time", "gradients", network)
        what = f"Top 20 at 1e-3, {NETWORKS[network]}"
        found.append(Target("eigensolvers", what, AT_MOST, limit, "gradients", figure))
    rivals = {
        "scipy eigsh, curvlinops-for-pytorch": {"mlp": 2.0, "resnet": 2.0, "vit": 2.0},
        "scipy eigsh, PyHessian": {"mlp": 1.15, "resnet": 1.15, "vit": 1.0},
        "scipy eigsh, our product": {"mlp": 1.15, "resnet": 1.15, "vit": 1.0},
        "scipy eigsh, kept graph": {"mlp": 1.15, "resnet": 1.15, "vit": 1.0},
        "deflated power iteration": {"mlp": 50.0},
    }
    for rival, limits in rivals.items():
        for network, least in limits.items():
            figure = solve("time over that of lanczos", "ratio", network, rival)
            what = f"Top 20 at 1e-3, {NETWORKS[network]}, than {rival}"
            found.append(Target("eigensolvers", what, AT_LEAST, least, "x", figure))
    counted = "deflated power iteration, counted"  # one product timed, so no ratio inside a round
    for network in ("resnet", "vit"):
        figure = solve("time", "gradients", network)
        what = f"Top 20 at 1e-3, {NETWORKS[network]}, than {counted}"
        found.append(
            Target("eigensolvers", what, AT_LEAST, 50.0, "x", figure, counted, inverse=True)
        )
    for rival in ("scipy eigsh, PyHessian", "scipy eigsh, our product", "scipy eigsh, kept graph"):
        for network, name in NETWORKS.items():
            metric = "time over that of lanczos, uncertified"
            figure = solve(metric, "ratio", network, rival)
            what = f"Top 20 at 1e-3, {name}, uncertified, than {rival}"
            found.append(Target("eigensolvers", what, AT_LEAST, 1.3, "x", figure))
    for network, name in NETWORKS.items():
        figure = solve("set-up", "gradients", network)
        what = f"Making the Hessian of the {name}, its checks included"
        found.append(Target("eigensolvers", what, AT_MOST, 6.0, "gradients", figure))
    for network in ("mlp", "resnet"):
        figure = solve("products of the certificate", "products", network)
        what = f"Top 20 at 1e-3, {NETWORKS[network]}, what the certificate adds"
        found.append(Target("eigensolvers", what, AT_MOST, 8, "products", figure))
    for overlap, most in (("0.999", 1.0), ("0.97", 0.6)):
        contender = f"lanczos, started at overlap {overlap}"
        figure = solve("products, warm over cold", "ratio", "mlp", contender)
        what = f"Top 20 at 1e-3, {NETWORKS['mlp']}, earlier vectors at overlap {overlap}"
        found.append(Target("eigensolvers", what, AT_MOST, most, "of a cold start", figure))
    outside = Figure("orthogonalisation k=10", "lanczos", "outside", "ARPACK", ("n=1100000",))
    passes = Figure(
        "reorthogonalisation m=40", "orthonormalise", "time", "4 reads of the basis",
        ("n=12500000",),
    )  # fmt: skip
    return found + [
        Target("orthogonalisation", "Time outside the operator, P = 1.1 M, k = 10", AT_MOST, 0.4,
               "of ARPACK's", outside),
        Target("orthogonalisation", "Two-pass reorthogonalisation, P = 12.5 M, 40 rows", AT_MOST,
               1.1, "of 4 reads", passes),
    ]  # fmt: skip


def _energy() -> list[Target]:
    angle = Figure("energy", "spectral_energy", "angle", "radians", (MLP,))
    count = Figure("energy", "spectral_energy", "k off by, ties aside", "vectors", (MLP,))
    speed = Figure("energy", "spectral_energy", "speed", "x dense, |H|_F and eigsh", (MLP,))
    name = "Spectral energy eps = .01, 18,010 parameters"
    return [
        Target("energy", f"{name}, than |H|_F and eigsh on the matrix", AT_LEAST, 20.0, "x", speed),
        Target("energy", f"{name}, largest principal angle", AT_MOST, 1e-2, "radians", angle),
        Target("energy", f"{name}, k against dense, ties aside", AT_MOST, 0.0, "vectors", count),
    ]


def _learners() -> list[Target]:
    found = []
    for name in ("SGD-dagger, 20 directions", "SGD-dagger, 80 directions",
                 "SGD-dagger, 20 directions, float16",
                 "SGD-dagger, 80 directions, float16"):  # fmt: skip
        figure = Figure("learners", name, "step", "of the limit", (1.0, 5.0))
        what = f"{name}: step against SGD's plus 1.3 times reading the memory twice"
        found.append(Target("learners", what, AT_MOST, 1.0, "of the limit", figure))
    for name in ("SGD", "SGD-dagger, 20 directions"):
        figure = Figure("learners", name, "speed", "stacked torch", (5.0,))
        what = f"{name}: five seeds, than a stack of them in batched products of torch"
        found.append(Target("learners", what, AT_LEAST, 2.0, "x", figure))
    for name in ("OGD-GTL eps=.01, 1,000 samples", "OGD-GTL eps=.001, 1,000 samples"):
        figure = Figure("learners", name, "step", "SGD steps", (1.0,))
        what = f"{name}: step at 1 seed"
        found.append(Target("learners", what, AT_MOST, 4.0, "SGD steps", figure))
    return found


def _protection() -> list[Target]:
    x = ("GPT, P=10893312, energy 0.99",)
    step = Figure("protection", "AdamW, protected", "step", "plain steps", x)
    leak = Figure("protection", "AdamW, protected", "leak", "of the weights", x)
    return [
        Target("protection", "protected AdamW step on a GPT of 10.9 M, energy 0.99", AT_MOST, 1.25,
               "plain steps", step),
        Target("protection", "what protected steps leave along the bases", AT_MOST, 1e-6,
               "of the weights", leak),
    ]  # fmt: skip


def _kernels() -> list[Target]:
    found = []
    for name in ("project, int8", "project list, int8"):
        for machine in ("A100", "H100"):
            where = tuple(f"{machine} P={p}" for p in (500_000, 4_000_000))
            figure = Figure("kernels", name, "issue over byte time", "model", where)
            what = f"{name}, {machine} by the model, P = 0.5 M and 4 M: issue over byte time"
            found.append(Target("kernels", what, AT_MOST, 0.8, "of the byte time", figure))
    return found


def _large() -> list[Target]:
    found = []
    limits = {
        "GPT-2 of 124 M, top 5": 12.0,
        "ViT of 12.5 M, 1,000 samples": 4.0,
        "GPT-2 of 355 M, a product": 20.0,
    }
    for name, limit in limits.items():
        for metric, unit, most, what in (
            ("taken", "GB", limit, "memory of the process"),
            ("planned memory off by", "factor", 1.25, "planned memory"),
            ("planned time off by", "factor", 1.5, "planned time"),
        ):
            figure = Figure("large", name, metric, unit, ("planned first",))
            found.append(Target("large", f"{name}: {what}", AT_MOST, most, unit, figure))
    return found


TARGETS: tuple[Target, ...] = (
    *_products(),
    *_dense(),
    *_budget(),
    *_projection(),
    *_eigen(),
    *_energy(),
    *_learners(),
    *_protection(),
    *_kernels(),
    *_large(),
)
