"""Continual learners: one small protocol (:class:`Learner`), one file per algorithm."""

from curvlab.learners.base import SGD, Learner, Step
from curvlab.learners.ewc import EWC
from curvlab.learners.gpm import GPM
from curvlab.learners.ogd import OGD
from curvlab.learners.population import ModulePopulation, Population
from curvlab.learners.sgd_dagger import SGDDagger
from curvlab.learners.stacked import StackedMLP, population_of

__all__ = [
    "EWC",
    "GPM",
    "OGD",
    "SGD",
    "Learner",
    "ModulePopulation",
    "Population",
    "SGDDagger",
    "StackedMLP",
    "Step",
    "population_of",
]
