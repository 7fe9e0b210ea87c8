"""A protected optimizer does not move the parameters along the basis, whatever it is."""

import copy
from collections import Counter

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

import curvlab
from curvlab import Basis, parameter_count, parameter_vector, protect
from curvlab.nets import mlp, slim_resnet18
from curvlab.parameters import select_parameters

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD, momentum, decay": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1),
    "SGD, Nesterov": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}
# of |M (after - before)| after five steps, relative to |theta|
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6}


def batch_for(dtype):
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(12, 7, generator=generator, dtype=torch.float64).to(dtype)
    return inputs, torch.randint(3, (12,), generator=generator)


def random_basis(n, rows, dtype=torch.float32, capacity=40):
    basis = Basis(n, capacity, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    basis.extend(torch.randn(rows, n, generator=generator, dtype=torch.float64).to(dtype))
    return basis


def train(model, optimizer, steps=5, dtype=torch.float32):
    inputs, targets = batch_for(dtype)
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()


def moved(model, before, basis, select=None):
    """|M (after - before)| and |after - before|, each relative to |before|."""
    change = (parameter_vector(model, select) - before).double()
    inside = (basis.rows().double() @ change).norm()
    return float(inside / before.norm()), float(change.norm() / before.norm())


def moved_by_training(model, optimizer, basis, dtype=torch.float32):
    """What five steps move: along the basis, and altogether."""
    before = parameter_vector(model)
    train(model, optimizer, dtype=dtype)
    return moved(model, before, basis)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_optimizer_moves_along_the_basis(name, dtype):
    model = mlp((7, 5, 3), seed=0, dtype=dtype)
    basis = random_basis(parameter_count(model), 9, dtype)
    optimizer = OPTIMIZERS[name](model.parameters())
    handle = protect(optimizer, basis)
    inside, total = moved_by_training(model, optimizer, basis, dtype)
    assert inside <= TOLERANCE[dtype]
    assert total > 1e-3, "it still learns"
    assert 0.0 < handle.removed < 1.0


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_without_protection_the_same_steps_leak(name):
    model = mlp((7, 5, 3), seed=0)
    basis = random_basis(parameter_count(model), 9)
    optimizer = OPTIMIZERS[name](model.parameters())
    assert moved_by_training(model, optimizer, basis)[0] > 1e-3


def test_projecting_gradients_alone_would_leak_with_adam_and_with_decay():
    for make in (OPTIMIZERS["AdamW"], OPTIMIZERS["SGD, momentum, decay"]):
        model = mlp((7, 5, 3), seed=0)
        basis = random_basis(parameter_count(model), 9)
        optimizer = make(model.parameters())

        def project(*_, basis=basis, model=model):
            basis.project_gradients_(model.parameters())

        optimizer.register_step_pre_hook(project)
        assert moved_by_training(model, optimizer, basis)[0] > 1e-4


@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.9, 0.05)])
def test_protected_sgd_is_sgd_dagger(momentum, decay):
    model = mlp((7, 5, 3), seed=0, dtype=torch.float64)
    other = copy.deepcopy(model)
    basis = random_basis(parameter_count(model), 9, torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=momentum, weight_decay=decay)
    protect(optimizer, basis)
    train(model, optimizer, dtype=torch.float64)
    parameters = list(other.parameters())
    momenta = [torch.zeros_like(p) for p in parameters] if momentum else []
    inputs, targets = batch_for(torch.float64)
    for _ in range(5):
        gradients = torch.autograd.grad(cross_entropy(other(inputs), targets), parameters)
        data = [p.detach() for p in parameters]
        basis.sgd_step_(data, list(gradients), momenta, 0.1, decay, momentum)
    torch.testing.assert_close(parameter_vector(model), parameter_vector(other))


def test_rows_added_later_are_protected_though_momentum_points_along_them():
    model = mlp((7, 5, 3), seed=0)
    n = parameter_count(model)
    basis = Basis(n, 40)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    protect(optimizer, basis)
    train(model, optimizer)
    buffers = [optimizer.state[p]["momentum_buffer"].reshape(-1) for p in model.parameters()]
    basis.append(torch.cat(buffers))
    assert moved_by_training(model, optimizer, basis)[0] <= TOLERANCE[torch.float32]


def test_groups_in_another_order_need_the_model_and_then_work():
    model = mlp((7, 5, 3), seed=0)
    basis = random_basis(parameter_count(model), 9)
    named = dict(model.named_parameters())
    weights = [p for name, p in named.items() if name.endswith("weight")]
    biases = [p for name, p in named.items() if name.endswith("bias")]
    groups = [{"params": biases, "weight_decay": 0.0}, {"params": weights, "weight_decay": 0.1}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    with pytest.raises(ValueError, match=r"2 groups of parameters.*pass model="):
        protect(optimizer, basis)
    protect(optimizer, basis, model)
    assert moved_by_training(model, optimizer, basis)[0] <= TOLERANCE[torch.float32]


def test_a_part_that_is_not_trained_stays_and_the_rest_makes_up_for_it():
    model = mlp((7, 5, 3), seed=0)
    basis = random_basis(parameter_count(model), 9)
    first = next(model.parameters())
    rest = [p for p in model.parameters() if p is not first]
    optimizer = torch.optim.AdamW(rest, lr=1e-2)
    protect(optimizer, basis, model)
    kept = first.detach().clone()
    inside, total = moved_by_training(model, optimizer, basis)
    assert torch.equal(first, kept)
    assert inside <= TOLERANCE[torch.float32]
    assert total > 1e-3


def test_a_basis_of_one_layer_leaves_the_others_free():
    model = mlp((7, 5, 3), seed=0)
    name = next(iter(select_parameters(model)))
    basis = random_basis(parameter_count(model, name), 4)
    before, all_before = parameter_vector(model, name), parameter_vector(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    protect(optimizer, basis, model, select=name)
    train(model, optimizer)
    assert moved(model, before, basis, name)[0] <= TOLERANCE[torch.float32]
    other = mlp((7, 5, 3), seed=0)
    train(other, torch.optim.SGD(other.parameters(), 0.1), steps=1)
    assert not torch.equal(all_before[-3:], parameter_vector(model)[-3:])


def test_a_closure_and_its_line_search_do_not_leak():
    model = mlp((7, 5, 3), seed=0)
    basis = random_basis(parameter_count(model), 9)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
    protect(optimizer, basis)
    before = parameter_vector(model)
    inputs, targets = batch_for(torch.float32)

    def closure():
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        return loss

    optimizer.step(closure)
    inside, total = moved(model, before, basis)
    assert inside <= TOLERANCE[torch.float32]
    assert total > 1e-3


def test_channels_last_weights_keep_their_layout_and_are_protected():
    model = slim_resnet18(2, nf=2, seed=0).to(memory_format=torch.channels_last).eval()
    basis = random_basis(parameter_count(model), 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    protect(optimizer, basis)
    before = parameter_vector(model)
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(3, 3, 16, 16, generator=generator)
    cross_entropy(model(images), torch.tensor([0, 1, 1])).backward()
    optimizer.step()
    assert moved(model, before, basis)[0] <= TOLERANCE[torch.float32]


def test_removed_protection_gives_the_optimizer_back():
    model = mlp((7, 5, 3), seed=0)
    basis = random_basis(parameter_count(model), 9)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    protect(optimizer, basis).remove()
    other = mlp((7, 5, 3), seed=0)
    train(model, optimizer)
    train(other, torch.optim.SGD(other.parameters(), 0.1))
    assert torch.equal(parameter_vector(model), parameter_vector(other))


def test_a_narrow_basis_protects_the_span_that_it_stores():
    model = mlp((7, 5, 3), seed=0)
    n = parameter_count(model)
    basis = Basis(n, 9, dtype=torch.float16)
    basis.extend(torch.randn(9, n, generator=torch.Generator().manual_seed(1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    protect(optimizer, basis)
    assert moved_by_training(model, optimizer, basis)[0] <= TOLERANCE[torch.float32]


def test_bad_arguments_are_refused_with_the_cure():
    model = mlp((7, 5, 3), seed=0)
    basis = random_basis(parameter_count(model), 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer; got Sequential"):
        protect(model, basis)
    with pytest.raises(TypeError, match=r"Basis or layer bases; got Tensor.*basis\.extend"):
        protect(optimizer, basis.rows())
    with pytest.raises(ValueError, match="have 58 elements together, the basis covers 57"):
        protect(optimizer, Basis(57, 3))
    with pytest.raises(ValueError, match="trains none of the parameters"):
        protect(optimizer, basis, mlp((7, 5, 3), seed=1))
    with pytest.raises(ValueError, match="select= names parameters of a model"):
        protect(optimizer, basis, select="*")
    turned = [torch.nn.Parameter(torch.zeros(58, dtype=torch.complex64))]
    with pytest.raises(TypeError, match=r"real float parameters; got torch\.complex64"):
        protect(torch.optim.SGD(turned, 0.1), basis)
    next(model.parameters()).requires_grad_(False)
    with pytest.raises(ValueError, match=r"select='\*' takes frozen parameters as well"):
        protect(optimizer, basis, model)
    protect(optimizer, basis, model, select="*")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "make",
    # AdamW's eps of 1e-8 is zero in float16, where it divides zero by zero, protected or not.
    [OPTIMIZERS["SGD, momentum, decay"], lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-4)],
    ids=["SGD", "AdamW"],
)
def test_half_precision_parameters_stay_within_one_rounding_however_many_steps(make, dtype):
    """What leaks is the rounding of the model's numbers once, not once a step."""
    model = mlp((7, 5, 3), seed=0).to(dtype)
    basis = random_basis(parameter_count(model), 9)
    optimizer = make(model.parameters())
    handle = protect(optimizer, basis)
    before = parameter_vector(model).float()
    train(model, optimizer, steps=60, dtype=dtype)
    after = parameter_vector(model).float()
    rounding = float(after.norm()) * torch.finfo(dtype).eps / 2
    assert float((basis.rows() @ (after - before)).norm()) <= rounding
    assert float((after - before).norm()) > 20 * rounding, "it still learns"
    assert 0.0 < handle.removed < 1.0


def test_half_precision_parameters_that_were_loaded_anew_are_taken_as_they_are():
    model = mlp((7, 5, 3), seed=0).bfloat16()
    basis = random_basis(parameter_count(model), 9)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    protect(optimizer, basis)
    train(model, optimizer, dtype=torch.bfloat16)
    other = mlp((7, 5, 3), seed=1).bfloat16()
    model.load_state_dict(other.state_dict())
    before = parameter_vector(model).float()
    train(model, optimizer, steps=1, dtype=torch.bfloat16)
    change = parameter_vector(model).float() - before
    assert 0.0 < float(change.norm()) <= 0.2 * float(before.norm()), "a step from where it is now"


class Counting(TorchDispatchMode):
    """Counts operations that compute or copy."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        # a view is neither, and none of them reaches a device
        views = ("detach", "lift_fresh", "slice", "view", "split_with_sizes")
        if function.overloadpacket.__name__ not in views:
            self.calls[str(function)] += 1
        return function(*args, **(kwargs or {}))


def test_a_step_costs_a_dozen_operations_more_and_waits_for_nothing_whatever_the_tensors():
    extra = {}
    for tensors in (2, 150):
        parameters = [torch.nn.Parameter(torch.ones(5)) for _ in range(tensors)]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        basis = random_basis(5 * tensors, 2)
        optimizer = torch.optim.AdamW(parameters, lr=1e-3, foreach=True)
        optimizer.step()
        with Counting() as alone:
            optimizer.step()
        protect(optimizer, basis)
        optimizer.step()
        with Counting() as protected:
            optimizer.step()
        gradients = [torch.ones(5) for _ in range(tensors)]
        with Counting() as projections:  # what they are made of depends on the device
            basis.project_out_(gradients)
            basis.project_out_(torch.ones(5 * tensors))
        made = projections.calls - Counter({"aten.ones.default": 1})
        extra[tensors] = protected.calls - alone.calls - made
        waits = ("_local_scalar_dense", "item", "nonzero", "_to_copy")
        assert not [name for name in extra[tensors] if any(word in name for word in waits)]
    assert extra[2] == extra[150]
    # and two projections: on a GPU each is two launches, or three where sums have many chunks, and
    # as many for a second pass, which return at once unless it is needed
    assert extra[150].total() <= 12 - 2 * 3


def test_it_is_a_public_name():
    assert curvlab.protect is protect


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_an_empty_basis_leaves_the_optimizers_step_to_the_bit(kind):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(1000, generator=generator)
    own, held = (torch.nn.Parameter(start.clone()) for _ in range(2))
    plain, protected = kind([own], lr=0.1), kind([held], lr=0.1)
    protect(protected, Basis(1000, capacity=3), [held])
    for _ in range(3):
        own.grad = torch.randn(1000, generator=generator)
        held.grad = own.grad.clone()
        plain.step()
        protected.step()
        assert torch.equal(own, held)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_float64_rows_hold_float32_parameters(kind):
    generator = torch.Generator().manual_seed(0)
    basis = Basis(500, capacity=4, dtype=torch.float64)
    basis.extend(torch.randn(4, 500, generator=generator, dtype=torch.float64))
    held = torch.nn.Parameter(torch.randn(500, generator=generator))
    optimizer = kind([held], lr=0.1)
    protect(optimizer, basis, [held])
    before = held.detach().double().clone()
    for _ in range(20):
        held.grad = torch.randn(500, generator=generator)
        optimizer.step()
    moved = held.detach().double() - before
    assert moved.norm() > 0.1
    # the float64 copy is held exactly; the model has it rounded once
    assert (basis.rows() @ moved).norm() <= 1e-7 * before.norm()
