"""Numbers of users: what is taken, what is refused, and by which name."""

import math

import numpy as np
import pytest
import torch

from curvlab.checks import inside, seeded, whole


@pytest.mark.parametrize("number", [1, 7, np.int64(3), np.uint8(3), torch.tensor(3)])
def test_whole_numbers_are_taken_as_ints(number):
    found = [*whole(size=number), *whole(0, size=number, more=0), seeded(number)]
    assert found == [int(number), int(number), 0, int(number)]
    assert all(type(one) is int for one in found)


@pytest.mark.parametrize("number", [0, -1, 1.0, 2.5, True, np.True_, "3", None, math.nan])
def test_other_numbers_are_refused_by_the_name_of_their_argument(number):
    with pytest.raises((TypeError, ValueError), match=r"^size= "):
        whole(fine=5, size=number)


@pytest.mark.parametrize(
    ("interval", "taken", "refused"),
    [
        ("[0, 1]", [0, 0.5, 1, np.float32(1.0)], [-1e-9, 1.0001]),
        ("[0, 1)", [0, 0.999], [1, -0.1]),
        ("(0, 1]", [1e-300, 1.0], [0, 0.0, 1.1]),
        ("[0, inf)", [0, 1e300], [math.inf, -1]),
        ("(0, inf)", [1e-300], [0, math.inf, -math.inf]),
    ],
)
def test_an_interval_holds_what_its_brackets_say(interval, taken, refused):
    for number in taken:
        inside(interval, share=number)
    for number in [*refused, math.nan, True, "0.5", None]:
        with pytest.raises((TypeError, ValueError), match=r"^share= "):
            inside(interval, share=number)
