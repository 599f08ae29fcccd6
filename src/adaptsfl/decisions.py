"""A decision: where every device cuts the model and how often the layers of devices are averaged.

Policies return this type; the trainer, the clock, the records and the wire format all use it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

from adaptsfl import checks
from adaptsfl.errors import InvalidInput


@dataclass(frozen=True)
class Decision:
    """How to train until the next decision.

    Attributes:
        cuts: μ, one cut (1..L) per device; layers up to the deepest, L_c, have one copy per device.
        interval: I, in rounds; None never averages (parallel split learning).
        layer_intervals: layers (1..L_c) that have another interval than I.
        rounds: rounds until the next decision: a multiple of the interval, because decisions change only after an
            averaging. Equal to the interval by default; required if nothing is averaged.
        placed: where every device's model is really cut, if that differs from `cuts`: SplitFed V1 keeps a copy of every
            layer for every device, and runs the later ones on the edge server.
        micro_batches: k, the equal parts of every mini-batch that go through a round one behind the other. They change
            how long a round takes; what it learns, only with batch-norm, which normalises every part by itself.
        wire_dtype: the type in which activations and gradients are sent; None leaves it to the recipe.
    """

    cuts: tuple[int, ...]
    interval: int | None
    layer_intervals: Mapping[int, int] = field(default_factory=dict)
    _: KW_ONLY
    rounds: int | None = None
    placed: tuple[int, ...] | None = None
    micro_batches: int = 1
    wire_dtype: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "cuts", _cuts("decision.cuts", self.cuts))
        if self.interval is not None:
            object.__setattr__(self, "interval", checks.whole_number("decision.interval", self.interval))
        object.__setattr__(self, "layer_intervals", MappingProxyType(self._checked_intervals()))
        if self.rounds is not None:
            object.__setattr__(self, "rounds", checks.whole_number("decision.rounds", self.rounds))
            if self.interval is not None and self.rounds % self.interval:
                problem = f"is {self.rounds}, but layers are averaged every {self.interval}"
                raise InvalidInput("decision.rounds", problem, "Give a whole number of intervals")
        if self.placed is not None:
            object.__setattr__(self, "placed", _cuts("decision.placed", self.placed))
            if len(self.placed) != len(self.cuts):
                problem = f"has {len(self.placed)} entries"
                raise InvalidInput("decision.placed", problem, f"Give {len(self.cuts)}")
        object.__setattr__(self, "micro_batches", checks.whole_number("decision.micro_batches", self.micro_batches))

    def __reduce__(self) -> tuple[Any, ...]:
        """Make decisions picklable, which a `MappingProxyType` is not."""
        keywords: dict[str, Any] = {
            name: getattr(self, name) for name in ("rounds", "placed", "micro_batches", "wire_dtype")
        }
        return partial(Decision, **keywords), (self.cuts, self.interval, dict(self.layer_intervals))

    @property
    def deepest(self) -> int:
        """L_c, the number of client-specific layers."""
        return max(self.cuts)

    @property
    def placement(self) -> tuple[int, ...]:
        """Where every device's model is really cut."""
        return self.cuts if self.placed is None else self.placed

    @property
    def length(self) -> int:
        """Rounds until the next decision."""
        rounds = self.interval if self.rounds is None else self.rounds
        if rounds is None:
            problem = "is missing, and nothing is ever averaged"
            raise InvalidInput("decision.rounds", problem, "Say after how many rounds to decide again")
        return rounds

    def interval_of(self, layer: int) -> int | None:
        """Return after how many rounds `layer` is averaged; None means never."""
        return self.layer_intervals.get(layer, self.interval)

    @property
    def exact_wire(self) -> bool:
        """Whether activations and gradients arrive as they were sent."""
        return self.wire_dtype in (None, "float32")

    def levelled(self, devices: int = 1, members: Sequence[int] | None = None, *, places: bool = False) -> "Decision":
        """Return a decision for `devices` devices that all cut at L_c, from which the same is learned.

        Where a layer up to L_c runs does not change what is learned, unless activations are rounded on their way: then
        the places are kept, as they are if asked for. So are micro-batches, which matter to models with batch-norm.
        `members` are the devices that this decision is for, by default all.
        """
        deepest, placed = self.deepest, None
        if places or not self.exact_wire:
            at = dict(zip(range(devices) if members is None else members, self.placement, strict=False))
            placed = tuple(at.get(device, deepest) for device in range(devices))
        wire = None if self.exact_wire else self.wire_dtype
        return Decision(
            (deepest,) * devices,
            self.interval,
            self.layer_intervals,
            placed=placed,
            micro_batches=self.micro_batches,
            wire_dtype=wire,
        )

    def check(self, devices: int, layers: int) -> None:
        """Raise unless the decision fits this number of devices and of layers."""
        if len(self.cuts) != devices:
            raise InvalidInput("decision.cuts", f"has {len(self.cuts)} entries", f"Give {devices}, one per device")
        checks.cut_numbers("decision.cuts", self.cuts, layers)
        checks.cut_numbers("decision.placed", self.placement, layers)

    def _checked_intervals(self) -> dict[int, int]:
        intervals = {}
        for layer, interval in self.layer_intervals.items():
            number = checks.whole_number("decision.layer_intervals", layer, at_least=-checks.LARGEST_WHOLE)
            intervals[number] = checks.whole_number(f"decision.layer_intervals[{layer}]", interval)
            if not 1 <= layer <= self.deepest:
                problem = f"names layer {layer}, but client-specific are 1 to {self.deepest}"
                raise InvalidInput("decision.layer_intervals", problem, "Name layers up to the deepest cut only")
        return intervals


def _cuts(name: str, given: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(cut) for cut in checks.cut_numbers(name, given, checks.LARGEST_WHOLE))
