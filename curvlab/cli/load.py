"""The user's model, weights, data and loss, from what the command line names."""

import importlib
import importlib.util
import json
import sys
from argparse import Namespace
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from curvlab.batches import Batches, freeze, read, rows, sample_count
from curvlab.cli.parser import UsageError
from curvlab.losses import next_token, sequence
from curvlab.operators import (
    Curvature,
    EmpiricalFisher,
    Fisher,
    FunctionalHessian,
    GaussNewton,
    Hessian,
    Objective,
)

CURVATURES: dict[str, type[Curvature]] = {
    "hessian": Hessian,
    "ggn": GaussNewton,
    "fisher": Fisher,
    "empirical-fisher": EmpiricalFisher,
    "functional": FunctionalHessian,
}
LOSSES = (
    "cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss",
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div", "poisson_nll_loss",
)  # fmt: skip
TOKENS = {"next_token": next_token, "sequence": sequence}
PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".tar")
CONVERT = (
    "torch.load would run whatever code is in it. Where you trust it, convert it once: python -c "
    '"import torch, safetensors.torch as s; '
    "s.save_file(torch.load('{0}', weights_only=True), '{1}')\""
)


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A model, its loss and data, and the settings of an operator on them."""

    model: nn.Module
    loss: Any
    data: Any
    options: dict[str, Any]

    @property
    def bare(self) -> bool:
        """Whether a batch may be a single tensor."""
        return self.loss is None or isinstance(self.loss, Objective)


def case(options: Namespace, *, meta: bool = False) -> Case:
    """All that the arguments of the group "model and data" name.

    Args:
        meta: Make the model without memory, for counting.
    """
    device = _device("meta" if meta else options.device)
    with torch.device(device):
        model = call(options.model, "--model")
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"--model {options.model} must return a torch.nn.Module; got {type(model).__name__}"
        )
    model = model.to(device)
    if options.checkpoint is not None and not meta:
        load_weights(model, Path(options.checkpoint))
    loss = _loss(options.loss)
    data = call(options.data, "--data")
    settings: dict[str, Any] = {
        name: getattr(options, name)
        for name in ("select", "mode", "reduction", "chunk")
        if getattr(options, name) is not None
    }
    if options.count is not None:
        settings["count"] = named(options.count, "--count")
    if options.dtype is not None:
        settings["dtype"] = getattr(torch, options.dtype)
    found = Case(model, loss, data, settings)
    if options.samples is None:
        return found
    return replace(found, data=first_samples(data, options.samples, bare=found.bare))


def operator(options: Namespace) -> Curvature:
    """The curvature operator that the arguments describe."""
    given = case(options)
    kind = CURVATURES[options.curvature]
    return kind(
        given.model,
        given.loss,
        given.data,
        precision=options.precision,
        budget=options.budget,
        engine=options.engine,
        check=not options.no_check,
        **given.options,
    )


def first_samples(data: Any, count: int, *, bare: bool) -> Batches:
    """The first ``count`` samples of ``data``."""
    whole = read(data, bare=bare)
    if whole.samples is None:
        raise UsageError("--samples: a batch has no common first dimension, so it cannot be cut")
    pieces, left = [], count
    for batch in whole:
        size = sample_count(batch) or 0
        pieces.append(rows(batch, slice(0, left)))
        left -= size
        if left <= 0:
            break
    return freeze(pieces, bare=True)


def named(spec: str, option: str) -> Any:
    """What ``module:name`` or ``file.py:name`` names; a name may have dots."""
    place, _, name = spec.rpartition(":")
    found = module = _module(place, option)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None:
        names = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
        raise UsageError(f"{option}: {place} has no {name!r}; it has {', '.join(names[:12])}")
    return found


def call(spec: str, option: str) -> Any:
    """What the function named by ``module:function`` or ``file.py:function`` returns."""
    found = named(spec, option)
    if not callable(found):
        return found
    try:
        return found()
    except Exception as error:
        raise UsageError(f"{option}: {spec}() raised {type(error).__name__}: {error}") from error


def _module(place: str, option: str) -> Any:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as python -m does
    module: Any = None
    if place.endswith(".py"):
        path = Path(place)
        if not path.is_file():
            raise UsageError(f"{option}: there is no file {place}")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None:
            raise UsageError(f"{option}: {place} cannot be imported")
        module = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(path.stem, module)
        execute = spec.loader.exec_module
    try:
        if module is None:
            return importlib.import_module(place)
        execute(module)
        return module
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{option}: {error}. Run where it can be imported, or name a file: path/to/file.py:name"
        ) from error
    except Exception as error:
        raise UsageError(
            f"{option}: importing {place} raised {type(error).__name__}: {error}"
        ) from error


def load_weights(model: nn.Module, path: Path) -> None:
    """Fill the model from a safetensors file of its ``state_dict``; pickles are refused."""
    if path.suffix in PICKLES:
        raise UsageError(
            f"--checkpoint {path} is a pickle by its name, and pickles are not read: "
            + CONVERT.format(path, path.with_suffix(".safetensors"))
        )
    if not path.is_file():
        raise UsageError(f"--checkpoint: there is no file {path}")
    with path.open("rb") as file:
        head = file.read(2)
    if head in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"):
        raise UsageError(
            f"--checkpoint {path} is a pickle by its content, whatever its name: "
            + CONVERT.format(path, path.with_suffix(".safetensors"))
        )
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        state = load_file(path)
    except (SafetensorError, OSError, json.JSONDecodeError) as error:
        raise UsageError(f"--checkpoint {path} is not a safetensors file: {error}") from error
    own = model.state_dict(keep_vars=True)
    tied = {id(value) for name, value in own.items() if name in state}
    missing = [n for n, value in own.items() if n not in state and id(value) not in tied]
    extra = [name for name in state if name not in own]
    wrong = [n for n in own if n in state and own[n].shape != state[n].shape]
    if missing or extra or wrong:
        told = [f"{len(missing)} missing ({', '.join(missing[:3])})"] if missing else []
        told += [f"{len(extra)} unknown ({', '.join(extra[:3])})"] if extra else []
        told += [f"{n} is {tuple(state[n].shape)}, not {tuple(own[n].shape)}" for n in wrong[:3]]
        raise UsageError(f"--checkpoint {path} is of another model: {'; '.join(told)}")
    model.load_state_dict(state, strict=False)


def _loss(name: str) -> Any:
    if name == "own":
        return None
    if name in LOSSES:
        return getattr(functional, name)
    if name in TOKENS:
        return TOKENS[name]
    if ":" not in name:
        known = ", ".join((*LOSSES, *TOKENS))
        raise UsageError(f"--loss is one of {known}, own, or file.py:name; got {name!r}")
    found = named(name, "--loss")
    if not callable(found) and not isinstance(found, Objective):
        raise UsageError(
            f"--loss {name} is neither a function nor a curvlab.Objective: {type(found).__name__}"
        )
    return found


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"--device {name!r} is not a device: cpu, cuda, cuda:1") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: this torch sees no CUDA device; use --device cpu")
    return device
