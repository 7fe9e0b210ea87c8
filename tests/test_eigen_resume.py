"""Long computations that are stopped: nothing is lost, nothing is mixed with another operator's."""

import os
import re
import signal
import sys
from contextlib import suppress

import pytest
import torch
from torch.nn.functional import cross_entropy, mse_loss

from curvlab import GaussNewton, Hessian, Interrupted, Solution, solve
from curvlab.eigen import (
    Density,
    Eigenpairs,
    Estimate,
    Room,
    SpectralEnergy,
    diagonal,
    lanczos,
    power_iteration,
    spectral_density as density,
    spectral_energy,
    trace,
)
from curvlab.nets import mlp
from curvlab.operators import Dense
from curvlab.storage import StorageError

# Every computation that has a file, small: its products are counted in the tests below.
COMPUTATIONS = {
    "density": lambda operator, **keep: density(operator, probes=4, steps=6, **keep),
    "trace": lambda operator, **keep: trace(operator, probes=30, **keep),
    "diagonal": lambda operator, **keep: diagonal(operator, probes=21, **keep),
    "power": lambda operator, **keep: power_iteration(operator, 3, tol=1e-2, **keep),
    "power by value": lambda operator, **keep: power_iteration(operator, 3, stop="value", **keep),
    "solve": lambda operator, **keep: solve(
        operator, torch.ones(operator.n, dtype=operator.dtype), damping=2.0, tol=1e-6, **keep
    ),
    # 16 pairs do not suffice, so there are several attempts
    "energy": lambda operator, **keep: spectral_energy(
        operator, 1e-4, probes=12, dense=False, **keep
    ),
}
every = pytest.mark.parametrize("compute", COMPUTATIONS.values(), ids=COMPUTATIONS)
# and those that a number of products decides: the budget, or when the pairs are looked at
COUNTING = {
    "lanczos": lambda operator, **keep: lanczos(operator, 3, tol=1e-6, dense=False, **keep),
    "lanczos, cut short": lambda operator, **keep: lanczos(
        operator, 3, tol=1e-6, dense=False, max_products=27, **keep
    ),
    # whose chain lets go of its older rows
    "lanczos, few rows": lambda operator, **keep: lanczos(
        operator, 2, tol=1e-3, dense=False, room=Room(rows=11), **keep
    ),
    "power, cut short": lambda operator, **keep: power_iteration(
        operator, 3, tol=1e-9, max_products=21, **keep
    ),
    "solve, cut short": lambda operator, **keep: solve(
        operator, torch.ones(operator.n).double(), damping=0.1, tol=1e-9, max_products=17, **keep
    ),
}
stopped = pytest.mark.parametrize(
    "compute", {**COMPUTATIONS, **COUNTING}.values(), ids=[*COMPUTATIONS, *COUNTING]
)


def matrix(n=60, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64)).Q
    return (q * 3.0 * 0.8 ** torch.arange(n, dtype=torch.float64)) @ q.T


class Stopping:
    """A matrix whose product number ``at`` is stopped from outside, by ``stop``."""

    def __init__(self, inner, at=None, stop=None):
        self.inner, self.at, self.stop, self.products = inner, at, stop, 0
        self.n, self.dtype, self.device = len(inner), inner.dtype, inner.device

    def __matmul__(self, vectors):
        self.products += 1
        if self.products == self.at:
            self.stop()
        return vectors @ self.inner


def ctrl_c():
    raise KeyboardInterrupt


def tensors(result):
    """The numbers of a result that must not depend on how often it was stopped."""
    if isinstance(result, Density):
        return [result.nodes, result.weights]
    if isinstance(result, Eigenpairs):
        return [result.values, result.vectors, result.residuals]
    if isinstance(result, Solution):
        return [result.x, torch.tensor(result.residual)]
    if isinstance(result, SpectralEnergy):
        numbers = [result.k, result.least, result.most, result.share, result.total.value]
        return [torch.tensor(numbers, dtype=torch.float64), *tensors(result.pairs)]
    if isinstance(result, Estimate):
        return [torch.tensor([result.value, result.error], dtype=torch.float64)]
    return list(result)


def same(first, second):
    pairs = zip(tensors(first), tensors(second), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@stopped
def test_stopped_at_any_product_and_resumed_it_ends_with_the_same_bits(compute, tmp_path):
    straight = Stopping(matrix())
    wanted = compute(straight)
    for at in range(1, straight.products + 2, 1 + straight.products // 25):
        file = tmp_path / f"{at}.safetensors"
        with suppress(KeyboardInterrupt):  # the last one has ended before: its file is complete
            compute(Stopping(matrix(), at, ctrl_c), checkpoint=file)
        again = Stopping(matrix())
        assert same(compute(again, checkpoint=file), wanted), at
        assert again.products <= straight.products + 1  # one product tells whose file it is


@stopped
def test_a_file_that_cannot_be_written_is_refused_at_the_start(compute, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    operator = Stopping(matrix())
    with pytest.raises(StorageError, match="could not write"):
        compute(operator, checkpoint=tmp_path / "file" / "state")
    assert operator.products <= 4  # the probe's
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]
    compute(operator, checkpoint=tmp_path / "new" / "folder" / "state")  # this one is made


@stopped
def test_an_interrupt_carries_the_result_so_far(compute):
    straight = Stopping(matrix())
    wanted, kinds = compute(straight), set()
    for at in range(5, straight.products + 1):  # four are the probe's
        with pytest.raises(Interrupted, match="checkpoint=") as stop:
            compute(Stopping(matrix(), at, ctrl_c))
        kinds.add(type(stop.value.partial))
    assert type(wanted) in kinds
    assert kinds <= {type(wanted), type(None)}


@stopped
def test_a_line_that_raises_anywhere_loses_nothing(compute, tmp_path):
    """Ctrl-C can strike between any two lines: here at lines all over the computation."""
    wanted = compute(Stopping(matrix()))
    lines = interrupted_at_line(compute, 10**9, tmp_path / "count")
    for at in range(0, lines, 1 + lines // 40):
        file = tmp_path / f"line{at}"
        interrupted_at_line(compute, at, file)
        assert same(compute(Stopping(matrix()), checkpoint=file), wanted), at


def interrupted_at_line(compute, at, file):
    """Raise ``KeyboardInterrupt`` at line number ``at`` of curvlab.eigen; how many there were."""
    seen = 0

    def trace_lines(frame, event, _):
        nonlocal seen
        if "/curvlab/eigen/" not in frame.f_code.co_filename:
            return None
        if event == "line":
            seen += 1
            if seen == at:
                raise KeyboardInterrupt
        return trace_lines

    before = sys.gettrace()
    sys.settrace(trace_lines)
    try:
        with suppress(KeyboardInterrupt):
            compute(Stopping(matrix()), checkpoint=file)
    finally:
        sys.settrace(before)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the line may be the one that restores it
    return seen


def test_a_termination_signal_saves_too(tmp_path):
    def terminate():
        os.kill(os.getpid(), signal.SIGTERM)

    file = tmp_path / "density"
    with pytest.raises(Interrupted) as stop:
        density(Stopping(matrix(), 20, terminate), probes=4, steps=6, checkpoint=file)
    assert len(stop.value.partial.nodes) == 2  # 4 products of the probe, 1 of the identity
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert file.exists()


# -- whose file it is ------------------------------------------------------------------------------


def problem(seed=0, loss=cross_entropy, kind=Hessian, data=0, **options):
    model = mlp((6, 8, 3), seed=0, dtype=torch.float64)
    generator = torch.Generator().manual_seed(data)
    inputs = torch.randn(30, 6, generator=generator, dtype=torch.float64)
    targets = torch.randint(3, (30,), generator=generator)
    if loss is mse_loss:
        targets = torch.nn.functional.one_hot(targets, 3).double()
    for step in range(seed):
        value = loss(model(inputs), targets)
        for p, g in zip(
            model.parameters(), torch.autograd.grad(value, model.parameters()), strict=True
        ):
            p.data -= 1e-6 * g * (step + 1)
    return kind(model, loss, (inputs, targets), **options)


OTHERS = {
    "parameters": {"seed": 1},  # one SGD step of size 1e-6
    "data": {"data": 1},
    "operator": {"kind": GaussNewton},
    "product with a fixed vector": {"loss": lambda a, b: cross_entropy(a, b, label_smoothing=0.1)},
}


@every
@pytest.mark.parametrize("name", OTHERS)
def test_a_file_of_another_model_is_refused_by_name(compute, name, tmp_path):
    file = tmp_path / "kept"
    compute(problem(), checkpoint=file)
    compute(problem(), checkpoint=file)
    with pytest.raises(ValueError, match=rf"kept is a checkpoint of another .*\b{name} was .* is"):
        compute(problem(**OTHERS[name]), checkpoint=file)


@every
def test_a_file_of_another_matrix_is_refused_by_its_product(compute, tmp_path):
    file = tmp_path / "kept"
    compute(Stopping(matrix()), checkpoint=file)
    changed = matrix()
    changed[3, 3] += 1e-7  # one entry, of a few hundredths
    with pytest.raises(ValueError, match=r"product with a fixed vector was \[.*\] and is \["):
        compute(Stopping(changed), checkpoint=file)
    with pytest.raises(ValueError, match="n was 60 and is 61"):
        compute(Stopping(matrix(61)), checkpoint=file)


@pytest.mark.parametrize("name", [name for name in COMPUTATIONS if name != "solve"])
def test_a_file_of_another_seed_is_refused(name, tmp_path):
    compute, file = COMPUTATIONS[name], tmp_path / "kept"
    compute(Dense(matrix()), checkpoint=file)
    with pytest.raises(ValueError, match="seed was 0 and is 1"):
        compute(Dense(matrix()), checkpoint=file, seed=1)


def test_data_in_other_chunks_are_the_same_data(tmp_path):
    file = tmp_path / "kept"
    first = trace(problem(chunk=7), probes=30, checkpoint=file)
    second = trace(problem(chunk=30), probes=30, checkpoint=file)
    assert first == second


@every
def test_progress_is_shown_when_asked_for_and_only_then(compute, capsys):
    compute(Dense(matrix()), progress=True)
    shown = capsys.readouterr().err
    assert re.search(r"\[[#.]{20}\] \d+ of \d+ (products|pairs)", shown)
    compute(Dense(matrix()))
    assert capsys.readouterr().err == ""  # no terminal here


# -- scales ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("power", [-900, 900])
@pytest.mark.parametrize("name", ["density", "trace", "diagonal", "power", "power by value"])
def test_an_operator_whose_squares_leave_float64_is_computed_in_another_unit(name, power, tmp_path):
    compute, unit = COMPUTATIONS[name], 2.0**power
    wanted = tensors(compute(Stopping(matrix())))
    found = tensors(compute(Stopping(matrix() * unit), checkpoint=tmp_path / "kept"))
    for index, (a, b) in enumerate(zip(found, wanted, strict=True)):
        scaled = not (name == "density" and index) and not ("power" in name and index == 1)
        torch.testing.assert_close(a / unit if scaled else a, b, rtol=1e-9, atol=1e-12)
    with pytest.raises(ValueError, match="power of two was"):
        compute(Stopping(matrix() * unit * 2.0**7), checkpoint=tmp_path / "kept")


@pytest.mark.parametrize("power", [-900, 900])
def test_an_energy_that_leaves_float64_is_refused(power):
    with pytest.raises(ValueError, match="scale the operator"):
        spectral_energy(Stopping(matrix() * 2.0**power), 0.1)


@pytest.mark.parametrize("power", [-900, 900])
def test_a_search_in_another_unit_goes_on_in_that(power, tmp_path):
    def compute(operator, **keep):
        return lanczos(operator, 3, tol=1e-6, dense=False, **keep)

    far = matrix() * 2.0**power
    with pytest.raises(Interrupted):
        compute(Stopping(far, 20, ctrl_c), checkpoint=tmp_path / "kept")
    assert same(compute(Stopping(far), checkpoint=tmp_path / "kept"), compute(Stopping(far)))
