"""k-winners with heterogeneous dropout: an activation that lets few units through.

Per sample only the k largest of n units pass; which units those are differs between tasks, so that
the tasks' activations are nearly orthogonal. Two forces keep units from winning again and again:

* boosting: in training, values are multiplied by exp(-strength * duty) *for choosing only*, with
  duty the running fraction of samples that a unit won;
* heterogeneous dropout: a unit that won often in past tasks is dropped before the choice, in
  training, with probability 1 - exp(-alpha * count / largest count).

Dropped units are not compensated for by scaling up the others, as ordinary dropout does: a scaled
survivor would win more easily, the opposite of the purpose. In evaluation there is neither boost
nor dropout, so predictions depend on the parameters alone and not on running counts.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from curvlab.nets.initialise import Seed, build


def top_units(scores: Tensor, k: int) -> Tensor:
    """A mask of exactly ``k`` units per sample, the largest ``scores`` ``(N, n)``.

    Ties are broken by position: a threshold (``scores >= k-th largest``) would let more than k
    through, and all of them where a layer is silent.
    """
    chosen = scores.topk(k, dim=1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, chosen, True)


class KWinners(nn.Module):
    """The k largest of ``n`` units, rectified; ``(N, n)`` to ``(N, n)``.

    Args:
        n: Units.
        active: Fraction of them that win in training.
        inference: Factor on k in evaluation, 1.5 as published.
        boost: Strength of boosting; 0 switches it off.
        period: Samples over which the duty is averaged.
        layer: Number of the layer, so that layers of one network drop different units.

    Attributes:
        duty: Buffer ``(n,)``, the fraction of recent training samples that each unit won.
        keep: Buffer ``(n,)``, the probability that a unit takes part in training; 1 in the first
            task, then :meth:`discourage`.
        count: Buffer ``(n,)``, samples won in past tasks.
    """

    duty: Tensor
    keep: Tensor
    count: Tensor

    def __init__(
        self,
        n: int,
        active: float = 0.1,
        *,
        inference: float = 1.5,
        boost: float = 1.0,
        period: int = 1000,
        layer: int = 0,
    ) -> None:
        super().__init__()
        if not 0.0 < active <= 1.0 or inference < 1.0:
            raise ValueError(
                f"active must be in (0, 1] and inference 1 or more; got {active}, {inference}"
            )
        self.n, self.boost, self.period = n, boost, period
        self.k = max(1, round(active * n))
        self.k_inference = min(n, max(1, round(inference * active * n)))
        self.register_buffer("duty", torch.zeros(n))
        self.register_buffer("keep", torch.ones(n))
        self.register_buffer("count", torch.zeros(n))
        self.layer = layer
        self._seed = 0
        self._draws = 0

    def draw_(self, generator: torch.Generator) -> None:
        del generator  # buffers only, which start at constants
        self.duty.zero_()
        self.keep.fill_(1.0)
        self.count.zero_()

    def reseed(self, seed: int) -> None:
        """Before a step: the dropout masks that follow are functions of ``seed``."""
        self._seed, self._draws = seed, 0

    def winners(self, inputs: Tensor) -> Tensor:
        """The mask of units that pass, ``(N, n)``, in the module's present mode."""
        if not self.training:
            return top_units(inputs, self.k_inference)
        scores = inputs.detach()
        if self.boost > 0.0:
            # on the positive part: a boost of a negative value would push it the wrong way
            scores = scores.clamp(min=0.0) * torch.exp(-self.boost * self.duty) + scores.clamp(
                max=0.0
            )
        alive = self._alive(scores)
        # dropped units come after all others, and are removed should k reach them
        chosen = top_units(scores.masked_fill(~alive, -math.inf), self.k)
        return chosen & alive

    def forward(self, inputs: Tensor) -> Tensor:
        if inputs.dim() != 2 or inputs.shape[1] != self.n:
            raise ValueError(f"KWinners needs inputs (N, {self.n}); got {tuple(inputs.shape)}")
        mask = self.winners(inputs)
        if self.training:
            self._observe(mask & (inputs > 0))
        return inputs.clamp(min=0.0).masked_fill(~mask, 0.0)

    @torch.no_grad()
    def discourage(self, wins: Tensor, alpha: float) -> None:
        """After a task: add ``wins`` ``(n,)`` to the counts and lower busy units' probability."""
        self.count += wins.to(self.count)
        largest = self.count.max()
        if float(largest) > 0.0:
            self.keep.copy_(torch.exp(-alpha * self.count / largest))

    def _alive(self, scores: Tensor) -> Tensor:
        # one mask per layer and step, not per sample: a task's samples should share their units
        position = 7919 * self.layer + 104_729 * self._draws
        generator = torch.Generator().manual_seed((self._seed + position) % 2**63)
        self._draws += 1
        uniform = torch.rand(self.n, generator=generator, dtype=torch.float64).to(scores.device)
        return (uniform < self.keep).expand_as(scores)

    @torch.no_grad()
    def _observe(self, mask: Tensor) -> None:
        weight = min(1.0, len(mask) / self.period)
        self.duty.lerp_(mask.to(self.duty).mean(0), weight)


def kwinners_mlp(
    sizes: Sequence[int] = (196, 200, 200, 10),
    active: float = 0.1,
    *,
    inference: float = 1.5,
    boost: float = 1.0,
    bias: bool = False,
    seed: Seed = 0,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> nn.Sequential:
    """``Linear``, k-winners, ..., ``Linear``.

    Args:
        sizes: Units from the inputs to the outputs.
        active, inference, boost: As in :class:`KWinners`.
        bias: Without by default, as GPM needs (free biases forget).
    """
    if len(sizes) < 3:
        raise ValueError(f"sizes needs inputs, a hidden layer and outputs; got {tuple(sizes)}")

    def make() -> nn.Sequential:
        layers: list[nn.Module] = []
        for layer, (inputs, outputs) in enumerate(pairwise(sizes[:-1])):
            layers.append(nn.Linear(inputs, outputs, bias=bias))
            layers.append(KWinners(outputs, active, inference=inference, boost=boost, layer=layer))
        layers.append(nn.Linear(sizes[-2], sizes[-1], bias=bias))
        return nn.Sequential(*layers)

    return build(make, seed, dtype, device)
