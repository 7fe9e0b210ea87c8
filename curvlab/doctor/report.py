"""What the doctor finds, and how it is reported."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

Level = Literal["wrong", "slow", "note"]
Handled = Literal["yes", "refused", "no"]
SAID = {
    "yes": "curvlab handles it by itself",
    "refused": "curvlab refuses until you choose",
    "no": "curvlab cannot do it for you",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One trap that a model, its data or its loss is in.

    Attributes:
        trap: A short name, the same in every report.
        what: What was seen, with names.
        cure: What to do.
        level: ``"wrong"``: curvature would be wrong, or not exist; ``"slow"``: it would take longer
            than it must; ``"note"``: worth knowing.
        handled: Whether curvlab does the right thing, refuses, or leaves it to you.
    """

    trap: str
    what: str
    cure: str
    level: Level = "note"
    handled: Handled = "yes"

    @property
    def open(self) -> bool:
        """Whether something has to be done before curvature means anything."""
        return self.level == "wrong" and self.handled != "yes"


@dataclass(frozen=True, slots=True)
class Report:
    """All findings, the gravest first."""

    findings: tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        """Whether curvature can be computed as it is."""
        return not any(finding.open for finding in self.findings)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def traps(self) -> list[str]:
        """The names of what was found."""
        return [finding.trap for finding in self.findings]

    def to_json(self) -> dict[str, Any]:
        found = [{**asdict(finding), "open": finding.open} for finding in self.findings]
        return {"healthy": self.healthy, "findings": found}

    def __str__(self) -> str:
        if not self.findings:
            return "healthy: nothing that would make curvature wrong or slow was found"
        lines = []
        for finding in self.findings:
            mark = "!!" if finding.open else "ok" if finding.handled == "yes" else " ~"
            lines.append(f"{mark} [{finding.level}] {finding.trap}: {finding.what}")
            lines.append(f"      cure: {finding.cure}")
            lines.append(f"      {SAID[finding.handled]}")
        open_ = sum(finding.open for finding in self.findings)
        lines.append(
            f"{open_} to cure before curvature means anything"
            if open_
            else "healthy: curvature can be computed as it is"
        )
        return "\n".join(lines)


ORDER = {"wrong": 0, "slow": 1, "note": 2}


def report(findings: list[Finding]) -> Report:
    """Sorted: what is open first, then by level."""
    ranked = sorted(findings, key=lambda f: (not f.open, ORDER[f.level]))
    return Report(tuple(ranked))
