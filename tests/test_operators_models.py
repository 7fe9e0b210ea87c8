"""Models that couple samples, draw numbers, round inside or take their inputs whole."""

import copy
import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from curvlab import GaussNewton, Hessian, Objective
from curvlab.doctor import doctor
from curvlab.losses import sequence
from curvlab.operators.products.sizing import LiveBytes
from curvlab.probe import OperatorError
from curvlab.refusals import Refusal, Trap
from tests.dense_truth import dense_hessian, relative

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}  # relative
NODES = 10


def numbers(*shape, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def classes(n=NODES):
    return torch.randint(0, 3, (n,), generator=torch.Generator().manual_seed(2))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)

    def hidden(self, x):
        return torch.tanh(self.a(x))

    def forward(self, x):
        return self.b(self.hidden(x))


def made(kind=Net, dtype=torch.float64):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind().to(dtype)


# -- samples that hang together --------------------------------------------------------------------


class Graph(Net):
    """Messages along edges, given as many as there are nodes: rows that look like samples."""

    def forward(self, x, edges):
        source, target = edges.T
        messages = self.hidden(x)
        return self.b(messages + torch.zeros_like(messages).index_add(0, target, messages[source]))


def graph():
    edges = torch.tensor([[i, (3 * i + 1) % NODES] for i in range(NODES)]).flip(0)
    return (numbers(NODES, 4), edges), classes()


def test_a_graph_that_cannot_be_cut_is_taken_whole_and_that_is_said(caplog):
    model, data = made(Graph), graph()
    caplog.set_level(logging.INFO, "curvlab")
    operator = Hessian(model, F.cross_entropy, data)
    assert "whole but not in parts" in caplog.text
    assert operator.about()["batches cut"] is False
    truth = dense_hessian(model, lambda m: F.cross_entropy(m(*data[0]), data[1]))
    assert relative(operator.dense(), truth) < TOLERANCE[torch.float64]
    report = doctor(model, F.cross_entropy, data)
    assert report.healthy, report
    assert "coupled samples" in report.traps()


def test_several_graphs_are_refused_until_their_weights_are_settled():
    model, data = made(Graph), [graph(), graph()]
    data[1] = ((numbers(NODES, 4, seed=7), data[1][0][1]), data[1][1])
    with pytest.raises(Refusal, match='chunk="batch"') as refused:
        Hessian(model, F.cross_entropy, data)
    assert refused.value.trap is Trap.COUPLED
    operator = Hessian(model, F.cross_entropy, data, chunk="batch")
    truth = sum(
        dense_hessian(model, lambda m, x=x, y=y: F.cross_entropy(m(*x), y)) for x, y in data
    )
    assert relative(operator.dense(), truth / 2) < TOLERANCE[torch.float64]


def test_a_model_that_does_not_run_at_all_shows_its_own_error():
    class Broken(Net):
        def forward(self, x):
            return self.b(x)  # of the wrong width, whole or cut

    with pytest.raises(RuntimeError, match=r"10x4 and 6x3"):
        Hessian(made(Broken), F.cross_entropy, (numbers(NODES, 4), classes()))


def test_a_contrastive_loss_is_refused_with_a_cure_that_works():
    def contrast(model, batch):
        one, other = (F.normalize(model(x), dim=1) for x in batch)
        return F.cross_entropy(one @ other.T / 0.5, torch.arange(len(one)))

    model, batch = made(), (numbers(NODES, 4), numbers(NODES, 4, seed=3))
    with pytest.raises(Refusal, match=r'coupled.*chunk="batch"'):
        Hessian(model, Objective(contrast), batch)
    operator = Hessian(model, Objective(contrast), batch, chunk="batch")
    truth = dense_hessian(model, lambda m: contrast(m, batch))
    assert relative(operator.dense(), truth) < TOLERANCE[torch.float64]
    assert doctor(model, Objective(contrast), batch, chunk="batch").healthy


# -- random numbers --------------------------------------------------------------------------------


def denoise(model, x):
    noise = torch.randn_like(x[:, :3])
    return F.mse_loss(model(x + F.pad(noise, (0, 1))), noise)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_loss_that_draws_numbers_in_eval_mode_is_refused_with_a_cure_that_works(dtype):
    model, x = made(dtype=dtype), numbers(NODES, 4).to(dtype)
    with pytest.raises(Refusal, match=r'in eval mode too.*Pass mode="frozen-masks"') as refused:
        Hessian(model, Objective(denoise), x, mode="eval")
    assert refused.value.trap is Trap.RANDOM
    operator = Hessian(model, Objective(denoise), x, mode="frozen-masks")
    with torch.random.fork_rng():

        def objective(m):
            torch.manual_seed(0)  # the numbers of the first batch
            return denoise(m, x)

        truth = dense_hessian(model, objective)
    assert relative(operator.dense(), truth) < TOLERANCE[dtype]


def test_the_check_of_derivatives_sees_the_same_numbers_as_the_products(monkeypatch):
    """float64 draws others than float32, which once made a right product look wrong."""
    model = made(dtype=torch.float32)
    operator = Hessian(model, Objective(denoise), numbers(NODES, 4).float(), mode="frozen-masks")
    assert operator.certificate.passed
    monkeypatch.setattr(Net, "hidden", lambda self, x: torch.tanh(Detached.apply(self.a(x))))
    with pytest.raises(OperatorError, match="differences of gradients"):
        Hessian(model, Objective(denoise), numbers(NODES, 4).float(), mode="frozen-masks")


class Detached(torch.autograd.Function):
    """x^3 / 3, whose backward hides that its slope depends on x."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3 / 3

    @staticmethod
    def backward(ctx, seed):
        return seed * ctx.saved_tensors[0].detach() ** 2


# -- arithmetic inside -----------------------------------------------------------------------------


class Autocasting(Net):
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x)


@pytest.mark.parametrize("kind", [Hessian, GaussNewton])
def test_autocast_inside_a_model_is_left_out_and_that_is_said(kind):
    model, plain = made(Autocasting, torch.float32), made(dtype=torch.float32)
    data = numbers(NODES, 4).float(), classes()
    operator = kind(model, F.cross_entropy, data)
    assert operator.about()["autocast left out"]
    expected = kind(plain, F.cross_entropy, data)
    assert not expected.about()["autocast left out"]
    assert relative(operator.dense(), expected.dense()) < TOLERANCE[torch.float32]
    assert "autocast inside" in doctor(model, F.cross_entropy, data).traps()
    rounded = kind(model, F.cross_entropy, data, precision="bfloat16")
    assert 1e-4 < relative(rounded.dense(), expected.dense()) < 5e-2  # bfloat16 has 8 bits


class LogProbabilities(Net):
    def forward(self, x):
        return F.log_softmax(super().forward(x), 1)


class Spelled(Net):
    def forward(self, x):
        return super().forward(x).log_softmax(dim=-1)


@pytest.mark.parametrize("kind", [LogProbabilities, Spelled])
@pytest.mark.parametrize("scale", [1.0, 2.0, 3.0])
def test_nll_loss_of_log_probabilities_keeps_its_digits_as_the_loss_vanishes(kind, scale):
    model = made(kind, torch.float32)
    x, y = numbers(NODES, 4).float(), classes()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(300):
        optimizer.zero_grad()
        F.nll_loss(model(x), y).backward()
        optimizer.step()
    with torch.no_grad():  # fitted, the better the larger the last layer is
        model.b.weight *= scale
        model.b.bias *= scale
    exact = Net().double()
    exact.load_state_dict(model.state_dict())
    fine = Hessian(exact, F.cross_entropy, (x.double(), y))
    assert fine.loss < 10.0 ** (-3 * scale)
    operator = Hessian(model, F.nll_loss, (x, y))
    assert relative(operator.dense(), fine.dense()) < TOLERANCE[torch.float32]
    with pytest.raises(Refusal, match=r"linear in the outputs.*cross_entropy") as refused:
        GaussNewton(model, F.nll_loss, (x, y))
    assert refused.value.trap is Trap.LINEAR_LOSS


def test_log_probabilities_of_another_dimension_or_changed_on_the_way_are_left_alone():
    x, y = numbers(NODES, 4), torch.randint(0, 3, (NODES, 2))

    class Wide(Net):
        def forward(self, x):
            scores = self.b(self.hidden(x)).unsqueeze(2) * torch.tensor([1.0, 2.0])
            return F.log_softmax(scores, 2)  # over what the loss takes for positions

    class Halved(LogProbabilities):
        def forward(self, x):
            return super().forward(x) / 2

    for kind, target in ((Wide, y), (Halved, classes())):
        model = made(kind)
        truth = dense_hessian(model, lambda m, target=target: F.nll_loss(m(x), target))
        operator = Hessian(model, F.nll_loss, (x, target))
        assert relative(operator.dense(), truth) < TOLERANCE[torch.float64]


# -- straight through ------------------------------------------------------------------------------


class Quantised(Net):
    def hidden(self, x):
        value = self.a(x)
        return torch.tanh(value + (torch.round(4 * value) / 4 - value).detach())


def test_a_straight_through_estimator_is_refused_by_name_and_taken_with_check_off():
    model, data = made(Quantised), (numbers(NODES, 4), classes())
    with pytest.raises(OperatorError, match=r"straight-through.*check=False") as refused:
        Hessian(model, F.cross_entropy, data)
    assert refused.value.trap is Trap.ESTIMATOR
    operator = Hessian(model, F.cross_entropy, data, check=False)
    truth = dense_hessian(model, lambda m: F.cross_entropy(m(data[0]), data[1]))
    assert relative(operator.dense(), truth) < TOLERANCE[torch.float64]


# -- how inputs reach the model --------------------------------------------------------------------


class Takes(Net):
    def forward(self, batch):
        return super().forward(batch["x"] + batch["shift"])


class Spreads(Net):
    def forward(self, x, shift):
        return super().forward(x + shift)


class Anything(Net):
    def forward(self, *args, **kwargs):
        return super().forward(*args) if args else super().forward(sum(kwargs.values()))


class TakesPair(Net):
    def forward(self, pair):
        return super().forward(pair[0] + pair[1])


@pytest.mark.parametrize("kind", [Takes, Spreads, Anything, TakesPair])
def test_inputs_reach_a_model_as_its_signature_takes_them(kind):
    model, plain = made(kind), made()
    x, shift, y = numbers(NODES, 4), numbers(NODES, 4, seed=5), classes()
    inputs = (x, shift) if kind is TakesPair else {"x": x, "shift": shift}
    expected = Hessian(plain, F.cross_entropy, (x + shift, y)).dense()
    for curvature in (Hessian(model, F.cross_entropy, (inputs, y)),):
        assert relative(curvature.dense(), expected) < TOLERANCE[torch.float64]


def test_what_is_missing_is_named_by_the_models_own_error():
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'shift'"):
        Hessian(made(Spreads), F.cross_entropy, ({"x": numbers(NODES, 4)}, classes()))


class Translator(nn.Module):
    """Calls as T5 does: the decoder's inputs are made from labels, or have to be given."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(7, 4), nn.Linear(4, 7)

    def prepare_decoder_input_ids_from_labels(self, labels):
        return F.pad(labels[:, :-1], (1, 0))

    def forward(self, input_ids, labels=None, decoder_input_ids=None):
        if decoder_input_ids is None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        seen = self.words(decoder_input_ids) + self.words(input_ids).mean(1, keepdim=True)
        return copy.copy(Answer(self.head(torch.tanh(seen))))


class Answer:
    def __init__(self, logits):
        self.logits = logits


def test_a_translators_decoder_gets_its_inputs_although_labels_are_withheld():
    model = made(Translator)
    ids = torch.randint(0, 7, (4, 5), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids.flip(1)}
    outer = GaussNewton(model, sequence, batch, select="head.*")
    # in the last layer the logits are linear, so that Gauss-Newton is the Hessian
    inner = Hessian(model, sequence, batch, select="head.*")
    assert relative(outer.dense(), inner.dense()) < TOLERANCE[torch.float64]


# -- mistakes --------------------------------------------------------------------------------------


def test_swapped_arguments_are_named_without_printing_the_data():
    model, data = made(), (numbers(NODES, 4), classes())
    for arguments in ((model, data, F.cross_entropy), (data, F.cross_entropy, model)):
        with pytest.raises(TypeError, match="model, loss, data") as refused:
            Hessian(*arguments)
        assert "tensor(" not in str(refused.value)


# -- frozen weights in bfloat16 --------------------------------------------------------------------


class Frozen(nn.Module):
    """An adapter before narrow, frozen layers, which cast to what their weights say they are."""

    def __init__(self, dtype, width=64):
        super().__init__()
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)
        layers = (nn.Linear(width, width) for _ in range(4))
        self.layers = nn.ModuleList(layers).to(dtype).requires_grad_(False)

    def forward(self, x):
        x = x + self.up(self.down(x))
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype)).relu_() + 0.5 * torch.tanh(x)
        return x[:, :3].to(self.up.weight.dtype)


@pytest.mark.parametrize("engine", ["retained", "rebuilt", "blockwise"])
@pytest.mark.parametrize("kind", [Hessian, GaussNewton])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_frozen_weights_stay_narrow_and_products_are_exact(dtype, kind, engine):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Frozen(dtype)
    x, y = numbers(6, 64), classes(6)
    exact = kind(copy.deepcopy(model).double(), F.cross_entropy, (x, y)).dense()
    operator = kind(model, F.cross_entropy, (x.float(), y), dtype=torch.float32, engine=engine)
    assert relative(operator.dense(), exact) < TOLERANCE[torch.float32]
    assert {tensor.dtype for tensor in operator.problem.fixed.values()} == {dtype}
    frozen = sum(p.nbytes for p in model.layers.parameters())
    plain = kind(copy.deepcopy(model).float(), F.cross_entropy, (x.float(), y), engine="retained")
    # what the graph holds besides activations; wide weights in it would be twice as much as frozen
    assert graph_bytes(operator) - graph_bytes(plain) < frozen / 2


def graph_bytes(operator):
    with LiveBytes() as live:
        kept = operator._retained(operator.problem.chunks[0])
        held = live.live
    assert callable(kept)  # alive until here
    return held
