"""Continual learners: one small protocol (:class:`Learner`), one file per algorithm."""

from curvlab.learners.base import SGD, Learner, Step
from curvlab.learners.ewc import EWC
from curvlab.learners.gpm import GPM
from curvlab.learners.kwinners import HeterogeneousDropout
from curvlab.learners.ogd import OGD
from curvlab.learners.packnet import PackNet
from curvlab.learners.population import ModulePopulation, Population
from curvlab.learners.powerprop import Powerpropagation
from curvlab.learners.progressive import Progressive
from curvlab.learners.sgd_dagger import SGDDagger
from curvlab.learners.spacenet import SpaceNet
from curvlab.learners.stacked import StackedMLP, population_of

__all__ = [
    "EWC",
    "GPM",
    "OGD",
    "SGD",
    "HeterogeneousDropout",
    "Learner",
    "ModulePopulation",
    "PackNet",
    "Population",
    "Powerpropagation",
    "Progressive",
    "SGDDagger",
    "SpaceNet",
    "StackedMLP",
    "Step",
    "population_of",
]
