"""What the results page shows: its sections, and which rows each table is made of."""

from dataclasses import dataclass

from benchmarks.measure import Row


@dataclass(frozen=True, slots=True)
class View:
    """A table: contenders down; across either the ``x`` of one metric, or several metrics.

    Attributes:
        metrics: ``(metric, unit)``; one of them, or those that stand side by side.
        sized: Whether a cell shows the 20 % and 80 % quantiles too.
    """

    title: str
    subject: str
    metrics: tuple[tuple[str, str], ...]
    sized: bool = True


@dataclass(frozen=True, slots=True)
class Section:
    """A file of rows, its heading, its tables and its picture.

    ``subjects`` are beginnings of the ``subject`` of its rows.
    """

    title: str
    subjects: tuple[str, ...]
    views: tuple[View, ...]
    text: str = ""


def _each(title: str, subject: str, *metrics: tuple[str, str]) -> View:
    return View(title, subject, metrics)


TOP = "eigensolver k=20 tol=0.001"
SECTIONS: dict[str, Section] = {
    "products": Section(
        "Curvature products",
        ("hessian", "gauss_newton"),
        (
            _each("Hessian, gradients per vector", "hessian", ("time per vector", "gradients")),
            _each("Gauss-Newton, gradients per vector", "gauss_newton",
                  ("time per vector", "gradients")),
            View("Hessian, peak memory", "hessian", (("peak memory", "bytes"),), False),
            View("Hessian, set-up in gradients, one sample", "hessian",
                 (("set-up", "gradients"),), False),
        ),
        "Networks: MLP with 18,010 parameters on 1,000 samples, slim ResNet18 on 32, ViT with 12.5 "
        "million parameters on 16. The unit is one gradient on the same data in the same rounds. "
        "Set-up is making the product as a user does, curvlab's checks included, and the first use "
        "of it.",
    ),
    "dense_hessian": Section(
        "Dense Hessian",
        ("dense hessian",),
        (_each("MLP", "dense hessian", ("CPU time", "seconds"), ("times faster than vmap", ""),
               ("error", "relative")),),
    ),
    "eigensolvers": Section(
        "Eigensolvers on trained networks",
        ("eigensolver",),
        (
            _each("Time with set-up, gradients", TOP, ("time", "gradients")),
            _each("Time with the operator reused, gradients", TOP,
                  ("time, operator reused", "gradients")),
            _each("Time with set-up over that of certified lanczos, inside rounds", TOP,
                  ("time over that of lanczos", "ratio")),
            _each("Time with set-up over that of uncertified lanczos, inside rounds", TOP,
                  ("time over that of lanczos, uncertified", "ratio")),
            _each("Products", TOP, ("products", "products")),
            _each("Best threads, torch", TOP, ("torch threads", "threads")),
            _each("Best threads, BLAS of NumPy and SciPy", TOP, ("BLAS threads", "threads")),
            _each("Samples", TOP, ("samples", "solves")),
            _each("Set-up of the Hessian, gradients", TOP, ("set-up", "gradients")),
            _each("Products of the certificate", TOP, ("products of the certificate", "products")),
            _each("Products of a warm start over those of a cold one", TOP,
                  ("products, warm over cold", "ratio")),
            _each("Worst true relative residual at the solver's own defaults", TOP,
                  ("residual at defaults", "relative")),
        ),
        "The 20 eigenpairs of largest magnitude, every true relative residual at most 1e-3 and "
        "none missing. A solver that does not get there is shown with its residual and not timed. "
        "Every solver is tried with several numbers of threads and timed with its best. Time with "
        "set-up makes the operator (or the graph that is kept) anew for every solve. The wanted "
        "values are those on which certified lanczos and ARPACK agree at a 30th of the tolerance, "
        "or as near to it as the operator's precision allows: decomposing the dense matrix of "
        "18,010 parameters takes a quarter of an hour.",
    ),
    "conformance": Section(
        "Prescribed spectra",
        ("conformance",),
        (
            _each("Products", "conformance", ("products", "products")),
            _each("Silently wrong solves", "conformance", ("silently wrong", "solves")),
            _each("Silently wrong, share of seeds", "conformance", ("silently wrong", "of solves")),
        ),
    ),
    "orthogonalisation": Section(
        "Orthogonalisation",
        ("orthogonalisation", "reorthogonalisation"),
        (
            _each("Outside the operator", "orthogonalisation k=10", ("outside", "ARPACK"),
                  ("outside", "ms/product"), ("products", "products")),
            _each("Two passes against 40 rows", "reorthogonalisation m=40",
                  ("time", "4 reads of the basis")),
        ),
    ),
    "append": Section(
        "Adding to the memory",
        ("append",),
        (
            _each("Orthogonality", "append", ("orthogonality", "largest |Q Q' - I|")),
            _each("Time, readings of the rows", "append", ("time", "reads of the rows")),
            _each("Speed", "append", ("speed", "x BCGS2 + CholeskyQR2 in torch")),
            _each("Norm, relative error", "append", ("norm error", "relative")),
            _each("Norm, time in readings of the vector", "append", ("norm time", "readings")),
        ),
    ),
    "projection": Section(
        "Projection",
        ("projection",),
        (
            _each("Speed, x torch float32 at its best", "projection",
                  ("speed", "x torch float32 at its best")),
            _each("Speed with one thread, x torch float32 at its best with one", "projection",
                  ("speed, one thread", "x torch float32 at its best")),
            _each("Torch's best way, seconds", "projection", ("torch's best way", "seconds")),
            _each("What is left in the span", "projection", ("leak", "|Qg'|/|g'|")),
            _each("Bandwidth, share of one reading's", "projection",
                  ("bandwidth", "of one reading")),
            _each("Share of a training step", "projection", ("overhead", "training steps")),
            _each("Around the kernel", "projection", ("around the kernel", "x the bare kernel")),
        ),
        "Projecting a vector of P elements off m directions. One reading is a sum over float32 "
        "numbers. Torch at its best is the fastest of `mv` and `addmv`, matrix products with one "
        "column, and columns divided over threads.",
    ),
    "energy": Section(
        "Spectral energy",
        ("energy",),
        (_each("eps = 0.01", "energy", ("time", "CPU seconds"), ("time", "seconds"),
               ("k", "vectors"), ("angle", "radians"), ("products", "products"),
               ("speed", "x dense, |H|_F and eigsh")),),
        "One run of each. The dense way makes the matrix, adds up its squares and lets `eigsh` "
        "look for pairs until they hold enough, at its better number of threads.",
    ),
    "learners": Section(
        "Learners' steps",
        ("learners",),
        (
            _each("Steps per second and run, x naive torch (columns: seeds)", "learners",
                  ("speed per run", "naive")),
            _each("Stacked torch's time over ours (columns: seeds)", "learners",
                  ("speed", "stacked torch")),
            _each("Step, in plain SGD's (columns: seeds)", "learners", ("step", "SGD steps")),
            _each("Limit: SGD's step and 1.3 times reading the memory twice", "learners",
                  ("limit", "SGD steps")),
            _each("Step over its limit, inside rounds", "learners", ("step", "of the limit")),
            _each("Memory, MB per run", "learners", ("memory", "MB per run")),
        ),
        "The paper's MLP on Rotated-MNIST, batch 10. Stacked torch does all seeds in batched "
        "products written by hand; learners without a figure there have no such rival.",
    ),
    "learner_networks": Section(
        "The projection beside a training step",
        ("learner networks",),
        (_each("Batch 10", "learner networks", ("SGD step", "ms"), ("SGD-dagger step", "ms"),
               ("projection", "ms"), ("projection", "reads"), ("leak", "")),),
    ),
    "protection": Section(
        "Protecting a model while it is fine-tuned",
        ("protection",),
        (_each("A training step with AdamW", "protection", ("step", "plain steps"),
               ("leak", "of the weights"), ("kept", "MB"), ("room", "MB"),
               ("rows held", "of the width")),),
        "Layer bases of a GPT that reads bytes: forward, backward and the optimizer's step.",
    ),
    "budget": Section(
        "Memory budgets",
        ("memory budget",),
        (_each("Peak over budget (columns: budget in GiB)", "memory budget", ("peak", "budgets")),),
    ),
    "distributed": Section(
        "Over several ranks",
        ("distributed",),
        (
            _each("Messages per call (columns: ranks)", "distributed", ("messages", "calls")),
            _each("Bytes that a rank sends or holds (columns: ranks)", "distributed",
                  ("bytes", "bytes")),
        ),
        "gloo on one machine with two cores: counts, not time.",
    ),
    "kernels": Section(
        "Kernels by their compiled code",
        ("kernels",),
        (_each("Issue over byte time", "kernels", ("issue over byte time", "model")),),
        "A model from executed PTX, not a measurement: below 1 memory can be the limit.",
    ),
    "large": Section(
        "Large models within a limit, planned first",
        ("large",),
        (_each("Taken and planned", "large", ("taken", "GB"), ("limit", "bytes"),
               ("planned memory off by", "factor"), ("planned time off by", "factor"),
               ("products", "products")),),
    ),
    "growth": Section("Growth", ("growth",), ()),
}  # fmt: skip


def section_of(entry: Row) -> str:
    """The section that a row belongs to."""
    for name, section in SECTIONS.items():
        if entry.subject.startswith(section.subjects):
            return name
    raise ValueError(f"no section of the page takes rows of subject {entry.subject!r}")
