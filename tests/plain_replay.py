"""More learners written out plainly: replay, distillation and SpaceNet."""

# ruff: noqa: ARG002 (a moment is told everything and uses what it needs)
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from curvlab.learners.seeds import derived_generator
from tests.plain_learners import EPOCHS, LR, SEED, Plain


class Replayed(Plain):  # ER
    size, drawn = 12, 4

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.memory, self.offered = [], 0

    def draw(self, task, step):
        generator = derived_generator(SEED, "replay", task, step)
        order = torch.randperm(len(self.memory), generator=generator)[: self.drawn]
        return [self.memory[i] for i in order]

    def keep(self, entries, task, step):
        generator = derived_generator(SEED, "reservoir", task, step)
        uniform = torch.rand(len(entries), generator=generator, dtype=torch.float64).tolist()
        for entry, unit in zip(entries, uniform, strict=True):
            if self.offered < self.size:
                self.memory.append(entry)
            else:
                place = int(unit * (self.offered + 1))
                if place < self.size:
                    self.memory[place] = entry
            self.offered += 1

    def by_task(self, entries):
        """What of each task goes through the network at once."""
        groups = {}
        for entry in entries:
            groups.setdefault(entry[2] if self.several else 0, []).append(entry)
        return [groups[key] for key in sorted(groups)]

    def loss(self, inputs, targets, task, step):
        total = cross_entropy(self.logits(inputs, task), targets, reduction="sum")
        count = len(inputs)
        for group in self.by_task(self.draw(task, step)):
            again = self.logits(torch.stack([one[0] for one in group]), group[0][2])
            wanted = torch.stack([one[1] for one in group])
            total = total + cross_entropy(again, wanted, reduction="sum")
            count += len(group)
        return total / count

    def after_step(self, inputs, targets, task, step, steps, gradient, epoch, last):
        tasks = [task] * len(inputs)
        self.keep(list(zip(inputs, targets, tasks, strict=True)), task, step)


class Dark(Replayed):  # DER++
    alpha, beta = 0.4, 0.7

    def loss(self, inputs, targets, task, step):
        logits = self.logits(inputs, task)
        self.answers = logits.detach()
        total = cross_entropy(logits, targets)
        entries = self.draw(task, step)
        for group in self.by_task(entries):
            again = self.logits(torch.stack([one[0] for one in group]), group[0][2])
            before = torch.stack([one[3] for one in group])
            wanted = torch.stack([one[1] for one in group])
            share = len(group) / len(entries)
            total = total + self.alpha * share * (again - before).square().mean()
            total = total + self.beta * share * cross_entropy(again, wanted)
        return total

    def after_step(self, inputs, targets, task, step, steps, gradient, epoch, last):
        tasks = [task] * len(inputs)
        self.keep(list(zip(inputs, targets, tasks, self.answers, strict=True)), task, step)


class Averaged(Plain):  # A-GEM
    size, drawn = 12, 4

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.memory = []

    def change(self, gradient, task, step):
        if not self.memory:
            return gradient
        generator = derived_generator(0, "agem tasks", task, step)
        tasks = torch.randint(0, len(self.memory), (self.drawn,), generator=generator)
        parts = []
        for o, (inputs, targets) in enumerate(self.memory):
            count = int((tasks == o).sum())
            generator = derived_generator(SEED, "agem", task, step, o)
            rows = torch.randint(0, len(targets), (count,), generator=generator)
            if count:
                parts.append((inputs[rows], targets[rows], o))
        if not self.several:
            parts = [(torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]), 0)]
        self.train_mode(task)
        total = sum(
            cross_entropy(self.logits(x, o), y, reduction="sum") / self.drawn for x, y, o in parts
        )
        reference = self.gradient(total)
        along = gradient @ reference
        return gradient if along >= 0 else gradient - along / reference.square().sum() * reference

    def after(self, task, samples):
        self.memory.append(self.chosen(samples, self.size // len(self.tasks), "agem memory", task))


class Taught(Plain):  # LwF
    strength, temperature, old = 0.8, 2.0, None

    def before(self, task):
        if task > 0:
            self.old = {n: t.detach().clone() for n, t in self.model.state_dict().items()}

    def loss(self, inputs, targets, task, step):
        logits = self.logits(inputs, task)
        total = cross_entropy(logits, targets)
        if self.old is None:
            return total
        for o in range(task) if self.several else [task]:
            arguments = (inputs, o) if self.told else (inputs,)
            self.model.eval()
            with torch.no_grad():
                before = functional_call(self.model, self.old, arguments)
            self.train_mode(task)
            now = self.logits(inputs, o) if self.several else logits
            wanted = (before / self.temperature).softmax(1)
            found = (now / self.temperature).log_softmax(1)
            total = total - self.strength * (wanted * found).sum(1).mean()
        return total


class Sparse(Plain):  # SpaceNet on a plain MLP, strictly isolated
    selected, reserved, connections, dropped = (4, 4), (1, 1), (14, 6, 5), 0.4

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.linear = [n for n, m in self.model.named_modules() if isinstance(m, nn.Linear)]
        self.widths = [len(self.named[f"{n}.weight"]) for n in self.linear]
        self.taken = [torch.zeros(w, dtype=torch.bool) for w in self.widths[:-1]]
        self.owner = {n: torch.zeros(p.shape, dtype=torch.int64) for n, p in self.named.items()}

    def before(self, task):
        if task == 0:
            generator = derived_generator(SEED, "spacenet weights")
            self.start = []
            for name in self.linear:
                out, into = self.named[f"{name}.weight"].shape
                unit = torch.rand(out, into, generator=generator, dtype=torch.float64)
                self.start.append((2 * unit - 1) * (6.0 / (out + into)) ** 0.5)
            self.put(torch.zeros(self.n, dtype=torch.float64))
        self.importance = {n: torch.zeros(self.named[f"{n}.weight"].shape) for n in self.linear}
        self.importance = {n: one.double() for n, one in self.importance.items()}
        first = self.named[f"{self.linear[0]}.weight"].shape[1]
        self.neurons = [torch.zeros(w).double() for w in (first, *self.widths[:-1])]
        generator = derived_generator(SEED, "spacenet", task)
        self.picked = []
        for hidden, wanted in enumerate(self.selected):
            free = (~self.taken[hidden]).nonzero().flatten()
            order = torch.randperm(len(free), generator=generator)
            mask = torch.zeros_like(self.taken[hidden])
            mask[free[order[:wanted]]] = True
            self.picked.append(mask)
        with torch.no_grad():
            for part in ("weight", "bias"):
                self.named[f"{self.linear[-1]}.{part}"].zero_()
                self.owner[f"{self.linear[-1]}.{part}"].zero_()
            for i, name in enumerate(self.linear):
                mine = self.owner[f"{name}.weight"]
                open_places = ((mine == 0) & self.allowed(i)).flatten().nonzero().flatten()
                order = torch.randperm(len(open_places), generator=generator)
                places = open_places[order[: self.connections[i]]]
                mine.view(-1)[places] = task + 1
                weight = self.named[f"{name}.weight"]
                weight.view(-1)[places] = self.start[i].view(-1)[places]
                bias = self.owner[f"{name}.bias"]
                bias[(bias == 0) & self.allowed(i).any(1)] = task + 1

    def allowed(self, i):
        out, into = self.named[f"{self.linear[i]}.weight"].shape
        sources = self.picked[i - 1] if i else torch.ones(into, dtype=torch.bool)
        last = i == len(self.linear) - 1
        targets = torch.ones(out, dtype=torch.bool) if last else self.picked[i]
        return targets[:, None] & sources[None]

    def change(self, gradient, task, step):
        owner = torch.cat([self.owner[name].reshape(-1) for name in self.named])
        return torch.where(owner == task + 1, gradient, 0.0)

    def after_step(self, inputs, targets, task, step, steps, gradient, epoch, last):
        for i, name in enumerate(self.linear):
            own = gradient[self.where[f"{name}.weight"]].view_as(self.importance[name])
            self.importance[name] += LR * own**2
            if i == 0:
                self.neurons[0] += self.importance[name].sum(0)
            if i + 1 < len(self.linear):
                self.neurons[i + 1] += self.importance[name].sum(1)
        if not last or epoch + 1 == EPOCHS:
            return
        for i, name in enumerate(self.linear[:-1]):
            mine = self.owner[f"{name}.weight"].view(-1)
            places = (mine == task + 1).nonzero().flatten()
            score = torch.outer(self.neurons[i + 1], self.neurons[i]).flatten()
            free = (self.allowed(i).flatten() & (mine == 0)).nonzero().flatten()
            count = min(int(self.dropped * len(places)), len(free))
            weak = places[self.importance[name].view(-1)[places].argsort(stable=True)[:count]]
            grown = free[score[free].argsort(descending=True, stable=True)[:count]]
            mine[weak], mine[grown] = 0, task + 1
            with torch.no_grad():
                self.named[f"{name}.weight"].view(-1)[weak] = 0.0

    def after(self, task, samples):
        for hidden, count in enumerate(self.reserved):
            score = self.neurons[hidden + 1].masked_fill(~self.picked[hidden], -1.0)
            self.taken[hidden][score.topk(count).indices] = True
