"""How a model and a batch become one number: a loss of outputs and targets, or anything else.

``loss(output, target)`` with batches ``(inputs, targets)``; of a dict batch ``"labels"`` are the
target and the rest are the inputs. Inputs that are a dict or a tuple reach the model as
``forward(**inputs)`` or ``forward(*inputs)``, or whole, by its signature. Outputs with ``.logits``
(the Hugging Face habit) stand for their logits. ``loss=None`` takes the model's own
``output.loss``. Everything else is an :class:`Objective`.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from curvlab.refusals import Refusal, Trap

Reduction = Literal["mean", "sum"]
Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True, slots=True)
class Objective:
    """A scalar of a model and a batch, when it is not ``loss(output, target)``.

    Args:
        function: ``function(model, batch) -> scalar``, the mean or the sum of its samples' terms.
    """

    function: Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True, slots=True)
class Split:
    """A loss in two parts: outputs of the model, and a function of them and the batch."""

    output: Callable[[nn.Module, Any], Tensor]
    criterion: Callable[[Tensor, Any], Tensor]


@dataclass(frozen=True, slots=True)
class Terms:
    """A loss taken apart: ``whole`` always; ``output`` and ``criterion`` when it can be split."""

    whole: Callable[[nn.Module, Any], Tensor]
    output: Callable[[nn.Module, Any], Tensor] | None
    criterion: Callable[[Tensor, Any], Tensor] | None
    loss: Loss | None

    def split(self, name: str) -> "Split":
        """The two parts, if outputs and loss can be told apart; operator ``name`` needs that."""
        if self.output is None or self.criterion is None:
            raise TypeError(
                f"{name} needs the outputs apart from the loss: pass loss(output, target) with "
                "batches (inputs, targets), not an Objective or the model's own loss"
            )
        return Split(self.output, self.criterion)


def _fitting(loss: Loss) -> Callable[[Tensor], Loss]:
    """The loss for outputs of a dtype: class weights that a module holds are converted with it."""
    if not isinstance(loss, nn.Module) or any(True for _ in loss.parameters()):
        return lambda _output: loss
    buffers = [b for b in loss.buffers() if b.is_floating_point()]
    copies: dict[tuple[torch.dtype, torch.device], Loss] = {}

    def at(output: Tensor) -> Loss:
        place = output.dtype, output.device
        if all((b.dtype, b.device) == place for b in buffers) or not output.is_floating_point():
            return loss
        if place not in copies:
            copies[place] = deepcopy(loss).to(dtype=output.dtype, device=output.device)
        return copies[place]

    return at


def terms(loss: Loss | Objective | None) -> Terms:
    """Take ``loss`` apart."""
    if loss is None:
        return Terms(_own_loss, None, None, None)
    if isinstance(loss, Objective):
        return Terms(loss.function, None, None, None)
    if isinstance(loss, str) or not callable(loss):
        raise TypeError(
            "loss must be a callable loss(output, target), an Objective(function), or None for a "
            f"model that returns its own .loss; got {_describe(loss)}. The order of arguments is "
            "model, loss, data"
        )
    call, fitting = loss, _fitting(loss)

    def criterion(output: Tensor, batch: Any) -> Tensor:
        target = target_of(batch)
        if _of_tokens(call, output, target):
            raise ValueError(
                f"cross_entropy takes classes along dimension 1, and these logits "
                f"{tuple(output.shape)} have them along the last: pass curvlab.losses.next_token, "
                "or curvlab.losses.sequence if labels stand where they are predicted"
            )
        return fitting(output)(output, target)

    def whole(model: nn.Module, batch: Any) -> Tensor:
        return criterion(_output(model, batch), batch)

    return Terms(whole, _output, criterion, loss)


def _of_tokens(loss: object, output: Any, target: Any) -> bool:
    """Logits ``(samples, tokens, vocabulary)`` given to torch's cross-entropy as they are."""
    if loss is not nn.functional.cross_entropy and not isinstance(loss, nn.CrossEntropyLoss):
        return False
    if not isinstance(output, Tensor) or not isinstance(target, Tensor) or output.dim() != 3:
        return False
    return target.shape == output.shape[:2] != (output.shape[0], output.shape[2])


def target_of(batch: Any) -> Any:
    """The targets of a batch: the second of a pair, or the labels of a dict."""
    return _parts(batch)[1]


def stated_reduction(loss: object) -> Reduction | None:
    """What ``loss`` itself says of its reduction, if it does."""
    if isinstance(loss, functools.partial):
        said = loss.keywords.get("reduction", stated_reduction(loss.func))
    else:
        said = getattr(loss, "reduction", None)
    if said == "none":
        raise Refusal(
            'loss has reduction="none"; it must return one number: "mean" or "sum"', Trap.NOT_SCALAR
        )
    # "batchmean" (KLDivLoss) divides by the number of samples
    return {"mean": "mean", "batchmean": "mean", "sum": "sum"}.get(str(said))  # type: ignore[return-value]


def _parts(batch: Any) -> tuple[Any, Any]:
    if isinstance(batch, Mapping):
        if "labels" not in batch:
            raise ValueError(
                'a dict batch needs "labels" for loss(output, target); it has '
                f"{sorted(map(str, batch))}. Or pass an Objective(function)"
            )
        return {key: item for key, item in batch.items() if key != "labels"}, batch["labels"]
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    raise ValueError(
        "loss(output, target) needs batches (inputs, targets) or dicts with labels; got "
        f"{_describe(batch)}. Several batches go in a list; for anything else pass an "
        "Objective(function)"
    )


def call_model(model: nn.Module, batch: Any) -> Any:
    """What ``model`` makes of a batch, whose targets, if it has any, are left out."""
    if isinstance(batch, Mapping):
        return _call(model, {key: item for key, item in batch.items() if key != "labels"})
    return _call(model, batch[0] if isinstance(batch, tuple | list) and len(batch) == 2 else batch)


def _call(model: nn.Module, inputs: Any) -> Any:
    """The model of ``inputs``: spread over its arguments, or whole if it takes only that."""
    if isinstance(inputs, Mapping):
        places, names = (), dict(inputs)
    elif isinstance(inputs, tuple | list):
        places, names = tuple(inputs), {}
    else:
        return model(inputs)
    signature = inspect.signature(model.forward)
    if not _takes(signature, *places, **names) and _takes(signature, inputs):
        return model(inputs)
    return model(*places, **names)


def _takes(signature: inspect.Signature, *places: Any, **names: Any) -> bool:
    try:
        signature.bind(*places, **names)
    except TypeError:
        return False
    return True


def _output(model: nn.Module, batch: Any) -> Any:
    inputs, labels = _parts(batch)
    # a sequence-to-sequence model makes its decoder's inputs from the labels, which are withheld
    shifted = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if isinstance(batch, Mapping) and shifted is not None and "decoder_input_ids" not in inputs:
        inputs["decoder_input_ids"] = shifted(labels=labels)
    output = _call(model, inputs)
    return getattr(output, "logits", output)


def _own_loss(model: nn.Module, batch: Any) -> Tensor:
    loss = getattr(_call(model, batch), "loss", None)
    if not isinstance(loss, Tensor):
        raise TypeError(
            "loss=None takes the model's own output.loss, and there is none: pass a loss, or give "
            "the batch what the model needs to compute one (labels)"
        )
    return loss


def _describe(thing: Any) -> str:
    if isinstance(thing, str):
        return repr(thing)
    if isinstance(thing, tuple | list):
        return f"a {type(thing).__name__} of {len(thing)}"
    return f"a {type(thing).__name__}"


def require_scalar(value: object) -> Tensor:
    """``value`` as a 0-d tensor, or advice."""
    if not isinstance(value, Tensor) or value.numel() != 1:
        came = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise Refusal(
            f"the loss must be one number (a tensor of one element); got {came}", Trap.NOT_SCALAR
        )
    return value.reshape(()) if value.dtype != torch.bool else value.reshape(()).float()
