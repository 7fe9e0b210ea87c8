"""Where the rows of a basis came from."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows ``start`` to ``stop`` of a basis, added together.

    Attributes:
        task: The task they protect.
        step: The training step at which they were computed, if known.
        values: One eigenvalue per row, or empty.
    """

    task: str
    start: int
    stop: int
    step: int | None = None
    values: tuple[float, ...] = ()

    def __len__(self) -> int:
        return self.stop - self.start


def truncated(segments: Sequence[Segment], size: int) -> tuple[Segment, ...]:
    """The segments of the first ``size`` rows."""
    kept = []
    for segment in segments:
        stop = min(segment.stop, size)
        if stop > segment.start:
            values = segment.values[: stop - segment.start]
            kept.append(replace(segment, stop=stop, values=values))
    return tuple(kept)


def joined(segments: Sequence[Segment], new: Segment) -> tuple[Segment, ...]:
    """``segments`` and ``new``, which goes on with the last one if it has the same origin."""
    if segments:
        last = segments[-1]
        same = (last.task, last.step, bool(last.values)) == (new.task, new.step, bool(new.values))
        if same:
            whole = replace(last, stop=new.stop, values=last.values + new.values)
            return (*segments[:-1], whole)
    return (*segments, new)


def to_json(segments: Sequence[Segment]) -> list[dict[str, Any]]:
    """Segments as plain lists and numbers."""
    return [asdict(segment) for segment in segments]


def from_json(records: Any, size: int) -> tuple[Segment, ...]:
    """Segments from a file; raises ``ValueError`` unless they cover ``size`` rows in order."""
    if not isinstance(records, list):
        raise ValueError("its segments are not a list")
    segments = [_segment(record) for record in records]
    edges = [0, *(segment.stop for segment in segments)]
    starts = [segment.start for segment in segments]
    if starts != edges[:-1] or edges[-1] != size or any(len(s) < 1 for s in segments):
        raise ValueError(f"its segments do not cover its {size} rows in order")
    if any(segment.values and len(segment.values) != len(segment) for segment in segments):
        raise ValueError("a segment has another number of values than of rows")
    return tuple(segments)


def _segment(record: Any) -> Segment:
    """One of a file's segments, field by field."""
    fields = record if isinstance(record, dict) else {}
    task, step, values = fields.get("task"), fields.get("step"), fields.get("values")
    start, stop = fields.get("start", ""), fields.get("stop", "")
    numbers = (start, stop, 0 if step is None else step)
    if not isinstance(task, str) or any(type(number) is not int for number in numbers):
        raise ValueError(f"its segments cannot be read: {record!r:.80}")
    if not isinstance(values, list) or any(type(v) not in (int, float) for v in values):
        raise ValueError(f"its segments cannot be read: the values of {task!r:.40}")
    return Segment(task, start, stop, step, tuple(float(v) for v in values))
