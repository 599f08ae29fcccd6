"""What files may say: recipes (TOML) and planning problems (JSON), with unknown keys refused.

This module knows shapes and types; whether a value makes sense (positive, finite, of the right length) is
checked by the part of the program that uses it, which raises `InvalidInput` with the field's name.
Recipes give units in their keys (Mbps, TFLOPS, MB); problem files are in SI units throughout.
"""

import difflib
import json
import re
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import pydantic
from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from adaptsfl.checks import short
from adaptsfl.errors import InvalidInput

Range = float | list[float]  # one value for all devices, or [low, high] to draw from


class Section(BaseModel):
    """A table of a file: immutable, no unknown keys, no silent conversion of types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class DriftConfig(Section):
    """D(I, L_c) = 1{I>1}·I^power·Σ_{j≤L_c} per_layer[j]: how much progress of a round the drift eats."""

    per_layer: list[float]
    power: float


class RoundsTableConfig(Section):
    """R(I, L_c), the rounds that plans need in any one unit: one row per L_c, one entry per interval."""

    intervals: list[int]
    rounds: list[list[float]]


class GrowthConfig(Section):
    """R(I, L_c) = 1 + c (I^q − 1): c of every L_c, and q."""

    factors: list[float]
    power: float = 0.8


class ConvergenceConfig(Section):
    """One of five forms: the paper's constants and target ε; a drift and its budget; growth; powers; a table."""

    initial_gap: float | None = None
    smoothness: float | None = None
    gradient_moment: list[float] | None = None
    gradient_variance: list[float] | None = None
    target: float | None = None
    drift: DriftConfig | None = None
    budget: float | None = None
    growth: GrowthConfig | None = None
    powers: list[float] | None = None  # p of every L_c, where R(I, L_c) = I^p
    table: RoundsTableConfig | None = None


class PlannerConfig(Section):
    """What the planner may choose from."""

    interval: int | None = None
    max_interval: int | None = None
    cuts: int | list[int] | None = None
    allowed_cuts: list[int] | None = None


class ModelConfig(Section):
    """The model: a name of the zoo, or `package.module:factory` of the user's own, and how it is cut and sent."""

    name: str
    options: dict[str, bool | int | float | str] = {}  # any but "device", which tells `build` where to build
    granularity: Literal["layer", "block"] = "layer"
    wire_dtype: Literal["float32", "float16", "bfloat16", "int8"] = "float32"
    input_shape: list[int] | None = None  # of one sample, for a factory that gives no example input
    input_dtype: Literal["float32", "int64"] = "float32"
    # Options, over the others, of the model whose work and traffic count, where a smaller one learns in its place.
    charged_as: dict[str, bool | int | float | str] | None = None


class ScheduleConfig(Section):
    """How the learning rate changes from round to round (see `rate_schedule`)."""

    kind: Literal["constant", "cosine", "steps"] = "constant"
    rounds: int | list[int] | None = None  # cosine: when the floor is reached; steps: after which rounds it falls
    floor: float | None = None  # cosine: the share of the learning rate that is left, 0
    factor: float | None = None  # steps: 0.1
    warmup_rounds: int = 0


class TrainingConfig(Section):
    """What the training itself fixes."""

    batch_size: int = 16
    learning_rate: float = 5e-4
    common_learning_rate: float | None = None  # of the layers that all devices share; by default the same
    optimizer: Literal["sgd", "momentum", "adam"] = "sgd"
    momentum: float = 0.9  # of the optimiser of that name
    weight_decay: float = 0.0
    at_averaging: Literal["average", "reset", "keep"] = "average"
    statistics: Literal["pooled", "device"] = "pooled"
    reestimate_statistics: bool = True  # of batch-norm, before every evaluation and in the final model
    device: str = "cpu"  # where to compute, as torch names it
    schedule: ScheduleConfig | None = None  # of the learning rate; constant without it

    @model_serializer(mode="wrap")
    def _without_absent_schedule(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out a schedule that is not given: such a recipe keeps the identity that it had before this key."""
        content: dict[str, Any] = dump(self)
        return {key: value for key, value in content.items() if key != "schedule" or value is not None}


class RunConfig(Section):
    """How long to train, by which policies, and what to look at on the way."""

    policies: list[str] = ["adaptsfl"]
    options: dict[str, dict[str, bool | int | float | str | list[int]]] = {}  # of policies, by their name
    fleets: dict[str, dict[str, Any]] = {}  # by name, what each has instead of what [fleet] says
    seed: int = 0  # of everything random: weights, data, fleet, faults, policies; added to the sections' own
    rounds: int | None = None
    samples: int | None = None  # E: stochastic gradients per device
    seconds: float | None = None  # virtual
    target_accuracy: float | None = None
    converged: bool = False  # stop where accuracy rises no more (the paper's rule)
    evaluate_every: int = 10  # rounds
    test_samples: int | None = None  # of the test set; by default all
    targets: list[float] = []  # accuracies to which the time is reported
    checkpoint_every: int = 50  # rounds, at least; blocks are never cut


class CalibrationConfig(Section):
    """Every constant of how the rounds of plans are estimated, and of the rules that keep a guess from doing harm."""

    # R = 1 + κ (L_c/L)^a (I^q − 1): q and a as they fit best to seven settings that were measured. κ before anything is
    # seen: the middle of these settings, from 0.02 (IID digits, small steps) to 2 (label shards with batch-norm); the
    # deviation of ln κ spans that range.
    power: float = Field(0.8, gt=0, le=2)
    depth_power: float = Field(1.25, ge=0, le=10)
    prior_kappa: float = Field(0.15, gt=0, allow_inf_nan=False)
    prior_deviation: float = Field(1.6, gt=0, allow_inf_nan=False)
    given_deviation: float = Field(
        0.7, gt=0, allow_inf_nan=False
    )  # of ln κ where [convergence] gives a growth: it is of another run
    jump_weight: float = Field(
        0.33, gt=0, allow_inf_nan=False
    )  # from the jump of the log loss at an averaging, over its fall per e-fold of rounds, to R − 1: fitted to them
    # Blocks of at least so many rounds show drift by their jump. In shorter ones, what copies gain on their own samples
    # and what they lose by noise cancel: they count less, and the shortest not at all.
    long_block: int = Field(8, ge=2)
    short_block: int = Field(4, ge=2)
    long_error: float = Field(
        0.5, gt=0, allow_inf_nan=False
    )  # by how much the rule itself is wrong, as a deviation of ln κ, from long blocks
    short_error: float = Field(1.2, gt=0, allow_inf_nan=False)  # and from short ones
    window: float = Field(2 / 3, gt=0, le=1)  # the last part of a run whose averagings count: κ changes over training
    # −d ln(loss)/d ln(round) before the losses show it, with the weight of one round one e-fold away; and the least,
    # where losses do not fall: a jump would be divided by nothing.
    prior_fall: float = Field(0.3, gt=0, allow_inf_nan=False)
    least_fall: float = Field(0.02, gt=0, allow_inf_nan=False)
    # An interval is at most long_block, or this part of the rounds done: a mistake then costs no more than that. Where
    # averaging takes long, its rounds may take as long as so many averagings; but it is at most four times long_block,
    # or this multiple of the rounds done.
    growth: float = Field(0.5, gt=0, allow_inf_nan=False)
    risked_averagings: float = Field(2.0, gt=0, allow_inf_nan=False)
    averaging_growth: float = Field(1.0, gt=0, allow_inf_nan=False)
    kept_gain: float = Field(
        0.1, ge=0, lt=1
    )  # a plan is kept unless another is faster by this part: changing costs rounds
    probes: int = Field(2, ge=0)  # long blocks within the window that the estimate is to rest on
    probe_gain: float = Field(
        0.1, ge=0, lt=1
    )  # what a probing block must promise, where little drift is still plausible


class AdaptConfig(Section):
    """How plans learn from training: `calibrated` from its losses, `paper` by the bound with measured constants."""

    mode: Literal["calibrated", "paper"] = "calibrated"
    target: float | None = None  # ε, for the paper's mode without [convergence]
    measure_every: int = 60  # rounds between two measurements of the paper's constants
    calibration: CalibrationConfig = CalibrationConfig()


class NoiseConfig(Section):
    """Coefficients of variation of what the planner measures; the true values stay as they are."""

    compute_cv: float = 0.0
    uplink_cv: float = 0.0
    downlink_cv: float = 0.0


class FleetConfig(Section):
    """Devices and servers: a built-in fleet, any part of it replaced, or a trace to replay."""

    base: str = "paper"
    devices: int = 20
    seed: int = 0
    distribution: Literal["uniform", "log-uniform"] | None = None
    device_tflops: Range | None = None
    uplink_mbps: Range | None = None
    downlink_mbps: Range | None = None
    fed_uplink_mbps: Range | None = None
    fed_downlink_mbps: Range | None = None
    memory_mb: Range | None = None
    server_tflops: float | None = None
    server_to_fed_mbps: float | None = None
    server_from_fed_mbps: float | None = None
    redraw: list[str] | None = None
    noise: NoiseConfig = NoiseConfig()
    trace: str | None = None
    trace_repeats: bool = False


class FaultsConfig(Section):
    """Devices that drop out and return, that are slow for a round, or that sit out a block. All off by default."""

    dropout_rate: float = 0.0  # of a device that is there, per round
    return_rate: float = 0.1  # of a device that is away, per round
    trace: str | None = None  # who is there, recorded; beside the recipe
    straggler_rate: float = 0.0  # of every device, per round
    straggler_factor: float = 2.0  # how many times slower
    participation: float = 1.0  # the share of those there that takes part in a block
    seed: int = 0


class DeployConfig(Section):
    """How real devices and servers work together."""

    devices: list[str] | None = None  # their names; by default device-1 … device-N, as many as [fleet] has
    cut_floor: int = 1  # no device cuts before this layer, and layers up to it never reach the edge server
    private_start: bool = True  # layers up to the floor begin with weights that the fed server alone has drawn
    quorum: float = 0.5  # the share of the fleet without which no round goes on
    round_deadline_s: float = 60.0  # after which a round goes on without those who are late
    start_deadline_s: float = 60.0  # after which training begins without those who have not come
    plan_deadline_s: float = 10.0  # after which the last plan is kept, while the next is being made


class PartitionConfig(Section):
    """How the training samples are shared out among the devices; a key that the kind does not read is refused."""

    kind: Literal["iid", "shards", "dirichlet", "files"] = "iid"
    seed: int = 0
    shards_per_device: int | None = None  # shards: 2, as in the paper
    shard_size: int | None = None  # shards: by default all samples, which must then divide evenly
    alpha: float | None = None  # dirichlet
    min_samples: int | None = None  # dirichlet: of every device, by default one mini-batch
    files: list[str] | None = None  # files: one per device, beside the recipe


class DataConfig(Section):
    """The samples: a known dataset, a folder, or `package.module:factory` of the user's own, and who holds which."""

    name: str = "digits"
    path: str | None = None  # beside the recipe
    classes: list[str] | None = None  # of images, in the order of their labels; by default that of the alphabet
    options: dict[str, bool | int | float | str] = {}  # for the factory
    cache: str | None = None  # where decoded images are kept
    mean: list[float] | None = None  # per channel, of inputs in 0 … 1
    std: list[float] | None = None
    augmentation: Literal["none", "crop-flip"] = "none"
    weights: Literal["equal", "size"] = "equal"  # of the devices in every average
    seed: int = 0  # of the order of the mini-batches
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


class FleetFile(Section):
    """A fleet on its own."""

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


class ServerSection(Section):
    """The edge server and its links with the fed server, in SI units."""

    flops: float
    to_fed_bps: float
    from_fed_bps: float


class CutsSection(Section):
    """One entry per cut, cumulative where the paper's are, in SI units."""

    forward_flops: list[float]
    backward_flops: list[float]
    activation_bits: list[float]
    gradient_bits: list[float]
    client_model_bits: list[float]
    memory_bytes: list[float] | None = None
    names: list[str] | None = None


class ProblemFile(Section):
    """A planning problem on its own: nothing is drawn at random, nothing is looked up."""

    batch_size: int
    learning_rate: float
    devices: DevicesSection
    server: ServerSection
    cuts: CutsSection
    convergence: ConvergenceConfig
    planner: PlannerConfig = PlannerConfig()


AnySection = TypeVar("AnySection", bound=Section)


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe; the files that it names are looked for beside it.

    Args:
        overrides: what to say instead of the file, as section.key=value.
    """
    recipe = parse(Recipe, read_toml(path, overrides), source=str(path))
    sections: dict[str, Section] = {"fleet": _fleet_beside(path.parent, recipe.fleet)}
    if recipe.faults.trace is not None:
        sections["faults"] = recipe.faults.model_copy(update={"trace": str(path.parent / recipe.faults.trace)})
    if recipe.data is not None:
        sections["data"] = _beside(path.parent, recipe.data)
    if recipe.run is not None and recipe.run.fleets:
        fleets = {name: _traced_beside(path.parent, fleet) for name, fleet in recipe.run.fleets.items()}
        sections["run"] = recipe.run.model_copy(update={"fleets": fleets})
    return recipe.model_copy(update=sections)


def load_fleet(path: Path, overrides: Sequence[str] = ()) -> FleetConfig:
    """Read the [fleet] of a recipe, or of a TOML file that has nothing else."""
    content = read_toml(path, overrides)
    section: type[Recipe | FleetFile] = Recipe if "model" in content else FleetFile
    return _fleet_beside(path.parent, parse(section, content, source=str(path)).fleet)


def read_toml(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return what a TOML file says, with some of it replaced."""
    try:
        content = tomllib.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise InvalidInput("", f"is not valid TOML: {error}", "Mend the syntax", source=str(path)) from None
    for override in overrides:
        override_key(content, override)
    return content


def override_key(content: dict[str, Any], override: str) -> None:
    """Set a key of nested tables, given as section.key=value: 5 is a number, [1, 2] a list, all else text."""
    dotted, equals, text = override.partition("=")
    *tables, key = _key_parts(dotted.strip())
    if not equals or not key:
        raise InvalidInput("--set", f"is {override!r}", "Give section.key=value, for example --set run.rounds=50")
    for name in tables:
        content = content.setdefault(name, {})
        if not isinstance(content, dict):
            raise InvalidInput("--set", f"is {override!r}, but {name!r} holds no keys", "Give a key of a section")
    try:
        content[key] = tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        content[key] = text.strip()


def _key_parts(dotted: str) -> list[str]:
    """Return the names in a dotted key; quotes hold together what has a dot in it."""
    try:
        content: Any = tomllib.loads(f"{dotted} = 0")
    except tomllib.TOMLDecodeError:  # rma+rms needs no quotes here
        return dotted.split(".")
    parts = []
    while isinstance(content, dict):
        (name, content) = next(iter(content.items()))
        parts.append(name)
    return parts


def load_problem_file(path: Path) -> ProblemFile:
    """Read a planning problem."""
    try:
        content = json.loads(_read(path), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise InvalidInput("", f"is not valid JSON: {error}", "Mend the syntax", source=str(path)) from None
    return parse(ProblemFile, content, source=str(path))


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise InvalidInput(twice, "appears twice in one table", "Keep one of them")
    return content


def parse(section: type[AnySection], content: Any, *, source: str = "") -> AnySection:
    """Return `content` as a `section`, or raise `InvalidInput` for the first thing that does not fit."""
    try:
        return section.model_validate(content)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        problem, remedy = _explain(first, section)
        union = first["type"] not in ("extra_forbidden", "missing")
        raise InvalidInput(_dotted(first["loc"], union=union), problem, remedy, source=source) from None


def _fleet_beside(folder: Path, fleet: FleetConfig) -> FleetConfig:
    return fleet if fleet.trace is None else fleet.model_copy(update={"trace": str(folder / fleet.trace)})


def _traced_beside(folder: Path, fleet: dict[str, Any]) -> dict[str, Any]:
    trace = fleet.get("trace")
    return {**fleet, "trace": str(folder / trace)} if isinstance(trace, str) else fleet


def _beside(folder: Path, data: DataConfig) -> DataConfig:
    """Return the section with the paths in it as seen from the folder of its recipe."""
    named = {key: str(folder / value) for key in ("path", "cache") if (value := getattr(data, key)) is not None}
    files = data.partition.files
    placed = None if files is None else [str(folder / file) for file in files]
    return data.model_copy(update={**named, "partition": data.partition.model_copy(update={"files": placed})})


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        reason = error.strerror or str(error)
        raise InvalidInput("", f"cannot be read: {reason}", "Check the path", source=str(path)) from None
    except UnicodeDecodeError:
        raise InvalidInput("", "is not UTF-8 text", "Save it as UTF-8", source=str(path)) from None


def _explain(error: Mapping[str, Any], section: type[Section]) -> tuple[str, str]:
    """Return what is wrong and what to do, in words that fit any of our files."""
    given = short(error["input"])
    name = str(error["loc"][-1]) if error["loc"] else ""
    match error["type"]:
        case "missing":
            return "is missing", "Add it"
        case "extra_forbidden":
            near = difflib.get_close_matches(name, _keys(section), n=1)
            return f"is not a known key (its value is {given})", f"Did you mean {near[0]!r}?" if near else "Remove it"
        case _:
            return f"is {given}", _in_plain_words(error["msg"])


def _in_plain_words(message: str) -> str:
    """Say what to give without Python's words for it."""
    message = re.sub(r"a valid dictionary or instance of \w+", "a table of keys", message)
    message = message.replace("Input should be", "Give").replace("a valid integer", "a whole number")
    return message.replace("a valid string", "text in quotes").replace("valid ", "")


def _keys(section: type[Section]) -> set[str]:
    """Every key of `section` and of the sections inside it."""
    keys: set[str] = set()
    for key, field in section.model_fields.items():
        keys.add(key)
        for inner in (field.annotation, *get_args(field.annotation)):  # a section, or a section or None
            if isinstance(inner, type) and issubclass(inner, Section):
                keys |= _keys(inner)
    return keys


def _dotted(location: tuple[str | int, ...], *, union: bool) -> str:
    """('devices', 'flops', 3) becomes devices.flops[3]; the branch names of a `union` are left out."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        elif not (union and (part in ("bool", "float", "int", "str") or "[" in part)):
            name = part if part and part.isprintable() else repr(part)
            text += f".{name}" if text else name
    return text
