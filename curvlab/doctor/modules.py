"""What can be seen by looking at a model, without running it."""

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from curvlab.doctor.report import Finding
from curvlab.operators.policy import drops, unwrap


def look(model: nn.Module, policies: frozenset[str]) -> Iterator[Finding]:
    """Findings about modules and parameters.

    Args:
        policies: The modes that the operator will be given.
    """
    inner = unwrap(model)
    if inner is not model:
        yield Finding(
            "wrapped model",
            f"the model is wrapped in {type(model).__name__}, whose second derivatives raise",
            "none needed: the module inside is used; results carry its parameter names",
        )
    yield from _train_mode(inner, policies)
    yield from _layers(inner)
    yield from _parameters(inner)


def _train_mode(model: nn.Module, policies: frozenset[str]) -> Iterator[Finding]:
    training = [(n, m) for n, m in model.named_modules() if m.training and "eval" not in policies]
    dropping = [n for n, m in training if drops(m)]
    if dropping:
        covered = "frozen-masks" in policies
        yield Finding(
            "train-mode dropout",
            f"{_some(dropping)} draw{_s(dropping)} another mask in every product",
            'model.eval(), or mode="eval"; mode="frozen-masks" for the curvature of one mask',
            level="wrong",
            handled="yes" if covered else "refused",
        )
    batchnorm = [n for n, m in training if isinstance(m, _BatchNorm)]
    covered = "batch-statistics" in policies
    if batchnorm:
        yield Finding(
            "train-mode BatchNorm",
            f"{_some(batchnorm)} couple{_s(batchnorm)} the samples of a batch: the loss of a "
            "sample depends on its neighbours",
            'model.eval(), or mode="eval"; mode="batch-statistics" if that coupling is wanted',
            level="wrong",
            handled="yes" if covered else "refused",
        )
    norms = [(n, m) for n, m in model.named_modules() if isinstance(m, _BatchNorm)]
    without = [n for n, m in norms if m.running_mean is None and n not in batchnorm]
    if without:
        yield Finding(
            "BatchNorm without statistics",
            f"{_some(without)} keep{_s(without)} no running statistics and couples samples even in "
            "eval mode",
            'mode="batch-statistics", or track_running_stats=True',
            level="wrong",
            handled="yes" if covered else "refused",
        )
    fresh = [n for n, m in norms if m.num_batches_tracked is not None and not m.num_batches_tracked]
    if fresh:
        yield Finding(
            "BatchNorm never trained",
            f"{_some(fresh)} still ha{'s' if len(fresh) == 1 else 've'} the initial statistics: in "
            "eval mode activations may grow until the loss saturates and its curvature vanishes",
            "load the trained buffers too, or run some batches in train mode first",
            handled="no",
        )


def fused_attention(where: str) -> Finding:
    """``where`` names what uses it and ends in a verb: "... fused attention, which has"."""
    return Finding(
        "fused attention",
        f"{where} no second derivative; the written-out one keeps heads x tokens x tokens numbers",
        "none needed; budget= or smaller chunks if memory is short",
        level="slow",
    )


def _layers(model: nn.Module) -> Iterator[Finding]:
    attention = [n for n, m in model.named_modules() if isinstance(m, nn.MultiheadAttention)]
    if attention:
        yield fused_attention(f"{_some(attention)} use{_s(attention)} fused attention, which has")
    recurrent = [n for n, m in model.named_modules() if isinstance(m, nn.RNNBase)]
    if recurrent:
        yield Finding(
            "fused recurrent layer",
            f"{_some(recurrent)} ha{'s' if len(recurrent) == 1 else 've'} no second derivative in "
            "its fused kernels",
            "none needed: the unfused ones are used",
            level="slow",
        )


def _parameters(model: nn.Module) -> Iterator[Finding]:
    named = dict(model.named_parameters())
    lazy = [n for n, p in named.items() if is_lazy(p)]
    if lazy:
        yield Finding(
            "uninitialised parameters",
            f"{_some(lazy)} ha{'s' if len(lazy) == 1 else 've'} no shape yet",
            "run one batch through the model first",
            level="wrong",
            handled="no",
        )
        return
    every = list(model.named_parameters(remove_duplicate=False))
    tied = [n for n, p in every if n not in named]
    if tied:
        yield Finding(
            "tied parameters",
            f"{_some(tied)} share{_s(tied)} memory with a parameter of another name",
            "none needed: it is one block of the vector, under its first name",
        )
    frozen = [n for n, p in named.items() if not p.requires_grad]
    if frozen and len(frozen) < len(named):
        yield Finding(
            "frozen parameters",
            f"{_some(frozen)} require{_s(frozen)} no gradient and are left out of the curvature",
            "select= takes them in, by name",
        )
    if not named or len(frozen) == len(named):
        yield Finding(
            "nothing to differentiate",
            "the model has no parameters" if not named else "every parameter is frozen",
            "unfreeze some, or name them with select=",
            level="wrong",
            handled="refused",
        )
    yield from _kinds({n: p for n, p in named.items() if p.requires_grad})


def _kinds(named: dict[str, nn.Parameter]) -> Iterator[Finding]:
    dtypes = {p.dtype for p in named.values()}
    if len(dtypes) > 1:
        yield Finding(
            "mixed dtypes",
            f"the parameters are {', '.join(sorted(map(str, dtypes)))}",
            "dtype=torch.float32 (or float64) evaluates everything in one",
            level="wrong",
            handled="refused",
        )
    elif dtypes and not dtypes <= {torch.float32, torch.float64}:
        yield Finding(
            "half precision",
            f"the parameters are {next(iter(dtypes))}: second derivatives would be mostly rounding",
            'dtype=torch.float32, with precision="bfloat16" if the speed is wanted',
            level="wrong",
            handled="refused",
        )
    devices = {str(p.device) for p in named.values()}
    if len(devices) > 1:
        yield Finding(
            "several devices",
            f"the parameters are on {', '.join(sorted(devices))}",
            "move the model to one device, or select= the part on one",
            level="wrong",
            handled="refused",
        )
    broken = [n for n, p in named.items() if not p.is_meta and not bool(p.isfinite().all())]
    if broken:
        yield Finding(
            "NaN in parameters",
            f"{_some(broken)} hold{_s(broken)} NaN or infinity",
            "load an earlier checkpoint; lower the learning rate",
            level="wrong",
            handled="refused",
        )


def _some(names: Sequence[str], most: int = 3) -> str:
    shown = ", ".join(name or "the model" for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def _s(names: Sequence[str]) -> str:
    return "s" if len(names) == 1 else ""
