"""The library that multiplies float32 matrices: never one that rounds, and products stay right."""

import contextlib
import threading

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import curvlab
from curvlab import float32
from curvlab.learners import Population

MATMUL = torch.backends.mkldnn.matmul


class Watched(nn.Linear):
    """Notes torch's switch in every forward pass."""

    def __init__(self, inside: int, outside: int, seen: list[str]) -> None:
        super().__init__(inside, outside)
        self.seen = seen

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen.append(MATMUL.fp32_precision)
        return super().forward(inputs)

    def __deepcopy__(self, memo: object) -> "Watched":  # an operator works on a copy
        return Watched(self.in_features, self.out_features, self.seen)


def wide_network() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.LayerNorm(96), nn.Linear(96, 7))
    return model, (torch.randn(700, 64), torch.randint(0, 7, (700,)))


def processor(monkeypatch: pytest.MonkeyPatch, described: str, capability: str = "AVX512") -> str:
    monkeypatch.setattr(float32, "_described", lambda: described)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    float32._switch.cache_clear()
    try:
        return float32.float32_switch(
            1, [torch.empty(1).expand(2, float32.WORTHWHILE)], torch.float32
        )
    finally:
        float32._switch.cache_clear()


@pytest.mark.parametrize(
    ("samples", "shapes", "dtype"),
    [(1000, [(20, 20), (20, 10)], torch.float32), (10**9, [(7,)], torch.float32),
     (10**9, [], torch.float32), (10**9, [(20, 20)], torch.float64)],
    ids=["small", "no matrix", "nothing", "float64"],
)  # fmt: skip
def test_what_gains_nothing_stays_with_torchs_choice(monkeypatch, samples, shapes, dtype):
    monkeypatch.setattr(float32, "_switch", lambda: float32.ONEDNN)
    parameters = [torch.empty(shape) for shape in shapes]
    assert float32.float32_switch(samples, parameters, dtype) == float32.EXACT


@pytest.mark.parametrize(
    ("described", "capability"),
    [
        ("vendor_id : GenuineIntel\nflags : avx512f", "AVX512"),
        ("vendor_id : AuthenticAMD\nflags : avx512f amx_bf16", "AVX512"),
        ("vendor_id : AuthenticAMD\nflags : avx2", "AVX2"),
        ("", "AVX512"),
    ],
    ids=["intel", "matrix units", "no AVX-512", "unknown"],
)
def test_processors_on_which_it_gains_nothing_or_may_round_keep_torchs_choice(
    monkeypatch, described, capability
):
    assert processor(monkeypatch, described, capability) == float32.EXACT


def test_a_library_that_rounds_is_not_used(monkeypatch):
    monkeypatch.setattr(float32, "_exact_with", lambda _: False)
    described = "vendor_id : AuthenticAMD\nflags : avx512f"
    assert processor(monkeypatch, described) == float32.EXACT


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float16])
def test_factors_that_lose_bits_are_noticed(monkeypatch, kept):
    whole = torch.Tensor.__matmul__

    def rounding(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if a.dtype != torch.float32:
            return whole(a, b)
        return whole(a.to(kept).float(), b.to(kept).float())

    monkeypatch.setattr(torch.Tensor, "__matmul__", rounding)
    assert not float32._exact_with(float32.EXACT)


def test_exact_products_are_found_exact():
    assert float32._exact_with(float32.EXACT)


@pytest.mark.parametrize("switch", [float32.EXACT, float32.ONEDNN])
def test_products_are_as_right_with_either_library(monkeypatch, switch):
    """Where the processor would round (matrix units), only torch's own choice is tried."""
    if switch == float32.ONEDNN and not float32._exact_with(switch):
        pytest.skip("this processor rounds with oneDNN")
    monkeypatch.setattr(float32, "_switch", lambda: switch)
    model, data = wide_network()
    operator = curvlab.Hessian(model, cross_entropy, data)
    assert operator.problem.matmul == switch
    truth = curvlab.Hessian(model, cross_entropy, data, dtype=torch.float64)
    block = torch.randn(3, operator.n, generator=torch.Generator().manual_seed(1))
    right = truth @ block.double()
    error = (operator @ block).double() - right
    assert error.norm() <= 2e-6 * right.norm()


def test_a_callers_switch_is_as_before_after_products(monkeypatch):
    monkeypatch.setattr(float32, "_switch", lambda: float32.ONEDNN)
    model, data = wide_network()
    before = MATMUL.fp32_precision
    operator = curvlab.Hessian(model, cross_entropy, data)
    operator @ torch.ones(operator.n)
    assert MATMUL.fp32_precision == before


def test_the_switch_is_on_during_products(monkeypatch):
    monkeypatch.setattr(float32, "_switch", lambda: float32.ONEDNN)
    seen: list[str] = []
    _, data = wide_network()
    model = nn.Sequential(Watched(64, 96, seen), nn.Tanh(), nn.Linear(96, 7))
    curvlab.Hessian(model, cross_entropy, data, check=False)
    assert set(seen) == {float32.ONEDNN}


def test_float64_products_leave_it_alone():
    model, data = wide_network()
    operator = curvlab.Hessian(model, cross_entropy, data, dtype=torch.float64)
    assert operator.problem.matmul == float32.EXACT


def test_training_and_predictions_of_large_networks_use_it_and_put_it_back(monkeypatch):
    monkeypatch.setattr(float32, "_switch", lambda: float32.ONEDNN)
    seen: list[str] = []
    before = MATMUL.fp32_precision
    population = Population([nn.Sequential(Watched(400, 600, seen), nn.Softplus())], [0])
    inputs, targets = torch.randn(1, 10, 400), torch.zeros(1, 10, dtype=torch.long)
    population.gradient_(inputs, targets, 0)
    population.logits(inputs[0], 0)
    assert seen == [float32.ONEDNN] * 2
    assert MATMUL.fp32_precision == before


def test_a_callers_own_choice_stands_in_training():
    before = MATMUL.fp32_precision
    MATMUL.fp32_precision = "tf32"
    try:
        with float32.float32_products(float32.ONEDNN):
            assert MATMUL.fp32_precision == "tf32"
    finally:
        MATMUL.fp32_precision = before


@pytest.mark.parametrize("ends", [("large", "small"), ("small", "large")])
def test_overlapping_products_put_back_what_the_caller_had(ends):
    """Those of two threads end in any order."""
    before = MATMUL.fp32_precision
    large, small = (float32.MATMUL.set_to(switch) for switch in (float32.ONEDNN, float32.EXACT))
    contexts = {"large": large, "small": small}
    for context in contexts.values():
        context.__enter__()
    for name in ends:
        contexts[name].__exit__(None, None, None)
    assert MATMUL.fp32_precision == before


def test_operators_of_two_threads_leave_the_switch_as_it_was(monkeypatch):
    """The second product begins within the first one and ends after it."""
    monkeypatch.setattr(float32, "_switch", lambda: float32.ONEDNN)
    inside, going = threading.Event(), threading.Event()

    class Waiting(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            if threading.current_thread().name == "second":
                inside.set()
                assert going.wait(60)
            return super().forward(inputs)

    _, data = wide_network()
    small = (data[0][:5], data[1][:5])
    slow = nn.Sequential(Waiting(64, 7))
    second = threading.Thread(
        target=lambda: curvlab.Hessian(slow, cross_entropy, small, check=False), name="second"
    )
    before = MATMUL.fp32_precision
    with float32.float32_products(float32.ONEDNN):
        second.start()
        assert inside.wait(60)
    going.set()
    second.join(60)
    assert not second.is_alive()
    assert MATMUL.fp32_precision == before


def test_what_another_context_has_set_is_not_taken_for_the_callers_choice():
    before = MATMUL.fp32_precision
    with contextlib.ExitStack() as other:
        other.enter_context(float32.float32_products(float32.ONEDNN))
        with float32.float32_products(float32.ONEDNN):
            other.close()  # as another thread's may end
            assert MATMUL.fp32_precision == float32.ONEDNN
    assert MATMUL.fp32_precision == before


@pytest.mark.parametrize(
    "around",
    [lambda: torch.autocast("cpu", torch.bfloat16), lambda: torch.device("meta"),
     torch.inference_mode],
    ids=["autocast", "default device", "inference mode"],
)  # fmt: skip
def test_what_is_found_does_not_depend_on_where_it_is_asked(around):
    with around():
        assert float32._exact_with(float32.EXACT)


def test_a_callers_own_switch_is_no_part_of_what_is_found(monkeypatch):
    seen = []
    whole = torch.Tensor.__matmul__

    def watched(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        seen.append(MATMUL.fp32_precision)
        return whole(a, b)

    monkeypatch.setattr(torch.Tensor, "__matmul__", watched)
    before = MATMUL.fp32_precision
    MATMUL.fp32_precision = "tf32"
    try:
        float32._exact_with(float32.ONEDNN)
        assert MATMUL.fp32_precision == "tf32"
    finally:
        MATMUL.fp32_precision = before
    assert set(seen) == {float32.ONEDNN}
