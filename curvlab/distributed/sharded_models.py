"""Curvature of tensor-parallel models, whose parameters and computations torch divides itself.

:class:`TensorParallelHessian` is for parameters that are ``DTensor`` (``parallelize_module``,
``distribute_tensor``), which torch 2.13 differentiates twice: products are exact. Vectors are whole
on every rank during a product, and the parameters never are. Every rank makes the same calls.
``Sharded(...)`` around it keeps a solver's rows in shards. FSDP2 models are another matter:
:mod:`curvlab.distributed.fully_sharded`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from curvlab.batches import digest, freeze, sample_count
from curvlab.distributed.agreement import fingerprint
from curvlab.distributed.group import Group, current
from curvlab.distributed.sharded_problem import whole
from curvlab.distributed.watch import RankError
from curvlab.operators import Objective, Operator
from curvlab.operators.objective import Loss, require_scalar, stated_reduction, terms
from curvlab.operators.policy import fully_sharded, training_flags
from curvlab.parameters import Selection, layout_of, select_parameters
from curvlab.probe import OperatorError


class OfShards(Operator):
    """The parameters of a model as one vector, its batches, and what each of them counts."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss | Objective | None,
        data: Any,
        select: Selection,
        chunk: int | None,
        group: Group | None,
    ) -> None:
        self.group = current(group)
        training_flags(model, frozenset())
        chosen = select_parameters(model, select)
        kinds = {(parameter.dtype, parameter.device) for parameter in chosen.values()}
        if len(kinds) > 1:
            raise TypeError(f"the parameters have several dtypes or devices: {kinds}")
        dtype, device = kinds.pop()
        if dtype not in (torch.float32, torch.float64):
            raise TypeError(f"curvature is computed in float32 or float64, not {dtype}")
        for name, parameter in chosen.items():
            mesh = getattr(parameter, "device_mesh", None)
            if mesh is not None and mesh.size() != self.group.size:
                raise TypeError(
                    f"parameter {name!r} is divided over {mesh.size()} ranks and the job has "
                    f"{self.group.size}: this takes one mesh over all ranks"
                )
        self._layout = layout_of(chosen)
        super().__init__(self._layout.n, dtype, device, self._layout)
        self.model, self.parameters = model, list(chosen.values())
        self.value = terms(loss).whole
        self.reduction = stated_reduction(loss) or "mean"
        frozen = freeze(data, bare=loss is None or isinstance(loss, Objective))
        self.batches = frozen.to(device, None).pieces(chunk)
        self.counts = [float(sample_count(batch) or 0) for batch in self.batches]
        if not all(self.counts):
            raise ValueError("the samples of a batch cannot be counted: cut the batches yourself")

    def flat(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """A whole vector ``(n,)`` of tensors in shards, on every rank."""
        return self._layout.flatten(
            (None if t is None else whole(t) for t in tensors), like=self._empty()
        )

    def cut(self, vector: Tensor) -> list[Tensor]:
        """``vector`` ``(n,)`` in tensors that are divided like the parameters."""
        pieces = zip(self._layout.unflatten(vector), self.parameters, strict=True)
        return [_divided(piece, parameter) for piece, parameter in pieces]

    def _empty(self) -> Tensor:
        return torch.empty(0, dtype=self.dtype, device=self.device)

    def random(self) -> Tensor:
        draw = torch.randn(self.n, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
        return draw.to(device=self.device, dtype=self.dtype)


class TensorParallelHessian(OfShards):
    """The Hessian of a model with ``DTensor`` parameters, exact: two derivatives through torch.

    Args:
        model: After ``parallelize_module`` or with parameters from ``distribute_tensor``, over all
            ranks of the job. Its parameters are not copied and must stay as they are.
        loss: ``loss(output, target)``, a mean or a sum; or as for other operators.
        data: The same on every rank, as tensor parallelism needs it.
        select: Which parameters.
        chunk: Most samples at a time; the graph of a single chunk is kept between products.
        group: The ranks; by default those of the job.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss | Objective | None,
        data: Any,
        *,
        select: Selection = None,
        chunk: int | None = None,
        group: Group | None = None,
    ) -> None:
        if fully_sharded(model):
            raise TypeError(
                "an FSDP2 model (fully_shard) is not tensor parallel: curvlab.Hessian takes it as "
                "it is"
            )
        super().__init__(model, loss, data, select, chunk, group)
        said = self.group.facts(digest(self.batches), "a comparison of data")
        odd = [rank for rank, other in enumerate(said) if other != said[0]]
        if odd:
            raise RankError(
                f"rank {odd[0]} holds other data than rank 0: every rank of a tensor-parallel "
                "model computes on the same samples"
            )
        self._kept: list[Tensor | None] | None = None
        self._versions = [parameter._version for parameter in self.parameters]
        marks = self.group.facts(fingerprint(self @ self.random()), "a first product")
        odd = [rank for rank, mark in enumerate(marks) if mark != marks[0]]
        if odd:
            raise RankError(
                f"rank {odd[0]} gets another product than rank 0: a parameter that is not a "
                "DTensor has other gradients there; distribute it with [Replicate()]"
            )
        self.certificate = self.probe()
        self.certificate.require()

    def _product(self, block: Tensor) -> Tensor:
        if self._versions != [parameter._version for parameter in self.parameters]:
            raise OperatorError(
                "the model's parameters have changed since this operator was made: make a new one"
            )
        total = torch.zeros(block.shape, dtype=torch.float64, device=self.device)
        samples = sum(self.counts)
        for batch, count in zip(self.batches, self.counts, strict=True):
            weight = count / samples if self.reduction == "mean" else 1.0
            gradients = self._gradients(batch, weight)
            used = [i for i, g in enumerate(gradients) if g is not None and g.requires_grad]
            for vector, row in zip(block, total, strict=True):
                seeds = self.cut(vector)
                images = torch.autograd.grad(
                    [g for g in gradients if g is not None and g.requires_grad],
                    self.parameters,
                    [seeds[i] for i in used],
                    retain_graph=True,
                    allow_unused=True,
                )
                row += self.flat(images)
        return total.to(self.dtype)

    def _gradients(self, batch: Any, weight: float) -> list[Tensor | None]:
        """With their graph."""
        if self._kept is not None:
            return self._kept
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            value = require_scalar(self.value(self.model, batch)) * weight
            found = torch.autograd.grad(
                value, self.parameters, create_graph=True, allow_unused=True
            )
        if len(self.batches) == 1:
            self._kept = list(found)
        return list(found)


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, in its memory."""
    part = getattr(tensor.detach(), "to_local", None)
    return tensor.detach() if part is None else part()


def _divided(piece: Tensor, parameter: Any) -> Tensor:
    """Every rank has the whole piece: each keeps its part, and nothing is sent."""
    if not hasattr(parameter, "device_mesh"):
        return piece
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(piece, mesh, placements, src_data_rank=None)
