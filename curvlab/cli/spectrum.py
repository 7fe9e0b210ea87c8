"""``eig``, ``density``, ``trace`` and ``layers``: curvature of a model, to a file and a table."""

import shlex
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from curvlab.basis import Basis
from curvlab.cli.load import operator
from curvlab.cli.output import emit, say
from curvlab.cli.parser import UsageError
from curvlab.cli.results import load
from curvlab.cli.target import provenance, require_free
from curvlab.eigen import (
    Checkpoint,
    Eigenpairs,
    Estimate,
    Interrupted,
    eigenpairs_above,
    lanczos,
    layer_spectra,
    spectral_density,
    trace as estimate_trace,
)
from curvlab.operators import Curvature
from curvlab.rows.space import previous

Result = TypeVar("Result")


def eig(options: Namespace) -> int:
    """Top eigenpairs; a solve that Ctrl-C ends goes on with the same command."""
    out = _target(options.out)
    deflate = _directions(options.deflate)
    curvature = operator(options)
    require_free(options, out, "eigenpairs", curvature)
    partial = out.with_name(out.name + ".partial")
    most = options.max_products
    pairs = (
        _all_above(options, curvature)
        if options.above is not None
        else _kept(
            options,
            partial,
            lambda: lanczos(
                curvature,
                options.k,
                which=options.which,
                tol=options.tol,
                seed=options.seed,
                # a file takes a product, by which it knows the operator again
                max_products=None if most is None else most - 1,
                deflate=deflate,
                checkpoint=Checkpoint(partial, every=25),
                progress=options.progress,
            ),
        )
    )
    if pairs is None:
        return 1
    pairs.save(out, provenance(options, curvature))
    _forget(partial)
    pictures = _draw(options, "scree", pairs) if len(pairs) else []
    converged = bool(pairs.converged.all())
    emit(
        options,
        {
            "values": pairs.values.tolist(),
            "residuals": pairs.residuals.tolist(),
            "converged": pairs.converged.tolist(),
            "complete": pairs.complete,
            "doubt": pairs.doubt,
            "products": pairs.matvecs,
            "seconds": pairs.seconds,
            "reason": pairs.reason,
            "n": pairs.n,
            "engine": curvature.engine,
            "loss": curvature.loss,
            "file": str(out),
            "pictures": pictures,
        },
        _eig_text(pairs, curvature, out, pictures),
    )
    if not converged:
        say(options, f"not all pairs converged: {pairs.reason}", True)
    return 0 if converged else 1


def _all_above(options: Namespace, curvature: Curvature) -> Eigenpairs:
    """Every pair beyond ``--above``; Ctrl-C leaves nothing, for there is no part of all."""
    if options.which == "both" or options.deflate or options.max_products:
        raise UsageError(
            "--above goes with --which LM, LA or SA, not with --deflate, --max-products"
        )
    return eigenpairs_above(
        curvature,
        options.above,
        which=options.which,
        tol=options.tol,
        seed=options.seed,
        progress=options.progress,
    )


def density(options: Namespace) -> int:
    """Spectral density; vectors that were finished before a Ctrl-C are kept."""
    out = _target(options.out)
    curvature = operator(options)
    require_free(options, out, "density", curvature)
    partial = out.with_name(out.name + ".partial")
    found = _kept(
        options,
        partial,
        lambda: spectral_density(
            curvature,
            probes=options.probes,
            steps=options.steps,
            seed=options.seed,
            checkpoint=partial,
            progress=options.progress,
        ),
    )
    if found is None:
        return 1
    found.save(out, provenance(options, curvature))
    _forget(partial)
    pictures = _draw(options, "decades" if options.log else "density", found)
    moments = {power: found.moment(power) for power in (1, 2)}
    above = found.count_above(0.01, relative=True)
    nodes = found.nodes[found.weights > 0]
    low, high = float(nodes.min()), float(nodes.max())
    emit(
        options,
        {
            "n": found.n,
            "smallest": low,
            "largest": high,
            "trace": moments[1].value,
            "trace error": moments[1].error,
            "squares": moments[2].value,
            "squares error": moments[2].error,
            "above 1 %": above.value,
            "above 1 % error": above.error,
            "products": found.products,
            "file": str(out),
            "pictures": pictures,
        },
        "\n".join(
            [
                f"n                      {found.n}",
                f"Ritz values            {low:.6g} to {high:.6g}",
                f"trace                  {moments[1]}",
                f"sum of squares         {moments[2]}",
                f"above 1 % of the norm  {_count(above, found.n)}",
                f"products               {found.products}",
                f"file                   {out}",
                *(f"picture                {name}" for name in pictures),
            ]
        ),
    )
    return 0


def trace(options: Namespace) -> int:
    """Trace with its standard error; what was done before a Ctrl-C is kept."""
    curvature = operator(options)
    partial = Path(options.partial)
    found = _kept(
        options,
        partial,
        lambda: estimate_trace(
            curvature,
            probes=options.probes,
            seed=options.seed,
            checkpoint=partial,
            progress=options.progress,
        ),
    )
    if found is None:
        return 1
    _forget(partial)
    emit(
        options,
        {"trace": found.value, "error": found.error, "samples": found.samples, "n": curvature.n},
        f"trace {found} (n = {curvature.n}, {curvature.products} products)",
    )
    return 0


def layers(options: Namespace) -> int:
    """The outer eigenvalues of every layer."""
    found = layer_spectra(
        operator(options),
        options.k,
        which=options.which,
        tol=options.tol,
        seed=options.seed,
        progress=options.progress,
    )
    pictures = _draw(options, "layers", found)
    facts = {
        name: {"n": pairs.n, "values": pairs.values.tolist(), "complete": pairs.complete}
        for name, pairs in found.layers.items()
    }
    text = [found.table(), f"{found.products} products", *(f"picture {name}" for name in pictures)]
    emit(
        options,
        {"layers": facts, "products": found.products, "pictures": pictures},
        "\n".join(text),
    )
    late = {n: pairs for n, pairs in found.layers.items() if not bool(pairs.converged.all())}
    for name, pairs in late.items():
        say(options, f"{name}: not all pairs converged: {pairs.reason}", True)
    return 1 if late else 0


def _kept(options: Namespace, partial: Path, compute: Callable[[], Result]) -> Result | None:
    """What ``compute`` returns; ``None`` after a Ctrl-C, when it was said how to go on."""
    if partial.exists():
        say(options, f"resuming from {partial}")
    try:
        return compute()
    except Interrupted:
        again = shlex.join(["curvlab", *options.arguments])
        say(options, f"interrupted. What is done is kept; resume with: {again}", True)
        return None


def _count(estimate: Estimate, n: int) -> str:
    if estimate.told:
        return f"{estimate.value:.0f} ± {estimate.error:.0f}"
    most = estimate.value + 2 * estimate.error
    return f"at most {most:.0f}" if most < n else "not resolved: take more --steps"


def _forget(partial: Path) -> None:
    for file in (partial, previous(partial)):
        file.unlink(missing_ok=True)


def _eig_text(pairs: Eigenpairs, curvature: Curvature, out: Path, pictures: list[str]) -> str:
    known = f"complete (doubt {pairs.doubt:.0e})" if pairs.complete else "completeness not shown"
    lines = [
        pairs.table(),
        f"{pairs.reason}; {known}",
        f"{pairs.matvecs} products in {pairs.seconds:.1f} s ({curvature.engine}); loss "
        f"{curvature.loss:.6g}, {curvature.samples} samples, n = {pairs.n}",
        f"file    {out}",
        *(f"picture {name}" for name in pictures),
    ]
    return "\n".join(lines)


def _draw(options: Namespace, name: str, result: Any) -> list[str]:
    if not options.picture:
        return []
    from curvlab import plots

    return [str(path) for path in plots.write(getattr(plots, name)(result), *options.picture)]


def _target(name: str) -> Path:
    path = Path(name)
    if path.suffix != ".safetensors":
        raise UsageError(f"--out is a .safetensors file; got {name!r}")
    if path.is_dir():
        raise UsageError(f"--out {name} is a folder")
    return path


def _directions(name: str | None) -> Basis | Tensor | None:
    found = None if name is None else load(name, "basis", "eigenpairs")
    return found.vectors if isinstance(found, Eigenpairs) else found
