"""SpaceNet: every task trains a sparse set of connections of its own, rewired while it learns.

For each task: pick neurons of every hidden layer among those that no task has reserved; lay a fixed
number of random connections between the picked neurons of neighbouring layers; train only these. At
the end of every epoch but the last, drop the least important connections of every layer but the
last and grow as many between the most important neurons. At the end, reserve the most important
neurons and freeze the connections. The last layer is set up anew for every task and kept per task.

As in the authors' code: a connection's importance is the sum over steps of |change of weight x
gradient|; a hidden neuron's is that of the connections into it, an input's that of those out of it,
as they are at each step and summed over the steps; connections start from one dense draw of
Glorot's uniform numbers, grown ones from zero, biases from zero.

What differs. By default (``isolate=True``) tasks are strictly isolated: biases belong to the first
task that picks their neuron, and a task is predicted without the connections of later ones. With
``isolate=False`` all biases of neurons that are not reserved go on moving, as published. The
published code draws places with NumPy's generator; here they are a function of the run's seed. If
fewer places are open than are dropped, fewer are replaced; the published code stops. Convolutions
are not covered.

The published settings for 784-400-400-10 are selected (80, 80), reserved (40, 40), connections
(10000, 1640, 80), dropped .2, batch 128, 4 epochs, lr .01, two classes a task on one head
(``targets="all"``: a task has connections to its own classes only).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from curvlab.checks import inside
from curvlab.learners.ownership import Ownership
from curvlab.learners.population import Population
from curvlab.learners.seeds import derived_generator
from curvlab.learners.stacked import plain_mlp
from curvlab.learners.step import Step
from curvlab.operators.products.mlp_plan import Layer
from curvlab.storage import series
from curvlab.tasks.samples import Samples, Task


class SpaceNet(Ownership):
    """Sparse training with drop and grow, for plain MLPs.

    Args:
        selected: Neurons picked per hidden layer.
        reserved: Of these, how many no later task may pick.
        connections: Per layer, the last included, how many a task gets.
        dropped: Fraction of a layer's connections replaced at an epoch's end.
        isolate: Keep biases with the first task that uses them and predict a task with the
            connections of later ones left out, which makes the isolation strict. ``False`` is as
            published: only the last layer is the task's own, and later tasks disturb earlier ones
            through neurons that were picked but not reserved.
    """

    settings = ("selected", "reserved", "connections", "dropped", "isolate")

    def __init__(
        self,
        selected: Sequence[int],
        reserved: Sequence[int],
        connections: Sequence[int],
        *,
        dropped: float = 0.2,
        isolate: bool = True,
    ) -> None:
        super().__init__()
        if len(selected) != len(reserved) or len(connections) != len(selected) + 1:
            raise ValueError(
                "SpaceNet needs selected= and reserved= for each hidden layer and connections= for "
                f"each layer; got {len(selected)}, {len(reserved)} and {len(connections)}"
            )
        if any(not 0 <= r <= s for r, s in zip(reserved, selected, strict=True)):
            raise ValueError("reserved= cannot exceed selected= in any layer")
        inside("[0, 1)", dropped=dropped)
        self.selected, self.reserved = tuple(selected), tuple(reserved)
        self.connections, self.dropped, self.isolate = tuple(connections), dropped, isolate
        self._layers: tuple[Layer, ...] = ()
        self._picked: list[Tensor] = []  # per hidden layer (S, width): picked by this task
        self._taken: list[Tensor] = []  # the same: reserved by an earlier one
        self._initial = torch.zeros(0, 0)  # (S, P): what a connection starts from
        self._importance = torch.zeros(0, 0)  # (S, P): of connections
        self._neurons: list[Tensor] = []  # per layer (S, inputs): of what it receives
        self._labels: list[tuple[int, ...] | None] = []
        self._heads: list[Tensor] = []  # per finished task (S, size of the last layer)

    # ---- the moments ----------------------------------------------------------------------------

    def expect(self, population: Population, tasks: Sequence[Task]) -> None:
        _layers_of(population, self.connections)
        self._labels = [task.labels for task in tasks]

    def before_task(self, population: Population, task: int, samples: Samples) -> None:
        super().before_task(population, task, samples)
        self._layers = _layers_of(population, self.connections)
        if task == 0:
            widths = [layer.outputs for layer in self._layers[:-1]]
            self._taken = [self._none(population, width) for width in widths]
            self._initial = _glorot(population, self._layers)
            population.parameters.zero_()  # the network starts without connections
        self._importance = torch.zeros_like(population.parameters)
        self._neurons = [self._importance.new_zeros(len(self.owner), layer.inputs)
                         for layer in self._layers]  # fmt: skip
        owner = self.owner.clone()
        for where in self._layers[-1].slices:
            owner[:, where] = 0
            population.parameters[:, where] = 0.0
        self._picked = [torch.zeros_like(taken) for taken in self._taken]
        for s in range(population.size):
            generator = derived_generator(population.seeds[s], "spacenet", task)
            self._pick(s, task, generator)
            self._lay(population, s, owner, generator)
        self.own_(population, owner)

    def after_step(self, population: Population, step: Step) -> None:
        moved = population.gradients if population.velocity is None else population.velocity
        self._importance.addcmul_(moved.abs(), population.gradients.abs(), value=step.lr)
        tables = [layer.weight_of(self._importance) for layer in self._layers]
        self._neurons[0] += tables[0].sum(1)
        for received, table in zip(self._neurons[1:], tables, strict=False):
            received += table.sum(2)
        if step.ends_epoch and step.epoch + 1 < step.epochs:
            owner = self.owner.clone()
            for s in range(population.size):
                for number in range(len(self._layers) - 1):  # the last layer stays
                    self._rewire(population, s, number, owner)
            self.own_(population, owner)

    def after_task(self, population: Population, task: int, samples: Samples) -> None:
        super().after_task(population, task, samples)
        for hidden, reserved in enumerate(self.reserved):
            score = self._neurons[hidden + 1].masked_fill(~self._picked[hidden], -1.0)
            best = score.topk(reserved, dim=1).indices
            self._taken[hidden] = self._taken[hidden].scatter(1, best, True)
        head = [population.parameters[:, where] for where in self._layers[-1].slices]
        self._heads.append(torch.cat(head, dim=1))
        counts = [taken.sum(1).tolist() for taken in self._taken]
        self.notes[-1]["reserved"] = [list(of_run) for of_run in zip(*counts, strict=True)]

    def weights_for(self, population: Population, task: int) -> Tensor:
        if self.isolate:
            weights = super().weights_for(population, task)
        else:
            weights = population.parameters.clone()
        if task < len(self._heads):
            start = 0
            for where in self._layers[-1].slices:
                size = where.stop - where.start
                weights[:, where] = self._heads[task][:, start : start + size]
                start += size
        return weights

    # ---- one run --------------------------------------------------------------------------------

    def _pick(self, s: int, task: int, generator: torch.Generator) -> None:
        for hidden, wanted in enumerate(self.selected):
            free = (~self._taken[hidden][s]).nonzero().flatten()
            if len(free) < wanted:
                raise ValueError(
                    f"task {task} wants selected={wanted} neurons of hidden layer {hidden}, but "
                    f"only {len(free)} are not reserved: select or reserve fewer, or widen it"
                )
            order = torch.randperm(len(free), generator=generator).to(free.device)
            self._picked[hidden][s, free[order[:wanted]]] = True

    def _allowed(self, s: int, number: int) -> Tensor:
        """Where layer ``number`` may have connections of this task, ``(outputs, inputs)``."""
        layer, last = self._layers[number], len(self._layers) - 1
        everything = torch.ones(1, dtype=torch.bool, device=self.owner.device)
        sources = self._picked[number - 1][s] if number > 0 else everything.expand(layer.inputs)
        if number < last:
            targets = self._picked[number][s]
        else:
            targets = everything.expand(layer.outputs).clone()
            own = self._labels[self.task] if self._labels else None
            if own is not None:  # one head for all tasks: the others' classes are not this one's
                targets.fill_(False)[list(own)] = True
        return targets[:, None] & sources[None, :]

    def _lay(
        self, population: Population, s: int, owner: Tensor, generator: torch.Generator
    ) -> None:
        for number, (layer, count) in enumerate(zip(self._layers, self.connections, strict=True)):
            mine = layer.weight_of(owner[s]).view(-1)
            places = ((mine == 0) & self._allowed(s, number).flatten()).nonzero().flatten()
            if len(places) < count:
                raise ValueError(
                    f"layer {number} has {len(places)} free places between the picked neurons, "
                    f"fewer than connections={count}: ask for fewer, or select more neurons"
                )
            order = torch.randperm(len(places), generator=generator).to(places.device)
            chosen = places[order[:count]]
            mine[chosen] = self.task + 1
            drawn = layer.weight_of(self._initial[s]).view(-1)[chosen]
            layer.weight_of(population.parameters[s]).view(-1)[chosen] = drawn
            receivers = self._allowed(s, number).any(1)
            bias = layer.bias_of(owner[s])
            if bias is None:
                continue
            if self.isolate or number == len(self._layers) - 1:
                bias[(bias == 0) & receivers] = self.task + 1
            else:
                bias[~self._taken[number][s]] = self.task + 1

    def _rewire(self, population: Population, s: int, number: int, owner: Tensor) -> None:
        layer = self._layers[number]
        mine = layer.weight_of(owner[s]).view(-1)
        importance = layer.weight_of(self._importance[s]).view(-1)
        present = mine == self.task + 1
        places = present.nonzero().flatten()
        # outer product: most important pairs first
        score = torch.outer(self._neurons[number + 1][s], self._neurons[number][s]).flatten()
        open_places = (self._allowed(s, number).flatten() & (mine == 0)).nonzero().flatten()
        count = min(int(self.dropped * len(places)), len(open_places))
        weakest = places[importance[places].argsort(stable=True)[:count]]
        order = score[open_places].argsort(descending=True, stable=True)
        grown = open_places[order[:count]]  # chosen before the drop: none comes straight back
        mine[weakest], mine[grown] = 0, self.task + 1
        layer.weight_of(population.parameters[s]).view(-1)[weakest] = 0.0

    # ---- checkpoints ----------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        tensors = {**super().state(), "importance": self._importance, "initial": self._initial}
        tensors |= {f"neurons/{i}": value for i, value in enumerate(self._neurons)}
        tensors |= {f"picked/{i}": value for i, value in enumerate(self._picked)}
        tensors |= {f"taken/{i}": value for i, value in enumerate(self._taken)}
        return tensors | {f"heads/{i}": value for i, value in enumerate(self._heads)}

    def load_state(self, population: Population, tensors: dict[str, Tensor]) -> None:
        super().load_state(population, tensors)
        self._layers = _layers_of(population, self.connections)
        here = {name: tensor.to(population.device) for name, tensor in tensors.items()}
        self._importance, self._initial = here["importance"], here["initial"]
        self._picked, self._taken = series(here, "picked"), series(here, "taken")
        self._heads, self._neurons = series(here, "heads"), series(here, "neurons")

    @staticmethod
    def _none(population: Population, width: int) -> Tensor:
        return torch.zeros(population.size, width, dtype=torch.bool, device=population.device)


def _glorot(population: Population, layers: Sequence[Layer]) -> Tensor:
    """Glorot's uniform numbers for every weight of every run, ``(S, P)``; biases are zero."""
    values = torch.zeros_like(population.parameters)
    for s, seed in enumerate(population.seeds):
        generator = derived_generator(seed, "spacenet weights")
        for layer in layers:
            bound = (6.0 / (layer.inputs + layer.outputs)) ** 0.5
            unit = torch.rand(layer.outputs, layer.inputs, generator=generator, dtype=torch.float64)
            layer.weight_of(values[s]).copy_(bound * (2.0 * unit - 1.0))
    return values


def _layers_of(population: Population, connections: Sequence[int]) -> tuple[Layer, ...]:
    form = plain_mlp(population.models[0])
    if form is None:
        raise ValueError(
            "SpaceNet allocates neurons of a plain MLP (curvlab.nets.mlp); this model is not one"
        )
    if len(form.layers) != len(connections):
        raise ValueError(
            f"connections= has {len(connections)} numbers for a model of {len(form.layers)} layers"
        )
    return form.layers
