"""Checks of the numbers that learners are made with; errors name the argument."""

import math
from numbers import Integral, Real


def whole(name: str, value: int, least: int = 1) -> int:
    """``value`` if it is a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}= is a whole number; got {value!r}")
    if value < least:
        raise ValueError(f"{name}= must be at least {least}; got {value}")
    return value


def finite(name: str, value: float, least: float = 0.0) -> float:
    """``value`` if it is a finite number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}= is a number; got {value!r}")
    if not math.isfinite(value) or value < least:
        raise ValueError(f"{name}= must be a finite number of at least {least:g}; got {value}")
    return value


def portion(name: str, value: float) -> float:
    """``value`` if it lies between 0 and 1."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}= is a number between 0 and 1; got {value!r}")
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name}= is a share of energy, between 0 and 1; got {value}")
    return value
