"""Results go to stdout, as text or JSON; words about them to stderr."""

import json
import math
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
