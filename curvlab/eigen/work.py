"""A long computation's surroundings: its line on the terminal, its file, and what ends it early.

The work itself keeps what it has finished in one place that changes in a single assignment; so
wherever Ctrl-C or a termination signal strikes, what is there is whole. It is saved, and then
:class:`Interrupted` leaves the computation with the partial result. Ranks that work together cannot
save at a moment that one of them chooses: there, what the last regular save wrote is what counts.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from curvlab.eigen.identity import identity, require_same
from curvlab.eigen.products import Products
from curvlab.eigen.progress import Progress
from curvlab.manifest import COUNT, Form, Shape, require_facts, require_tensors
from curvlab.signals import termination_raises

EVERY = 16  # products between two saves: a file may hold as many vectors


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, or a termination signal, ended a computation between two of its steps.

    Attributes:
        partial: The result as far as it had got, of the type that the function returns; ``None``
            if nothing of it was finished.
    """

    def __init__(self, message: str, partial: Any) -> None:
        super().__init__(message)
        self.partial = partial


@dataclass(frozen=True, slots=True)
class State:
    """What a file holds of unfinished work.

    Attributes:
        rows: Tensors ``(m, width)`` of long vectors.
        others: Small tensors.
        facts: JSON.
        spent: Products that it took, where a number of them decides anything: one that came back
            just before an interrupt is not in it.
    """

    rows: Mapping[str, Tensor] = field(default_factory=dict)
    others: Mapping[str, Tensor] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    spent: int | None = None


class Work:
    """The file and the progress line of one computation.

    Args:
        what: Its name, for the line, the file and errors.
        arguments: What must be the same for a file to be resumed, besides the operator.
        checkpoint: The file (a folder on several ranks); ``None`` keeps nothing.
        progress: Whether to show a line; ``None``: when there is a terminal.
    """

    def __init__(
        self,
        what: str,
        products: Products,
        arguments: Mapping[str, Any],
        checkpoint: str | Path | None,
        progress: bool | None,
    ) -> None:
        self.what, self.products = what, products
        self.path = None if checkpoint is None else Path(checkpoint)
        self.line = Progress(what, progress if products.space.leads else False)
        self.asked: dict[str, Any] = {}
        if self.path is not None:
            products.space.require_writable(self.path)
            self.asked = {**arguments, **identity(products)}
        self.saved_at = products.spent

    def resume(
        self,
        facts: Mapping[str, Form],
        rows: Mapping[str, Shape],
        others: Mapping[str, Shape] = MappingProxyType({}),
    ) -> State | None:
        """What an earlier call with the same arguments and operator left, if there is a file.

        Args:
            facts: The form that its facts must have (:mod:`curvlab.manifest`).
            rows: The same of its long vectors.
            others: And of its small tensors.
        """
        if self.path is None or not self.products.space.exists(self.path):
            return None
        found, said = self.products.space.load(self.path, self._kind)
        rounding = max(self.products.eps, self.products.error)
        form = {"asked": dict, "rows": [frozenset(found)], "facts": dict}
        form |= {"products": COUNT, "overhead": COUNT}
        require_facts(self.path, said, form)
        require_same(self.path, self.what, said["asked"], self.asked, rounding)
        long = {name: found[name].to(self.products.device) for name in said["rows"]}
        small = {name: tensor for name, tensor in found.items() if name not in long}
        state = State(long, small, said["facts"], said["products"])
        self.require(state, facts, rows)
        require_tensors(self.path, small, others)
        self.products.resume(said["products"], said["overhead"])
        self.saved_at = self.products.spent
        return state

    def require(self, state: State, facts: Mapping[str, Form], rows: Mapping[str, Shape]) -> None:
        """Raise unless what was read has the form that is needed to go on from it."""
        path = self.path or ""
        require_facts(path, state.facts, facts)
        require_tensors(path, state.rows, rows)

    def keep(self, state: State | None) -> None:
        """Replace the file, unless that was done a few products ago."""
        if self.products.spent - self.saved_at >= EVERY:
            self.save(state)

    def save(self, state: State | None) -> None:
        """Replace the file; ``None`` leaves it as it was saved last."""
        if self.path is not None and state is not None:
            self.saved_at = self.products.spent
            # One that came back just before an interrupt is not in the state. It is made again,
            # and must not count twice where a number of products decides.
            spent = self.products.spent if state.spent is None else state.spent
            facts = {
                "asked": self.asked,
                "rows": sorted(state.rows),
                "facts": dict(state.facts),
                "products": spent,
                "overhead": self.products.count - spent,
            }
            self.products.space.save(self.path, self._kind, state.rows, state.others, facts)

    def show(self, done: int, total: int, unit: str, note: str = "") -> None:
        """Update the progress line."""
        self.line.update(self.products.count, done, total, note, unit)

    @contextmanager
    def interruptible(
        self, state: Callable[[], State | None], partial: Callable[[], Any]
    ) -> Iterator[None]:
        """Save at the end; if the body is cut short, raise :class:`Interrupted` afterwards.

        Args:
            state: What is finished; ``None`` where only an earlier save can tell.
            partial: The result from that, or ``None``.
        """
        try:
            with termination_raises():
                yield
                self.save(state())
        except KeyboardInterrupt as stop:
            if self.products.space.shared:
                raise  # saving is collective, and the other ranks may be inside another collective
            self.save(state())
            made = f"{self.what} was interrupted after {self.products.count} products"
            cure = (
                "with checkpoint= the same call would go on from here"
                if self.path is None
                else f"{self.path} keeps what is done, and the same call goes on from it"
            )
            raise Interrupted(f"{made}; {cure}", partial()) from stop
        finally:
            self.line.close()

    @property
    def _kind(self) -> str:
        return f"{self.what} checkpoint"
