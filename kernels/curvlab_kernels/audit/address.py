"""Can a 32-bit number overflow on the way to an address of the basis?

Interval arithmetic over a kernel's Triton IR, for one recorded launch: the program id ranges over
its grid, integer arguments have their values, and every operation yields an interval. Where an
interval leaves the range of its type the value is *wrapped*, and so is all that is computed from
it. A wrapped offset that is added to a pointer into the basis is an error.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

_LIMITS = {bits: (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64)}
_SAME = {
    "tt.splat",
    "tt.expand_dims",
    "tt.broadcast",
    "tt.reshape",
    "tt.unsplat",
    "arith.extsi",
    "arith.extui",
    "arith.index_cast",
}
_DEFINITION = re.compile(r"^\s*(%[\w$.-]+)(?::\d+)?\s*=\s*\"?([\w.]+)\"?(.*)$")
_LOOP = re.compile(r"scf\.for (?:unsigned )?(%[\w$.-]+) = (%[\w$.-]+) to (%[\w$.-]+) step")
_CARRIED = re.compile(r"(%[\w$.-]+) = (%[\w$.-]+)")
_NAME = re.compile(r"%[\w$.-]+(?:#\d+)?")


@dataclass(frozen=True, slots=True)
class Value:
    """What is known of an IR value: an interval, why it may have wrapped, a pointer's origin."""

    low: int = _LIMITS[64][0]
    high: int = _LIMITS[64][1]
    wrapped: str = ""
    origin: str = ""


def address_errors(
    ir: str, names: Sequence[str], values: Sequence[int | None], programs: int, basis: str = "rows"
) -> list[str]:
    """Say how an address of the basis may be wrong; empty if it cannot.

    Args:
        ir: Triton IR (TTIR) of the kernel.
        names: The kernel's run-time parameters in order.
        values: The value of every integer parameter, ``None`` for others.
        programs: Size of the one-dimensional grid.
        basis: The parameter that points to the basis.
    """
    return _Analysis(names, values, programs, basis).run(ir)


class _Analysis:
    def __init__(
        self, names: Sequence[str], values: Sequence[int | None], programs: int, basis: str
    ) -> None:
        self.programs = programs
        self.basis = basis
        self.parameters = [
            Value(origin=name) if value is None else Value(value, value)
            for name, value in zip(names, values, strict=True)
        ]
        self.known: dict[str, Value] = {}
        self.errors: list[str] = []
        self.additions = 0

    def run(self, ir: str) -> list[str]:
        # A name belongs to a region and may return in the next one; the text defines it anew
        # before using it, so the latest definition is the right one.
        for line in ir.splitlines():
            text = line.split(" loc(")[0]
            if "tt.func" in text:
                self._arguments(line)
            elif match := _DEFINITION.match(text):
                self._define(match[1], match[2], match[3])
            elif loop := _LOOP.search(text):
                self._loop(loop, text)
            elif "scf.yield" in text and any(self._points_to_basis(x) for x in _NAME.findall(text)):
                self.errors.append(f"a pointer into {self.basis} leaves a branch: not analysed")
        if not self.additions:
            self.errors.append(f"no address of {self.basis} was found in the IR")
        return self.errors

    def _arguments(self, line: str) -> None:
        found = re.findall(r"(%[\w$.-]+): (!tt\.ptr|[if]\d+|bf16)", line)
        if len(found) < len(self.parameters):
            self.errors.append("the IR's parameters are not the kernel's: not analysed")
        for (name, _), value in zip(found, self.parameters, strict=False):
            self.known[name] = value

    def _points_to_basis(self, name: str) -> bool:
        return self.known.get(name, Value()).origin == self.basis

    def _loop(self, loop: re.Match[str], text: str) -> None:
        first, last = self.known[loop[2]], self.known[loop[3]]
        why = first.wrapped or last.wrapped
        self.known[loop[1]] = Value(first.low, max(first.low, last.high - 1), why)
        carried = text[text.find("iter_args(") :] if "iter_args(" in text else ""
        for name, start in _CARRIED.findall(carried):
            if self._points_to_basis(start):
                self.errors.append(f"a pointer into {self.basis} is carried by a loop")
            self.known[name] = Value(wrapped="carried by a loop: not analysed")

    def _define(self, name: str, operation: str, rest: str) -> None:
        if operation == "scf.for" and (loop := _LOOP.search(operation + rest)):
            self._loop(loop, rest)
            self.known[name] = Value(wrapped="result of a loop: not analysed")
            return
        operands = [self.known.get(operand, Value()) for operand in _NAME.findall(rest)]
        if operation == "tt.addptr":
            self.known[name] = self._add_to_pointer(operands, rest)
            return
        bits = re.findall(r"\bi(\d+)\b|xi(\d+)>", rest)
        width = int(next(filter(None, bits[-1]))) if bits else 0
        self.known[name] = self._evaluate(operation, rest, operands, width)

    def _add_to_pointer(self, operands: list[Value], rest: str) -> Value:
        pointer, offset = operands[:2]
        if pointer.origin == self.basis:
            self.additions += 1
            if offset.wrapped:
                self.errors.append(
                    f"offset into {self.basis}: {offset.wrapped}; in `{rest.strip()}`"
                )
        return Value(origin=pointer.origin)

    def _evaluate(self, operation: str, rest: str, operands: list[Value], width: int) -> Value:
        if operation == "arith.constant":
            number = re.search(r"(?:dense<)?(-?\d+)>? : ", rest)
            return Value(int(number[1]), int(number[1])) if number else Value()
        if operation == "tt.get_program_id":
            return Value(0, self.programs - 1)
        if operation == "tt.make_range":
            end, start = re.search(r"end = (\d+)", rest), re.search(r"start = (\d+)", rest)
            return Value(int(start[1]), int(end[1]) - 1) if end and start else Value()
        if operation in _SAME:
            return operands[0]
        if width not in _LIMITS:
            return Value()
        why = next((operand.wrapped for operand in operands if operand.wrapped), "")
        bounds = _interval(operation, operands)
        lowest, highest = _LIMITS[width]
        if bounds is None:
            unknown = "" if operation == "tt.load" else f"{operation} is not analysed"
            return Value(lowest, highest, why or unknown)
        if bounds[0] < lowest or bounds[1] > highest:
            why = why or f"{operation} reaches {max(bounds, key=abs):.3g} in {width} bits"
            return Value(lowest, highest, why)
        return Value(*bounds, why)


def _interval(operation: str, operands: list[Value]) -> tuple[int, int] | None:
    """The interval of an integer operation, or ``None`` if it is not known here."""
    if operation == "arith.trunci":
        return operands[0].low, operands[0].high
    if operation == "arith.select":
        return min(v.low for v in operands[1:]), max(v.high for v in operands[1:])
    if len(operands) < 2:
        return None
    a, b = operands[0], operands[1]
    ends = [(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
    if operation == "arith.addi":
        return a.low + b.low, a.high + b.high
    if operation == "arith.subi":
        return a.low - b.high, a.high - b.low
    if operation == "arith.muli":
        return min(x * y for x, y in ends), max(x * y for x, y in ends)
    if operation == "arith.minsi":
        return min(a.low, b.low), min(a.high, b.high)
    if operation == "arith.maxsi":
        return max(a.low, b.low), max(a.high, b.high)
    if operation == "arith.divsi" and a.low >= 0 and b.low >= 1:
        return a.low // b.high, a.high // b.low
    if operation == "arith.remsi" and a.low >= 0 and b.low >= 1:
        return 0, min(a.high, b.high - 1)
    return None
