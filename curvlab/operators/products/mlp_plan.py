"""Is this model a plain MLP with a plain loss? If so, its description; if in doubt, ``None``.

The hand-written products in :mod:`curvlab.operators.products.mlp` are exact for what is described
here and know nothing else. So every condition is checked positively (exact module types, default
options, no hooks, no sharing), and whatever is not recognised goes to an engine that uses autograd.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as module_hooks

from curvlab.operators.functions import curve, excess
from curvlab.operators.products import sizing

# Elementwise, without parameters or randomness, and with a right double backward in torch.
PIECEWISE_LINEAR: tuple[type[nn.Module], ...] = (
    nn.Identity,
    nn.ReLU,
    nn.LeakyReLU,
    nn.ReLU6,
    nn.Hardtanh,
)
SMOOTH: tuple[type[nn.Module], ...] = (
    nn.Tanh,
    nn.Sigmoid,
    nn.GELU,
    nn.SiLU,
    nn.ELU,
    nn.Softplus,
    nn.LogSigmoid,
)


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """``cross_entropy`` of logits ``(N, C)`` against class numbers ``(N,)``, summed or averaged."""

    mean: bool

    def fits(self, targets: Tensor, outputs: torch.Size, _dtype: torch.dtype) -> bool:
        # A negative class is the ignore index, which changes the count a mean divides by.
        return (
            targets.dtype == torch.int64
            and targets.shape == outputs[:1]
            and bool(((targets >= 0) & (targets < outputs[1])).all())
        )

    def scale(self, outputs: torch.Size) -> float:
        return 1.0 / outputs[0] if self.mean else 1.0

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Of the unscaled sum with respect to ``outputs``: ``softmax - one_hot``."""
        return excess(outputs, targets)

    def state(self, outputs: Tensor) -> Tensor:
        """What :meth:`curve` needs to know of the outputs: the probabilities ``(N, C)``."""
        return outputs.softmax(1)

    def curve(self, state: Tensor, tangents: Tensor) -> Tensor:
        """The Hessian ``diag(p) - pp'`` times ``tangents`` ``(N, b, C)``."""
        return curve(state.unsqueeze(1), tangents)


@dataclass(frozen=True, slots=True)
class SquaredError:
    """``mse_loss`` of outputs ``(N, C)`` against targets of that shape, summed or averaged."""

    mean: bool

    def fits(self, targets: Tensor, outputs: torch.Size, dtype: torch.dtype) -> bool:
        return targets.dtype == dtype and targets.shape == outputs

    def scale(self, outputs: torch.Size) -> float:
        return 1.0 / outputs.numel() if self.mean else 1.0

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return 2.0 * (outputs - targets)

    def state(self, outputs: Tensor) -> Tensor:
        return outputs.new_empty(len(outputs), 0)  # the Hessian is 2 I, whatever the outputs

    def curve(self, _state: Tensor, tangents: Tensor) -> Tensor:
        return 2.0 * tangents


@dataclass(frozen=True, slots=True)
class Layer:
    """``activation(inputs @ weight.T + bias)``; the slices are ``None`` where not selected."""

    weight: str
    bias: str | None
    inputs: int
    outputs: int
    activation: nn.Module
    weight_slice: slice | None
    bias_slice: slice | None

    @property
    def selected(self) -> bool:
        return self.weight_slice is not None or self.bias_slice is not None

    @property
    def bends(self) -> bool:
        """Whether the activation has a second derivative."""
        return not isinstance(self.activation, PIECEWISE_LINEAR)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Where the selected of weight and bias lie in a flat vector."""
        return tuple(s for s in (self.weight_slice, self.bias_slice) if s is not None)

    def weight_of(self, vectors: Tensor) -> Tensor:
        """The weight's part of ``(..., P)`` as a view ``(..., outputs, inputs)``."""
        if self.weight_slice is None:
            raise ValueError(f"{self.weight!r} is not among the selected parameters")
        part = vectors[..., self.weight_slice]
        return part.view(*vectors.shape[:-1], self.outputs, self.inputs)

    def bias_of(self, vectors: Tensor) -> Tensor | None:
        """The bias's part of ``(..., P)`` as a view ``(..., outputs)``, if it is selected."""
        return None if self.bias_slice is None else vectors[..., self.bias_slice]


@dataclass(frozen=True, slots=True)
class MLPPlan:
    """A plain MLP, its loss, and where its parameters lie in the flat vector of ``n`` elements."""

    layers: tuple[Layer, ...]
    loss: CrossEntropy | SquaredError
    flatten: bool
    n: int

    def cost(self, element: int) -> sizing.Cost:
        """Bytes of a product with one vector, at most; ``element`` is the size of a number."""
        # Per sample and unit: inputs, signals, slopes and bends are kept, and three tangents; the
        # rest is what autograd holds while it differentiates an activation.
        units = sum(layer.inputs + layer.outputs for layer in self.layers)
        kept, each = 2.0 * self.n * element, 12.0 * units * element
        return sizing.Cost(kept, each, 3.0 * kept, each)

    def fits(self, inputs: object, targets: object, dtype: torch.dtype) -> bool:
        """Whether this data is what the plan's formulas are for.

        Args:
            inputs: A tensor ``(N, d)``, or ``(N, ...)`` if the model begins with ``Flatten``.
            targets: Class numbers ``(N,)``, or a tensor of the outputs' shape for squared error.
            dtype: The dtype of the parameters.
        """
        if not isinstance(inputs, Tensor) or not isinstance(targets, Tensor):
            return False
        if inputs.dtype != dtype or inputs.dim() < 2 or len(inputs) == 0 or inputs.requires_grad:
            return False
        shape = inputs.shape if not self.flatten else (len(inputs), inputs.shape[1:].numel())
        if tuple(shape) != (len(inputs), self.layers[0].inputs) or targets.requires_grad:
            return False
        outputs = torch.Size((len(inputs), self.layers[-1].outputs))
        return self.loss.fits(targets, outputs, dtype)


def recognise(
    model: nn.Module,
    loss: Callable[..., Tensor],
    parameters: Mapping[str, nn.Parameter],
) -> MLPPlan | None:
    """The plan of a plain MLP, or ``None`` if anything about it is unusual.

    Plain: an ``nn.Sequential`` (nested ones too) of an optional leading ``Flatten``, and ``Linear``
    layers each followed by at most one elementwise activation; no hooks, no parametrisations, no
    layer or parameter used twice, one dtype (float32 or float64) and device; the loss
    ``cross_entropy``, ``mse_loss`` or their modules with default options (reduction ``"mean"`` or
    ``"sum"``).

    Args:
        model: Any module.
        loss: Called as ``loss(outputs, targets)``.
        parameters: The selected ones by name, as :func:`~curvlab.parameters.select_parameters`
            returns them: the flat order is theirs.
    """
    output_loss = _output_loss(loss)
    modules = _plain_modules(model)
    if output_loss is None or modules is None or _parameters_hooked(model):
        return None
    flatten = bool(modules) and _flattens(modules[0][1])
    layers = _layers(modules[1:] if flatten else modules, _slices(parameters))
    if not layers:
        return None
    # A parameter or layer used twice appears under one name in `everything`, under two in `used`.
    used = {layer.weight for layer in layers} | {layer.bias for layer in layers}
    everything = dict(model.named_parameters())
    if used - {None} != set(everything) or not _in_order(parameters, everything):
        return None
    kinds = {(type(p), p.dtype, p.device) for p in everything.values()}
    kind, dtype, _ = next(iter(kinds))
    if len(kinds) != 1 or kind is not nn.Parameter or dtype not in (torch.float32, torch.float64):
        return None
    return MLPPlan(layers, output_loss, flatten, sum(p.numel() for p in parameters.values()))


def _output_loss(loss: Callable[..., Tensor]) -> CrossEntropy | SquaredError | None:
    if loss is functional.cross_entropy:
        return CrossEntropy(mean=True)
    if loss is functional.mse_loss:
        return SquaredError(mean=True)
    if not isinstance(loss, nn.Module) or _hooked(loss) or "forward" in vars(loss):
        return None
    if type(loss) is nn.CrossEntropyLoss:
        plain = loss.weight is None and loss.label_smoothing == 0.0 and loss.ignore_index < 0
        return CrossEntropy(loss.reduction == "mean") if plain and _summed(loss) else None
    if type(loss) is nn.MSELoss:
        return SquaredError(loss.reduction == "mean") if _summed(loss) else None
    return None


def _summed(loss: nn.CrossEntropyLoss | nn.MSELoss) -> bool:
    return loss.reduction in ("mean", "sum")


def _plain_modules(model: nn.Module) -> list[tuple[str, nn.Module]] | None:
    """The modules a (nested) Sequential runs, in order, with their names; ``None`` if unusual."""
    if _hooked_globally():
        return None
    found: list[tuple[str, nn.Module]] = []
    for name, module in _leaves(model, ""):
        if _hooked(module) or "forward" in vars(module):
            return None
        if not isinstance(module, nn.Sequential):
            found.append((name, module))
        elif (
            type(module).forward is not nn.Sequential.forward
            or type(module).__call__ is not nn.Module.__call__
        ):
            return None
    return found


def _leaves(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    yield name, module
    if isinstance(module, nn.Sequential):
        for child_name, child in module._modules.items():
            if child is not None:
                yield from _leaves(child, f"{name}.{child_name}" if name else child_name)


def _flattens(module: nn.Module) -> bool:
    return type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1)


def _hooked(module: nn.Module) -> bool:
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name) for name in names)


def _hooked_globally() -> bool:
    names = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
    return any(getattr(module_hooks, f"_global_{name}") for name in names)


def _parameters_hooked(model: nn.Module) -> bool:
    """A parameter's own hook changes what ``autograd.grad`` returns for it."""
    return any(parameter._backward_hooks for parameter in model.parameters())


def _slices(parameters: Mapping[str, nn.Parameter]) -> dict[str, slice]:
    slices, start = {}, 0
    for name, parameter in parameters.items():
        slices[name] = slice(start, start + parameter.numel())
        start += parameter.numel()
    return slices


def _in_order(
    parameters: Mapping[str, nn.Parameter], everything: Mapping[str, nn.Parameter]
) -> bool:
    """The model's own parameters in the model's order: the dense fill needs it."""
    own = [name for name in everything if name in parameters]
    return list(parameters) == own and all(parameters[name] is everything[name] for name in own)


def _layers(modules: list[tuple[str, nn.Module]], where: dict[str, slice]) -> tuple[Layer, ...]:
    """Pairs of a Linear and its activation; empty if the modules are anything else."""
    layers: list[Layer] = []
    may_activate = False  # one activation per Linear, never before the first
    for name, module in modules:
        if type(module) is nn.Linear and set(module._parameters) == {"weight", "bias"}:
            prefix = f"{name}." if name else ""
            weight, bias = f"{prefix}weight", f"{prefix}bias" if module.bias is not None else None
            layers.append(
                Layer(
                    weight,
                    bias,
                    module.weight.shape[1],
                    module.weight.shape[0],
                    nn.Identity(),
                    where.get(weight),
                    where.get(bias) if bias is not None else None,
                )
            )
            may_activate = True
        elif type(module) in PIECEWISE_LINEAR + SMOOTH and may_activate:
            layers[-1] = replace(layers[-1], activation=module)
            may_activate = False
        else:
            return ()
    return tuple(layers)
