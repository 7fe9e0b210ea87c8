"""Sums over ranks that begin while the last backward pass still runs.

A product's backward pass comes to the parameters from the last layer to the first. A hook on each
of them takes what arrived; as soon as all elements of a piece of the vector are there, its sum over
the ranks begins, and the pass goes on meanwhile. Every rank begins the same pieces in the same
order, from the end of the vector, whatever order its own pass has: an early piece waits for its
turn. So the messages match on all ranks, and the bits are the same in every run.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from curvlab.operators import Curvature
from curvlab.operators.products.autograd import Product

PIECE = 8 << 20  # bytes of a piece, at least
MOST = 32  # pieces of a vector: more messages would hide no more
Begin = Callable[[slice], Callable[[], None]]


def width_of(n: int, size: int) -> int:
    """Elements of a piece of at least ``size`` elements, a multiple of 64."""
    return -(-max(size, -(-n // MOST), 1) // 64) * 64


def cut(n: int, width: int) -> list[slice]:
    """A vector of ``n`` elements in pieces of ``width``, in the order in which they are summed."""
    return [slice(start, min(start + width, n)) for start in range(0, n, width)][::-1]


def hooked(part: object) -> bool:
    """Whether products of ``part`` end in a backward pass to the parameters."""
    return isinstance(part, Curvature) and part.ends_in_backward


class Overlap:
    """One product on its way: what is written, which sums have begun.

    Args:
        target: This rank's share of the product ``(n,)``, zeros; filled here.
        pieces: From :func:`cut`.
        begin: Begins the sum of one piece of ``target``, and returns what waits for it.
        weight: The weight of this rank's share.
    """

    def __init__(
        self, target: Tensor, pieces: Sequence[slice], begin: Begin, weight: float
    ) -> None:
        self.target, self.weight = target, weight
        self._pieces, self._begin = pieces, begin
        self._missing = [piece.stop - piece.start for piece in pieces]
        self._waits: list[Callable[[], None]] = []
        self._finite: list[Tensor] = []

    def multiply(self, part: Curvature, block: Tensor) -> None:
        """Fill ``target`` from the product of ``part`` with ``block`` ``(1, n)``."""
        with torch.inference_mode(False):
            # a tensor made in inference mode may not enter an autograd graph
            block = block.clone() if block.is_inference() else block.detach()
            part.multiply_last(block, partial(self._last, part, block))

    def finish(self) -> bool:
        """Begin what is left, wait for all sums; whether this rank's share was finite."""
        self._missing = [0] * len(self._missing)
        self._advance()
        for wait in self._waits:
            wait()
        return all(bool(finite) for finite in self._finite)

    def _last(
        self, part: Curvature, block: Tensor, product: Product, before: Tensor | None
    ) -> None:
        """The last chunk's product; ``before`` is the others' sum, float64."""
        layout, written = part.problem.layout, set[int]()

        def take(number: int, image: Tensor) -> None:
            if number in written:
                return
            written.add(number)
            first, size = layout.offsets[number], layout.sizes[number]
            self._write(slice(first, first + size), image.detach().reshape(-1), before)

        with _hooks(part.problem.parameters, take):
            result = product(block)
        for number, piece in enumerate(layout.unflatten(result[0])):
            take(number, piece)  # those without a gradient, and all if no hook was called

    def _write(self, where: slice, image: Tensor, before: Tensor | None) -> None:
        if before is not None:
            image = (before[0, where] + image).to(self.target.dtype)
        torch.mul(image, self.weight, out=self.target[where])
        for number, piece in enumerate(self._pieces):
            self._missing[number] -= max(
                0, min(where.stop, piece.stop) - max(where.start, piece.start)
            )
        self._advance()

    def _advance(self) -> None:
        """Begin the sums whose turn it is."""
        while (turn := len(self._waits)) < len(self._pieces) and self._missing[turn] == 0:
            piece = self._pieces[turn]
            # looked at before the sum, which mixes ranks; asked only at the end, for a GPU's sake
            self._finite.append(torch.isfinite(self.target[piece]).all())
            self._waits.append(self._begin(piece))


@contextmanager
def _hooks(parameters: Sequence[Tensor], take: Callable[[int, Tensor], None]) -> Iterator[None]:
    handles = []
    for number, parameter in enumerate(parameters):
        hook = partial(take, number)
        handles.append(parameter.register_hook(hook))  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
