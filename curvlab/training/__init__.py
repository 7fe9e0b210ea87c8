"""Training: one loop, populations of seeds, the paper's schedules, resumable runs."""

from curvlab.training.augment import CropAndFlip
from curvlab.training.evaluate import Evaluation, evaluate
from curvlab.training.learning import learn
from curvlab.training.run import Run
from curvlab.training.schedule import Schedule

__all__ = ["CropAndFlip", "Evaluation", "Run", "Schedule", "evaluate", "learn"]
