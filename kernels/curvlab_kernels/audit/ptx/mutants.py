"""Would a wrong kernel be noticed? ``python -m curvlab_kernels.audit.ptx.mutants``.

The PTX of real kernels is broken in one place at a time: a barrier removed, a bound off by one, a
guard inverted or removed, a shuffle's mask cut or its distance changed, an address moved, a sum
dropped. Each mutant runs the agreement checks of its kernel: one where loops go round more than
once and ends are ragged, one where tiles are full. Its fate is one of

- flagged: the sanitizer or the comparison with the reference objects,
- same bits: every tensor has the same bits after every launch, with nothing to object to (a bound
  that no index meets, a sum of zeros, a barrier between accesses that do not conflict),
- not reached: a trap in the same place does not go off,
- missed: some bits differ and nobody objects.
"""

import argparse
import re
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from curvlab_kernels._triton.launch import Launch, handed_to
from curvlab_kernels.audit import agreement, agreement_orthogonal
from curvlab_kernels.audit.ptx import launching
from curvlab_kernels.audit.ptx.launching import Loaded, execute_launch
from curvlab_kernels.audit.ptx.program import parse
from curvlab_kernels.audit.ptx.report import Fault
from curvlab_kernels.audit.ptx.scheduler import Executable

_OTHER_DISTANCE = {"16": "8", "8": "4", "4": "2", "2": "1", "1": "2"}
_MEMORY = r"(?:ld|st)\.global[\w.:]*"


@dataclass(frozen=True, slots=True)
class Kind:
    """A way to break a kernel: what to look for, and what to put there."""

    name: str
    pattern: str
    replace: Callable[[re.Match[str]], str]


KINDS = (
    Kind("barrier removed", r"bar\.sync\s+0;", lambda _: ""),
    Kind("warp's barrier removed", r"bar\.warp\.sync\s+\S+;", lambda _: ""),
    Kind("bound off by one", r"setp\.lt\.s64", lambda _: "setp.le.s64"),
    Kind("bound of rows off by one", r"setp\.lt\.s32", lambda _: "setp.le.s32"),
    Kind("guard inverted", rf"@(%p\d+)(\s+{_MEMORY})", lambda m: f"@!{m[1]}{m[2]}"),
    Kind("guard removed", rf"@%p\d+(\s+{_MEMORY})", lambda m: m[1]),
    Kind("shuffle mask cut", r"(shfl\.sync[^;]*), -1;", lambda m: f"{m[1]}, 65535;"),
    Kind(
        "shuffle distance",
        r"(shfl\.sync\.bfly\.b32[^;]*?, )(16|8|4|2|1)(, 31, -1;)",
        lambda m: m[1] + _OTHER_DISTANCE[m[2]] + m[3],
    ),
    Kind(
        "shared address moved",
        r"((?:ld|st)\.shared[^;\[]*\[\s*%r\d+)(?:\s*\+\s*0)?\s*\]",
        lambda m: f"{m[1]}+16]",
    ),
    Kind(
        "sum dropped", r"add\.f64\s+(%\w+), (%\w+), (%\w+);", lambda m: f"mov.b64 {m[1]}, {m[2]};"
    ),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one mutant."""

    check: str
    kernel: str
    kind: str
    line: int  # of the PTX
    fate: str


Check = Callable[[torch.device], None]


def subjects() -> dict[str, tuple[Check, Check]]:
    """Checks whose kernels are broken: a ragged size, and one that fills tiles."""
    f32, f16, i8 = torch.float32, torch.float16, torch.int8
    project, project_list = agreement.project, agreement.project_list
    sgd_step, orthonormalise = agreement.sgd_step, agreement_orthogonal.orthonormalise
    return {
        "project float32": (partial(project, 17, 16001, f32), partial(project, 32, 4096, f32)),
        "project int8": (partial(project, 17, 33001, i8), partial(project, 32, 8192, i8)),
        "project long int8": (partial(project, 5, 66049, i8), partial(project, 8, 67584, i8)),
        "project block float16": (
            partial(project, 17, 16001, f16, count=5),
            partial(project, 32, 2048, f16, count=8),
        ),
        "project list float32": (
            partial(project_list, 17, 16001, f32),
            partial(project_list, 32, 4096, f32),
        ),
        "SGD step int8": (
            partial(sgd_step, 5, 67001, i8, 0.1, 0.9),
            partial(sgd_step, 8, 8192, i8, 0.1, 0.9),
        ),
        "orthonormalise float32": (
            partial(orthonormalise, 130, 16001, f32),
            partial(orthonormalise, 128, 4096, f32),
        ),
        "quantise int8": (partial(agreement.storage, i8),) * 2,
    }


def outcomes(
    architecture: int, kinds: Sequence[str] = (), every: int = 1, only: str = ""
) -> Iterator[Outcome]:
    """Run mutants one by one.

    Args:
        kinds: Names of the kinds; all of them if empty.
        every: Take each ``every``-th place of a kernel.
        only: Subjects whose name contains this.
    """
    chosen = [kind for kind in KINDS if not kinds or kind.name in kinds]
    for name, checks in subjects().items():
        if only not in name:
            continue
        used, sound = _sound(checks, architecture)
        for identity, loaded in used.items():
            body = loaded.ptx[: loaded.ptx.rindex("ret;")]
            for kind in chosen:
                for place in list(re.finditer(kind.pattern, body))[::every]:
                    begin, end = place.span()
                    before, after = loaded.ptx[:begin], loaded.ptx[end:]
                    mutant = Mutant(checks, architecture, identity, loaded.shared, sound)
                    fate = mutant.fate(before + kind.replace(place) + after)
                    if (
                        fate == "same bits"
                        and mutant.fate(f"{before}trap; {place[0]}{after}") == fate
                    ):
                        fate = "not reached"
                    line = before.count("\n") + 1
                    yield Outcome(name, loaded.code.program.name, kind.name, line, fate)


def _sound(
    checks: Sequence[Check], architecture: int
) -> tuple[dict[tuple[object, ...], Loaded], list[int]]:
    """The compiled kernels that the first check runs, and what the tensors are after launches."""
    before = dict(launching._loaded)
    launching._loaded.clear()
    digests = [_digest(checks[0], architecture)]
    used = dict(launching._loaded)
    launching._loaded.update(before)
    return used, digests + [_digest(check, architecture) for check in checks[1:]]


def _digest(check: Check, architecture: int) -> int:
    """Run a check from PTX; one number for the bits of all tensors after every launch."""
    digest = 0

    def run(launch: Launch) -> None:
        nonlocal digest
        execute_launch(launch, architecture)
        for tensor in (*launch.arguments, *launch.reaches):
            # Tables of addresses are int64 and differ from run to run.
            if isinstance(tensor, Tensor) and tensor.dtype != torch.int64:
                flat = tensor.contiguous().view(-1).view(torch.uint8)
                digest = zlib.crc32(flat.numpy().tobytes(), digest)

    with handed_to(run):
        check(torch.device("cpu"))
    return digest


@dataclass(frozen=True, slots=True)
class Mutant:
    """A kernel to be replaced, and what sound runs gave."""

    checks: Sequence[Check]
    architecture: int
    identity: tuple[object, ...]
    shared: int
    sound: list[int]

    def fate(self, text: str) -> str:
        """Run the checks with ``text`` in place of the kernel."""
        kept = launching._loaded[self.identity]
        launching._loaded[self.identity] = Loaded(Executable(parse(text)), self.shared, text)
        try:
            found = [_digest(check, self.architecture) for check in self.checks]
        except (Fault, AssertionError):
            return "flagged"
        finally:
            launching._loaded[self.identity] = kept
        return "same bits" if found == self.sound else "missed"


FATES = ("flagged", "same bits", "not reached", "missed")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; returns the number of mutants that were missed."""
    parser = argparse.ArgumentParser(prog="curvlab_kernels.audit.ptx.mutants", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--arch", type=int, default=80)
    parser.add_argument("--every", type=int, default=1, help="each n-th place only")
    parser.add_argument("--only", default="", help="subjects whose name contains this")
    parser.add_argument("--kind", nargs="*", default=[], choices=[kind.name for kind in KINDS])
    options = parser.parse_args(arguments)
    torch.use_deterministic_algorithms(True)  # which also fills torch.empty with NaN
    found: dict[str, Counter[str]] = {kind.name: Counter() for kind in KINDS}
    for outcome in outcomes(options.arch, options.kind, options.every, options.only):
        found[outcome.kind][outcome.fate] += 1
        if outcome.fate != "flagged":
            place = f"{outcome.check}, {outcome.kernel}:{outcome.line}"
            print(f"{outcome.fate}: {outcome.kind}, {place}", flush=True)
    print(f"{'mutation':26} " + " ".join(f"{fate:>12}" for fate in FATES))
    for name, fates in found.items():
        if fates:
            print(f"{name:26} " + " ".join(f"{fates[fate]:12}" for fate in FATES))
    return sum(fates["missed"] for fates in found.values())


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
