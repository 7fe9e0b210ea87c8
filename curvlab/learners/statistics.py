"""BatchNorm's running statistics: numbers outside the parameters, through which tasks forget.

No projection of gradients reaches them, so the user has to choose what happens to them:

- ``"running"``: as in PyTorch, they go on moving in every task.
- ``"freeze"``: learned in the first task, then fixed, in training as in evaluation.
- ``"per_task"``: restarted with every task; task ``o`` is predicted with those of its own end.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

BatchNormPolicy = Literal["running", "freeze", "per_task"]
POLICIES = ("running", "freeze", "per_task")


class RunningStatistics:
    """The statistics of S models under one policy.

    Attributes:
        policy: One of the three, ``"none"`` without BatchNorm, or ``"untracked"`` for layers that
            keep no statistics (their outputs depend on which samples share a batch).
    """

    def __init__(self, models: Sequence[nn.Module], policy: BatchNormPolicy | None) -> None:
        self._layers = [_layers(model) for model in models]
        self._kept: dict[int, list[dict[str, Tensor]]] = {}
        self._fixed = False
        tracked = any(layer.track_running_stats for layer in self._layers[0].values())
        if policy is not None and policy not in POLICIES:
            raise ValueError(f"batchnorm= must be one of {POLICIES}; got {policy!r}")
        if not tracked:
            self.policy: str = "untracked" if self._layers[0] else "none"
        elif policy is None:
            raise ValueError(
                "the model has BatchNorm, whose running statistics are outside the parameters and "
                "let old tasks be forgotten whatever the learner does: choose batchnorm='freeze' "
                "(fixed after the first task), 'per_task' (each task its own) or 'running' "
                "(PyTorch's)"
            )
        else:
            self.policy = policy

    def begin_task(self, task: int) -> None:
        """Fix or restart the statistics, as the policy says."""
        self.resume_task(task)
        if task == 0:
            self._kept = {}
        if self.policy == "per_task" and task > 0:
            for layers in self._layers:
                for layer in layers.values():
                    layer.reset_running_stats()

    def resume_task(self, task: int) -> None:
        """As :meth:`begin_task`, for statistics that are already those of the task."""
        self._fixed = self.policy == "freeze" and task > 0

    def end_task(self, task: int) -> None:
        """Keep a copy for predicting ``task`` later."""
        if self.policy == "per_task":
            self._kept[task] = [
                {
                    f"{name}.{buffer}": value.clone()
                    for name, layer in layers.items()
                    for buffer, value in layer.named_buffers(recurse=False)
                }
                for layers in self._layers
            ]

    def hold(self, s: int) -> None:
        """After ``models[s].train()``: put fixed layers back in eval mode."""
        if self._fixed:
            for layer in self._layers[s].values():
                layer.eval()

    @contextmanager
    def replayed(self, s: int, task: int, count: int) -> Iterator[None]:
        """Inside, model ``s`` can be called on ``count`` samples of ``task`` beside the batch.

        See :meth:`Population.answer`.
        """
        moves = self.policy in ("running", "freeze") and count > 1
        layers = {} if moves or self.policy in ("none", "untracked") else self._layers[s]
        before = [(layer, layer.training, dict(layer._buffers)) for layer in layers.values()]
        kept = self.of_task(task, s)
        try:
            for name, layer in layers.items():
                layer.eval()
                for buffer, value in layer.named_buffers(recurse=False):
                    # a copy: the batches to come change the present ones in place
                    layer._buffers[buffer] = kept.get(f"{name}.{buffer}", value.clone())
            yield
        finally:
            for layer, training, buffers in before:
                layer.train(training)
                layer._buffers.update(buffers)

    def of_task(self, task: int, s: int) -> dict[str, Tensor]:
        """Buffers of model ``s`` to predict ``task`` with; empty if the present ones are right."""
        return self._kept[task][s] if task in self._kept else {}

    def state(self) -> dict[str, Tensor]:
        return {
            f"{task}/{s}/{name}": value
            for task, models in self._kept.items()
            for s, buffers in enumerate(models)
            for name, value in buffers.items()
        }

    def load_state(self, tensors: dict[str, Tensor], like: Tensor) -> None:
        self._kept = {}
        for key, value in tensors.items():
            task, s, name = key.split("/", 2)
            models = self._kept.setdefault(int(task), [{} for _ in self._layers])
            models[int(s)][name] = value.to(like.device)


def _layers(model: nn.Module) -> dict[str, _BatchNorm]:
    return {name: m for name, m in model.named_modules() if isinstance(m, _BatchNorm)}
