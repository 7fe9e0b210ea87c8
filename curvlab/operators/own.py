"""A copy of a model's modules that belongs to an operator: the user's own is never touched.

The copy has the same code and its own attributes; in place of parameters and buffers it holds the
tensors it is given. Evaluating it needs no swapping, so that threads do not meet, and an activation
checkpoint that runs again during a product finds the same tensors.
"""

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from curvlab.probe import OperatorError
from curvlab.refusals import Trap

log = logging.getLogger("curvlab")

_ATOMS = (int, float, bool, str, bytes, type(None), type, torch.dtype, torch.device, torch.Size)
_MISSING = object()
_CANNOT = (TypeError, RuntimeError, AttributeError, ValueError, copy.Error)


def own_copy(model: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module | None:
    """``model`` with its own attributes, and ``tensors`` as its parameters and buffers.

    ``None`` if something in it cannot be copied (a lock, a compiled function).

    Args:
        model: Any module.
        tensors: By name; a shared tensor under its first name.
    """
    memo: dict[int, Any] = {}
    for named in (model.named_parameters(), model.named_buffers()):
        memo.update((id(tensor), tensors[name]) for name, tensor in named)
    for module in model.modules():
        for value in vars(module).values():
            # activations kept from training are not leaves, which deepcopy refuses
            if isinstance(value, Tensor) and value.grad_fn is not None:
                memo.setdefault(id(value), value.detach().clone())
    try:
        return _copied(model, memo)
    except _CANNOT as error:
        log.info("the model cannot be copied (%s) and is therefore borrowed", error)
        return None


def _copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """``copy.deepcopy`` at a fraction of its time: most attributes are plain or empty."""
    if id(module) in memo:
        known: nn.Module = memo[id(module)]
        return known
    kind = _plain_class(module)
    if hasattr(kind, "__deepcopy__") or kind.__reduce_ex__ is not object.__reduce_ex__:
        made: nn.Module = copy.deepcopy(module, memo)
        return made
    made = memo[id(module)] = kind.__new__(kind)
    attributes = vars(made)
    for name, value in _plain_attributes(module):
        if isinstance(value, _ATOMS):
            attributes[name] = value
        elif name in ("_parameters", "_buffers"):
            attributes[name] = {n: None if t is None else memo[id(t)] for n, t in value.items()}
        elif name == "_modules":
            attributes[name] = {
                n: None if child is None else _copied(child, memo) for n, child in value.items()
            }
        elif isinstance(value, dict | set) and not value:
            attributes[name] = type(value)()
        else:
            attributes[name] = copy.deepcopy(value, memo)
    return made


def _plain_class(module: nn.Module) -> type[nn.Module]:
    """The module's class before FSDP2 (``fully_shard``) put its own in front of it."""
    kinds = type(module).__mro__
    names = [kind.__name__ for kind in kinds]
    return kinds[names.index("FSDPModule") + 1] if "FSDPModule" in names else kinds[0]


def _plain_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The module's attributes without what FSDP2 left there: its state, and hooks that gather."""
    managed = getattr(module, "_is_fsdp_managed_module", False)
    for name, value in vars(module).items():
        if managed and name.startswith("__composable_api_"):
            continue
        if managed and name.endswith("_hooks"):
            own = {k: hook for k, hook in value.items() if not _of_fsdp(hook)}
            value = type(value)(own)
        yield name, value


def _of_fsdp(hook: Any) -> bool:
    hook = getattr(hook, "hook", hook)  # torch wraps those that get their module
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp")


class Traces:
    """What a forward pass leaves in a model, undone: attributes, and buffers that it wrote to."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = list(model.modules())
        self.buffers = [
            (module, name, buffer, buffer.clone())
            for module in self.modules
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self.attributes = [dict(vars(module)) for module in self.modules]
        self.versions = [buffer._version for _, _, buffer, _ in self.buffers]

    def undo(self) -> None:
        """Put everything back; a graph made meanwhile keeps the tensors it used."""
        for module, kept in zip(self.modules, self.attributes, strict=True):
            now = vars(module)
            for name in [name for name in now if name not in kept]:
                del now[name]
            for name, value in kept.items():
                if now.get(name, _MISSING) is not value:
                    now[name] = value
        for i, (module, name, buffer, pristine) in enumerate(self.buffers):
            if module._buffers.get(name) is not buffer or buffer._version != self.versions[i]:
                fresh = pristine.clone()
                module._buffers[name] = fresh
                self.buffers[i] = (module, name, fresh, pristine)
                self.versions[i] = fresh._version


def uses(value: Tensor, tensors: Iterable[Tensor]) -> bool:
    """Whether the graph of ``value`` ends in one of ``tensors``."""
    wanted = {id(tensor) for tensor in tensors}
    return any(id(getattr(node, "variable", None)) in wanted for node in _nodes(value))


def refuse_reentrant(value: Tensor) -> None:
    """Raise if the graph of ``value`` has a reentrant checkpoint in it."""
    if any(node.name() == "CheckpointFunctionBackward" for node in _nodes(value)):
        raise OperatorError(
            "the model uses reentrant activation checkpoints, which have no second derivatives: "
            "pass use_reentrant=False to torch.utils.checkpoint.checkpoint, or "
            'gradient_checkpointing_kwargs={"use_reentrant": False} to '
            "gradient_checkpointing_enable; or turn checkpointing off",
            Trap.REENTRANT,
        )


def _nodes(value: Tensor) -> Iterator[Node]:
    seen: set[Node] = set()
    waiting = [value.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting.extend(edge for edge, _ in node.next_functions)
