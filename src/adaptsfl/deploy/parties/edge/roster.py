"""The devices of a run: their status for people, their weights, and waiting until something changes."""

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from adaptsfl.deploy.parties.edge.sessions import Member
from adaptsfl.deploy.protocol import EdgeProtocol
from adaptsfl.deploy.protocol.state import DeviceState
from adaptsfl.deploy.status.board import Board, State

EVERY_BLOCK = ("the devices' layers", "the devices' test samples")  # waiting for these is not worth a line in the log


class Roster:
    """All devices of the fleet.

    Args:
        by_size: whether a device's weight in all means is its number of samples, or 1.
        board: the status that people see while the run goes on.
        say: called with every line for the log.

    Attributes:
        members: by name.
        by_number: in the fleet's order.
    """

    def __init__(
        self,
        protocol: EdgeProtocol,
        *,
        by_size: bool,
        board: Board,
        say: Callable[[str], None],
    ) -> None:
        self.protocol, self.by_size, self.board, self.say = protocol, by_size, board, say
        self.by_number = [Member(device.number, device.name) for device in protocol.devices]
        self.members = {member.name: member for member in self.by_number}
        self._changed = asyncio.Event()
        self._error: Exception | None = None
        self.show(range(len(self.by_number)))

    async def enough(self, timeout_s: float = math.inf) -> bool:
        """Wait until enough devices are connected; return False if they are not after so many seconds."""
        deadline = time.monotonic() + timeout_s
        while not self.protocol.enough():
            if time.monotonic() >= deadline:
                return False
            here, quorum = len(self.protocol.here()), self.protocol.rules.quorum
            self.wait_for(f"devices: {here} of {quorum} that are needed")
            await self.change(deadline - time.monotonic())
        return True

    def give_up(self, error: Exception) -> None:
        """Raise this error in everything that waits for a change."""
        self._error = error
        self.wake()

    def wake(self) -> None:
        """Wake up everything that waits for a change."""
        self._changed.set()

    async def change(self, timeout: float) -> bool:
        """Wait until something changes; return whether it did before the timeout."""
        self.check()
        self._changed.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), None if timeout == math.inf else timeout)
        self.check()
        return self._changed.is_set()

    def check(self) -> None:
        """Raise the error of `give_up`, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def weight(self, device: int) -> float:
        """Return a device's weight in all means."""
        return float(self.protocol.devices[device].samples) if self.by_size else 1.0

    def shares(self, present: Sequence[int]) -> list[float]:
        """Return the weights of these devices, which sum to 1."""
        weights = [self.weight(device) for device in present]
        return [weight / sum(weights) for weight in weights]

    def weights(self, devices: Iterable[int]) -> dict[str, float]:
        """Return the weights of these devices, by name."""
        return {self.by_number[device].name: self.weight(device) for device in sorted(devices)}

    def show(self, devices: Iterable[int]) -> None:
        """Update the status of devices on the board."""
        self.board.update_devices({self.by_number[device].name: self._shown(device) for device in devices})

    def show_round(
        self, number: int, predicted: Mapping[str, float], phases: Mapping[str, float], round_s: float
    ) -> None:
        """Update the board after a round: its predicted and its measured phases, the traffic, and all devices."""
        before, took = self.board.status, max(round_s, 1e-9)
        sent, received = (sum(getattr(m, name) for m in self.by_number) for name in ("sent_bytes", "received_bytes"))
        self.board.update(
            sent_bytes=sent,
            received_bytes=received,
            sent_bps=_smoothed(before.sent_bps, 8 * (sent - before.sent_bytes) / took),
            received_bps=_smoothed(before.received_bps, 8 * (received - before.received_bytes) / took),
            round=number,
            round_s=_smoothed(before.round_s, round_s),
            predicted_round_s=sum(predicted[phase] for phase in phases),
            waiting_for="",
        )
        self.board.update_phases(predicted, phases)
        self.show(range(len(self.by_number)))

    def _shown(self, number: int) -> dict[str, Any]:
        device, member = self.protocol.devices[number], self.by_number[number]
        return {
            "state": _state(device),
            "cut": device.cut or None,
            "round": device.last_round,
            "rounds": device.rounds,
            "forward_s": member.forward_s,
            "backward_s": member.backward_s,
            "violations": device.violations,
            "last_error": device.last_error,
        }

    def wait_for(self, what: str) -> None:
        """Show on the board, and in the log, what is being waited for."""
        if self.board.status.waiting_for != what:
            self.board.update(waiting_for=what)
            if what not in EVERY_BLOCK:
                self.say(f"waiting for {what}")


def _state(device: DeviceState) -> State:
    """Return a device's status; it trains once it has the layers of a block."""
    if device.quarantined:
        return "quarantined"
    if device.connection is None:
        return "away"
    if device.late:
        return "late"
    return "training" if device.attempt else "waiting"


def _smoothed(before: float | None, now: float) -> float:
    """Return a moving average of a measurement of every round, for the status display."""
    return before + (now - before) / 10 if before else now
