"""A learner is plain SGD with a few hooks, where other algorithms do something else.

The loop (:func:`curvlab.training.learn`) trains S seeds side by side. All state of the runs is in
the :class:`~curvlab.learners.population.Population`: ``parameters``, ``gradients`` (and
``velocity`` with momentum), each ``(S, P)`` in the order of ``population.layout``. For each task::

    learner.before_task(population, task, samples)     # before the first: learner.expect(...)
    each step:                                # population.batch is what the runs learn from
        learner.loss(population, s, logits)   # for each run: what it minimises
        population.gradient_(...)             # writes population.gradients
        learner.step_(population, ...)        # moves the parameters:
            (weight decay is added to the gradients)
            learner.transform_(population)    # project, mask, add a penalty's gradient
            (momentum, then parameters -= lr * gradients)
        learner.after_step(population, step)  # prune, regrow, count
    learner.after_task(population, task, samples)     # eigenvectors, SVD, freeze
    evaluation with learner.weights_for(population, o)

Weight decay comes before ``transform_`` and momentum after it, so that what it removes stays
removed: the momentum buffer starts at zero with every task and collects only projected gradients,
so the whole displacement of the task stays inside the allowed subspace. Where ``transform_`` is the
projection off a basis, ``step_`` is one kernel call per run.

What the hooks may call (all of it is public and gives the same bits on a resumed run):

- in ``loss``, with a graph: ``population.answer(s, inputs, task)`` for logits of other samples or
  another head, ``population.loss(logits, targets)``, and, without a graph, the logits of an older
  network: :class:`~curvlab.learners.kept.Kept`;
- in ``transform_``: ``population.gradient_of(inputs, targets, task, step)``, the gradient of the
  mean loss on other samples;
- everywhere: random numbers from :func:`~curvlab.learners.seeds.derived_generator`, by position.
"""

# ruff: noqa: ARG002 (a moment is told everything and uses what it needs)
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from curvlab.learners.described import plain
from curvlab.learners.population import Population
from curvlab.learners.step import Step
from curvlab.learners.uses import told_apart
from curvlab.parameters import Selection
from curvlab.tasks.samples import Samples, Task


class Learner:
    """Plain SGD. An algorithm overrides the hooks where it does something else.

    A learner holds the state of all S seeds. ``task`` is the index of the task in the stream and
    ``samples`` its training data, the same for every seed, on the population's device. Everything
    but ``transform_`` and ``after_step`` is called with the models in eval mode.

    Attributes:
        notes: One dictionary per finished task, JSON-able (directions kept per seed, bytes of
            memory, ...); a list in it has one entry per run. ``after_task`` appends to it.
        serves_later_tasks: Whether the learner works for later tasks only: it trains the first task
            as SGD does, and after a task nothing changes but its memory. Runs may then branch after
            the first task, and the last task needs no consolidation.
        settings: Names of the attributes that :meth:`config` reports.
        select: The parameters to protect, as in operators; for learners that can leave others free.
    """

    serves_later_tasks = False
    settings: tuple[str, ...] = ()
    select: Selection = None

    def __init__(self) -> None:
        self.notes: list[dict[str, Any]] = []

    def expect(self, population: Population, tasks: Sequence[Task]) -> None:
        """Look at the models and the stream, before anything is trained or resumed.

        The place to refuse settings; ``population.uses`` says which parameters each task uses.
        """
        population.chosen(self.select)  # refuses what matches nothing

    def before_task(self, population: Population, task: int, samples: Samples) -> None:
        """Prepare; the first call (``task == 0``) is the place to refuse an unfit model."""

    def loss(self, population: Population, s: int, logits: Tensor) -> Tensor:
        """What run ``s`` minimises in this step: one number with a graph.

        Overriding it trains a plain MLP by autograd, run by run, which takes a few times as long.

        Args:
            population: Its ``batch`` is what the runs learn from.
            s: Which run.
            logits: Shape ``(B, C)``, of ``population.batch.inputs[s]``, in train mode.
        """
        if population.batch is None:
            raise RuntimeError("loss was called outside a step: only learn() calls it")
        return population.loss(logits, population.batch.targets[s])

    def transform_(self, population: Population) -> None:
        """Change ``population.gradients`` in place."""

    def transforms_as(self, kind: type["Learner"]) -> bool:
        """Whether ``transform_`` is that of ``kind``, not one that a subclass or a user put there.

        For a ``step_`` that does not call it.
        """
        return getattr(self.transform_, "__func__", None) is kind.transform_

    def step_(
        self, population: Population, lr: float, weight_decay: float, momentum: float
    ) -> None:
        """Move ``population.parameters``, given ``population.gradients``.

        Override it where a single call can do all of the following.
        """
        if weight_decay:
            population.gradients.add_(population.parameters, alpha=weight_decay)
        self.transform_(population)
        if population.velocity is None:
            population.parameters.add_(population.gradients, alpha=-lr)
        else:
            population.velocity.mul_(momentum).add_(population.gradients)
            population.parameters.add_(population.velocity, alpha=-lr)

    def after_step(self, population: Population, step: Step) -> None:
        """Look at or change ``population.parameters`` after an update.

        ``population.gradients`` still holds this step's transformed gradients, unless the learner
        has a ``step_`` of its own; without momentum the update was ``-step.lr`` times them.
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
        """The algorithm's settings, JSON-able: saved with a run, compared when it is resumed."""
        chosen = {name: plain(getattr(self, name)) for name in self.settings}
        return {"learner": type(self).__name__, **chosen, **told_apart(self.select)}

    def state(self) -> dict[str, Tensor]:
        """Everything that a checkpoint needs to continue bit for bit, except ``notes``.

        Called at the end of any step, not only between tasks.
        """
        return {}

    def load_state(self, population: Population, tensors: dict[str, Tensor]) -> None:
        """Restore what :meth:`state` returned; ``before_task`` of this task is not called again.

        Args:
            population: Already restored.
            tensors: From ``state()``, on the CPU.
        """


class SGD(Learner):
    """Gradient steps alone: the baseline of every other learner."""

    serves_later_tasks = True
