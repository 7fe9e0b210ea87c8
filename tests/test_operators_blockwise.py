"""Products with blocks computed again are exact, and leave the model as it was."""

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import curvlab
from curvlab.operators.products.blocks import find_blocks
from tests.block_models import MODELS, language, off, products

KINDS = (curvlab.Hessian, curvlab.GaussNewton, curvlab.FunctionalHessian, curvlab.EmpiricalFisher)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", MODELS)
def test_products_in_blocks_are_those_of_the_whole_graph(name: str, kind: Any) -> None:
    model, batch = MODELS[name]()
    assert len(find_blocks(model)) >= 2
    truth = products(kind, model, batch, engine="rebuilt")
    for chunk in (None, 2):
        assert off(products(kind, model, batch, engine="blockwise", chunk=chunk), truth) < 1e-12


def test_graphs_that_are_not_kept_give_the_same_products() -> None:
    model, batch = language()
    truth = products(curvlab.Hessian, model, batch)
    operator = curvlab.Hessian(
        model, cross_entropy, batch, dtype=torch.float64, engine="blockwise", chunk=1
    )
    operator._keep, operator._kept = 1, {}
    generator = torch.Generator().manual_seed(6)
    block = torch.randn(3, operator.n, generator=generator, dtype=torch.float64)
    assert off(operator @ block, truth) < 1e-12


def test_dropout_has_the_same_frozen_masks_when_a_block_runs_again() -> None:
    model, batch = language()
    model.train()
    options = {"mode": "frozen-masks"}
    truth = products(curvlab.Hessian, model, batch, engine="rebuilt", **options)
    assert (
        off(products(curvlab.Hessian, model, batch, engine="blockwise", **options), truth) < 1e-12
    )
    assert off(truth, products(curvlab.Hessian, model, batch, mode="eval")) > 1e-3


def test_the_gradient_and_selected_parameters_are_exact_too() -> None:
    model, batch = language()
    for select in (None, "layers.1.*", "embed*"):
        options = {"dtype": torch.float64, "select": select}
        plain = curvlab.Hessian(model, cross_entropy, batch, engine="rebuilt", **options)
        blocks = curvlab.Hessian(model, cross_entropy, batch, engine="blockwise", **options)
        assert off(blocks.gradient(), plain.gradient()) < 1e-13
        vector = torch.randn(plain.n, dtype=torch.float64)
        assert off(blocks @ vector, plain @ vector) < 1e-12


def test_the_model_is_left_as_it_was() -> None:
    model, batch = language()
    patched = model.layers[1].forward  # type: ignore[union-attr,index]
    model.layers[1].forward = lambda *a, **k: patched(*a, **k)  # type: ignore[union-attr,index]
    before = [dict(module.__dict__) for module in model.modules()]
    truth = products(curvlab.Hessian, model, batch, engine="rebuilt")
    assert off(products(curvlab.Hessian, model, batch, engine="blockwise"), truth) < 1e-12
    after = [dict(module.__dict__) for module in model.modules()]
    assert [set(one) for one in before] == [set(one) for one in after]
    assert all(
        one["forward"] is other["forward"]
        for one, other in zip(before, after, strict=True)
        if "forward" in one
    )


def test_a_boolean_mask_hides_keys_in_every_operator() -> None:
    torch.manual_seed(0)
    model, (tokens, targets) = language()
    model = model.double().eval()
    truth = cross_entropy(model(tokens), targets).item()
    operator = curvlab.Hessian(model, cross_entropy, (tokens, targets))
    assert abs(float(operator.loss) - truth) < 1e-12 * truth
