"""Gradients sample by sample: rows ``u_i' J_i`` of a model's Jacobian, one combination per sample.

For a plain MLP such a row is, layer by layer, an outer product of what came in and of the signal
that comes back. :func:`mlp_factors` gives these factors, which hold the same information in a
thirtieth of the numbers; :func:`sample_gradients` gives dense rows for any network.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from curvlab.learners.population import Population
from curvlab.learners.stacked import backward, forward
from curvlab.operators.products.mlp_plan import Layer

# Rows computed at once by vmap: enough to fill the products, few enough to keep activations small,
# and their bytes.
CHUNK = 50
BYTES = 256 << 20

# Layers for which torch.vmap has no rule: their samples are taken one by one.
WITHOUT_VMAP = (nn.RNNBase, nn.RNNCellBase, nn.RReLU)


def sample_gradients(
    population: Population, s: int, inputs: Tensor, cotangents: Tensor, task: int
) -> Iterator[Tensor]:
    """Rows ``d(u_i . logits(x_i)) / d parameters`` of run ``s``, in blocks ``(b, P)``.

    Args:
        population: In eval mode (or no sample has a gradient of its own).
        s: Which run.
        inputs: Shape ``(n, ...)``.
        cotangents: The combinations ``u``, shape ``(n, C)``.
        task: Index of the task.
    """
    if population.statistics.policy == "untracked":
        raise ValueError(
            "BatchNorm without running statistics mixes the samples of a batch, so there are no "
            "gradients per sample; build the model with running statistics or another norm"
        )
    population.train_mode(False)

    def combination(parameters: Tensor, one: Tensor, cotangent: Tensor) -> Tensor:
        logits = population.logits_of(s, one.unsqueeze(0), task, parameters)
        return (logits.squeeze(0) * cotangent).sum()

    def one_by_one(parameters: Tensor, some: Tensor, combinations: Tensor) -> Tensor:
        pairs = zip(some, combinations, strict=True)
        return torch.stack([grad(combination)(parameters, *pair) for pair in pairs])

    alone = any(isinstance(module, WITHOUT_VMAP) for module in population.models[s].modules())
    rows = one_by_one if alone else vmap(grad(combination), in_dims=(None, 0, 0))
    parameters = population.parameters[s].detach()
    chunk = max(1, min(CHUNK, BYTES // (population.n * parameters.element_size())))
    for start in range(0, len(inputs), chunk):
        here = slice(start, start + chunk)
        block: Tensor = rows(parameters, inputs[here], cotangents[here])
        yield block.detach()


@dataclass(frozen=True, slots=True)
class Factors:
    """Per layer, what n samples sent in and the K signals that came back for each of them.

    Row ``(i, k)`` of the Jacobian has, in a layer, the weight part
    ``outer(signals[i, k], inputs[i])`` and the bias part ``signals[i, k]``.

    Attributes:
        inputs: One tensor ``(n, in)`` per layer.
        signals: One tensor ``(n, K, out)`` per layer.
    """

    inputs: list[Tensor]
    signals: list[Tensor]


@torch.no_grad()
def mlp_factors(
    layers: Sequence[Layer], parameters: Tensor, inputs: Tensor, cotangents: Tensor
) -> Factors:
    """The factors of the Jacobian rows of a plain MLP.

    Args:
        layers: The layers of the MLP.
        parameters: Shape ``(P,)``.
        inputs: Shape ``(n, ...)``.
        cotangents: Combinations of logits, shape ``(n, K, C)``: K rows for every sample.
    """
    values = forward(layers, parameters, inputs)
    per_cotangent = [
        backward(layers, parameters, values, cotangents[:, k]) for k in range(cotangents.shape[1])
    ]
    signals = [torch.stack(of_layer, 1) for of_layer in zip(*per_cotangent, strict=True)]
    return Factors(values[:-1], signals)
