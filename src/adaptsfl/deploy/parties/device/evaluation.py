"""A device's test samples in one block: they are sent while the device waits for the edge server."""

import threading
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from adaptsfl.training.statistics import evaluated


class DeviceEvaluation:
    """Evaluates the layers with which a block began, mini-batch by mini-batch.

    One mini-batch is on its way at a time, and the next is sent once the edge server has evaluated it. So a round's
    activations wait for one mini-batch of test samples at most, on the link and at the edge server.

    Args:
        pieces: the layers as modules, by number; training must not change them.
        batches: inputs and labels of the test samples.
        running: by layer: statistics of batch-norm in place of the layers' own.
    """

    def __init__(
        self,
        pieces: Mapping[int, nn.Module],
        batches: Sequence[tuple[Tensor, Tensor]],
        running: Mapping[int, Mapping[str, Tensor]],
    ) -> None:
        self._pieces, self._batches, self._running = pieces, batches, running
        self._left = dict.fromkeys(range(len(batches)))  # numbers of mini-batches that were not evaluated, in order
        self._on_its_way: int | None = None
        self._paused = False
        self._computing = threading.Lock()
        self.total = len(batches)

    def take(self) -> int | None:
        """Return the number of the mini-batch to send now; None if none may be sent, or none is left."""
        if self._paused or self._on_its_way is not None or not self._left:
            return None
        self._on_its_way = next(iter(self._left))
        return self._on_its_way

    def run(self, number: int) -> tuple[Tensor, Tensor] | None:
        """Return the activations and labels of a mini-batch; None if it was evaluated meanwhile.

        It runs in a thread, which goes on when its connection is lost: another one waits for it.
        """
        with self._computing:
            pieces, batches, running = self._pieces, self._batches, self._running  # first: `done` may free them
            if number not in self._left:
                return None
            inputs, labels = batches[number]
            return evaluated(pieces, running, inputs), labels

    def done(self, number: int) -> None:
        """Record that the edge server has evaluated a mini-batch; after the last one, free all memory."""
        self._left.pop(number, None)
        if number == self._on_its_way:
            self._on_its_way = None
        if not self._left:
            self._pieces, self._batches, self._running = {}, (), {}

    def pause(self) -> None:
        """Send nothing until the edge server has sent the plan again; the connection was lost."""
        self._paused = True

    def go_on(self) -> None:
        """Go on over a new connection, with the mini-batch that was on its way."""
        if self._paused:
            self._paused, self._on_its_way = False, None
