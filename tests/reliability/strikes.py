"""Strikes from outside: a process is killed, interrupted or finds the disk full, and goes on.

Each attempt is a process of its own, forked from this one, which has everything loaded and
compiled. It is struck at a random moment of its work, and the next one, which goes on in the same
folder, is struck as well, a few times over; then one that nobody disturbs ends the work, and what
that leaves is compared with work that was never disturbed. Whenever the strikes come, the outcome
must be the same: the moments are random, the result is not.
"""

import os
import random
import re
import resource
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import torch

from curvlab.storage import StorageError
from experiments.store import StoreError
from tests.reliability.subjects import Subject, WrongError

STRIKES = 4  # at most, at one piece of work
DONE, INTERRUPTED, SAID, WRONG, RAW = 0, 10, 11, 12, 13  # how a process ended
TEMPORARY = re.compile(r"\..+\.[0-9a-f]{32}")


def attempt(subject: Subject, folder: Path, before: Callable[[], None] = lambda: None) -> int:
    """Start the subject in ``folder``, in a process of its own; returns its number."""
    folder.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    # held back until the child can catch them: before that, one would unwind this very stack
    held = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    child = os.fork()
    if child:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        return child
    # A signal raises once, wherever this child is: also after its work, or in the inner `finally`.
    # It never gets out of here, where it would run the parent's handlers and tests.
    code = INTERRUPTED
    try:
        try:
            with (folder.parent / f"{folder.name}.said").open("a") as said:
                os.dup2(said.fileno(), 1)
                os.dup2(said.fileno(), 2)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            torch.set_num_threads(1)
            before()
            code = _ended(lambda: _unmasked(held, lambda: subject.run(folder)))
        except Exception:
            code = RAW
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    finally:
        os._exit(code)


def _unmasked(held: set[signal.Signals], run: Callable[[], None]) -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, held)
    run()


def _ended(run: Callable[[], None]) -> int:
    try:
        run()
        return DONE
    except KeyboardInterrupt:
        return INTERRUPTED
    except (StorageError, StoreError, OSError):
        return SAID
    except WrongError:
        traceback.print_exc()
        return WRONG
    except BaseException:
        traceback.print_exc()
        return RAW


def wait(child: int) -> int | None:
    """How the process ended; ``None`` if a signal ended it."""
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else None


def strike(kind: str, subject: Subject, folder: Path, seconds: float, draw: random.Random) -> str:
    """One strike at a random moment of the first ``seconds``: what it came to in the end."""
    if kind == "full disk":
        most = max((f.stat().st_size for f in folder.parent.rglob("truth/**/*")), default=1 << 16)
        limit = draw.randrange(most)
        code = wait(attempt(subject, folder, lambda: _little_room(limit)))
        struck = code != DONE
    else:
        child = attempt(subject, folder)
        time.sleep(draw.uniform(0.0, seconds))
        number = {"kill": signal.SIGKILL, "interrupt": draw.choice((signal.SIGINT, signal.SIGTERM))}
        os.kill(child, number[kind])
        code = wait(child)
        struck = code != DONE
        if kind == "interrupt" and code is None:
            return "not begun"  # before the work took the signals: nothing to lose
    if code in (WRONG, RAW):
        return "wrong" if code == WRONG else "raw error"
    if kind == "full disk" and code == INTERRUPTED:
        return "raw error"
    return "struck" if struck else "too late"


def _little_room(limit: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


def strikes(kind: str, subject: Subject, count: int, folder: Path, seed: int = 0) -> Counter[str]:
    """Strike until it hit ``count`` times; what each attempt came to, counted."""
    draw, found = random.Random(seed), Counter[str]()
    (truth := folder / "truth").mkdir(parents=True)
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        subject.run(truth)  # here: the processes to come have what it compiles
    began = time.monotonic()
    if wait(attempt(subject, folder / "timed")) != DONE:
        raise RuntimeError(f"undisturbed it fails: {(folder / 'timed.said').read_text()}")
    seconds = time.monotonic() - began
    number = 0
    while found["struck"] < count and number < 10 * count:
        number += 1
        place = folder / str(number)
        for _ in range(min(STRIKES, count - found["struck"])):
            outcome = strike(kind, subject, place, seconds, draw)
            found[outcome] += 1
            if outcome == "too late":
                break
        if wait(attempt(subject, place)) != DONE:
            found["lost"] += 1
        elif not subject.same(place, truth):
            found["wrong"] += 1
        found["left over"] += sum(
            TEMPORARY.fullmatch(path.name) is not None for path in place.rglob(".*")
        )
    return found


BAD = ("lost", "wrong", "raw error", "left over")


def unharmed(found: Counter[str]) -> bool:
    """Whether nothing was lost, wrong, said without a clear error, or left lying about."""
    return not any(found[name] for name in BAD)
