"""Runs a program: which lanes go next, barriers, and what divergence means.

The lanes with the lowest instruction go first, so that those that took different ways meet again
where the ways join. A barrier releases a block when all its threads have arrived.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from curvlab_kernels.audit.ptx.instructions import step
from curvlab_kernels.audit.ptx.machine import WARP, Machine, Mask, Reader, Step, reader
from curvlab_kernels.audit.ptx.memory import GlobalMemory
from curvlab_kernels.audit.ptx.numbers import Array
from curvlab_kernels.audit.ptx.program import Instruction, Program
from curvlab_kernels.audit.ptx.races import AccessLog
from curvlab_kernels.audit.ptx.report import Fault, Report

LANES = 1 << 15  # in one batch: arrays that a core's cache holds
LIMIT = 300_000  # instructions of a thread: some ten seconds
_SHARED_BYTES = 1 << 23  # of one batch
# Orders to compare with the ascending one, of blocks and of the lanes of an atomic. Of two or more
# no one has the same place in all three.
TURNS: dict[str, Callable[[Array], Array]] = {
    "the last block first": lambda each: each[::-1],
    "every second block first": lambda each: np.concatenate([each[1::2], each[::2]]),
}
_FLOW = ("bra", "ret", "exit", "bar", "barrier")


class Executable:
    """A program whose instructions have been looked up."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.steps: list[Step | None] = []
        self.guards: list[Reader | None] = []
        leaders = {0, *program.labels.values()}
        for index, instruction in enumerate(program.instructions):
            flow = instruction.parts[0] in _FLOW and instruction.parts[:2] != ("bar", "warp")
            if flow:
                _check_flow(instruction)
                leaders.add(index + 1)
            self.steps.append(None if flow else step(program, instruction))
            guard = instruction.guard
            self.guards.append(None if guard is None else reader(program, guard[0], "pred"))
        self.leaders = leaders

    def run(
        self,
        grid: tuple[int, int, int],
        arguments: Sequence[int | float],
        memory: GlobalMemory,
        *,
        dynamic_shared: int = 0,
        races: bool = True,
        order: Iterable[int] | None = None,
        lanes: int = LANES,
        limit: int = LIMIT,
        turns: Callable[[Array], Array] = np.asarray,
    ) -> Report:
        """Execute the blocks of a grid; raises :class:`Fault` where it cannot go on.

        Args:
            races: Look for races in global memory, which lists every access.
            order: The blocks in the order in which they run; a part of them counts for a part.
            lanes: Threads that run side by side.
            limit: Instructions that a thread may take.
            turns: Puts the blocks in another order, and so the lanes of each atomic.
        """
        blocks = np.fromiter(range(int(np.prod(grid))) if order is None else order, np.int64)
        blocks = turns(blocks)
        report = Report(self.program.name, len(blocks))
        log = AccessLog() if races else None
        shared = max(self.program.static_shared + dynamic_shared, 1)
        size = max(1, min(lanes // self.program.threads, _SHARED_BYTES // shared))
        issued = np.zeros(len(self.steps), np.int64)
        with np.errstate(all="ignore"):
            for first in range(0, len(blocks), size):
                batch = blocks[first : first + size]
                state = dynamic_shared, memory, log, report, turns
                machine = Machine(self.program, grid, batch, arguments, *state)
                _Batch(self, machine, issued).run(limit)
        report.counts = issued.tolist()
        for instruction, count in zip(self.program.instructions, report.counts, strict=True):
            report.issued[".".join(instruction.parts)] += count
        report.issued = +report.issued
        if log is not None:
            log.report(report, self.program.instructions)
        return report


def _check_flow(instruction: Instruction) -> None:
    parts, operands = instruction.parts, instruction.operands
    if parts[0] in ("bar", "barrier"):
        plain = parts in (("bar", "sync"), ("barrier", "sync"), ("barrier", "sync", "aligned"))
        if not plain or operands != ("0",) or instruction.guard is not None:
            raise instruction.unknown("is no barrier of the whole block: no other is known")
    elif parts not in (("bra",), ("bra", "uni"), ("ret",), ("ret", "uni"), ("exit",)):
        raise instruction.unknown()


class _Batch:
    """Where each lane of a batch stands."""

    def __init__(self, code: Executable, machine: Machine, issued: Array) -> None:
        self.code, self.machine, self.issued = code, machine, issued
        self.at = np.zeros(machine.lanes, np.int32)
        self.done = np.zeros(machine.lanes, bool)
        self.waiting = np.zeros(machine.lanes, bool)
        self.taken = np.zeros(machine.lanes, np.int64)  # instructions of each lane

    def run(self, limit: int) -> None:
        while True:
            live = ~(self.done | self.waiting)
            if live.any():
                lowest = int(self.at[live].min())
                mask = live & (self.at == lowest)
                self.taken[mask] += self._stretch(lowest, mask)
                if self.taken.max() > limit:
                    raise self._endless(limit)
            elif self.done.all():
                return
            else:
                self._release()

    def _release(self) -> None:
        """Let go the blocks of which every thread waits at the same barrier."""
        shape = self.machine.blocks, self.machine.threads
        waiting, done = self.waiting.reshape(shape), self.done.reshape(shape)
        at = self.at.reshape(shape)
        some = np.asarray(waiting.any(1))
        if (some & done.any(1)).any():
            raise self._divergence("while other threads of its block have ended", some)
        if (at[some] != at[some][:, :1]).any():
            raise self._divergence("and at another one within one block", some)
        self.machine.arrive(np.flatnonzero(some))
        self.waiting[:] = False

    def _divergence(self, why: str, blocks: Array) -> Fault:
        first = int(self.at[self.waiting].min()) - 1
        instruction = self.code.program.instructions[first]
        return Fault(
            f"barrier divergence in {int(blocks.sum())} blocks: threads wait at {instruction} {why}"
        )

    def _endless(self, limit: int) -> Fault:
        lane, program = int(self.taken.argmax()), self.code.program
        at = program.instructions[min(int(self.at[lane]), len(program.instructions) - 1)]
        return Fault(
            f"{program.name} does not end: thread {int(self.machine.tid[lane])} of block "
            f"{int(self.machine.number[lane])} has taken {int(self.taken[lane]):,} instructions "
            f"and is at {at}. If it is merely long, pass limit= above {limit:,}. If it waits for "
            f"what another thread or block writes (a lock, a flag): here threads that wait go "
            f"first, so it waits for ever"
        )

    def _stretch(self, index: int, mask: Array) -> int:
        """Run the lanes of ``mask`` up to where lanes may part or meet; how many instructions."""
        machine, code, first = self.machine, self.code, index
        taking_part: Mask = None if mask.all() else mask
        warps = int(mask.reshape(-1, WARP).any(1).sum())
        while True:
            if index == len(code.steps):
                raise Fault(f"{code.program.name} runs past its last instruction")
            instruction, guard = code.program.instructions[index], code.guards[index]
            machine.current = index
            self.issued[index] += warps
            where = taking_part
            if guard is not None:
                holds = guard(machine)
                holds = ~holds if instruction.guard and instruction.guard[1] else holds
                where = machine.spread(holds) & mask
            do = code.steps[index]
            index += 1
            if do is None:
                self._flow(instruction, index, mask, where)
                return index - first
            do(machine, where)
            if index in code.leaders:
                self.at[mask] = index
                return index - first

    def _flow(self, instruction: Instruction, after: int, mask: Array, where: Mask) -> None:
        self.at[mask] = after
        taken = mask if where is None else where
        kind = instruction.parts[0]
        if kind == "bra":
            self.at[taken] = self.code.program.labels[instruction.operands[0]]
        elif kind in ("ret", "exit"):
            self.done |= taken
        elif mask.all():  # every block has arrived: nobody needs to wait
            self.machine.arrive(np.arange(self.machine.blocks))
        else:
            self.waiting |= taken
