"""Compile a recorded launch for a GPU that is not there, and read what the compiler made of it."""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from curvlab_kernels._triton.launch import Launch
from curvlab_kernels.audit.address import address_errors

BASIS = "rows"  # what every kernel calls its pointer to the basis
WIDE = 128  # bits
# What kernels call their other long operands: those of vectors, not of sums and tables.
VECTORS = ("vectors", "vector", "target", "rest", "source", "values")
LONG = 1 << 20  # bytes


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel variant for one architecture.

    Attributes:
        basis_loads: Number of loads of the basis by width in bits, from PTX.
        local_accesses: Loads and stores of local memory in SASS: register spills.
        wide_loads: 128-bit (or wider) global loads in SASS.
        narrow: Long operands, aligned, that no access of 128 bits reads or writes, in words.
    """

    architecture: int
    registers: int
    stack: int
    shared: int
    basis_loads: dict[int, int]
    local_accesses: int
    wide_loads: int
    narrow: tuple[str, ...]
    ir: str

    def errors(self) -> list[str]:
        """What is wrong with the code itself; addresses are checked per launch."""
        found = list(self.narrow)
        if self.stack or self.local_accesses:
            found.append(
                f"registers spill: {self.stack} bytes of stack, "
                f"{self.local_accesses} accesses of local memory"
            )
        narrow = {bits: count for bits, count in self.basis_loads.items() if bits < WIDE}
        if narrow:
            listed = ", ".join(f"{count} of {bits} bits" for bits, count in sorted(narrow.items()))
            found.append(f"loads of the basis narrower than {WIDE} bits: {listed}")
        if self.wide_loads < sum(self.basis_loads.values()):
            found.append(
                f"{sum(self.basis_loads.values())} loads of the basis in PTX but only "
                f"{self.wide_loads} wide loads in SASS"
            )
        return found


def signature(launch: Launch) -> tuple[dict[str, str], dict[str, Any], tuple[int, ...]]:
    """Types by parameter, compile-time constants, and the parameters aligned to 16 bytes.

    The kernels specialise on nothing else, so this is what a launch would compile.
    """
    from triton._utils import canonicalize_dtype

    types: dict[str, str] = {}
    constants: dict[str, Any] = {}
    aligned = []
    for parameter in launch.kernel.params:
        name, number = parameter.name, parameter.num
        if parameter.is_constexpr:
            types[name] = "constexpr"
            constants[name] = launch.constants[name]
            continue
        value = launch.arguments[number]
        if isinstance(value, torch.Tensor):
            types[name] = "*" + canonicalize_dtype(value.dtype)
            if value.data_ptr() % 16 == 0:
                aligned.append(number)
        elif parameter.annotation_type:
            types[name] = parameter.annotation_type
        elif parameter.do_not_specialize:
            types[name] = "i32" if abs(value) < 2**31 else "i64"
        else:
            raise TypeError(
                f"kernel {launch.kernel.__name__} specialises on {name}: the audit would see one "
                "of several variants. List it in do_not_specialize"
            )
    return types, constants, tuple(aligned)


def key(launch: Launch) -> str:
    """Equal for launches that run the same machine code."""
    types, constants, aligned = signature(launch)
    return repr((launch.kernel.__name__, types, constants, aligned, launch.options))


def compile_launch(launch: Launch, architecture: int) -> Compiled:
    """Compile for ``sm_<architecture>`` with the tools in the triton wheel."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types, constants, aligned = signature(launch)
    attributes = {(number,): [["tt.divisibility", 16]] for number in aligned}
    source = ASTSource(launch.kernel, types, constants, attributes)
    target = GPUTarget("cuda", architecture, 32)
    kernel = triton.compile(source, target=target, options=dict(launch.options))
    sass, usage = _disassemble(kernel.asm["cubin"])
    resources = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if resources is None:
        raise RuntimeError(f"cuobjdump reported no resource usage: {usage!r}")
    pointers = [number for number, name in enumerate(_runtime(launch)) if name == BASIS]
    ptx = kernel.asm["ptx"]
    loads = accesses(ptx, pointers[0]) if pointers else {}
    return Compiled(
        architecture=architecture,
        registers=int(resources[1]),
        stack=int(resources[2]),
        shared=int(kernel.metadata.shared),
        basis_loads=loads,
        local_accesses=len(re.findall(r"\b(?:LDL|STL)\b", sass)),
        wide_loads=len(re.findall(r"\bLDG[\w.]*\.(?:128|256)\b", sass)),
        narrow=tuple(narrow_operands(launch, ptx, aligned)),
        ir=kernel.asm["ttir"],
    )


def addresses(launch: Launch, ir: str) -> list[str]:
    """Errors of 32-bit address arithmetic for one launch; none for kernels without a basis."""
    names = _runtime(launch)
    if BASIS not in names or not re.search(rf"%{BASIS}\b(?!:)", ir):
        return []
    values = [value if isinstance(value, int) else None for value in launch.arguments]
    # A float parameter is no pointer, but it has no interval either: an origin of its own is right.
    return address_errors(ir, names, values, launch.programs, BASIS)


def narrow_operands(launch: Launch, ptx: str, aligned: Sequence[int]) -> Iterator[str]:
    """Long operands that could be accessed 128 bits at a time and never are, in words.

    The last tile of a vector is masked, column by column, and so accessed element by element;
    all others are not. A tile with fewer columns than threads have loads leaves each of them less.
    A stride that 16 bytes do not divide leaves most vectors of a block unaligned: those are not
    looked at.
    """
    numbers = [parameter.num for parameter in launch.kernel.params if not parameter.is_constexpr]
    for position, name in enumerate(_runtime(launch)):
        tensor = launch.arguments[numbers[position]]
        if name not in VECTORS or numbers[position] not in aligned or tensor.nbytes < LONG:
            continue
        if tensor.ndim == 2 and len(tensor) > 1 and tensor.stride(0) * tensor.itemsize % 16:
            continue
        columns = launch.constants.get("BLOCK", WIDE * 1024)
        share = 8 * tensor.itemsize * columns // (32 * launch.options["num_warps"])
        for kind, what in (("ld", "loads"), ("st", "stores")):
            widths = accesses(ptx, position, kind)
            if widths and max(widths) < min(WIDE, share):
                listed = ", ".join(f"{count} of {bits} bits" for bits, count in widths.items())
                yield f"{what} of {name} narrower than {min(WIDE, share)} bits: {listed}"


def accesses(ptx: str, parameter: int, kind: str = "ld") -> dict[int, int]:
    """Global loads (or stores, ``"st"``) by width in bits, of addresses from a pointer parameter.

    Follows registers from the parameter through every instruction but loads, whose results are
    values and no longer addresses.
    """
    instructions = [_parse(line) for line in ptx.splitlines()]
    parsed = [instruction for instruction in instructions if instruction is not None]
    derived: set[str] = set()
    while True:
        before = len(derived)
        for operation, targets, sources, text in parsed:
            is_parameter = operation.startswith("ld.param") and f"_param_{parameter}]" in text
            loads = operation.startswith(("ld.", "cp.async"))
            if is_parameter or (not loads and derived.intersection(sources)):
                derived.update(targets)
        if len(derived) == before:
            break
    wanted = ("ld.global", "cp.async") if kind == "ld" else ("st.global",)
    widths: Counter[int] = Counter()
    for operation, _, _, text in parsed:
        if operation.startswith(wanted):
            address = set(re.findall(r"%\w+", "".join(re.findall(r"\[([^\]]*)\]", text))))
            if address & derived:
                widths[_width(operation, text)] += 1
    return dict(widths)


def _runtime(launch: Launch) -> list[str]:
    return [parameter.name for parameter in launch.kernel.params if not parameter.is_constexpr]


def _parse(line: str) -> tuple[str, list[str], list[str], str] | None:
    """Operation, registers written, registers read, and the text of a PTX instruction."""
    text = line.split("//")[0].strip()
    match = re.match(r"(?:@!?%\w+\s+)?([a-z][\w.:]*)\s+(.*);", text)
    if match is None:
        return None
    operation, operands = match[1], match[2]
    if operation.startswith(("st.", "bar", "bra", "ret")):
        return operation, [], re.findall(r"%\w+", operands), text
    target = re.match(r"\{([^}]*)\}|(%\w+(?:\|%\w+)?)", operands)
    if target is None:
        return operation, [], re.findall(r"%\w+", operands), text
    written = re.findall(r"%\w+", target[0])
    return operation, written, re.findall(r"%\w+", operands[target.end() :]), text


def _width(operation: str, text: str) -> int:
    if operation.startswith("cp.async"):
        size = re.search(r"\],\s*(?:0x)?(\w+)", text)
        return 8 * int(size[1], 16) if size else 0
    bits = int(re.findall(r"[a-z](\d+)$", operation)[0])
    vector = re.search(r"\.v(\d)\.", operation)
    return bits * (int(vector[1]) if vector else 1)


def _disassemble(cubin: bytes) -> tuple[str, str]:
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        tool = knobs.nvidia.cuobjdump.path
        command = [tool, "-sass", "-res-usage", path]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout, done.stdout + done.stderr
