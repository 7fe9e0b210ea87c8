"""What the hand-written MLP products refuse to recognise: models, losses and data."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from curvlab.nets import mlp
from curvlab.operators.products import mlp as engine
from curvlab.parameters import select_parameters


def unusual_models():
    def tied():
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        model[2].weight = model[0].weight
        return model

    def twice():
        layer = nn.Linear(4, 4)
        return nn.Sequential(layer, nn.Tanh(), layer)

    def hooked():
        model = mlp((4, 4, 4))
        model[1].register_forward_hook(lambda _m, _i, out: 2 * out)
        return model

    def hooked_parameter():
        model = mlp((4, 4, 4))
        model[0].weight.register_hook(lambda g: 2 * g)
        return model

    def patched():
        model = mlp((4, 4, 4))
        model[1].forward = torch.sin
        return model

    def mixed():
        model = mlp((4, 4, 4))
        model[2].double()
        return model

    def parametrised():
        model = mlp((4, 4, 4))
        nn.utils.parametrizations.weight_norm(model[0])
        return model

    class Residual(nn.Sequential):
        def forward(self, x):
            return x + super().forward(x)

    class Called(nn.Sequential):
        def __call__(self, x):
            return 2 * super().__call__(x)

    class Owner(nn.Sequential):
        def __init__(self, *modules):
            super().__init__(*modules)
            self.scale = nn.Parameter(torch.ones(4))

    class OddParameter(nn.Parameter):
        pass

    def odd_parameters():
        model = mlp((4, 4, 4))
        for layer in (model[0], model[2]):
            layer.weight, layer.bias = OddParameter(layer.weight), OddParameter(layer.bias)
        return model

    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    return {
        "tied weights": tied(),
        "a layer used twice": twice(),
        "a forward hook": hooked(),
        "a parameter hook": hooked_parameter(),
        "a patched forward": patched(),
        "mixed dtypes": mixed(),
        "weight norm": parametrised(),
        "another forward": Residual(nn.Linear(4, 4)),
        "another call": Called(nn.Linear(4, 4)),
        "a parameter beside the layers": Owner(nn.Linear(4, 4)),
        "a parameter subclass": odd_parameters(),
        "a Linear subclass": nn.Sequential(Scaled(4, 4)),
        "dropout": nn.Sequential(nn.Linear(4, 4), nn.Dropout()),
        "a learned activation": nn.Sequential(nn.Linear(4, 4), nn.PReLU()),
        "a random activation": nn.Sequential(nn.Linear(4, 4), nn.RReLU()),
        "softmax": nn.Sequential(nn.Linear(4, 4), nn.Softmax(1)),
        "two activations": nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.ReLU()),
        "an activation first": nn.Sequential(nn.Tanh(), nn.Linear(4, 4)),
        "a partial flatten": nn.Sequential(nn.Flatten(2), nn.Linear(4, 4)),
        "a flatten inside": nn.Sequential(nn.Linear(4, 4), nn.Flatten(), nn.Linear(4, 4)),
        "a convolution": nn.Sequential(nn.Conv1d(1, 1, 1), nn.Flatten(), nn.Linear(4, 4)),
        "layer norm": nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)),
        "half precision": mlp((4, 4, 4), dtype=torch.bfloat16),
        "a module of the user's": nn.TransformerEncoderLayer(4, 1),
        "nothing to select from": nn.Sequential(nn.Tanh()),
    }


@pytest.mark.parametrize(("name", "model"), unusual_models().items())
def test_an_unusual_model_is_not_recognised(name, model):
    parameters = dict(model.named_parameters())
    assert engine.recognise(model, functional.cross_entropy, parameters) is None, name


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(label_smoothing=0.1),
        nn.CrossEntropyLoss(weight=torch.ones(3)),
        nn.CrossEntropyLoss(ignore_index=1),
        nn.CrossEntropyLoss(reduction="none"),
        nn.MSELoss(reduction="none"),
        nn.L1Loss(),
        nn.BCEWithLogitsLoss(),
        lambda output, target: functional.cross_entropy(output, target),
    ],
)
def test_an_unusual_loss_is_not_recognised(loss):
    model = mlp((4, 5, 3))
    assert engine.recognise(model, loss, select_parameters(model)) is None


def test_a_hooked_loss_a_global_hook_and_foreign_parameters_are_not_recognised():
    model = mlp((4, 5, 3))
    parameters = select_parameters(model)
    loss = nn.CrossEntropyLoss()
    assert engine.recognise(model, loss, parameters) is not None
    loss.register_forward_hook(lambda _m, _i, out: 2 * out)
    assert engine.recognise(model, loss, parameters) is None
    backwards = dict(reversed(parameters.items()))
    assert engine.recognise(model, functional.cross_entropy, backwards) is None
    foreign = select_parameters(mlp((4, 5, 3), seed=1))
    assert engine.recognise(model, functional.cross_entropy, foreign) is None
    hook = nn.modules.module.register_module_forward_hook(lambda _m, _i, out: out)
    try:
        assert engine.recognise(model, functional.cross_entropy, parameters) is None
    finally:
        hook.remove()


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (torch.zeros(2, 4), torch.tensor([0, -100])),  # the ignore index changes the mean
        (torch.zeros(2, 4), torch.tensor([0, 3])),
        (torch.zeros(2, 4), torch.zeros(2, 3)),  # class probabilities
        (torch.zeros(2, 4).double(), torch.tensor([0, 1])),
        (torch.zeros(2, 2, 4), torch.tensor([0, 1])),
        (torch.zeros(2, 5), torch.tensor([0, 1])),
        (torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64)),
        (torch.zeros(2, 4), torch.tensor([[0], [1]])),
        ([0.0], torch.tensor([0])),
    ],
)
def test_data_the_formulas_are_not_for_is_seen_and_refused(x, y):
    model = mlp((4, 5, 3))
    plan = engine.recognise(model, functional.cross_entropy, select_parameters(model))
    assert not plan.fits(x, y, torch.float32)
    with pytest.raises(ValueError, match="autograd engine"):
        engine.MLPProduct(plan, dict(model.named_parameters()), x, y)


def test_squared_error_that_would_broadcast_is_refused():
    model = mlp((4, 5, 1))
    plan = engine.recognise(model, functional.mse_loss, select_parameters(model))
    assert plan.fits(torch.zeros(6, 4), torch.zeros(6, 1), torch.float32)
    assert not plan.fits(torch.zeros(6, 4), torch.zeros(6), torch.float32)
    assert not plan.fits(torch.zeros(6, 4), torch.zeros(6, 1).double(), torch.float32)
