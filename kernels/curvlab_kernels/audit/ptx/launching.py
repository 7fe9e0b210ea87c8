"""Run Triton kernels from the PTX that they compile to, on tensors in host memory."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from curvlab_kernels._triton.launch import Launch, handed_to
from curvlab_kernels.audit.ptx.memory import GlobalMemory
from curvlab_kernels.audit.ptx.movement import order_counts
from curvlab_kernels.audit.ptx.numbers import FLOATS
from curvlab_kernels.audit.ptx.program import Instruction, parse
from curvlab_kernels.audit.ptx.report import Fault, Report
from curvlab_kernels.audit.ptx.scheduler import LANES, LIMIT, TURNS, Executable

Order = Callable[[int], Iterable[int]]  # of the number of blocks
# Programs per axis, or a function of the kernel's arguments by name that gives them.
Grid = Sequence[int] | Callable[[dict[str, Any]], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A compiled kernel, ready to run."""

    code: Executable
    shared: int
    ptx: str


_loaded: dict[tuple[object, ...], Loaded] = {}


def execute(
    kernel: Any,
    grid: Grid,
    *arguments: Any,
    architecture: int = 80,
    reaches: Sequence[Tensor] = (),
    races: bool = True,
    order: Order | None = None,
    lanes: int = LANES,
    limit: int = LIMIT,
    **constants: Any,
) -> Report:
    """Compile a Triton kernel, execute its PTX on the CPU, and check what it does.

    Takes what ``kernel[grid](*arguments, **constants)`` takes, with tensors in host memory, which
    change as they would on the GPU. Raises :class:`Fault` for an access outside the tensors or
    not aligned, shared memory read before it is written, a race in shared or global memory, a
    barrier or a shuffle that a part of its threads does not reach; and
    :class:`UnknownInstruction` for PTX that the interpreter does not know (tensor cores, TMA,
    asynchronous copies).

    Args:
        kernel: A function under ``triton.jit``.
        grid: Programs along one to three axes, or a function of the arguments by name.
        architecture: Compute capability times ten: 80, 90 or 100.
        reaches: Tensors that the kernel finds by addresses in a table, not by its arguments.
        races: Look for races in global memory, which lists every access.
        order: Gives the order in which blocks run. By default all in ascending order; if what
            atomics return is used, again in two others (:data:`TURNS`), with the same results.
        lanes: Threads that run side by side, but blocks whose order is given or may matter run
            one by one.
        limit: Instructions that a thread may take; a kernel that takes more may never end.
        constants: Compile-time arguments and options such as ``num_warps``.
    """
    loaded, values, tensors, named = load(kernel, arguments, constants, architecture)
    spans = [_span(tensor) for tensor in (*tensors, *reaches) if tensor.numel()]
    spans += [(each.ctypes.data, each.nbytes) for each in loaded.code.program.tables.values()]
    x, y, z = _programs(grid(named) if callable(grid) else grid)
    memory, program = GlobalMemory(spans), loaded.code.program
    several = order is None and order_counts(program)
    options: dict[str, Any] = {
        "dynamic_shared": loaded.shared,
        "races": races,
        "lanes": lanes if order is None and not several else program.threads,
        "limit": limit,
    }
    run = partial(loaded.code.run, (x, y, z), values, memory, **options)
    found = memory.bytes() if several else []
    report = run(order=None if order is None else order(x * y * z))
    report.require_clean()
    if several:
        left, tensors = memory.bytes(), [*tensors, *reaches]
        results = [tensor.clone() for tensor in tensors]
        rounds = any(_adds_floats(each) for each in program.instructions)
        for name, turns in TURNS.items():
            memory.restore(found)
            run(turns=turns).require_clean()
            for first, second in zip(results, tensors, strict=True):
                _require_same(first, second, rounds, program.name, name)
        memory.restore(left)
    return report


def _adds_floats(instruction: Instruction) -> bool:
    parts = instruction.parts
    return parts[0] in ("atom", "red") and "add" in parts and parts[-1] in ("bf16", *FLOATS)


def _require_same(first: Tensor, second: Tensor, rounds: bool, kernel: str, turns: str) -> None:
    """Raise unless results in two orders are the same bits, or where atomics add floats, near."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[first.element_size()]
    differ = first.view(bits) != second.view(bits)
    if rounds and first.is_floating_point() and first.numel():
        a, b = first.double(), second.double()
        allowed = 64 * torch.finfo(first.dtype).eps * a.abs().nan_to_num(0, 0, 0).max()
        differ &= ~((a - b).abs() <= allowed) & ~(a.isnan() & b.isnan())
    if differ.any():
        raise Fault(
            f"{kernel}: the result depends on the order in which blocks or threads come to its "
            f"atomics: {int(differ.sum())} elements of a tensor of shape {tuple(first.shape)} are "
            f"others with {turns}. If each order is right, choose one by order="
        )


def execute_launch(launch: Launch, architecture: int = 80, **options: Any) -> Report:
    """:func:`execute` for a launch of this package; ``options`` are those of ``execute``.

    Bits of this package's kernels depend on nothing that a GPU decides: rounding counts as a fault.
    """
    report = execute(
        launch.kernel,
        (launch.programs,),
        *launch.arguments,
        architecture=architecture,
        reaches=launch.reaches,
        **options,
        **launch.constants,
        **launch.options,
    )
    for instruction, count in report.rounding.items():
        report.findings[f"lanes of a warp store sums that round otherwise: {instruction}"] += count
    report.require_clean()
    return report


@contextmanager
def executed(architecture: int = 80, **options: Any) -> Iterator[list[Report]]:
    """Within it this package's launches are executed from PTX; their reports are listed.

    ``options`` are ``races``, ``order`` and ``lanes`` of :func:`execute`.
    """
    reports: list[Report] = []
    with handed_to(lambda launch: reports.append(execute_launch(launch, architecture, **options))):
        yield reports


def load(
    kernel: Any, arguments: Sequence[Any], constants: dict[str, Any], architecture: int
) -> tuple[Loaded, list[int | float], list[Tensor], dict[str, Any]]:
    """The compiled kernel, the numbers it is called with, tensors among them, all by name.

    Arguments are bound by Triton itself, so that what is compiled is what a launch would compile.
    """
    if not hasattr(kernel, "_pack_args"):
        if hasattr(getattr(kernel, "fn", None), "arg_names"):  # under autotune or heuristics
            raise TypeError(
                f"{type(kernel).__name__} chooses compile-time arguments by running on a GPU: pass "
                f"kernel.fn, and one choice of them (BLOCK=..., num_warps=...)"
            )
        raise TypeError(
            f"expected a kernel under triton.jit, compiled and not interpreted (TRITON_INTERPRET "
            f"unset); got {type(kernel).__name__}"
        )
    backend, binder = _binder(kernel, architecture)
    bound, specialization, options = binder(*arguments, **constants)
    identity = (kernel, architecture, str(specialization), str(options))
    if identity not in _loaded:
        _loaded[identity] = _compile(
            kernel, backend, constants, bound, specialization, options, architecture
        )
    given = list(_passed(bound.values(), [kind for kind, *_ in specialization]))
    values = [each.data_ptr() if isinstance(each, Tensor) else each for each in given]
    loaded = _loaded[identity]
    # Triton adds pointers to scratch memory, which these kernels do not ask for.
    values += [0] * (len(loaded.code.program.parameters) - len(values))
    return loaded, values, [each for each in given if isinstance(each, Tensor)], dict(bound)


def _passed(values: Iterable[Any], kinds: Iterable[Any]) -> Iterator[Any]:
    """What is passed to the compiled kernel: all that is not a constant, of tuples each one."""
    for value, kind in zip(values, kinds, strict=True):
        if isinstance(value, tuple):
            yield from _passed(value, kind)
        elif kind != "constexpr":
            yield value


@lru_cache(maxsize=256)
def _binder(kernel: Any, architecture: int) -> tuple[Any, Any]:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    backend = make_backend(GPUTarget("cuda", architecture, 32))
    return backend, create_function_from_signature(kernel.signature, kernel.params, backend)


def _compile(
    kernel: Any,
    backend: Any,
    constants: dict[str, Any],
    bound: Any,
    specialization: Any,
    options: Any,
    architecture: int,
) -> Loaded:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    chosen, signature, constexprs, attributes = kernel._pack_args(
        backend, dict(constants), bound, specialization, options
    )
    source = ASTSource(kernel, signature, constexprs, attributes)
    target = GPUTarget("cuda", architecture, 32)
    compiled = triton.compile(source, target=target, options=chosen.__dict__)
    ptx = compiled.asm["ptx"]
    return Loaded(Executable(parse(ptx)), int(compiled.metadata.shared), ptx)


def _programs(grid: Sequence[int]) -> tuple[int, int, int]:
    if not 1 <= len(grid) <= 3 or min(grid) < 0:
        raise ValueError(f"a grid is one to three numbers of programs; got {tuple(grid)}")
    x, y, z = (*grid, 1, 1)[:3]
    return x, y, z


def _span(tensor: Tensor) -> tuple[int, int]:
    """First address and bytes from a tensor's first to its last element."""
    if not tensor.data_ptr():
        raise ValueError(
            f"tensors are executed on where they are, in host memory; one of shape "
            f"{tuple(tensor.shape)} on {tensor.device} has none: make it with device='cpu'"
        )
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return tensor.data_ptr(), (last + 1) * tensor.element_size()
