"""The comparison on the README's first screens, made from the committed rows.

``python -m benchmarks page`` writes it between two comments of the README; a test compares them.
Its rows are of one machine, on which the products were measured: rows of another are left out.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.measure import Row, machine_of, processor_of
from benchmarks.targets import NETWORKS, TOP
from benchmarks.verdicts import Key, key, number

BEGIN = "<!-- from benchmarks/rows, by python -m benchmarks page -->"
END = "<!-- until here -->"
LINES = {  # label: the contender whose product it is, the one whose solve it is
    "curvlab, certified": ("curvlab auto", "lanczos"),
    "curvlab, not certified": ("", "lanczos, uncertified"),
    "SciPy {} `eigsh` on curvlab's product": ("", "scipy eigsh, our product"),
    "double backward, graph kept": ("kept graph", "scipy eigsh, kept graph"),
    "PyHessian": ("PyHessian", "scipy eigsh, PyHessian"),
    "curvlinops": ("curvlinops-for-pytorch", "scipy eigsh, curvlinops-for-pytorch"),
    "hessian-eigenthings": ("hessian-eigenthings", "scipy eigsh, hessian-eigenthings"),
    "JAX, jit of jvp(grad)": ("jax", "scipy eigsh, jax"),
}
SOLVES = (  # column, network, metric, unit
    ("solve, MLP: products", "mlp", "products", "products"),
    ("with set-up", "mlp", "time", "gradients"),
    ("reused", "mlp", "time, operator reused", "gradients"),
    ("solve, ResNet: with set-up", "resnet", "time", "gradients"),
)
EIGSH = "scipy eigsh, our product"
Table = Mapping[Key, Row]


def block(rows: Sequence[Row]) -> str:
    """Table and sentences, as they stand in the README."""
    own = [entry for entry in rows if entry.subject in ("hessian", TOP, "conformance")]
    here = next((processor_of(entry) for entry in own if entry.subject == "hessian"), None)
    own = [entry for entry in own if here is None or processor_of(entry) == here]
    found = {key(entry): entry for entry in own}
    parts = [_origin(own), _table(found), _solves(found), _spectra(own)]
    return "\n\n".join([BEGIN, *(part for part in parts if part), END])


def _table(found: Table) -> str:
    solves = [s for s in SOLVES if (TOP, "lanczos", s[2], s[3], s[1]) in found]
    header = ["", *(f"product: {n}" for n in NETWORKS.values()), *(s[0] for s in solves)]
    lines = []
    for label, (product, solver) in LINES.items():
        cells = [_product(found, product, network) for network in NETWORKS]
        for _, network, metric, unit in solves:
            entry = found.get((TOP, solver, metric, unit, network))
            cells.append("" if entry is None else number(entry.p50))
        if any(cells):
            version = _version(found, product, solver)
            named = label.format(version) if "{}" in label else f"{label} {version}".rstrip()
            lines.append([named, *cells])
    text = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    return "\n".join([*text, *(f"| {' | '.join(line)} |" for line in lines)])


def _product(found: Table, name: str, network: str) -> str:
    entry = found.get(("hessian", name, "time per vector", "gradients", network))
    if entry is not None:
        return number(entry.p50)
    wrong = found.get(("hessian", name, "error in float64", "relative", network))
    return "" if wrong is None else f"not timed: off by {number(wrong.p50)} in float64"


def _version(found: Table, product: str, solver: str) -> str:
    if not product or product.startswith(("curvlab", "kept")):
        product = solver if solver.endswith("our product") else ""
    versions = [e.version for e in found.values() if e.contender == product and product]
    return versions[-1] if versions else ""


def _solves(found: Table) -> str:
    """How certified and uncertified lanczos stand to eigsh on the same product."""
    said = []
    for network, name in NETWORKS.items():
        of = [
            found.get((TOP, EIGSH, f"time over that of {who}", "ratio", network))
            for who in ("lanczos", "lanczos, uncertified")
        ]
        if of[0] is not None and of[1] is not None:
            figures = " and ".join(f"{number(1 / one.p50)}" for one in of if one is not None)
            said.append(f"{figures} of its time on the {name.partition(',')[0]}")
    if not said:
        return ""
    return (
        "Beside `eigsh` on the same product, set-up included, `lanczos` with and without its "
        f"certificate takes {'; '.join(said)}."
    )


def _spectra(rows: Sequence[Row]) -> str:
    own = [e for e in rows if e.subject == "conformance"]
    count = len({e.x for e in own if e.metric == "products"} - {"all spectra"})
    missed = {
        e.contender: f"{e.p50:.0f}"
        for e in own
        if (e.metric, e.unit, e.x) == ("silently wrong", "solves", "all spectra")
    }
    if not count or "lanczos" not in missed:
        return ""
    names = {"lanczos": "curvlab's `lanczos`", "scipy eigsh": "`eigsh`", "primme": "PRIMME"}
    told = ", ".join(f"{name} {missed[key]} times" for key, name in names.items() if key in missed)
    return f"On {count} prescribed spectra a wanted eigenvalue was missing without a word: {told}."


def _origin(own: Sequence[Row]) -> str:
    """Machine and revisions, and with how many threads everybody ran."""

    def each(words: Iterable[str]) -> str:
        return ", ".join(dict.fromkeys(words))

    told = []
    for subject, what in (("hessian", "products"), (TOP, "solves"), ("conformance", "spectra")):
        part = [entry for entry in own if entry.subject == subject]
        # rows of before samples were counted are of contenders that all had two threads
        threads = "two threads for everybody" if any(not e.samples for e in part) else ""
        if part:
            revisions = each(entry.commit or "unknown" for entry in part)
            told.append(f"{what} at {revisions}" + (f" ({threads})" if threads else ""))
    return (
        f"Measured on {each(map(machine_of, own))}; {', '.join(told)}; where nothing else is said, "
        "every contender with its best number of threads."
    )


def write(readme: Path, rows: Sequence[Row]) -> bool:
    """Put the block into the README; returns whether that changed it."""
    text = readme.read_text(encoding="utf-8")
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{readme} has no place for the comparison: {BEGIN} and {END}")
    new = head + block(rows) + tail
    if new != text:
        readme.write_text(new, encoding="utf-8")
    return new != text
