"""Layer bases: for each layer the subspace of its inputs, of its output gradients, or both.

    bases = layer_bases(model, data, energy=0.99)          # one pass over the data
    protect(optimizer, bases, model)

A dense basis keeps k rows of P numbers. A layer basis keeps factors: at most ``width`` rows of
``width`` numbers for each layer, whatever the number of directions they stand for.

- ``side="inputs"`` (GPM, null-space editing): rows V span the layer's inputs ``[x, 1]``. An update
  D of ``[W, b]`` with ``D V' = 0`` leaves the layer's output unchanged on every input in the span,
  for any step size.
- ``side="outputs"``: rows U span the gradients of the loss at the layer's output. With ``U D = 0``
  the loss does not change to first order through this layer, on any of the samples.
- ``side="both"`` (Kronecker): the product of the two, the leading eigenvectors of K-FAC's factors.
  With ``U D V' = 0`` an update is free as soon as it is outside one of them: it forgets what the
  data rarely use or the loss hardly notices. Each side holds the square root of ``energy``, so that
  the product holds ``energy`` of the Kronecker-factored curvature.

Rows of an embedding's weight are its inputs: those of tokens that were seen are held, the others
are free. All else (scales and shifts of norms, positions given as parameters, layers that were not
called) has no matrix acting on inputs, and :func:`curvlab.protect` holds it where it is.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from curvlab.basis import Basis
from curvlab.checks import inside
from curvlab.layerwise import files
from curvlab.layerwise.collect import Seen, collect, finite
from curvlab.layerwise.layers import Layer, layers_of
from curvlab.layerwise.spans import extend_to_share
from curvlab.operators.objective import Loss, Objective
from curvlab.operators.policy import inner
from curvlab.parameters import Selection, select_parameters

Side = Literal["inputs", "outputs", "both"]


@dataclass(slots=True)
class LayerBasis:
    """What is known of one layer.

    Attributes:
        outputs: How many outputs the weight has.
        inputs: How many inputs the weight has.
        bias: Whether rows end in a 1.
        into: The subspace of its inputs ``(r, inputs + bias)``, if that side is kept.
        back: The subspace of its output gradients ``(s, outputs)``, if that side is kept.
        tokens: For an embedding, which tokens were seen: bool ``(tokens,)``.
    """

    outputs: int
    inputs: int
    bias: bool
    into: Basis | None = None
    back: Basis | None = None
    tokens: Tensor | None = None

    @property
    def bytes(self) -> int:
        rows = sum(one.bytes for one in (self.into, self.back) if one is not None)
        return rows + (0 if self.tokens is None else self.tokens.numel())

    def same_shape(self, other: "LayerBasis") -> bool:
        """Whether both are of one layer."""
        one, two = (
            (each.outputs, each.inputs, each.bias, each.tokens is None) for each in (self, other)
        )
        return one == two


class LayerBases:
    """A :class:`LayerBasis` per layer, by the name of the layer's weight.

    Attributes:
        side: What is kept of every layer.
        layers: One basis per layer, by the name of its weight without what adapters put around it.
        changes: Grows with every change, so that a protection notices.
    """

    kind = "layer bases"  # of a saved file

    def __init__(self, side: Side = "inputs") -> None:
        if side not in get_args(Side):
            raise ValueError(f"side= is 'inputs', 'outputs' or 'both'; got {side!r}")
        self.side = side
        self.layers: dict[str, LayerBasis] = {}
        self.changes = 0

    def extend(
        self,
        model: nn.Module,
        data: Any,
        *,
        loss: Loss | Objective | None = None,
        energy: float = 0.99,
        select: Selection = None,
        task: str = "",
    ) -> None:
        """Add what another task needs; arguments as for :func:`layer_bases`."""
        inside("[0, 1]", energy=energy)
        model = inner(model)
        layers = _chosen(model, select)
        seen = collect(
            model,
            data,
            layers,
            inputs=self.side != "outputs",
            gradients=self.side != "inputs",
            loss=loss,
        )
        share = math.sqrt(energy) if self.side == "both" else energy
        named = dict(model.named_parameters(remove_duplicate=False))
        new = dict(self.layers)
        for layer, one in zip(layers, seen, strict=True):
            if one.elsewhere:  # what it does there is not known: protect holds it where it is
                new.pop(layer.name, None)
                continue
            double = named[layer.weight].dtype == torch.float64
            found = _extended(self.layers.get(layer.name), layer, one, share, task, double)
            if found is not None:
                new[layer.name] = found
        if not new:
            both = zip(layers, seen, strict=True)
            apart = [layer.modules[0] for layer, one in both if one.elsewhere]
            raise ValueError(
                f"layers {apart[:4]} have weights or biases that the model also uses outside of "
                "them, so that their inputs do not tell what may change, and there is no other: "
                "use each through its layer alone"
                if apart
                else "no layer of the model was called: there is nothing to protect"
            )
        self.layers = new
        self.changes += 1

    def merge(self, other: "LayerBases") -> None:
        """Add all that ``other`` protects; layers that both have must be of one shape."""
        if other is self or other.side != self.side:
            raise ValueError(
                f"cannot merge side={other.side!r} into side={self.side!r}"
                if other is not self
                else "bases cannot be merged into themselves"
            )
        new = dict(self.layers)
        for name, theirs in other.layers.items():
            ours = new.get(name)
            if ours is not None and not ours.same_shape(theirs):
                raise ValueError(
                    f"layer {name!r} is {ours.outputs} x {ours.inputs} here and {theirs.outputs} x "
                    f"{theirs.inputs} there: these are bases of different models"
                )
            new[name] = theirs if ours is None else _merged(ours, theirs)
        self.layers = new
        self.changes += 1

    @property
    def bytes(self) -> int:
        """What the rows take."""
        return sum(layer.bytes for layer in self.layers.values())

    def __len__(self) -> int:
        return len(self.layers)

    def __repr__(self) -> str:
        """A table: rows held of each side, out of how many."""
        lines = [f"LayerBases(side={self.side!r}, {self.bytes / 1e6:.2f} MB)"]
        for name, layer in self.layers.items():
            held = [
                f"{what} {len(one)}/{one.n}"
                for what, one in (("inputs", layer.into), ("gradients", layer.back))
                if one is not None
            ]
            if layer.tokens is not None:
                held = [f"tokens {int(layer.tokens.sum())}/{len(layer.tokens)}"]
            lines.append(f"  {name}: {', '.join(held)}")
        return "\n".join(lines)

    def save(self, path: str | Path) -> Path:
        """Write everything to one file: checksummed, atomic, never a pickle."""
        return files.save(self, path)

    @classmethod
    def load(cls, path: str | Path) -> "LayerBases":
        """Read what :meth:`save` wrote; what it claims is checked against its own tensors."""
        side, layers = files.load(path, cls.kind, get_args(Side))
        found = cls(side)
        found.layers = {name: LayerBasis(**parts) for name, parts in layers}
        return found


def layer_bases(
    model: nn.Module,
    data: Any,
    *,
    side: Side = "inputs",
    loss: Loss | Objective | None = None,
    energy: float = 0.99,
    select: Selection = None,
    task: str = "",
) -> LayerBases:
    """Subspaces of what flows into (and back to) every linear and convolutional layer.

    Args:
        model: In eval mode during the pass, then as it was.
        data: A batch, a list of batches or a loader, as for the operators; read once, so it may
            shuffle or be a generator. For ``side="inputs"`` targets are not needed. Large batches
            are read in pieces, unless a trial shows that pieces give something else (time first,
            a single sample, a model that mixes samples).
        side: ``"inputs"``, ``"outputs"`` or ``"both"``; see the module's header.
        loss: ``loss(output, target)``, a mean over samples; needed for ``"outputs"`` and
            ``"both"``. ``None`` is the model's own.
        energy: The share of each layer's energy (sum of squares) that its rows hold. At 1 every
            stored input is held to rounding; below, what is left of it may move.
        select: Names of parameters, as for the operators; by default every layer, frozen or not.
        task: A name for what is protected, kept with the rows.

    Returns:
        Bases that :func:`curvlab.protect` takes; ``.extend`` adds later tasks.
    """
    bases = LayerBases(side)
    bases.extend(model, data, loss=loss, energy=energy, select=select, task=task)
    return bases


def _chosen(model: nn.Module, select: Selection) -> list[Layer]:
    layers = layers_of(model)
    if select is not None:
        chosen = {id(parameter) for parameter in select_parameters(model, select).values()}
        named = dict(model.named_parameters(remove_duplicate=False))
        layers = [layer for layer in layers if id(named[layer.weight]) in chosen]
    if not layers:
        raise ValueError(
            "layer bases are of nn.Linear, nn.Conv1d, nn.Conv2d (ungrouped), nn.Embedding and "
            "Hugging Face's Conv1D, and none of these has its weight among the parameters chosen"
        )
    return layers


def _extended(
    known: LayerBasis | None, layer: Layer, seen: Seen, share: float, task: str, double: bool
) -> LayerBasis | None:
    """``known`` extended by what was seen; ``None`` for a layer that was never called."""
    dtype = torch.float64 if double else torch.float32
    shape = LayerBasis(layer.outputs, layer.inputs, layer.bias is not None)
    shape.tokens = None if seen.tokens is None else seen.tokens.cpu()
    if known is not None and not known.same_shape(shape):
        raise ValueError(
            f"layer {layer.name!r} was {known.outputs} x {known.inputs} and is now "
            f"{layer.outputs} x {layer.inputs}: extend the bases of this model"
        )
    if shape.tokens is not None:
        if known is not None and known.tokens is not None:
            shape.tokens = shape.tokens | known.tokens
        return shape if bool(shape.tokens.any()) else None
    into = finite(seen.inputs, layer, "inputs")
    back = finite(seen.gradients, layer, "output gradients")
    if into is None and back is None:
        return known
    old = known or shape
    if seen.inputs is not None:
        shape.into = _grown(old.into, layer.width, dtype, into, share, task)
    if seen.gradients is not None:
        shape.back = _grown(old.back, layer.outputs, dtype, back, share, task)
    return shape


def _grown(
    known: Basis | None,
    width: int,
    dtype: torch.dtype,
    triangle: Tensor | None,
    share: float,
    task: str,
) -> Basis:
    """A copy of ``known`` with what ``triangle`` adds; a failure half-way then changes nothing."""
    basis = Basis(width, width, dtype=dtype) if known is None else known.copy()
    if triangle is not None:
        extend_to_share(basis, triangle.cpu(), share, task=task)
    return basis


def _merged(ours: LayerBasis, theirs: LayerBasis) -> LayerBasis:
    def union(one: Basis | None, two: Basis | None) -> Basis | None:
        if one is None or two is None:
            return one if two is None else two
        both = one.copy()
        both.merge(two)
        return both

    tokens = ours.tokens
    if tokens is not None and theirs.tokens is not None:
        tokens = tokens | theirs.tokens
    return LayerBasis(
        ours.outputs,
        ours.inputs,
        ours.bias,
        union(ours.into, theirs.into),
        union(ours.back, theirs.back),
        tokens,
    )
