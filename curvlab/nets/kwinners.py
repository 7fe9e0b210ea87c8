"""k-winners with heterogeneous dropout: an activation that lets few units through.

Per sample only the k largest of n units pass; which units those are differs between tasks, so that
the tasks' activations are nearly orthogonal. Two forces keep units from winning again and again:

* boosting: in training, values are multiplied by exp(-strength * duty) *for choosing only*. The
  duty is the fraction of samples that a unit won, over the last ``period`` samples, or over all of
  them while there are fewer. The strength falls by a factor with every epoch;
* heterogeneous dropout: a unit that won often in past tasks is dropped before the choice, in
  training, with probability 1 - exp(-alpha * count / largest count).

Dropped units are not compensated for by scaling up the others, as ordinary dropout does: a scaled
survivor would win more easily, the opposite of the purpose.

As in nupic.torch: how many win, the duty, the boost and its decay, and, for images, units chosen
over the whole image with one duty per channel. What differs, and why: in evaluation there is no
boost, so that predictions depend on the parameters alone and not on running counts; winners below
zero are cut, so that this is an activation by itself; negative values are not boosted, which would
push them the wrong way. Choosing among the channels of each place (its ``local``) is not there.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from curvlab.checks import inside, whole
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

    Images ``(N, n, H, W)`` have ``n`` channels: the k largest of all n H W values of a sample pass,
    and duty, counts and dropout are those of channels.

    Args:
        n: Units, or channels.
        active: Fraction of them that win in training.
        inference: Factor on k in evaluation, 1.5 as published.
        boost: Strength of boosting at first; 0 switches it off.
        boost_decay: Factor on the strength after every epoch (:meth:`calm`), .9 as published.
        period: Samples over which the duty is averaged.
        layer: Number of the layer, so that layers of one network drop different units.

    Attributes:
        duty: Buffer ``(n,)``, the fraction of recent training samples that each unit won.
        seen: Buffer, training samples so far.
        strength: Buffer, the present strength of boosting.
        keep: Buffer ``(n,)``, the probability that a unit takes part in training; 1 in the first
            task, then :meth:`discourage`.
        count: Buffer ``(n,)``, samples won in past tasks.
    """

    duty: Tensor
    seen: Tensor
    strength: Tensor
    keep: Tensor
    count: Tensor

    def __init__(
        self,
        n: int,
        active: float = 0.1,
        *,
        inference: float = 1.5,
        boost: float = 1.0,
        boost_decay: float = 0.9,
        period: int = 1000,
        layer: int = 0,
    ) -> None:
        super().__init__()
        whole(period=period)
        inside("[0, inf)", boost=boost)
        inside("[0, 1]", boost_decay=boost_decay)
        inside("(0, 1]", active=active)
        inside("[1, inf)", inference=inference)
        self.n, self.boost, self.boost_decay, self.period = n, boost, boost_decay, period
        self.active, self.inference = active, inference
        self.register_buffer("duty", torch.zeros(n))
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("strength", torch.full((), boost))
        self.register_buffer("keep", torch.ones(n))
        self.register_buffer("count", torch.zeros(n))
        self.layer = layer
        self._seed = 0
        self._draws = 0

    def draw_(self, generator: torch.Generator) -> None:
        del generator  # buffers only, which start at constants
        self.duty.zero_()
        self.seen.zero_()
        self.strength.fill_(self.boost)
        self.keep.fill_(1.0)
        self.count.zero_()

    def reseed(self, seed: int) -> None:
        """Before a step: the dropout masks that follow are functions of ``seed``."""
        self._seed, self._draws = seed, 0

    def count_of(self, units: int) -> int:
        """How many of ``units`` win, in the module's present mode."""
        k = max(1, round(self.active * units))
        return k if self.training else min(units, int(self.inference * k))

    def winners(self, inputs: Tensor) -> Tensor:
        """The mask of units that pass, of the shape of ``inputs``, in the present mode."""
        scores = inputs.detach()
        k = self.count_of(scores[0].numel())
        if not self.training:
            return top_units(scores.flatten(1), k).view_as(inputs)
        if self.boost > 0.0:
            factor = self._per_unit(torch.exp(-self.strength * self.duty), inputs)
            # on the positive part: a boost of a negative value would push it the wrong way
            scores = scores.clamp(min=0.0) * factor + scores.clamp(max=0.0)
        alive = self._alive(scores)
        # dropped units come after all others, and are removed should k reach them
        chosen = top_units(scores.masked_fill(~alive, -math.inf).flatten(1), k)
        return chosen.view_as(inputs) & alive

    def _per_unit(self, values: Tensor, inputs: Tensor) -> Tensor:
        """``values`` ``(n,)`` along the second dimension of ``inputs``."""
        return values.view(1, -1, *[1] * (inputs.dim() - 2))

    def forward(self, inputs: Tensor) -> Tensor:
        if inputs.dim() not in (2, 4) or inputs.shape[1] != self.n:
            raise ValueError(
                f"KWinners needs inputs (N, {self.n}) or images (N, {self.n}, H, W); got "
                f"{tuple(inputs.shape)}"
            )
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

    def calm(self) -> None:
        """After an epoch: boost less."""
        self.strength.mul_(self.boost_decay)

    def _alive(self, scores: Tensor) -> Tensor:
        # one mask per layer and step, not per sample: a task's samples should share their units
        position = 7919 * self.layer + 104_729 * self._draws
        generator = torch.Generator().manual_seed((self._seed + position) % 2**63)
        self._draws += 1
        uniform = torch.rand(self.n, generator=generator, dtype=torch.float64).to(scores.device)
        return self._per_unit(uniform < self.keep, scores).expand_as(scores)

    @torch.no_grad()
    def _observe(self, mask: Tensor) -> None:
        self.seen += len(mask)
        # over all samples until there were a period of them, without a wait for the host
        weight = (len(mask) / self.seen.clamp(max=self.period)).clamp(max=1.0)
        share = mask.to(self.duty).transpose(0, 1).flatten(1).mean(1)
        self.duty.lerp_(share, weight)


def kwinners_mlp(
    sizes: Sequence[int] = (196, 200, 200, 10),
    active: float = 0.1,
    *,
    bias: bool = False,
    seed: Seed = 0,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> nn.Sequential:
    """``Linear``, k-winners, ..., ``Linear``.

    Args:
        sizes: Units from the inputs to the outputs.
        active: Fraction of the hidden units that win; the rest is :class:`KWinners`' default.
        bias: Without by default, as GPM needs (free biases forget).
    """
    if len(sizes) < 3:
        raise ValueError(f"sizes needs inputs, a hidden layer and outputs; got {tuple(sizes)}")

    def make() -> nn.Sequential:
        layers: list[nn.Module] = []
        for layer, (inputs, outputs) in enumerate(pairwise(sizes[:-1])):
            layers.append(nn.Linear(inputs, outputs, bias=bias))
            layers.append(KWinners(outputs, active, layer=layer))
        layers.append(nn.Linear(sizes[-2], sizes[-1], bias=bias))
        return nn.Sequential(*layers)

    return build(make, seed, dtype, device)
