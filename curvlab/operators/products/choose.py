"""Timing the engines once for a model and a shape of data."""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import nn

from curvlab.batches import sample_count, tensors
from curvlab.operators.frozen import Chunk
from curvlab.operators.problem import Problem
from curvlab.operators.products.autograd import Product

log = logging.getLogger("curvlab")

Engine = Literal["retained", "rebuilt", "blockwise", "linearised", "compiled", "mlp"]
ROUNDS = 3

_measured: WeakKeyDictionary[nn.Module, dict[Any, Engine]] = WeakKeyDictionary()


def fastest(
    problem: Problem, kind: str, builders: Mapping[Engine, Callable[[Chunk], Product]]
) -> Engine:
    """The engine with the fastest product on a first chunk; remembered for this model and shape.

    Set-up time is logged but not weighed: measuring is for work of many products. Compiling takes
    minutes and was no faster than the kept graph on a CPU, so it is only tried on a GPU.
    """
    batch = problem.batches.first(None if problem.whole else 32)
    shapes = tuple(tuple(tensor.shape) for tensor in tensors(batch))
    key = (kind, problem.device, problem.dtype, problem.precision, problem.layout.names, shapes)
    known = _measured.setdefault(problem.model, {})
    if key not in known:
        seconds = {
            engine: _time(problem, Chunk(batch, 1.0, 0), build, engine)
            for engine, build in builders.items()
            if engine != "compiled" or problem.device.type == "cuda"
        }
        known[key] = min(seconds, key=lambda engine: seconds[engine])
        log.info("%s on %s samples: %s", kind, sample_count(batch), known[key])
    return known[key]


def _time(problem: Problem, chunk: Chunk, build: Callable[[Chunk], Product], engine: str) -> float:
    vector = torch.ones(1, problem.layout.n, dtype=problem.dtype, device=problem.device)
    with problem.arithmetic():
        start = time.perf_counter()
        product = build(chunk)
        _finish(product(vector))
        setup = time.perf_counter() - start
        best = float("inf")
        for _ in range(ROUNDS):
            start = time.perf_counter()
            _finish(product(vector))
            best = min(best, time.perf_counter() - start)
    log.info("  %s: %.2e s per product, %.2e s to set up", engine, best, setup)
    return best


def _finish(result: torch.Tensor) -> None:
    if result.device.type == "cuda":
        torch.cuda.synchronize(result.device)
