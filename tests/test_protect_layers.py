"""A protected optimizer leaves every layer as it was on the inputs that it has seen."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, linear

from curvlab import LayerBases, layer_bases, protect
from curvlab.losses import sequence
from curvlab.nets import gpt, mlp
from tests.test_protect import Counting

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD, momentum, decay": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1),
    "Nesterov": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.05, max_iter=3),
}
# of the stored logits, relative to their norm; and of the new ones, to be sure that it learns
STILL = {torch.float64: 1e-12, torch.float32: 2e-5}
LEARNED = 1e-2


def small_gpt(dtype=torch.float64, seed=0, hidden=24):
    return gpt(17, context=8, hidden=hidden, depth=2, heads=2, seed=seed, dtype=dtype)


def texts(count, seed):
    """Tokens below 9 for the old texts, all of them for the new one."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(9 if seed == 0 else 17, (count, 8), generator=generator)


OLD, NEW = texts(1, 0), texts(6, 1)


def train(model, optimizer, steps=4, tokens=NEW):
    def closure():
        optimizer.zero_grad()
        loss = sequence(model(tokens), tokens)
        loss.backward()
        return loss

    for _ in range(steps):
        closure()
        optimizer.step(closure)


def moved(model, before, tokens):
    with torch.no_grad():
        return float((model(tokens) - before).norm() / before.norm())


def run(model, optimizer, bases, **options):
    """How far training moves the stored logits and the new ones, under protection."""
    with torch.no_grad():
        old, new = model(OLD), model(NEW)
    handle = protect(optimizer, bases, model, **options)
    train(model, optimizer)
    return moved(model, old, OLD), moved(model, new, NEW), handle


@pytest.mark.parametrize("dtype", STILL, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_stored_inputs_give_the_same_logits_whatever_optimizer_has_trained(name, dtype):
    """Layer by layer outputs stay, so the next layer's inputs do: on to the end of the network."""
    model = small_gpt(dtype)
    bases = layer_bases(model, OLD, energy=1.0)
    still, learned, handle = run(model, OPTIMIZERS[name](model.parameters()), bases)
    assert still <= STILL[dtype]
    assert learned > LEARNED
    assert handle.leak <= {torch.float64: 1e-14, torch.float32: 1e-6}[dtype]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_without_protection_the_same_steps_move_them(name):
    model = small_gpt()
    with torch.no_grad():
        before = model(OLD)
    train(model, OPTIMIZERS[name](model.parameters()))
    assert moved(model, before, OLD) > LEARNED


@pytest.mark.parametrize("lr", [1e-3, 30.0, 1e4])
def test_no_step_size_moves_the_output_of_a_layer_on_the_inputs_that_were_stored(lr):
    """Layer by layer: from one to the next, weights a thousand times as large amplify rounding."""
    model = small_gpt()
    bases = layer_bases(model, OLD, energy=1.0)
    stored, before = {}, copy.deepcopy(model)
    linear_layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    hooks = [
        layer.register_forward_pre_hook(
            lambda _, x, name=name: stored.update({name: x[0].detach()})
        )
        for name, layer in linear_layers.items()
    ]
    with torch.no_grad():
        model(OLD)
    for hook in hooks:
        hook.remove()
    optimizer = torch.optim.SGD(model.parameters(), lr)
    protect(optimizer, bases, model)
    train(model, optimizer, steps=2)
    with torch.no_grad():
        for name, layer in linear_layers.items():
            old = before.get_submodule(name)(stored[name])
            size = float(layer.weight.norm() * stored[name].norm())
            assert float((layer(stored[name]) - old).norm()) <= 1e-14 * size
    change = (model.head.weight - before.head.weight).detach()
    assert float(change.norm()) > 0.1 * lr


def test_muon_for_matrices_and_adamw_for_the_rest_are_protected_each():
    model = small_gpt()
    bases = layer_bases(model, OLD, energy=1.0)
    matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    muon = torch.optim.Muon(matrices, lr=1e-2)
    adam = torch.optim.AdamW(rest, lr=1e-2)
    with torch.no_grad():
        old, new = model(OLD), model(NEW)
    protect(muon, bases, model)
    protect(adam, bases, model)
    for _ in range(4):
        model.zero_grad()
        sequence(model(NEW), NEW).backward()
        muon.step()
        adam.step()
    assert moved(model, old, OLD) <= STILL[torch.float64]
    assert moved(model, new, NEW) > LEARNED


class Convolutional(nn.Module):
    """Convolutions in one and two dimensions, with and without biases, and a linear head."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 6, 3, padding="same")
        self.second = nn.Conv2d(6, 5, 3, stride=2, padding=1, padding_mode="reflect", bias=False)
        self.third = nn.Conv1d(5, 7, 3)
        self.head = nn.Linear(7, 3)

    def forward(self, images):
        hidden = torch.relu(self.second(torch.relu(self.first(images))))
        return self.head(torch.relu(self.third(hidden.flatten(2))).mean(2))


@pytest.mark.parametrize("channels_last", [False, True])
def test_convolutions_are_held_in_any_memory_format(channels_last):
    torch.manual_seed(0)
    model = Convolutional().double()
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    images = torch.randn(6, 2, 4, 4, dtype=torch.float64)
    targets = torch.arange(6) % 3
    bases = layer_bases(model, images[:1], energy=1.0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with torch.no_grad():
        old, new = model(images[:1]), model(images)
    protect(optimizer, bases, model)
    for _ in range(4):
        optimizer.zero_grad()
        cross_entropy(model(images), targets).backward()
        optimizer.step()
    with torch.no_grad():
        assert float((model(images[:1]) - old).norm()) <= 1e-12
        assert float((model(images) - new).norm()) > LEARNED


class Conv1D(nn.Module):
    """As transformers has it: a linear layer whose weight is stored (in, out)."""

    def __init__(self, outputs, inputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs, dtype=torch.float64) / 4)
        self.bias = nn.Parameter(torch.zeros(outputs, dtype=torch.float64))

    def forward(self, x):
        return linear(x, self.weight.T, self.bias)


Conv1D.__module__ = "transformers.pytorch_utils"


@pytest.mark.parametrize("side", ["inputs", "outputs", "both"])
def test_weights_stored_the_other_way_round_are_the_same_matrix(side):
    torch.manual_seed(0)
    turned, plain = Conv1D(5, 8), nn.Linear(8, 5).double()
    data = torch.randn(3, 8, dtype=torch.float64), torch.arange(3)
    with torch.no_grad():
        plain.weight.copy_(turned.weight.T)
        plain.bias.zero_()
    for layer in (turned, plain):
        model = nn.Sequential(layer)
        bases = layer_bases(model, data, side=side, loss=cross_entropy, energy=0.9)
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        protect(optimizer, bases, model)
        for _ in range(3):
            optimizer.zero_grad()
            (model(torch.ones(1, 8, dtype=torch.float64)) ** 2).sum().backward()
            optimizer.step()
    torch.testing.assert_close(turned.weight.T, plain.weight)
    torch.testing.assert_close(turned.bias, plain.bias)


class TiedGPT(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(17, 24, dtype=torch.float64)
        self.hidden = nn.Linear(24, 24, dtype=torch.float64)
        self.head = nn.Linear(24, 17, bias=False, dtype=torch.float64)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.hidden(self.tokens(tokens))))


def test_a_head_tied_to_its_embedding_is_held_as_both():
    model = TiedGPT()
    bases = layer_bases(model, OLD, energy=1.0)
    still, learned, _ = run(model, torch.optim.AdamW(model.parameters(), 1e-2), bases)
    assert still <= STILL[torch.float64]
    assert learned > LEARNED
    del bases.layers["head.weight"]  # as if only the embedding were known
    handle = protect(torch.optim.SGD(model.parameters(), 0.1), bases, model)
    assert handle.held == ("tokens.weight",)


@pytest.mark.parametrize("side", ["inputs", "outputs", "both"])
@pytest.mark.parametrize("energy", [0.5, 0.9, 0.999])
def test_the_change_of_a_layer_is_the_projected_change_to_rounding(side, energy):
    """Against the formula D - U'(U D V')V on dense float64 matrices, biases as last columns."""
    model = small_gpt()
    batch = NEW, NEW
    bases = layer_bases(model, batch, side=side, loss=sequence, energy=energy)
    plain, start = copy.deepcopy(model), copy.deepcopy(model)
    one = torch.optim.SGD(model.parameters(), 0.3)
    two = torch.optim.SGD(plain.parameters(), 0.3)
    protect(one, bases, model)
    train(model, one, steps=1)
    train(plain, two, steps=1)
    found, free, before = (dict(m.named_parameters()) for m in (model, plain, start))
    for name, layer in bases.layers.items():
        if layer.tokens is not None:
            continue

        def joined(parameters, name=name, layer=layer):
            last = [parameters[name.replace("weight", "bias")].unsqueeze(1)] if layer.bias else []
            return torch.cat([parameters[name].flatten(1), *last], 1).detach()

        change, wanted = joined(found) - joined(before), joined(free) - joined(before)
        inside = wanted
        if layer.into is not None:
            inside = inside @ layer.into.rows().T @ layer.into.rows()
        if layer.back is not None:
            inside = layer.back.rows().T @ layer.back.rows() @ inside
        torch.testing.assert_close(change, wanted - inside, rtol=1e-9, atol=1e-13)


def test_what_no_basis_covers_is_held_unless_it_is_named():
    model = small_gpt()
    bases = layer_bases(model, OLD, energy=0.9)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.5)
    handle = protect(optimizer, bases, model, free="*norm1*")
    assert set(handle.free) == {n for n in before if "norm1" in n}
    assert {n for n in before if "norm2" in n} <= set(handle.held)
    train(model, optimizer)
    for name, p in model.named_parameters():
        same = torch.equal(p, before[name])
        assert same == (name in handle.held), name
    unseen = [t for t in range(17) if t not in OLD]
    tokens = model.tokens.weight
    assert torch.equal(tokens[OLD.flatten()], before["tokens.weight"][OLD.flatten()])
    assert not torch.equal(tokens[unseen], before["tokens.weight"][unseen])


def test_bases_that_grow_count_from_the_next_step_on():
    model = small_gpt()
    bases = layer_bases(model, OLD, energy=1.0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    protect(optimizer, bases, model)
    train(model, optimizer)
    later = texts(1, 5)
    bases.extend(model, later, energy=1.0)
    with torch.no_grad():
        old, second = model(OLD), model(later)
    train(model, optimizer)
    assert moved(model, old, OLD) <= STILL[torch.float64]
    assert moved(model, second, later) <= STILL[torch.float64]


def test_weights_loaded_between_steps_are_taken_as_they_are():
    model, other = small_gpt(), small_gpt(seed=5)
    bases = layer_bases(model, OLD, energy=1.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    protect(optimizer, bases, model)
    train(model, optimizer)
    model.load_state_dict(other.state_dict())
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-13)


def test_float32_errors_do_not_add_up_over_a_thousand_steps():
    model = mlp((12, 10, 3), seed=0)
    bases = layer_bases(model, torch.randn(6, 12, generator=torch.Generator().manual_seed(1)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    handle = protect(optimizer, bases, model)
    inputs = torch.randn(20, 12, generator=torch.Generator().manual_seed(2))
    for step in range(1000):
        optimizer.zero_grad()
        cross_entropy(model(inputs), torch.arange(20) % 3).backward()
        optimizer.step()
        if step == 0:
            first = handle.leak
    assert first <= 1e-6
    assert handle.leak <= 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_weights_follow_a_float32_copy_whose_leak_does_not_add_up(dtype):
    """Stated: 1e-3 of a rounding unit after a thousand steps, and the model one rounding off."""
    model = mlp((12, 10, 3), seed=0).to(dtype)
    stored = torch.randn(4, 12, generator=torch.Generator().manual_seed(1)).to(dtype)
    bases = layer_bases(model, stored, energy=1.0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-4)
    handle = protect(optimizer, bases, model)
    before = {name: p.detach().float().clone() for name, p in model.named_parameters()}
    inputs = torch.randn(20, 12, generator=torch.Generator().manual_seed(2)).to(dtype)
    for _ in range(1000):
        optimizer.zero_grad()
        cross_entropy(model(inputs), torch.arange(20) % 3).backward()
        optimizer.step()
    unit = torch.finfo(dtype).eps
    assert handle.leak <= 1e-3 * unit
    name = next(iter(before))  # the first layer, whose inputs do not depend on any weight
    now = {n: p.detach().float() for n, p in model.named_parameters()}
    weight, last = now[name], name.replace("weight", "bias")
    change = torch.cat([weight - before[name], (now[last] - before[last])[:, None]], 1)
    rows = bases.layers[name].into.rows()
    assert float((change @ rows.T).norm()) <= unit * float(weight.norm())
    assert float(change.norm()) > 20 * unit * float(weight.norm()), "it still learns"


def test_a_step_takes_the_same_operations_for_any_number_of_layers_and_waits_for_nothing():
    extra = {}
    for depth in (2, 40):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(depth)))
        data = torch.randn(1, 5)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
        optimizer.step()
        with Counting() as alone:
            optimizer.step()
        protect(optimizer, layer_bases(model, data, energy=1.0), model)
        optimizer.step()
        with Counting() as protected:
            optimizer.step()
        views = ("aten.view", "aten.unbind", "aten.squeeze", "aten.transpose", "aten.alias")
        extra[depth] = {
            name: count
            for name, count in (protected.calls - alone.calls).items()
            if not name.startswith(views)
        }
        waits = ("_local_scalar_dense", "item", "nonzero", "_to_copy")
        assert not [name for name in extra[depth] if any(word in name for word in waits)]
    assert extra[2] == extra[40]
    assert sum(extra[40].values()) <= 16


def test_removed_protection_gives_the_optimizer_back():
    model, other = small_gpt(), small_gpt()
    bases = layer_bases(model, OLD)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    protect(optimizer, bases, model).remove()
    train(model, optimizer)
    train(other, torch.optim.AdamW(other.parameters(), 1e-2))
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_bad_arguments_are_refused_with_the_cure():
    model = small_gpt()
    bases = layer_bases(model, OLD)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(TypeError, match="pass the model as well"):
        protect(optimizer, bases)
    with pytest.raises(ValueError, match="select= goes with a basis"):
        protect(optimizer, bases, model, select="head.*")
    with pytest.raises(ValueError, match="trains no parameter of this model"):
        protect(optimizer, bases, small_gpt())
    other = mlp((4, 3, 2), seed=0)
    with pytest.raises(ValueError, match=r"no layer 'blocks.0.attend.weight'.*nor 10 others"):
        protect(torch.optim.SGD(other.parameters(), 0.1), bases, other)
    wider = small_gpt(hidden=26)
    with pytest.raises(ValueError, match="is 78 x 26 here and 72 x 24 in the bases"):
        protect(torch.optim.SGD(wider.parameters(), 0.1), bases, wider)
    with pytest.raises(TypeError, match="Basis or layer bases; got dict"):
        protect(optimizer, bases.layers, model)
    assert LayerBases("inputs").bytes == 0


# Adapters


class Adapted(nn.Module):
    """A hand-written adapter around a frozen layer."""

    def __init__(self, layer, rank=3):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(rank, layer.in_features, dtype=torch.float64))
        self.lora_B = nn.Parameter(torch.zeros(layer.out_features, rank, dtype=torch.float64))

    def forward(self, x):
        return self.layer(x) + 2.0 * linear(linear(x, self.lora_A), self.lora_B)


def adapt(model):
    torch.manual_seed(3)
    model.requires_grad_(False)
    for block in model.blocks:
        block.attend, block.widen = Adapted(block.attend), Adapted(block.widen)
    return model


@pytest.mark.parametrize("when", ["before", "after"])
def test_adapters_are_zero_on_stored_inputs_from_the_start_and_stay_so(when):
    model = small_gpt()
    bases = layer_bases(model, OLD, energy=1.0)
    adapt(model)
    if when == "after":
        bases = layer_bases(model, OLD, energy=1.0)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(trained) == 8
    still, learned, handle = run(model, torch.optim.AdamW(trained, 1e-2), bases)
    assert still <= STILL[torch.float64]
    assert learned > LEARNED
    assert handle.held == ()
    rows = bases.layers[f"blocks.0.attend.{'layer.' if when == 'after' else ''}weight"].into.rows()
    adapter = model.blocks[0].attend
    assert float((adapter.lora_A @ rows[:, :24].T).norm()) <= 1e-12 * float(adapter.lora_A.norm())


def test_plain_adapters_move_them():
    model = adapt(small_gpt())
    with torch.no_grad():
        before = model(OLD)
    trained = [p for p in model.parameters() if p.requires_grad]
    train(model, torch.optim.AdamW(trained, 1e-2))
    assert moved(model, before, OLD) > 1e-3


def test_adapters_under_output_bases_are_held_by_b():
    model = small_gpt()
    bases = layer_bases(model, (OLD, OLD), side="outputs", loss=sequence, energy=0.9)
    adapt(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    _, learned, _ = run(model, torch.optim.AdamW(trained, 1e-2), bases)
    assert learned > 1e-3
    rows = bases.layers["blocks.0.attend.weight"].back.rows()
    adapter = model.blocks[0].attend
    assert float((rows @ adapter.lora_B).norm()) <= 1e-12 * float(adapter.lora_B.norm())


def test_adapters_that_cannot_be_protected_are_refused():
    model = small_gpt()
    both = layer_bases(model, (OLD, OLD), side="both", loss=sequence)
    bases = layer_bases(model, OLD, energy=0.9)
    adapt(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    with pytest.raises(ValueError, match=r"'blocks\.0\.attend' is a low-rank adapter"):
        protect(optimizer, both, model)
    train(model, optimizer)
    with pytest.raises(ValueError, match="trained already and acts on what is to be protected"):
        protect(optimizer, bases, model)
    model.blocks[0].attend.lora_magnitude_vector = nn.ParameterDict({"one": torch.ones(2)})
    with pytest.raises(ValueError, match=r"DoRA.*use_dora=False"):
        protect(optimizer, bases, model)


def test_an_interrupted_adapter_goes_on_where_it_was():
    model = small_gpt()
    bases = layer_bases(model, OLD, energy=1.0)
    adapt(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    run(model, torch.optim.AdamW(trained, 1e-2), bases)
    assert run(model, torch.optim.AdamW(trained, 1e-2), bases)[0] <= STILL[torch.float64]


def test_adapters_of_peft_are_found():
    peft = pytest.importorskip("peft")
    model = small_gpt()
    bases = layer_bases(model, OLD, energy=1.0)
    config = peft.LoraConfig(r=3, target_modules=["attend", "widen"], init_lora_weights=True)
    wrapped = peft.get_peft_model(model, config)
    trained = [p for p in wrapped.parameters() if p.requires_grad]
    still, learned, handle = run(wrapped, torch.optim.AdamW(trained, 1e-2), bases)
    assert still <= 1e-6  # PEFT keeps adapters in float32
    assert learned > LEARNED
    assert handle.held == ()
