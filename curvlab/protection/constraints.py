"""From layer bases and a model to what holds each trained parameter."""

from collections.abc import Mapping

from torch import Tensor, nn

from curvlab.layerwise import Layer, LayerBases, LayerBasis, layers_of
from curvlab.protection.adapters import Adapter, adapters_of
from curvlab.protection.groups import Held, restricted
from curvlab.protection.local import in_shards, local, require_rows

# What an adapter may have along protected directions, of its norm, and still count as outside.
OUTSIDE = 1e-4


class Constraints:
    """What is to be done to the trained parameters of ``model`` after each step.

    Args:
        trained: By name: those that an optimizer moves.

    Attributes:
        held: Matrices that are projected.
        rows: Embeddings with the rows that are held, int64.
        whole: Names of parameters that are held altogether.
        covered: Names of all parameters that bases speak for.
    """

    def __init__(
        self, model: nn.Module, bases: LayerBases, trained: Mapping[str, nn.Parameter]
    ) -> None:
        self.held: list[Held] = []
        self.rows: list[tuple[Tensor, Tensor]] = []
        self.whole: set[str] = set()
        self.covered: set[str] = set()
        self._named = dict(model.named_parameters(remove_duplicate=False))
        self._names = {id(parameter): name for name, parameter in trained.items()}
        layers = {layer.name: layer for layer in layers_of(model)}
        adapters = list(adapters_of(model))
        _require_known(bases, {*layers, *(name for one in adapters for name in one.layers)})
        for name, basis in bases.layers.items():
            if name in layers:
                self._cover(layers[name], basis)
        for adapter in adapters:
            known = [bases.layers[name] for name in adapter.layers if name in bases.layers]
            if known and (id(adapter.into) in self._names or id(adapter.back) in self._names):
                self._adapt(adapter, known[0], bases.side)
        for layer in layers.values():  # a tied weight that also acts where nothing is known
            name = self._name(self._named[layer.weight])
            if name in self.covered and layer.name not in bases.layers:
                self.whole.add(name)

    def _name(self, parameter: nn.Parameter | None) -> str:
        """Of a trained parameter, else ``""``."""
        return self._names.get(id(parameter), "")

    def _cover(self, layer: Layer, basis: LayerBasis) -> None:
        weight = self._named[layer.weight]
        bias = None if layer.bias is None else self._named[layer.bias]
        found = layer.outputs, layer.inputs, bias is not None, layer.tokens
        known = basis.outputs, basis.inputs, basis.bias, basis.tokens is not None
        if found != known:
            raise ValueError(
                f"layer {layer.name!r} is {found[0]} x {found[1]} here and {known[0]} x {known[1]} "
                "in the bases: pass the model they were made of"
            )
        names = {self._name(weight), self._name(bias)} - {""}
        self.covered |= names
        if not names:
            return
        for name in names:
            require_rows(name, self._named[name], right_only=basis.back is None)
        if basis.tokens is not None:
            if in_shards(weight) or bool(basis.tokens.all()):
                self.whole |= names
            else:
                seen = basis.tokens.nonzero().flatten().to(weight.device)
                self.rows.append((weight, seen))
            return
        moving = (weight if self._name(weight) else None, bias if self._name(bias) else None)
        self._matrix(layer, basis, *moving)

    def _matrix(
        self,
        layer: Layer,
        basis: LayerBasis,
        weight: nn.Parameter | None,
        bias: nn.Parameter | None,
    ) -> None:
        """Hold a layer, or what moves of it: the bias is the weight of a constant input."""
        right = None if basis.into is None else basis.into.rows()
        left = None if basis.back is None else basis.back.rows()
        if any(rows is not None and not len(rows) for rows in (right, left)):
            return  # the span is nothing: all is free
        if right is not None and weight is None:
            right = restricted(right, slice(layer.inputs, None))
        elif right is not None and bias is None and layer.bias is not None:
            right = restricted(right, slice(0, layer.inputs))
        right, left = (None if _all(rows) else rows for rows in (right, left))
        if right is None and left is None:
            self.whole |= {self._name(weight), self._name(bias)} - {""}
        elif right is not None and not len(right):
            return
        elif right is None or weight is None:  # from the left alone: each column by itself
            self.held += [Held(one, left=left) for one in (bias,) if one is not None]
            if weight is not None:
                self.held.append(Held(weight, left=left, transposed=layer.transposed))
        else:
            self.held.append(Held(weight, bias, right, left, layer.transposed))

    def _adapt(self, adapter: Adapter, basis: LayerBasis, side: str) -> None:
        """Keep ``B A`` at zero on what is protected, by A from the right or by B from the left."""
        if side == "both":
            raise ValueError(
                f"{adapter.owner!r} is a low-rank adapter, whose product with both sides is not "
                "linear in it: make the bases with side='inputs' (which holds A) or 'outputs' (B)"
            )
        if basis.tokens is not None:
            raise TypeError(
                f"{adapter.owner!r} is a low-rank adapter of an embedding: adapters of "
                "convolutions and embeddings are not protected. Leave it out of the adapted modules"
            )
        if (adapter.back.shape[0], adapter.into.shape[1]) != (basis.outputs, basis.inputs):
            raise ValueError(
                f"the adapter of {adapter.owner!r} is {adapter.back.shape[0]} x "
                f"{adapter.into.shape[1]}, its layer in the bases {basis.outputs} x {basis.inputs}"
            )
        for name in (self._name(adapter.into), self._name(adapter.back)):
            self.covered |= {name} - {""}
        if basis.into is not None:
            rows = restricted(basis.into.rows(), slice(0, basis.inputs))
            held, other = Held(adapter.into, right=rows, zero=True), adapter.back
            inside = local(adapter.into).double().cpu() @ rows.T
        elif basis.back is not None:
            rows = basis.back.rows()
            held, other = Held(adapter.back, left=rows, zero=True), adapter.into
            inside = rows.double() @ local(adapter.back).double().cpu()
        if not len(rows):
            return
        require_rows(adapter.owner, held.parameter, right_only=basis.back is None)
        started = bool(local(other).any())
        if started and float(inside.norm()) > OUTSIDE * float(
            local(held.parameter).double().norm()
        ):
            raise ValueError(
                f"the adapter of {adapter.owner!r} is trained already and acts on what is to be "
                "protected: merge it into the model (merge_and_unload), make the bases of that, "
                "and start with a new adapter"
            )
        self.held.append(held)


def _all(rows: Tensor | None) -> bool:
    """Whether ``rows`` span everything, as no rows at all (``None``) stand for."""
    return rows is None or len(rows) == rows.shape[1]


def _require_known(bases: LayerBases, names: set[str]) -> None:
    missing = [name for name in bases.layers if name not in names]
    if missing:
        raise ValueError(
            f"the model has no layer {missing[0]!r} that the bases protect"
            + (f" (nor {len(missing) - 1} others)" if len(missing) > 1 else "")
            + ": pass the model they were made of"
        )
