"""Before hours are spent: what a spectrum and a memory M of this model will take, and what fits.

    print(plan(model, cross_entropy, data, k=20, tasks=5, memory=8 * 10**9))

One batch is measured (or counted, on a model without memory) and scaled up; ``python -m
benchmarks.planner`` compares the result with what three networks really took. Assumptions: few
samples have as hard a spectrum as all of them, which a short search shows (a model that is only
counted: one that networks have, for which Lanczos needs about 4 products per pair); time grows
linearly with samples; several ranks divide the samples, the working basis and M evenly and overlap
nothing.
"""

from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from curvlab.batches import read
from curvlab.eigen.room import ASIDE, PASSING, Room, result_vectors, solve_bytes
from curvlab.operators import Curvature, Hessian, Objective
from curvlab.operators.products.free import free_bytes
from curvlab.operators.products.sizing import (
    FRAGMENTED,
    LIBRARIES,
    chunk_size,
    default_budget,
    fitting,
    operator_room,
    vector_bytes,
)
from curvlab.parameters import Selection
from curvlab.plan.cost import MACHINES, Machine, Unit, counted, measured
from curvlab.plan.formulae import (
    USUAL,
    Communication,
    Memory,
    communication,
    held_rows,
    mean_rows,
    memories,
    products_needed,
    talking_seconds,
)
from curvlab.rows.tiers import PIECE_BYTES

__all__ = ["MACHINES", "Machine", "Plan", "plan", "plan_counted"]


@dataclass(frozen=True, slots=True)
class Plan:
    """Bytes and seconds, per rank where there are several.

    Attributes:
        parameters: The operator's copy of the model; with the model itself where it is counted.
        data: The samples.
        graph: Kept graphs and the working memory of one product.
        solver: The working basis of Lanczos and its result.
        peak: All of these at once and what allocators and libraries add, on top of the model and
            data that are there already.
        asked: What has to be free for the solve to begin: it refuses if the rows that it may use do
            not all fit, however few products it turns out to need.
        products: With the operator, for one task.
        seconds: For one task: setup, products, orthogonalisation, communication.
        memories: The memory M of all tasks, by storage dtype.
        advice: What to change if it does not fit, or where it breaks first.
    """

    n: int
    samples: int
    k: int
    tasks: int
    ranks: int
    available: int
    parameters: int
    data: int
    graph: int
    solver: int
    peak: int
    asked: int
    chunks: int
    kept_chunks: int
    products: int
    setup_seconds: float
    product_seconds: float
    orthogonalise_seconds: float
    communication_seconds: float
    seconds: float
    memories: tuple[Memory, ...]
    traffic: Communication
    largest_k: int
    advice: tuple[str, ...]
    how: str

    @property
    def fits(self) -> bool:
        return max(self.peak, self.asked) <= self.available

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "fits": self.fits}

    def __str__(self) -> str:
        lines = [
            f"n = {self.n:,} parameters, {self.samples:,} samples, k = {self.k}, "
            f"{self.tasks} task(s), {self.ranks} rank(s); {self.how}",
            f"  parameters            {_bytes(self.parameters)}",
            f"  data                  {_bytes(self.data)}",
            f"  graph                 {_bytes(self.graph)}   {self.chunks} chunk(s), "
            f"{self.kept_chunks} kept",
            f"  solver's rows         {_bytes(self.solver)}",
            f"  peak                  {_bytes(self.peak)}   "
            f"{'fits' if self.fits else 'does not fit'} {_bytes(self.available).strip()}",
            f"  products              {self.products:>10}   {self.product_seconds:.3g} s each",
            f"  time per task         {_seconds(self.seconds):>10}   setup "
            f"{_seconds(self.setup_seconds)}, orthogonalising "
            f"{_seconds(self.orthogonalise_seconds)}"
            + (f", communication {_seconds(self.communication_seconds)}" if self.ranks > 1 else ""),
        ]
        lines += [
            f"  M in {memory.dtype:<8}         {_bytes(memory.bytes)}   "
            f"{'fits' if memory.fits else 'does not fit'}; room for {memory.rows_that_fit} rows"
            for memory in self.memories
        ]
        if self.ranks > 1:
            lines.append(
                f"  sent by each rank     {_bytes(int(self.traffic.product))} per product, "
                f"{_bytes(int(self.traffic.step)).strip()} per SGD-dagger step; "
                f"{self.traffic.messages} messages per product and step of the solver"
            )
        lines += [f"  -> {line}" for line in self.advice]
        return "\n".join(lines)


def plan(
    model: nn.Module,
    loss: Any,
    data: Any,
    *,
    k: int = 10,
    tol: float = 1e-3,
    tasks: int = 1,
    memory: int | None = None,
    curvature: type[Curvature] = Hessian,
    ranks: int = 1,
    bandwidth: float | None = None,
    room: Room = USUAL,
    **options: Any,
) -> Plan:
    """Plan ``lanczos(curvature(model, loss, data), k)`` and a memory of ``tasks * k`` rows.

    Args:
        model: As for the operator.
        loss: As for the operator.
        data: As for the operator.
        k: Pairs per task; 0 for one product alone.
        tol: Relative residual.
        tasks: How many times ``k`` rows go into M.
        memory: Bytes that are available (per rank); by default what is free.
        curvature: The operator.
        ranks: Processes that divide samples and rows among them.
        bandwidth: Bytes per second between ranks.
        room: Room for the solver's rows, as ``lanczos`` takes it.
        **options: Options of the operator.
    """
    batches = read(data, bare=loss is None or isinstance(loss, Objective))
    device = next(model.parameters()).device
    available = free_bytes(device) if memory is None else memory
    samples, budget = batches.samples or 1, options.get("budget")
    # an operator chooses its engine by what it may take: here as it will there
    given = {**options, "budget": default_budget(available) if budget is None else budget}
    unit = measured(curvature, model, loss, batches, given, k, tol, room)
    probed = bool(options.get("check", True))
    speed = bandwidth or 1e9
    return scaled(unit, samples, k, tol, tasks, available, ranks, speed, budget, room, probed)


def plan_counted(
    model: nn.Module,
    loss: Any,
    batch: Any,
    *,
    samples: int,
    machine: Machine,
    k: int = 10,
    tol: float = 1e-3,
    tasks: int = 1,
    memory: int | None = None,
    ranks: int = 1,
    bandwidth: float | None = None,
    select: Selection = None,
) -> Plan:
    """The same for a model on the meta device and a machine that is not here: nothing is run.

    Args:
        batch: One batch, for its shapes.
        samples: How many the curvature is to be taken on.
        machine: One of :data:`MACHINES`, or your own figures.
    """
    unit = counted(model, loss, batch, machine, select=select)
    available = machine.memory if memory is None else memory
    return scaled(unit, samples, k, tol, tasks, available, ranks, bandwidth or machine.link)


def scaled(
    unit: Unit,
    samples: int,
    k: int,
    tol: float,
    tasks: int,
    available: int,
    ranks: int,
    bandwidth: float,
    budget: float | None = None,
    room: Room = USUAL,
    probed: bool = True,
) -> Plan:
    """A plan from the cost of one product.

    ``budget`` is the operator's, if it is given one; ``probed`` says whether it is checked when it
    is made, which holds several vectors.
    """
    if not 0 <= k <= unit.n:
        raise ValueError(f"k= is between 0 (one product) and n = {unit.n}; got {k}")
    own = -(-samples // ranks)
    products = min(products_needed(k, tol, unit.effort), unit.n + 4) if k else 1
    vector, made = _vector(unit, ranks), result_vectors(k, unit.element)
    held = held_rows(k, products, unit.n, vector, room) if k else 0
    solver = solve_bytes(held, made, vector) if k else 0
    long = -(-unit.n // ranks) if unit.blocks else unit.n  # elements of a vector on a rank
    data = int(unit.sample_bytes * own)
    given = default_budget(available) if budget is None else budget
    own_room = operator_room(given, data, unit.held, long, unit.element, probed)
    # The operator does not know of the solver's rows, which are one piece of memory and do not
    # fragment: where they need more, it must be told. The vectors of its checks are gone by then.
    beside = (available - LIBRARIES - solver) / FRAGMENTED - data - unit.held - 8 * long
    left = min(own_room, beside) if k else own_room
    size, kept, chunks = _chunks(unit, own, left)
    working = max(0.0, unit.graph.peak(size) - unit.graph.kept(size))
    graph = int(kept * unit.graph.kept(size) + working)
    if kept < chunks:
        graph += int(unit.graph.kept(size))
    rebuilt = 1.0 - kept / chunks
    product = chunks * unit.product[0] + own * unit.product[1] * (1.0 + 0.5 * rebuilt)
    setup = unit.setup[0] + own * unit.setup[1]
    rows = mean_rows(k, products, unit.n, vector, room) if k else 0.0
    orthogonalise = products * (rows * unit.row / ranks + unit.step) if k else 0.0
    traffic = communication(unit.n, tasks * k, ranks, unit.element, unit.blocks)
    sent = traffic.product + communication(unit.n, round(rows), ranks, 8).orthogonalise
    talking = products * talking_seconds(sent, traffic.messages, ranks, bandwidth)
    seconds = setup + products * product + orthogonalise + talking
    # A check, a search and a result are made one after the other; the graph's figure has a
    # product's image in it, and several chunks' images are added in float64. A solve checks an
    # operator that was not checked when it was made.
    known, total = unit.held + data + graph, 8 * long if chunks > 1 else 0
    own_vectors = vector_bytes(long, unit.element, probed or k > 0) - 8 * long
    moments = [
        FRAGMENTED * (known + total) + own_vectors,
        FRAGMENTED * (known + total) + (held + PASSING) * vector,
        FRAGMENTED * (known - working) + (held + made + ASIDE) * vector,
    ]
    peak = int(max(moments[: 3 if k else 1])) + LIBRARIES
    asked = _asked(unit, k, data, made, vector, room)
    same = left == own_room or _chunks(unit, own, own_room) == (size, kept, chunks)
    told = None if same else int(given - FRAGMENTED * (own_room - left))
    most = _largest_k(unit, available, data, ranks, tol)
    found = memories(unit.n, tasks * k, max(1, available - unit.held), ranks)
    return Plan(
        n=unit.n,
        samples=samples,
        k=k,
        tasks=tasks,
        ranks=ranks,
        available=available,
        parameters=unit.held,
        data=data,
        graph=graph,
        solver=solver,
        peak=peak,
        asked=asked,
        chunks=chunks,
        kept_chunks=kept,
        products=products,
        setup_seconds=setup,
        product_seconds=product,
        orthogonalise_seconds=orthogonalise,
        communication_seconds=talking,
        seconds=seconds,
        memories=tuple(found),
        traffic=traffic,
        largest_k=most,
        advice=tuple(
            _advice(unit, available, peak, most, found, told)
            if peak > available or asked <= available
            else [f"the solve would not begin with its usual rows: room=Room(rows={held})"]
        ),
        how=unit.how,
    )


def _chunks(unit: Unit, samples: int, room: float) -> tuple[int, int, int]:
    """Samples of a chunk, chunks whose graphs are kept, chunks: as the operator chooses them."""
    if unit.graph.peak(unit.least) > room:  # it does not fit at all: say what the least takes
        return unit.least, 0, -(-samples // unit.least)
    size = min(unit.size, samples) or chunk_size(samples, unit.graph, room)
    chunks = -(-samples // size)
    return size, fitting(unit.graph, size, room, chunks), chunks


def _asked(unit: Unit, k: int, data: int, made: int, vector: int, room: Room) -> int:
    """Bytes without which a solve does not begin: no graph is kept yet, and any row may be used."""
    rows = held_rows(k, unit.n, unit.n, vector, room) if k else 0
    held = solve_bytes(rows, made, vector) if k else 0
    return int(FRAGMENTED * (unit.held + data)) + LIBRARIES + held


def _vector(unit: Unit, ranks: int) -> int:
    """Bytes of a working vector on a rank: a solver's are float32 at least."""
    return -(-unit.n // ranks) * max(4, unit.element)


def _largest_k(unit: Unit, available: float, data: int, ranks: int, tol: float) -> int:
    """The most pairs whose solve fits with one sample's graph; 0 if none does."""
    long = -(-unit.n // ranks) if unit.blocks else unit.n
    least = unit.held + data + unit.graph.peak(unit.least) + vector_bytes(long, unit.element)
    room = available - LIBRARIES - FRAGMENTED * least
    vector = _vector(unit, ranks)
    low, high = 0, unit.n
    while low < high:
        k = (low + high + 1) // 2
        products = min(products_needed(k, tol, unit.effort), unit.n + 4)
        held, made = held_rows(k, products, unit.n, vector), result_vectors(k, unit.element)
        begins = _asked(unit, k, data, made, vector, USUAL) <= available
        if begins and solve_bytes(held, made, vector) <= room:
            low = k
        else:
            high = k - 1
    return low


def _advice(
    unit: Unit, available: int, peak: int, most: int, found: list[Memory], told: int | None
) -> list[str]:
    lines = []
    if told is not None and peak <= available:
        lines.append(
            f"give the operator budget={told}: its usual share would leave the solver's rows too "
            "little"
        )
    if peak > available:
        if unit.held > available:
            lines.append("the parameters alone do not fit: split the model, or select= a part")
        elif unit.graph.peak(unit.least) + unit.held > available:
            lines.append("one sample's graph does not fit: GaussNewton, precision, or select=")
        elif most >= 1:
            lines.append(
                f"k = {most} fits; more pairs in turns of {most} with deflate=, or more --ranks"
            )
        else:
            lines.append(
                "the solver's rows do not fit beside one sample's graph: room=Room(bytes=...) "
                "with fewer, Room(file=...) on a disk, or more ranks"
            )
    if not any(memory.fits for memory in found):
        lines.append("M fits in no storage dtype: MappedFile(folder) streams it from disk")
    elif not found[0].fits:
        narrow = next(memory.dtype for memory in found if memory.fits)
        lines.append(
            f"M fits as {narrow}, not as float32; MappedFile() keeps float32, and so does "
            f"PinnedHost() beside a GPU, in {_bytes(found[0].bytes).strip()} of locked host memory "
            f"and {_bytes(2 * PIECE_BYTES).strip()} at most of the GPU's"
        )
    return lines


def _bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:7.2f} {unit}"
    return f"{count:7d} B "


def _seconds(count: float) -> str:
    if count >= 7200:
        return f"{count / 3600:.1f} h"
    return f"{count / 60:.1f} min" if count >= 120 else f"{count:.2g} s"
