"""Ctrl-C and SIGTERM, handled at a safe moment.

A long computation that keeps its state in a file is stopped between two of its steps: the first
SIGINT or SIGTERM is noted, and a second one raises at once. Signals are taken only in the main
thread, where Python delivers them, and only where nobody else handles them.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_USUAL: dict[int, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
}
Handler = Callable[[int, FrameType | None], Any]


class Stop:
    """Whether a signal asked to stop."""

    requested = False


@contextmanager
def noted() -> Iterator[Stop]:
    """Record the first signal instead of raising; a second one raises ``KeyboardInterrupt``.

    A signal that comes too late for the body to act on raises at the end: none is lost.
    """
    stop = Stop()

    def note(number: int, frame: FrameType | None) -> None:
        if stop.requested:
            signal.default_int_handler(number, frame)
        stop.requested = True

    with _taken(note, signal.SIGINT, signal.SIGTERM):
        yield stop
    if stop.requested:
        raise KeyboardInterrupt


@contextmanager
def termination_raises() -> Iterator[None]:
    """SIGTERM raises ``KeyboardInterrupt`` in the body, where it would end the process at once."""
    with _taken(signal.default_int_handler, signal.SIGTERM):
        yield


@contextmanager
def _taken(handler: Handler, *numbers: int) -> Iterator[None]:
    main = threading.current_thread() is threading.main_thread()
    # Signals that an outer one of these contexts has taken are taken in turn.
    before = {n: signal.getsignal(n) for n in numbers if main}
    free = {n: was for n, was in before.items() if was in (_USUAL[n], signal.default_int_handler)}
    try:
        for number in free:
            signal.signal(number, handler)
        yield
    finally:
        for number, was in free.items():
            signal.signal(number, was)
