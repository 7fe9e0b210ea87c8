"""PTX text as a list of instructions: the parser.

Only what a kernel's body needs is understood: one ``.entry``, register declarations (nested scopes
included, as inline assembly writes them), labels, shared arrays and instructions. Anything else
in the body is an error, because what is skipped would not be executed.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

BITS = {"pred": 1} | {f"{kind}{bits}": bits for kind in "bsuf" for bits in (8, 16, 32, 64)}
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\((.*?)\)(.*?)\{", re.DOTALL)
_LOCATION = re.compile(r"\.loc\s+\d+\s+(\d+)\s+\d+[^/]*(?://\s*([^\s:]+):(\d+))?")
_DECLARED = re.compile(r"\.reg\s+\.(\w+)\s+(.*)", re.DOTALL)
_SHARED = re.compile(r"(?:\.extern\s+)?\.shared\s+\.align\s+(\d+)\s+\.b8\s+([\w$]+)\[(\d*)\]")
_TABLE = re.compile(r"\.global\s+\.align\s+\d+\s+\.b8\s+([\w$]+)\[\d+\]\s*=\s*\{([^}]*)\}")
_LOCAL = re.compile(r"\.local\s+\.align\s+\d+\s+\.b8\s+([\w$]+)\[(\d+)\]")


CARRY = "%carry"  # a register of every program: what ``mad.cc`` leaves for ``madc``


class UnknownInstruction(NotImplementedError):
    """PTX that the interpreter does not know. It is never skipped."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction.

    Attributes:
        parts: The opcode at its dots: ``("ld", "global", "v4", "b32")``.
        operands: As written; a vector or an address is one operand.
        guard: The predicate register that must hold, and whether it is negated.
        text: As the compiler wrote it, before registers of inner scopes were renamed.
        source: ``file:line`` of the Triton source, where the compiler said so.
    """

    parts: tuple[str, ...]
    operands: tuple[str, ...]
    guard: tuple[str, bool] | None
    text: str
    source: str

    def __str__(self) -> str:
        return f"{self.text!r}" + (f" ({self.source})" if self.source else "")

    def unknown(self, why: str = "is not known to the interpreter") -> UnknownInstruction:
        return UnknownInstruction(f"{self} {why}; it is never skipped")


@dataclass
class Program:
    """A parsed kernel.

    Attributes:
        parameters: Name and type of each parameter, in order.
        threads: Threads of a block.
        labels: The index of the instruction that follows each label.
        registers: Number and type of each register; numbers are dense.
        arrays: Offset of each shared array; the dynamic one comes after the others. The one array
            of each thread's own (local) memory is at 0 of that.
        static_shared: Bytes of the shared arrays with a size.
        local: Bytes of a thread's own memory.
        tables: Constants in global memory, by name, as the compiler wrote them.
    """

    name: str
    parameters: list[tuple[str, str]]
    threads: int
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    registers: dict[str, tuple[int, str]] = field(default_factory=dict)
    arrays: dict[str, int] = field(default_factory=dict)
    static_shared: int = 0
    local: int = 0
    tables: dict[str, NDArray[np.uint8]] = field(default_factory=dict)

    @cached_property
    def read(self) -> set[str]:
        """The registers that some instruction reads."""
        texts = []
        for each in self.instructions:
            writes_first = each.operands and not each.operands[0].startswith("[")
            texts += [*each.operands[bool(writes_first) :], each.guard[0] if each.guard else ""]
        return set(re.findall(r"%[\w$@]+", " ".join(texts)))

    def register(self, name: str) -> tuple[int, str]:
        """Number and type of a register."""
        if name not in self.registers:
            raise ValueError(f"PTX of {self.name}: register {name} is not declared")
        return self.registers[name]


def parse(text: str) -> Program:
    """Read the one kernel in ``text``."""
    entries = list(_ENTRY.finditer(text))
    if len(entries) != 1:
        raise ValueError(f"expected PTX with one .entry; found {len(entries)}")
    entry = entries[0]
    threads = re.search(r"\.(?:req|max)ntid\s+(\d+)(?:\s*,\s*1)*\s*(?![\d,])", entry[3])
    if threads is None or int(threads[1]) % 32:
        raise ValueError(
            f"PTX of {entry[1]}: the interpreter needs .reqntid or .maxntid with one dimension, a "
            f"multiple of 32 threads; found {entry[3].strip()!r}"
        )
    program = Program(entry[1], _parameters(entry[2]), int(threads[1]))
    program.registers[CARRY] = 0, "pred"
    scopes = _Scopes(program)
    for statement, source in _statements(text[entry.end() :]):
        if statement == "{":
            scopes.enter()
        elif statement == "}":
            scopes.leave()
        elif statement.endswith(":"):
            program.labels[statement[:-1]] = len(program.instructions)
        elif statement.startswith(".reg"):
            scopes.declare(statement)
        elif statement.startswith(".shared"):
            pass  # read below, with those outside the body
        elif (local := _LOCAL.fullmatch(statement)) and not program.local:
            program.arrays[local[1]], program.local = 0, int(local[2])
        elif statement.startswith("."):
            if not statement.startswith(".pragma"):
                raise UnknownInstruction(f"directive {statement!r} in the body of {program.name}")
        else:
            program.instructions.append(_instruction(scopes.rename(statement), statement, source))
    _lay_out_shared(program, text)
    for name, listed in _TABLE.findall(text):
        program.tables[name] = np.array([int(each) for each in listed.split(",")], np.uint8)
    for instruction in program.instructions:
        if instruction.parts[0] == "bra" and instruction.operands[0] not in program.labels:
            raise ValueError(f"{instruction}: no such label")
    return program


def _parameters(text: str) -> list[tuple[str, str]]:
    found = []
    for part in filter(str.strip, text.split(",")):
        kind = re.search(r"\.param\s+\.([a-z]\d+)", part)
        if kind is None or "[" in part:
            raise UnknownInstruction(f"kernel parameter {part.strip()!r}")
        found.append((part.split()[-1], kind[1]))
    return found


def _statements(body: str) -> Iterator[tuple[str, str]]:
    """Statements up to the end of the body, each with its source; braces and labels are their own.

    A brace opens a scope where a statement may begin, and a vector operand elsewhere.
    """
    depth, begun, source = 1, "", ""
    for line in body.splitlines():
        location = _LOCATION.match(line.strip())
        if location is not None:
            source = f"{location[2]}:{location[3]}" if location[2] else f"line {location[1]}"
            continue
        for token in re.findall(r"[{};]|[^{};]+", line.split("//")[0]):
            label = re.match(r"\s*([\w$]+:)(?!:)\s*(.*)$", token) if not begun.strip() else None
            if label is not None:
                yield label[1], source
                token = label[2]
            if token in "{}" and token and not begun.strip():
                depth += 1 if token == "{" else -1
                if depth == 0:
                    return
                yield token, source
            elif token == ";":
                if begun.strip():
                    yield " ".join(begun.split()), source
                begun = ""
            else:
                begun += token
        begun += " "
    raise ValueError("the PTX ends within a body")


def _instruction(renamed: str, text: str, source: str) -> Instruction:
    match = re.match(r"(?:@(!?)(%?[\w$@]+)\s+)?([a-z][\w.:]*)\s*(.*)$", renamed)
    if match is None:
        raise UnknownInstruction(f"{text!r} is no instruction")
    guard = (match[2], match[1] == "!") if match[2] else None
    operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", match[4])
    parts = tuple(match[3].replace("::", ".").split("."))
    return Instruction(parts, tuple(each.strip() for each in operands), guard, text, source)


def _lay_out_shared(program: Program, text: str) -> None:
    dynamic = []
    for align, name, size in _SHARED.findall(text):
        if not size:
            dynamic.append(name)
            continue
        start = -(-program.static_shared // int(align)) * int(align)
        program.arrays[name] = start
        program.static_shared = start + int(size)
    program.static_shared = -(-program.static_shared // 16) * 16
    for name in dynamic:
        program.arrays[name] = program.static_shared


class _Scopes:
    """Register names: those of an inner scope get a name that no other scope has."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.open: list[tuple[int, set[str]]] = []
        self.opened = 0

    def enter(self) -> None:
        self.opened += 1
        self.open.append((self.opened, set()))

    def leave(self) -> None:
        self.open.pop()

    def declare(self, statement: str) -> None:
        match = _DECLARED.match(statement)
        if match is None or match[1] not in BITS:
            raise UnknownInstruction(f"declaration {statement!r}")
        for name in match[2].split(","):
            several = re.fullmatch(r"\s*([%\w$]+)<(\d+)>\s*", name)
            stem = several[1] if several else name.strip()
            names = [f"{stem}{i}" for i in range(int(several[2]))] if several else [stem]
            for each in names:
                if self.open:
                    self.open[-1][1].add(each)
                    each = f"{each}@{self.open[-1][0]}"
                self.program.registers[each] = len(self.program.registers), match[1]

    def rename(self, statement: str) -> str:
        if not self.open:
            return statement

        def renamed(word: re.Match[str]) -> str:
            for number, names in reversed(self.open):
                if word[0] in names:
                    return f"{word[0]}@{number}"
            return word[0]

        return re.sub(r"(?<![\w.%$])[%\w$]+(?![\w.])", renamed, statement)
