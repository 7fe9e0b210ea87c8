"""Continual learners: one small protocol (:class:`Learner`), one file per algorithm."""

from curvlab.learners.agem import AGEM
from curvlab.learners.base import SGD, Learner
from curvlab.learners.der import DER
from curvlab.learners.er import ER
from curvlab.learners.ewc import EWC
from curvlab.learners.gpm import GPM
from curvlab.learners.kwinners import HeterogeneousDropout
from curvlab.learners.lwf import LwF
from curvlab.learners.ogd import OGD
from curvlab.learners.packnet import PackNet
from curvlab.learners.population import Population
from curvlab.learners.powerprop import Powerpropagation
from curvlab.learners.progressive import Progressive
from curvlab.learners.sgd_dagger import SGDDagger
from curvlab.learners.spacenet import SpaceNet
from curvlab.learners.stacked import StackedMLP, population_of
from curvlab.learners.step import Batch, Step

__all__ = [
    "AGEM",
    "DER",
    "ER",
    "EWC",
    "GPM",
    "OGD",
    "SGD",
    "Batch",
    "HeterogeneousDropout",
    "Learner",
    "LwF",
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
