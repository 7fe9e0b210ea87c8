"""Progressive network: one MLP column per task, fed by all earlier columns through adapters.

All columns exist from the start, so that the parameter space is one for the whole stream; column
``t`` computes, at every layer i but the first,

    h_i = f(W_i h_{i-1} + U_i relu(V_i (alpha_i * [earlier columns' h_{i-1}])))

with its own alpha, V and U. Earlier columns are evaluated without a graph: no gradient reaches
them, whatever the learner does.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from curvlab.checks import whole
from curvlab.nets.initialise import Seed, build

ALPHA = 0.01  # small at first: a new column starts as if alone


class Adapter(nn.Module):
    """alpha * features ``(N, in)`` -> Linear -> ReLU -> Linear: ``(N, out)``."""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(1))
        self.reduce = nn.Linear(inputs, hidden)
        self.expand = nn.Linear(hidden, outputs, bias=False)  # the layer it adds to has a bias

    def draw_(self, generator: torch.Generator) -> None:
        del generator  # a constant
        self.alpha.fill_(ALPHA)

    def forward(self, features: Tensor) -> Tensor:
        result: Tensor = self.expand(relu(self.reduce(self.alpha * features)))
        return result


class Column(nn.Module):
    """The MLP of one task, and its adapters from ``earlier`` columns of the same sizes."""

    def __init__(self, sizes: Sequence[int], earlier: int) -> None:
        super().__init__()
        pairs = list(pairwise(sizes))
        self.layers = nn.ModuleList([nn.Linear(a, b) for a, b in pairs])
        self.adapters = nn.ModuleList(
            [Adapter(earlier * a, a, b) for a, b in pairs[1:]] if earlier else []
        )

    def forward(self, inputs: Tensor, earlier: list[list[Tensor]]) -> list[Tensor]:
        """Hidden features of every layer and, last, the logits.

        Args:
            inputs: ``(N, sizes[0])``.
            earlier: What this method returned for each earlier column.
        """
        found: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            sums = layer(found[-1] if found else inputs)
            if earlier and i > 0:
                sums = sums + self.adapters[i - 1](torch.cat([c[i - 1] for c in earlier], dim=1))
            found.append(relu(sums) if i + 1 < len(self.layers) else sums)
        return found


class ProgressiveMLP(nn.Module):
    """``forward(inputs, task)``: logits of column ``task``."""

    def __init__(self, sizes: Sequence[int], tasks: int) -> None:
        super().__init__()
        self.columns = nn.ModuleList([Column(sizes, earlier) for earlier in range(tasks)])

    def forward(self, inputs: Tensor, task: int) -> Tensor:
        if not 0 <= task < len(self.columns):
            raise ValueError(
                f"this progressive network has columns for tasks 0..{len(self.columns) - 1}; "
                f"got task {task}: build it with more"
            )
        inputs = inputs.flatten(1)
        earlier: list[list[Tensor]] = []
        with torch.no_grad():
            for column in self.columns[:task]:
                earlier.append(column(inputs, earlier))
        logits: Tensor = self.columns[task](inputs, earlier)[-1]
        return logits


def progressive_mlp(
    sizes: Sequence[int] = (196, 50, 50, 10),
    tasks: int = 5,
    *,
    seed: Seed = 0,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> ProgressiveMLP:
    """A column of ``sizes`` for each of ``tasks`` tasks.

    Args:
        sizes: Units of one column from the inputs to the outputs.
        tasks: Columns; parameters grow with its square through the adapters.
    """
    whole(tasks=tasks)
    if len(sizes) < 2 or min(sizes) < 1:
        raise ValueError(f"sizes= is (inputs, ..., outputs), all at least 1; got {tuple(sizes)}")
    return build(lambda: ProgressiveMLP(tuple(sizes), tasks), seed, dtype, device)
