"""A line on the terminal while a solve runs: products made and pairs found. Silent elsewhere."""

import sys
import time
from typing import TextIO


class Progress:
    """Writes ``label: 37 products, 12 of 20 pairs`` over itself, at most ten times a second.

    Args:
        shown: ``None`` writes only when ``stream`` is a terminal.
    """

    def __init__(self, label: str, shown: bool | None, stream: TextIO | None = None) -> None:
        self.label = label
        self.stream = sys.stderr if stream is None else stream
        self.shown = self.stream.isatty() if shown is None else shown
        self.width = 0
        self.latest = 0.0

    def update(
        self,
        products: int | None,
        found: int,
        wanted: int,
        note: str = "",
        unit: str = "pairs",
    ) -> None:
        """Show the present state; ``products`` of ``None`` are not counted."""
        now = time.monotonic()
        if not self.shown or now - self.latest < 0.1:
            return
        self.latest = now
        filled = round(20 * found / max(1, wanted))
        bar = "#" * filled + "." * (20 - filled)
        made = "" if products is None or unit == "products" else f", {products} products"
        line = f"{self.label} [{bar}] {found} of {wanted} {unit}{made} {note}"
        self.stream.write("\r" + line.ljust(self.width))
        self.stream.flush()
        self.width = len(line)

    def close(self) -> None:
        """Leave a clean line behind."""
        if self.shown and self.width:
            self.stream.write("\r" + " " * self.width + "\r")
            self.stream.flush()
            self.width = 0
