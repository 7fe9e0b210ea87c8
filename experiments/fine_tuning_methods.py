"""What protected fine-tuning is compared with: EWC on any model, and adapters without a library."""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from curvlab.losses import sequence
from curvlab.nets.initialise import normal_


class Elastic:
    """EWC's penalty ``strength / 2 * sum_i F_i (theta_i - theta_0i)^2``."""

    def __init__(self, model: nn.Module, importance: list[Tensor], strength: float) -> None:
        self.parameters = list(model.parameters())
        self.importance, self.strength = importance, strength
        self.start = [p.detach().clone() for p in self.parameters]

    def __call__(self) -> Tensor:
        terms = zip(self.importance, self.parameters, self.start, strict=True)
        total = torch.stack([(f * (now - then).square()).sum() for f, now, then in terms]).sum()
        return 0.5 * self.strength * total


def importance_of(model: nn.Module, windows: tuple[Tensor, Tensor]) -> list[Tensor]:
    """EWC's F: the mean square of the gradients of single windows' losses, labels as they are."""
    parameters = list(model.parameters())
    total = [torch.zeros_like(p) for p in parameters]
    inputs, targets = windows
    for number in range(len(inputs)):
        one = slice(number, number + 1)
        loss = sequence(model(inputs[one]), targets[one])
        for square, gradient in zip(total, torch.autograd.grad(loss, parameters), strict=True):
            square.addcmul_(gradient, gradient, value=1.0 / len(inputs))
    return total


class Adapter(nn.Module):
    """A frozen linear layer with a low-rank addition (LoRA)."""

    def __init__(self, layer: nn.Linear, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        self.layer = layer
        into = torch.empty(rank, layer.in_features)
        normal_(into, generator)
        self.lora_A = nn.Parameter(into / layer.in_features**0.5)
        self.lora_B = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        frozen: Tensor = self.layer(x)
        return frozen + linear(linear(x, self.lora_A), self.lora_B)


def adapted(model: nn.Module, rank: int, seed: int) -> None:
    """Freeze ``model`` and put an adapter around every linear layer of its blocks, in place."""
    generator = torch.Generator().manual_seed(seed)
    model.requires_grad_(False)
    for block in model.get_submodule("blocks").children():
        for name, child in list(block.named_children()):
            if isinstance(child, nn.Linear):
                setattr(block, name, Adapter(child, rank, generator))
