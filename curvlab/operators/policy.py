"""How a model is evaluated: its modes, its randomness, its arithmetic.

A train-mode dropout is another function at every call, and a train-mode BatchNorm couples the
samples of a batch: neither has *the* Hessian, so both are refused, with three named ways out
(``mode=``):

- ``"eval"``: evaluate in eval mode; the model's own flags stay as they are.
- ``"frozen-masks"``: dropout is on, with the same mask in every evaluation.
- ``"batch-statistics"``: BatchNorm uses the statistics of each batch as it was given; the running
  statistics are not touched.
"""

import contextlib
import logging
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from curvlab.float32 import EXACT, SWITCHES, Wanted
from curvlab.operators.functions import ONE_AT_A_TIME, Replaced
from curvlab.operators.narrow import KeepNarrow

log = logging.getLogger("curvlab")

Mode = Literal["eval", "frozen-masks", "batch-statistics"]
MODES = ("eval", "frozen-masks", "batch-statistics")
Precision = Literal["exact", "tf32", "bfloat16"]
# Relative error of a product, as an upper limit for the probe: inputs of every matrix product are
# rounded to 11 (tf32) or 8 (bfloat16) significant bits, several times in a row.
BAND: dict[str, float | None] = {"exact": None, "tf32": 2e-2, "bfloat16": 2e-1}


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside torch.compile, DataParallel or DistributedDataParallel wrappers."""
    found = inner(model)
    _require_whole(found)
    return found


def inner(model: nn.Module) -> nn.Module:
    """:func:`unwrap`, of a model whose parameters may be in shards."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be a torch.nn.Module; got {type(model).__name__}. The order of arguments "
            "is model, loss, data"
        )
    while True:
        inside = getattr(model, "_orig_mod", None)
        if inside is None and isinstance(
            model, nn.DataParallel | nn.parallel.DistributedDataParallel
        ):
            inside = model.module
        if not isinstance(inside, nn.Module):
            return model
        log.info("curvature uses the module inside %s", type(model).__name__)
        model = inside


def fully_sharded(model: nn.Module) -> bool:
    """Whether ``model`` has been through FSDP2 (``fully_shard``)."""
    return any(hasattr(module, "_get_fsdp_state") for module in model.modules())


def _require_whole(model: nn.Module) -> None:
    """Raise if parameters are in shards, with what there is for them."""
    if fully_sharded(model):
        raise TypeError(
            "the model's parameters are in shards (FSDP2): Hessian and GaussNewton take it as it "
            "is; for everything else make a plain model of the same code and fill it with "
            "curvlab.distributed.fill(plain, model) on every rank"
        )
    if any(hasattr(parameter, "full_tensor") for parameter in model.parameters()):
        raise TypeError(
            "the model's parameters are in shards (DTensor): use "
            "curvlab.distributed.TensorParallelHessian, which is exact; or make a plain model of "
            "the same code, fill it with curvlab.distributed.fill(plain, model) on every rank, and "
            "use that"
        )


def modes(mode: Mode | Sequence[Mode] | None) -> frozenset[str]:
    """The named policies in ``mode``."""
    named = [] if mode is None else [mode] if isinstance(mode, str) else list(mode)
    for name in named:
        if name not in MODES:
            raise ValueError(f"mode= takes {', '.join(map(repr, MODES))}; got {name!r}")
    if "eval" in named and len(named) > 1:
        raise ValueError('mode="eval" turns dropout off: it cannot be combined with another mode')
    return frozenset(named)


def training_flags(model: nn.Module, policies: frozenset[str]) -> dict[nn.Module, bool]:
    """Which modules run in train mode; refuses what has no single Hessian."""
    flags = {m: m.training and "eval" not in policies for m in model.modules()}
    for name, module in model.named_modules():
        label = f"{name or 'the model'} ({type(module).__name__})"
        if drops(module) and flags[module] and "frozen-masks" not in policies:
            raise ValueError(
                f"{label} is in train mode, so every product would see another dropout mask. Call "
                'model.eval(), or pass mode="eval" or mode="frozen-masks"'
            )
        if not isinstance(module, _BatchNorm) or "batch-statistics" in policies:
            continue
        if flags[module]:
            raise ValueError(
                f"{label} is in train mode, so the loss of a sample depends on its batch. Call "
                'model.eval(), or pass mode="eval" or mode="batch-statistics"'
            )
        if module.running_mean is None:
            raise ValueError(
                f"{label} keeps no running statistics, so the loss of a sample depends on its "
                'batch even in eval mode: pass mode="batch-statistics"'
            )
    return flags


def drops(module: nn.Module) -> bool:
    """Whether the module is random in train mode."""
    if isinstance(module, _DropoutNd):
        return module.p > 0
    if isinstance(module, nn.MultiheadAttention):
        return float(module.dropout) > 0
    return isinstance(module, nn.RNNBase) and module.dropout > 0 and module.num_layers > 1


@contextlib.contextmanager
def evaluation(
    seed: int | None,
    device: torch.device,
    precision: Precision,
    *,
    recurrent: bool = False,
    recomputes: bool = False,
    widen: torch.dtype | None = None,
    frozen: frozenset[int] = frozenset(),
) -> Iterator[Replaced]:
    """Run a forward pass so that it can be differentiated twice.

    Functions without a right second derivative are replaced, compiled submodules run eagerly, and
    autocast that the model itself turns on is left out, as that around it is.

    Args:
        seed: The seed of the global generators during the pass; they are restored after it.
            ``None`` for a model that draws no numbers.
        device: Where the model is.
        precision: ``"bfloat16"`` runs under autocast.
        recurrent: Whether the fused kernels of recurrent layers have to be avoided.
        recomputes: Whether checkpointed parts run again inside a backward pass. torch's own
            attention without fused kernels is then used, which can be had there too.
        widen: What narrow frozen weights are converted to where they are used.
        frozen: Their storages.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(ONE_AT_A_TIME)
        if recomputes:
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        wanted = precision == "bfloat16"
        mode = stack.enter_context(
            Replaced(
                device.type,
                autocast=wanted,
                own_attention=not recomputes,
                widen=widen,
                frozen=frozen,
            )
        )
        if widen is not None:
            stack.enter_context(KeepNarrow(widen))
        if seed is not None:
            stack.enter_context(_seeded(seed, device))
        if "torch._dynamo" in sys.modules:  # compiled graphs have no second derivatives
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        if recurrent:
            stack.enter_context(_unfused())
        if precision == "bfloat16":
            stack.enter_context(torch.autocast(device.type, dtype=torch.bfloat16))
        yield mode


@contextlib.contextmanager
def _unfused() -> Iterator[None]:
    """Recurrent layers without their fused kernels."""
    backends: list[Any] = [torch.backends.cudnn, torch.backends.mkldnn]
    before = [backend.enabled for backend in backends]
    for backend in backends:
        backend.enabled = False
    try:
        yield
    finally:
        for backend, enabled in zip(backends, before, strict=True):
            backend.enabled = enabled


@contextlib.contextmanager
def arithmetic(device: torch.device, precision: Precision, matmul: str = EXACT) -> Iterator[None]:
    """Gradients on whatever the caller's mode, and no rounding that nobody asked for.

    Autocast around the caller is left out: it would round some products and not others. By default
    cuDNN may round the inputs of float32 convolutions to TF32, and a global switch may
    do the same to matrix products; here only ``precision="tf32"`` does.

    Args:
        device: Where products are computed.
        precision: What may be rounded.
        matmul: The switch of float32 matrix products on a processor (:mod:`curvlab.float32`).
    """
    switches = SWITCHES["cuda" if device.type == "cuda" else "cpu"]
    exact = "tf32" if precision == "tf32" and device.type == "cuda" else EXACT
    of_matrices = matmul if device.type == "cpu" else exact
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if torch.is_autocast_enabled(device.type):  # the caller's: it would not be there later
            stack.enter_context(torch.autocast(device.type, enabled=False))
        wanted = [Wanted(value) for value in (of_matrices, exact, exact)]
        try:
            for switch, one in zip(switches, wanted, strict=True):
                switch.take(one)
            yield
        finally:
            for switch, one in zip(switches, wanted, strict=True):
                switch.give_back(one)


def generators(device: torch.device) -> list[torch.Generator]:
    """The global generators that a forward pass on ``device`` may draw from."""
    found = [torch.default_generator]
    if device.type == "cuda":
        torch.cuda.current_device()  # the generators exist once CUDA is initialised
        found.append(torch.cuda.default_generators[device.index or 0])
    return found


@contextlib.contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    drawn = generators(device)
    before = [generator.get_state() for generator in drawn]
    for generator in drawn:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in zip(drawn, before, strict=True):
            generator.set_state(state)


def drew(seed: int, device: torch.device) -> bool:
    """Whether numbers were drawn since the global generators were seeded with ``seed``."""
    fresh = torch.Generator().manual_seed(seed).get_state()
    if not torch.equal(torch.default_generator.get_state(), fresh):
        return True
    return device.type == "cuda" and bool(
        torch.cuda.default_generators[device.index or 0].get_offset()
    )
