"""curvlinops: operators over columns, for parameters in the order they are given."""

from collections.abc import Callable

from curvlinops import GGNLinearOperator, HessianLinearOperator
from torch import Tensor, nn

DISTRIBUTION = "curvlinops-for-pytorch"
BLOCKS = True  # several vectors share work
NETWORKS = None  # any

Product = Callable[[Tensor], Tensor]


def hessian(model: nn.Module, loss: nn.Module, inputs: Tensor, targets: Tensor) -> Product:
    return _rows(HessianLinearOperator, model, loss, inputs, targets)


def gauss_newton(model: nn.Module, loss: nn.Module, inputs: Tensor, targets: Tensor) -> Product:
    return _rows(GGNLinearOperator, model, loss, inputs, targets)


def _rows(
    kind: Callable[..., object], model: nn.Module, loss: nn.Module, inputs: Tensor, targets: Tensor
) -> Product:
    operator = kind(
        model,
        loss,
        list(model.parameters()),
        [(inputs, targets)],
        check_deterministic=False,
        num_data=len(inputs),
    )

    def product(block: Tensor) -> Tensor:
        result: Tensor = operator @ block.T  # type: ignore[operator]
        return result.T

    return product
