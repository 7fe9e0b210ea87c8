"""Who is missing? Answers for ranks whose collective has failed, from the job's store.

A rank that dies closes its connections, and its neighbours' collectives fail within milliseconds.
They know that somebody is gone, not who. So every rank keeps a thread asleep in the store; a rank
in trouble wakes them all, each says how far its rank has come, and whoever does not answer is dead.
A rank that fails with an exception leaves it in the store, where the others read it. While all goes
well this costs nothing.

The store is on another host, perhaps behind a link that was cut: a connection then neither answers
nor fails, whatever timeout it was given. So every question to it is asked by a thread that is left
behind when its time is over.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import DistStoreError

Result = TypeVar("Result")
GRACE = 4.0  # seconds in which a living rank answers, on a busy machine too
NAP = timedelta(hours=1)
_prefixed: Any = dist.PrefixStore  # type: ignore[attr-defined]  # public, but not in the stubs


class Unanswered(RuntimeError):
    """The job's store gave no answer in time."""


class RankError(RuntimeError):
    """A rank failed, is gone or does something else than the others; the message names it."""


class Watch:
    """This rank's part of the roll call.

    Args:
        store: The store of the job; two connections of its own are made.
        position: Says what this rank is doing.
    """

    def __init__(self, store: Any, rank: int, size: int, position: Callable[[], str]) -> None:
        self.rank, self.size, self._position = rank, size, position
        self._store = _prefixed("curvlab", store.clone())
        self._sleeping = _prefixed("curvlab", store.clone())  # a connection serves one at a time
        self._thread = threading.Thread(target=self._answer, name="curvlab watch", daemon=True)
        self._thread.start()

    def failed(self, reason: str) -> None:
        """Tell the others that this rank is about to end, and why; if they can be reached."""

        def tell() -> None:
            self._store.set(f"failed {self.rank}", reason)
            self._store.set("end", "trouble")

        with suppress(RuntimeError):  # the store is gone or cut off: the others will find out
            within(GRACE, tell)
        self._thread.join(GRACE)  # a thread inside torch when Python ends would abort the process

    def roll_call(self) -> str:
        """Which rank is the cause of a failed collective, as well as can be told."""

        def ask() -> str:
            self._store.set("end", "trouble")
            return self._verdict()

        try:
            verdict = within(3 * GRACE, ask)
            self._thread.join(GRACE)
            return verdict
        except Unanswered:
            return (
                "rank 0, which keeps the job's store, does not answer (its host is stopped, or the "
                "link to it is cut)"
            )
        except RuntimeError:  # DistNetworkError among them
            return "rank 0, which keeps the job's store, is gone"

    def leave(self, timeout: float) -> None:
        """Wait until every rank leaves, then end the thread."""
        try:
            within(timeout + GRACE, lambda: self._wait_for("left", timeout))
            within(GRACE, lambda: self._store.set("end", "done"))
            self._thread.join(GRACE)
            # Whoever keeps the store leaves last, or the others would find it gone.
            within(GRACE, lambda: self._store.set(f"gone {self.rank}", ""))
            if self.rank == 0:
                within(timeout + GRACE, lambda: self._wait_for("gone", timeout))
        except Unanswered as error:
            raise RankError(
                f"rank {self.rank} is done, but rank 0, which keeps the store, does not answer"
            ) from error

    def _wait_for(self, word: str, timeout: float) -> None:
        """Say ``word`` and wait until all ranks have said it."""
        self._store.set(f"{word} {self.rank}", "")
        try:
            ranks = [f"{word} {rank}" for rank in range(self.size)]
            self._store.wait(ranks, timedelta(seconds=timeout))
        except DistStoreError as error:
            late = [r for r in range(self.size) if not self._store.check([f"{word} {r}"])]
            raise RankError(
                f"{_ranks(late)} did not finish within {timeout:g} s of rank {self.rank}"
            ) from error

    def _answer(self) -> None:
        while True:
            try:
                self._sleeping.wait(["end"], NAP)
                break
            except DistStoreError:
                continue  # the nap is over
            except RuntimeError:
                return  # the store is gone: the job has ended
        with suppress(RuntimeError):  # the store has gone since: nobody is left to answer
            if self._sleeping.get("end") != b"done":
                self._sleeping.set(f"alive {self.rank}", self._position())

    def _verdict(self) -> str:
        deadline = time.monotonic() + GRACE
        others = [rank for rank in range(self.size) if rank != self.rank]
        while True:
            for rank in others:
                if self._store.check([f"failed {rank}"]):
                    return f"rank {rank} failed: {self._store.get(f'failed {rank}').decode()}"
            silent = [rank for rank in others if not self._store.check([f"alive {rank}"])]
            if not silent or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        heard = [rank for rank in others if rank not in silent]
        places: dict[str, list[int]] = {self._position(): [self.rank]}
        for rank in heard:
            places.setdefault(self._store.get(f"alive {rank}").decode(), []).append(rank)
        # the few first: they are the ones that went another way
        odd = sorted((sorted(ranks), place) for place, ranks in places.items())
        odd.sort(key=lambda one: len(one[0]))
        where = "; ".join(f"{_ranks(ranks)}: {place}" for ranks, place in odd)
        if silent:
            gone = f"{_ranks(silent)} gave no sign of life (killed, out of memory, or cut off)"
            return f"{gone}; the others: {where}" if len(odd) > 1 else gone
        if len(odd) > 1:
            return f"ranks went apart: {where}"
        return f"a collective failed though all ranks were there: {where}"


def within(seconds: float, ask: Callable[[], Result]) -> Result:
    """``ask()``, or :class:`Unanswered` if it takes longer; then it is left behind."""
    answer: list[Result] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            answer.append(ask())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="curvlab question", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not answer:
        raise Unanswered(f"no answer within {seconds:g} s")
    return answer[0]


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
