"""The classical methods, with one cut for all devices and the whole run: SplitFed and vanilla SL."""

from typing import ClassVar

import numpy as np

from adaptsfl import checks, latency
from adaptsfl.checks import FloatArray
from adaptsfl.decisions import Decision
from adaptsfl.policies.cuts import every_cut, given_cuts, one_cut
from adaptsfl.policies.policy import BLOCK_ROUNDS, BasePolicy, Observation, TrainerName


class OneCut(BasePolicy):
    """Without `cut`, the fastest cut at the start of the run is taken and kept."""

    def __init__(self, cut: int | None = None) -> None:
        self.cut = None if cut is None else checks.whole_number("cut", cut)

    def cuts(self, seen: Observation) -> tuple[int, ...]:
        """Return the cut, once per device; a device that cannot hold it is an error."""
        if self.cut is None:
            self.cut = one_cut(seen, self.seconds(seen))
        chosen = given_cuts(seen, self.cut, None)
        assert chosen is not None
        return chosen

    def seconds(self, seen: Observation) -> FloatArray:
        """Return the seconds of a round and of its share of an averaging once per epoch, for every cut."""
        cuts = every_cut(seen)
        round_s = latency.round_s(seen.costs, seen.fleet, cuts, seen.batch_size)
        return np.asarray(round_s + latency.aggregation_s(seen.costs, seen.fleet, cuts) / seen.epoch_rounds)


class SplitFedV1(OneCut):
    """Every device has its own copy of every layer; the server's copies are averaged with the clients'.

    Its weights equal FedAvg's; only the time differs, because the layers after the cut run on the edge server.
    """

    title = "SplitFed V1"

    def decide(self, seen: Observation) -> Decision:
        """Return one epoch."""
        return Decision((seen.layers,) * seen.devices, seen.epoch_rounds, placed=self.cuts(seen))


class SplitFedV2(OneCut):
    """One server model, updated by one device after another; the clients' layers are averaged."""

    title = "SplitFed V2"
    trainer: ClassVar[TrainerName] = "turns"

    def decide(self, seen: Observation) -> Decision:
        """Return one epoch."""
        return Decision(self.cuts(seen), seen.epoch_rounds)


class VanillaSplit(OneCut):
    """One client model, passed from device to device; nothing is averaged.

    A block is `rounds` rounds, in each of which every device has its turn.
    """

    title = "vanilla SL"
    trainer: ClassVar[TrainerName] = "relay"

    def __init__(self, cut: int | None = None, rounds: int = BLOCK_ROUNDS) -> None:
        super().__init__(cut)
        self.rounds = checks.whole_number("rounds", rounds)

    def decide(self, seen: Observation) -> Decision:
        """Return `rounds` rounds."""
        return Decision(self.cuts(seen), None, rounds=self.rounds)

    def seconds(self, seen: Observation) -> FloatArray:
        """Return the seconds of a round for every cut: devices in turn, each sending its model to the next."""
        cuts = every_cut(seen)
        moment = (seen.costs, seen.fleet, cuts)
        # A single device sends its model to no other.
        sent_on = (latency.client_model_upload_s(*moment) + latency.client_model_download_s(*moment)) * (
            seen.devices > 1
        )
        there = latency.to_server_s(*moment, seen.batch_size)
        back = latency.from_server_s(*moment, seen.batch_size)
        return np.sum(there + back + sent_on, axis=-1) + latency.server_turns_s(*moment, seen.batch_size)
