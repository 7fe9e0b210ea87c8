"""Operators, vectors and bases over ranks: the same numbers as in one process, however divided.

Processes are started once per number of ranks and run every case; the tests look at the results.
"""

import functools
import hashlib
import traceback

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from curvlab.basis import Basis
from curvlab.distributed import DataParallel, Sharded, Shards, launch, shard_width
from curvlab.eigen import Certify, Room, block_lanczos, lanczos, spectral_energy
from curvlab.operators import Dense, EmpiricalFisher, FromFunction, GaussNewton, Hessian
from curvlab.protection import protect
from curvlab.rows import Rows
from tests.small_problems import tanh_network

pytestmark = pytest.mark.distributed

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}
SAME = ("rows", "gram", "coefficients", "step", "projection", "protected step", "leak")
RANKS = [2, pytest.param(4, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)]
SIZES = [(1, 0), (7, 1), (64, 3), (65, 3), (128, 1), (1000, 17), (4097, 5)]  # n, rows


def data(widths, samples, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed + 100)
    inputs = torch.randn(samples, widths[0], generator=generator, dtype=dtype)
    return inputs, torch.randint(widths[-1], (samples,), generator=generator)


def cut(group, samples, seed):
    """A random division of the samples over ranks, uneven, some of the shares empty."""
    generator = torch.Generator().manual_seed(seed)
    cuts = torch.randint(samples + 1, (group.size - 1,), generator=generator)
    cuts = [0, *cuts.sort().values.tolist(), samples]
    return slice(cuts[group.rank], cuts[group.rank + 1])


def share(kind, model, loss, inputs, targets, where, **options):
    if where.start == where.stop:
        return None
    return kind(model, loss, (inputs[where], targets[where]), **options)


def distance(a, b):
    return float((a - b).norm() / b.norm().clamp_min(1e-300))


def bits(tensor):
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def symmetric(n, seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    q = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64)).Q
    spectrum = 10.0 * 0.85 ** torch.arange(n, dtype=torch.float64)
    spectrum[1::3] *= -1
    return ((q * spectrum) @ q.T).to(dtype)


# Cases: run on every rank, return numbers


def products(group):
    """Errors of data-parallel products, gradients and losses over shapes, losses and divisions."""
    found = {}
    weights = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)
    weighted = functools.partial(cross_entropy, weight=weights)

    def counted(batch):
        return float(weights[batch[1]].sum())

    cases = {
        "hessian": (Hessian, cross_entropy, torch.float32, {}),
        "hessian in float64": (Hessian, cross_entropy, torch.float64, {}),
        "sum": (Hessian, functools.partial(cross_entropy, reduction="sum"), torch.float64, {}),
        "class weights": (Hessian, weighted, torch.float64, {"count": counted}),
        "gauss-newton": (GaussNewton, cross_entropy, torch.float32, {}),
        "empirical fisher": (EmpiricalFisher, cross_entropy, torch.float64, {}),
        "short chunks": (Hessian, cross_entropy, torch.float32, {"chunk": 7}),
    }
    for seed, (name, (kind, loss, dtype, options)) in enumerate(cases.items()):
        widths = (5 + seed, 9, 3)
        model = tanh_network(widths, seed, dtype)
        inputs, targets = data(widths, 23 + 10 * seed, seed, dtype)
        whole = kind(model, loss, (inputs, targets), **options)
        part = share(kind, model, loss, inputs, targets, cut(group, len(inputs), seed), **options)
        parallel = DataParallel(part)
        vectors = torch.randn(
            3, whole.n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        ).to(dtype)
        product, again = parallel @ vectors, parallel @ vectors
        sharded = Sharded(parallel)
        space = sharded.vector_space
        single = parallel @ vectors[0]
        found[name] = {
            "dtype": dtype,
            "product": distance(product, whole @ vectors),
            "single": distance(single, whole @ vectors[0]),
            "sharded": distance(space.gather(sharded @ space.take(vectors)), whole @ vectors),
            "gradient": distance(parallel.gradient(), whole.gradient()),
            "loss": abs(parallel.loss - whole.loss) / abs(whole.loss),
            "repeats": torch.equal(product, again),
            "bits": bits(product),
            "passed": parallel.certificate.passed and parallel.layout == whole.layout,
        }
        before = group.traffic.messages
        parallel @ vectors
        found[name]["messages"] = group.traffic.messages - before
    return found


def kernels(group):
    """Errors of rows in shards against those on whole vectors in float64."""
    found = {}
    for dtype in TOLERANCE:
        for n, m in SIZES:
            generator = torch.Generator().manual_seed(n)
            m = min(m, n - 1)
            space = Shards(n, group)
            q = torch.linalg.qr(torch.randn(n, m + 1, generator=generator).double()).Q.T
            basis, vectors = q[:m], torch.randn(4, n, generator=generator).double()
            rows, held = Rows(space, m, dtype=dtype), space.take(basis.to(dtype))
            for index, row in enumerate(held):
                rows.put(index, row)
            rows.admit(m)
            rest = vectors - vectors @ basis.T @ basis
            taken = space.take(vectors.to(dtype))
            errors = [
                float((rows.coefficients(taken) - vectors @ basis.T).abs().max())
                / float(vectors.norm(dim=1).max()) if m else 0.0,
                distance(space.norm(taken), vectors.norm(dim=1)),
                distance(space.gather(taken).double(), vectors),
            ]  # fmt: skip
            one = taken[0].clone()
            _, length = rows.orthonormalise_(one)
            errors.append(distance(space.gather(one).double(), rest[0] / rest[0].norm()))
            errors.append(abs(float(length) / float(rest[0].norm()) - 1.0))
            block = taken[: min(3, n - m)].clone()
            kept = rows.orthonormalise_block_(block)
            together = space.gather(torch.cat([held, block])).double()
            errors.append(float((together @ together.T - torch.eye(m + len(block))).abs().max()))
            if m >= 2:
                start = 0.7 * basis[-1] + 0.3 * basis[-2] + rest[1]
                step = space.take(start.to(dtype))
                alpha, beta, _ = rows.lanczos_step_(step, 0.3)
                errors.append(distance(space.gather(step).double(), rest[1] / rest[1].norm()))
                errors.append(
                    abs(float(alpha) - 0.7) + abs(float(beta) / float(rest[1].norm()) - 1)
                )
            if m >= 3:  # nearly in the span of the rows: one pass would not do
                near = basis[0] + torch.finfo(dtype).eps ** 0.5 * rest[2] / rest[2].norm()
                hard, step = space.take(near.to(dtype)), space.take(near.to(dtype))
                rows.orthonormalise_(hard)
                rows.lanczos_step_(step, 0.0)
                both = rows.coefficients(torch.stack([hard, step]))
                errors.append(float(both.abs().max()))
            dependent = held[0].clone() if m else space.take(torch.zeros(n, dtype=dtype))
            zero = float(rows.orthonormalise_(dependent)[1])
            found[f"{dtype} {n} {m}"] = (dtype, max(errors), bool(kept.all()), zero)
    return found


def solvers(group):
    """Sharded solves beside whole ones: distances of values, spans and projectors."""
    found = {}
    for dtype in TOLERANCE:
        rounding, matrix = torch.finfo(torch.float64).eps, symmetric(300, 3, dtype)
        sharded, space = Sharded(Dense(matrix), group), Shards(300, group)
        function = FromFunction(lambda v, a=matrix: a @ v, 300, dtype=dtype)
        whole = lanczos(function, 6, tol=1e-5, dense=False)
        ours = {
            "lanczos": lanczos(sharded, 6, tol=1e-5),
            "restarted": lanczos(sharded, 6, tol=1e-5, room=Room(rows=20)),
            "explicit": lanczos(sharded, 6, tol=1e-5, certify=Certify(explicit=True)),
            "block": block_lanczos(sharded, 6, tol=1e-5),
            "warm": lanczos(sharded, 6, tol=1e-5, v0=space.take(whole.vectors)),
        }
        for name, pairs in ours.items():
            vectors = pairs.gather().vectors.double()
            true = (vectors @ matrix.double() - pairs.values[:, None] * vectors).norm(dim=1)
            found[f"{name} {dtype}"] = {
                "dtype": dtype,
                "values": distance(pairs.values, whole.values),
                "vectors": float((vectors - whole.vectors.double()).abs().max()),
                "honest": bool((true <= pairs.residuals + 64 * rounding * pairs.norm).all()),
                "complete": pairs.complete,
                "orthogonality": pairs.orthogonality,
                "products": (pairs.matvecs, whole.matvecs),
            }
        memory = Basis(Shards(300, group), 6, dtype=dtype)
        memory.extend(ours["lanczos"].vectors[:3])
        found_rows = ours["lanczos"].vectors[:3].contiguous()
        for name, deflate in (("basis", memory), ("rows", found_rows)):
            rest = lanczos(sharded, 3, tol=1e-4, deflate=deflate)
            found[f"deflated by {name} {dtype}"] = distance(rest.values, whole.values[3:])
    whole = spectral_energy(Dense(symmetric(300, 3)), 0.01, dense=False)
    ours = spectral_energy(Sharded(Dense(symmetric(300, 3)), group), 0.01)
    found["energy"] = (ours.k, whole.k, ours.total.value / whole.total.value - 1.0, ours.share)
    return found


def bases(group):
    """Sharded bases beside whole ones, for every storage, and the step of SGD-dagger."""
    found = {}
    shapes = [(3, 50), (7,), (11, 61), (1,)]
    n = sum(torch.Size(shape).numel() for shape in shapes)
    for dtype in (torch.float64, torch.float32, torch.float16, torch.int8):
        working = torch.float64 if dtype == torch.float64 else torch.float32
        generator = torch.Generator().manual_seed(5)

        def draw(*size, generator=generator, working=working):
            return torch.randn(*size, generator=generator, dtype=working)

        space = Shards(n, group)
        whole, ours = Basis(n, 12, dtype=dtype), Basis(space, 12, dtype=dtype)
        vectors = draw(8, n)
        vectors[5] = vectors[1] + vectors[2]  # dependent
        for part in (vectors[:4], vectors[4:]):
            kept = whole.extend(part, task="a"), ours.extend(space.take(part), task="a")
        parameters, gradients = [draw(*s) for s in shapes], [draw(*s) for s in shapes]
        momenta = [draw(*s) for s in shapes]
        copies, shard = [p.clone() for p in parameters], space.take_list(momenta)
        twice = [p.clone() for p in parameters]
        mine = space.sum_list(gradients, weight=1.0 / group.size)
        removed = whole.sgd_step_(parameters, gradients, momenta, 0.1, 0.01, 0.9)
        also = ours.sgd_step_(copies, gradients, [shard], 0.1, 0.01, 0.9)
        ours.sgd_step_(twice, [mine], [], 0.1)
        flat = torch.cat([p.flatten() for p in parameters])
        projected = [nn.Parameter(p) for p in parameters]
        for parameter, gradient in zip(projected, gradients, strict=True):
            parameter.grad = gradient.clone()
        ours.project_gradients_(projected)
        steps = []
        for basis in (whole, ours):
            moving = [nn.Parameter(p.clone()) for p in copies]
            optimizer = torch.optim.SGD(moving, lr=0.1, weight_decay=0.1)
            protect(optimizer, basis, gradients=True)
            for parameter, gradient in zip(moving, gradients, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
            steps.append(torch.cat([p.detach().flatten() for p in moving]))
        whole.project_out_(gradients)
        found[str(dtype)] = {
            "dtype": working,
            "kept": torch.equal(*kept),
            "rows": distance(space.gather(ours.rows()), whole.rows()),
            "gram": distance(ours.gram, whole.gram),
            "coefficients": distance(also, removed),
            "step": distance(torch.cat([c.flatten() for c in copies]), flat),
            "projection": distance(
                torch.cat([p.grad.flatten() for p in projected]),
                torch.cat([g.flatten() for g in gradients]),
            ),
            "protected step": distance(*steps),
            "leak": float((ours.leak(space.take(vectors)) - whole.leak(vectors)).abs().max()),
            "angles": float(ours.principal_angles(ours).max()),
            "certified": ours.orthogonality(recompute=True).passed,
            "bits": bits(torch.cat([t.flatten() for t in twice])),
            "segments": [s.task for s in ours.segments],
            "share": ours.whole[0].nbytes / whole.whole[0].nbytes,
        }
    return found


CASES = {case.__name__: case for case in (products, kernels, solvers, bases)}


def everything(group):
    found = {}
    for name, case in CASES.items():
        try:
            found[name] = case(group)
        except Exception:
            found[name] = traceback.format_exc()
    return found


@functools.cache
def brought_back(ranks):
    return launch(everything, ranks, timeout=60 + 30 * ranks, patience=30)


def results(case, ranks):
    found = [one[case] for one in brought_back(ranks)]
    for rank, answer in enumerate(found):
        assert not isinstance(answer, str), f"rank {rank}: {answer}"
    return found


@pytest.mark.parametrize("ranks", RANKS)
def test_products_do_not_depend_on_how_the_samples_are_divided(ranks):
    for name, found in results("products", ranks)[0].items():
        for figure in ("product", "single", "sharded", "gradient", "loss"):
            assert found[figure] <= TOLERANCE[found["dtype"]], (name, figure)
        assert found["passed"], name


@pytest.mark.parametrize("ranks", RANKS)
def test_every_rank_gets_the_same_bits_in_every_run_from_one_sum(ranks):
    everyone = results("products", ranks)
    for name, found in everyone[0].items():
        assert found["repeats"], name
        assert found["messages"] == 1, name
        assert all(other[name]["bits"] == found["bits"] for other in everyone), name


@pytest.mark.parametrize("ranks", RANKS)
def test_sharded_kernels_agree_with_whole_vectors_on_every_shape(ranks):
    for name, (dtype, error, kept, zero) in results("kernels", ranks)[0].items():
        assert error <= TOLERANCE[dtype], name
        assert kept, name
        assert zero == 0.0, name


@pytest.mark.parametrize("ranks", RANKS)
def test_sharded_solvers_find_the_pairs_of_whole_ones_in_as_many_products(ranks):
    for name, found in results("solvers", ranks)[0].items():
        if name == "energy":
            ours, whole, total, share_ = found
            assert ours == whole
            assert abs(total) < 1e-9
            assert share_ >= 0.99
        elif name.startswith("deflated"):
            assert found < 1e-4, name
        else:
            exact = found["dtype"] == torch.float64
            assert found["values"] <= (1e-9 if exact else 1e-6), name
            assert found["vectors"] <= 1e-4, name
            assert found["honest"], name
            assert found["complete"], name
            assert found["orthogonality"] <= (1e-13 if exact else 1e-6), name
            if name.startswith("lanczos"):  # the whole one made four more, to probe its operator
                assert found["products"][0] == found["products"][1] - 4, name


@pytest.mark.parametrize("ranks", RANKS)
def test_a_sharded_basis_projects_and_steps_like_a_whole_one(ranks):
    everyone = results("bases", ranks)
    for name, found in everyone[0].items():
        # a last bit may fall on either side where rows are rounded for storage
        tolerance = {"torch.float16": 2e-4, "torch.int8": 2e-3}.get(name, TOLERANCE[found["dtype"]])
        for figure in SAME:
            assert found[figure] <= tolerance, (name, figure)
        assert found["kept"], name
        assert found["certified"], name
        assert found["angles"] <= 1e-3, name
        assert found["segments"] == ["a"], name
        assert all(other[name]["bits"] == found["bits"] for other in everyone), name


@pytest.mark.parametrize("ranks", RANKS)
def test_a_rank_holds_its_share_of_the_basis(ranks):
    for found in results("bases", ranks):
        for name, one in found.items():
            assert one["share"] <= 1.0 / ranks + 64 / 829, name


def test_shards_are_whole_blocks_and_never_as_long_as_the_vector():
    for ranks in (1, 2, 3, 8):
        for n in (1, 63, 64, 65, 127, 128, 1000, 12345):
            width = shard_width(n, ranks)
            assert width % 64 == 0
            assert width * ranks >= n
            assert ranks == 1 or width != n


def test_another_run_on_as_many_ranks_gives_the_same_bits():
    again = launch(products, 2, timeout=120, patience=30)
    for name, found in results("products", 2)[0].items():
        assert again[0][name]["bits"] == found["bits"], name
