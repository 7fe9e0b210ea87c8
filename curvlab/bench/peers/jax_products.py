"""JAX: ``jit`` of ``jvp(grad)`` for a plain ReLU MLP with the same weights; vmapped over a block.

XLA keeps a thread pool of its own: it uses every core, whatever torch is pinned to.
"""

import importlib
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from curvlab.bench.problem import Data, Product
from curvlab.operators.products.mlp_plan import recognise

jax: Any = importlib.import_module("jax")  # untyped here, whether or not it brings types
jnp: Any = importlib.import_module("jax.numpy")

NAME = DISTRIBUTION = "jax"
BLOCKS = True


def fits(model: nn.Module) -> bool:
    """ReLU MLPs only: weights and biases of the layers in turn."""
    plan = recognise(model, functional.cross_entropy, dict(model.named_parameters()))
    if plan is None or any(layer.bias is None for layer in plan.layers):
        return False
    *hidden, last = (type(layer.activation) for layer in plan.layers)
    return last is nn.Identity and set(hidden) <= {nn.ReLU}


def hessian(model: nn.Module, loss: nn.Module, batches: Data) -> Product:
    inputs, targets = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
    if not isinstance(loss, nn.CrossEntropyLoss):
        raise ValueError(f"the JAX row is for nn.CrossEntropyLoss; got {type(loss).__name__}")
    jax.config.update("jax_enable_x64", True)  # so that float64 data stay float64
    tensors = [parameter.detach().numpy() for parameter in model.parameters()]
    given, labels = jnp.asarray(inputs.flatten(1).numpy()), jnp.asarray(targets.numpy())
    shapes = [tensor.shape for tensor in tensors]
    cuts = np.cumsum([tensor.size for tensor in tensors])[:-1]
    point = jnp.concatenate([jnp.asarray(tensor).reshape(-1) for tensor in tensors])

    def value(flat: Any) -> Any:
        pieces = [p.reshape(s) for p, s in zip(jnp.split(flat, cuts), shapes, strict=True)]
        hidden = given
        layers = list(zip(pieces[::2], pieces[1::2], strict=True))
        for weight, bias in layers[:-1]:
            hidden = jax.nn.relu(hidden @ weight.T + bias)
        logits = hidden @ layers[-1][0].T + layers[-1][1]
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)
        return -chosen.mean()

    def one(vector: Any) -> Any:
        return jax.jvp(jax.grad(value), (point,), (vector,))[1]

    single, several = jax.jit(one), jax.jit(jax.vmap(one))

    def product(block: Tensor) -> Tensor:
        given = jnp.asarray(block.numpy())
        images = single(given[0])[None] if len(block) == 1 else several(given)
        return torch.from_numpy(np.array(images))

    return product
