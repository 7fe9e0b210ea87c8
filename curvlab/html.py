"""Results in a notebook: a heading, a small table, a spark line; plain HTML without scripts."""

from collections.abc import Iterable, Sequence
from html import escape

_CELL = 'style="text-align:right;padding:1px 10px"'
_WIDTH, _HEIGHT = 180, 36  # of a spark line, in pixels


def block(title: str, header: Sequence[str], rows: Iterable[Sequence[str]], spark: str = "") -> str:
    """A result: its title, a spark line if there is one, and a table.

    Args:
        title: One line; as all texts it may hold anything, it is escaped.
        header: Names of the columns.
        rows: Their cells.
        spark: From :func:`spark`.
    """
    heads = "".join(f"<th {_CELL}>{escape(name)}</th>" for name in header)
    lines = "".join(
        "<tr>" + "".join(f"<td {_CELL}>{escape(cell)}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    table = f"<table><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table>"
    return f"<div><strong>{escape(title)}</strong><br>{spark}{table}</div>"


def spark(heights: Sequence[float]) -> str:
    """Bars of ``heights``, up and down from zero, as an inline picture."""
    if not heights:
        return ""
    low, high = min(0.0, *heights), max(0.0, *heights)
    span = (high - low) or 1.0
    width = _WIDTH / len(heights)
    zero = _HEIGHT * high / span
    bars = []
    for place, height in enumerate(heights):
        size = _HEIGHT * abs(height) / span
        top = zero - size if height > 0 else zero
        colour = "#0072B2" if height > 0 else "#D55E00"
        bars.append(
            f'<rect x="{place * width:.1f}" y="{top:.1f}" width="{max(0.5, 0.8 * width):.1f}" '
            f'height="{size:.1f}" fill="{colour}"/>'
        )
    return f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img">{"".join(bars)}</svg><br>'
