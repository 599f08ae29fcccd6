"""The schema of files: every table and key of recipes and problem files, with its type and its range.

A range that depends on other values (the layers of a model, the other keys of a table) is checked by the part of the
program that uses them, which raises `InvalidInput` with the field's name.
Recipes give units in their keys (Mbps, TFLOPS, MB); problem files are in SI units throughout.
"""

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from adaptsfl import checks
from adaptsfl.config.ranges import (
    Count,
    Natural,
    NonNegative,
    Positive,
    PositiveShare,
    Range,
    Share,
    ZeroRange,
    checked,
    refused,
)

MOST_DEVICES = 10_000_000

WireDtype = Literal["float32", "float16", "bfloat16", "int8", "int4"]
WireName = Annotated[str, checked(checks.one_of, names=get_args(WireDtype))]  # for keys of tables
RoundsFactor = Annotated[float, checked(checks.number, at_least=1)]


class Section(BaseModel):
    """A table of a file: immutable, no unknown keys, no silent conversion of types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class DriftConfig(Section):
    """D(I, L_c) = 1{I>1}·I^power·Σ_{j≤L_c} per_layer[j]: the progress of a round that is lost to drift."""

    per_layer: list[float]
    power: Positive


class RoundsTableConfig(Section):
    """R(I, L_c), the rounds that plans need, in any unit: one row per L_c, one entry per interval."""

    intervals: list[int]
    rounds: list[list[float]]


class GrowthConfig(Section):
    """R(I, L_c) = 1 + c (I^q − 1): `factors` are c of every L_c, `power` is q."""

    factors: list[float]
    power: Positive = 0.8


class ConvergenceConfig(Section):
    """One of five forms: the paper's constants and target ε; a drift and its budget; growth; powers; a table."""

    initial_gap: Positive | None = None
    smoothness: NonNegative | None = None
    gradient_moment: list[float] | None = None
    gradient_variance: list[float] | None = None
    target: Positive | None = None
    drift: DriftConfig | None = None
    budget: float | None = None
    growth: GrowthConfig | None = None
    powers: list[float] | None = None  # p of every L_c, where R(I, L_c) = I^p
    table: RoundsTableConfig | None = None


class PlannerConfig(Section):
    """The intervals and cuts that the planner may choose from."""

    interval: int | None = None
    max_interval: int | None = None
    cuts: int | list[int] | None = None
    allowed_cuts: list[int] | None = None
    micro_batches: Count | Literal["auto"] = 1  # parts of a mini-batch that overlap in a round; or let the plan choose
    # Types of numbers to choose from where plans choose one, each with the factor by which it multiplies the rounds.
    wires: Annotated[dict[WireName, RoundsFactor], checked(checks.not_empty)] | None = None

    @model_serializer(mode="wrap")
    def _without_defaults(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit newer keys that are not given, so that older recipes keep their identity."""
        content: dict[str, Any] = dump(self)
        newer = {"micro_batches": 1, "wires": None}
        return {key: value for key, value in content.items() if key not in newer or value != newer[key]}

    def parts(self, batch_size: int) -> tuple[int, ...]:
        """Return the numbers of parts of a mini-batch to choose from; "auto": powers of two up to 16 that divide it."""
        if self.micro_batches != "auto":
            return (self.micro_batches,)
        return tuple(k for k in (1, 2, 4, 8, 16) if batch_size % k == 0)


class ModelConfig(Section):
    """The model: a name of the zoo, or the user's `package.module:factory`; and how it is cut and sent."""

    name: str
    options: dict[str, bool | int | float | str] = {}  # any but "device", which is an argument of `build`
    granularity: Literal["layer", "block"] = "layer"
    # In which activations and gradients are sent; "auto" lets the plan choose, by what each type costs in rounds.
    wire_dtype: Literal["float32", "float16", "bfloat16", "int8", "int4", "auto"] = "float32"
    input_shape: list[Count] | None = None  # of one sample, for a factory that returns no example input
    input_dtype: Literal["float32", "int64"] = "float32"
    # Options that replace those above in the model whose costs are charged, if a smaller model is trained instead.
    charged_as: dict[str, bool | int | float | str] | None = None

    @property
    def usual_wire_dtype(self) -> Literal["float32", "float16", "bfloat16", "int8", "int4"]:
        """The type for decisions that name none: the one that is given; exact numbers if plans choose."""
        return "float32" if self.wire_dtype == "auto" else self.wire_dtype


class ScheduleConfig(Section):
    """How the learning rate changes from round to round (see `rate_schedule`)."""

    kind: Literal["constant", "cosine", "steps"] = "constant"
    rounds: int | list[int] | None = None  # cosine: the round that reaches the floor; steps: the last round before each
    floor: float | None = None  # cosine: the smallest share of the learning rate; default 0
    factor: float | None = None  # steps: multiplier of each step; default 0.1
    warmup_rounds: int = 0


class TrainingConfig(Section):
    """Batch size, learning rate, optimiser and other settings of the training."""

    batch_size: Count = 16
    learning_rate: Positive = 5e-4
    common_learning_rate: Positive | None = None  # of the layers that all devices share; by default learning_rate
    optimizer: Literal["sgd", "momentum", "adam"] = "sgd"
    momentum: float = 0.9  # used by optimizer = "momentum"
    weight_decay: NonNegative = 0.0
    at_averaging: Literal["average", "reset", "keep"] = "average"
    statistics: Literal["pooled", "device"] = "pooled"
    reestimate_statistics: bool = True  # of batch-norm, before every evaluation and in the final model
    ghost_batches: bool = False  # whether batch-norm may normalise every part of a mini-batch by itself
    device: str = "cpu"  # where to compute, as torch names it
    schedule: ScheduleConfig | None = None  # of the learning rate; constant by default

    @model_serializer(mode="wrap")
    def _without_defaults(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit newer keys that are not given, so that older recipes keep their identity."""
        content: dict[str, Any] = dump(self)
        newer = {"schedule": None, "ghost_batches": False}
        return {key: value for key, value in content.items() if key not in newer or value != newer[key]}


class RunConfig(Section):
    """How long to train, with which policies, and when to evaluate and save."""

    policies: list[str] = ["adaptsfl"]
    options: dict[str, dict[str, bool | int | float | str | list[int]]] = {}  # options of policies, by policy name
    fleets: dict[str, dict[str, Any]] = {}  # by name: keys that replace those of [fleet]
    seed: Natural = 0  # of weights, data, fleet, faults and policies; added to the seeds of other sections
    rounds: Count | None = None
    samples: Count | None = None  # E: stochastic gradients per device
    seconds: Positive | None = None  # virtual
    target_accuracy: PositiveShare | None = None
    converged: bool = False  # stop when accuracy no longer rises (the paper's rule)
    evaluate_every: Count = 10  # rounds
    test_samples: Count | None = None  # of the test set; by default all
    targets: list[PositiveShare] = []  # report the time to reach each of these accuracies
    checkpoint_every: Count = 50  # at least this many rounds; always at the end of a block


class CalibrationConfig(Section):
    """Constants of the estimate of R, and of the rules that limit the cost of a wrong estimate."""

    # R = 1 + κ (L_c/L)^a (I^q − 1): q and a are the best fit to seven measured settings. The prior of κ is the middle
    # of these settings, from 0.02 (IID digits, small steps) to 2 (label shards with batch-norm); the deviation of ln κ
    # spans that range.
    power: float = Field(0.8, gt=0, le=2)
    depth_power: float = Field(1.25, ge=0, le=10)
    prior_kappa: Positive = 0.15
    prior_deviation: Positive = 1.6
    given_deviation: Positive = 0.7  # of ln κ if [convergence] gives a growth, which comes from another run
    # w in R − 1 = w · (jump of the log loss at an averaging) / (its fall per e-fold of rounds), fitted to them too.
    jump_weight: Positive = 0.33
    # Blocks of at least long_block rounds show drift by their jump. In shorter blocks, the copies' gain on their own
    # samples and their loss by noise cancel: they count less, and those below short_block are ignored.
    long_block: int = Field(8, ge=2)
    short_block: int = Field(4, ge=2)
    long_error: Positive = 0.5  # error of the rule itself for long blocks, as a deviation of ln κ
    short_error: Positive = 1.2  # the same for short blocks
    window: float = Field(2 / 3, gt=0, le=1)  # share of the run, from its end, whose averagings count: κ changes
    # The prior of −d ln(loss)/d ln(round), with the weight of one round one e-fold away; and the smallest value, for
    # losses that do not fall, to avoid a division by zero.
    prior_fall: Positive = 0.3
    least_fall: Positive = 0.02
    # An interval is at most long_block or `growth` times the rounds done, whichever is larger: this limits the cost of
    # a mistake. If averaging takes long, an interval may last as long as `risked_averagings` averagings, but is
    # at most 4·long_block or `averaging_growth` times the rounds done, whichever is larger.
    growth: Positive = 0.5
    risked_averagings: Positive = 2.0
    averaging_growth: Positive = 1.0
    kept_gain: float = Field(0.1, ge=0, lt=1)  # keep a plan unless another is faster by this share: changes cost
    probes: Natural = 2  # number of long blocks in the window that the estimate needs
    probe_gain: float = Field(0.1, ge=0, lt=1)  # least predicted gain of a probing block, assuming low drift


class AdaptConfig(Section):
    """How plans learn from training: `calibrated` uses its losses, `paper` the bound with measured constants."""

    mode: Literal["calibrated", "paper"] = "calibrated"
    target: Positive | None = None  # ε, for mode = "paper" without [convergence]
    measure_every: Count = 60  # rounds between two measurements of the paper's constants
    calibration: CalibrationConfig = CalibrationConfig()


class NoiseConfig(Section):
    """Coefficients of variation of what the planner measures; the true values stay as they are."""

    compute_cv: NonNegative = 0.0
    uplink_cv: NonNegative = 0.0
    downlink_cv: NonNegative = 0.0


class FleetConfig(Section):
    """Devices and servers: a built-in fleet, any part of it replaced, or a trace to replay."""

    base: str = "paper"
    devices: Annotated[int, checked(checks.whole_number, at_most=MOST_DEVICES)] = 20
    seed: Natural = 0
    distribution: Literal["uniform", "log-uniform"] | None = None
    device_tflops: Range | None = None
    uplink_mbps: Range | None = None
    downlink_mbps: Range | None = None
    fed_uplink_mbps: Range | None = None
    fed_downlink_mbps: Range | None = None
    memory_mb: Range | None = None
    server_tflops: Positive | None = None
    server_to_fed_mbps: Positive | None = None
    server_from_fed_mbps: Positive | None = None
    forward_ms: ZeroRange | None = None  # fixed times, besides work and bits: of every forward pass
    backward_ms: ZeroRange | None = None
    uplink_ms: ZeroRange | None = None  # of every transfer
    downlink_ms: ZeroRange | None = None
    fed_uplink_ms: ZeroRange | None = None
    fed_downlink_ms: ZeroRange | None = None
    server_turn_ms: NonNegative | None = None
    server_to_fed_ms: NonNegative | None = None
    server_from_fed_ms: NonNegative | None = None
    averaging_ms: NonNegative | None = None
    averaging_mbps: Positive | None = None  # bits of layers that the fed server averages per second
    redraw: list[str] | None = None
    noise: NoiseConfig = NoiseConfig()
    trace: str | None = None
    trace_repeats: bool = False


class FaultsConfig(Section):
    """Devices that drop out and return, that are slow for a round, or that sit out a block. All off by default."""

    dropout_rate: Share = 0.0  # probability per round that a present device drops out
    return_rate: Share = 0.1  # probability per round that an absent device returns
    trace: str | None = None  # recorded presence of devices; relative to the recipe
    straggler_rate: Share = 0.0  # probability per round that a device is slow
    straggler_factor: Annotated[float, checked(checks.number, at_least=1)] = 2.0  # slowdown of a straggler
    participation: PositiveShare = 1.0  # share of the present devices that takes part in a block
    seed: Natural = 0


class DeployConfig(Section):
    """How real devices and servers work together."""

    devices: list[str] | None = None  # their names; by default device-1 … device-N, as many as [fleet] has
    cut_floor: Count = 1  # smallest cut of any device; layers up to it never reach the edge server
    private_start: bool = True  # the fed server draws the initial weights of layers up to cut_floor
    quorum: PositiveShare = 0.5  # share of the fleet that a round needs to continue
    round_deadline_s: Positive = 60.0  # after it, a round continues without late devices
    start_deadline_s: NonNegative = 60.0  # after it, training starts without missing devices
    plan_deadline_s: NonNegative = 10.0  # after it, training keeps the last plan while the next is computed


class PartitionConfig(Section):
    """How the training samples are partitioned among devices; a key that the kind does not read is an error."""

    kind: Literal["iid", "shards", "dirichlet", "files"] = "iid"
    seed: Natural = 0
    shards_per_device: Count | None = None  # shards: default 2, as in the paper
    shard_size: Count | None = None  # shards: by default all samples are used and must divide evenly
    alpha: Positive | None = None  # dirichlet
    min_samples: Natural | None = None  # dirichlet: of every device, by default one mini-batch
    files: list[str] | None = None  # files: one per device, relative to the recipe


class DataConfig(Section):
    """The samples: a known dataset, a folder, or the user's `package.module:factory`; and their partition."""

    name: str = "digits"
    path: str | None = None  # relative to the recipe
    classes: list[str] | None = None  # of images, in the order of their labels; by default alphabetical
    options: dict[str, bool | int | float | str] = {}  # for the factory
    cache: str | None = None  # folder for decoded images
    mean: list[float] | None = None  # per channel, of inputs in 0 … 1
    std: list[float] | None = None
    augmentation: Literal["none", "crop-flip"] = "none"
    weights: Literal["equal", "size"] = "equal"  # weights of the devices in every average
    seed: Natural = 0  # of the order of the mini-batches
    partition: PartitionConfig = PartitionConfig()


class Recipe(Section):
    """One experiment."""

    name: str = ""
    model: ModelConfig
    training: TrainingConfig = TrainingConfig()
    fleet: FleetConfig = FleetConfig()
    convergence: ConvergenceConfig | None = None
    planner: PlannerConfig = PlannerConfig()
    faults: FaultsConfig = FaultsConfig()
    data: DataConfig | None = None
    run: RunConfig | None = None
    adapt: AdaptConfig = AdaptConfig()
    deploy: DeployConfig = DeployConfig()

    @model_validator(mode="after")
    def _wires_are_for_plans(self) -> Self:
        """Refuse types to choose from where the type is given: plans would not look at them."""
        if self.planner.wires is not None and self.model.wire_dtype != "auto":
            problem = f"gives types to choose from, but model.wire_dtype is {self.model.wire_dtype!r}"
            raise refused("planner.wires", problem, "Set model.wire_dtype to 'auto', or remove it")
        return self


class FleetFile(Section):
    """A file that contains only a fleet."""

    name: str = ""
    fleet: FleetConfig


class DevicesSection(Section):
    """One entry per device, in SI units."""

    flops: list[float]
    uplink_bps: list[float]
    downlink_bps: list[float]
    fed_uplink_bps: list[float]
    fed_downlink_bps: list[float]
    memory_bytes: list[float | None] | None = None
    names: list[str] | None = None
    forward_s: list[float] | None = None  # fixed seconds of every forward pass, backward pass and transfer
    backward_s: list[float] | None = None
    uplink_s: list[float] | None = None
    downlink_s: list[float] | None = None
    fed_uplink_s: list[float] | None = None
    fed_downlink_s: list[float] | None = None


class ServerSection(Section):
    """The edge server, its links with the fed server, and the fed server's averaging, in SI units."""

    flops: float
    to_fed_bps: float
    from_fed_bps: float
    turn_s: float = 0.0  # fixed seconds
    to_fed_s: float = 0.0
    from_fed_s: float = 0.0
    averaging_s: float = 0.0
    averaging_bps: float | None = None


class CutsSection(Section):
    """One entry per cut, cumulative where the paper's are, in SI units."""

    forward_flops: list[float]
    backward_flops: list[float]
    activation_bits: list[float]
    gradient_bits: list[float]
    client_model_bits: list[float]
    memory_bytes: list[float] | None = None
    names: list[str] | None = None
    wire_dtype: WireDtype = "float32"  # in which activation_bits and gradient_bits are counted


class ProblemFile(Section):
    """A complete planning problem: it contains all numbers, and nothing is drawn at random."""

    batch_size: Count
    learning_rate: Positive
    devices: DevicesSection
    server: ServerSection
    cuts: CutsSection
    convergence: ConvergenceConfig
    planner: PlannerConfig = PlannerConfig()
