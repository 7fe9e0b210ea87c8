"""Checks of numbers that a user gives, by the names of their arguments."""

from numbers import Integral, Real


def whole(least: int = 1, /, **given: int) -> None:
    """Raise unless all numbers are whole and at least ``least``: ``whole(size=size)``."""
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise TypeError(f"{name}= is a whole number; got {value!r}")
        if value < least:
            raise ValueError(f"{name}= must be at least {least}; got {value}")


def flag(**given: bool) -> None:
    """Raise unless all are ``True`` or ``False``: words and numbers would pass as one of them."""
    for name, value in given.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name}= is True or False; got {value!r}")


def shown(progress: bool | None) -> None:
    """Raise unless ``progress=`` says whether to show a line, or ``None`` leaves it open."""
    if progress is not None and not isinstance(progress, bool):
        raise TypeError(
            f"progress= is True, False, or None to show a line on a terminal only; got {progress!r}"
        )


def inside(interval: str, /, **given: float) -> None:
    """Raise unless all numbers lie in ``interval``: ``inside("[0, 1)", momentum=momentum)``."""
    low, high = (float(end) for end in interval[1:-1].split(","))
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"{name}= is a number; got {value!r}")
        # written so that NaN lies in no interval
        above = value >= low if interval[0] == "[" else value > low
        if not (above and (value <= high if interval[-1] == "]" else value < high)):
            raise ValueError(f"{name}= must lie in {interval}; got {value}")
