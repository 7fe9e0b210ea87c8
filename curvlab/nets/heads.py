"""Several heads: one body for all tasks and a linear head for each (task-incremental learning).

``mlp``, ``slim_resnet18`` and ``vit_cifar`` build such networks with ``tasks=``; any other body can
be given to :class:`MultiHead`. ``forward`` is told the task, whose head answers. A parameter that a
task does not use gets no gradient from it, and learners leave it alone until its task comes.
"""

from torch import Tensor, nn

from curvlab.checks import whole


class MultiHead(nn.Module):
    """``heads[task](body(inputs))``.

    Args:
        body: Inputs ``(N, ...)`` to features ``(N, width)``.
        width: Number of features.
        classes: Outputs of every head.
        tasks: Heads.
        bias: Whether heads have one.
    """

    def __init__(
        self, body: nn.Module, width: int, classes: int, tasks: int, *, bias: bool = True
    ) -> None:
        super().__init__()
        whole(width=width, classes=classes, tasks=tasks)
        self.body = body
        self.heads = nn.ModuleList([nn.Linear(width, classes, bias=bias) for _ in range(tasks)])

    def forward(self, inputs: Tensor, task: int) -> Tensor:
        if not 0 <= task < len(self.heads):
            raise ValueError(
                f"this network has heads for tasks 0..{len(self.heads) - 1}; got task {task}: "
                "build it with a larger tasks="
            )
        logits: Tensor = self.heads[task](self.body(inputs))
        return logits
