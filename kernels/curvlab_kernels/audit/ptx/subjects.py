"""What mutants are made of: checks, and with them the kernels that they launch."""

from collections.abc import Callable
from functools import partial

import torch

from curvlab_kernels.audit import agreement, agreement_exact, agreement_orthogonal

Check = Callable[[torch.device], None]
# Rows and columns, few, so that the last ones are once those of every thread.
_SMALL = tuple((1 + i if i < 8 else 8 + 7 * (i - 7), 513 + i) for i in range(16))


def subjects() -> dict[str, tuple[Check, ...]]:
    """Checks whose kernels are broken: a ragged size, one that fills tiles, and small ones."""
    f32, f16, i8 = torch.float32, torch.float16, torch.int8
    project, project_list = agreement.project, agreement.project_list
    sgd_step, orthogonal = agreement.sgd_step, agreement_orthogonal
    inside, squares, exact = agreement.inside, agreement_exact.squares, agreement_exact.exact
    return {
        "project float32": (
            partial(project, 17, 16001, f32),
            partial(project, 32, 4096, f32),
            partial(inside, "vector", f32, f32),
            partial(squares, "vector", 17, 16001, f32),
            partial(exact, "vector", 17, 16001, f32),
            *(partial(agreement_exact.exact_rest, m, 16001) for m in (17, 3, 31)),
            *(partial(project, m, n, f32) for m, n in _SMALL),
        ),
        "project int8": (
            partial(project, 17, 33001, i8),
            partial(project, 32, 8192, i8),
            partial(squares, "vector", 17, 33001, i8),
            partial(exact, "vector", 17, 33001, i8),
            *(partial(project, m, n, i8) for m, n in _SMALL),
        ),
        "project long int8": (
            partial(project, 5, 66049, i8),
            partial(project, 8, 67584, i8),
            partial(squares, "vector", 5, 66049, i8),
            partial(exact, "vector", 5, 66049, i8),
        ),
        "project block float16": (
            partial(project, 17, 5001, f16, count=5),
            partial(project, 32, 2048, f16, count=8),
            partial(squares, "block", 17, 5001, f16),
            partial(exact, "block", 17, 5001, f16),
            *(partial(project, m, n, f16, count=4) for m, n in _SMALL),
        ),
        "project list float32": (
            partial(project_list, 17, 16001, f32),
            partial(project_list, 32, 4096, f32),
            partial(inside, "list", f32, f32),
            partial(squares, "list", 17, 16001, f32),
            partial(exact, "list", 17, 16001, f32),
            *(partial(project_list, m, n, f32) for m, n in _SMALL),
        ),
        "SGD step int8": (
            partial(sgd_step, 5, 67001, i8, 0.1, 0.9),
            partial(sgd_step, 8, 68096, i8, 0.1, 0.9),
            partial(squares, "sgd", 5, 67001, i8),
        ),
        "SGD step float32": (
            partial(sgd_step, 5, 4001, f32, 0.1, 0.9),
            partial(inside, "sgd", f32, f32),
            partial(squares, "sgd", 5, 4001, f32),
            *(partial(sgd_step, m, n, f32, 0.1, 0.9) for m, n in _SMALL),
        ),
        "orthonormalise float32": (
            partial(orthogonal.orthonormalise, 130, 5001, f32),
            partial(orthogonal.orthonormalise, 128, 4096, f32),
            *(partial(orthogonal.orthonormalise, 65 + 2 * m, n, f32) for m, n in _SMALL),
        ),
        "Lanczos step float32": (
            partial(orthogonal.lanczos, 17, 5001, f32, 0.7),
            partial(orthogonal.deflated),
            partial(exact, "vector", 17, 5001, f32),
            *(partial(orthogonal.lanczos, m + 2, n, f32, 0.7) for m, n in _SMALL),
        ),
        "block float32": (
            partial(orthogonal.block, 5, 3001, f32),
            partial(orthogonal.block, 5, 2048, f32),
            partial(squares, "block", 5, 3001, f32),
            partial(squares, "block", 6, 528, f32),
            partial(exact, "block", 5, 3001, f32),
            partial(project, 5, 3001, f32, count=6),
            *(partial(orthogonal.block, m, n, f32) for m, n in _SMALL[::5]),
        ),
        "norm float32": (partial(orthogonal.norms, f32),),
        "quantise int8": (
            partial(agreement.storage, i8),
            partial(agreement.storage, i8, sizes=(*range(1, 17), *range(1009, 1025))),
        ),
    }
