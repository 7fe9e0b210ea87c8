"""A solve killed at any point ends with the same bits; files that cannot be used are refused."""

import io
import resource
import signal
import sys

import pytest
import torch

from curvlab.eigen import (
    Checkpoint,
    Eigenpairs,
    Interrupted,
    Outcome,
    Room,
    SpectrumTracker,
    block_lanczos,
    lanczos,
    spectral_energy,
)
from curvlab.eigen.progress import Progress
from curvlab.operators import Hessian
from curvlab.rows.space import previous
from curvlab.storage import StorageError

COPIES = [6.0, 4.0, 4.0, -3.0, 2.0]  # the copy makes the solve look twice for hidden ones
VALUES = torch.cat([torch.tensor(COPIES), torch.linspace(-1, 1, 195)]).double()


class Dying:
    """A diagonal operator that raises ``error`` instead of its product number ``at``."""

    def __init__(self, at=None, error=RuntimeError, values=VALUES):
        self.values, self.n = values, len(values)
        self.dtype, self.device = torch.float64, torch.device("cpu")
        self.at, self.error, self.count = at, error, 0

    def __matmul__(self, vectors):
        self.count += 1 if vectors.ndim == 1 else len(vectors)
        if self.at is not None and self.count >= self.at:
            raise self.error("killed")
        return vectors * self.values


def same(first, second):
    """The same bits, whatever the products that tell whose file it is (one a call)."""
    return all(
        torch.equal(getattr(first, name), getattr(second, name))
        for name in ("values", "vectors", "residuals", "converged")
    ) and (first.doubt, first.reason, first.restarts) == (
        second.doubt,
        second.reason,
        second.restarts,
    )


OPTIONS = {"tol": 1e-8, "room": Room(rows=22)}


def every_third(path):
    return Checkpoint(path, every=3)


@pytest.mark.parametrize(("solver", "rows", "apart"), [(lanczos, 22, 5), (block_lanczos, 34, 29)])
def test_a_solve_killed_anywhere_and_resumed_gives_the_same_bits(solver, rows, apart, tmp_path):
    options = {**OPTIONS, "room": Room(rows=rows)}  # few, so that there are restarts
    whole = solver(Dying(), 4, **options)
    assert whole.restarts > 0
    for at in range(5, whole.matvecs + 1, apart):
        path = tmp_path / f"{at}.safetensors"
        with pytest.raises(RuntimeError, match="killed"):
            solver(Dying(at), 4, checkpoint=every_third(path), **options)
        resumed = solver(Dying(), 4, checkpoint=every_third(path), **options)
        assert same(resumed, whole), at


@pytest.mark.parametrize("tol", [1e-3, 1e-5])
def test_the_product_that_tells_whose_file_it_is_moves_no_decision(tol, tmp_path):
    """With room for all rows the pairs are looked at after so many products, not when it is full"""
    whole = lanczos(Dying(), 4, tol=tol)
    for at in [*range(6, whole.matvecs, 4), whole.matvecs, whole.matvecs + 1]:
        path = tmp_path / f"{at}.safetensors"
        with pytest.raises(Interrupted):
            lanczos(Dying(at, KeyboardInterrupt), 4, tol=tol, checkpoint=path)
        assert same(lanczos(Dying(), 4, tol=tol, checkpoint=path), whole), at


def test_a_solve_can_be_killed_and_resumed_many_times(tmp_path):
    whole = lanczos(Dying(), 4, **OPTIONS)
    path = tmp_path / "state.safetensors"
    for _ in range(100):
        operator = Dying(9)
        try:
            result = lanczos(operator, 4, checkpoint=every_third(path), **OPTIONS)
            break
        except RuntimeError:
            assert path.exists()
    assert same(result, whole)


def test_a_full_disk_is_an_error_that_leaves_the_last_checkpoint(tmp_path):
    whole = lanczos(Dying(), 4, **OPTIONS)
    path = tmp_path / "state.safetensors"
    with pytest.raises(RuntimeError, match="killed"):
        lanczos(Dying(20), 4, checkpoint=every_third(path), **OPTIONS)
    kept = path.read_bytes()

    room = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(kept) // 2, room[1]))
    try:
        with pytest.raises(StorageError, match=r"could not write.*File too large"):
            lanczos(Dying(), 4, checkpoint=every_third(path), **OPTIONS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, room)
    assert path.read_bytes() == kept
    assert same(lanczos(Dying(), 4, checkpoint=every_third(path), **OPTIONS), whole)


def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_serves(tmp_path):
    whole = lanczos(Dying(), 4, **OPTIONS)
    path = tmp_path / "state.safetensors"
    with pytest.raises(RuntimeError, match="killed"):
        lanczos(Dying(20), 4, checkpoint=every_third(path), **OPTIONS)
    damaged = bytearray(path.read_bytes())
    damaged[-40] ^= 1
    path.write_bytes(bytes(damaged))
    with pytest.raises(StorageError, match=r"checksum.*\.previous"):
        lanczos(Dying(), 4, checkpoint=every_third(path), **OPTIONS)
    previous(path).replace(path)
    assert same(lanczos(Dying(), 4, checkpoint=every_third(path), **OPTIONS), whole)


def test_a_folder_in_place_of_a_checkpoint_is_not_to_be_deleted(tmp_path):
    with pytest.raises(StorageError, match="is not a file") as refusal:
        lanczos(Dying(), 4, checkpoint=tmp_path, **OPTIONS)
    assert "elete" not in str(refusal.value)


def test_a_checkpoint_of_another_solve_is_refused(tmp_path):
    path = tmp_path / "state.safetensors"
    with pytest.raises(RuntimeError, match="killed"):
        lanczos(Dying(20), 4, checkpoint=every_third(path), **OPTIONS)
    with pytest.raises(ValueError, match=r"k was 4 and is 5"):
        lanczos(Dying(), 5, checkpoint=every_third(path), **OPTIONS)
    with pytest.raises(ValueError, match=r"seed was 0 and is 1"):
        lanczos(Dying(), 4, checkpoint=every_third(path), seed=1, **OPTIONS)
    with pytest.raises(ValueError, match="start digest"):
        lanczos(Dying(), 4, checkpoint=every_third(path), v0=torch.ones(200).double(), **OPTIONS)


def test_resuming_with_another_operator_is_noticed(tmp_path):
    path = tmp_path / "state.safetensors"
    with pytest.raises(RuntimeError, match="killed"):
        lanczos(Dying(14), 4, checkpoint=every_third(path), **OPTIONS)
    with pytest.raises(ValueError, match=r"state\.safetensors is .* another solve.*was"):
        lanczos(Dying(values=VALUES.flip(0)), 4, checkpoint=every_third(path), **OPTIONS)


def test_resuming_after_a_small_training_step_is_refused(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 4)
    data = torch.randn(20, 6), torch.arange(20) % 4
    path = tmp_path / "state.safetensors"
    hessian = Hessian(model, torch.nn.functional.cross_entropy, data, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="killed"):
        lanczos(Wrapped(hessian, 12), 2, tol=1e-12, dense=False, checkpoint=every_third(path))
    with torch.no_grad():
        model.weight.mul_(1 + 1e-6)
    stepped = Hessian(model, torch.nn.functional.cross_entropy, data, dtype=torch.float64)
    with pytest.raises(ValueError, match="parameters was"):
        lanczos(Wrapped(stepped, 100), 2, tol=1e-12, dense=False, checkpoint=every_third(path))


class Wrapped:
    """An operator that dies at a product, with what the inner one says of itself."""

    def __init__(self, inner, at):
        self.n, self.dtype, self.device = inner.n, inner.dtype, inner.device
        self.inner, self.left, self.about = inner, at, inner.about

    def __matmul__(self, vectors):
        self.left -= 1
        if self.left <= 0:
            raise RuntimeError("killed")
        return self.inner @ vectors


def test_ctrl_c_saves_the_state_and_raises_with_what_was_found(tmp_path):
    whole = lanczos(Dying(), 4, **OPTIONS)
    path = tmp_path / "state.safetensors"
    with pytest.raises(Interrupted, match="interrupted after") as stopped:
        lanczos(Dying(18, KeyboardInterrupt), 4, checkpoint=every_third(path), **OPTIONS)
    assert isinstance(stopped.value, KeyboardInterrupt)
    partial = stopped.value.partial
    assert partial.outcome is Outcome.INTERRUPTED
    assert not partial.complete
    v = partial.vectors
    true = torch.linalg.vector_norm(v * VALUES - partial.values[:, None] * v, dim=1)
    assert (true <= partial.residuals).all()
    assert same(lanczos(Dying(), 4, checkpoint=every_third(path), **OPTIONS), whole)


def test_a_tracker_keeps_nothing_of_a_step_that_was_interrupted():
    tracker = SpectrumTracker(3)
    tracker.update(Dying(), 0)
    with pytest.raises(KeyboardInterrupt):
        tracker.update(Dying(12, KeyboardInterrupt), 1)
    assert tracker.steps == [0]
    assert len(tracker.values) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_solve_after_the_step_and_saves(number, tmp_path):
    whole = lanczos(Dying(), 4, **OPTIONS)
    path = tmp_path / "state.safetensors"

    class Signalled(Dying):
        def __matmul__(self, vectors):
            product = super().__matmul__(vectors)
            if self.count == 17:
                signal.raise_signal(number)
            return product

    operator = Signalled()
    with pytest.raises(Interrupted) as stopped:
        lanczos(operator, 4, checkpoint=every_third(path), **OPTIONS)
    assert operator.count == 17  # that step was finished, and no other begun
    assert stopped.value.partial.matvecs == 17
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert same(lanczos(Dying(), 4, checkpoint=every_third(path), **OPTIONS), whole)


def interrupted_at_line(number, file):
    """A solve in which ``KeyboardInterrupt`` strikes at the ``number``-th line of the solver."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        inside = "curvlab/eigen/" in frame.f_code.co_filename.replace("\\", "/")
        if event == "line" and inside:
            count += 1
            if count == number:
                raise KeyboardInterrupt
        return trace if inside else None

    sys.settrace(trace)
    try:
        lanczos(Dying(), 4, checkpoint=every_third(file), **OPTIONS)
    except Interrupted as stop:
        return count, stop.partial
    except KeyboardInterrupt:
        return count, None
    finally:
        sys.settrace(None)
    return count, None


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 5))]
)
def test_an_interrupt_at_any_line_leaves_a_right_result_and_a_right_file(part, tmp_path):
    whole = lanczos(Dying(), 4, **OPTIONS)
    lines, _ = interrupted_at_line(10**9, tmp_path / "count")
    generator = torch.Generator().manual_seed(part)
    for number in torch.randint(lines, (50,), generator=generator).tolist():
        path = tmp_path / f"{number}.safetensors"
        _, partial = interrupted_at_line(number, path)
        if partial is not None:
            v = partial.vectors
            true = torch.linalg.vector_norm(v * VALUES - partial.values[:, None] * v, dim=1)
            assert (true <= partial.residuals + 1e-12).all(), number
        assert same(lanczos(Dying(), 4, checkpoint=every_third(path), **OPTIONS), whole), number


def test_ctrl_c_in_an_energy_selection_is_not_taken_for_slow_convergence():
    with pytest.raises(KeyboardInterrupt):
        spectral_energy(Dying(40, KeyboardInterrupt), 0.01, progress=False, dense=False)


def test_a_result_survives_saving_and_shows_what_matters(tmp_path):
    pairs = lanczos(Dying(), 4, tol=1e-6)
    again = Eigenpairs.load(pairs.save(tmp_path / "pairs.safetensors"))
    assert same(pairs, again)
    assert again.certificate == pairs.certificate
    assert again.seconds == pairs.seconds
    text = repr(pairs)
    assert "4 converged" in text
    assert "complete" in text
    assert f"{pairs.matvecs} products" in text
    assert len(pairs.head(2)) == 2
    assert torch.equal(pairs.head(2).vectors, pairs.vectors[:2])
    with pytest.raises(ValueError, match="head"):
        pairs.head(9)
    largest = pairs.vectors.gather(1, pairs.vectors.abs().argmax(1, keepdim=True))
    assert (largest > 0).all()  # canonical signs


def test_progress_is_written_to_a_terminal_only():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for stream, shown in ((io.StringIO(), False), (Terminal(), True)):
        progress = Progress("lanczos", None, stream)
        progress.update(12, 3, 6)
        assert ("3 of 6 pairs, 12 products" in stream.getvalue()) == shown
        progress.close()
