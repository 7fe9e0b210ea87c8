"""What a learner is: plain SGD, with the few moments at which other algorithms differ from it.

The loop (:func:`curvlab.training.learn`) trains S seeds side by side. All state of the runs is in
the :class:`~curvlab.learners.population.Population`: ``parameters``, ``gradients`` (and
``velocity`` with momentum), each ``(S, P)`` in the order of ``population.layout``. For each task::

    learner.before_task(population, task, samples)     # before the first one: learner.expect(tasks)
    each step:
        population.gradient_(...)             # writes population.gradients
        (weight decay is added to the gradients)
        learner.transform_(population)        # project, mask, add a penalty's gradient
        (momentum, then parameters -= lr * gradients)
        learner.after_step(population, step)  # prune, regrow, count
    learner.after_task(population, task, samples)     # eigenvectors, SVD, freeze
    evaluation with learner.weights_for(population, o)

Weight decay and momentum come on the two sides of ``transform_`` such that what it removes stays
removed: a projection applied before momentum, to a buffer that starts at zero with every task,
keeps the whole displacement of the task inside the allowed subspace.
"""

# ruff: noqa: ARG002 (a moment is told everything and uses what it needs)
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from curvlab.learners.population import Population
from curvlab.tasks.samples import Samples


@dataclass(frozen=True, slots=True)
class Step:
    """Where training is, just after an update; all counts start at 0 with every task."""

    task: int
    step: int
    steps: int
    epoch: int
    epochs: int
    lr: float

    @property
    def ends_epoch(self) -> bool:
        """Whether this was the last step of its epoch."""
        return (self.step + 1) % (self.steps // self.epochs) == 0


class Learner:
    """Plain SGD. An algorithm overrides the moments at which it does something else.

    A learner holds the state of all S seeds. ``task`` is the index of the task in the stream and
    ``samples`` its training data, the same for every seed, on the population's device. Everything
    but ``transform_`` and ``after_step`` is called with the models in eval mode.

    Attributes:
        notes: One dictionary per finished task, JSON-able (directions kept per seed, bytes of
            memory, ...); a list in it has one entry per run. ``after_task`` appends to it.
        serves_later_tasks: Whether all that it does serves later tasks: the first task is trained
            as by SGD, and nothing but the memory changes after a task. Runs may then branch after
            the first task, and the last one needs no consolidation.
    """

    serves_later_tasks = False

    def __init__(self) -> None:
        self.notes: list[dict[str, Any]] = []

    def expect(self, tasks: int) -> None:
        """Told the number of tasks before anything is trained: the place to refuse settings."""

    def before_task(self, population: Population, task: int, samples: Samples) -> None:
        """Prepare; the first call (``task == 0``) is the place to refuse an unfit model."""

    def transform_(self, population: Population) -> None:
        """Change ``population.gradients`` in place."""

    def after_step(self, population: Population, step: Step) -> None:
        """Look at or change ``population.parameters`` after an update.

        ``population.gradients`` still holds this step's transformed gradients; without momentum
        the update was ``-step.lr`` times them.
        """

    def after_task(self, population: Population, task: int, samples: Samples) -> None:
        """Consolidate what was learned; may change parameters (pruning)."""
        self.notes.append({})

    def if_diverged(self, population: Population, lr: float) -> str:
        """What to change if parameters are not finite after steps at rate ``lr``."""
        return "lower the learning rate"

    def weights_for(self, population: Population, task: int) -> Tensor:
        """Parameters ``(S, P)`` with which to predict task ``task``."""
        return population.parameters

    def config(self) -> dict[str, Any]:
        """The algorithm's settings, JSON-able: kept with a run, compared when one is resumed."""
        return {"learner": type(self).__name__}

    def state(self) -> dict[str, Tensor]:
        """All that a checkpoint must hold to go on bit for bit, ``notes`` apart (kept for you).

        Taken at the end of any step, not only between tasks.
        """
        return {}

    def load_state(self, population: Population, tensors: dict[str, Tensor]) -> None:
        """Take back what :meth:`state` gave. ``before_task`` of the current task is not repeated.

        Args:
            population: Already restored.
            tensors: From ``state()``, on the CPU.
        """


class SGD(Learner):
    """Nothing but gradient steps: what every other learner is measured against."""

    serves_later_tasks = True
