"""What a product of an FSDP2 model costs one of its ranks, counted on a model without memory.

The operator's own code runs, block by block, on the meta device and with a group that sends
nothing: every tensor that a rank would make is seen.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from curvlab.batches import map_tensors, tensors
from curvlab.distributed.divided import IN_SHARDS, Divided, Gathering, Placeholder, units
from curvlab.distributed.group import Group
from curvlab.distributed.shards import Shards
from curvlab.operators.objective import terms
from curvlab.operators.own import own_copy
from curvlab.operators.products.autograd import kept
from curvlab.operators.products.blocks import recomputing
from curvlab.operators.products.sizing import measure
from curvlab.parameters import layout_of, select_parameters
from curvlab.plan.cost import Machine, Unit, evaluating, in_seconds, resized


class Silent(Group):
    """The first of some ranks, which talks to nobody."""

    def __init__(self, size: int) -> None:
        self.rank, self.size = 0, size

    def begin_broadcast(self, _owner: int, _tensor: Tensor, _what: str) -> Callable[[], None]:
        return lambda: None

    def begin_sum_to(
        self, _owner: int, _tensor: Tensor, _what: str = "a sum"
    ) -> Callable[[], None]:
        return lambda: None


def counted_in_shards(
    model: nn.Module, loss: Any, batch: Any, machine: Machine, ranks: int
) -> Unit:
    """Count a product of ``Hessian(model, ...)`` after ``fully_shard`` over ``ranks``.

    Args:
        model: Made with ``torch.device("meta")``.
        batch: A few samples, for their shapes.
        machine: Turns operations into seconds.
        ranks: Over which parameters and vectors are divided.
    """
    layout = layout_of(select_parameters(model))
    space = Shards(layout.n, Silent(ranks))
    element = next(model.parameters()).element_size()

    def part(first: int, size: int) -> Tensor:
        held = max(0, min(first + size, space.held) - first)
        return torch.empty(held, dtype=next(model.parameters()).dtype, device="meta")

    pieces = [part(*place) for place in zip(layout.offsets, layout.sizes, strict=True)]
    division = Divided(layout, [piece.requires_grad_() for piece in pieces], space)
    places = {name: Placeholder.of(division, i) for i, name in enumerate(layout.names)}
    buffers = {name: b.detach().to("meta") for name, b in model.named_buffers()}
    copied = own_copy(model, {**places, **buffers})
    if copied is None:
        raise TypeError("the modules cannot be copied: nothing can be counted")
    whole, shaped = terms(loss).whole, map_tensors(batch, lambda t: t.to("meta"))
    blocks = units(copied)

    def run(size: int) -> Callable[[], Tensor]:
        few = map_tensors(shaped, lambda t: resized(t, size))

        def value() -> Tensor:
            again = recomputing(blocks, lambda _: nullcontext(), True, IN_SHARDS)
            with again, Gathering(second=True):
                return whole(copied, few)

        product = kept(value, division.pieces, division.own)
        one = torch.ones(1, division.own.n, dtype=pieces[0].dtype, device="meta")
        return lambda: product(one)

    with evaluating(copied), sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
        graph = measure(run, 8, 1e18)
        setup, product = in_seconds(run, machine)
    count = len(tensors(batch)[0])
    return Unit(
        n=layout.n,
        element=element,
        held=2 * (space.width * element + sum(b.nbytes for b in buffers.values())),
        sample_bytes=sum(t.nbytes for t in tensors(batch)) / count,
        graph=graph,
        setup=setup,
        product=product,
        row=4 * layout.n * element / machine.bandwidth,
        step=5e-3,
        how=f"counted in shards over {ranks} ranks; {machine.flops:.0e} flop/s at 40%",
        blocks=len(blocks),
    )
