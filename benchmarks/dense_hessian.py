"""The dense Hessian of the MLP: the Khatri-Rao way against a vmapped ``jvp(grad)``.

    python -m benchmarks.dense_hessian [--size small|full] [--dtype float32|float64] [--out FILE]

CPU seconds on one thread by default. Rows cost the general way the same each, so it is timed on
``--rows`` of them and scaled to all ``n``; the Khatri-Rao way is timed whole. Gate: those rows of
both must agree, and the matrix must be symmetric to the last bit.
"""

import argparse
import time

import torch
from torch import Tensor

from benchmarks.measure import Row, format_table, relative_error, row, write_rows
from benchmarks.networks import SIZES, Network
from curvlab.bench.timing import environment, interleave, per_round_ratio, pinned_threads, quantiles
from curvlab.operators.dense_mlp import dense_hessian
from curvlab.operators.products.mlp import recognise
from curvlab.parameters import layout_of, select_parameters

LIMIT = {torch.float32: 1e-5, torch.float64: 1e-12}
CHUNK = 64  # rows per vmap: more did not help


def vmapped_rows(network: Network, indices: Tensor) -> Tensor:
    """Rows ``indices`` of the Hessian by ``vmap`` of ``jvp(grad)``: the general way."""
    layout = layout_of(select_parameters(network.model))
    point = {name: p.detach() for name, p in network.model.named_parameters()}

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        output = torch.func.functional_call(network.model, parameters, (network.inputs,))
        value: Tensor = network.loss(output, network.targets)
        return value

    def one(vector: Tensor) -> Tensor:
        along = dict(zip(point, layout.unflatten(vector), strict=True))
        _, tangent = torch.func.jvp(torch.func.grad(loss), (point,), (along,))  # type: ignore[misc]
        return torch.cat([piece.reshape(-1) for piece in tangent.values()])

    pieces = []
    for start in range(0, len(indices), CHUNK):
        some = indices[start : start + CHUNK]
        unit = torch.zeros(len(some), layout.n, dtype=network.inputs.dtype)
        unit[torch.arange(len(some)), some] = 1.0
        pieces.append(torch.func.vmap(one)(unit))
    return torch.cat(pieces)


def measure(network: Network, rows: int, rounds: int, threads: int) -> list[Row]:
    """Gate, then CPU seconds of both, interleaved."""
    parameters = select_parameters(network.model)
    plan = recognise(network.model, network.loss, parameters)
    if plan is None:
        raise RuntimeError("the benchmark's MLP was not recognised as one")
    tensors = dict(network.model.named_parameters())
    spread = torch.linspace(0, network.n - 1, min(rows, network.n)).long()

    def whole() -> Tensor:
        return dense_hessian(plan, tensors, network.inputs, network.targets)

    def some() -> Tensor:
        return vmapped_rows(network, spread)

    matrix = whole()
    error = relative_error(matrix[spread], some())
    if not error <= LIMIT[matrix.dtype] or not torch.equal(matrix, matrix.T):
        raise RuntimeError(f"the dense Hessian is wrong: rows off by {error:.1e}")
    del matrix
    seconds = interleave(
        {"khatri-rao": whole, "vmap": some},
        rounds=rounds,
        warmup=0,
        threads=threads,
        clock=time.process_time,
    )
    scale = network.n / len(spread)
    general = [scale * value for value in seconds["vmap"]]
    ratio = quantiles(per_round_ratio(general, seconds["khatri-rao"]))

    def figure(contender: str, metric: str, unit: str, value: object) -> Row:
        return row("dense hessian", contender, metric, unit, network.n, value, threads=threads)  # type: ignore[arg-type]

    name = f"vmap of jvp(grad), {len(spread)} rows scaled"
    return [
        figure("curvlab", "error", "relative", error),
        figure("curvlab", "CPU time", "seconds", quantiles(seconds["khatri-rao"])),
        figure(name, "CPU time", "seconds", quantiles(general)),
        figure("curvlab", "times faster than vmap", "", ratio),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", help="write the rows to this .csv or .json")
    options = parser.parse_args()
    print(environment(options.threads))
    network = SIZES[options.size]["mlp"]()
    if options.dtype == "float64":
        network = network.double()
    with pinned_threads(options.threads):
        rows = measure(network, options.rows, options.rounds, options.threads)
    print(f"n = {network.n:,}, {network.samples} samples, {options.dtype}")
    lines = [
        [entry.contender, entry.metric, f"{entry.p50:.3g}", f"{entry.p20:.3g} - {entry.p80:.3g}"]
        for entry in rows
    ]
    print(format_table(["contender", "figure", "median", "20 % - 80 %"], lines))
    if options.out:
        print("rows in", write_rows(options.out, rows))


if __name__ == "__main__":
    main()
