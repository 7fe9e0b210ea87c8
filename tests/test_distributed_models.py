"""Models that are wrapped or in shards: what torch 2.13 differentiates twice, and what is left."""

import logging

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from curvlab.distributed import (
    DataParallel,
    DifferenceHessian,
    Sharded,
    TensorParallelHessian,
    fill,
    launch,
)
from curvlab.eigen import lanczos
from curvlab.operators import Fisher, Hessian

pytestmark = pytest.mark.distributed

DTYPES = [torch.float32, torch.float64]


def network(dtype=torch.float32, seed=3, activation=nn.Tanh):
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), activation(), nn.Linear(8, 3)).to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.5 * torch.randn(p.shape, generator=generator, dtype=torch.float64))
    return model


def samples(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(20, 6, generator=generator, dtype=torch.float64).to(dtype)
    return inputs, torch.randint(3, (20,), generator=generator)


def own(group):
    return slice(0, 13) if group.rank == 0 else slice(13, 20)


def fully(model, mesh):
    from torch.distributed.fsdp import fully_shard

    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return model


def tensor_parallel(model, mesh):
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def refusal(call):
    try:
        call()
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def plain_and_wrapped(group, mesh):
    """Products of DDP and filled models beside a plain one, and what is said of the others."""
    inputs, targets = samples()
    mine = own(group)
    whole = Hessian(network(), cross_entropy, (inputs, targets))
    vector = torch.randn(whole.n, generator=torch.Generator().manual_seed(0))
    truth = whole @ vector

    def error(model):
        part = Hessian(model, cross_entropy, (inputs[mine], targets[mine]))
        return float((DataParallel(part) @ vector - truth).norm() / truth.norm())

    notes = []
    handler = logging.Handler()
    handler.emit = lambda record: notes.append(record.getMessage())
    logger = logging.getLogger("curvlab")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    found = {"ddp": error(nn.parallel.DistributedDataParallel(network())), "notes": list(notes)}
    logger.removeHandler(handler)
    sharded = fully(network(), mesh)
    found["filled"] = error(fill(network(seed=9), sharded))
    found["fsdp2"] = refusal(lambda: Fisher(sharded, cross_entropy, (inputs, targets)))
    split = tensor_parallel(network(), mesh)
    found["filled from tensor parallel"] = error(fill(network(seed=9), split))
    found["dtensor"] = refusal(lambda: Hessian(split, cross_entropy, (inputs, targets)))
    found["other model"] = refusal(lambda: fill(nn.Linear(6, 8), sharded))
    # the first derivative that FSDP2 has is right, the second is cut off
    parameters = list(sharded.parameters())
    loss = cross_entropy(sharded(inputs), targets)
    found["autograd"] = refusal(lambda: torch.autograd.grad(loss, parameters, create_graph=True))
    cross_entropy(sharded(inputs), targets).backward(create_graph=True)
    found["graph"] = any(p.grad.requires_grad for p in parameters)
    return found


def in_shards(group, mesh, dtype):
    """Errors of products whose parameters stay in shards, beside the plain Hessian's."""
    inputs, targets = samples(dtype)
    mine = own(group)
    whole = Hessian(network(dtype), cross_entropy, (inputs, targets))
    generator = torch.Generator().manual_seed(0)
    block = torch.randn(2, whole.n, generator=generator, dtype=torch.float64).to(dtype)
    truth = whole @ block

    def error(operator):
        return float((operator @ block - truth).norm() / truth.norm())

    split = tensor_parallel(network(dtype), mesh)
    sharded = fully(network(dtype), mesh)
    before = [p.detach().full_tensor().clone() for p in sharded.parameters()]
    share = inputs[mine], targets[mine]
    differences = DifferenceHessian(sharded, cross_entropy, share)
    found = {
        "tensor parallel": error(TensorParallelHessian(split, cross_entropy, (inputs, targets))),
        "in chunks": error(TensorParallelHessian(split, cross_entropy, (inputs, targets), chunk=7)),
        "differences": error(differences),
        "estimate": differences.error,
        "untouched": all(
            torch.equal(p.detach().full_tensor(), b)
            for p, b in zip(sharded.parameters(), before, strict=True)
        ),
        "no gradients": all(p.grad is None for p in sharded.parameters()),
        "zero": float((differences @ torch.zeros_like(block)).abs().max()),
    }
    if dtype == torch.float32:
        pairs = lanczos(Sharded(differences), 2, tol=1e-2)
        true = torch.linalg.eigvalsh(whole.dense())
        found["values"], found["true values"] = pairs.values, true
    return found


def refusals(group, mesh):
    inputs, targets = samples()
    mine = own(group)
    share = inputs[mine], targets[mine]
    sharded, split = fully(network(), mesh), tensor_parallel(network(), mesh)
    kinked = fully(network(activation=nn.ReLU), mesh)
    moved = tensor_parallel(network(), mesh)
    operator = TensorParallelHessian(moved, cross_entropy, (inputs, targets), chunk=7)
    with torch.no_grad():
        next(iter(moved.parameters())).mul_(2.0)
    return {
        "exact of fsdp2": refusal(lambda: TensorParallelHessian(sharded, cross_entropy, share)),
        "other data": refusal(lambda: TensorParallelHessian(split, cross_entropy, share)),
        "not needed": refusal(lambda: DifferenceHessian(network(), cross_entropy, share)),
        "chunks": refusal(lambda: DifferenceHessian(sharded, cross_entropy, share, chunk=7)),
        "kinks": refusal(lambda: DifferenceHessian(kinked, cross_entropy, share, step=1.0)),
        "strict": refusal(lambda: DifferenceHessian(sharded, cross_entropy, share, tolerance=1e-9)),
        "moved": refusal(lambda: operator @ torch.ones(operator.n)),
    }


def everything(group):
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (group.size,))
    return {
        "wrapped": plain_and_wrapped(group, mesh),
        "shards": {dtype: in_shards(group, mesh, dtype) for dtype in DTYPES},
        "refusals": refusals(group, mesh),
    }


@pytest.fixture(scope="module")
def found():
    return launch(everything, 2, timeout=90, patience=20)


def test_ddp_models_are_unwrapped_with_a_note(found):
    for one in found:
        assert one["wrapped"]["ddp"] < 1e-6
        note = "curvature uses the module inside DistributedDataParallel"
        assert note in one["wrapped"]["notes"]


def test_a_plain_model_is_filled_from_shards_and_gives_exact_products(found):
    for one in found:
        assert one["wrapped"]["filled"] < 1e-6
        assert one["wrapped"]["filled from tensor parallel"] < 1e-6
        assert "the two models have other parameters" in one["wrapped"]["other model"]


def test_what_a_model_in_shards_cannot_have_is_refused_with_the_cure(found):
    for one in found:
        said = one["wrapped"]
        assert "Hessian and GaussNewton take it as it is" in said["fsdp2"]
        assert "curvlab.distributed.fill(plain, model)" in said["fsdp2"]
        assert "curvlab.distributed.TensorParallelHessian" in said["dtensor"]


def test_the_hooks_of_fsdp2_have_no_second_derivatives_in_this_torch(found):
    for one in found:
        assert not one["wrapped"]["graph"], "FSDP2's hooks have second derivatives now"
        assert "not have been used in the graph" in one["wrapped"]["autograd"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensor_parallel_models_have_exact_products(found, dtype):
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-12}[dtype]
    for one in found:
        assert one["shards"][dtype]["tensor parallel"] < tolerance
        assert one["shards"][dtype]["in chunks"] < tolerance


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_differences_of_gradients_are_as_good_as_they_say_and_leave_the_model_alone(found, dtype):
    for one in found:
        shards = one["shards"][dtype]
        assert shards["differences"] <= shards["estimate"]
        assert shards["estimate"] < {torch.float32: 1e-3, torch.float64: 1e-8}[dtype]
        assert shards["untouched"]
        assert shards["no gradients"]
        assert shards["zero"] == 0.0


def test_a_solver_finds_the_pairs_of_a_model_that_stays_in_shards(found):
    for one in found:
        shards = one["shards"][torch.float32]
        largest = shards["true values"].abs().sort(descending=True).values[:2].double()
        assert torch.allclose(shards["values"].abs(), largest, rtol=1e-3)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("exact of fsdp2", "curvlab.Hessian takes it as it is"),
        ("other data", "rank 1 holds other data than rank 0"),
        ("not needed", "use Hessian or TensorParallelHessian, which are exact"),
        ("chunks", "rank 1 has 1 chunks of data and rank 0 has 2"),
        ("kinks", "the differences of gradients are off by about"),
        ("strict", "(tolerance 1.0e-09)"),
        ("moved", "the model's parameters have changed since this operator was made"),
    ],
)
def test_what_cannot_be_computed_well_is_refused_on_every_rank(found, name, text):
    for one in found:
        assert text in one["refusals"][name]
