"""Learners written out plainly, for one float64 model and by autograd: the truth for the library's.

Nothing of the library is used but the seeds of random choices: which samples, in which order.
"""

# ruff: noqa: ARG002 (a moment is told everything and uses what it needs)
import torch
from torch import nn
from torch.nn.functional import cross_entropy, unfold

from curvlab.learners.seeds import derived_generator

SEED, BATCH, EPOCHS, LR = 5, 7, 2, 0.1


def orthonormal(rows, kept=None):
    """Gram-Schmidt, row by row; what lies in the span already is left out."""
    found = [] if kept is None else list(kept)
    for row in rows:
        rest = row
        for _ in range(2):
            for one in found:
                rest = rest - (rest @ one) * one
        if rest.norm() > 1e-9 * row.norm():
            found.append(rest / rest.norm())
    return torch.stack(found) if found else rows[:0]


class Plain:
    """SGD, and the moments at which others differ."""

    def __init__(self, build, tasks, told, several):
        self.model, self.tasks, self.told, self.several = build(SEED), tasks, told, several
        self.named = dict(self.model.named_parameters())
        self.where, at = {}, 0
        for name, parameter in self.named.items():
            self.where[name] = slice(at, at + parameter.numel())
            at += parameter.numel()
        self.n = at

    def used(self, task):
        """Names of what a task uses: with several heads, its own and the body."""
        return [n for n in self.named if not (self.several and n.startswith("heads."))
                or n.startswith(f"heads.{task}.")]  # fmt: skip

    def shared(self, name):
        return not (self.several and name.startswith("heads."))

    def flat(self):
        return torch.cat([p.detach().reshape(-1) for p in self.named.values()])

    def put(self, flat):
        with torch.no_grad():
            for name, parameter in self.named.items():
                parameter.copy_(flat[self.where[name]].view_as(parameter))

    def logits(self, inputs, task):
        return self.model(inputs, task) if self.told else self.model(inputs)

    def gradient(self, value):
        found = torch.autograd.grad(value, list(self.named.values()), allow_unused=True)
        pairs = zip(found, self.named.values(), strict=True)
        return torch.cat([(torch.zeros_like(p) if g is None else g).reshape(-1) for g, p in pairs])

    def train_mode(self, task):
        self.model.train()
        for module in self.model.modules():
            if isinstance(module, nn.BatchNorm2d) and task > 0:
                module.eval()  # statistics are those of the first task

    def chosen(self, samples, count, purpose, task):
        generator = derived_generator(SEED, purpose, task)
        rows = torch.randperm(len(samples), generator=generator)[:count]
        return samples.inputs[rows].double(), samples.targets[rows]

    def run(self):
        snapshots = []
        for task, one in enumerate(self.tasks):
            self.model.eval()
            self.before(task)
            step, steps = 0, EPOCHS * -(-len(one.train) // BATCH)
            for epoch in range(EPOCHS):
                generator = derived_generator(SEED, "order", task, epoch)
                for rows in torch.randperm(len(one.train), generator=generator).split(BATCH):
                    inputs, targets = one.train.inputs[rows].double(), one.train.targets[rows]
                    self.train_mode(task)
                    value = self.loss(inputs, targets, task, step)
                    gradient = self.change(self.gradient(value), task, step)
                    self.put(self.flat() - LR * gradient)
                    last = step + 1 == (epoch + 1) * steps // EPOCHS
                    self.after_step(inputs, targets, task, step, steps, gradient, epoch, last)
                    step += 1
            self.model.eval()
            self.after(task, one.train)
            snapshots.append(self.flat())
        return torch.stack(snapshots)

    def before(self, task): ...
    def loss(self, inputs, targets, task, step):
        return cross_entropy(self.logits(inputs, task), targets)

    def change(self, gradient, task, step):
        return gradient

    def after_step(self, inputs, targets, task, step, steps, gradient, epoch, last): ...
    def after(self, task, samples): ...


class Projected(Plain):
    rows = None

    def change(self, gradient, task, step):
        return gradient if self.rows is None else gradient - self.rows.T @ (self.rows @ gradient)


class Dagger(Projected):
    k, count = 3, 20

    def after(self, task, samples):
        inputs, targets = self.chosen(samples, self.count, "hessian", task)
        value = cross_entropy(self.logits(inputs, task), targets)
        parameters = [self.named[name] for name in self.used(task)]
        first = torch.autograd.grad(value, parameters, create_graph=True)
        first = torch.cat([g.reshape(-1) for g in first])
        matrix = torch.stack([
            torch.cat([g.reshape(-1) for g in torch.autograd.grad(
                one, parameters, retain_graph=True, materialize_grads=True)])
            for one in first
        ])  # fmt: skip
        values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
        best = values.abs().argsort(descending=True)[: self.k]
        rows, at = torch.zeros(self.k, self.n, dtype=torch.float64), 0
        for name in self.used(task):
            size = self.named[name].numel()
            rows[:, self.where[name]] = vectors[at : at + size, best].T
            at += size
        self.rows = orthonormal(rows, self.rows)


class Orthogonal(Projected):  # OGD
    epsilon, count = 0.05, 12

    def after(self, task, samples):
        inputs, targets = self.chosen(samples, self.count, "ogd", task)
        rows = torch.stack([
            self.gradient(self.logits(x[None], task)[0, y])
            for x, y in zip(inputs, targets, strict=True)
        ])  # fmt: skip
        _, values, directions = torch.linalg.svd(rows, full_matrices=False)
        energy = values.square().cumsum(0) / values.square().sum()
        kept = int((energy < 1.0 - self.epsilon).sum()) + 1
        self.rows = orthonormal(directions[:kept], self.rows)


class Penalised(Plain):  # EWC
    strength, count = 3.0, 12

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.penalties = []

    def change(self, gradient, task, step):
        for fisher, centre in self.penalties:
            gradient = gradient + self.strength * fisher * (self.flat() - centre)
        return gradient

    def after(self, task, samples):
        inputs, _ = self.chosen(samples, self.count, "fisher", task)
        fisher = torch.zeros(self.n, dtype=torch.float64)
        for x in inputs:
            for c in range(3):
                log = self.logits(x[None], task).log_softmax(1)[0, c]
                fisher += log.detach().exp() * self.gradient(log).square()
        self.penalties.append((fisher / len(inputs), self.flat()))


class InputsKept(Plain):  # GPM, biases as weights of a constant input
    threshold, count = 0.9, 12

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.layers = {
            name: module for name, module in self.model.named_modules()
            if isinstance(module, nn.Linear | nn.Conv2d) and self.shared(f"{name}.weight")
        }  # fmt: skip
        self.bases, self.frozen = dict.fromkeys(self.layers), set()

    def change(self, gradient, task, step):
        gradient = gradient.clone()
        for name, module in self.layers.items():
            basis = self.bases[name]
            if basis is None:
                continue
            weight = self.where[f"{name}.weight"]
            joined = gradient[weight].view(len(module.weight), -1)
            if module.bias is not None:
                bias = self.where[f"{name}.bias"]
                joined = torch.cat([joined, gradient[bias][:, None]], 1)
            joined = joined - (joined @ basis.T) @ basis
            if module.bias is not None:
                gradient[bias], joined = joined[:, -1], joined[:, :-1]
            gradient[weight] = joined.reshape(-1)
        for name in self.frozen:
            gradient[self.where[name]] = 0.0
        return gradient

    def after(self, task, samples):
        inputs, _ = self.chosen(samples, self.count, "gpm", task)
        seen, hooks = {}, []
        for name, module in self.layers.items():

            def keep(module, arguments, name=name):
                x = arguments[0]
                if isinstance(module, nn.Conv2d):
                    x = unfold(x, module.kernel_size, 1, module.padding, module.stride)
                    x = x.transpose(1, 2)
                seen[name] = x.reshape(-1, x.shape[-1])

            hooks.append(module.register_forward_pre_hook(keep))
        with torch.no_grad():
            self.logits(inputs, task)
        for hook in hooks:
            hook.remove()
        for name, rows in seen.items():
            if self.layers[name].bias is not None:
                rows = torch.cat([rows, torch.ones(len(rows), 1, dtype=rows.dtype)], 1)
            basis = rows[:0] if self.bases[name] is None else self.bases[name]
            total = rows.square().sum()
            rest = rows - (rows @ basis.T) @ basis
            _, values, directions = torch.linalg.svd(rest, full_matrices=False)
            held, new = total - rest.square().sum(), 0
            while held < self.threshold * total and new < len(values):
                held += values[new] ** 2
                new += 1
            self.bases[name] = torch.cat([basis, directions[:new]])
        inside = {f"{n}.{kind}" for n in self.layers for kind in ("weight", "bias")}
        self.frozen |= {n for n in self.used(task) if n not in inside and self.shared(n)}


class Packed(Plain):  # PackNet, and Powerpropagation, whose free weights restart
    fraction, restart = 0.5, False

    def before(self, task):
        if task == 0:
            self.owner, self.initial = torch.zeros(self.n), self.flat()
        for name in self.used(task):
            free = self.owner[self.where[name]] == 0
            self.owner[self.where[name]][free] = task + 1
            if self.restart and task > 0:
                flat = self.flat()
                flat[self.where[name]][free] = self.initial[self.where[name]][free]
                self.put(flat)

    def change(self, gradient, task, step):
        return torch.where(self.owner == task + 1, gradient, 0.0)

    def after_step(self, inputs, targets, task, step, steps, gradient, epoch, last):
        if step + 1 != round(0.5 * steps):
            return
        flat = self.flat()
        for name, parameter in self.named.items():
            if not (name.endswith("weight") and parameter.dim() > 1 and self.shared(name)):
                continue
            mine = (self.owner[self.where[name]] == task + 1).nonzero().flatten()
            sizes = flat[self.where[name]][mine].abs()
            gone = mine[sizes.argsort(stable=True)[: int(self.fraction * len(mine))]]
            self.owner[self.where[name]][gone] = 0
            flat[self.where[name]][gone] = 0.0
        self.put(flat)


class Powers(Packed):
    restart = True
