"""Functions of torch whose derivatives are missing, wrong or without digits, replaced.

:class:`Replaced` puts others in their place while a loss is evaluated, whether the user calls them
or a layer inside the model. They are made of torch's operations, so that every engine can
differentiate and trace them. The context is the thread's own.

**Attention** has fused implementations without second derivatives: the written-out one is used.
**weight_norm** has a second derivative in torch 2.13 that is wrong: its formula is written out.

**Cross-entropies** lose their digits as the loss goes to 0. torch's gradient at the logits is
``softmax - one_hot``. On a sample that is fitted with probability ``p`` the difference ``p - 1``
has a relative error of eps / (1 - p): in float32 nothing is left of it at a loss of 1e-7, where
trained networks are. Here no term is a difference of nearly equal ones:

- the loss is ``log(1 + sum of exp(z_j - z_y))`` over the other classes ``j``, and so its gradient
  at the target's logit is minus the sum of the others';
- the Hessian ``diag(p) - p p'`` is applied to tangents measured from that of the likeliest class,
  which changes nothing exactly (a constant is in its kernel) and leaves small terms small;
- for binary targets, ``1 - sigmoid(z)`` is ``sigmoid(-z)``.

Soft targets and label smoothing keep torch's own: there the loss does not go to 0. ``nll_loss`` of
``log_softmax`` is the cross-entropy of the logits, and is computed as that.

**Autocast** inside the model would round some products and not others, so it is left out unless
``precision="bfloat16"`` asks for it.
"""

import threading
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from curvlab.operators.narrow import widened
from curvlab.operators.products.attention import ARGUMENTS, attention, pays
from curvlab.operators.products.recompute import LARGE, PIECE, Formula, recomputable, recomputed

# Some of torch's switches are the whole process's: one thread at a time may have them changed.
ONE_AT_A_TIME = threading.RLock()
LINEAR = 40.0  # softplus(x) is x from here on, to rounding in float64


def excess(logits: Tensor, targets: Tensor) -> Tensor:
    """``softmax - one_hot``, ``(N, C)``: the gradient of the summed cross-entropy."""
    column = targets.unsqueeze(1)
    others = logits.softmax(1).scatter_(1, column, 0.0)
    return others.scatter_(1, column, -others.sum(1, keepdim=True))


def curve(probabilities: Tensor, tangents: Tensor) -> Tensor:
    """``diag(p) - p p'`` times ``tangents``; ``(N, 1, C)`` and ``(N, b, C)``."""
    top = probabilities.argmax(-1, keepdim=True).expand(-1, tangents.shape[1], 1)
    weighted = (tangents - tangents.gather(-1, top)).mul_(probabilities)
    return weighted.addcmul_(probabilities, weighted.sum(-1, keepdim=True), value=-1.0)


class Replaced(TorchFunctionMode):
    """Replaces the functions in calls made inside the context; notes what it met.

    Args:
        device: The type of device of the model.
        autocast: Whether autocast is wanted; if not, it is off in every call.
        own_attention: Whether attention is replaced; if not, torch has been told not to fuse it.
        widen: What narrower floats are converted to in every call; see
            :mod:`curvlab.operators.narrow`.
        frozen: The storages of the weights that are.
    """

    def __init__(
        self,
        device: str = "cpu",
        *,
        autocast: bool = False,
        own_attention: bool = True,
        widen: torch.dtype | None = None,
        frozen: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__()
        self.device, self.wanted, self.own_attention = device, autocast, own_attention
        self.widen, self.frozen = widen, frozen
        self.attention = self.autocast = False  # whether a call was of attention, or in autocast
        self._logits = WeakTensorKeyDictionary()  # of log-probabilities

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.wanted or not torch.is_autocast_enabled(self.device):
            return self._call(func, args, kwargs or {})
        self.autocast = True
        with torch.autocast(self.device, enabled=False):
            return self._call(func, args, kwargs or {})

    def _call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if self.widen is not None:
            args, kwargs = widened(func, args, kwargs, self.widen, self.frozen)
        if func is functional.cross_entropy:
            given = {**_CROSS_ENTROPY, **dict(zip(_CROSS_ENTROPY, args, strict=False)), **kwargs}
            if _hard(given):
                return _cross_entropy(given)
        elif func in _LOG_SOFTMAX:
            return self._log_softmax(func, args, kwargs)
        elif func is functional.nll_loss:
            given = {**_CROSS_ENTROPY, **dict(zip(_CROSS_ENTROPY, args, strict=False)), **kwargs}
            if given["input"] in self._logits:
                given["input"] = self._logits[given["input"]]
                if _hard(given):
                    return _cross_entropy(given)
        elif func is functional.binary_cross_entropy_with_logits:
            given = {**_BINARY, **dict(zip(_BINARY, args, strict=False)), **kwargs}
            if _known(given) and given["target"].shape == given["input"].shape:
                return _binary(given)
        elif func is functional.scaled_dot_product_attention:
            self.attention = True
            if not self.own_attention:
                return func(*args, **kwargs)
            given = {**ARGUMENTS, **dict(zip(ARGUMENTS, args, strict=False)), **kwargs}
            return attention(given) if pays(given) else _attention(given)
        elif func is functional.multi_head_attention_forward:
            # inside a function this context is off, so that torch itself has to be told
            self.attention = True
            with ONE_AT_A_TIME, sdpa_kernel(SDPBackend.MATH):
                return func(*args, **kwargs)
        elif func is torch._weight_norm:
            return _weight_norm(*args, **kwargs)
        return func(*args, **kwargs)

    def _log_softmax(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """torch's own; remembers of which logits, for an ``nll_loss`` of it."""
        result = func(*args, **kwargs)
        logits: Any = kwargs.get("input", args[0] if args else None)
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        plain = type(logits) is Tensor and logits.dim() > 1 and result.dtype == logits.dtype
        if plain and dim is not None and dim % logits.dim() == 1:
            self._logits[result] = logits
        return result


_LOG_SOFTMAX = (functional.log_softmax, torch.log_softmax, Tensor.log_softmax)
# arguments in torch's order, with their defaults
_CROSS_ENTROPY: dict[str, Any] = {
    "input": None,
    "target": None,
    "weight": None,
    "size_average": None,
    "ignore_index": -100,
    "reduce": None,
    "reduction": "mean",
    "label_smoothing": 0.0,
}
_BINARY: dict[str, Any] = {
    "input": None,
    "target": None,
    "weight": None,
    "size_average": None,
    "reduce": None,
    "reduction": "mean",
    "pos_weight": None,
}


def _known(given: dict[str, Any]) -> bool:
    values = given["input"]
    return (
        type(values) in (Tensor, torch.nn.Parameter)
        and values.dtype in (torch.float32, torch.float64)
        and given["reduction"] in ("mean", "sum", "none")
        and given["size_average"] is None
        and given["reduce"] is None
    )


def _hard(given: dict[str, Any]) -> bool:
    """Class numbers as targets, one per row of logits."""
    logits, targets, weight = given["input"], given["target"], given["weight"]
    return (
        _known(given)
        and (weight is None or weight.dtype == logits.dtype)  # torch refuses other weights
        and logits.dim() >= 2
        and targets.dtype == torch.int64
        and targets.shape == logits.shape[:1] + logits.shape[2:]
        and given["label_smoothing"] == 0.0
    )


def _cross_entropy(given: dict[str, Any]) -> Tensor:
    logits: Tensor = given["input"]
    targets: Tensor = given["target"]
    weight: Tensor | None = given["weight"]
    rows = logits.movedim(1, -1).flatten(0, -2) if logits.dim() > 2 else logits
    flat = targets.reshape(-1)
    counted = flat != given["ignore_index"]
    column = flat.where(counted, 0).unsqueeze(1)
    losses: Tensor
    if rows.nbytes > LARGE and recomputable(rows):
        # A vocabulary: the formula holds several numbers for each logit, so a few rows at a time.
        step = max(1, PIECE // (rows.shape[1] * rows.element_size()))
        pieces = zip(torch.split(rows, step), torch.split(column, step), strict=True)
        losses = torch.cat([recomputed(Formula(_losses), piece)[0] for piece in pieces])
    else:
        losses = _losses(rows, column)
    weights = counted.to(losses.dtype) if weight is None else weight[column[:, 0]] * counted
    # a product with 0 would turn an infinite loss of an ignored row into NaN
    losses = (losses * weights).where(counted, 0.0)
    if given["reduction"] == "none":
        return losses.reshape(targets.shape)
    return losses.sum() / weights.sum() if given["reduction"] == "mean" else losses.sum()


def _losses(rows: Tensor, column: Tensor) -> Tensor:
    """The cross-entropy of every row ``(N, C)`` at the class in ``column`` ``(N, 1)``."""
    beyond = rows - rows.gather(1, column)
    top = beyond.detach().amax(1, keepdim=True)  # 0 where the target is likeliest, never below
    others = (beyond - top).scatter(1, column, -torch.inf).exp().sum(1)
    top = top.squeeze(1)
    # log(exp(-top) + others) + top, written so that it is log1p(others) where top is 0
    result: Tensor = torch.log1p(others + torch.expm1(-top)) + top
    return result


def _binary(given: dict[str, Any]) -> Tensor:
    logits: Tensor = given["input"]
    targets: Tensor = given["target"]
    positive: Tensor | None = given["pos_weight"]
    ones = targets if positive is None else targets * positive
    losses = ones * functional.softplus(-logits, threshold=LINEAR)
    losses = losses + (1 - targets) * functional.softplus(logits, threshold=LINEAR)
    losses = losses if given["weight"] is None else losses * given["weight"]
    if given["reduction"] == "none":
        return losses
    return losses.mean() if given["reduction"] == "mean" else losses.sum()


def _attention(given: dict[str, Any]) -> Tensor:
    query, mask = given["query"], given["attn_mask"]
    if mask is not None and mask.dtype == torch.bool:  # this operator would add it as 0 and 1
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
    result: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_attention_math(
        query,
        *(given[name] for name in ("key", "value")),
        mask,
        *(given[name] for name in ("dropout_p", "is_causal")),
        scale=given["scale"],
        enable_gqa=given["enable_gqa"],
    )
    return result[0]


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    kept = range(v.dim()) if dim == -1 else [d for d in range(v.dim()) if d != dim]
    scale: Tensor = g / torch.linalg.vector_norm(v, dim=tuple(kept), keepdim=True)
    return v * scale
