"""Steps of any torch optimizer that leave layers unchanged on the inputs they have seen.

What is guaranteed, for every optimizer and every step size (``side="inputs"``): what each covered
layer does to inputs in its protected subspace V is what it did when protection began,
``(W_now - W_then) V' = 0`` up to one rounding of the weights, not one a step. At ``energy=1`` every
stored input lies in it: layer by layer the outputs on stored inputs stay, and so do the next
layer's inputs, on to the logits. This is the frozen network of the paper's theorem 3 without its
assumption on the Hessian (GPM); it takes all that is not covered to be held as well, which it is
unless named in ``free=``. Below ``energy=1`` what the subspace does not hold of an input may move
the output, and moves the next layers' inputs: nothing is guaranteed there but the projection.

With ``side="outputs"`` the change is unseen by the loss to first order, with ``side="both"`` it
lies outside the leading eigenvectors of K-FAC's approximation of the curvature: both are soft, and
hold near where the bases were made.

- A layer's bias is the weight of a constant input and projected together with it. Of embeddings
  the rows of seen tokens are held. Norms, positions and all else that no basis covers are held.
- Adapters (LoRA) add ``B A x``: A is brought into the null space of V and kept there (from the
  side of outputs: B), so that the product is zero on protected inputs whatever B becomes.
- Parameters in bfloat16 or float16 follow a float32 copy, which is what the guarantee is about;
  the model has it rounded, so that it is one rounding off and never more.
- Weights in shards (FSDP2): each rank's rows of a weight are projected by themselves, which is
  exact for ``side="inputs"``; other placements and sides are refused.

What was held is held: weights that change between steps (``load_state_dict``) are taken as they
are then. Only writes through ``.data`` are not seen: call :meth:`LayerProtection.anchor` after one.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.optim import Optimizer

from curvlab.layerwise import LayerBases
from curvlab.layerwise.layers import refuse_one_memory
from curvlab.operators.policy import arithmetic, inner
from curvlab.parameters import Selection, select_parameters
from curvlab.protection.closures import with_closure
from curvlab.protection.constraints import Constraints
from curvlab.protection.groups import Group, grouped
from curvlab.protection.local import local


class LayerProtection:
    """An optimizer whose steps stay outside layer bases, until :meth:`remove`.

    Attributes:
        bases: What is protected; what is added later counts from the next step on.
        held: Names of trained parameters that do not move at all.
        free: Names of trained parameters that no basis covers and ``free=`` lets move.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        bases: LayerBases,
        model: nn.Module,
        free: Selection,
        gradients: bool,
    ) -> None:
        self.bases, self._model, self._gradients = bases, inner(model), gradients
        self._trained = self._moving(optimizer)
        if not self._trained:
            raise ValueError(
                "protect: the optimizer trains no parameter of this model, so there is nothing to "
                "project: pass the optimizer of this model"
            )
        self._norms = [
            (name, module)
            for name, module in self._model.named_modules()
            if getattr(module, "running_mean", None) is not None or _iterates(module)
        ]
        self._asked = set() if free is None else set(select_parameters(self._model, free))
        self.held: tuple[str, ...] = ()
        self.free: tuple[str, ...] = ()
        self.anchor()
        self._hooks = [
            optimizer.register_step_pre_hook(self._start),
            optimizer.register_step_post_hook(self._finish),
        ]

    def _moving(self, optimizer: Optimizer) -> dict[str, nn.Parameter]:
        """The model's parameters that the optimizer trains, by name."""
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        named = self._model.named_parameters()
        return {name: p for name, p in named if id(p) in trained and p.requires_grad}

    def remove(self) -> None:
        """Give the optimizer its own steps back."""
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def anchor(self) -> None:
        """Hold from now on what the weights are now; called when they or the bases change."""
        plan = Constraints(self._model, self.bases, self._trained)
        self._known = self.bases.changes
        self._groups: list[Group] = grouped(plan.held)
        self.free = tuple(n for n in self._trained if n in self._asked - plan.covered)
        self.held = tuple(
            name
            for name in self._trained
            if name in plan.whole or name not in plan.covered | self._asked
        )
        self._still = [self._trained[name] for name in self.held]
        self._copies = [local(one).clone() for one in self._still]
        self._rows = [
            (weight, which, local(weight).index_select(0, which)) for weight, which in plan.rows
        ]
        if any(one.zero for group in self._groups for one in group.members):
            self._project()
        self._note()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that are held, whole or in part."""
        return [p for name, p in self._trained.items() if name not in self.free]

    @property
    def leak(self) -> float:
        """The largest share of a weight's norm by which what is held of it has moved."""
        with torch.no_grad():
            for group in self._groups:
                group.take()
            found = [float(group.leak().max()) for group in self._groups]
        return max(found, default=0.0)

    @property
    def bytes(self) -> int:
        """What the protection keeps beside the bases: rows in use, what is held, and room."""
        copies = [*self._copies, *(values for *_, values in self._rows)]
        own = sum(copy.numel() * copy.element_size() for copy in copies)
        return own + sum(group.bytes for group in self._groups)

    def __repr__(self) -> str:
        matrices = sum(len(group.members) for group in self._groups)
        return (
            f"LayerProtection(side={self.bases.side!r}, {matrices} matrices in "
            f"{len(self._groups)} groups, {len(self.held)} parameters held, {len(self.free)} free)"
        )

    def _note(self) -> None:
        self._versions = [p._version for p in self._trained.values()]

    @torch.no_grad()
    def _start(self, optimizer: Optimizer, arguments: Any, options: Any) -> Any:
        if self.bases.side == "inputs":
            for name, module in self._norms:
                if module.training:
                    raise ValueError(
                        f"protect: {name!r} moves its running statistics (of a spectral norm, its "
                        "vectors) while it trains, and with them every output: put it in eval mode "
                        "after model.train()"
                    )
        trained = self._moving(optimizer)  # groups are added and layers unfrozen at any time
        refuse_one_memory(trained.items())
        if [*map(id, trained.values())] != [*map(id, self._trained.values())]:
            self._trained = trained
            self.anchor()
        moved = self._versions != [p._version for p in self._trained.values()]
        if moved or self._known != self.bases.changes:
            self.anchor()
        if not self._gradients:
            return None
        self._project_gradients()
        return with_closure(arguments, options, self._project_gradients)

    @torch.no_grad()
    def _project_gradients(self) -> None:
        for group in self._groups:
            with arithmetic(group.weights.device, "exact"), torch.no_grad():
                group.project_gradients_(group.gradients())
        still = [local(p.grad) for p in self._still if p.grad is not None]
        if still:
            torch._foreach_zero_(still)
        for weight, which, _ in self._rows:
            if weight.grad is not None and weight.grad.is_sparse:
                weight.grad = _without_rows(weight.grad, which)
            elif weight.grad is not None:
                local(weight.grad).index_fill_(0, which, 0.0)

    @torch.no_grad()
    def _finish(self, _optimizer: Optimizer, _arguments: Any, _options: Any) -> None:
        self._project()
        self._note()

    def _project(self) -> None:
        for group in self._groups:
            with arithmetic(group.weights.device, "exact"), torch.no_grad():
                group.take()
                group.hold_()
                group.give()
        if self._still:
            torch._foreach_copy_([local(one) for one in self._still], self._copies)
        for weight, which, values in self._rows:
            local(weight).index_copy_(0, which, values)


def _iterates(module: nn.Module) -> bool:
    """Whether it is a spectral norm, whose power iteration goes on in every forward pass."""
    hooks = module._forward_pre_hooks.values()
    return isinstance(module, _SpectralNorm) or any(isinstance(h, SpectralNorm) for h in hooks)


def _without_rows(gradient: Tensor, which: Tensor) -> Tensor:
    """A sparse gradient ``(n, d)`` of an embedding with the rows ``which`` set to zero."""
    gradient = gradient.coalesce()
    inside = torch.isin(gradient.indices()[0], which)
    gradient.values().masked_fill_(inside.unsqueeze(1), 0.0)
    return gradient
