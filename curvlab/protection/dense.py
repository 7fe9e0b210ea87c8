"""Steps of any torch optimizer, projected off the dense rows of a basis: SGD-dagger, wrapped on.

What is guaranteed, for every optimizer: the change of the parameters in a step is orthogonal to the
rows of the basis, ``M (after - before) = 0``, up to the rounding of the parameters themselves
(norm at most ``eps |theta|`` in each step, without preferred direction; over many steps about as
small as that rounding it adds up, with ``gradients=True`` less of it). The projection is applied to
the change that the optimizer has made, so nothing an optimizer does can leak: not momentum gathered
before the basis grew, weight decay, a closure's line search or an adaptive scale.

- ``SGD``, with or without momentum, Nesterov and weight decay, is linear in the gradients: its
  projected change *is* the step of SGD-dagger, ``d = P(g + wd p)``, as long as the basis stays the
  same.
- ``Adam``, ``AdamW`` and all others rescale gradients by element, which turns a projected gradient
  back into the protected directions: projecting gradients alone would leak. Here the gradients are
  projected first, so that the moments estimate the gradient that training may follow, and then the
  change. The result is orthogonal to M; it is not the step of least distance in Adam's own metric.

Parameters in bfloat16 or float16 cannot hold a projected step: their rounding would leak more than
most steps. For them a float32 copy is kept: it is what moves, and what the guarantee is about. The
model gets it rounded, so its own distance from it stays one rounding and never adds up.

Parameters that the basis covers and the optimizer does not train stay where they are: the others
are projected by the basis restricted to them. Parameters outside the basis are trained freely.

A step costs a few operations on all tensors at once, however many there are, and waits for
nothing: on a GPU 11 launches beyond the optimizer's own, of which four return at once unless a
projection has to be repeated. What was removed is computed when it is asked for.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from curvlab.basis import Basis
from curvlab.layerwise.layers import refuse_one_memory
from curvlab.parameters import Selection, select_parameters
from curvlab.precision import working
from curvlab.protection.closures import with_closure
from curvlab.rows import Rows


class Protection:
    """An optimizer whose steps are projected, until :meth:`remove`.

    Attributes:
        basis: What is protected; rows added to it later count from the next step on.
        parameters: Those that the basis covers and the optimizer trains.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        basis: Basis,
        covered: Callable[[], list[nn.Parameter]],
        gradients: bool,
    ) -> None:
        self.basis, self._cover, self._gradients = basis, covered, gradients
        self._look(optimizer)
        if not self.parameters:
            raise ValueError(
                "protect: the optimizer trains none of the parameters that the basis covers, so "
                "there is nothing to project: pass the optimizer of this model"
            )
        if basis.space.sharded and not all(self._moving):
            raise ValueError(
                "protect: the optimizer does not train all parameters that the basis covers, and a "
                "basis in shards is not restricted to a part: compute it for the trained ones, "
                "with select="
            )
        self._hooks = [
            optimizer.register_step_pre_hook(self._start),
            optimizer.register_step_post_hook(self._finish),
        ]

    def _look(self, optimizer: Optimizer) -> None:
        """Which parameters move; they are replaced, grouped and unfrozen at any time."""
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if trained != getattr(self, "_known", None):
            self._known, self._covered, self._moving = trained, self._cover(), list[bool]()
        refuse_one_memory(enumerate(self._covered))
        moving = [id(p) in trained and p.requires_grad for p in self._covered]
        if moving == self._moving:
            return
        self._moving = moving
        self.parameters = [p for p, moves in zip(self._covered, moving, strict=True) if moves]
        dtypes = {p.dtype for p in self.parameters}
        self._dtype = working(self.basis.dtype)  # float64 rows project float64 vectors only
        if torch.float64 in dtypes:
            self._dtype = torch.float64
        self._rounds = dtypes != {self._dtype}
        self._room: _Room | None = None
        self._last: tuple[Rows, Tensor] | None = None
        self._restricted: tuple[Tensor, Rows] | None = None

    def remove(self) -> None:
        """Give the optimizer its own steps back."""
        for hook in self._hooks:
            hook.remove()

    @property
    def removed(self) -> float:
        """The share of the last change's norm that the projection removed; 0 before a step."""
        if self._last is None or self._room is None:
            return 0.0
        (rows, weights), room = self._last, self._room
        m = len(weights)
        inside = float(weights @ rows.gram[:m, :m] @ weights) if m else 0.0
        change = room.change if room.master is not None else room.before - room.change
        left = float(change.double().square().sum())
        return (inside / (inside + left)) ** 0.5 if inside > 0.0 else 0.0

    @property
    def _rows(self) -> Rows:
        """The basis over the parameters that move."""
        if all(self._moving):
            return self.basis
        known = self.basis.gram  # another tensor whenever the rows are others
        if self._restricted is None or self._restricted[0] is not known:
            self._restricted = known, self._restrict()
        return self._restricted[1]

    def _restrict(self) -> Rows:
        sizes = [p.numel() for p in self._covered]
        mask = torch.cat(
            [torch.full((s,), m) for s, m in zip(sizes, self._moving, strict=True)]
        ).to(self.basis.device)
        n = int(mask.sum())
        part = Rows(n, n, dtype=working(self.basis.dtype), device=self.basis.device)
        for start in range(0, self.basis.size, 64):
            rows = self.basis.rows(start, min(start + 64, self.basis.size))
            part.extend(rows[:, mask])
        return part

    @torch.no_grad()
    def _start(self, optimizer: Optimizer, arguments: Any, options: Any) -> Any:
        self._look(optimizer)
        if not self.parameters:
            return None
        if self._room is None:
            self._room = _Room(self.parameters, self._dtype, self._rounds)
        self._last, room, tensors = None, self._room, list[Tensor](self.parameters)
        torch._foreach_copy_(room.before_parts, tensors)
        if room.master is None or room.given is None:
            room.change.copy_(room.before)
        else:
            # Where the model has what it was given, the copy goes on; else it starts from there.
            torch.where(room.before == room.given, room.master, room.before, out=room.master)
        if not self._gradients:
            return None
        self._project_gradients()
        return with_closure(arguments, options, self._project_gradients)

    @torch.no_grad()
    def _project_gradients(self) -> None:
        room = self._room
        present = [p.grad for p in self.parameters if p.grad is not None]
        if any(gradient.layout != torch.strided for gradient in present):
            raise ValueError(
                "protect: a basis projects all parameters together, and the sparse gradient of "
                "an embedding would be dense after it: build the embedding with sparse=False, "
                "or pass gradients=False, so that only the step is projected"
            )
        if room is None or len(present) < len(self.parameters):
            return
        if room.master is None:
            self._rows.project_out_(present)  # as they are
        else:
            torch._foreach_copy_(room.change_parts, present)
            self._rows.project_out_([room.change])
            torch._foreach_copy_(present, room.change_parts)

    @torch.no_grad()
    def _finish(self, _optimizer: Optimizer, _arguments: Any, _options: Any) -> None:
        room = self._room
        if room is None:  # protected in the middle of a step
            return
        rows, tensors, before = self._rows, list[Tensor](self.parameters), room.before_parts
        if room.master is None and not rows.size:
            return  # before + (after - before) need not be after
        if room.master is None:
            # a projected step of SGD from where it was, along its change: -1 (after - before)
            self._last = rows, rows.sgd_step_(before, tensors, [], lr=-1.0, weight_decay=-1.0)
            torch._foreach_copy_(tensors, before)
        else:
            torch._foreach_copy_(room.change_parts, tensors)
            room.change.sub_(room.before)
            self._last = rows, rows.project_out_([room.change])
            room.master.add_(room.change)
            torch._foreach_copy_(tensors, room.master_parts)
            torch._foreach_copy_(room.given_parts, tensors)


class _Room:
    """Flat vectors ``(n,)`` for a step, each also as tensors of the parameters' shapes.

    Attributes:
        before: The parameters before the step; at its end those after it.
        change: Without a master copy the parameters before the step; with one, the change.
        master: For parameters that round, what they would be if they did not; else ``None``.
        given: For the same, what the model was given of it.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], dtype: torch.dtype, rounds: bool
    ) -> None:
        n, device = sum(p.numel() for p in parameters), parameters[0].device
        flat = [torch.zeros(n, dtype=dtype, device=device) for _ in range(4 if rounds else 2)]
        sizes = [p.numel() for p in parameters]

        def parts(vector: Tensor) -> list[Tensor]:
            cut = torch.split(vector, sizes)
            return [piece.view(p.shape) for piece, p in zip(cut, parameters, strict=True)]

        self.before, self.change = flat[:2]
        self.before_parts, self.change_parts = parts(self.before), parts(self.change)
        self.master: Tensor | None = None
        self.given: Tensor | None = None
        if rounds:
            self.master, self.given = flat[2:]
            self.master_parts, self.given_parts = parts(self.master), parts(self.given)
            torch._foreach_copy_(self.master_parts, [p.detach() for p in parameters])
            self.given.copy_(self.master)


def covered_parameters(
    optimizer: Optimizer, model: nn.Module | Iterable[nn.Parameter] | None, select: Selection
) -> Callable[[], list[nn.Parameter]]:
    """What gives the parameters that a basis covers, in its order: of a model those it has then."""
    if isinstance(model, nn.Module):
        names, own = list(select_parameters(model, select)), model

        def of_model() -> list[nn.Parameter]:
            named = dict(own.named_parameters())
            return [named[name] for name in names]

        return of_model
    if select is not None:
        raise ValueError("select= names parameters of a model: pass model= as well")
    if model is None and len(optimizer.param_groups) > 1:
        raise ValueError(
            f"the optimizer has {len(optimizer.param_groups)} groups of parameters, whose order "
            "need not be that of the basis: pass model="
        )
    fixed = list(optimizer.param_groups[0]["params"] if model is None else model)
    return lambda: fixed
