"""Ranks: processes on one or more machines that train one model together; rendezvous and collective calls.

A single process runs the same code, and its collective calls send nothing.
"""

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar, cast

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import PrefixStore, Store, rendezvous  # type: ignore[attr-defined]  # documented, not marked

from adaptsfl import checks
from adaptsfl.errors import InvalidInput, RankFailed, first_line

BUCKET_BYTES = 2**25  # per all-reduce: large enough to keep the network busy, small enough to copy
TIMEOUT_VARIABLE, TIMEOUT_S = "ADAPTSFL_RANK_TIMEOUT_S", 600.0

T = TypeVar("T")


class Ranks:
    """The ranks of a job, as one of them sees them.

    Attributes:
        rank: the number of this process; the first, 0, decides, writes and prints.
        size: how many there are.
        speeds: how fast every rank is, relative to the others; equal unless they were timed.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        self.speeds: tuple[float, ...] = (1.0,) * size

    @property
    def first(self) -> bool:
        """Whether this is the rank that decides, writes and prints."""
        return self.rank == 0

    def broadcast(self, value: T, source: int = 0) -> T:
        """Return the value of rank `source`; it must be picklable."""
        if self.size == 1:
            return value
        box = [value if self.rank == source else None]
        with self._explained():
            dist.broadcast_object_list(box, src=source, device=torch.device("cpu"))
        return cast(T, box[0])

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in order; they must be small and picklable."""
        return [self.broadcast(value, rank) for rank in range(self.size)]

    def all_reduce_sum(self, tensors: Sequence[Tensor]) -> None:
        """Replace every tensor by its sum over ranks, in flat buckets; shapes and order are equal on all ranks."""
        self._all_reduce(tensors, dist.ReduceOp.SUM)

    def all_reduce_max(self, tensors: Sequence[Tensor]) -> None:
        """Replace every entry by its maximum over ranks."""
        self._all_reduce(tensors, dist.ReduceOp.MAX)

    def broadcast_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Replace every tensor by that of the first rank."""
        if not self.first:
            for tensor in tensors:
                tensor.zero_()
        self.all_reduce_sum(tensors)

    def stack_rows(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """All-gather: return for every tensor the tensors of all ranks, stacked in the order of ranks."""
        tables = [row.new_zeros(self.size, *row.shape) for row in rows]
        for table, row in zip(tables, rows, strict=True):
            table[self.rank] = row
        self.all_reduce_sum(tables)
        return tables

    def sum_numbers(self, values: Sequence[float]) -> list[float]:
        """Return the sums over ranks of some numbers; exact where only one rank has a nonzero number."""
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        self.all_reduce_sum([total])
        return [float(value) for value in total.tolist()]

    def map_numbers(self, work: Callable[[T], Sequence[float]], items: Iterable[T], width: int) -> list[float]:
        """Return the `width` numbers that `work` returns for every item, concatenated; ranks share the items."""
        found: list[float] = []
        for k, item in enumerate(items):
            found += work(item) if k % self.size == self.rank else [0.0] * width
        return self.sum_numbers(found)

    def _all_reduce(self, tensors: Sequence[Tensor], operation: dist.ReduceOp.RedOpType) -> None:
        if self.size == 1:
            return
        with torch.no_grad(), self._explained():
            for bucket in _buckets(tensors):
                flat = torch.cat([_wire(tensor).reshape(-1) for tensor in bucket])
                dist.all_reduce(flat, operation)
                parts = flat.split_with_sizes([tensor.numel() for tensor in bucket])
                for tensor, part in zip(bucket, parts, strict=True):
                    tensor.copy_(part.view(tensor.shape))

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Raise RankFailed for a lost connection or a timeout; torch raises RuntimeError for both."""
        try:
            yield
        except RuntimeError as error:
            problem = f"rank {self.rank}: another rank is gone or did not answer ({_reason(error)})"
            remedy = "Start it again, or let torchrun do so by --max-restarts: it goes on from the last checkpoint"
            raise RankFailed(f"{problem}. {remedy}.") from error


ALONE = Ranks()


def launched() -> bool:
    """Whether torchrun, or another launcher that sets the same variables, started this process as one of several."""
    return all(name in os.environ for name in ("RANK", "MASTER_ADDR")) and int(os.environ.get("WORLD_SIZE", "1")) > 1


@contextmanager
def joined(device: str = "cpu") -> Iterator[Ranks]:
    """Connect to the other ranks of the job, and disconnect at the end; `ALONE` without a launcher.

    A rank that does not answer for ADAPTSFL_RANK_TIMEOUT_S seconds (600 by default) counts as gone.

    Args:
        device: where ranks compute. With cuda, tensors there are exchanged by NCCL, all others by gloo.
    """
    if not launched():
        yield ALONE
        return
    timeout = timedelta(seconds=_timeout_s())
    if device.startswith("cuda:"):
        remedy = "Give cuda: every rank takes the GPU of its number on its machine"
        raise InvalidInput("training.device", f"is {device!r}, but there are several ranks", remedy)
    on_cuda = device == "cuda" and torch.cuda.is_available()
    if on_cuda:  # from here on, "cuda" is this rank's GPU
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % max(1, torch.cuda.device_count()))
    try:
        store, rank, size = next(rendezvous("env://", timeout=timeout))
        started = _this_start(store, rank, size, timeout.total_seconds())
        backend = "cpu:gloo,cuda:nccl" if on_cuda else "gloo"
        dist.init_process_group(backend, store=started, rank=rank, world_size=size, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        place = f"{os.environ['MASTER_ADDR']}:{os.environ.get('MASTER_PORT', '?')}"
        raise RankFailed(f"rank {os.environ['RANK']}: cannot meet the others at {place} ({_reason(error)}).") from error
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


def _this_start(store: Store, rank: int, size: int, timeout_s: float) -> Store:
    """Return a part of the store that only the ranks of this start use.

    torchrun keeps its store over restarts, with the addresses of ranks that have ended. Its own restart count does not
    help: it does not increase on a machine whose ranks did not fail. So every rank takes a unique ticket, and reads the
    prefix of this start under the ticket's number; the first rank answers all tickets while it starts.
    """
    ticket = store.add("tickets", 1)
    if rank:
        place = store.get(f"ticket {ticket}").decode()
        store.add(f"{place}: met", 1)
        return PrefixStore(place, store)
    place, answered, deadline = f"start {ticket}", 0, time.monotonic() + timeout_s
    while (met := store.add(f"{place}: met", 0)) < size - 1:
        tickets = store.add("tickets", 0)
        for other in range(answered + 1, tickets + 1):  # tickets of ended ranks are answered too, without effect
            store.set(f"ticket {other}", place)
        answered = tickets
        if time.monotonic() > deadline:
            raise RuntimeError(f"after {timeout_s:g} s, {met + 1} of {size} ranks are there")
        time.sleep(0.02)
    return PrefixStore(place, store)


def _timeout_s() -> float:
    text = os.environ.get(TIMEOUT_VARIABLE)
    if text is None:
        return TIMEOUT_S
    try:
        return checks.number(TIMEOUT_VARIABLE, float(text), positive=True)
    except ValueError:
        raise InvalidInput(TIMEOUT_VARIABLE, f"is {text!r}", "Give seconds, for example 600") from None


def _reason(error: Exception) -> str:
    """Return gloo's error message, without its source location and advice."""
    return re.sub(r"\[/[^]]*\] ", "", first_line(error)).split(". ")[0]


def _wire(tensor: Tensor) -> Tensor:
    """Return a tensor as it is sent: bool as uint8."""
    return tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield groups of tensors of one dtype and device that are sent together, the same on every rank."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            kinds.setdefault((_wire(tensor).dtype, tensor.device), []).append(tensor)
    for alike in kinds.values():
        bucket: list[Tensor] = []
        for tensor in alike:
            bucket.append(tensor)
            if sum(one.numel() * one.element_size() for one in bucket) >= BUCKET_BYTES:
                yield bucket
                bucket = []
        if bucket:
            yield bucket
