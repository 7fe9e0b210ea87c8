"""Checks of numbers that a user gives, by the names of their arguments."""

import operator
from numbers import Real
from typing import SupportsIndex

SEEDS = 2**40  # solvers make several seeds of one, which torch takes up to 2**63


def integers(**given: SupportsIndex) -> list[int]:
    """The numbers as ``int``: NumPy's and torch's count as well. Raise if one is not whole."""
    found = []
    for name, value in given.items():
        try:
            if isinstance(value, bool):
                raise TypeError
            found.append(operator.index(value))
        except TypeError:
            raise TypeError(f"{name}= is a whole number; got {value!r}") from None
    return found


def whole(least: int = 1, /, **given: SupportsIndex) -> list[int]:
    """The same, all at least ``least``: ``size, count = whole(size=size, count=count)``."""
    found = integers(**given)
    for name, value in zip(given, found, strict=True):
        if value < least:
            raise ValueError(f"{name}= must be at least {least}; got {value}")
    return found


def seeded(seed: SupportsIndex) -> int:
    """The seed of a solver's random vectors as ``int``."""
    [number] = integers(seed=seed)
    if not 0 <= number < SEEDS:
        raise ValueError(f"seed= is a whole number, 0 <= seed < 2**40; got {number}")
    return number


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
