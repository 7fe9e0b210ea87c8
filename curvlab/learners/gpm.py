"""GPM: gradients of a layer lose what lies in the span of that layer's past inputs.

If an update ``D`` of a layer's weights has ``D x = 0`` for every stored input ``x``, the layer
sends the same outputs on, so the next layer sees the same inputs, and so on to the logits: they
are frozen for any step size, not only to second order, and no block structure of the Hessian is
needed (the paper's corollary assumes both). Two things break the chain and are refused: biases
left free (they shift every output; as weights of a constant input they are covered) and running
statistics of BatchNorm (they move the inputs of the next layer without any gradient).

Orientation: PyTorch's weights are (out, in), so the projection multiplies from the right; the
paper writes (in, out).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from curvlab.basis import Basis
from curvlab.checks import inside, whole
from curvlab.layerwise.spans import extend_to_share
from curvlab.learners.base import Learner
from curvlab.learners.described import plain
from curvlab.learners.layer_inputs import InputLayer, input_layers, layer_inputs
from curvlab.learners.population import Population
from curvlab.learners.rooms import LARGE, Call, few_threads, product, results, rooms
from curvlab.learners.seeds import drawn
from curvlab.parameters import Selection
from curvlab.tasks.samples import Samples, Task

Threshold = float | Sequence[float] | Callable[[int], float]


class GPM(Learner):
    """Gradient projection memory.

    Args:
        threshold: Share of the energy ``||R||^2`` of a layer's input rows that the memory has to
            hold after a task (1 - eps of the paper). One number, one per layer, or a function of
            the task's index (``lambda t: min(1.0, 0.97 + 0.003 * t)``), checked for all
            tasks before training.
        samples: Training samples whose inputs are stored, drawn per seed.
        bias: ``"refuse"`` takes only models without biases in these layers; ``"augmented"``
            projects each bias together with its weights, as the weight of a constant input.

        select: Parameters that are protected, as in operators (``"body.*"``); the others are free.

    Other parameters (scales and shifts of norms, tokens, positions, ``nn.MultiheadAttention``,
    grouped convolutions, recurrent layers, subclasses with their own ``forward``) are not matrices
    that act on inputs which can be observed. They are learned in the first task that uses them and
    frozen afterwards, as are weights that are also used outside their layer (tied by hand). A head
    that only one task uses is neither projected nor frozen, because no other task moves it; a layer
    has rows of the tasks that use it. So GPM's published setting, one head per task, runs.
    """

    serves_later_tasks = True
    settings = ("samples", "bias")

    def __init__(
        self,
        threshold: Threshold = 0.99,
        *,
        samples: int = 300,
        bias: Literal["refuse", "augmented"] = "refuse",
        select: Selection = None,
    ) -> None:
        super().__init__()
        if bias not in ("refuse", "augmented"):
            raise ValueError(f"bias= must be 'refuse' or 'augmented'; got {bias!r}")
        whole(samples=samples)
        if not callable(threshold):
            for one in threshold if isinstance(threshold, Sequence) else [threshold]:
                inside("[0, 1]", threshold=one)
        self.threshold, self.samples, self.bias = threshold, samples, bias
        self.select = select
        self._by_task: list[float] = []  # of a threshold that is a function
        self._layers: list[InputLayer] = []
        self._rest: dict[str, slice] = {}  # protected parameters that belong to no such layer
        self._frozen: list[slice] = []  # those of them that a finished task used
        self._bases: list[list[Basis]] = []  # [layer][run]: float64 rows (r, width)
        self._removals: list[Call] = []  # what is done to the gradients in every step
        self._threads: int | None = None

    def expect(self, population: Population, tasks: Sequence[Task]) -> None:
        super().expect(population, tasks)
        if callable(self.threshold):
            self._by_task = [float(self.threshold(task)) for task in range(len(tasks))]
        for task, share in enumerate(self._by_task):
            if not 0.0 <= share <= 1.0:
                raise ValueError(
                    f"threshold= is a share of energy, between 0 and 1; for task {task} of "
                    f"{len(tasks)} it gives {share:g}: keep it below with min(1.0, ...)"
                )

    def before_task(self, population: Population, task: int, samples: Samples) -> None:  # noqa: ARG002
        if task == 0:
            self._prepare(population)

    def _prepare(self, population: Population) -> None:
        _refuse_moving_statistics(population)
        shared = {n for n in population.chosen(self.select) if not population.uses.alone(n)}
        slices = population.layout.slices()
        protected = {slices[name].start for name in shared}
        self._layers = input_layers(population, shared)
        for layer in self._layers:
            if layer.bias is not None and layer.bias.start not in protected:
                raise ValueError(
                    f"select= takes the weight of layer {layer.name!r} and not its bias, through "
                    "which all its outputs would move: take both or none"
                )
        if not self._layers:
            raise ValueError(
                "GPM acts on weights of nn.Linear and nn.Conv2d that tasks share, and this model "
                "has none, or select= leaves none"
            )
        biased = [layer.name for layer in self._layers if layer.bias is not None]
        if biased and self.bias == "refuse":
            raise ValueError(
                f"layers {biased[:4]} have biases, which GPM would leave free: every update of "
                "theirs changes the outputs on old tasks. Use GPM(bias='augmented'), or a model "
                "without biases"
            )
        covered = {w.start for layer in self._layers for w in (layer.weight, layer.bias) if w}
        self._rest = {
            name: where
            for name, where in slices.items()
            if where.start in protected and where.start not in covered
        }
        self._bases = [
            [Basis(layer.width, layer.width, dtype=torch.float64) for _ in population.seeds]
            for layer in self._layers
        ]
        self._thresholds(0)

    def transform_(self, population: Population) -> None:
        if not self._removals:
            return
        with few_threads(self._threads):
            for call in self._removals:
                call()
        for where in self._frozen:
            population.gradients[:, where] = 0.0

    def after_task(self, population: Population, task: int, samples: Samples) -> None:
        thresholds = self._thresholds(task)
        for s, seed in enumerate(population.seeds):
            chosen = drawn(samples, self.samples, seed, "gpm", task)
            seen = layer_inputs(population, s, chosen.inputs, task, self._layers)
            for bases, one, share in zip(self._bases, seen, thresholds, strict=True):
                rows = None if one.inputs is None else one.inputs.whole()
                if one.elsewhere:  # from now on it stays as it is
                    width = bases[s].n
                    bases[s] = Basis.exactly(torch.eye(width, dtype=torch.float64), width)
                elif rows is not None:
                    extend_to_share(bases[s], rows.cpu(), share, task=str(task))
        self._set_removals(population, task + 1)
        ranks = [[len(bases[s]) for bases in self._bases] for s in range(population.size)]
        size = population.parameters.element_size()
        self.notes.append(
            {
                "ranks": ranks,
                "widths": {layer.name: layer.width for layer in self._layers},
                "frozen_parameters": sum(where.stop - where.start for where in self._frozen),
                "memory_bytes": sum(layer.width**2 for layer in self._layers) * size,
            }
        )

    def _thresholds(self, task: int) -> list[float]:
        if callable(self.threshold):
            shares = [float(self.threshold(task))] * len(self._layers)
        elif isinstance(self.threshold, Sequence):
            shares = [float(share) for share in self.threshold]
        else:
            shares = [float(self.threshold)] * len(self._layers)
        if len(shares) != len(self._layers):
            raise ValueError(
                f"threshold= has {len(shares)} entries, but the model has {len(self._layers)} "
                f"layers: {[layer.name for layer in self._layers]}"
            )
        return shares

    def _set_removals(self, population: Population, finished: int) -> None:
        used = {name for task in range(finished) for name in population.uses.of(task)}
        self._frozen = [where for name, where in self._rest.items() if name in used]
        self._removals = []
        small = max(layer.outputs * layer.width**2 for layer in self._layers) < LARGE
        self._threads = 1 if small else None
        for layer, bases in zip(self._layers, self._bases, strict=True):
            away = rooms(population.size, layer.width, layer.width, like=population.parameters)
            for s, basis in enumerate(bases):
                rows = basis.rows()
                # I - V'V and not V: ranks differ from run to run, and matrices of one shape are
                # multiplied in one batch
                one = torch.eye(layer.width, dtype=torch.float64) - rows.T @ rows
                # inputs that are always zero leave entries near 1e-35, and products with subnormal
                # numbers take many times as long
                one[one.abs() < 1e-20] = 0.0
                away[s].copy_(one)
            self._removals += _removal(layer, population.gradients, away, small)

    def config(self) -> dict[str, Any]:
        by_task = callable(self.threshold)  # told by its values
        threshold = self._by_task if by_task else plain(self.threshold)
        name = "threshold_by_task" if by_task else "threshold"
        return {**super().config(), name: threshold}

    def state(self) -> dict[str, Tensor]:
        return {
            f"{layer.name}/{s}": basis.rows()
            for layer, bases in zip(self._layers, self._bases, strict=True)
            for s, basis in enumerate(bases)
        }

    def load_state(self, population: Population, tensors: dict[str, Tensor]) -> None:
        self._prepare(population)
        self._bases = [
            [
                Basis.exactly(tensors[f"{layer.name}/{s}"], layer.width)
                for s in range(population.size)
            ]
            for layer in self._layers
        ]
        if self.notes:
            self._set_removals(population, len(self.notes))


def _removal(layer: InputLayer, gradients: Tensor, away: Tensor, small: bool) -> list[Call]:
    """Calls that multiply the layer's gradients ``(S, outputs, width)`` by ``away``, in place."""
    runs = len(gradients)
    weight = gradients[:, layer.weight].view(runs, layer.outputs, layer.inputs)
    projected = results(runs, layer.outputs, layer.width, small=small, like=gradients)
    if layer.bias is None:
        return [product(weight, away, projected), partial(weight.copy_, projected)]
    bias = gradients[:, layer.bias].unsqueeze(2)
    joined = rooms(runs, layer.outputs, layer.width, like=gradients)
    return [
        partial(joined[:, :, :-1].copy_, weight),
        partial(joined[:, :, -1:].copy_, bias),
        product(joined, away, projected),
        partial(weight.copy_, projected[:, :, :-1]),
        partial(bias.copy_, projected[:, :, -1:]),
    ]


def _refuse_moving_statistics(population: Population) -> None:
    policy = population.statistics.policy
    if policy == "running":
        raise ValueError(
            "with batchnorm='running' the statistics go on moving and change what every later "
            "layer receives, whatever GPM projects: choose batchnorm='freeze' or 'per_task'"
        )
    if policy == "untracked":
        raise ValueError(
            "BatchNorm without running statistics makes outputs depend on which samples share a "
            "batch, so stored inputs do not tell what a layer receives later: build the model "
            "with running statistics (and batchnorm='freeze') or another norm"
        )
