"""The ``curvlab`` command: ``curvlab VERB ...``; ``curvlab --help`` lists the verbs.

Results go to stdout (a table, or one JSON object with ``--json``); everything else goes to
stderr. Exit code 0: good; 1: a problem was found, or not all converged; 2: the command was wrong.
A user's mistake ends with one line that says what to change; ``-v`` shows the traceback as well.
Nothing heavy is imported before it is known which verb runs.
"""

import logging
import sys
import traceback
from argparse import Namespace
from collections.abc import Sequence

from curvlab.cli.output import in_shell
from curvlab.cli.parser import UsageError, parse
from curvlab.cli.verbs import VERBS

GOOD, PROBLEM, USAGE = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        options = parse(given)
    except SystemExit as end:  # argparse has said what it had to say
        return end.code if isinstance(end.code, int) else USAGE
    _log(options.verbose)
    try:
        return VERBS[options.verb].load()(options)
    except KeyboardInterrupt:
        _say(options.verb, "interrupted; nothing was saved. Run the same command again")
        return PROBLEM
    except BrokenPipeError:  # the reader of a pipe has seen enough
        sys.stderr.close()
        return GOOD
    except UsageError as error:
        return _explain(options, str(error), USAGE)
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        first = str(error).strip().splitlines() or [type(error).__name__]
        return _explain(options, ". ".join([first[0], *getattr(error, "__notes__", ())]), PROBLEM)


def _explain(options: Namespace, message: str, code: int) -> int:
    if options.verbose:
        traceback.print_exc()
    _say(options.verb, in_shell(message, options))
    return code


def _say(verb: str, message: str) -> None:
    sys.stderr.write(f"curvlab {verb}: {message}\n")


def _log(verbose: int) -> None:
    """Decisions (engine, chunks, back end) are logged; ``-v`` shows them."""
    log = logging.getLogger("curvlab")
    log.setLevel(logging.INFO if verbose else logging.WARNING)
    if not log.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("curvlab: %(message)s"))
        log.addHandler(handler)
