"""Results go to stdout, as text or JSON; words about them to stderr."""

import json
import math
import re
import sys
from argparse import Namespace
from typing import Any


def emit(options: Namespace, facts: dict[str, Any], text: str) -> None:
    """Print a result: ``facts`` as one JSON object with ``--json``, else ``text``."""
    if options.json:
        sys.stdout.write(json.dumps(_plain(facts)) + "\n")
    else:
        sys.stdout.write(text + "\n")
    sys.stdout.flush()


def say(options: Namespace, message: str, important: bool = False) -> None:
    """A line about the work; ``-q`` leaves out what is not important."""
    if important or not options.quiet:
        sys.stderr.write(f"curvlab {options.verb}: {message}\n")


# An argument as Python has it: mode="eval", count=, dtype=torch.float64. What follows a bracket is
# left alone: it belongs to a call that is quoted whole.
ARGUMENT = re.compile(r"""(?<![\w(])(\w+)=("[^"]*"|'[^']*'|[\w.]*\w|)""")


def in_shell(text: str, options: Namespace) -> str:
    """Advice as it can be typed: ``mode="eval"`` becomes ``--mode eval`` if there is ``--mode``."""

    def typed(found: re.Match[str]) -> str:
        name, value = found[1], found[2].strip("\"'").removeprefix("torch.")
        if found[0] == "check=False" and hasattr(options, "no_check"):
            return "--no-check"
        if name == "checkpoint" or not hasattr(options, name):  # --checkpoint is a model's weights
            return found[0]
        return f"--{name.replace('_', '-')} {value}".strip()

    return ARGUMENT.sub(typed, text)


def table(header: list[str], lines: list[list[str]]) -> str:
    """Columns aligned with spaces: the first to the left, the others to the right."""
    cells = [header, *lines]
    widths = [max(len(line[i]) for line in cells) for i in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    )


def _plain(value: Any) -> Any:
    """JSON has no infinity and no NaN."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
