"""Products by plain autograd: what one writes without a tool, and in float64 the truth."""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.measure import relative_error
from benchmarks.networks import Network
from curvlab.parameters import layout_of, select_parameters

Product = Callable[[Tensor], Tensor]  # (b, n) -> (b, n)


def plain_hessian(network: Network) -> Product:
    """Double backward with the graph rebuilt for each vector: what one writes without a tool."""
    layout = layout_of(select_parameters(network.model))
    leaves = list(network.model.parameters())

    def product(block: Tensor) -> Tensor:
        rows = []
        for vector in block:
            loss = network.loss(network.model(network.inputs), network.targets)
            first = torch.autograd.grad(loss, leaves, create_graph=True)
            second = torch.autograd.grad(first, leaves, layout.unflatten(vector))
            rows.append(layout.flatten(second))
        return torch.stack(rows)

    return product


def plain_gauss_newton(network: Network) -> Product:
    """Forward mode to the outputs, the loss's Hessian there, and back: ``J' A J v``."""
    parameters = {name: p.detach() for name, p in network.model.named_parameters()}
    layout = layout_of(select_parameters(network.model))

    def outputs(values: dict[str, Tensor]) -> Tensor:
        result: Tensor = torch.func.functional_call(network.model, values, (network.inputs,))
        return result

    slope = torch.func.grad(lambda output: network.loss(output, network.targets))

    def product(block: Tensor) -> Tensor:
        rows = []
        for vector in block:
            along = dict(zip(parameters, layout.unflatten(vector), strict=True))
            _, tangent = torch.func.jvp(outputs, (parameters,), (along,))  # type: ignore[misc]
            at, back = torch.func.vjp(outputs, parameters)  # type: ignore[misc]
            _, bent = torch.func.jvp(slope, (at,), (tangent,))  # type: ignore[misc]
            rows.append(layout.flatten(back(bent)[0].values()))
        return torch.stack(rows)

    return product


PLAIN = {"hessian": plain_hessian, "gauss_newton": plain_gauss_newton}


def truth(network: Network, kind: str, block: Tensor) -> Tensor:
    """The products in float64; the Hessian's must also agree with central differences."""
    exact = network.double()
    result = PLAIN[kind](exact)(block.double())
    if kind == "hessian":
        error = relative_error(_differences(exact, block[0].double()), result[0])
        if not error <= 1e-5:
            raise RuntimeError(
                f"double backward and central differences disagree by {error:.1e} on "
                f"{network.name}: torch's second derivative of a layer is wrong here"
            )
    return result


def steady(make: Callable[..., Network], limit: float, tries: int = 10) -> Network:
    """The network on the first data at which plain float32 and float64 products agree.

    A ReLU unit within rounding of zero may switch between the precisions: one of 163,840 did, and
    moved the product of a ResNet by 4e-3, with every tool in float32 agreeing to 1e-6. Such data
    say nothing about anybody's accuracy. Only plain autograd is looked at, never a contender.
    """
    for seed in range(tries):
        network = make(seed)
        vector = torch.randn(1, network.n, generator=torch.Generator().manual_seed(2))
        exact = plain_hessian(network.double())(vector.double())
        if relative_error(plain_hessian(network)(vector), exact) <= limit:
            return network
    raise RuntimeError(
        f"in {tries} draws of data a unit switched between float32 and float64 each time: "
        "float32 is too coarse for this network and sample count"
    )


def _differences(exact: Network, vector: Tensor) -> Tensor:
    layout = layout_of(select_parameters(exact.model))
    leaves = list(exact.model.parameters())
    step = 1e-6 / float(vector.norm())  # small: a ReLU that switches in between is an error

    def gradient(sign: float) -> Tensor:
        with torch.no_grad():
            for leaf, piece in zip(leaves, layout.unflatten(vector), strict=True):
                leaf.add_(piece, alpha=sign * step)
        loss = exact.loss(exact.model(exact.inputs), exact.targets)
        return layout.flatten(torch.autograd.grad(loss, leaves))

    ahead = gradient(1.0)
    behind = gradient(-2.0)
    gradient(1.0)  # back where it was
    return (ahead - behind) / (2.0 * step)
