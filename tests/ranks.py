"""Several ranks on this machine: processes that meet over the loopback, or threads."""

import os
import pickle
import socket
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

import warm
from adaptsfl.training.ranks import Ranks, joined

PATIENCE_S = 600  # far more than anything here takes, on a machine that is busy too


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def on_ranks(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return what `function(ranks, *arguments)` gave on every rank; it has to be one that can be imported."""
    warm.start_parent()
    port, pipes, processes = free_port(), [], []
    for rank in range(size):
        receiver, sender = warm.CONTEXT.Pipe(duplex=False)
        process = warm.CONTEXT.Process(target=_be, args=(rank, size, port, sender, function, arguments))
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    try:
        answers = [
            pickle.loads(receiver.recv_bytes()) if receiver.poll(PATIENCE_S) else ("late", "") for receiver in pipes
        ]
    except EOFError:
        answers = [("died", "")]
    finally:
        for process in processes:
            process.join(1)
            process.kill()
            process.join()
    for how, answer in answers:
        assert how == "gave", f"{how}: {answer}"
    return [answer for _, answer in answers]


def _be(rank: int, size: int, port: int, sender: Any, function: Callable[..., Any], arguments: Any) -> None:
    torch.set_num_threads(1)
    named = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in named.items()})
    try:
        with joined() as ranks:
            answer = "gave", function(ranks, *arguments)
    except Exception:
        answer = "raised", traceback.format_exc()
    sender.send_bytes(pickle.dumps(answer))  # by value: tensors of a process that has ended


class Meeting:
    """Where threads meet: everybody gives something and gets what all gave."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=PATIENCE_S)
        self.given: list[Any] = [None] * size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.given[rank] = value
        self.barrier.wait()
        everything = list(self.given)
        self.barrier.wait()
        return everything


class ThreadRanks(Ranks):
    """A thread that believes that it is a process: everything but the sending itself is as with processes."""

    def __init__(self, rank: int, size: int, meeting: Meeting) -> None:
        super().__init__(rank, size)
        self.meeting = meeting

    def broadcast(self, value: Any, source: int = 0) -> Any:
        return self.meeting.exchange(self.rank, value)[source]

    def _all_reduce(self, tensors: Sequence[Tensor], operation: Any) -> None:
        gathered = self.meeting.exchange(self.rank, [tensor.detach().clone() for tensor in tensors])
        with torch.no_grad():
            for tensor, *theirs in zip(tensors, *gathered, strict=True):
                rows = torch.stack(theirs)
                tensor.copy_(rows.sum(0) if operation == dist.ReduceOp.SUM else rows.amax(0))


def in_threads(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return what `function(ranks, *arguments)` gave on every rank, which is a thread here."""
    meeting = Meeting(size)
    answers: list[Any] = [None] * size
    errors: list[BaseException] = []

    def be(rank: int) -> None:
        try:
            answers[rank] = function(ThreadRanks(rank, size, meeting), *arguments)
        except BaseException as error:
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=be, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return answers
