"""How a block's mini-batches are sent: in how many parts, and in which type of numbers."""

from dataclasses import dataclass

from adaptsfl.costs import WIRE_DTYPES
from adaptsfl.errors import BadMessage

EXACT = "float32"


@dataclass(frozen=True)
class Sending:
    """How activations and gradients of a block are sent.

    Attributes:
        micro_batches: k, the equal parts of every mini-batch, each of them a message of its own.
        wire_dtype: the type of numbers of activations and gradients.
        exact_round: this round's mini-batches are sent as a whole, and as float32; 0 if there is no such round.
    """

    micro_batches: int = 1
    wire_dtype: str = EXACT
    exact_round: int = 0

    def parts(self, round_: int) -> int:
        """Return into how many parts the mini-batches of round 1, 2, … are divided."""
        return 1 if round_ == self.exact_round else self.micro_batches

    def dtype(self, round_: int) -> str:
        """Return the type of numbers in which activations and gradients of round 1, 2, … are sent."""
        return EXACT if round_ == self.exact_round else self.wire_dtype

    def check(self, batch_size: int) -> None:
        """Reject what no plan should say: a server may be faulty."""
        if not self.micro_batches or batch_size % self.micro_batches:
            raise BadMessage(f"{self.micro_batches} parts of {batch_size} samples were planned")
        if self.wire_dtype not in WIRE_DTYPES:
            raise BadMessage(f"numbers of type {self.wire_dtype[:20]!r} were planned")
