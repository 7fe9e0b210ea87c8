"""Would a wrong kernel be noticed? ``python -m curvlab_kernels.audit.ptx.mutants``.

The PTX of real kernels is broken in one place at a time: a barrier removed, a bound off by one, a
guard inverted or removed, a shuffle's mask cut or its distance changed, an address moved, a sum
dropped. Each mutant takes the place of its kernel in agreement checks: one where loops go round
more than once and ends are ragged, one where tiles are full, and small ones with many numbers of
rows and columns. Its fate is one of

- flagged: the sanitizer or the comparison with the reference objects,
- equivalent: every launch leaves the same bits and nothing to object to, and a probe in the place
  shows why: no index meets the bound, the guard holds for every thread, all threads store the same,
  the sum adds zero, no two threads conflict across the barrier, both lanes hold the same, a NaN in
  the result's place changes no bit either,
- same bits: the same, but no probe tells why,
- rounding: nobody objects, and no number differs by more than its last place, as where the lower
  half of a float64 goes astray before a float32 is made of it: no comparison can tell that,
- not reached: no thread comes there in any check,
- missed: some bits differ and nobody objects.
"""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial

import torch
from torch import Tensor

from curvlab_kernels._triton.launch import Launch, handed_to
from curvlab_kernels.audit.ptx import launching
from curvlab_kernels.audit.ptx.launching import Loaded, execute_launch
from curvlab_kernels.audit.ptx.program import parse
from curvlab_kernels.audit.ptx.report import Fault
from curvlab_kernels.audit.ptx.scheduler import Executable
from curvlab_kernels.audit.ptx.subjects import Check, subjects

_OTHER_DISTANCE = {"16": "8", "8": "4", "4": "2", "2": "1", "1": "2"}
_MEMORY = r"(?:ld|st)\.global[\w.:]*\."


@dataclass(frozen=True, slots=True)
class Kind:
    """A way to break a kernel: what to look for, what to put there, and when it changes nothing.

    Attributes:
        probes: PTX that traps, or gives other bits, where the mutation makes a difference, and what
            it means that it changes nothing; the first that does not tells the reason.
    """

    name: str
    pattern: str
    replace: Callable[[re.Match[str]], str]
    probes: tuple[tuple[Callable[[re.Match[str]], str], str], ...] = ()


def _bound(name: str, type_: str) -> Kind:
    return Kind(
        name,
        rf"setp\.lt\.{type_}(\s+(%p\d+), ([^,;]+), ([^,;]+);)",
        lambda m: f"setp.le.{type_}{m[1]}",
        (
            (
                lambda m: (
                    f"{{ .reg .pred %probe; setp.eq.{type_} %probe, {m[3]}, {m[4]}; "
                    f"@%probe trap; }} {m[0]}"
                ),
                "no index meets the bound",
            ),
            (lambda m: f"setp.eq.{type_} {m[2]}, 0, 0;", "without the bound it is the same too"),
        ),
    )


def _loaded(place: re.Match[str]) -> list[str]:
    """The registers that a guarded load of ``place`` fills; none of a store."""
    if "st.global" in place[2]:
        return []
    return [name.strip(" {}\t") for name in place[4].partition("[")[0].strip(" ,\t").split(",")]


def _unread(place: re.Match[str]) -> str:
    """The access of ``place``, and NaN for the threads whose guard does not hold."""
    poison = [f"@!{place[1]} mov.b{place[3]} {name}, -1;" for name in _loaded(place)]
    return " ".join([place[0], *poison])


def _what_they_had(place: re.Match[str]) -> str:
    """A trap if a thread whose guard does not hold would load another number than it has."""
    names, bits = _loaded(place), place[3]
    keep = [f"mov.b{bits} %old{i}, {name};" for i, name in enumerate(names)]
    compare = [
        f"setp.ne.b{bits} %probe, {name}, %old{i}; and.pred %probe, %probe, %out; @%probe trap;"
        for i, name in enumerate(names)
    ]
    registers = f".reg .b{bits} %old<{len(names) + 1}>; .reg .pred %probe, %out;"
    lines = [registers, f"not.pred %out, {place[1]};", *keep, f"{place[2]}{place[4]};", *compare]
    return "{ " + " ".join(lines) + " }"


_GUARDED = rf"@(%p\d+)(\s+{_MEMORY}[bf](\d+))(\s[^;]*);"
_UNUSED = "what it gives is not used"
KINDS = (
    Kind("barrier removed", r"bar\.sync\s+0;", lambda _: "", ((lambda _: "", "nobody conflicts"),)),
    Kind(
        "warp's barrier removed",
        r"bar\.warp\.sync\s+\S+;",
        lambda _: "",
        ((lambda _: "", "nobody conflicts"),),
    ),
    _bound("bound off by one", "s64"),
    _bound("bound of rows off by one", "s32"),
    Kind(
        "guard inverted",
        _GUARDED,
        lambda m: f"@!{m[1]}{m[2]}{m[4]};",
        ((lambda m: f"{m[2]}{m[4]};", "every thread stores the same"),),
    ),
    Kind(
        "guard removed",
        _GUARDED,
        lambda m: f"{m[2]}{m[4]};",
        (
            (lambda m: f"@!{m[1]} trap; {m[0]}", "the guard holds"),
            (_unread, "what the others load is not used, or what they store is there"),
            (_what_they_had, "what the others load is what they have"),
        ),
    ),
    Kind("shuffle mask cut", r"(shfl\.sync[^;]*), -1;", lambda m: f"{m[1]}, 65535;"),
    Kind(
        "shuffle distance",
        r"(shfl\.sync\.bfly\.b32\s+)(%\w+)(, %\w+, )(16|8|4|2|1)(, 31, -1;)",
        lambda m: m[1] + m[2] + m[3] + _OTHER_DISTANCE[m[4]] + m[5],
        (
            (
                lambda m: (
                    f"{{ .reg .b32 %other; .reg .pred %probe; "
                    f"{m[1]}%other{m[3]}{_OTHER_DISTANCE[m[4]]}{m[5]} {m[0]} "
                    f"setp.ne.b32 %probe, {m[2]}, %other; @%probe trap; }}"
                ),
                "both lanes hold the same",
            ),
            (lambda m: f"mov.b32 {m[2]}, -1;", _UNUSED),
        ),
    ),
    Kind(
        "shared address moved",
        r"((?:ld|st)\.shared[^;\[]*\[\s*%r\d+)(?:\s*\+\s*0)?\s*\]",
        lambda m: f"{m[1]}+16]",
    ),
    Kind(
        "sum dropped",
        r"add\.f64\s+(%\w+), (%\w+), (%\w+);",
        lambda m: f"mov.b64 {m[1]}, {m[2]};",
        (
            (
                lambda m: (
                    f"{{ .reg .pred %probe; setp.neu.f64 %probe, {m[3]}, 0d0000000000000000; "
                    f"@%probe trap; }} {m[0]}"
                ),
                "the sum adds zero",
            ),
            (lambda m: f"mov.b64 {m[1]}, -1;", _UNUSED),
        ),
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


@dataclass(slots=True)
class Recorded:
    """A launch of a sound kernel: what it found and what it left."""

    launch: Launch
    before: list[Tensor]
    after: list[Tensor]
    check: Check
    reached: list[int]  # how often each instruction ran

    def replay(self, architecture: int, within: int = 0) -> bool:
        """Run it again with the kernel as it is now: whether the same bits come out.

        Args:
            within: Units in the last place that floats may differ by.
        """
        tensors = _tensors(self.launch)
        for tensor, bits in zip(tensors, self.before, strict=True):
            tensor.copy_(bits)
        execute_launch(self.launch, architecture)
        return all(map(partial(_same, within=within), tensors, self.after))


def _tensors(launch: Launch) -> list[Tensor]:
    return [each for each in (*launch.arguments, *launch.reaches) if isinstance(each, Tensor)]


def _same(first: Tensor, second: Tensor, within: int) -> bool:
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[first.element_size()]
    bits = first.view(kind), second.view(kind)
    if not within or first.dtype not in (torch.float32, torch.float64):
        return torch.equal(*bits)
    return bool(((bits[0] - bits[1]).abs() <= within).all())


@dataclass(slots=True)
class Kernel:
    """One compiled kernel, and every launch of it in a subject's checks."""

    identity: tuple[object, ...]
    loaded: Loaded
    architecture: int
    launches: list[Recorded] = field(default_factory=list)

    def fate(self, kind: Kind, place: re.Match[str], index: int) -> str:
        """What becomes of the mutant at ``place``, which is instruction ``index``."""
        reaching = [each for each in self.launches if each.reached[index]]
        if not reaching:
            return "not reached"
        reaching.sort(key=lambda each: sum(each.reached))  # what is quick may tell
        mutant = self._with(place, kind.replace(place))
        try:
            for recorded in reaching:
                if not self._run(mutant, partial(recorded.replay, self.architecture)):
                    # Other bits: flagged if the check that made this launch objects, or another.
                    for check in {id(each.check): each.check for each in reaching}.values():
                        self._run(mutant, partial(_whole, check, self.architecture))
                    replays = (partial(each.replay, self.architecture, 1) for each in reaching)
                    return "rounding" if all(self._run(mutant, r) for r in replays) else "missed"
        except (Fault, AssertionError):
            return "flagged"
        for write, reason in kind.probes:
            probe = self._with(place, write(place))
            try:
                if all(self._run(probe, partial(r.replay, self.architecture)) for r in reaching):
                    return f"equivalent: {reason}"
            except Fault:
                continue
        return "same bits"

    def _with(self, place: re.Match[str], text: str) -> Loaded:
        begin, end = place.span()
        ptx = self.loaded.ptx[:begin] + text + self.loaded.ptx[end:]
        return Loaded(Executable(parse(ptx)), self.loaded.shared, ptx)

    def _run(self, loaded: Loaded, run: Callable[[], bool]) -> bool:
        """``run`` while ``loaded`` stands for the kernel."""
        launching._loaded[self.identity] = loaded
        try:
            return run()
        finally:
            launching._loaded[self.identity] = self.loaded


def _whole(check: Check, architecture: int) -> bool:
    with launching.executed(architecture):
        check(torch.device("cpu"))
    return True


@lru_cache(maxsize=2)
def kernels(subject: str, architecture: int) -> list[Kernel]:
    """Run sound checks; the kernels that they launch, with all that is needed to launch them."""
    found: dict[tuple[object, ...], Kernel] = {}
    for check in subjects()[subject]:

        def run(launch: Launch, check: Check = check) -> None:
            before = [tensor.clone() for tensor in _tensors(launch)]
            report = execute_launch(launch, architecture)
            named = {**launch.constants, **launch.options}
            loaded = launching.load(launch.kernel, launch.arguments, named, architecture)[0]
            identity = next(key for key, each in launching._loaded.items() if each is loaded)
            kernel = found.setdefault(identity, Kernel(identity, loaded, architecture))
            after = [tensor.clone() for tensor in _tensors(launch)]
            kernel.launches.append(Recorded(launch, before, after, check, report.counts))

        with handed_to(run):
            check(torch.device("cpu"))
    return list(found.values())


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
    for name in [name for name in subjects() if only in name]:
        for kernel in kernels(name, architecture):
            ptx = kernel.loaded.ptx
            body = ptx[: ptx.rindex("ret;")]
            for kind in chosen:
                places = list(re.finditer(kind.pattern, body))
                indices = _instructions(ptx, places)
                for place, index in list(zip(places, indices, strict=True))[::every]:
                    line = ptx.count("\n", 0, place.start()) + 1
                    fate = kernel.fate(kind, place, index)
                    yield Outcome(name, kernel.loaded.code.program.name, kind.name, line, fate)


def _instructions(ptx: str, places: Sequence[re.Match[str]]) -> list[int]:
    """The number of the instruction at each place: found by a trap in front of each."""
    marked = ptx
    for place in reversed(places):
        marked = f"{marked[: place.start()]}trap; {marked[place.start() :]}"
    traps = [
        index
        for index, instruction in enumerate(parse(marked).instructions)
        if instruction.parts == ("trap",)
    ]
    return [index - number for number, index in enumerate(traps)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; returns the number of mutants that were missed."""
    parser = argparse.ArgumentParser(prog="curvlab_kernels.audit.ptx.mutants", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--arch", type=int, default=90)
    parser.add_argument("--every", type=int, default=1, help="each n-th place only")
    parser.add_argument("--only", default="", help="subjects whose name contains this")
    parser.add_argument("--kind", nargs="*", default=[], choices=[kind.name for kind in KINDS])
    options = parser.parse_args(arguments)
    torch.use_deterministic_algorithms(True)  # which also fills torch.empty with NaN
    found: dict[str, Counter[str]] = {kind.name: Counter() for kind in KINDS}
    for outcome in outcomes(options.arch, options.kind, options.every, options.only):
        fate = outcome.fate.partition(":")[0]
        found[outcome.kind][fate] += 1
        if fate != "flagged":
            place = f"{outcome.check}, {outcome.kernel}:{outcome.line}"
            print(f"{outcome.fate}: {outcome.kind}, {place}", flush=True)
    fates = ("flagged", "equivalent", "same bits", "rounding", "not reached", "missed")
    print(f"{'mutation':26} " + " ".join(f"{fate:>12}" for fate in fates))
    for name, each in found.items():
        if each:
            print(f"{name:26} " + " ".join(f"{each[fate]:12}" for fate in fates))
    return sum(each["missed"] for each in found.values())


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
