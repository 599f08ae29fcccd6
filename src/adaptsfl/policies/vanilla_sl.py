"""Vanilla split learning: one client model, handed from device to device."""

from typing import ClassVar

import numpy as np

from adaptsfl import checks, latency
from adaptsfl.checks import FloatArray
from adaptsfl.decisions import Decision
from adaptsfl.policies.one_cut import OneCut
from adaptsfl.policies.place import every_cut
from adaptsfl.policies.policy import BLOCK_ROUNDS, Observation, TrainerName


class VanillaSplit(OneCut):
    """Nothing is averaged; a block is `rounds` rounds, in each of which every device has its turn."""

    title = "vanilla SL"
    trainer: ClassVar[TrainerName] = "relay"

    def __init__(self, cut: int | None = None, rounds: int = BLOCK_ROUNDS) -> None:
        super().__init__(cut)
        self.rounds = checks.whole_number("rounds", rounds)

    def decide(self, seen: Observation) -> Decision:
        """Return `rounds` rounds."""
        return Decision(self.cuts(seen), None, rounds=self.rounds)

    def seconds(self, seen: Observation) -> FloatArray:
        """Return the seconds of a round for every cut: one device after the other, each sending its model on."""
        cuts = every_cut(seen)
        moment = (seen.costs, seen.fleet, cuts)
        # A device that is alone has nobody to send its model to.
        sent_on = (latency.client_model_upload_s(*moment) + latency.client_model_download_s(*moment)) * (
            seen.devices > 1
        )
        there = latency.to_server_s(*moment, seen.batch_size)
        back = latency.from_server_s(*moment, seen.batch_size)
        return np.sum(there + back + sent_on, axis=-1) + latency.server_turn_s(*moment, seen.batch_size)
