"""Parses the command line; a mistake is reported in one line."""

import argparse
from collections.abc import Sequence
from difflib import get_close_matches
from typing import NoReturn


class UsageError(ValueError):
    """The command cannot mean anything: exit code 2."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\ntry: {self.prog} --help\n")


def build() -> argparse.ArgumentParser:
    """The parser of the whole command."""
    from curvlab import __version__
    from curvlab.cli.verbs import VERBS

    table = "\n".join(f"  {name:<11} {verb.summary}" for name, verb in VERBS.items())
    parser = _Parser(
        prog="curvlab",
        usage="curvlab VERB [options]",
        description="Certified curvature for PyTorch models.\n\nverbs:\n" + table,
        epilog=f"example: {VERBS['eig'].examples[0]}\ncurvlab VERB --help shows a verb's options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"curvlab {__version__}")
    verbs = parser.add_subparsers(
        dest="verb", metavar="VERB", help=argparse.SUPPRESS, prog="curvlab"
    )
    for name, verb in VERBS.items():
        own = verbs.add_parser(
            name,
            description=verb.summary,
            epilog="examples:\n" + "\n".join(f"  {example}" for example in verb.examples),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,  # rerun reads commands from files: they must be what they seem
        )
        verb.arguments(own)
        own.add_argument("--json", action="store_true", help="one JSON object on stdout")
        own.add_argument(
            "-v",
            "--verbose",
            action="count",
            default=0,
            help="show decisions, and tracebacks of errors",
        )
        own.add_argument("-q", "--quiet", action="store_true", help="no progress")
    return parser


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options with ``verb`` and the ``arguments`` they came from; exits with 2 on a mistake."""
    from curvlab.cli.verbs import VERBS

    parser = build()
    given = list(arguments)
    if " ".join(given[:2]) in VERBS:  # a verb of two words
        given[:2] = [" ".join(given[:2])]
    first = next((word for word in given if not word.startswith("-")), None)
    if first is not None and first not in VERBS and given[0] == first:
        near = get_close_matches(first, VERBS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        parser.error(f"there is no verb {first!r}{hint}. The verbs are {', '.join(VERBS)}")
    options, unknown = parser.parse_known_args(given)
    if options.verb is None:
        parser.print_help()
        parser.exit(2)
    if unknown:
        parser.prog = f"curvlab {options.verb}"  # whose help lists what there is
        names = [f"--{name.replace('_', '-')}" for name in vars(options)]
        near = get_close_matches(unknown[0], names, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        parser.error(f"{unknown[0]!r} is not understood{hint}")
    options.arguments = list(arguments)
    options.progress = False if options.quiet else None  # None shows it on a terminal only
    return options
