"""Layer bases hold what flowed through a model: one pass, orthonormal, extended, saved, merged."""

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import curvlab
from curvlab import LayerBases, StorageError, layer_bases
from curvlab.layerwise import layers_of
from curvlab.layerwise.layers import input_rows, output_rows
from curvlab.layerwise.spans import Triangle, extend_to_share
from curvlab.losses import sequence
from curvlab.nets import gpt
from curvlab.storage import load_tensors, save_tensors

LIMIT = {torch.float32: 1e-6, torch.float64: 1e-13}  # of |V V' - I|


def numbers(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def small_gpt(dtype=torch.float32, seed=0):
    return gpt(11, context=7, hidden=12, depth=2, heads=2, seed=seed, dtype=dtype)


def texts(count=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(9, (count, 7), generator=generator)
    return tokens, tokens


class Recorded:
    """What every linear layer of a model receives and what comes back, seen by plain hooks."""

    def __init__(self, model, loss):
        self.inputs, self.gradients = {}, {}
        handles = []
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                handles.append(module.register_forward_hook(self.keep(name)))
        loss().backward()
        for handle in handles:
            handle.remove()

    def keep(self, name):
        def hook(_module, arguments, output):
            self.inputs[f"{name}.weight"] = arguments[0].detach().flatten(0, -2)
            output.register_hook(
                lambda g: self.gradients.update({f"{name}.weight": g.detach().flatten(0, -2)})
            )

        return hook


def share(rows, data):
    return float((data @ rows.T).square().sum() / data.square().sum())


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize("energy", [0.5, 0.9, 0.999])
def test_rows_are_orthonormal_and_the_fewest_that_hold_the_energy(energy, dtype):
    model = small_gpt(dtype)
    batch = texts(5)
    bases = layer_bases(model, batch, energy=energy, side="both", loss=sequence)
    truth = Recorded(model, lambda: sequence(model(batch[0]), batch[1]))
    assert set(truth.inputs) <= set(bases.layers)
    for name, inputs in truth.inputs.items():
        layer = bases.layers[name]
        ones = inputs.new_ones(len(inputs), 1)
        arrived = torch.cat([inputs, ones], 1) if layer.bias else inputs
        for data, one in ((arrived, layer.into), (truth.gradients[name], layer.back)):
            rows, data = one.rows().double(), data.double()
            assert one.dtype == dtype
            assert float((rows @ rows.T - torch.eye(len(rows))).abs().max()) <= LIMIT[dtype]
            # the product of both sides is to hold the energy, so each holds its square root
            assert share(rows[:-1], data) < energy**0.5 <= share(rows, data) + 1e-6


def test_the_result_does_not_depend_on_how_data_are_cut_or_whether_they_can_be_read_twice():
    model = small_gpt(torch.float64)
    tokens, labels = texts(60)
    whole = layer_bases(model, (tokens, labels), energy=0.9)
    pieces = [(tokens[i : i + 7], labels[i : i + 7]) for i in range(0, 60, 7)]
    for data in (pieces, iter(pieces), (piece for piece in pieces), tokens):
        other = layer_bases(model, data, energy=0.9)
        for name, layer in whole.layers.items():
            if layer.into is not None:
                one, two = layer.into.rows(), other.layers[name].into.rows()
                assert one.shape == two.shape
                assert float(torch.linalg.svdvals(one @ two.T).min()) >= 1 - 1e-10


def test_a_pass_holds_a_triangle_of_each_layer_however_many_rows_there_are():
    triangle, held = Triangle(5), []
    rows = numbers(403, 5, dtype=torch.float64)
    for piece in rows.split(13):
        triangle.add(piece)
        held.append(sum(len(part) for part in triangle._waiting))
    assert max(held) <= 5 + 5 + 13
    found = triangle.whole()
    assert found.shape == (5, 5)
    torch.testing.assert_close(found.T @ found, rows.T @ rows)


def test_the_model_is_as_it_was_gradients_and_modes_included():
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.ReLU(inplace=True), nn.Linear(6, 2))
    model[1].eval()
    batch = numbers(9, 4), torch.arange(9) % 2
    state = {name: value.clone() for name, value in model.state_dict().items()}
    first = layer_bases(model, batch, side="both", loss=cross_entropy)
    assert model.training
    assert not model[1].training
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    model.requires_grad_(False)
    again = layer_bases(model, batch, side="both", loss=cross_entropy)
    for name, layer in first.layers.items():  # a frozen model sends the same gradients back
        assert torch.equal(layer.back.rows(), again.layers[name].back.rows())


CONVOLUTIONS = {
    "stride, padding, dilation": nn.Conv2d(3, 4, (3, 2), stride=2, padding=(1, 2), dilation=2),
    "same": nn.Conv2d(3, 4, 3, padding="same", dilation=2),
    "reflected": nn.Conv2d(3, 4, 3, padding=2, padding_mode="reflect", bias=False),
    "circular": nn.Conv2d(3, 4, (1, 3), padding=(0, 1), padding_mode="circular"),
    "one dimension": nn.Conv1d(3, 4, 3, stride=2, padding=1),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_is_its_weight_times_the_rows(name):
    layer = CONVOLUTIONS[name].double()
    shape = (2, 3, 7) if isinstance(layer, nn.Conv1d) else (2, 3, 7, 6)
    images = numbers(*shape, dtype=torch.float64)
    rows = input_rows(layer, images, layer.bias is not None)
    weight = layer.weight.flatten(1)
    if layer.bias is not None:
        weight = torch.cat([weight, layer.bias.unsqueeze(1)], 1)
    torch.testing.assert_close(output_rows(layer, layer(images)), (rows @ weight.T).detach())


def test_later_tasks_extend_what_earlier_ones_hold():
    model = small_gpt(torch.float64)
    bases = layer_bases(model, texts(1, seed=0), energy=1.0, task="first")
    before = {name: layer for name, layer in bases.layers.items() if layer.into is not None}
    bases.extend(model, texts(1, seed=1), energy=1.0, task="second")
    grown = 0
    for name, old in before.items():
        new = bases.layers[name].into
        rows = new.rows()
        assert torch.equal(rows[: len(old.into)], old.into.rows())
        assert float((rows @ rows.T - torch.eye(len(new))).abs().max()) <= 1e-13
        grown += len(new) - len(old.into)
        assert [s.task for s in new.segments] == ["first", "second"][: len(new.segments)]
        assert len(new.values) == len(new)
    assert grown > 0
    sizes = {name: len(layer.into) for name, layer in bases.layers.items() if layer.into}
    bases.extend(model, texts(1, seed=0), energy=1.0, task="again")
    assert sizes == {name: len(layer.into) for name, layer in bases.layers.items() if layer.into}


def test_rows_stored_in_float32_do_not_see_their_own_rounding_as_a_new_direction():
    model = small_gpt()
    bases = layer_bases(model, texts(1), energy=1.0)
    sizes = {name: len(layer.into) for name, layer in bases.layers.items() if layer.into}
    bases.extend(model, texts(1), energy=1.0)
    assert sizes == {name: len(layer.into) for name, layer in bases.layers.items() if layer.into}


def test_embeddings_know_their_tokens_and_layers_never_called_are_not_there():
    model = small_gpt()
    model.unused = nn.Linear(3, 3)
    tokens, _ = texts(2)
    bases = layer_bases(model, tokens)
    assert bases.layers["tokens.weight"].tokens.nonzero().flatten().tolist() == sorted(
        set(tokens.flatten().tolist())
    )
    assert "unused.weight" not in bases.layers
    assert not any("norm" in name for name in bases.layers)
    assert "tokens 7/7" in repr(bases), "positions"


def test_a_tied_weight_is_one_layer_that_sees_all_its_inputs():
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    model = nn.Sequential(first, nn.Tanh(), second)
    (layer,) = layers_of(model)
    assert layer.modules == ("0", "2")
    data = numbers(1, 4)
    assert len(layer_bases(model, data, energy=1.0).layers["0.weight"].into) == 2
    biased = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    biased[1].weight = biased[0].weight
    with pytest.raises(ValueError, match="'0' and '1' share a weight but not their biases"):
        layers_of(biased)


def test_select_takes_the_layers_named():
    bases = layer_bases(small_gpt(), texts(), select="blocks.1.*")
    assert all(name.startswith("blocks.1.") for name in bases.layers)
    assert len(bases) == 4


# Files


@pytest.mark.parametrize("side", ["inputs", "outputs", "both"])
def test_what_is_saved_comes_back_to_the_bit(tmp_path, side):
    model = small_gpt()
    bases = layer_bases(model, texts(), side=side, loss=sequence, energy=0.9, task="one")
    bases.extend(model, texts(seed=4), loss=sequence, energy=0.95, task="two")
    found = LayerBases.load(bases.save(tmp_path / "bases.safetensors"))
    assert found.side == side
    assert repr(found) == repr(bases)
    for name, layer in bases.layers.items():
        other = found.layers[name]
        for part in ("into", "back"):
            one, two = getattr(layer, part), getattr(other, part)
            assert (one is None) == (two is None)
            if one is not None:
                assert torch.equal(one.rows(), two.rows())
                assert one.segments == two.segments
        assert (layer.tokens is None) == (other.tokens is None)
        assert layer.tokens is None or torch.equal(layer.tokens, other.tokens)


def test_merged_bases_span_both_and_know_their_tasks():
    model = small_gpt(torch.float64)
    one = layer_bases(model, texts(1, seed=0), energy=0.99, task="one")
    two = layer_bases(model, texts(1, seed=1), energy=0.99, task="two")
    parts = {n: (one.layers[n].into, two.layers[n].into) for n in one.layers}
    one.merge(two)
    for name, pair in parts.items():
        if pair[0] is None:
            continue
        merged = one.layers[name].into
        for part in pair:
            rows, whole = part.rows(), merged.rows()
            torch.testing.assert_close(rows @ whole.T @ whole, rows)
        assert len(merged) <= len(pair[0]) + len(pair[1])
        assert {s.task for s in merged.segments} <= {"one", "two"}
        energy = float(merged.values.sum())
        assert energy >= float(pair[0].values.sum()) - 1e-9
    changes = one.changes
    one.merge(two)
    assert one.changes > changes
    assert all(len(a.into) <= a.into.n for a in one.layers.values() if a.into is not None)


def test_bases_of_other_models_or_sides_are_not_merged():
    bases = layer_bases(nn.Sequential(nn.Linear(4, 3)), numbers(5, 4))
    other = layer_bases(nn.Sequential(nn.Linear(4, 2)), numbers(5, 4))
    with pytest.raises(ValueError, match=r"'0\.weight' is 3 x 4 here and 2 x 4 there"):
        bases.merge(other)
    with pytest.raises(ValueError, match="side='outputs' into side='inputs'"):
        bases.merge(LayerBases("outputs"))
    with pytest.raises(ValueError, match="into themselves"):
        bases.merge(bases)


def rewritten(path, change):
    """The file with its manifest changed and its checksum made to fit again."""
    tensors, manifest = load_tensors(path, "layer bases")
    change(manifest, tensors)
    return save_tensors(path, "layer bases", tensors, manifest)


LIES = {
    "side": lambda m, _: m.update(side="left"),
    "no layers": lambda m, _: m.update(layers=7),
    "size": lambda m, _: m["layers"][0].update(inputs=5),
    "bool for a size": lambda m, _: m["layers"][0].update(outputs=True),
    "name": lambda m, _: m["layers"][0].update(name=3),
    "two alike": lambda m, _: m["layers"].append(m["layers"][0]),
    "segments": lambda m, _: m["layers"][0]["into"][0].update(stop=1),
    "energies": lambda m, _: m["layers"][0]["into"][0].update(values=[]),
    "NaN": lambda _, t: t["0/into"].fill_(float("nan")),
    "not orthonormal": lambda _, t: t["0/into"].mul_(1.01),
    "dtype": lambda _, t: t.update({"0/into": t["0/into"].half()}),
    "another tensor": lambda _, t: t.update({"9/into": torch.zeros(2, 2)}),
    "missing": lambda _, t: t.pop("0/into"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_file_that_lies_is_refused_though_its_checksum_fits(tmp_path, lie):
    bases = layer_bases(nn.Sequential(nn.Linear(4, 3)), numbers(9, 4), energy=0.9)
    path = rewritten(bases.save(tmp_path / "bases"), LIES[lie])
    with pytest.raises(StorageError, match="does not describe layer bases"):
        LayerBases.load(path)


def test_damaged_files_and_files_of_another_kind_are_refused(tmp_path):
    path = layer_bases(nn.Sequential(nn.Linear(4, 3)), numbers(9, 4)).save(tmp_path / "bases")
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 1
    (tmp_path / "damaged").write_bytes(raw)
    with pytest.raises(StorageError, match="checksum"):
        LayerBases.load(tmp_path / "damaged")
    other = curvlab.Basis(4, 2).save(tmp_path / "basis")
    with pytest.raises(StorageError, match="holds a basis, not a layer bases"):
        LayerBases.load(other)


# Refusals


def test_bad_arguments_are_refused_with_the_cure():
    model = nn.Sequential(nn.Linear(4, 3))
    with pytest.raises(ValueError, match="'inputs', 'outputs' or 'both'; got 'input'"):
        layer_bases(model, numbers(5, 4), side="input")
    with pytest.raises(ValueError, match=r"energy= must lie in \[0, 1\]; got 99"):
        layer_bases(model, numbers(5, 4), energy=99)
    with pytest.raises(ValueError, match="none of these has its weight"):
        layer_bases(nn.LayerNorm(4), numbers(5, 4))
    with pytest.raises(TypeError, match="output gradients need a loss: pass loss="):
        layer_bases(model, (numbers(5, 4), numbers(5, 3)), side="outputs")
    with pytest.raises(ValueError, match=r"inputs of layer '0' hold NaN"):
        layer_bases(model, numbers(5, 4) / 0.0)
    wide = nn.Sequential(nn.Linear(2, 16_385))
    with pytest.raises(ValueError, match=r"'0' has 16,385 outputs.*side='inputs'"):
        layer_bases(wide, (numbers(5, 2), numbers(5, 16_385)), side="outputs", loss=mse_loss)
    layer_bases(wide, numbers(5, 2))
    bases = layer_bases(model, numbers(5, 4))
    with pytest.raises(ValueError, match=r"'0\.weight' was 3 x 4 and is now 3 x 5"):
        bases.extend(nn.Sequential(nn.Linear(5, 3)), numbers(5, 5))


def test_an_energy_of_zero_holds_nothing_and_of_one_every_input():
    model = nn.Sequential(nn.Linear(6, 3)).double()
    data = numbers(4, 6, dtype=torch.float64)
    assert len(layer_bases(model, data, energy=0.0).layers["0.weight"].into) == 0
    rows = layer_bases(model, data, energy=1.0).layers["0.weight"].into.rows()
    assert len(rows) == 4
    stored = torch.cat([data, torch.ones(4, 1)], 1)
    torch.testing.assert_close(stored @ rows.T @ rows, stored)
    empty = curvlab.Basis(7, 7, dtype=torch.float64)
    extend_to_share(empty, torch.zeros(3, 7, dtype=torch.float64), 0.99)
    assert len(empty) == 0


@pytest.mark.parametrize("energy", ["a", None, True, math.nan, -0.1, 1.1])
def test_an_energy_that_is_no_share_is_refused_by_name(energy):
    with pytest.raises((TypeError, ValueError), match=r"^energy= (is a number|must lie)"):
        layer_bases(nn.Linear(3, 2), torch.randn(5, 3), energy=energy)
