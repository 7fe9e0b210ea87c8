"""curvlinops: operators over columns, for parameters in the order they are given."""

from collections.abc import Callable

from curvlinops import GGNLinearOperator, HessianLinearOperator
from torch import Tensor, nn

from curvlab.bench.problem import Data, Product

NAME = DISTRIBUTION = "curvlinops-for-pytorch"
BLOCKS = True  # several vectors share work


def hessian(model: nn.Module, loss: nn.Module, batches: Data) -> Product:
    return _rows(HessianLinearOperator, model, loss, batches)


def gauss_newton(model: nn.Module, loss: nn.Module, batches: Data) -> Product:
    return _rows(GGNLinearOperator, model, loss, batches)


def _rows(kind: Callable[..., object], model: nn.Module, loss: nn.Module, batches: Data) -> Product:
    operator = kind(
        model,
        loss,
        list(model.parameters()),
        batches,
        check_deterministic=False,
        num_data=sum(len(inputs) for inputs, _ in batches),
    )

    def product(block: Tensor) -> Tensor:
        result: Tensor = operator @ block.T  # type: ignore[operator]
        return result.T

    return product
