"""The spectrum of every layer by itself: the diagonal blocks of a model's curvature."""

from dataclasses import dataclass

from curvlab.checks import shown, whole
from curvlab.eigen.lanczos import lanczos
from curvlab.eigen.progress import Progress
from curvlab.eigen.result import Eigenpairs
from curvlab.eigen.selection import Which
from curvlab.eigen.work import Interrupted
from curvlab.html import block, spark
from curvlab.operators import Operator, Restricted


@dataclass(frozen=True, slots=True, eq=False)
class LayerSpectra:
    """The outer eigenpairs of each layer's block, in the model's order.

    Attributes:
        layers: By the name of the module that owns the parameters (a weight and its bias are one
            layer); vectors have the layer's parameters only, in the model's order.
    """

    layers: dict[str, Eigenpairs]

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def products(self) -> int:
        """Products with the operator, all layers together."""
        return sum(pairs.matvecs for pairs in self.layers.values())

    def table(self) -> str:
        """One line per layer: its parameters, its values, and what is not certain about them."""
        width = max([5, *(len(name) for name in self.layers)])
        lines = [f"{'layer':<{width}}  {'parameters':>10}  eigenvalues"]
        for name, pairs in self.layers.items():
            values = "  ".join(f"{value:>11.5g}" for value in pairs.values.tolist())
            late = int((~pairs.converged).sum())
            notes = [f"{late} not converged"] if late else []
            notes += [] if pairs.complete else ["one may be missing"]
            note = f"  ({', '.join(notes)})" if notes else ""
            lines.append(f"{name:<{width}}  {pairs.n:>10}  {values}{note}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """In a notebook: a line for each layer, and the largest of each as bars."""
        rows = [
            [name, f"{pairs.n:,}", "  ".join(f"{value:.5g}" for value in pairs.values.tolist())]
            for name, pairs in self.layers.items()
        ]
        tops = [float(pairs.values[0]) for pairs in self.layers.values()]
        title = f"{len(self)} layers ({self.products} products)"
        return block(title, ["layer", "parameters", "eigenvalues"], rows, spark(tops))

    def __repr__(self) -> str:
        return f"LayerSpectra({len(self)} layers, {self.products} products)\n{self.table()}"


def layer_spectra(
    operator: Operator,
    k: int = 3,
    *,
    which: Which = "LM",
    tol: float = 1e-3,
    seed: int = 0,
    progress: bool | None = None,
) -> LayerSpectra:
    """The ``k`` outermost eigenpairs of each layer's diagonal block of ``operator``.

    Args:
        operator: A curvature of a model: it must know whose parameters its vectors hold.
        k: Pairs per layer; a layer of fewer parameters gives as many as it has.
        which: As for :func:`curvlab.lanczos`.
        tol: As for :func:`curvlab.lanczos`.
        seed: Of the random vectors.
        progress: Show a line on the terminal; by default when there is one.

    Raises:
        Interrupted: On Ctrl-C, with the layers that were finished.
    """
    [k] = whole(k=k)
    shown(progress)
    layout = getattr(operator, "layout", None)
    if layout is None:
        raise TypeError(
            f"{type(operator).__name__} does not say whose parameters its vectors hold: pass a "
            "Hessian, GaussNewton or Fisher of a model, or a sum of them"
        )
    found: dict[str, Eigenpairs] = {}
    names = list(layout.layers())
    line = Progress("layers", progress)
    try:
        for name in names:
            line.update(sum(pairs.matvecs for pairs in found.values()), len(found), len(names),
                        name, "layers")  # fmt: skip
            own = [full for full in layout.names if full.rpartition(".")[0] == name]
            block = Restricted(operator, layout.indices(own))
            found[name or ", ".join(own)] = lanczos(
                block, min(k, block.n), which=which, tol=tol, seed=seed, progress=False
            )
    except KeyboardInterrupt as stop:
        done = f"layers was interrupted after {len(found)} of {len(names)} layers"
        raise Interrupted(done, LayerSpectra(found) if found else None) from stop
    finally:
        line.close()
    return LayerSpectra(found)
