"""One pass over data: what flows into every layer, and what comes back to it from the loss."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from curvlab.batches import as_batches, leaves, map_tensors, rows, sample_count
from curvlab.layerwise.layers import Layer, arrived, input_rows, output_rows
from curvlab.layerwise.spans import Triangle, require_finite
from curvlab.operators.objective import Loss, Objective, call_model, terms

SAMPLES = 50  # per forward pass: what a pass holds does not grow with the batches given
WIDEST = 16_384  # of a triangle in float64: 2 GiB


@dataclass(slots=True)
class Seen:
    """What a pass saw of one layer; ``tokens`` are those of an embedding."""

    inputs: Triangle | None = None
    gradients: Triangle | None = None
    tokens: Tensor | None = None
    elsewhere: bool = False  # whether its weight is also used outside the layer
    rounding: float = 0.0  # of what it was called with
    _edges: list[tuple[nn.Module, GradientEdge]] = field(default_factory=list)

    def read(self, module: nn.Module, inputs: Tensor, constant: bool) -> None:
        """Take what the layer was called with."""
        if torch._C._functorch.is_functorch_wrapped_tensor(inputs):
            raise TypeError(
                f"a {type(module).__name__} layer is called inside torch.vmap or another transform "
                "of torch.func, where its inputs cannot be read: call it on the whole batch"
            )
        if inputs.is_floating_point():
            self.rounding = max(self.rounding, torch.finfo(inputs.dtype).eps)
        if self.tokens is not None:
            self.tokens[inputs.detach().reshape(-1)] = True
        elif self.inputs is not None:
            self.inputs.add(input_rows(module, inputs, constant))

    def leave(self, module: nn.Module, output: Tensor) -> Tensor | None:
        """Remember where the gradient of ``output`` will arrive."""
        if self.gradients is None:
            return None
        if not output.requires_grad:  # of a frozen model: the graph begins here
            output = output.detach().requires_grad_().clone()
        self._edges.append((module, get_gradient_edge(output)))
        return output

    def agrees(self, other: "Seen") -> bool:
        """Whether both saw the same, to some roundings."""
        if self.tokens is not None and other.tokens is not None:
            return torch.equal(self.tokens, other.tokens)
        pairs = ((self.inputs, other.inputs), (self.gradients, other.gradients))
        off = [one.distance(two) for one, two in pairs if one is not None and two is not None]
        return max(off, default=0.0) <= min(100 * self.rounding, 0.02)

    def edges(self) -> list[tuple[nn.Module, GradientEdge]]:
        """Those of the last forward pass, which are then forgotten."""
        found, self._edges = self._edges, []
        return found


class _Elsewhere(TorchFunctionMode):
    """Notices weights that are used outside their layers, such as ``h @ embedding.weight.T``."""

    def __init__(self, weights: Mapping[int, Sequence[Seen]]) -> None:
        super().__init__()
        self.weights, self.inside = weights, 0

    def enter(self, _module: nn.Module, _arguments: Any) -> None:
        self.inside += 1

    def leave(self, _module: nn.Module, _arguments: Any, _output: Any) -> None:
        self.inside -= 1

    def __torch_function__(
        self, function: Any, _types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        found = function(*arguments, **(options or {}))
        if not self.inside and any(isinstance(one, Tensor) for one in leaves(found)):
            for one in leaves((arguments, options)):
                for seen in self.weights.get(id(one), ()):
                    seen.elsewhere = True
        return found


def collect(
    model: nn.Module,
    data: Any,
    layers: Sequence[Layer],
    *,
    inputs: bool,
    gradients: bool,
    loss: Loss | Objective | None,
) -> list[Seen]:
    """Run ``model`` over ``data`` once, in eval mode; what each of ``layers`` saw."""
    device = next(model.parameters()).device
    whole = terms(loss).whole if gradients else None

    def empty() -> list[Seen]:
        return [_empty(layer, inputs, gradients, device) for layer in layers]

    def read(batch: Any, seen: Sequence[Seen]) -> None:
        moved = map_tensors(batch, lambda tensor: tensor.to(device))
        with watching(model, layers, seen), torch.set_grad_enabled(gradients):
            if whole is None:
                call_model(model, moved)
            elif loss is None and not isinstance(moved, Mapping):
                raise TypeError(
                    "output gradients need a loss: pass loss=, or for a model that computes its "
                    "own, batches that are dicts with labels"
                )
            else:
                # times the samples: a mean's gradients would shrink with the batch they came in
                _backward(whole(model, moved) * (sample_count(moved) or 1), seen)

    found, cut, total = empty(), None, 0
    for batch in _batches(data):
        known = sample_count(batch)
        total += 1 if known is None else known
        count = known or 1
        if count > SAMPLES and cut is None:
            cut = _may_cut(batch, read, empty)
        for start in range(0, count, SAMPLES if cut else count):
            read(rows(batch, slice(start, start + SAMPLES)) if cut else batch, found)
    if not total:
        raise ValueError("data= holds no sample, so no layer was called with anything to protect")
    return found


def _may_cut(
    batch: Any, read: Callable[[Any, Sequence[Seen]], None], empty: Callable[[], list[Seen]]
) -> bool:
    """Whether a batch may be read in pieces: whether eight of its samples give what 3 and 5 give.

    Its first dimension may be time, it may be a single sample, or the model may mix samples. Read
    whole it takes more memory and is right in any case.
    """
    together, apart = empty(), empty()
    try:
        read(rows(batch, slice(8)), together)
        for part in (slice(3), slice(3, 8)):
            read(rows(batch, part), apart)
    except (RuntimeError, ValueError, TypeError, IndexError):
        return False
    return all(one.agrees(other) for one, other in zip(together, apart, strict=True))


@contextmanager
def watching(model: nn.Module, layers: Sequence[Layer], seen: Sequence[Seen]) -> Iterator[None]:
    """Inside, calls of ``model`` fill ``seen``, in eval mode; the modes are then restored.

    A layer that is called several times in a pass is seen every time.
    """
    modules = dict(model.named_modules())
    training = [module for module in modules.values() if module.training]
    named = dict(model.named_parameters(remove_duplicate=False))
    weights: dict[int, list[Seen]] = {}
    for layer, one in zip(layers, seen, strict=True):
        for part in (layer.weight, layer.bias):
            if part is not None:
                weights.setdefault(id(named[part]), []).append(one)
    with ExitStack() as stack:
        mode = _Elsewhere(weights)
        for name in {name for layer in layers for name in layer.modules}:
            stack.callback(modules[name].register_forward_pre_hook(mode.enter).remove)
            stack.callback(modules[name].register_forward_hook(mode.leave).remove)
        for layer, one in zip(layers, seen, strict=True):
            for name in layer.modules:
                before, after = _hooks(one, layer.bias is not None)
                hook = modules[name].register_forward_pre_hook(before, with_kwargs=True)
                stack.callback(hook.remove)
                stack.callback(modules[name].register_forward_hook(after).remove)
        model.eval()
        try:
            with mode:
                yield
        finally:
            for module in training:
                module.training = True


def _hooks(
    seen: Seen, constant: bool
) -> tuple[Callable[..., None], Callable[[nn.Module, Any, Tensor], Tensor | None]]:
    def before(module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        seen.read(module, arrived(arguments, options), constant)

    def after(module: nn.Module, _arguments: Any, output: Tensor) -> Tensor | None:
        return seen.leave(module, output)

    return before, after


def _empty(layer: Layer, inputs: bool, gradients: bool, device: torch.device) -> Seen:
    if layer.tokens:
        return Seen(tokens=torch.zeros(layer.inputs, dtype=torch.bool, device=device))
    for what, width, wanted in (
        ("inputs", layer.width, inputs),
        ("outputs", layer.outputs, gradients),
    ):
        if wanted and width > WIDEST:
            raise ValueError(
                f"layer {layer.modules[0]!r} has {width:,} {what}: "
                f"its subspace takes a square matrix of that width, and {WIDEST:,} is the limit. "
                "Leave it out with select=, or take side='inputs' for a wide output layer"
            )
    return Seen(
        Triangle(layer.width) if inputs else None, Triangle(layer.outputs) if gradients else None
    )


def _backward(loss: Tensor, seen: Sequence[Seen]) -> None:
    """Gradients of ``loss`` at the outputs of all layers; no parameter gets one."""
    found = [(one, *pair) for one in seen for pair in one.edges()]
    if not found:
        return
    gradients = torch.autograd.grad(loss, [edge for *_, edge in found], allow_unused=True)
    for (one, module, _), gradient in zip(found, gradients, strict=True):
        if gradient is not None and one.gradients is not None:
            one.gradients.add(output_rows(module, gradient))


def finite(triangle: Triangle | None, layer: Layer, what: str) -> Tensor | None:
    """The triangle's matrix, checked; ``None`` if the layer was never called."""
    found = None if triangle is None else triangle.whole()
    if found is not None:
        require_finite(layer.modules[0], found, what)
    return found


def _batches(data: Any) -> Iterable[Any]:
    """Data are read once and need not be repeatable."""
    if isinstance(data, Tensor):
        return [data]
    return data if isinstance(data, Iterator) else as_batches(data, bare=False)
