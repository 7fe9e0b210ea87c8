"""What one product costs: measured on a few samples, or counted on a model without memory."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from curvlab_kernels import ops
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from curvlab.batches import Batches, map_tensors, rows, sample_count, tensors
from curvlab.eigen.lanczos import lanczos
from curvlab.eigen.room import Room
from curvlab.operators import Curvature, FromFunction
from curvlab.operators.objective import terms
from curvlab.operators.products.autograd import kept
from curvlab.operators.products.sizing import Cost, measure
from curvlab.parameters import Selection, call_with, layout_of, select_parameters
from curvlab.plan.formulae import USUAL, products_needed
from curvlab.refusals import Refusal, Trap

SMALL, LARGE = 4, 24  # samples of the two measurements
ROUNDS = 3
BUSY = 0.1  # share of other work from which on a plan mentions it
SCHEDULER = "/proc/thread-self/schedstat"  # Linux; the second number: ns that a thread waited
MEASURED_ROWS = 1 << 29  # bytes: planning must not take what the work is to have


@dataclass(frozen=True, slots=True)
class Unit:
    """Costs that grow with the samples: ``fixed + each * samples``.

    Attributes:
        n: Elements of a vector.
        element: Bytes of one.
        held: Bytes of parameters, buffers and what else the operator copies, without the data.
        sample_bytes: The bytes of the data, per sample.
        graph: Bytes of one chunk's graph.
        setup: Seconds to make the operator and its first product ``(fixed, each)``.
        product: Seconds of a product ``(fixed, each)``.
        row: Seconds to orthogonalise against one row.
        step: Seconds of a solver's step besides: bookkeeping and the small eigenproblem.
        effort: Products that this spectrum takes, in units of what networks take on average.
        how: Where the numbers come from.
        blocks: How many blocks a model in shards has, which are gathered one at a time; 0 for a
            model that every rank holds.
        size: Samples of a chunk where that is settled: by ``chunk=``, or by batches that are never
            cut; 0 where the operator cuts them as memory allows.
    """

    n: int
    element: int
    held: int
    sample_bytes: float
    graph: Cost
    setup: tuple[float, float]
    product: tuple[float, float]
    row: float
    step: float
    how: str
    effort: float = 1.0
    blocks: int = 0
    size: int = 0

    @property
    def least(self) -> int:
        """The fewest samples that are computed together."""
        return max(1, self.size)


def clock() -> float:
    """Seconds; they do not pass while this thread waits for a core that other work has.

    So a plan made on a busy machine says what a quiet one takes. Threads that help this one may be
    kept waiting too, and then it counts: with one thread the clock is exact. Only Linux says how
    long a thread waited; elsewhere this is a plain clock.
    """
    return time.perf_counter() - _waited()


def _waited() -> float:
    try:
        return 1e-9 * int(Path(SCHEDULER).read_text().split()[1])
    except OSError:
        return 0.0


def measured(
    kind: type[Curvature],
    model: nn.Module,
    loss: Any,
    batches: Batches,
    options: dict[str, Any],
    k: int,
    tol: float,
    room: Room = USUAL,
) -> Unit:
    """Make two small operators, multiply with them, and draw a line through what they took.

    A short search for ``k`` pairs of the larger one shows how hard its spectrum is.
    """
    began, waited = time.perf_counter(), _waited()
    most = batches.samples
    if most is None:
        raise ValueError("plan needs batches whose samples can be counted: cut them yourself")
    if options.get("chunk") == "batch":  # which has no smaller parts
        first = batches.first(None)
        small = large = sample_count(first) or 1
    else:
        large = min(most, LARGE)
        small = max(1, min(SMALL, large // 2))
        first = batches.first(large)
    try:
        kind(model, loss, [rows(first, slice(0, small))], **options)  # first use of everything
    except (AssertionError, LookupError, RuntimeError) as error:
        raise Refusal(
            f"{small} samples of a batch cannot be computed alone ({type(error).__name__}: "
            f'{error}). If samples are coupled, as the nodes of a graph are, pass chunk="batch"',
            Trap.COUPLED,
        ) from error
    # one after the other: two operators are not there at once
    less: tuple[float, float, Cost] | None = None
    if small < large:
        operator, setup, product = _timed(kind, model, loss, first, small, options)
        whole = operator.problem.whole
        less = setup, product, operator.cost if whole else Cost(0.0, 0.0, 0.0, 0.0)
        del operator
    operator, setup_large, product_large = _timed(kind, model, loss, first, large, options)
    setup_small, product_small, cost_small = less or (setup_large, product_large, operator.cost)
    problem, graph, size = operator.problem, operator.cost, 0
    if problem.whole:  # its cost is that of a batch
        kept = _line(small, cost_small.kept(1), large, graph.kept(1))
        graph = Cost(*kept, *_line(small, cost_small.peak(1), large, graph.peak(1)))
        size = -(-most // len(batches))
    elif isinstance(options.get("chunk"), int):
        size = min(most, options["chunk"])
    held = sum(t.nbytes for t in [*problem.named().values(), *problem.buffers.values()])
    data = sum(t.nbytes for t in tensors(first)) / large
    effort = _effort(operator, min(k, operator.n), tol, room) if k else 1.0
    row = _row_seconds(operator.n, operator.dtype, operator.device)
    step = _step_seconds(operator.dtype, operator.device)
    others = (_waited() - waited) / (time.perf_counter() - began)
    busy = f"; {others:.0%} of that time other work had the core, which is not counted"
    return Unit(
        n=operator.n,
        element=problem.parameters[0].element_size(),
        held=held,
        sample_bytes=data,
        graph=graph,
        setup=_line(small, setup_small, large, setup_large),
        product=_line(small, product_small, large, product_large),
        row=row,
        step=step,
        how=f"measured on {small} and {large} samples, {torch.get_num_threads()} thread(s)"
        + (busy if others > BUSY else ""),
        effort=effort,
        size=size,
    )


def _effort(operator: Curvature, k: int, tol: float, room: Room) -> float:
    """Products of a certified solve, predicted by a short one, in units of the formula's.

    The square root, and a quarter more for certification, are fitted to the small networks of
    :mod:`benchmarks.trained` at k = 5 and 20 (.9 to 1.3 of what was taken); on a fresh MLP with
    random data it was .6 to 1.7.
    """
    pairs = lanczos(
        operator,
        k,
        tol=tol,
        certify=False,
        max_products=2 * k + 10,
        dense=False,
        progress=False,
        room=room,
    )
    found = max(0.5, float(pairs.converged.sum()))
    return 1.25 * pairs.matvecs * math.sqrt(k / found) / products_needed(k, tol)


def _timed(
    kind: type[Curvature], model: nn.Module, loss: Any, batch: Any, size: int, options: Any
) -> tuple[Curvature, float, float]:
    began = clock()
    operator = kind(model, loss, [rows(batch, slice(0, size))], **options)
    vector = torch.ones(operator.n, dtype=operator.dtype, device=operator.device)
    _finish(operator @ vector)
    setup = clock() - began
    best = float("inf")
    for _ in range(ROUNDS):
        began = clock()
        _finish(operator @ vector)
        best = min(best, clock() - began)
    return operator, setup, best


def _row_seconds(n: int, dtype: torch.dtype, device: torch.device) -> float:
    count = max(1, min(8, MEASURED_ROWS // (n * dtype.itemsize)))
    basis = torch.zeros(count, ops.padded(n), dtype=dtype, device=device)
    for index in range(count):
        basis[index, index % n] = 1.0
    vector = torch.ones(n, dtype=dtype, device=device)
    best = float("inf")
    for _ in range(ROUNDS):
        began = clock()
        ops.orthonormalise_(basis, vector)
        _finish(vector)
        best = min(best, clock() - began)
    return best / count


def _step_seconds(dtype: torch.dtype, device: torch.device, n: int = 3000) -> float:
    """A solve with an operator that costs nothing."""
    values = torch.linspace(-1.0, 1.0, n, dtype=dtype, device=device) ** 9
    best = float("inf")
    for _ in range(2):
        began = clock()
        pairs = lanczos(
            FromFunction(lambda vector: values * vector, n, dtype=dtype, device=device),
            8,
            dense=False,
            max_products=40,
            progress=False,
        )
        best = min(best, (clock() - began) / max(1, pairs.matvecs))
    return best


def _line(small: int, at_small: float, large: int, at_large: float) -> tuple[float, float]:
    if large == small:
        return 0.0, at_large / large
    each = max(0.0, (at_large - at_small) / (large - small))
    return max(0.0, at_large - each * large), each


@dataclass(frozen=True, slots=True)
class Machine:
    """Peak float32 (or TF32) flop/s, bytes/s of its memory, bytes it has, bytes/s to neighbours."""

    flops: float
    bandwidth: float
    memory: int
    link: float


# Published figures of the makers; TF32 tensor cores without sparsity, NVLink for the link.
MACHINES = {
    "a100": Machine(156e12, 2.0e12, 80_000_000_000, 300e9),
    "h100": Machine(494e12, 3.35e12, 80_000_000_000, 450e9),
    "rtx4090": Machine(82e12, 1.0e12, 24_000_000_000, 32e9),
    "cpu": Machine(6e10, 1.0e10, 16_000_000_000, 1e9),
}
EFFICIENCY = 0.4  # share of the peak that dense layers reach; measured ones reach 0.3 to 0.7


def counted(
    model: nn.Module,
    loss: Any,
    batch: Any,
    machine: Machine,
    *,
    select: Selection = None,
) -> Unit:
    """Count the bytes and operations of a Hessian product on a model that has no memory.

    Args:
        model: Made with ``torch.device("meta")``, or any; nothing is computed.
        batch: A few samples, of which shapes and dtypes count.
        machine: Turns operations into seconds, at :data:`EFFICIENCY` of its peak.
    """
    chosen = select_parameters(model, select)
    layout = layout_of(chosen)
    whole = terms(loss).whole
    count = len(tensors(batch)[0])
    shaped = map_tensors(batch, lambda tensor: tensor.to("meta"))
    # swapped in by name, tied ones together: model.to("meta") would untie them
    everything = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    fixed = {f"model.{name}": t.detach().to("meta") for name, t in everything.items()}
    leaves = [fixed[f"model.{name}"].clone().requires_grad_() for name in chosen]

    def run(size: int) -> Callable[[], Tensor]:
        few = map_tensors(shaped, lambda t: resized(t, size))
        state = {**fixed, **dict(zip((f"model.{n}" for n in chosen), leaves, strict=True))}

        def value() -> Tensor:
            result: Tensor = call_with(_Loss(model, whole), state, (few,))
            return result

        product = kept(value, leaves, layout)
        one = torch.ones(1, layout.n, dtype=leaves[0].dtype, device="meta")
        return lambda: product(one)

    with evaluating(model), sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
        graph = measure(run, max(count, 8), 1e18)
        setup, product = in_seconds(run, machine)
    element = leaves[0].element_size()
    return Unit(
        n=layout.n,
        element=element,
        held=2 * sum(t.nbytes for t in everything.values()),  # the model, and its copy
        sample_bytes=sum(t.nbytes for t in tensors(batch)) / count,
        graph=graph,
        setup=setup,
        product=product,
        row=4 * layout.n * element / machine.bandwidth,  # two passes, each reads it twice
        step=5e-3,
        how=f"counted; {machine.flops:.0e} flop/s at {EFFICIENCY:.0%}, "
        f"{machine.bandwidth:.0e} bytes/s",
    )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


class _Loss(nn.Module):
    def __init__(self, model: nn.Module, whole: Callable[[nn.Module, Any], Tensor]) -> None:
        super().__init__()
        self.model, self.whole = model, whole

    def forward(self, batch: Any) -> Tensor:
        return self.whole(self.model, batch)


def in_seconds(
    run: Callable[[int], Callable[[], Tensor]], machine: Machine
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Seconds of set-up and of a product, ``(fixed, each)``, from counted operations."""
    flops = {size: _flops(run, size) for size in (2, 8)}
    rate = EFFICIENCY * machine.flops
    lines = (_line(2, flops[2][i] / rate, 8, flops[8][i] / rate) for i in (0, 1))
    setup, product = lines
    return setup, product


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts floating-point operations; torch's own counter hooks modules, which blocks do too."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0.0

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.count += formula(*args, **(kwargs or {}), out_val=result)
        return result


def _flops(run: Callable[[int], Callable[[], Tensor]], size: int) -> tuple[float, float]:
    with _Operations() as making:
        use = run(size)
    with _Operations() as using:
        use()
    return making.count, using.count


def resized(tensor: Tensor, size: int) -> Tensor:
    return tensor.new_empty((size, *tensor.shape[1:])) if tensor.dim() else tensor


def _finish(result: Tensor) -> None:
    if result.device.type == "cuda":
        torch.cuda.synchronize(result.device)
