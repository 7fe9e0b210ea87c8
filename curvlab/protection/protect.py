"""``protect(optimizer, memory, model)``: from here on every ``optimizer.step()`` is projected."""

from collections.abc import Iterable
from typing import overload

from torch import nn
from torch.optim import SGD, Optimizer

from curvlab.basis import Basis
from curvlab.layerwise import LayerBases
from curvlab.parameters import Selection
from curvlab.protection.dense import Protection, covered_parameters
from curvlab.protection.layers import LayerProtection


@overload
def protect(
    optimizer: Optimizer,
    memory: Basis,
    model: nn.Module | Iterable[nn.Parameter] | None = None,
    *,
    select: Selection = None,
    gradients: bool | None = None,
) -> Protection: ...


@overload
def protect(
    optimizer: Optimizer,
    memory: LayerBases,
    model: nn.Module,
    *,
    free: Selection = None,
    gradients: bool | None = None,
) -> LayerProtection: ...


def protect(
    optimizer: Optimizer,
    memory: Basis | LayerBases,
    model: nn.Module | Iterable[nn.Parameter] | None = None,
    *,
    select: Selection = None,
    free: Selection = None,
    gradients: bool | None = None,
) -> Protection | LayerProtection:
    """Keep every step of ``optimizer`` out of what ``memory`` protects.

    With a :class:`~curvlab.Basis`, the change of the parameters in every step is orthogonal to its
    rows (:mod:`curvlab.protection.dense`). With :func:`~curvlab.layer_bases` the change of every
    layer lies outside its subspaces: for ``side="inputs"`` the layer's output on inputs in the
    span does not move, whatever the step size (:mod:`curvlab.protection.layers`).

    Args:
        optimizer: Any torch optimizer. If several train one model, protect each.
        memory: What is protected; rows may be added later. A basis has rows over the parameters in
            the order of ``model.named_parameters()``, as every curvlab operator on that model.
        model: The model. With a basis also the parameters in its order; by default those of the
            optimizer, if it has them in one group.
        select: With a basis: which of the model's parameters it covers, as for the operators.
        free: With layer bases: trained parameters that are to move although no layer basis covers
            them (norms, positions, a new head), by name. What they change is not protected. All
            others that are not covered are held where they are.
        gradients: Whether gradients are projected before the step as well; by default for all
            optimizers but ``torch.optim.SGD``, where it would change nothing.

    Returns:
        A handle: ``.remove()`` ends the protection.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"protect needs a torch.optim.Optimizer; got {type(optimizer).__name__}. For a step "
            "of your own use basis.project_out_(update)"
        )
    before = not isinstance(optimizer, SGD) if gradients is None else gradients
    if isinstance(memory, LayerBases):
        if not isinstance(model, nn.Module):
            raise TypeError("layer bases go by the names of layers: pass the model as well")
        if select is not None:
            raise ValueError(
                "select= goes with a basis; layer bases have theirs when they are made"
            )
        _refuse_twice(optimizer, model.parameters())
        return LayerProtection(optimizer, memory, model, free, before)
    if not isinstance(memory, Basis):
        raise TypeError(
            f"protect needs a curvlab.Basis or layer bases; got {type(memory).__name__}. For "
            "eigenpairs: basis = Basis(pairs.n, capacity); basis.extend(pairs.vectors)"
        )
    if free is not None:
        raise ValueError("free= goes with layer bases; parameters outside a basis are free already")
    covered = covered_parameters(optimizer, model, select)
    _check(memory, covered())
    _refuse_twice(optimizer, covered())
    return Protection(optimizer, memory, covered, before)


def _refuse_twice(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Two projections, one after the other, hold only what the second protects."""
    new = {id(p) for p in parameters}
    for hook in optimizer._optimizer_step_post_hooks.values():
        other = getattr(hook, "__self__", None)
        if not isinstance(other, Protection | LayerProtection):
            continue
        if not new.isdisjoint(id(p) for p in other.parameters):
            raise ValueError(
                "protect: steps of these parameters are protected already, and a second protection "
                "would undo the first: add to what it protects (basis.extend, bases.extend or "
                "bases.merge; it notices), or end it with handle.remove()"
            )


def _check(basis: Basis, covered: list[nn.Parameter]) -> None:
    total = sum(p.numel() for p in covered)
    if total != basis.n:
        raise ValueError(
            f"the parameters have {total} elements together, the basis covers {basis.n}: pass the "
            "model= the basis was computed for, with the same select= (select='*' takes frozen "
            "parameters as well, if some were frozen after it)"
        )
    for parameter in covered:
        if not parameter.is_floating_point():
            raise TypeError(f"protect needs real float parameters; got {parameter.dtype}")
        if parameter.device != basis.device:
            raise ValueError(
                f"parameters are on {parameter.device}, the basis on {basis.device}: load it with "
                "Basis.load(path, device=...)"
            )
