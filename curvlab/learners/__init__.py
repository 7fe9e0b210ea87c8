"""Continual learners: one small protocol (:class:`Learner`), one file per algorithm."""

from curvlab.learners.base import SGD, Learner, Step
from curvlab.learners.population import ModulePopulation, Population

__all__ = ["SGD", "Learner", "ModulePopulation", "Population", "Step"]
