"""One line per task on a terminal; nothing in a pipe or a log file."""

import sys
import time


class Progress:
    """Shows where training is.

    Args:
        tasks: How many there are.
        show: ``None`` shows on a terminal only.
    """

    def __init__(self, tasks: int, show: bool | None = None) -> None:
        self._tasks = tasks
        self._show = sys.stderr.isatty() if show is None else show
        self._live = self._show and sys.stderr.isatty()
        self._title, self._steps = "", 1
        self._start, self._first, self._next = 0.0, 0, 0.0

    def begin(self, task: int, name: str, steps: int, done: int) -> None:
        """A task of ``steps`` steps starts, of which ``done`` were made before."""
        self._title = f"task {task + 1}/{self._tasks} {name}"
        self._steps, self._first = steps, done
        self._start, self._next = time.perf_counter(), 0.0

    def step(self, step: int) -> None:
        """Redraw at most five times a second."""
        if not self._live:
            return
        now = time.perf_counter()
        if now < self._next:
            return
        self._next = now + 0.2
        seconds = max(now - self._start, 1e-9)
        rate = max((step - self._first) / seconds, 1e-9)
        left = (self._steps - step) / rate
        self._write(f"{self._title}: {step}/{self._steps} steps, {rate:.0f}/s, {left:.0f} s left")

    def end(self, text: str) -> None:
        """The task's line as it stays."""
        if self._show:
            self._write(f"{self._title}: {text}", end="\n")

    def _write(self, text: str, end: str = "") -> None:
        clear = "\r\x1b[2K" if self._live else ""
        sys.stderr.write(f"{clear}{text}{end}")
        sys.stderr.flush()
