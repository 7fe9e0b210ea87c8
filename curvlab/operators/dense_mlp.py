"""The dense Hessian of a plain MLP: per-sample derivatives of the gradient, then GEMMs.

A weight acts through one pre-activation: ``dz_l[i] / dW_l[i, j] = a_{l-1}[j]``. So take one unit
``i`` of layer ``l`` and, per sample, the derivative of its flat gradient along ``z_l[i]``:

    Q[n, :] = d gradient_n / d z_l[i]                        (N, columns)

the rows of the Hessian that belong to ``W_l[i, :]`` are one matrix product, ``a_{l-1}' Q``, and the
row of ``b_l[i]`` is the sum of ``Q`` over samples. This holds for the columns of layer ``l`` and
above (a gradient further down also contains ``W_l`` itself); symmetry gives the others. ``Q`` is a
sum of two Khatri-Rao products (columns of ``W_k``, entries ``[p, q]``)::

    Q[n, p, q] = S_k[n, i, p] a_{k-1}[n, q] + d_k[n, p] T_{k-1}[n, i, q]

    T_k = d a_k / d z_l[i]:     T_l = f_l' on the diagonal,    T_k = f_k' * (T_{k-1} W_k')
    S_k = d d_k / d z_l[i]:     S_{k-1} = f_{k-1}' * (S_k W_k) + bend_{k-1} * (d z_{k-1} / d z_l[i])

that is, the R-operator of :mod:`curvlab.operators.products.mlp` with unit directions in the
pre-activations instead of the weights, of which there are few. The cost is ``N n^2 / 2``
multiply-adds in GEMMs that write into the result, and ``N n`` times the widest layer elementwise.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from curvlab.operators.products.mlp_plan import Layer, MLPPlan
from curvlab.operators.products.mlp_primal import Primal, run

WORKSPACE_BYTES = 1 << 28  # for the tangents S and T of one layer: samples are chunked to fit
TILE = 256  # samples per piece of Q: few enough for the cache, enough for an efficient GEMM
SQUARE = 256  # side of the squares in which the upper triangle is copied to the lower


@torch.no_grad()
def dense_hessian(
    plan: MLPPlan,
    tensors: Mapping[str, Tensor],
    inputs: Tensor,
    targets: Tensor,
    weight: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """The Hessian ``(n, n)`` of ``weight * loss(model(inputs), targets)``, exactly symmetric.

    Args:
        plan: From :func:`~curvlab.operators.products.mlp_plan.recognise`.
        tensors: The model's parameters by name, those that are not selected too.
        inputs: ``(N, d)``, or ``(N, ...)`` if the model begins with ``Flatten``.
        targets: As the loss takes them.
        weight: Factor on the loss, so that the chunks of a data set add up.
        out: A symmetric ``(n, n)`` to add to, for the next chunk of a data set; by default zeros.
            Contiguous, of the parameters' dtype and device.
    """
    like = tensors[plan.layers[0].weight]
    if out is None:
        out = torch.zeros(plan.n, plan.n, dtype=like.dtype, device=like.device)
    elif (
        out.shape != (plan.n, plan.n)
        or (out.dtype, out.device) != (like.dtype, like.device)
        or not out.is_contiguous()
    ):
        raise ValueError(
            f"out= must be a contiguous ({plan.n}, {plan.n}) of {like.dtype} on {like.device}; "
            f"got {tuple(out.shape)} of {out.dtype} on {out.device}"
        )
    primal = run(plan, tensors, inputs, targets, weight)
    for index, layer in enumerate(plan.layers):
        if layer.selected:
            units = sum(above.outputs for above in plan.layers[index:])
            bytes_per_sample = 4 * layer.outputs * units * like.element_size()
            samples = max(1, WORKSPACE_BYTES // bytes_per_sample)
            for start in range(0, primal.samples, samples):
                _add_rows(plan, primal.rows(start, start + samples), index, out)
    _mirror(out)
    return out


def _add_rows(plan: MLPPlan, primal: Primal, index: int, out: Tensor) -> None:
    """Add to ``out`` the rows of layer ``index``, from its own columns to the right."""
    layer = plan.layers[index]
    values, signals = _tangents(plan, primal, index)
    tile = min(TILE, primal.samples)
    for k, above in list(enumerate(plan.layers))[index:]:
        memory = torch.empty(
            tile * above.outputs * (above.inputs + 1), dtype=out.dtype, device=out.device
        )
        for unit in range(layer.outputs):
            # in the layer's own columns, the units before this one lie under the diagonal
            first = unit if k == index else 0
            columns = _columns(above, first)
            width = columns.stop - columns.start
            for start in range(0, primal.samples if width else 0, tile):
                rows = slice(start, min(start + tile, primal.samples))
                piece = memory[: (rows.stop - start) * width].view(-1, width)
                _fill(
                    piece,
                    above,
                    first,
                    signals[k][rows, unit],
                    primal.inputs[k][rows],
                    primal.signals[k][rows],
                    values[k - 1][rows, unit] if k > index else None,
                    unit if k == index + 1 else None,
                )
                if layer.weight_slice is not None:
                    begin = layer.weight_slice.start + unit * layer.inputs
                    place = out[begin : begin + layer.inputs, columns]
                    place.addmm_(primal.inputs[index][rows].T, piece)
                if layer.bias_slice is not None:
                    # in its own layer this also writes under the diagonal: mirrored over later
                    out[layer.bias_slice.start + unit, columns] += piece.sum(0)


def _columns(layer: Layer, first: int) -> slice:
    """Where the selected parameters of ``layer`` lie, the weight from its unit ``first`` on."""
    slices = [where for where in (layer.weight_slice, layer.bias_slice) if where is not None]
    if not slices:
        return slice(0, 0)
    skipped = first * layer.inputs if layer.weight_slice is not None else 0
    return slice(slices[0].start + skipped, slices[-1].stop)


def _fill(
    piece: Tensor,
    above: Layer,
    first: int,
    signal_tangent: Tensor,
    inputs: Tensor,
    signal: Tensor,
    input_tangent: Tensor | None,
    moving: int | None,
) -> None:
    """Write ``Q`` for the columns of one layer.

    Args:
        piece: ``(N, columns)``, filled.
        above: The layer ``k`` of the columns; its weight counts from unit ``first`` on.
        signal_tangent: ``S_k`` for this unit, ``(N, d_k)``.
        inputs: ``a_{k-1}``, ``(N, d_{k-1})``.
        signal: ``d_k``, ``(N, d_k)``.
        input_tangent: ``T_{k-1}`` for this unit, ``(N, d_{k-1})``; ``None`` if zero.
        moving: The only entry of ``T_{k-1}`` that is not zero, if there is only one.
    """
    width = 0
    if above.weight_slice is not None:
        width = (above.outputs - first) * above.inputs
        weight = piece[:, :width].view(len(piece), -1, above.inputs)
        torch.mul(signal_tangent[:, first:].unsqueeze(2), inputs.unsqueeze(1), out=weight)
        if input_tangent is not None and moving is not None:
            weight[:, :, moving].addcmul_(signal, input_tangent[:, moving : moving + 1])
        elif input_tangent is not None:
            weight.addcmul_(signal.unsqueeze(2), input_tangent.unsqueeze(1))
    if above.bias_slice is not None:
        piece[:, width:] = signal_tangent


def _tangents(
    plan: MLPPlan, primal: Primal, index: int
) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """``T_k`` and ``S_k`` for ``k >= index``: ``(N, units of layer index, units of layer k)``."""
    units = plan.layers[index].outputs
    rows = primal.samples * units
    like = primal.weights[index]
    tangent = torch.eye(units, dtype=like.dtype, device=like.device).expand(primal.samples, -1, -1)
    before: dict[int, Tensor] = {}  # d z_k / d z_l[i]
    values: dict[int, Tensor] = {}
    signals: dict[int, Tensor] = {}
    last = len(plan.layers) - 1
    for k in range(index, last + 1):
        if k > index:
            tangent = (values[k - 1].reshape(rows, -1) @ primal.weights[k].T).view(
                -1, units, plan.layers[k].outputs
            )
        before[k] = tangent
        slope = primal.slopes[k]
        values[k] = tangent if slope is None else tangent * slope.unsqueeze(1)
    for k in range(last, index - 1, -1):
        if k == last:
            signal = plan.loss.curve(primal.state, values[k]).mul_(primal.scale)
        else:
            signal = signals[k + 1].view(rows, -1) @ primal.weights[k + 1]
            signal = signal.view(before[k].shape)
        slope, bend = primal.slopes[k], primal.bends[k]
        if slope is not None:
            signal.mul_(slope.unsqueeze(1))
        if bend is not None:
            signal.addcmul_(bend.unsqueeze(1), before[k])
        signals[k] = signal
    return values, signals


def _mirror(out: Tensor) -> None:
    """Copy the upper triangle to the lower, in place."""
    n = len(out)
    for top in range(0, n, SQUARE):
        down = slice(top, top + SQUARE)
        upper = out[down, down].triu()
        out[down, down] = upper + upper.triu(1).T
        for left in range(top + SQUARE, n, SQUARE):
            across = slice(left, left + SQUARE)
            out[across, down] = out[down, across].T
