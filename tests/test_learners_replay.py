"""Replay and distillation: what is kept, and that every step is what the papers write."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from curvlab.learners import AGEM, DER, ER, GPM, SGD, Learner, LwF, StackedMLP, population_of
from curvlab.learners.reservoir import Reservoir
from curvlab.learners.step import Batch, Step
from curvlab.nets import MultiHead, mlp, slim_resnet18
from curvlab.training import CropAndFlip, Schedule, learn
from curvlab.training.run import MATRICES
from tests.small_problems import cloud_tasks, resnet

SIZES = (8, 12, 3)


def build(seed, **options):
    return mlp(SIZES, seed=seed, dtype=torch.float64, **options)


def offer(reservoir, population, numbers, task, step):
    """Samples whose inputs are their numbers."""
    targets = torch.tensor(numbers).repeat(population.size, 1)
    inputs = targets.double().unsqueeze(2)
    reservoir.add(population, Batch(inputs, targets, Step(task, step, 100, 0, 1, 0.1)))


def test_every_sample_of_a_stream_is_kept_with_the_same_probability():
    """400 runs of 40 samples into 10 places: four standard deviations around a quarter."""
    seeds = tuple(range(400))
    population = population_of([mlp((1, 2), seed=s) for s in seeds], seeds)
    reservoir = Reservoir(10)
    for step in range(8):
        offer(reservoir, population, list(range(5 * step, 5 * step + 5)), step // 4, step)
    assert len(reservoir) == 10
    kept = reservoir.kept["targets"]
    assert all(len(set(row)) == 10 for row in kept.tolist())  # nobody is there twice
    share = torch.bincount(kept.flatten(), minlength=40) / len(seeds)
    spread = (0.25 * 0.75 / len(seeds)) ** 0.5
    assert float((share - 0.25).abs().max()) < 4 * spread
    assert torch.equal(reservoir.kept["inputs"].squeeze(2), kept.double())
    assert torch.equal(reservoir.kept["tasks"], (kept >= 20).long())


def test_a_reservoir_that_is_not_full_keeps_everything_and_draws_what_there_is():
    population = population_of([mlp((1, 2), seed=s) for s in (1, 2)], (1, 2))
    reservoir = Reservoir(10)
    batch = Batch(torch.zeros(2, 1, 1), torch.zeros(2, 1).long(), Step(0, 0, 9, 0, 1, 0.1))
    assert reservoir.draw(population, 0, 4, batch) == []
    offer(reservoir, population, [3, 1, 4], 0, 0)
    [(_, drawn)] = reservoir.draw(population, 1, 5, batch)
    assert sorted(drawn["targets"].tolist()) == [1, 3, 4]


LEARNERS = {
    "ER": lambda: ER(20, batch=6),
    "DER": lambda: DER(20, alpha=0.4, batch=6),
    "DER++": lambda: DER(20, alpha=0.4, beta=0.7, batch=6),
    "A-GEM": lambda: AGEM(20, batch=6),
    "LwF": lambda: LwF(0.8, temperature=2.0),
}


@pytest.mark.parametrize("heads", [None, 3], ids=["one head", "several heads"])
@pytest.mark.parametrize("name", LEARNERS)
def test_replay_and_distillation_resume_to_the_same_bits_in_the_middle_of_a_task(
    name, heads, tmp_path
):
    tasks = cloud_tasks(3)
    models = lambda seed: build(seed, tasks=heads)  # noqa: E731
    options = {"seeds": (1, 2), "momentum": 0.5, "batch_size": 7}
    schedule = Schedule(0.1, epochs=2)
    whole = learn(models, tasks, LEARNERS[name](), schedule, **options)
    (alone,) = learn(models, tasks, LEARNERS[name](), schedule, **{**options, "seeds": 2})
    stopping, left = LEARNERS[name](), [26]
    original = stopping.after_step

    def after_step(population, step):
        original(population, step)
        left[0] -= 1
        if not left[0]:
            raise RuntimeError("stop")

    stopping.after_step = after_step
    options |= {"checkpoint": tmp_path / "run.safetensors", "checkpoint_every": 4}
    with pytest.raises(RuntimeError, match="stop"):
        learn(models, tasks, stopping, schedule, **options)
    again = learn(models, tasks, LEARNERS[name](), schedule, **options)
    for one, other in ((whole[0], again[0]), (whole[1], again[1]), (whole[1], alone)):
        assert torch.equal(one.snapshots, other.snapshots)
        for matrix in MATRICES:
            assert torch.equal(
                getattr(one, matrix).nan_to_num(), getattr(other, matrix).nan_to_num()
            )
        for mine, theirs in zip(one.losses, other.losses, strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("name", ["ER", "DER", "DER++", "A-GEM"])
def test_replay_forgets_less_than_sgd(name):
    tasks = cloud_tasks(3)
    schedule = Schedule(0.2, epochs=6)
    makers = {"ER": lambda: ER(60), "DER": lambda: DER(60, alpha=1.0), "A-GEM": lambda: AGEM(60),
              "DER++": lambda: DER(60, alpha=1.0, beta=1.0)}  # fmt: skip
    means = []
    for learner in (makers[name](), SGD()):
        runs = learn(build, tasks, learner, schedule, seeds=(1, 2, 3))
        means.append(sum(float(run.test_loss[-1, :-1].mean()) for run in runs))
    assert means[0] < means[1]


def test_with_lwf_an_old_head_answers_the_new_tasks_inputs_more_as_before_than_with_sgd():
    tasks, moved = cloud_tasks(2), []
    inputs = tasks[1].train.inputs.double()
    for learner in (LwF(1.0), SGD()):
        (run,) = learn(
            lambda seed: build(seed, tasks=2), tasks, learner, Schedule(0.2, epochs=6), seeds=1
        )
        answers, model = [], build(1, tasks=2)
        for snapshot in run.snapshots:
            torch.nn.utils.vector_to_parameters(snapshot, model.parameters())
            answers.append(model(inputs, 0).softmax(1).detach())
        moved.append(float((answers[1] - answers[0]).norm()))
    assert moved[0] < 0.5 * moved[1]


def test_the_teacher_answers_with_its_own_statistics_and_leaves_those_of_the_pupil_alone():
    from curvlab.learners.kept import Kept

    population = population_of([resnet(1)], [1], batchnorm="running")
    inputs = torch.randn(1, 6, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    targets = torch.zeros(1, 6).long()
    population.gradient_(inputs, targets, 0)
    kept = Kept.of(population)
    expected = population.logits(inputs[0], 0)[0].clone()
    population.parameters.sub_(population.gradients, alpha=0.5)
    population.gradient_(inputs, targets, 0)
    before = {name: value.clone() for name, value in population.buffers().items()}
    assert population.models[0].training
    assert torch.equal(kept.logits(0, inputs[0], 0), expected)
    assert population.models[0].training
    for name, value in population.buffers().items():
        assert torch.equal(value, before[name]), name
    again = Kept.restored(population, kept.state())
    assert torch.equal(again.logits(0, inputs[0], 0), expected)


# the protocol itself


def test_a_loss_of_ones_own_gives_the_bits_of_the_plain_loss_by_autograd():
    class Same(Learner):
        def loss(self, population, s, logits):
            return cross_entropy(logits, population.batch.targets[s])

    tasks = cloud_tasks(2)
    one, other = (
        learn(build, tasks, learner, Schedule(0.1, epochs=2), seeds=[3])[0]
        for learner in (Same(), SGD())
    )
    torch.testing.assert_close(one.snapshots, other.snapshots, rtol=1e-12, atol=1e-13)
    for mine, theirs in zip(one.losses, other.losses, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_the_gradient_on_other_samples_leaves_gradients_and_curve_alone():
    population = population_of([build(s) for s in (1, 2)], (1, 2))
    assert isinstance(population, StackedMLP)
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(2, 5, 8, generator=generator).double() for _ in range(2))
    targets = torch.randint(0, 3, (2, 5), generator=generator)
    population.seen = []
    population.gradient_(first, targets, 0)
    before = population.gradients.clone()
    found = population.gradient_of(second, targets, 0, 0)
    assert torch.equal(population.gradients, before)
    assert population.losses().shape == (2, 1)
    population.gradient_(second, targets, 0)
    assert torch.equal(population.gradients, found)


def test_augmentation_another_loss_and_a_schedule_are_used_kept_and_compared(tmp_path):
    tasks = cloud_tasks(2)
    seen = []

    def noisy(inputs, generator, size=0.1):
        seen.append(len(inputs))
        return inputs + size * torch.randn(inputs.shape, generator=generator).to(inputs.dtype)

    def smooth(logits, targets):
        return cross_entropy(logits, targets, label_smoothing=0.2)

    schedule = Schedule(0.1, epochs=2, scale=lambda task, done: 1.0 - 0.5 * done + task)
    options = {"loss": smooth, "augment": noisy}
    file = {"checkpoint": tmp_path / "run.safetensors"}
    together = learn(build, tasks, SGD(), schedule, seeds=(1, 2), **options, **file)
    (alone,) = learn(build, tasks, SGD(), schedule, seeds=2, **options)
    assert torch.equal(together[1].snapshots, alone.snapshots)
    assert seen
    # by hand, the second run
    model, steps = build(2), 12
    from curvlab.learners.seeds import derived_generator

    for t, task in enumerate(tasks):
        step = 0
        for epoch in range(2):
            order = torch.randperm(60, generator=derived_generator(2, "order", t, epoch))
            for rows in order.split(10):
                inputs = task.train.inputs[rows].double()
                inputs = noisy(inputs, derived_generator(2, "augment", t, step))
                loss = smooth(model(inputs), task.train.targets[rows])
                gradients = torch.autograd.grad(loss, list(model.parameters()))
                rate = 0.1 * (1.0 - 0.5 * step / steps + t)
                with torch.no_grad():
                    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                        parameter -= rate * gradient
                step += 1
        final = torch.cat([p.detach().flatten() for p in model.parameters()])
        torch.testing.assert_close(alone.snapshots[t], final, rtol=1e-11, atol=1e-13)
    inputs, targets = tasks[1].test.inputs.double(), tasks[1].test.targets
    torch.testing.assert_close(
        alone.test_loss[1, 1], smooth(model(inputs), targets).detach(), rtol=1e-10, atol=0
    )
    others = {
        "scale": (Schedule(0.1, epochs=2, scale=lambda task, done: 1.0 - 0.6 * done + task), {}),
        "loss": (schedule, {"loss": lambda a, b: cross_entropy(a, b, label_smoothing=0.3)}),
        "augment": (schedule, {"augment": lambda inputs, _: inputs}),
    }
    for word, (other, changed) in others.items():
        with pytest.raises(ValueError, match=rf"belongs to another run.*{word}"):
            learn(build, tasks, SGD(), other, seeds=(1, 2), **{**options, **changed}, **file)


def test_the_curve_holds_the_mean_loss_of_every_stretch_and_resumes(tmp_path):
    tasks = cloud_tasks(2, samples=230)
    schedule = Schedule(0.05, epochs=2, epochs_later=1)
    runs = learn(build, tasks, SGD(), schedule, seeds=(1, 2), batch_size=2)
    assert [one.shape for one in runs[0].losses] == [(2, 100), (1, 100)]
    by_hand = []

    class Watched(Learner):
        def loss(self, population, s, logits):
            value = super().loss(population, s, logits)
            by_hand.append(value.item())
            return value

    (watched,) = learn(build, tasks, Watched(), schedule, seeds=1, batch_size=2)
    losses = torch.tensor(by_hand[:115], dtype=torch.float64)
    stretches = [losses[i * 115 // 100 : (i + 1) * 115 // 100].mean() for i in range(100)]
    torch.testing.assert_close(watched.losses[0][0], torch.stack(stretches))
    torch.testing.assert_close(runs[0].losses[0][0], torch.stack(stretches), rtol=1e-6, atol=1e-9)
    file = runs[0].save(tmp_path / "kept.safetensors")
    from curvlab.training import Run

    for mine, theirs in zip(Run.load(file).losses, runs[0].losses, strict=True):
        assert torch.equal(mine, theirs)


def test_a_learner_that_is_replaying_trains_networks_with_batchnorm():
    tasks = cloud_tasks(2, samples=20, width=192, shape=(3, 8, 8))
    for learner in (ER(10, batch=4), AGEM(10, batch=4), LwF()):
        (run,) = learn(
            lambda seed: slim_resnet18(3, nf=2, blocks=(1, 1), tasks=2, seed=seed),
            tasks, learner, Schedule(0.05, epochs=2), seeds=1, batchnorm="per_task",
        )  # fmt: skip
        assert bool(run.snapshots.isfinite().all())


def test_crop_and_flip_shifts_by_at_most_its_padding_and_mirrors_half():
    images = torch.arange(1.0, 26.0).view(1, 1, 5, 5).repeat(400, 2, 1, 1)
    images[:, 1] *= -1
    augment = CropAndFlip(padding=1)
    found = augment(images, torch.Generator().manual_seed(0))
    wide = torch.nn.functional.pad(images[0, 0], (1, 1, 1, 1))
    windows = {}
    for down in range(3):
        for right in range(3):
            window = wide[down : down + 5, right : right + 5]
            windows[tuple(window.flatten().tolist())] = (down, right, False)
            windows[tuple(window.flip(1).flatten().tolist())] = (down, right, True)
    seen = [windows[tuple(one[0].flatten().tolist())] for one in found]
    assert set(seen) == set(windows.values())  # 18 kinds in 400 draws
    assert torch.equal(found[:, 1], -found[:, 0])
    mirrored = sum(kind[2] for kind in seen)
    assert abs(mirrored - 200) < 4 * 10  # four standard deviations
    still = CropAndFlip(padding=0, flip=False)(images, torch.Generator().manual_seed(0))
    assert torch.equal(still, images)
    with pytest.raises(ValueError, match=r"images \(B, C, H, W\)"):
        augment(images[0], torch.Generator())


def test_a_checkpoint_from_before_the_curve_goes_on_with_what_is_known(tmp_path):
    from curvlab.storage import load_tensors, save_tensors

    tasks, file = cloud_tasks(2), tmp_path / "run.safetensors"

    class Stopped(SGD):
        def after_step(self, population, step):
            del population
            if (step.task, step.step) == (1, 9):
                raise KeyboardInterrupt

        def config(self):
            return {"learner": "SGD"}

    options = {"seeds": 1, "checkpoint": file, "checkpoint_every": 4}
    schedule = Schedule(0.1, epochs=2)
    (whole,) = learn(build, tasks, SGD(), schedule, seeds=1)
    with pytest.raises(KeyboardInterrupt):
        learn(build, tasks, Stopped(), schedule, **options)
    tensors, manifest = load_tensors(file, "training")
    newer = ("curve/", "matrices/task_", "matrices/class_")
    old = {name: one for name, one in tensors.items() if not name.startswith(newer)}
    save_tensors(file, "training", old, manifest)
    (run,) = learn(build, tasks, SGD(), schedule, **options)
    assert torch.equal(run.snapshots, whole.snapshots)
    assert run.losses[0].numel() == 0
    # 8 of 12 steps were made before: two of the second epoch
    assert run.losses[1].isnan().tolist() == [[True] * 2 + [False] * 4]
    assert torch.equal(run.losses[1][0, 2:], whole.losses[1][1, 2:])


def normed(seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        body = torch.nn.Sequential(
            torch.nn.Linear(8, 10), torch.nn.BatchNorm1d(10), torch.nn.Tanh()
        )
        return MultiHead(body, 10, 3, tasks=3).double()


@pytest.mark.parametrize("policy", ["running", "freeze", "per_task"])
@pytest.mark.parametrize(
    "make",
    [lambda: ER(20, batch=1), lambda: DER(20, batch=4), lambda: AGEM(20, batch=3)],
    ids=["ER", "DER", "AGEM"],
)
def test_a_single_replayed_sample_has_no_statistics_and_needs_none(make, policy):
    (run,) = learn(normed, cloud_tasks(3), make(), Schedule(0.05), seeds=1, batchnorm=policy)
    assert bool(run.snapshots.isfinite().all())


@pytest.mark.parametrize("several", [True, False], ids=["heads", "one head"])
def test_replay_under_statistics_per_task_is_by_those_of_the_samples_task(several):
    """A step of ER against one written out, from the state before it."""
    tasks, checked = cloud_tasks(2), []

    def build(seed):
        whole = normed(seed)
        return whole if several else torch.nn.Sequential(whole.body, whole.heads[0])

    class Watched(ER):
        def loss(self, population, s, logits):
            batch, model = population.batch, population.models[s]
            expected = cross_entropy(logits, batch.targets[s], reduction="sum")
            count, after = len(logits), {k: v.clone() for k, v in model.named_buffers()}
            drawn = self.memory.draw(population, s, self.batch, batch)
            for task, part in drawn:
                held = population.statistics.of_task(task, s) or after
                model.eval()
                arguments = (part["inputs"], task) if several else (part["inputs"],)
                again = torch.func.functional_call(model, held, arguments)
                model.train()
                expected = expected + cross_entropy(again, part["targets"], reduction="sum")
                count += len(again)
            found = super().loss(population, s, logits)
            torch.testing.assert_close(found, expected / count, rtol=0, atol=1e-12)
            for name, value in model.named_buffers():
                assert torch.equal(value, after[name]), "replay moves no statistics"
            assert model.training
            checked.append({task for task, _ in drawn})
            return found

    learn(build, tasks, Watched(30, batch=6), Schedule(0.05), seeds=1, batchnorm="per_task")
    assert {0, 1} in checked


def test_batchnorm_that_keeps_no_statistics_trains_and_names_what_it_cannot_do():
    def build(_seed):
        norm = torch.nn.BatchNorm1d(10, track_running_stats=False)
        return torch.nn.Sequential(torch.nn.Linear(8, 10), norm, torch.nn.Linear(10, 3))

    tasks = cloud_tasks(2)
    learn(build, tasks, ER(20, batch=4), Schedule(0.05), seeds=1)
    with pytest.raises(ValueError, match=r"a single sample beside the batch.*draw more \(batch=\)"):
        learn(build, tasks, ER(20, batch=1), Schedule(0.05), seeds=1)
    with pytest.raises(ValueError, match="BatchNorm without running statistics"):
        learn(build, tasks, GPM(0.9, bias="augmented"), Schedule(0.05), seeds=1)


def test_parameters_tied_through_their_memory_are_refused_not_untied():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
    model[2].weight.data = model[0].weight.data
    with pytest.raises(ValueError, match=r"'0\.weight' and '2\.weight' share one memory"):
        learn(model, cloud_tasks(1), SGD(), Schedule(0.05), seeds=1)
