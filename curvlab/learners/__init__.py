"""Continual learners: one small protocol (:class:`Learner`), one file per algorithm."""

from curvlab.learners.agem import AGEM as AGEM
from curvlab.learners.base import SGD as SGD, Learner as Learner
from curvlab.learners.der import DER as DER
from curvlab.learners.er import ER as ER
from curvlab.learners.ewc import EWC as EWC
from curvlab.learners.gpm import GPM as GPM
from curvlab.learners.kwinners import HeterogeneousDropout as HeterogeneousDropout
from curvlab.learners.lwf import LwF as LwF
from curvlab.learners.ogd import OGD as OGD
from curvlab.learners.packnet import PackNet as PackNet
from curvlab.learners.population import Population as Population
from curvlab.learners.powerprop import Powerpropagation as Powerpropagation
from curvlab.learners.progressive import Progressive as Progressive
from curvlab.learners.sgd_dagger import SGDDagger as SGDDagger
from curvlab.learners.spacenet import SpaceNet as SpaceNet
from curvlab.learners.stacked import StackedMLP as StackedMLP, population_of as population_of
from curvlab.learners.step import Batch as Batch, Step as Step
