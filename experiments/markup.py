"""HTML in which everything is escaped that was not made here.

``tag("p", "a < b")`` gives ``<p>a &lt; b</p>``; only what ``tag`` itself returned goes in as it is.
"""

from collections.abc import Iterable
from html import escape

VOID = frozenset({"img", "meta", "wbr"})


class Markup(str):
    """Finished HTML."""

    __slots__ = ()


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """An element. ``None`` leaves out a child or an attribute; ``class_`` stands for ``class``."""
    opening = name + "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    inside = joined(children)
    if name in VOID:
        if inside:
            raise ValueError(f"<{name}> can have no content; got {inside[:40]!r}")
        return Markup(f"<{opening}>")
    return Markup(f"<{opening}>{inside}</{name}>")


def joined(children: Iterable[object], separator: str = "") -> Markup:
    """The children one after the other, what is not markup escaped."""
    parts = (
        child if isinstance(child, Markup) else escape(str(child))
        for child in children
        if child is not None
    )
    return Markup(escape(separator).join(parts))


def table(
    head: Iterable[object],
    rows: Iterable[Iterable[object]],
    caption: object = None,
    class_: str | None = None,
) -> Markup:
    """A table in a box of its own, which scrolls where the page is too narrow for it.

    The first cell of every row is its heading.
    """
    body = []
    for first, *rest in rows:
        cells = joined(tag("td", cell) for cell in rest)
        body.append(tag("tr", tag("th", first, scope="row"), cells))
    heading = tag("tr", *(tag("th", cell, scope="col") for cell in head))
    label = None if caption is None else str(caption)
    inside = tag("table", tag("thead", heading), tag("tbody", *body), class_=class_)
    # focusable: without a mouse a box can be scrolled only when it can be reached
    box = tag("div", inside, class_="scroll", tabindex="0", role="region", aria_label=label)
    # above the box, not a <caption> in it, which would be as wide as the table
    return box if caption is None else joined([tag("p", caption, class_="caption"), box])
