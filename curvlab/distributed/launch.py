"""Ranks on this machine, for trying things out: ``launch(function, 4)``.

``torchrun`` is the way to start a job. This starts one from inside a program or a test: the
function runs in each of the processes, and none of them outlives the call, whatever happens.
"""

import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from curvlab.distributed.group import join
from curvlab.distributed.watch import RankError

Result = TypeVar("Result")
GRACE = 8.0  # seconds for the other ranks to end by themselves once one has failed


def launch(
    function: Callable[..., Result],
    ranks: int,
    *arguments: Any,
    timeout: float = 120.0,
    patience: float | None = None,
    threads: int = 1,
) -> list[Result]:
    """``function(group, *arguments)`` in ``ranks`` processes; what each returned, in their order.

    Args:
        function: Importable by name, and what it takes and returns can be pickled.
        timeout: Seconds after which all processes are killed.
        patience: Seconds that a rank waits in a collective for the others (default ``timeout``).
        threads: How many threads torch uses in each process.
    """
    if ranks < 1:
        raise ValueError(f"launch needs at least one rank; got {ranks}")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "curvlab.public", "curvlab.distributed"])
    # The store lives here, so that it survives whichever rank dies.
    make_store: Any = dist.TCPStore  # type: ignore[attr-defined]
    store = make_store("127.0.0.1", 0, None, True, wait_for_workers=False)
    wait = timeout if patience is None else patience
    ends, processes = list[Connection](), list[BaseProcess]()
    try:
        for rank in range(ranks):
            here, there = context.Pipe(duplex=False)
            process = context.Process(
                target=_run,
                args=(there, function, arguments, rank, ranks, store.port, wait, threads),
                daemon=True,
            )
            process.start()
            there.close()
            ends.append(here)
            processes.append(process)
        return _collect(ends, processes, timeout)
    finally:
        for started in processes:
            started.kill()
            started.join()


def _run(
    end: Connection,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    rank: int,
    ranks: int,
    port: int,
    wait: float,
    threads: int,
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the launcher keeps the store, as torchrun does
    }
    torch.set_num_threads(threads)
    try:
        with join(wait) as group:
            result = function(group, *arguments)
        _send(end, True, result)
    except BaseException as error:
        own = not isinstance(error, RankError)  # or only reports another rank's
        _send(end, False, (own, str(error), traceback.format_exc()))
        raise SystemExit(1) from error


def _send(end: Connection, good: bool, answer: Any) -> None:
    # As bytes: torch would send tensors as handles to memory that ends with this process.
    end.send_bytes(pickle.dumps((good, answer)))


def _collect(ends: list[Connection], processes: list[BaseProcess], timeout: float) -> list[Any]:
    answers: dict[int, tuple[bool, Any]] = {}
    deadline = time.monotonic() + timeout
    while len(answers) < len(ends) and time.monotonic() < deadline:
        for rank, (end, process) in enumerate(zip(ends, processes, strict=True)):
            if rank in answers:
                continue
            alive = process.is_alive()  # asked first: an answer may come between the two
            if end.poll(0.01):
                try:
                    answers[rank] = pickle.loads(end.recv_bytes())  # from a process of ours
                except EOFError:
                    process.join(GRACE)
                    died = f"rank {rank} ended with exit code {process.exitcode}"
                    answers[rank] = False, (True, died, died)
            elif not alive:
                died = f"rank {rank} ended with exit code {process.exitcode}"
                answers[rank] = False, (True, died, died)
        if any(not good for good, _ in answers.values()):
            deadline = min(deadline, time.monotonic() + GRACE)
    failures = [(rank, answer) for rank, (good, answer) in sorted(answers.items()) if not good]
    if failures:
        failures.sort(key=lambda failure: not failure[1][0])
        rank, (own, message, trace) = failures[0]
        said = "\n".join(f"rank {r}: {text}" for r, (_, text, _) in failures[1:])
        raise RankError(f"rank {rank} {'failed' if own else 'says'}: {message}\n{said}\n{trace}")
    late = [rank for rank in range(len(ends)) if rank not in answers]
    if late:
        raise RankError(f"ranks {late} did not finish within {timeout:g} s")
    return [answers[rank][1] for rank in range(len(ends))]
