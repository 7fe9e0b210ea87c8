"""Several heads: networks, who owns what, what memories hold, accuracy told the task and not."""

import pytest
import torch
from torch import nn

from curvlab.learners import ER, EWC, GPM, OGD, SGD, PackNet, Powerpropagation, SGDDagger
from curvlab.nets import MultiHead, mlp, powerpropagate, slim_resnet18, vit_cifar
from curvlab.tasks import ImageData, Samples, Task, split_classes
from curvlab.training import Schedule, learn
from tests.isolated_learning import Watcher
from tests.small_problems import cloud_tasks

TASKS = 3
SIZES = (8, 12, 10, 3)
SCHEDULE = Schedule(lr=0.2, epochs=3)


def heads(seed, dtype=torch.float64, **options):
    return mlp(SIZES, tasks=TASKS, seed=seed, dtype=dtype, **options)


def run_of(learner, tasks=None, build=heads, **options):
    tasks = cloud_tasks(TASKS) if tasks is None else tasks
    (run,) = learn(build, tasks, learner, SCHEDULE, seeds=[1], **options)
    return run


def places(model, start):
    """Indices of the parameters whose name begins with ``start``."""
    found, at = [], 0
    for name, parameter in model.named_parameters():
        if name.startswith(start):
            found += range(at, at + parameter.numel())
        at += parameter.numel()
    return torch.tensor(found)


NETWORKS = {
    "mlp": (lambda **o: mlp(SIZES, seed=4, **o), (8,)),
    "resnet": (lambda **o: slim_resnet18(3, nf=2, blocks=(1, 1), seed=4, **o), (3, 8, 8)),
    "vit": (lambda **o: vit_cifar(3, hidden=8, heads=2, depth=1, mlp=8, side=8, seed=4, **o),
            (3, 8, 8)),
}  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
def test_the_first_head_of_several_is_the_network_with_one_head_of_the_same_seed(name):
    build, shape = NETWORKS[name]
    one, several = build().eval(), build(tasks=3).eval()
    inputs = torch.randn(5, *shape, generator=torch.Generator().manual_seed(0))
    assert torch.equal(one(inputs), several(inputs, 0))
    assert not torch.equal(several(inputs, 0), several(inputs, 2))
    assert isinstance(several, MultiHead)
    head = sum(parameter.numel() for parameter in several.heads[0].parameters())
    count = sum(parameter.numel() for parameter in one.parameters())
    assert sum(parameter.numel() for parameter in several.parameters()) == count + 2 * head
    with pytest.raises(ValueError, match=r"heads for tasks 0\.\.2; got task 3.*larger tasks="):
        several(inputs, 3)


def test_a_stream_longer_than_the_heads_is_refused_before_training():
    with pytest.raises(ValueError, match=r"heads for tasks 0\.\.2"):
        run_of(SGD(), cloud_tasks(4))


def test_a_task_moves_its_own_head_and_the_body_alone_momentum_and_decay_included():
    run = run_of(SGD(), momentum=0.5, weight_decay=0.05)
    model = heads(1)
    before = torch.cat([run.initial[None], run.snapshots])
    for task in range(TASKS):
        moved = before[task] != before[task + 1]
        assert bool(moved[places(model, "body.")].any())
        for head in range(TASKS):
            assert bool(moved[places(model, f"heads.{head}.")].any()) == (head == task)


def test_accuracy_told_the_task_and_not_comes_from_one_run():
    tasks = cloud_tasks(TASKS, samples=90)
    run = run_of(SGD(), tasks)
    assert torch.equal(run.task_accuracy.nan_to_num(-1.0), run.test_accuracy.nan_to_num(-1.0))
    model = heads(1).eval()
    for t in range(TASKS):
        nn.utils.vector_to_parameters(run.snapshots[t], model.parameters())
        for o in range(t + 1):
            test = tasks[o].test
            logits = torch.cat([model(test.inputs.double(), j) for j in range(t + 1)], 1)
            right = (logits.argmax(1) == 3 * o + test.targets).double().mean()
            assert run.class_accuracy[t, o] == right
    assert bool(run.class_accuracy.triu(1).isnan()[0, 1:].all())


def all_classes(train=40, test=20):
    """Six classes in three tasks on one head, of which the targets count on."""
    generator = torch.Generator().manual_seed(3)
    images = torch.randint(0, 256, (train + test, 1, 3, 3), generator=generator, dtype=torch.uint8)
    labels = torch.arange(train + test) % 6
    images[:, 0, 0, 0] = labels.to(torch.uint8) * 40
    data = ImageData(
        "dots", images[:train], labels[:train], images[train:], labels[train:], tuple("abcdef")
    )
    tasks = split_classes(data, 2, targets="all")
    return [
        Task(t.name, *(Samples(p.inputs.flatten(1), p.targets) for p in (t.train, t.test)),
             t.classes, t.labels)
        for t in tasks
    ]  # fmt: skip


def test_one_head_for_all_classes_gives_both_kinds_by_leaving_out_other_tasks_classes():
    tasks = all_classes()
    assert [task.labels for task in tasks] == [(0, 1), (2, 3), (4, 5)]
    assert [sorted(set(task.train.targets.tolist())) for task in tasks] == [[0, 1], [2, 3], [4, 5]]
    build = lambda seed: mlp((9, 7, 6), seed=seed, dtype=torch.float64)  # noqa: E731
    run = run_of(SGD(), tasks, build)
    model = build(1)
    for t in range(TASKS):
        nn.utils.vector_to_parameters(run.snapshots[t], model.parameters())
        for o in range(t + 1):
            test = tasks[o].test
            logits = model(test.inputs.double())
            untold = logits[:, : 2 * t + 2].argmax(1) == test.targets
            told = 2 * o + logits[:, 2 * o : 2 * o + 2].argmax(1) == test.targets
            assert run.class_accuracy[t, o] == untold.double().mean()
            assert run.task_accuracy[t, o] == told.double().mean()


def test_targets_over_all_tasks_and_several_heads_are_refused_together():
    with pytest.raises(ValueError, match=r'several heads.*targets="task"'):
        run_of(SGD(), all_classes(), lambda seed: mlp((9, 7, 6), tasks=3, seed=seed))
    samples = Samples(torch.zeros(2, 3), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"not all among its labels=\(1,\)"):
        Task("x", samples, samples, 2, (1,))


@pytest.mark.parametrize("name", ["dagger", "OGD"])
def test_rows_of_a_task_are_zero_in_the_heads_of_others(name):
    make = {"dagger": lambda: SGDDagger(4, samples=30), "OGD": lambda: OGD(0.02, samples=15)}
    learner, rows = make[name](), []
    original = learner.after_task

    def after_task(population, task, samples):
        original(population, task, samples)
        memory = learner.memory if name == "dagger" else learner._dense
        rows.append(memory.bases[0].rows().clone())

    learner.after_task = after_task
    run_of(learner)
    model, before = heads(1), 0
    for task, held in enumerate(rows):
        new = held[before:]
        before = len(held)
        for head in range(TASKS):
            part = new[:, places(model, f"heads.{head}.")]
            # rows are kept orthonormal to earlier ones, which have parts in earlier heads
            assert bool(part.any()) == (head <= task)


def test_ewc_has_no_importance_for_heads_whose_task_has_not_come():
    learner, seen = EWC(1.0, samples=20), []
    original = learner.after_task

    def after_task(population, task, samples):
        original(population, task, samples)
        seen.append(learner._importance[0].clone())

    learner.after_task = after_task
    run_of(learner)
    for task, importance in enumerate(seen):
        for head in range(TASKS):
            assert bool(importance[places(heads(1), f"heads.{head}.")].any()) == (head <= task)


@pytest.mark.parametrize("name", ["PackNet", "Powerpropagation"])
def test_packnet_gives_each_head_to_its_task_whole_and_keeps_old_logits_to_the_bit(name):
    build = heads if name == "PackNet" else lambda seed: powerpropagate(heads(seed))
    learner = PackNet(0.5) if name == "PackNet" else Powerpropagation(0.5)
    tasks = cloud_tasks(TASKS)
    watcher, model = Watcher(learner, tasks), build(1)
    run = run_of(learner, tasks, build, momentum=0.5, weight_decay=0.01)
    assert watcher.equal == [True] * 3
    for task in range(TASKS):
        own = places(model, f"heads.{task}.")
        assert bool((learner.owner[0, own] == task + 1).all())  # nothing of it was freed
        later = [places(model, f"heads.{head}.") for head in range(task + 1, TASKS)]
        for head in later:  # untouched until their task comes, not zeroed by pruning
            assert torch.equal(run.snapshots[task][head], run.initial[head])
    # later tasks still learn: twice what guessing gives (.83 was seen with a first guess of .9)
    assert float(run.task_accuracy.diagonal().min()) > 2 / 3


class LeNet(nn.Module):
    """GPM's published form for several heads, made small: convolutions, no biases."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, bias=False)
        self.hidden = nn.Linear(16, 20, bias=False)

    def forward(self, images):
        features = nn.functional.max_pool2d(torch.relu(self.conv(images)), 2)
        return torch.relu(self.hidden(features.flatten(1)))


@pytest.mark.parametrize("bias", [False, True], ids=["heads without biases", "with"])
def test_gpm_runs_with_a_head_per_task_and_freezes_the_logits_of_stored_samples(bias):
    tasks = cloud_tasks(TASKS, samples=24, width=36, shape=(1, 6, 6))
    learner, kept = GPM(lambda t: min(1.0, 0.97 + 0.003 * t) if t else 1.0, samples=24), []

    def build(seed):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return MultiHead(LeNet(), 20, 3, TASKS, bias=bias).double()

    original = learner.after_task

    def after_task(population, task, samples):
        original(population, task, samples)
        logits = population.logits(tasks[0].train.inputs.double(), 0)[0]
        kept.append(logits.clone())

    learner.after_task = after_task
    run = run_of(learner, tasks, build)
    assert float((kept[2] - kept[0]).abs().max()) < 1e-11 * float(kept[0].abs().max())
    assert list(run.notes[0]["widths"]) == ["body.conv", "body.hidden"]
    moved = run.snapshots[1] != run.snapshots[0]
    assert bool(moved[places(build(1), "heads.1.")].any())
    assert float(run.task_accuracy.diagonal().min()) > 0.5  # guessing gives a third


def test_without_energy_to_leave_out_a_new_task_learns_its_head_alone():
    run = run_of(SGDDagger(epsilon=0.0), momentum=0.5)
    model = heads(1)
    for task in (1, 2):
        moved = run.snapshots[task] != run.snapshots[task - 1]
        assert not bool(moved[places(model, "body.")].any())
        assert bool(moved[places(model, f"heads.{task}.")].any())


def test_a_filled_part_and_rows_beside_it_are_both_removed():
    from curvlab.learners import population_of
    from curvlab.learners.dense_memory import DenseMemory

    population = population_of([heads(1)], [1])
    memory, n = DenseMemory(population), population.n
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, n, generator=generator, dtype=torch.float64)
    memory.extend(0, rows[:1], task=0, values=torch.ones(1))
    memory.fill(0, torch.arange(5, 40))
    memory.extend(0, rows[1:], task=1, values=torch.ones(1))
    span = torch.cat([rows, torch.eye(n, dtype=torch.float64)[5:40]])
    frame = torch.linalg.qr(span.T).Q
    gradient = torch.randn(1, n, generator=generator, dtype=torch.float64)
    expected = gradient[0] - frame @ (frame.T @ gradient[0])
    again = DenseMemory(population)
    again.load_state(memory.state())
    for one in (memory, again):
        found = gradient.clone()
        one.project_out_(found)
        torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-12)
        assert one.sizes == [37]


# select=


@pytest.mark.parametrize(
    "make",
    [
        lambda: SGDDagger(4, samples=30, select="[02].*"),
        lambda: OGD(0.02, samples=15, select="[02].*"),
        lambda: OGD(0.02, samples=15, select="[02].*", structured=False),
        lambda: OGD(0.02, samples=15, select=["0.weight", "4.bias"]),
        lambda: GPM(0.9, samples=15, bias="augmented", select=["0.*", "2.*"]),
        lambda: EWC(5.0, samples=15, select=lambda name, _: name.startswith(("0", "2"))),
    ],
    ids=["dagger", "OGD", "OGD rows", "OGD parts", "GPM", "EWC"],
)
def test_what_select_leaves_out_has_the_plain_gradient_and_the_rest_has_not(make):
    learner, checked = make(), []
    original = learner.transform_

    def transform_(population):
        before = population.gradients.clone()
        original(population)
        if learner.notes:
            changed = before != population.gradients
            for name, where in population.layout.slices().items():
                taken = name in population.chosen(learner.select)
                checked.append((taken, bool(changed[:, where].any())))

    learner.transform_ = transform_
    run_of(learner, build=lambda seed: mlp(SIZES, seed=seed, dtype=torch.float64))
    assert not any(changed for taken, changed in checked if not taken)
    assert any(changed for taken, changed in checked if taken)
    assert "select" in learner.config()


def test_structured_and_dense_ogd_agree_on_selected_layers():
    build = lambda seed: mlp(SIZES, seed=seed, dtype=torch.float64)  # noqa: E731
    runs = [
        run_of(OGD(0.02, samples=15, select=["0.*", "4.*"], structured=way), build=build)
        for way in (True, False)
    ]
    torch.testing.assert_close(runs[0].snapshots, runs[1].snapshots, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("make", [SGDDagger, OGD, EWC, GPM])
def test_a_selection_that_matches_nothing_is_refused_before_training(make):
    learner = make(k=3, select="tail.*") if make is SGDDagger else make(select="tail.*")
    with pytest.raises(ValueError, match=r"select='tail\.\*' matches no parameter"):
        run_of(learner)


class Indexed(nn.Module):
    """All heads answer, and one of the answers is taken."""

    def __init__(self, seed, way):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.body = nn.Sequential(nn.Linear(8, 12), nn.Tanh())
            self.heads = nn.ModuleList([nn.Linear(12, 3) for _ in range(TASKS)])
            self.scale = nn.Parameter(torch.zeros(12))  # no gradient passes a zero
            self.inner = nn.Linear(12, 12)
        self.way = way

    def forward(self, inputs, task):
        features = self.body(inputs)
        features = features + self.scale * self.inner(features)
        answers = torch.stack([head(features) for head in self.heads], 1)
        if self.way == "index":
            return answers[:, task]
        chosen = nn.functional.one_hot(torch.tensor(task), TASKS).bool()
        if self.way == "product":
            return (answers * chosen[:, None]).sum(1)
        return answers.masked_fill(~chosen[:, None], -torch.inf).amax(1)


@pytest.mark.parametrize("way", ["index", "product", "-inf"])
def test_heads_that_are_all_computed_belong_to_the_task_whose_answer_is_taken(way):
    class Called(Indexed):
        def forward(self, inputs, task):
            features = self.body(inputs)
            return self.heads[task](features + self.scale * self.inner(features))

    for make in (lambda: PackNet(0.5), lambda: GPM(0.9, bias="augmented"), lambda: EWC(1.0)):
        runs = [
            run_of(make(), build=lambda seed, kind=kind: kind(seed, way).double(), weight_decay=0.1)
            for kind in (Indexed, Called)
        ]
        torch.testing.assert_close(runs[0].snapshots, runs[1].snapshots, rtol=0, atol=1e-12)
    moved = runs[0].snapshots[0] != runs[0].initial
    assert bool(moved[places(Indexed(1, way), "inner.")].any()), "used, behind a zero"


def test_a_part_that_only_some_samples_use_is_not_taken_for_another_tasks():
    class Rare(Indexed):
        def forward(self, inputs, task):
            rare = (inputs[:, :1] == 77.0).double()
            return super().forward(inputs, task) + rare * self.heads[2](self.body(inputs))

    tasks = cloud_tasks(TASKS)
    tasks[1].train.inputs[20:, 0] = 77.0  # not among the first eight
    with pytest.raises(RuntimeError, match=r"task 1 moves parameter 'heads\.2\.weight'"):
        run_of(SGD(), tasks, lambda seed: Rare(seed, "index").double())


def test_replay_moves_the_heads_of_earlier_tasks_with_weight_decay_too():
    tasks, build = cloud_tasks(TASKS), lambda seed: heads(seed)
    for decay in (0.0, 0.1):
        run = run_of(ER(30, batch=8), tasks, build, weight_decay=decay)
        moved = run.snapshots[2] != run.snapshots[1]
        assert bool(moved[places(heads(1), "heads.0.")].any())
