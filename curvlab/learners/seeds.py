"""Random numbers by position: a seed for every (run, task, epoch, purpose), whatever ran before.

Because nothing is carried from one draw to the next, a resumed run, a run among others and a run
of its own see the same numbers.
"""

import hashlib

import torch

from curvlab.tasks.samples import Samples, subset


def derived_seed(seed: int, purpose: str, *position: int) -> int:
    """A 40-bit seed, a function of its arguments alone."""
    text = f"{purpose}:{seed}:{':'.join(map(str, position))}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=5).digest(), "little")


def derived_generator(seed: int, purpose: str, *position: int) -> torch.Generator:
    """A CPU generator started at :func:`derived_seed`."""
    return torch.Generator().manual_seed(derived_seed(seed, purpose, *position))


def drawn(samples: Samples, most: int, seed: int, purpose: str, *position: int) -> Samples:
    """``most`` of the samples in random order; all of them if there are fewer."""
    generator = derived_generator(seed, purpose, *position)
    return subset(samples, min(most, len(samples)), seed=generator)
