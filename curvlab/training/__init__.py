"""Training: one loop, populations of seeds, the paper's schedules, resumable runs."""

from curvlab.training.evaluate import Evaluation, evaluate
from curvlab.training.loop import learn
from curvlab.training.run import Run
from curvlab.training.schedule import Schedule

__all__ = ["Evaluation", "Run", "Schedule", "evaluate", "learn"]
