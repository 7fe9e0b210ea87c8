"""What an execution found and counted."""

from collections import Counter
from dataclasses import dataclass, field

from curvlab_kernels.audit.ptx.program import Instruction


class Fault(Exception):
    """The kernel did what a GPU would punish, or what it would not define."""


@dataclass(slots=True)
class Report:
    """One launch.

    Attributes:
        issued: Warp instructions by opcode: each is one slot of a scheduler.
        bytes: Asked for, by what for: ``"global read"``, ``"global written"``, ``"shared read"``,
            ``"shared written"``. Lanes that read the same address are counted each.
        barriers: Executed by a block, over all blocks.
        counts: Warp instructions by their place in the program.
        findings: What is wrong but did not end the execution, in words, with its number.
        rounding: Instructions by which the lanes of a warp store sums at one address that differ
            by rounding (a product was fused with its sum in one of two lanes that exchange it):
            the last bits are those of whichever lane the GPU takes.
    """

    kernel: str
    programs: int
    issued: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    barriers: int = 0
    counts: list[int] = field(default_factory=list)
    findings: Counter[str] = field(default_factory=Counter)
    rounding: Counter[str] = field(default_factory=Counter)

    def found(self, what: str, instruction: Instruction, count: int = 1) -> None:
        self.findings[f"{what}: {instruction}"] += count

    def require_clean(self) -> None:
        """Raise :class:`Fault` with every finding."""
        if self.findings:
            listed = "\n".join(f"  {count} x {text}" for text, count in self.findings.items())
            raise Fault(f"{self.kernel}, {self.programs} programs:\n{listed}")
