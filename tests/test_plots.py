"""Pictures are drawn from every result, hold what they should, and refuse what they cannot draw."""

import dataclasses

import pytest
import torch

from curvlab import Basis, LayerSpectra, plots, spectral_density
from curvlab.eigen import lanczos
from curvlab.metrics import Perturbation
from curvlab.training import Run


@pytest.fixture(scope="module")
def pairs():
    values = torch.tensor([-2.0, 3.0, 0.5, 0.2, 0.1, 0.05] + [0.0] * 24, dtype=torch.float64)
    frame, _ = torch.linalg.qr(
        torch.randn(30, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    )
    return lanczos(frame @ values.diag() @ frame.T, 5, dense=False, progress=False)


def run_of(tasks, seed=1):
    matrix = torch.full((tasks, tasks), float("nan"), dtype=torch.float64)
    for t in range(tasks):
        matrix[t, : t + 1] = torch.linspace(0.5, 0.9, t + 1, dtype=torch.float64)
    empty = torch.zeros(0)
    return Run(
        seed=seed, tasks=tuple(f"task {t}" for t in range(tasks)), train_loss=matrix,
        train_accuracy=matrix, test_loss=matrix, test_accuracy=matrix,
        task_accuracy=matrix, class_accuracy=matrix, initial=empty, snapshots=empty, buffers={},
        losses=[], notes=[], config={},
    )  # fmt: skip


def perturbation():
    radii = torch.logspace(-3, 3, 9)
    return Perturbation(radii, torch.rand(3, 9) + 1.0, torch.rand(4, 9) + 0.5, 0.3)


def figures(pairs):
    matrix = torch.diag(torch.arange(1.0, 31.0))
    late = dataclasses.replace(pairs, converged=torch.tensor([True] * 4 + [False]))
    return {
        "scree": plots.scree(pairs),
        "scree of two": plots.scree([pairs, late], ["before", "after"]),
        "density": plots.density(spectral_density(matrix, probes=3, steps=12)),
        "decades": plots.decades(
            spectral_density(matrix - 9.5 * torch.eye(30), probes=3, steps=12)
        ),
        "layers": plots.layers(LayerSpectra({"first": pairs, "second": pairs.head(2)})),
        "overlap": plots.overlap(plots.squared_cosines(pairs, pairs.vectors[:3])),
        "forgetting": plots.forgetting([run_of(3), run_of(3, 2)]),
        "perturbation": plots.perturbation(perturbation(), ["top"]),
    }


NAMES = (
    "scree", "scree of two", "density", "decades", "layers", "overlap", "forgetting",
    "perturbation",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_each_picture_is_written_as_png_and_as_vectors(name, pairs, tmp_path):
    figure = figures(pairs)[name]
    axes = figure.axes[0]
    assert axes.get_xlabel()
    assert axes.get_ylabel()
    assert axes.get_title()
    for path in plots.write(figure, *(tmp_path / f"p{suffix}" for suffix in plots.SUFFIXES)):
        head = path.read_bytes()[:600]
        assert b"\x89PNG" in head or b"<svg" in head or b"%PDF" in head
        assert path.stat().st_size > 3000
    assert len(list(tmp_path.iterdir())) == 3


def _ticks(axes):
    axes.figure.canvas.draw()
    low, high = axes.get_ylim()
    return [tick for tick in axes.get_yticks() if low <= tick <= high and tick > 0.0]


def test_scree_shows_every_value_with_its_residual(pairs):
    axes = plots.scree(pairs).axes[0]
    heights = {round(float(y), 9) for c in axes.collections for _, y in _offsets(c)}
    assert {round(v, 9) for v in pairs.values.tolist()} <= heights
    assert axes.get_yscale() == "symlog", "values of both signs over decades"
    zero, least = (axes.transData.transform((1, y))[1] for y in (0.0, min(_ticks(axes))))
    assert least - zero > 15, "labels around zero are apart"


def test_pairs_that_have_not_converged_are_hollow(pairs):
    late = dataclasses.replace(pairs, converged=torch.tensor([True] * 4 + [False]))
    labels = plots.scree(late).axes[0].get_legend_handles_labels()[1]
    assert "not converged" in labels


def test_squared_cosines_of_bases_results_and_rows_agree(pairs):
    basis = Basis(pairs.n, 5, dtype=torch.float64)
    basis.extend(pairs.vectors)
    expected = torch.eye(5, dtype=torch.float64)
    for other in (pairs, basis, pairs.vectors, 3 * pairs.vectors):
        torch.testing.assert_close(
            plots.squared_cosines(basis, other), expected, atol=1e-10, rtol=0
        )


def test_palette_is_one_that_colour_blind_readers_can_use():
    def lightness(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), parts, strict=True))

    first, second = (lightness(colour) for colour in plots.COLOURS[:2])
    assert abs(first - second) > 0.03, "the first two differ in grey, too"
    assert len(set(plots.COLOURS)) == len(plots.COLOURS) == len(plots.MARKERS)


def test_bad_input_is_refused_with_advice(pairs, tmp_path):
    with pytest.raises(ValueError, match="at least one Eigenpairs"):
        plots.scree([])
    with pytest.raises(ValueError, match=r"matrix \(k1, k2\); got \(3,\)"):
        plots.overlap(torch.zeros(3))
    with pytest.raises(ValueError, match="belong to different models"):
        plots.squared_cosines(torch.eye(3), torch.eye(4))
    with pytest.raises(TypeError, match="takes a Basis, Eigenpairs or rows"):
        plots.squared_cosines("a", "b")
    with pytest.raises(ValueError, match="at least one Run"):
        plots.forgetting([])
    with pytest.raises(ValueError, match="names a matrix of a Run"):
        plots.forgetting(run_of(2), "accuracy")
    with pytest.raises(ValueError, match=r"ends in \.png, \.svg, \.pdf; got 'x\.gif'"):
        plots.write(plots.scree(pairs), tmp_path / "x.gif")
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_the_extra_is_named(pairs, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"pip install 'curvlab\[plot\]'"):
        plots.scree(pairs)


def _offsets(collection):
    offsets = collection.get_offsets()
    return offsets if len(offsets) > 1 else []
