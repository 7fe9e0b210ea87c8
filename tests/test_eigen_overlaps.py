"""Partial reorthogonalisation: what full gives, with fewer reads; overlaps stay within bounds."""

import pytest
import torch

from curvlab.eigen import Checkpoint, Room, block_lanczos, lanczos
from curvlab.eigen.overlaps import SPREAD
from curvlab.eigen.products import Products
from curvlab.eigen.request import request
from curvlab.eigen.solver import Solver
from curvlab.operators import Dense
from curvlab.probe import OperatorError
from curvlab.rows.projector import Projector

FULL, PARTIAL = Room(orthogonalise="full"), Room(orthogonalise="partial")
ROUNDING = {torch.float64: 1e-13, torch.float32: 1e-5}


class Rotated:
    """A prescribed spectrum with eigenvectors that no coordinate is near to."""

    def __init__(self, values, dtype=torch.float64, change=None):
        generator = torch.Generator().manual_seed(0)
        self.n, self.device, self.dtype = len(values), torch.device("cpu"), dtype
        square = torch.randn(self.n, self.n, generator=generator, dtype=torch.float64)
        self.vectors = torch.linalg.qr(square).Q
        self.values = values.double()
        matrix = (self.vectors * self.values) @ self.vectors.T
        self.exact = (matrix + matrix.T) / 2
        self.matrix = self.exact.to(dtype)
        self.change, self.products = change, 0

    def __matmul__(self, vectors):
        self.products += 1 if vectors.ndim == 1 else len(vectors)
        image = vectors @ self.matrix.T
        return image if self.change is None else self.change(self.products, vectors, image)


def spectra():
    i = torch.arange(600, dtype=torch.float64)
    bulk = torch.linspace(-0.5, 1.0, 590, dtype=torch.float64)

    def above(*values):
        return torch.cat([torch.tensor(values, dtype=torch.float64), bulk[: 600 - len(values)]])

    return {
        "outliers": torch.cat([10 * torch.exp(-i[:30] / 8), 0.3 * (1 + i[:570]) ** -0.6]),
        "decaying": 0.9**i,
        "slowly decaying": 1 / (1 + i),
        "both signs": 5 * (1 + i) ** -0.5 * (1 - 2 * (i % 3 == 1).double()),
        "clusters": above(10, 10 + 1e-6, 10 + 2e-6, 5, 5 + 1e-8, 4, 3),
        "copies": above(10, 10, 10, 7, 7, 5, 4),
        "low rank": torch.cat([i[:12] + 1, torch.zeros(588, dtype=torch.float64)]),
    }


@pytest.fixture(scope="module", params=spectra())
def values(request):
    return spectra()[request.param]


@pytest.mark.parametrize("tol", [1e-3, 1e-6])
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_partial_finds_what_full_finds(values, dtype, tol):
    operator = Rotated(values, dtype)
    k = 12
    full, found = (lanczos(operator, k, tol=tol, room=room) for room in (FULL, PARTIAL))
    assert (found.outcome, found.complete) == (full.outcome, full.complete)
    if full.restarts == 0:
        assert abs(found.matvecs - full.matvecs) <= 1
    vectors = found.vectors.double()
    true = (vectors @ operator.exact - found.values.double()[:, None] * vectors).norm(dim=1)
    # matrix and residuals are rounded to the operator's dtype
    rounded = 4 * torch.finfo(dtype).eps * float(values.abs().max())
    assert bool((true <= found.residuals.double() * (1 + 1e-6) + rounded).all())
    gram = vectors @ vectors.T
    assert float((gram - torch.eye(k)).abs().max()) <= ROUNDING[dtype]
    assert found.orthogonality <= ROUNDING[dtype]
    if found.complete:
        wanted = values[values.abs().argsort(descending=True)[:k]].abs().sort().values
        error = (found.values.double().abs().sort().values - wanted).abs().max()
        assert float(error) <= float(found.residuals.max()) + rounded  # no second copies


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_overlaps_stay_within_bounds_and_the_decomposition_holds(values, dtype):
    operator = Rotated(values, dtype)
    products = Products(operator, None)
    certificate = products.probe(0)
    solver = Solver(products, request(products, 12, tol=1e-4, room=PARTIAL), certificate)
    solver.start(None)
    used = False
    while solver.outcome is None:
        solver.step()
        krylov = solver.krylov
        used |= krylov.overlaps.squares > 0
        rows, m = krylov.rows.rows().double(), krylov.multiplied
        between = rows @ rows.T - torch.eye(len(rows))
        assert float(torch.linalg.matrix_norm(between, 2)) <= SPREAD
        if solver.chain is not None:  # its rows overlap what is set aside
            continue
        known = krylov.coupling[: krylov.size, :m].T @ rows
        known += krylov.aside.coupling[:, :m].T @ krylov.aside.rows.double()
        rest = (rows[:m] @ operator.exact - known).norm(dim=1)
        assert float(rest.max()) <= solver.bounds.loss + krylov.lost
    assert used or dtype == torch.float32 or float(values[20]) == 0.0  # ends too early


def test_partial_reads_fewer_rows(monkeypatch):
    reads = {}
    plain = Projector.lanczos_step_

    def counted(self, vector, beta=None, *, near=False):
        reads[room] = reads.get(room, 0) + (2 if near else self.size)
        return plain(self, vector, beta, near=near)

    monkeypatch.setattr(Projector, "lanczos_step_", counted)
    removed, project = {}, Projector.project_out_

    def projected(self, vectors):
        removed[room] = removed.get(room, 0) + self.size
        return project(self, vectors)

    monkeypatch.setattr(Projector, "project_out_", projected)
    operator = Rotated(spectra()["slowly decaying"])
    for room in (FULL, PARTIAL):
        lanczos(operator, 12, room=room, certify=False)
    assert reads[PARTIAL] + removed[PARTIAL] < 0.6 * reads[FULL]


@pytest.mark.parametrize("tol", [1e-3, 1e-9])
def test_a_partial_solve_killed_anywhere_and_resumed_gives_the_same_bits(tol, tmp_path):
    values = spectra()["slowly decaying"]
    options = {"tol": tol, "room": Room(rows=52, orthogonalise="partial")}
    whole = lanczos(Rotated(values), 8, **options)

    def killed(at):
        def change(count, _, image):
            if count >= at:
                raise RuntimeError("killed")
            return image

        return change

    for at in range(12, whole.matvecs, 5):
        keeping = Checkpoint(tmp_path / f"{at}.safetensors", every=2)
        with pytest.raises(RuntimeError, match="killed"):
            lanczos(Rotated(values, change=killed(at)), 8, checkpoint=keeping, **options)
        resumed = lanczos(Rotated(values), 8, checkpoint=keeping, **options)
        assert torch.equal(resumed.vectors, whole.vectors), at
        assert torch.equal(resumed.residuals, whole.residuals), at


def noisy(count, _, image):
    generator = torch.Generator().manual_seed(count)
    noise = torch.randn(image.shape, generator=generator, dtype=image.dtype)
    return image + 1e-2 / image.shape[-1] ** 0.5 * noise


WRONG = {
    "asymmetric": lambda _, vectors, image: image + 3e-3 * vectors.roll(1, -1),
    "drifting": lambda count, _, image: image * (1 + 1e-3 * count),
    "noisy": noisy,
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_a_wrong_operator_is_refused_as_it_is_with_full(name, dtype):
    values = spectra()["slowly decaying"]

    def after_the_probe(count, vectors, image):
        return image if count <= 6 else WRONG[name](count, vectors, image)

    for room in (FULL, PARTIAL):
        with pytest.raises(OperatorError):
            lanczos(Rotated(values, dtype, after_the_probe), 12, room=room)


def test_values_that_may_pass_zero_are_searched_with_full():
    values = torch.linspace(0, 1, 400, dtype=torch.float64) ** 2
    operator = Dense(Rotated(values).exact)
    products = Products(operator, None)
    certificate = products.probe(0)
    asked = request(products, 5, which="SA", tol=1e-3, room=PARTIAL, max_products=80)
    solver = Solver(products, asked, certificate)
    solver.start(None)
    while solver.outcome is None:
        solver.step()
    assert solver.krylov.overlaps.squares == 0.0


def test_the_choice_is_checked_and_blocks_are_full():
    with pytest.raises(ValueError, match="orthogonalise"):
        Room(orthogonalise="half")
    operator = Rotated(spectra()["slowly decaying"])
    full, found = (block_lanczos(operator, 6, room=room) for room in (FULL, PARTIAL))
    assert torch.equal(full.vectors, found.vectors)
