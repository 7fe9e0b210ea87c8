"""EWC: the diagonal Fisher and the penalty against autograd, and less forgetting than SGD's."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from curvlab.learners import EWC, SGD, Population, population_of
from curvlab.learners.ewc import diagonal_fisher
from curvlab.learners.seeds import derived_generator
from curvlab.tasks.samples import subset
from curvlab.training import Schedule, learn
from tests.dense_truth import relative
from tests.small_problems import make_tasks, small, trained


@pytest.mark.parametrize("labels", ["model", "true"])
@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "modules"])
def test_the_diagonal_fisher_is_the_mean_of_squared_gradients(labels, stacked):
    make = population_of if stacked else Population
    population = make([small(seed, torch.float64) for seed in (1, 2)], (1, 2))
    samples = make_tasks(1, dtype=torch.float64)[0].train[:7]
    found = diagonal_fisher(population, 1, samples, 0, labels)
    model = population.models[1]
    exact = torch.zeros_like(found)
    for one, target in zip(samples.inputs, samples.targets, strict=True):
        probabilities = model(one.unsqueeze(0)).softmax(1)[0].detach()
        for label in range(3):
            weight = probabilities[label] if labels == "model" else float(label == int(target))
            loss = cross_entropy(model(one.unsqueeze(0)), torch.tensor([label]))
            pieces = torch.autograd.grad(loss, list(model.parameters()))
            exact += weight * torch.cat([piece.flatten() for piece in pieces]).square() / 7
    assert relative(found, exact) <= 1e-12


def test_ewc_adds_the_gradient_of_its_penalty():
    population, task = trained(dtype=torch.float64)
    learner, anchors = EWC(7.0, samples=20), []
    for t in range(2):
        fisher = []
        for s, seed in enumerate(population.seeds):
            chosen = subset(task.train, 20, seed=derived_generator(seed, "fisher", t))
            fisher.append(diagonal_fisher(population, s, chosen, t))
        anchors.append((torch.stack(fisher), population.parameters.clone()))
        learner.after_task(population, t, task.train)
        population.parameters += 0.1 * (t + 1)
    weights = population.parameters.clone().requires_grad_(True)
    penalty = sum(3.5 * (fisher * (weights - anchor).square()).sum() for fisher, anchor in anchors)
    (exact,) = torch.autograd.grad(penalty, weights)
    population.gradients.fill_(1.0)
    learner.transform_(population)
    assert relative(population.gradients - 1.0, exact) <= 1e-12


def test_ewc_forgets_less_than_sgd():
    tasks = make_tasks(2, train=200, test=100)
    schedule = Schedule(0.1, epochs=10)
    forgot = {}
    for name, learner in (("sgd", SGD()), ("ewc", EWC(30.0, samples=200))):
        runs = learn(small, tasks, learner, schedule, seeds=(1, 2, 3))
        forgot[name] = sum(float(r.test_loss[1, 0] - r.test_loss[0, 0]) for r in runs)
    assert forgot["ewc"] < 0.5 * forgot["sgd"]
