"""FSDP2 models as they are: exact products block by block, and everything stays in shards."""

import functools
import traceback
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, linear, scaled_dot_product_attention

from curvlab.distributed import launch
from curvlab.distributed.divided import Divided, Placeholder
from curvlab.eigen import lanczos
from curvlab.operators import GaussNewton, Hessian
from curvlab.operators.own import own_copy
from curvlab.operators.products.sizing import LiveBytes
from curvlab.parameters import layout_of
from curvlab.probe import OperatorError
from tests.test_operators_block_habits import Penalised, penalised

pytestmark = pytest.mark.distributed

RANKS = [2, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (1, 3, 4))]
KINDS = {"Hessian": Hessian, "GaussNewton": GaussNewton}
WORDS, WIDTH, LENGTH, SAMPLES = 11, 6, 5, 9
BLOCKS = 16


class Layer(nn.Module):
    """Takes a mask by name and returns a tuple, as foreign layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inputs = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, 13), nn.Linear(13, WIDTH, bias=False)

    def forward(self, words: Tensor, *, mask: Tensor) -> tuple[Tensor, Tensor]:
        n, length, _ = words.shape
        split = self.inputs(self.norm(words)).view(n, length, 3, 2, WIDTH // 2)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(query, key, value, attn_mask=mask)
        words = words + mixed.transpose(1, 2).reshape(n, length, WIDTH)
        words = words + self.narrow(gelu(self.widen(words)))
        return words, words.mean(-1)


class Language(nn.Module):
    """Positions that belong to the model itself, one layer used twice, an end that may be tied."""

    def __init__(self, tied: str) -> None:
        super().__init__()
        self.tied = tied
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Parameter(0.3 * torch.randn(LENGTH, WIDTH))
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied == "module":
            self.head.weight = self.embed.weight
        if tied == "function":
            self.head = nn.Identity()  # type: ignore[assignment]
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())

    def forward(self, tokens: Tensor) -> Tensor:
        words, means = self.embed(tokens) + self.positions, 0.0
        for layer in [*self.layers, self.layers[0]]:
            words, more = layer(words, mask=self.mask)
            means = means + more
        words = self.norm(words)
        if self.tied == "function":
            logits = linear(words, self.embed.weight)
        else:
            logits = self.head(words)
        return (logits + torch.as_tensor(means)[..., None] ** 2).transpose(1, 2)


def language(tied: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return Language(tied).to(dtype).eval()


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Linear(LENGTH, 7), nn.Tanh(), nn.Linear(7, 3)]
    return nn.Sequential(*layers).to(dtype)


def tokens() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    shape = (SAMPLES, LENGTH)
    return tuple(torch.randint(WORDS, shape, generator=generator) for _ in range(2))  # type: ignore[return-value]


def vectors(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(SAMPLES, LENGTH, generator=generator, dtype=torch.float64)
    return inputs.to(dtype), torch.randint(3, (SAMPLES,), generator=generator)


def share(group: Any, data: Any) -> Any:
    """Uneven ones: the last rank has what is left, and every rank something."""
    start = group.rank
    stop = SAMPLES if group.rank == group.size - 1 else start + 1
    return tuple(tensor[start:stop] for tensor in data)


def fully(model: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in getattr(model, "layers", []):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def meshes(group: Any) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh

    found = {"one": init_device_mesh("cpu", (group.size,))}
    if group.size == 4:
        found["two"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return found


def off(operator: Any, plain: Any, seed: int = 3) -> float:
    """The distance of a block of products from those of the plain operator, relatively."""
    space = operator.vector_space
    generator = torch.Generator().manual_seed(seed)
    block = torch.randn(2, plain.n, generator=generator, dtype=torch.float64).to(plain.dtype)
    truth = plain @ block
    return float((space.gather(operator @ space.take(block)) - truth).norm() / truth.norm())


def products(group: Any) -> dict[Any, float]:
    found = {}
    for name, mesh in meshes(group).items():
        for tied in ("module", "function"):
            sharded = fully(language(tied), mesh)
            for kind, make in KINDS.items():
                plain = make(language(tied), cross_entropy, tokens())
                operator = make(sharded, cross_entropy, share(group, tokens()))
                found[kind, tied, name] = off(operator, plain)
                if tied == "module":
                    mine = share(group, tokens())
                    parts = make(sharded, cross_entropy, mine, chunk=2, check=False)
                    parts._keep = 0
                    found[kind, "rebuilt", name] = off(parts, plain)
                    gap = operator.vector_space.gather(operator.gradient()) - plain.gradient()
                    found[kind, "gradient", name] = float(gap.norm() / plain.gradient().norm())
                    found[kind, "loss", name] = abs(operator.loss / plain.loss - 1.0)
        for select in ("layers.1.*", "embed.*"):
            options = {"select": select, "check": False}
            plain = Hessian(language("module"), cross_entropy, tokens(), **options)
            operator = Hessian(sharded_of(mesh), cross_entropy, share(group, tokens()), **options)
            found["Hessian", select, name] = off(operator, plain)
    return found


def sharded_of(mesh: Any) -> nn.Module:
    return fully(language("module"), mesh)


def solve(group: Any) -> dict[str, Any]:
    model = fully(network(), meshes(group)["one"])
    before = [p.detach().full_tensor().clone() for p in model.parameters()]
    operator = Hessian(model, cross_entropy, share(group, vectors()))
    plain = Hessian(network(), cross_entropy, vectors())
    pairs = lanczos(operator, 3, tol=1e-8, dense=False)
    truth = torch.linalg.eigvalsh(plain.dense())
    return {
        "kind": type(operator).__name__,
        "is a Hessian": isinstance(operator, Hessian),
        "values": pairs.values,
        "truth": truth[truth.abs().sort(descending=True).indices[:3]],
        "complete": pairs.complete,
        "width": pairs.vectors.shape[1],
        "shard": operator.vector_space.width,
        "certificate": operator.certificate.passed,
        "untouched": all(
            torch.equal(p.detach().full_tensor(), b) and p.grad is None
            for p, b in zip(model.parameters(), before, strict=True)
        ),
    }


def peak(group: Any) -> float:
    """Bytes of one product at its worst, in units of the whole parameters."""
    torch.manual_seed(3)
    layers = [nn.Sequential(nn.Linear(96, 96), nn.Tanh()) for _ in range(BLOCKS)]
    model = fully(nn.Sequential(*layers), meshes(group)["one"])
    sample = torch.randn(1, 96), torch.zeros(1, dtype=torch.int64)
    operator = Hessian(model, cross_entropy, sample, check=False)
    operator._keep = 0
    shard = torch.ones(operator.vector_space.width)
    shard[operator.vector_space.held :] = 0.0
    with LiveBytes() as live:
        operator @ shard
    return live.peak / (4 * operator.n)


def leaves_a_tensor(group: Any) -> dict[str, Any]:
    """What is said of a block that leaves a tensor on itself, whose gradient is 0 at the point."""
    said = {}
    for name, used in {"used": True, "not used": False}.items():
        torch.manual_seed(0)
        model = fully(Penalised(outside=used).double(), meshes(group)["one"])
        before = [p.detach().full_tensor().clone() for p in model.parameters()]
        data = torch.randn(SAMPLES, 4, dtype=torch.float64), torch.arange(SAMPLES) % 3
        try:
            Hessian(model, penalised, share(group, data))
            said[name] = ""
        except OperatorError as error:
            said[name] = str(error)
        after = [p.detach().full_tensor() for p in model.parameters()]
        said[f"{name}: untouched"] = all(map(torch.equal, after, before))
    return said


def everything(group: Any) -> Any:
    try:
        return {
            "products": products(group),
            "solve": solve(group),
            "peak": peak(group),
            "left": leaves_a_tensor(group),
        }
    except Exception:
        return traceback.format_exc()


def test_weights_are_tied_in_the_copy_which_the_meta_device_would_untie() -> None:
    model = language("module")
    assert model.head.weight is model.embed.weight
    named = dict(model.named_parameters())
    pieces = [p.detach().reshape(-1) for p in named.values()]
    division = Divided(layout_of(named), pieces, SimpleNamespace(group=SimpleNamespace(size=1)))
    stand_ins = {name: Placeholder.of(division, i) for i, name in enumerate(named)}
    copied = own_copy(model, {**stand_ins, **dict(model.named_buffers())})
    assert copied.head.weight is copied.embed.weight
    moved = language("module").to("meta")
    assert moved.head.weight is not moved.embed.weight, "torch ties them again: say so in the guide"


@functools.cache
def everyone(ranks: int) -> Any:
    return launch(everything, ranks, timeout=300, patience=60)


@pytest.mark.parametrize("ranks", RANKS)
def test_products_gradient_and_loss_are_those_of_the_whole_model(ranks: int) -> None:
    for rank, found in enumerate(everyone(ranks)):
        assert not isinstance(found, str), f"rank {rank}: {found}"
        wrong = {name: error for name, error in found["products"].items() if not error < 1e-12}
        assert not wrong
        assert len(found["products"]) == 12 * (2 if ranks == 4 else 1)


@pytest.mark.parametrize("ranks", RANKS)
def test_a_solve_on_shards_is_certified_and_leaves_the_model_alone(ranks: int) -> None:
    for found in everyone(ranks):
        solved = found["solve"]
        assert solved["kind"] == "ShardedHessian"
        assert solved["is a Hessian"]
        assert torch.allclose(solved["values"], solved["truth"], rtol=1e-9)
        assert solved["complete"]
        assert solved["certificate"]
        assert solved["width"] == solved["shard"]
        assert solved["untouched"]


@pytest.mark.parametrize("ranks", RANKS)
def test_a_product_holds_its_share_of_the_vectors_and_a_few_times_one_block(ranks: int) -> None:
    for found in everyone(ranks):
        # gradient, images and result in shards; a block's parameters, direction, gradient, sums
        assert found["peak"] <= 4.0 / ranks + 6.0 / BLOCKS


@pytest.mark.parametrize("ranks", RANKS)
def test_a_tensor_left_for_use_outside_is_refused_where_its_gradient_is_0(ranks: int) -> None:
    for found in everyone(ranks):
        left = found["left"]
        assert "not leave a tensor on self" in left["used"]
        assert left["not used"] == ""
        assert left["used: untouched"]
        assert left["not used: untouched"]
