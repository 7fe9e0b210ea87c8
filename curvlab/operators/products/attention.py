"""Attention whose memory grows with the length of a sequence, not with its square.

The fused kernels of torch have no second derivatives, so products use its plain formula, which
holds the weights of every query on every key several times over. Where these are large, queries are
taken a few at a time and computed again when they are differentiated: exact, in linear memory, for
about twice the time of the attention alone.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from curvlab.operators.products.recompute import LARGE, PIECE, Formula, recomputable, recomputed

# arguments in torch's order, with their defaults
ARGUMENTS: dict[str, Any] = {
    "query": None,
    "key": None,
    "value": None,
    "attn_mask": None,
    "dropout_p": 0.0,
    "is_causal": False,
    "scale": None,
    "enable_gqa": False,
}


def pays(given: dict[str, Any]) -> bool:
    """Whether a call with these arguments should go through :func:`attention`."""
    query, key, value = given["query"], given["key"], given["value"]
    return (
        given["dropout_p"] == 0.0  # a mask of dropout would have to be drawn again
        and not (given["is_causal"] and given["attn_mask"] is not None)  # torch refuses it
        and recomputable(query, key, value)
        and query[..., 0].numel() * key.shape[-2] * query.element_size() > LARGE
    )


def attention(given: dict[str, Any]) -> Tensor:
    """torch's ``scaled_dot_product_attention``, the same argument for argument."""
    query, key, value, mask = (given[name] for name in ("query", "key", "value", "attn_mask"))
    length, keys = query.shape[-2], key.shape[-2]
    row = query[..., 0, 0].numel() * keys * query.element_size()
    step = max(1, PIECE // row)
    options = {name: given[name] for name in ("is_causal", "scale", "enable_gqa")}
    found: list[Tensor] = []
    for start in range(0, length, step):
        stop = min(start + step, length)
        tensors = [query[..., start:stop, :], key, value]
        if mask is not None:
            every = mask.dim() < 2 or mask.shape[-2] == 1  # the same for all queries
            tensors.append(mask if every else mask[..., start:stop, :])
        found.extend(recomputed(Formula(_Queries(options, start, stop)), tensors))
    return torch.cat(found, -2)


@dataclass(frozen=True, slots=True)
class _Queries:
    """The attention of queries ``start`` to ``stop``.

    Keys and values come whole, to be cut inside: second derivatives of cuts made outside would wait
    in the autograd engine until all pieces are done.
    """

    options: dict[str, Any]  # of torch's function
    start: int
    stop: int

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        if self.options["is_causal"]:
            # later keys have no weight: they need not be read
            last = min(self.stop, key.shape[-2])
            key, value = key[..., :last, :], value[..., :last, :]
            seen = torch.ones(self.stop - self.start, last, dtype=torch.bool, device=key.device)
            mask = seen.tril(self.start)
        options = {**self.options, "is_causal": False}
        with sdpa_kernel(SDPBackend.MATH):
            return scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)
