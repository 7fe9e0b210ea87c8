"""Training: one loop, populations of seeds, the paper's schedules, resumable runs."""

from curvlab.training.augment import CropAndFlip as CropAndFlip
from curvlab.training.evaluate import Evaluation as Evaluation, evaluate as evaluate
from curvlab.training.learning import learn as learn
from curvlab.training.run import Run as Run
from curvlab.training.schedule import Schedule as Schedule
