"""One order for all flat vectors: that of named_parameters, tied parameters once."""

import pytest
import torch
from torch import nn

from curvlab.parameters import (
    layout_of,
    load_parameter_vector,
    parameter_count,
    parameter_vector,
    select_parameters,
)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.body = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2, bias=False))
        self.head = nn.Linear(2, 2)
        self.head.weight = self.body[2].weight  # tied
        self.head.bias.requires_grad_(False)
        self.strided = nn.Parameter(torch.arange(6.0).reshape(2, 3).T)


NAMES = ["scale", "strided", "body.0.weight", "body.0.bias", "body.2.weight"]


def test_the_order_is_that_of_named_parameters_without_frozen_and_repeated_ones():
    model = Network()
    chosen = select_parameters(model)
    assert list(chosen) == NAMES
    assert parameter_count(model) == 1 + 6 + 6 + 2 + 4
    layout = layout_of(chosen)
    assert layout.offsets == (0, 1, 7, 13, 15)
    assert layout.n == 19


def test_flatten_and_unflatten_are_inverse_also_for_scalars_and_blocks():
    model = Network()
    layout = layout_of(select_parameters(model))
    vector = torch.arange(float(layout.n))
    pieces = layout.unflatten(vector)
    assert [piece.shape for piece in pieces] == list(layout.shapes)
    assert torch.equal(layout.flatten(pieces), vector)
    block = torch.randn(4, layout.n)
    assert [piece.shape[0] for piece in layout.unflatten(block)] == [4] * 5
    rows = [layout.flatten([piece[i] for piece in layout.unflatten(block)]) for i in range(4)]
    assert torch.equal(torch.stack(rows), block)
    with pytest.raises(ValueError, match="19 elements"):
        layout.unflatten(torch.zeros(18))


def test_none_is_zero_and_out_is_written_in_place():
    layout = layout_of(select_parameters(Network()))
    pieces = [None, torch.ones(3, 2), None, None, None]
    flat = layout.flatten(pieces)
    assert flat.sum() == 6
    out = torch.full((19,), float("nan"))
    assert layout.flatten(pieces, out=out) is out
    assert torch.equal(out, flat)
    assert layout.flatten([None] * 5, like=torch.zeros(1)).abs().sum() == 0
    with pytest.raises(ValueError, match="like="):
        layout.flatten([None] * 5)


def test_a_vector_read_and_written_is_the_parameters_in_logical_order():
    model = Network()
    vector = parameter_vector(model)
    assert torch.equal(vector[1:7], model.strided.detach().reshape(-1))
    load_parameter_vector(model, vector * 2)
    assert model.scale.item() == 4.0
    assert torch.equal(parameter_vector(model), vector * 2)
    assert not model.strided.is_contiguous()


def test_slices_and_layers_name_the_places():
    layout = layout_of(select_parameters(Network()))
    assert layout.slices()["body.0.bias"] == slice(13, 15)
    assert layout.layers() == {
        "": [slice(0, 1), slice(1, 7)],
        "body.0": [slice(7, 13), slice(13, 15)],
        "body.2": [slice(15, 19)],
    }


def test_a_layout_of_some_parameters_is_packed():
    layout = layout_of(select_parameters(Network()))
    some = layout.only(["body.0.bias", "body.2.weight"])
    assert (some.offsets, some.n) == ((0, 2), 6)
    assert layout.indices(["body.0.bias", "scale"]).tolist() == [13, 14, 0]


@pytest.mark.parametrize(
    ("select", "expected"),
    [
        ("body.*", NAMES[2:]),
        (["scale", "head.bias"], ["scale", "head.bias"]),  # frozen, but named
        (lambda name, p: p.dim() == 2 and name != "strided", ["body.0.weight", "body.2.weight"]),
        ("head.weight", ["body.2.weight"]),  # tied: found under its other name
        ("head.*", ["body.2.weight", "head.bias"]),
    ],
    ids=["pattern", "list", "predicate", "alias", "alias pattern"],
)
def test_parameters_are_selected_by_pattern_list_or_predicate(select, expected):
    assert list(select_parameters(Network(), select)) == expected


@pytest.mark.parametrize(
    ("select", "match"),
    [
        ("tail.*", "matches no parameter"),
        ([], "empty list"),
        (lambda name, p: name == p, "matched no parameter"),
    ],
    ids=["pattern", "empty", "predicate"],
)
def test_selecting_nothing_is_an_error(select, match):
    with pytest.raises(ValueError, match=match):
        select_parameters(Network(), select)


def test_models_without_usable_parameters_are_refused():
    with pytest.raises(ValueError, match="the model has none"):
        select_parameters(nn.ReLU())
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ValueError, match="every parameter is frozen"):
        select_parameters(frozen)
    assert list(select_parameters(frozen, "weight")) == ["weight"]
    model = nn.Module()
    model.wave = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(TypeError, match="complex64"):
        select_parameters(model)
