"""OGD: its rows against autograd, factors against dense rows, the known defects of public codes."""

import pytest
import torch
from torch import nn
from torch.nn.functional import one_hot

from curvlab.learners import OGD, Population, population_of
from curvlab.learners.ogd import leading_directions
from curvlab.learners.sample_gradients import mlp_factors, sample_gradients
from curvlab.learners.seeds import derived_generator
from curvlab.learners.structured import StructuredMemory, kept_by_energy
from curvlab.nets import mlp
from curvlab.tasks.samples import Samples, Task, subset
from curvlab.training import Schedule, learn
from tests.dense_truth import relative
from tests.small_problems import make_tasks, resnet, small, trained, vit

SCHEDULE = Schedule(0.1, epochs=2)


def exact_rows(model, inputs, cotangents):
    """Gradients of ``cotangents[i] . logits(inputs[i])``, one autograd call per sample."""
    rows = []
    for one, cotangent in zip(inputs, cotangents, strict=True):
        value = (model(one.unsqueeze(0))[0] * cotangent).sum()
        pieces = torch.autograd.grad(value, [p for p in model.parameters() if p.requires_grad])
        rows.append(torch.cat([piece.flatten() for piece in pieces]))
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (lambda: small(3, torch.float64), (6,)),
        (lambda: small(3, torch.float64, activation=nn.Tanh), (6,)),
        (lambda: resnet(3).double(), (3, 8, 8)),
        (lambda: vit(3).double(), (3, 32, 32)),
    ],
    ids=["relu", "tanh", "resnet", "vit"],
)
def test_gradients_per_sample_are_those_of_autograd(model, shape, generator):
    model = model().eval()
    options = {"batchnorm": "freeze"} if shape == (3, 8, 8) else {}
    population = Population([model], [1], **options)
    inputs = torch.randn(5, *shape, generator=generator, dtype=torch.float64)
    cotangents = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    rows = torch.cat(list(sample_gradients(population, 0, inputs, cotangents, 0)))
    exact = exact_rows(model, inputs, cotangents)
    # not one buffer seen n times: every row is its own sample's (a defect of public code)
    for row, truth in zip(rows, exact, strict=True):
        assert relative(row, truth) <= 1e-12
    assert torch.linalg.matrix_rank(rows) == 5


@pytest.mark.parametrize("logits", ["true", "all"])
@pytest.mark.parametrize(
    "options", [{}, {"bias": False}, {"activation": nn.Tanh}], ids=["relu", "no bias", "tanh"]
)
@pytest.mark.parametrize("epsilon", [0.0, 0.05])
def test_structured_projection_equals_the_dense_oracle(logits, options, epsilon):
    kept = []
    for structured in (True, False):
        learner = OGD(epsilon, samples=9, logits=logits, structured=structured)
        population = population_of(
            [small(seed, torch.float64, **options) for seed in (1, 2)], (1, 2)
        )
        for t, task in enumerate(make_tasks(3, dtype=torch.float64)):
            learner.before_task(population, t, task.train)
            learner.after_task(population, t, task.train)
            population.parameters += 0.1 * (t + 1)  # another point for the next task's gradients
        kept.append(learner)
    structured, dense = kept
    assert structured.notes[-1]["directions"] == dense.notes[-1]["directions"]
    gradients = torch.randn(
        2, population.n, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    projected = []
    for learner in kept:
        population.gradients.copy_(gradients)
        learner.transform_(population)
        projected.append(population.gradients.clone())
    assert relative(projected[0], projected[1]) <= 1e-9
    assert relative(projected[1], gradients) > 0.1


def test_few_directions_are_used_as_dense_rows_and_many_as_factors():
    tasks = make_tasks(2, train=100, dtype=torch.float64)
    for epsilon, few in ((0.5, True), (0.001, False)):
        learner = OGD(epsilon, samples=80)
        population = population_of([small(1, torch.float64)], [1])
        learner.before_task(population, 0, tasks[0].train)
        learner.after_task(population, 0, tasks[0].train)
        memory = learner._factors[0]
        assert (memory.dense is not None) == few
        population.gradient_(tasks[1].train.inputs[None, :5], tasks[1].train.targets[None, :5], 1)
        gradient = population.gradients[0].clone()
        learner.transform_(population)
        rows = learner.directions()[0]
        assert relative(population.gradients[0], gradient - (gradient @ rows.T) @ rows) <= 1e-10


def test_gradients_known_as_factors_are_projected_like_others():
    """The shorter way is taken for gradients as they came, and not once they were changed."""
    tasks = make_tasks(1, train=60, dtype=torch.float64)
    learner = OGD(0.001, samples=40)
    wide = mlp((6, 30, 30, 3), seed=1, dtype=torch.float64)
    population = population_of([wide], [1])
    learner.before_task(population, 0, tasks[0].train)
    learner.after_task(population, 0, tasks[0].train)
    rows = learner.directions()[0]
    for change in (0.0, 0.1):
        population.gradient_(tasks[0].train.inputs[None, :3], tasks[0].train.targets[None, :3], 0)
        assert learner._factors[0]._cheap(3)
        assert population.gradient_factors() is not None
        if change:
            population.gradients.add_(population.parameters, alpha=change)
            assert population.gradient_factors() is None
        gradient = population.gradients[0].clone()
        learner.transform_(population)
        assert relative(population.gradients[0], gradient - (gradient @ rows.T) @ rows) <= 1e-10


@pytest.mark.parametrize("logits", ["true", "all"])
def test_combinations_of_samples_are_read_in_pieces_without_their_zeros(logits, monkeypatch):
    monkeypatch.setattr("curvlab.learners.structured.PIECE", 700)
    tasks = make_tasks(3, train=60, dtype=torch.float64)
    learner = OGD(0.001, samples=40, logits=logits)
    population = population_of([mlp((6, 30, 30, 3), seed=1, dtype=torch.float64)], [1])
    for t, task in enumerate(tasks):
        learner.before_task(population, t, task.train)
        learner.after_task(population, t, task.train)
    [memory] = learner._factors
    weights = memory._coefficients
    vector = torch.randn(weights.shape[1], generator=torch.Generator().manual_seed(0)).double()
    assert relative(memory._normal(vector), weights.T @ (weights @ vector)) <= 1e-12
    assert sum(len(piece) for piece in memory._pieces) == len(weights)
    assert len(memory._pieces) > 3
    if logits == "true":  # the first task's rows combine its own 40 samples
        assert memory._pieces[0].shape[1] == 40


def test_structured_memory_works_with_biases_in_some_layers_only(generator):
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3, bias=False)).double()
    with torch.no_grad():  # torch's own start depends on whichever tests ran before
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    population = population_of([model], [1])
    inputs = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    cotangents = torch.randn(4, 2, 3, generator=generator, dtype=torch.float64)
    memory = StructuredMemory(
        population.layers, population.n, dtype=torch.float64, device=population.device
    )
    memory.extend(mlp_factors(population.layers, population.parameters[0], inputs, cotangents), 0.0)
    flat = inputs.repeat_interleave(2, 0), cotangents.flatten(0, 1)
    exact = exact_rows(model, *flat)
    rows = memory.rows()
    assert len(rows) == int(torch.linalg.matrix_rank(exact))  # dead units leave fewer than 8
    assert relative(exact @ rows.T @ rows, exact) <= 1e-10


def test_float32_structured_projection_leaks_little():
    """The figure the module states: rounding times the condition number of what is kept."""
    tasks = make_tasks(2, train=200)
    for epsilon, most in ((0.05, 2e-5), (0.0, 1e-3)):
        learner = OGD(epsilon, samples=150)
        population = population_of([mlp((6, 30, 30, 3), seed=1)], [1])
        for t, task in enumerate(tasks):
            learner.before_task(population, t, task.train)
            learner.after_task(population, t, task.train)
        population.gradient_(tasks[1].train.inputs[None, :10], tasks[1].train.targets[None, :10], 0)
        before = population.gradients[0].clone()
        learner.transform_(population)
        rows = learner._factors[0].rows()
        leak = float((rows @ population.gradients[0].double()).norm() / before.double().norm())
        assert leak <= most


def test_what_ogd_applies_is_a_projector():
    """Dividing a gradient matrix by its norm does not make it orthonormal (a public defect)."""
    population, task = trained(dtype=torch.float64)
    for structured in (True, False):
        learner = OGD(0.0, samples=10, structured=structured)
        learner.before_task(population, 0, task.train)
        learner.after_task(population, 0, task.train)
        count = population.n
        applied = torch.zeros(count, count, dtype=torch.float64)
        for i, unit in enumerate(torch.eye(count, dtype=torch.float64)):
            population.gradients.copy_(unit.expand(2, -1))
            learner.transform_(population)
            applied[i] = population.gradients[0]
        assert float((applied @ applied - applied).abs().max()) <= 1e-10
        assert float((applied - applied.T).abs().max()) <= 1e-10
        assert float(applied.trace()) == pytest.approx(count - 10, abs=1e-8)


def test_ogd_with_all_logits_stores_every_logit_of_every_sample():
    population, task = trained(dtype=torch.float64)
    learner = OGD(0.0, samples=6, logits="all")
    learner.before_task(population, 0, task.train)
    learner.after_task(population, 0, task.train)
    assert learner.notes[0]["directions"] == [18, 18]
    chosen = subset(task.train, 6, seed=derived_generator(2, "ogd", 0))
    rows = learner._factors[1].rows()
    for label in range(3):
        cotangents = one_hot(torch.full((6,), label), 3).double()
        exact = exact_rows(population.models[1], chosen.inputs, cotangents)
        assert relative(exact @ rows.T @ rows, exact) <= 1e-10


def test_ogd_gtl_stores_the_logit_of_the_true_label_alone():
    population, task = trained(dtype=torch.float64)
    for structured in (True, False):
        learner = OGD(0.0, samples=6, structured=structured)
        learner.before_task(population, 0, task.train)
        learner.after_task(population, 0, task.train)
        chosen = subset(task.train, 6, seed=derived_generator(2, "ogd", 0))
        rows = learner.directions()[1]
        assert len(rows) == 6
        for offset, held in ((0, True), (1, False), (2, False)):
            cotangents = one_hot((chosen.targets + offset) % 3, 3).double()
            exact = exact_rows(population.models[1], chosen.inputs, cotangents)
            assert (relative(exact @ rows.T @ rows, exact) <= 1e-10) == held


def test_an_allowed_step_leaves_the_stored_logits_alone_to_second_order():
    population, task = trained(dtype=torch.float64)
    learner = OGD(0.0, samples=6, logits="all")
    learner.before_task(population, 0, task.train)
    learner.after_task(population, 0, task.train)
    chosen = subset(task.train, 6, seed=derived_generator(1, "ogd", 0))
    before = population.logits(chosen.inputs, 0)[0]
    population.gradients.normal_(generator=torch.Generator().manual_seed(3))
    learner.transform_(population)
    direction = population.gradients / population.gradients.norm(dim=1, keepdim=True)
    start, changes = population.parameters.clone(), []
    for size in (1e-3, 1e-4):
        moved = population.logits(chosen.inputs, 0, start + size * direction)[0]
        changes.append(float((moved - before).norm()))
    assert changes[1] <= changes[0] / 90.0  # quadratic in the step


def test_a_memory_that_grows_to_all_directions_stops_the_run():
    """OGD of more logit gradients than parameters: the rows themselves span everything."""
    learner = OGD(0.0, samples=40, logits="all", structured=False)
    tiny = {"sizes": (6, 3), "dtype": torch.float64, "bias": False}
    (run,) = learn(
        lambda seed: mlp(seed=seed, **tiny), make_tasks(3, dtype=torch.float64), learner, SCHEDULE,
        seeds=1,
    )  # fmt: skip
    assert run.notes[0]["directions"] == 18
    assert torch.equal(run.snapshots[1], run.snapshots[0])


@pytest.mark.parametrize("structured", [True, False])
def test_equal_samples_are_one_direction_and_nothing_is_divided_by_zero(structured):
    """Gram-Schmidt without a rank check divides by about zero here (a public defect)."""
    one = make_tasks(1)[0].train[:1]
    repeated = Samples(one.inputs.repeat(20, 1), one.targets.repeat(20))
    task = Task("same", repeated, repeated, 3)
    learner = OGD(0.0, samples=20, structured=structured)
    (run,) = learn(small, [task, task], learner, Schedule(0.01), seeds=1)
    assert run.notes[0]["directions"] == 1
    assert run.notes[1]["directions"] <= 2
    assert run.snapshots.isfinite().all()


def test_later_tasks_leave_the_earlier_directions_as_they_were():
    """Orthonormalising the whole memory again would mix tasks (a public defect)."""
    for structured in (True, False):
        learner = OGD(0.0, samples=8, structured=structured)
        population, task = trained(dtype=torch.float64)
        learner.before_task(population, 0, task.train)
        learner.after_task(population, 0, task.train)
        first = learner.directions()[0].clone()
        population.parameters += 0.1
        learner.after_task(population, 1, task.train)
        assert relative(learner.directions()[0][:8], first) <= 1e-12


def test_the_number_of_directions_follows_the_energy():
    squares = torch.tensor([8.0, 1.0, 0.5, 0.5, 0.0], dtype=torch.float64)
    for epsilon, kept in ((1.0, 0), (0.2, 1), (0.19, 2), (0.1, 2), (0.05, 3), (0.04, 4), (0.0, 4)):
        assert kept_by_energy(squares, epsilon) == kept
    rows = torch.randn(7, 50, generator=torch.Generator().manual_seed(2))
    directions, values = leading_directions(rows, 0.3)
    exact = torch.linalg.svdvals(rows.double())
    assert torch.allclose(values, exact[: len(values)])
    held = (values.square().cumsum(0) / exact.square().sum()).tolist()
    assert held[-1] >= 0.7 > held[-2]
    assert float((directions @ directions.T - torch.eye(len(values))).abs().max()) <= 1e-5


def test_ogd_says_when_its_rows_would_not_fit():
    with pytest.raises(ValueError, match="or raise largest="):
        learn(
            resnet, make_tasks(shape=(3, 32, 32)), OGD(samples=10, largest=1000), SCHEDULE,
            seeds=1, batchnorm="freeze",
        )  # fmt: skip
    with pytest.raises(ValueError, match="structured=True needs plain MLPs"):
        learn(
            resnet, make_tasks(shape=(3, 32, 32)), OGD(structured=True), SCHEDULE,
            seeds=1, batchnorm="freeze",
        )  # fmt: skip
