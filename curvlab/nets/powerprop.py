"""Powerpropagation: a layer whose weight is a power of what is trained, w = phi |phi|^(alpha - 1).

The chain rule multiplies each gradient by alpha |phi|^(alpha - 1): small weights move little and
stay small, so that a network trains towards sparsity. By the same factor a weight at exactly zero
never moves again when alpha > 1.
"""

from torch import Tensor, nn
from torch.nn.functional import conv2d, linear

from curvlab.checks import inside


def power(phi: Tensor, alpha: float) -> Tensor:
    """w = phi |phi|^(alpha - 1)."""
    if alpha == 1.0:
        return phi
    # written so, every factor of the gradient is finite at 0, for alpha below 2 too
    return phi.sign() * phi.abs() ** alpha


def root(weight: Tensor, alpha: float) -> Tensor:
    """phi with ``power(phi, alpha) == weight``: sign(w) |w|^(1 / alpha)."""
    return weight.sign() * weight.abs() ** (1.0 / alpha)


class PowerLinear(nn.Module):
    """``nn.Linear`` with a power of ``weight`` ``(out, in)`` in place of it.

    Not a subclass, on purpose: what recognises ``nn.Linear`` may read its weight as the matrix.
    """

    def __init__(self, layer: nn.Linear, alpha: float) -> None:
        super().__init__()
        self.alpha = alpha
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight = nn.Parameter(root(layer.weight.detach(), alpha))
        self.bias = layer.bias

    def forward(self, inputs: Tensor) -> Tensor:
        return linear(inputs, power(self.weight, self.alpha), self.bias)


class PowerConv2d(nn.Module):
    """``nn.Conv2d`` (zero padding) with a power of ``weight`` in place of it."""

    def __init__(self, layer: nn.Conv2d, alpha: float) -> None:
        super().__init__()
        if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
            raise ValueError("powerpropagate takes convolutions padded with a number of zeros")
        self.alpha = alpha
        self.in_channels, self.out_channels = layer.in_channels, layer.out_channels
        self.weight = nn.Parameter(root(layer.weight.detach(), alpha))
        self.bias = layer.bias
        self.stride, self.padding = layer.stride, layer.padding
        self.dilation, self.groups = layer.dilation, layer.groups

    def forward(self, images: Tensor) -> Tensor:
        weight = power(self.weight, self.alpha)
        return conv2d(
            images, weight, self.bias, self.stride, self.padding, self.dilation, self.groups
        )


def powerpropagate(model: nn.Module, alpha: float = 2.0) -> nn.Module:
    """Replace every linear and convolutional layer, in place; the function stays the same.

    Args:
        model: Any module; it is changed and returned. Names of parameters stay.
        alpha: At least 1 (which changes nothing); 2 to 5 are usual.
    """
    inside("[1, inf)", alpha=alpha)  # below 1, gradients are infinite at 0
    if isinstance(model, nn.Linear | nn.Conv2d):
        raise ValueError("powerpropagate replaces layers inside a model; wrap it in nn.Sequential")
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, PowerLinear(child, alpha))
                replaced += 1
            elif type(child) is nn.Conv2d:
                setattr(parent, name, PowerConv2d(child, alpha))
                replaced += 1
    if not replaced:
        raise ValueError("powerpropagate found no nn.Linear or nn.Conv2d to replace")
    return model
