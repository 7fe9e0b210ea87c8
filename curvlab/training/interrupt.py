"""Ctrl-C at a safe moment: the signal is noted, and the loop stops between two steps."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Whether Ctrl-C was pressed."""

    requested = False


@contextmanager
def deferred_interrupt() -> Iterator[StopRequest]:
    """Note the first Ctrl-C instead of raising; a second one raises at once.

    One that was noted too late for the body to act on it raises at the end: none is lost.

    Outside the main thread, where Python delivers no signals, nothing changes.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def note(number: int, frame: FrameType | None) -> None:
        if request.requested:
            signal.default_int_handler(number, frame)
        request.requested = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield request
    finally:
        signal.signal(signal.SIGINT, before)
    if request.requested:
        raise KeyboardInterrupt
