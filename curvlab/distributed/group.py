"""The ranks of a job: collectives that are counted, and that name the rank when one fails.

``torchrun`` (or any launcher that sets ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and
``MASTER_PORT``) starts one process per rank, all with the same program::

    with distributed.join() as group:
        ...

Without a launcher the same program runs alone, as one rank. Inside, every rank makes the same
collective calls in the same order. A rank that ends with an exception, is killed, or goes another
way ends the whole job: the others raise :class:`RankError` with its number, at once if it is gone,
after ``timeout`` if it merely does not come.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from curvlab.distributed.watch import RankError, Watch

# torch 2.13 renamed them and warns of the old names; 2.12 has only those.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Result = TypeVar("Result")
SEGMENT = 1 << 20  # bytes for each rank: of longer tensors gloo's reduce sends parts twice


@dataclass(slots=True)
class Traffic:
    """What a rank has sent.

    Attributes:
        messages: Collective calls.
        bytes: The bytes of tensors that this rank gave to the network. For gloo a test compares
            them with the counters of a network device; headers come on top, about 2 kB per call
            and rank. For nccl they are what its rings send, which nobody has compared.
    """

    messages: int = 0
    bytes: int = 0


class Group:
    """Collectives over the ranks of a job; a single rank makes no calls at all.

    Attributes:
        rank: The rank of this process.
        size: How many ranks there are.
        traffic: What this rank has sent so far.
    """

    def __init__(self) -> None:
        if not dist.is_initialized():
            raise ValueError(
                "there is no job to take part in: wrap the program in `with "
                "curvlab.distributed.join() as group:` and start it with torchrun"
            )
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.traffic = Traffic()
        self.watch: Watch | None = None
        self._place = "before the first collective"

    @property
    def place(self) -> str:
        """What this rank is doing, in words."""
        return self._place

    @place.setter
    def place(self, place: str) -> None:
        self._place = place

    def sum_(self, tensor: Tensor, what: str = "a sum") -> Tensor:
        """Add ``tensor`` over the ranks in place; every rank gets the same bits."""
        if self.size > 1:
            self._call(what, 2 * self._others(tensor), lambda: dist.all_reduce(tensor))
        return tensor

    def begin_sum(self, tensor: Tensor, what: str = "a sum") -> Callable[[], None]:
        """Start to add ``tensor`` over the ranks in place; calling the result waits for the sum.

        Until then the tensor must be left alone. Sums end in any order, but all ranks must begin
        them in the same.
        """
        if self.size == 1:
            return _nothing
        sent = 2 * self._others(tensor)
        return self._begin(what, sent, lambda: [dist.all_reduce(tensor, async_op=True)])

    def begin_sum_to(self, owner: int, tensor: Tensor, what: str = "a sum") -> Callable[[], None]:
        """As :meth:`begin_sum`, but only rank ``owner`` gets the sum; the others' is spoilt."""
        if self.size == 1:
            return _nothing
        parts = torch.split(tensor.view(-1), SEGMENT * self.size // tensor.element_size())
        last = 0 if owner == self.rank else tensor.nbytes // self.size  # collected from all ranks
        return self._begin(
            what,
            self._others(tensor) + last,
            lambda: [dist.reduce(part, owner, async_op=True) for part in parts],
        )

    def begin_broadcast(self, owner: int, tensor: Tensor, what: str) -> Callable[[], None]:
        """Start to give every rank what ``owner`` has in ``tensor``; calling the result waits."""
        if self.size == 1:
            return _nothing
        place, step, copies = (self.rank - owner) % self.size, 1, 0
        while step < self.size:  # a tree: who has it gives it to one more in every round
            copies += place < step and place + step < self.size
            step *= 2
        sent = copies * tensor.nbytes
        return self._begin(what, sent, lambda: [dist.broadcast(tensor, owner, async_op=True)])

    def gather(self, tensor: Tensor, what: str = "a gather") -> Tensor:
        """Every rank's ``tensor``, which has one shape on all: ``(size, *shape)``."""
        if self.size == 1:
            return tensor.unsqueeze(0)
        whole = tensor.new_zeros((self.size, *tensor.shape))
        part = tensor.contiguous()
        flat = whole.view(-1)
        self._call(what, self._others(whole), lambda: _all_gather(flat, part.view(-1)))
        return whole

    def sum_scatter(self, parts: Tensor, what: str = "a scattered sum") -> Tensor:
        """Of ``parts`` ``(size, w)``, added over the ranks, the row of this rank ``(w,)``."""
        if self.size == 1:
            return parts[0]
        sent = self._others(parts)
        if parts.device.type == "cuda":
            mine = torch.zeros_like(parts[0])
            self._call(what, sent, lambda: _reduce_scatter(mine, parts.view(-1)))
            return mine
        # gloo scatters a sum by giving the whole of it to every rank, which is twice the bytes
        received = torch.empty_like(parts)
        self._call(what, sent, lambda: dist.all_to_all_single(received, parts.contiguous()))
        return received.sum(0)

    def _others(self, tensor: Tensor) -> int:
        """The bytes of a tensor without this rank's share of them."""
        return tensor.nbytes * (self.size - 1) // self.size

    def facts(self, fact: Any, what: str = "an exchange of facts") -> list[Any]:
        """Every rank's ``fact``, anything that JSON can hold."""
        text = json.dumps(fact).encode()
        lengths = self.gather(torch.tensor([len(text)]), what)
        data = torch.zeros(int(lengths.max()), dtype=torch.uint8)
        data[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        texts = self.gather(data, what)
        return [
            json.loads(bytes(row[: int(length)].tolist()))
            for row, length in zip(texts, lengths.flatten(), strict=True)
        ]

    def together(self, action: Callable[[], Result], what: str) -> Result:
        """``action()`` on every rank; if it raises on one, all raise, and the others name it."""
        mine: Exception | None = None
        try:
            result = action()
        except Exception as error:
            mine = error
        said = self.facts(None if mine is None else f"{type(mine).__name__}: {mine}", what)
        if mine is not None:
            raise mine
        self.require_none(said, what)
        return result

    def require_none(self, said: list[str | None], what: str) -> None:
        """Raise :class:`RankError` with the first of the ranks' complaints, if there is one."""
        for rank, complaint in enumerate(said):
            if complaint is not None:
                raise RankError(f"rank {rank} failed in {what}: {complaint}")

    def _begin(self, what: str, sent: int, begin: Callable[[], list[Any]]) -> Callable[[], None]:
        begun: list[Any] = []
        self._call(what, sent, lambda: begun.extend(begin()))
        number = self.traffic.messages

        def wait() -> None:
            for work in begun:
                work.wait()

        return lambda: self._guarded(what, number, wait)

    def _call(self, what: str, sent: int, collective: Callable[[], object]) -> None:
        self.traffic.messages += 1
        self.traffic.bytes += sent
        self._guarded(what, self.traffic.messages, collective)

    def _guarded(self, what: str, number: int, wait: Callable[[], object]) -> None:
        """``wait()`` for other ranks; if that fails, say who is the cause."""
        self._place = f"in collective {number} ({what})"
        try:
            wait()
        except RuntimeError as error:
            cause = "a rank failed" if self.watch is None else self.watch.roll_call()
            said = str(error).partition("\n")[0].rpartition("] ")[2]  # without the place in torch
            raise RankError(
                f"{cause}. Rank {self.rank} was {self._place}, where torch said: {said[:160]}"
            ) from error
        self._place = f"after collective {number} ({what})"


def _nothing() -> None:
    """A sum over one rank is there at once."""


_joined: Group | None = None


def current(group: Group | None = None) -> Group:
    """``group``, or the one that :func:`join` made, or one over a job that torch knows of."""
    return group or _joined or Group()


@contextmanager
def join(timeout: float = 600.0, backend: str | None = None) -> Iterator[Group]:
    """Take part in the job that a launcher started; alone, if there is none.

    Args:
        timeout: Seconds that a rank waits in a collective for the others.
        backend: The backend of ``torch.distributed``; by default gloo for CPU tensors and nccl for
            CUDA tensors.
    """
    global _joined
    if dist.is_initialized():  # by the caller, who also ends it
        yield current()
        return
    wait = timedelta(seconds=timeout)
    if "WORLD_SIZE" in os.environ:
        store, rank, size = next(iter(rendezvous("env://", timeout=wait)))
    else:
        store, rank, size = dist.HashStore(), 0, 1  # type: ignore[attr-defined]
    if backend is None:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=wait)
    group = Group()
    if size > 1:
        group.watch = Watch(store, rank, size, lambda: group.place)
    _joined = group
    try:
        yield group
        if group.watch is not None:
            group.place = "done"
            group.watch.leave(timeout)
    except BaseException as error:
        if group.watch is not None and not isinstance(error, RankError):
            group.watch.failed(f"{type(error).__name__}: {error}")
        raise
    finally:
        _joined = None
        dist.destroy_process_group()
