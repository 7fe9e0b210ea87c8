"""This rank's part of a parameter that may be in shards (``DTensor``, as FSDP2 has them)."""

from typing import Any

from torch import Tensor


def local(tensor: Tensor) -> Tensor:
    """The part held here; of a plain tensor all of it. Writing to it writes to the parameter."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part.detach()


def in_shards(tensor: Tensor) -> bool:
    """Whether other ranks hold other parts of it."""
    placements: Any = getattr(tensor, "placements", ())
    return any(not placement.is_replicate() for placement in placements)


def require_rows(name: str, tensor: Tensor, right_only: bool) -> None:
    """Raise unless a product from the right of ``tensor`` needs nothing from other ranks."""
    placements: Any = getattr(tensor, "placements", ())
    if any(not (one.is_replicate() or one.is_shard(0)) for one in placements):
        raise ValueError(
            f"parameter {name!r} is placed {tuple(placements)}: a protected weight may be in "
            "shards along its first dimension only, as fully_shard has it by default. Train it "
            "without tensor parallelism along its inputs, or freeze it"
        )
    if in_shards(tensor) and not right_only:
        raise ValueError(
            f"parameter {name!r} is in shards along its outputs, which side='outputs' and 'both' "
            "would have to bring together in every step: make the bases with side='inputs'"
        )
