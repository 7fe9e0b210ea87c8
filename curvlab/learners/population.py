"""S runs of one model side by side, all their numbers in three flat tensors ``(S, P)``.

:class:`Population` is what learners see: it takes any ``nn.Module`` and loops over the runs with
autograd; plain MLPs have a faster one (:mod:`curvlab.learners.stacked`). In both ``models[s]`` is
an ordinary module whose parameters are views of row ``s``: it can be handed to any operator, hook
or picture at any time.
"""

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from curvlab.float32 import float32_products, float32_switch
from curvlab.layerwise.layers import refuse_one_memory
from curvlab.learners.draws import Draws
from curvlab.learners.rooms import aligned, rooms
from curvlab.learners.seeds import derived_seed
from curvlab.learners.statistics import BatchNormPolicy, RunningStatistics
from curvlab.learners.step import Batch
from curvlab.learners.uses import Uses, used
from curvlab.parameters import Layout, Selection, call_with, layout_of, select_parameters
from curvlab.storage import below
from curvlab.tasks.samples import Task

# of logits (B, C) and targets (B,): a mean over the batch
Loss = Callable[[Tensor, Tensor], Tensor]
# of a run's number and its logits on its part of the batch
Objective = Callable[[int, Tensor], Tensor]


class Population:
    """S models of one shape; ``parameters``, ``gradients``, ``velocity`` are ``(S, P)``.

    Args:
        models: One per seed, with the same parameters. They are bound to the population: their
            parameters become views into it, so moving or casting them afterwards breaks it.
        seeds: One per model; data order and all other randomness derive from them.
        batchnorm: What happens to running statistics; required if the models have any
            (:mod:`curvlab.learners.statistics`).

    Attributes:
        layout: Names, shapes and offsets of the P parameters (those that require a gradient).
        takes_task: Whether ``forward`` has an argument ``task``.
        velocity: Momentum buffers, or ``None`` without momentum; zeroed before every task.
        runs: For each run its rows of the three ``(P,)``, the last in a list, empty without one.
        autocast: The dtype of matrix products in :meth:`gradient_`; ``None`` is the parameters'.
        loss: What is minimised, a mean over a batch: ``learn(loss=...)``.
        seen: For each call of :meth:`gradient_`, what :meth:`losses` computes the loss from;
            ``None`` keeps nothing, until ``learn`` sets it.
        uses: Which parameters each task uses.
        batch: What the runs learn from, during a step.
        strayed: Largest gradients of parameters that the task does not use, since the last check.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        seeds: Sequence[int],
        *,
        batchnorm: BatchNormPolicy | None = None,
    ) -> None:
        if not models or len(models) != len(seeds):
            raise ValueError(
                f"a population needs one model per seed; got {len(models)} models and "
                f"{len(seeds)} seeds"
            )
        if len(set(map(id, models))) < len(models) or len(set(seeds)) < len(seeds):
            raise ValueError("every run needs its own seed and its own module; one was given twice")
        self.models, self.seeds = list(models), tuple(seeds)
        for model in self.models:
            refuse_one_memory(model.named_parameters())
        self._named = [select_parameters(model) for model in models]
        self.layout: Layout = layout_of(self._named[0])
        _check_alike(self._named, self.layout)
        stacked = torch.stack([self.layout.flatten(n.values()) for n in self._named])
        self.parameters = rooms(*stacked.shape, like=stacked).copy_(stacked)
        self.gradients = rooms(*stacked.shape, like=stacked)
        self.velocity = None
        self.autocast: torch.dtype | None = None
        self.statistics = RunningStatistics(self.models, batchnorm)
        self.takes_task = "task" in inspect.signature(self.models[0].forward).parameters
        self.loss: Loss = cross_entropy
        self.seen: list[Tensor] | None = None
        self.uses = Uses(self.layout)
        self.batch: Batch | None = None
        self.strayed: Tensor | None = None
        self._draws = Draws(self.models)
        self._beside = 0  # above 0 inside gradient_of, which draws other numbers than the batch
        self._training: bool | None = None
        self.bind()
        self.train_mode(False)

    @property
    def velocity(self) -> Tensor | None:
        return self._velocity

    @velocity.setter
    def velocity(self, velocity: Tensor | None) -> None:
        self._velocity = velocity
        momenta = [[]] * len(self.seeds) if velocity is None else [[one] for one in velocity]
        self.runs: list[tuple[Tensor, Tensor, list[Tensor]]]
        self.runs = list(zip(self.parameters, self.gradients, momenta, strict=True))

    @property
    def size(self) -> int:
        """S, the number of runs."""
        return len(self.seeds)

    @property
    def n(self) -> int:
        """P, the number of parameters of one run."""
        return self.layout.n

    @property
    def device(self) -> torch.device:
        return self.parameters.device

    @property
    def dtype(self) -> torch.dtype:
        return self.parameters.dtype

    @property
    def by_task(self) -> bool:
        """Whether samples of different tasks pass through the network apart."""
        return self.takes_task or self.statistics.policy == "per_task"

    def meet(self, tasks: Sequence[Task]) -> None:
        """Find out which parameters each task uses, from a few samples of it."""
        if not self.takes_task:
            self.uses = Uses(self.layout)
            return
        self.train_mode(False)

        def of(index: int, inputs: Tensor) -> frozenset[str]:
            return used(
                lambda flat: self.logits_of(0, inputs, index, flat), self.layout, self.parameters[0]
            )

        found = tuple(of(index, task.train.inputs[:8]) for index, task in enumerate(tasks))
        self.uses = Uses(self.layout, found)

    def chosen(self, select: Selection, task: int | None = None) -> list[str]:
        """Names of the parameters that ``select`` takes (``None`` all) and ``task`` uses."""
        used = list(self.layout.names) if task is None else self.uses.of(task)
        if select is None:
            return used
        taken = select_parameters(self.models[0], select)
        return [name for name in used if name in taken]

    def left_out(self, select: Selection) -> list[slice]:
        """Where the parameters lie that ``select`` does not take."""
        taken = set(self.chosen(select))
        return [where for name, where in self.layout.slices().items() if name not in taken]

    def gradient_(
        self,
        inputs: Tensor,
        targets: Tensor,
        task: int,
        step: int = 0,
        objective: Objective | None = None,
    ) -> None:
        """Write the gradient of what each run minimises into ``gradients``.

        Args:
            inputs: Shape ``(S, B, ...)``: each run its own batch.
            targets: Shape ``(S, B)``.
            task: Index of the task, handed to modules whose ``forward`` has an argument ``task``.
            step: Its number in the task; with the seeds it decides dropout's random numbers.
            objective: What is minimised, given a run and its logits; ``None`` is the mean loss.
        """
        self.train_mode(True)
        self.gradients.zero_()
        values, ask = [], self.answer if self._beside else self._forward
        for s in range(self.size):
            with torch.enable_grad(), self._drawing(s, task, step), self._products(targets[s]):
                logits = ask(s, inputs[s].clone(), task)  # aligned like the rows
                value = self.loss(logits, targets[s]) if objective is None else objective(s, logits)
                torch.autograd.backward(value)
            values.append(value.detach())
        if self.seen is not None:
            self.seen.append(torch.stack(values))

    def _products(self, samples: Tensor) -> AbstractContextManager[None]:
        """How float32 matrices are multiplied for these samples."""
        one = self.models[0].parameters()
        return float32_products(float32_switch(len(samples), one, self.dtype))

    def losses(self) -> Tensor:
        """Losses of the batches since the last call, ``(S, m)`` float64 on the CPU."""
        seen, self.seen = self.seen or [], []
        alike = groupby(seen, lambda one: one.shape)
        values = [self.loss_of(torch.stack(list(some))) for _, some in alike]
        return torch.cat([torch.zeros(self.size, 0, dtype=torch.float64), *values], 1)

    def loss_of(self, seen: Tensor) -> Tensor:
        """Losses ``(S, m)`` float64 on the CPU, of ``m`` entries of :attr:`seen`."""
        return seen.T.double().cpu()

    def gradient_of(self, inputs: Tensor, targets: Tensor, task: int, step: int) -> Tensor:
        """Gradients ``(S, P)`` of the mean loss on other samples, at the present parameters.

        For use inside ``transform_``: ``gradients`` stay as they are, and dropout draws other
        numbers than for the batch. Running statistics see these samples as :meth:`answer` says.
        """
        kept, seen = self.gradients.clone(), self.seen
        self._beside, self.seen = self._beside + 1, None
        try:
            self.gradient_(inputs, targets, task, step)
        finally:
            self._beside, self.seen = self._beside - 1, seen
        found = self.gradients.clone()
        self.gradients.copy_(kept)
        return found

    def logits(self, inputs: Tensor, task: int, parameters: Tensor | None = None) -> Tensor:
        """Predictions ``(S, N, C)`` in eval mode, without a graph.

        Args:
            inputs: Shape ``(N, ...)``, the same for every run.
            task: Index of the task they come from.
            parameters: Shape ``(S, P)`` to use in place of the current ones.
        """
        self.train_mode(False)
        values = aligned(self.parameters if parameters is None else parameters)
        with torch.no_grad(), self._products(inputs):
            return torch.stack(
                [self.logits_of(s, inputs, task, values[s]) for s in range(self.size)]
            )

    def logits_of(
        self,
        s: int,
        inputs: Tensor,
        task: int,
        parameters: Tensor,
        buffers: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """Logits ``(N, C)`` of run ``s`` as a differentiable function of ``parameters`` ``(P,)``.

        Mode and (unless given) buffers are the model's present ones, except statistics kept per
        task.
        """
        values = dict(zip(self.layout.names, self.layout.unflatten(parameters), strict=True))
        values |= buffers or {}
        values |= self.statistics.of_task(task, s)
        arguments = (inputs, task) if self.takes_task else (inputs,)
        result: Tensor = call_with(self.models[s], values, arguments)
        return result

    def answer(self, s: int, inputs: Tensor, task: int) -> Tensor:
        """Logits ``(N, C)`` of samples beside the batch, as training sees them.

        With BatchNorm statistics kept per task, those of ``task`` are used and do not move. A
        single sample, which has no statistics of its own, uses the stored ones under any policy.
        Otherwise the samples are treated as a batch.
        """
        try:
            with self.statistics.replayed(s, task, len(inputs)):
                return self._forward(s, inputs, task)
        except ValueError as error:
            if self.statistics.policy != "untracked" or len(inputs) > 1:
                raise
            raise ValueError(
                "a single sample beside the batch has no statistics for a BatchNorm that keeps "
                "none: draw more (batch=), or build the model with running statistics"
            ) from error

    def _forward(self, s: int, inputs: Tensor, task: int) -> Tensor:
        """Logits ``(N, C)`` of run ``s`` under :attr:`autocast`."""
        with torch.autocast(self.device.type, self.autocast, self.autocast is not None):
            logits = self.call(s, inputs, task)
        return logits.to(self.dtype)

    def call(self, s: int, inputs: Tensor, task: int) -> Tensor:
        """``models[s]`` applied to ``inputs`` ``(N, ...)``, in its present mode, hooks included."""
        model = self.models[s]
        result: Tensor = model(inputs, task) if self.takes_task else model(inputs)
        return result

    def _drawing(self, s: int, task: int, step: int) -> AbstractContextManager[None]:
        if not self._draws.any:
            return nullcontext()
        more = (self._beside,) if self._beside else ()
        seed = derived_seed(self.seeds[s], "dropout", task, step, *more)
        return self._draws.from_seed(s, seed, self.device)

    def bind(self) -> None:
        """Make the models' parameters and their ``.grad`` views of this population (again)."""
        for s, named in enumerate(self._named):
            values = self.layout.unflatten(self.parameters[s])
            gradients = self.layout.unflatten(self.gradients[s])
            for parameter, value, gradient in zip(named.values(), values, gradients, strict=True):
                parameter.data = value
                parameter.grad = gradient

    def begin_task(self, task: int) -> None:
        """The loop's call before the first step of a task."""
        self.bind()
        self.statistics.begin_task(task)
        self._training = None  # what is frozen may have changed
        if self.velocity is not None:
            self.velocity.zero_()

    def end_task(self, task: int) -> None:
        """The loop's call after the last step of a task."""
        self.train_mode(False)
        self.statistics.end_task(task)

    def train_mode(self, training: bool) -> None:
        """Put all models in train or eval mode; fixed statistics stay in eval mode."""
        if training == self._training:
            return
        self._training = training
        for s, model in enumerate(self.models):
            model.train(training)
            self.statistics.hold(s)

    def state(self) -> dict[str, Tensor]:
        """Parameters, momentum, buffers and kept statistics, for a checkpoint."""
        tensors = {"parameters": self.parameters}
        if self.velocity is not None:
            tensors["velocity"] = self.velocity
        tensors |= {f"buffers/{name}": value for name, value in self.buffers().items()}
        return tensors | {f"kept/{k}": value for k, value in self.statistics.state().items()}

    def load_state(self, tensors: dict[str, Tensor], task: int) -> None:
        """Take back what :meth:`state` gave, in the middle of ``task``."""
        self.adopt(tensors["parameters"], below(tensors, "buffers/"))
        if self.velocity is not None:
            self.velocity.copy_(tensors["velocity"])
        self.statistics.load_state(below(tensors, "kept/"), self.parameters)
        self.statistics.resume_task(task)
        self._training = None

    def adopt(self, parameters: Tensor, buffers: dict[str, Tensor]) -> None:
        """Continue from ``parameters`` ``(S, P)`` and the models' buffers, ``(S, ...)`` by name."""
        self.parameters.copy_(parameters)
        for s, model in enumerate(self.models):
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name][s])

    def buffers(self) -> dict[str, Tensor]:
        """The models' buffers by name, ``(S, ...)``."""
        everyone = [dict(model.named_buffers()) for model in self.models]
        return {name: torch.stack([one[name] for one in everyone]) for name in everyone[0]}


def _check_alike(named: list[dict[str, nn.Parameter]], layout: Layout) -> None:
    first = next(iter(named[0].values()))
    for parameters in named:
        if layout_of(parameters) != layout:
            raise ValueError("the models differ in the names or shapes of their parameters")
        for name, parameter in parameters.items():
            if parameter.dtype != first.dtype or parameter.device != first.device:
                raise ValueError(
                    "all parameters of a population share dtype and device; "
                    f"{name!r} is {parameter.dtype} on {parameter.device}, others are "
                    f"{first.dtype} on {first.device}"
                )
