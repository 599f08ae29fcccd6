"""Read planning problems from files: recipes name a model and a fleet, problem files contain all numbers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from adaptsfl import checks
from adaptsfl.config import ModelConfig, PlannerConfig, ProblemFile, Recipe, load_problem_file, load_recipe
from adaptsfl.convergence import LONGEST_INTERVAL, RoundsModel, model_from
from adaptsfl.costs import ASSUMED_FACTORS, CutCosts
from adaptsfl.errors import InvalidInput, inside, naming
from adaptsfl.fleet import Fleet, Server, memory_limits, noise_from, resources_from
from adaptsfl.planner import PlanProblem

if TYPE_CHECKING:
    from torch import Tensor

    from adaptsfl.models import SplitModel

Optimizer = Literal["sgd", "momentum", "adam"]

LEAST_SAMPLES = 2  # that batch-norm normalises at once: one sample alone may have no variance
LARGEST_BUILT = 2_000_000_000  # bytes of parameters


def load_problem(path: Path, remark: Callable[[str], None] = lambda _: None) -> PlanProblem:
    """Read a planning problem from a recipe (.toml) or a problem file (.json).

    `remark` is called with what is planned otherwise than one may expect.
    """
    with naming(str(path)):
        match path.suffix.lower():
            case ".toml":
                return problem_from_recipe(load_recipe(path), remark=remark)
            case ".json":
                return problem_from_file(load_problem_file(path))
            case suffix:
                raise InvalidInput("", f"ends in {suffix!r}", "Give a recipe (.toml) or a problem (.json)")


def problem_from_recipe(recipe: Recipe, round_: int = 0, remark: Callable[[str], None] = lambda _: None) -> PlanProblem:
    """Return the problem that a recipe poses, with the fleet as measured in that round."""
    with inside("fleet"):
        resources = resources_from(recipe.fleet)
    with inside("fleet.noise"):
        noise = noise_from(recipe.fleet.noise, recipe.fleet.seed)
        fleet = noise.measure(resources.at(round_), round_)
    parts, example = charged_model(recipe.model)
    costs = costs_of(parts, example, recipe.model, recipe.training.batch_size, recipe.training.optimizer)
    if recipe.convergence is None:
        raise InvalidInput("convergence", "is missing", "Add it, or simulate: training measures what a plan needs")
    with inside("convergence"):
        model = model_from(recipe.convergence, recipe.training.learning_rate, fleet.size, costs.layers)
    problem = _constrained(fleet, costs, model, recipe.training.batch_size, recipe.planner)
    if recipe.model.wire_dtype == "auto":
        problem = replace(problem, wires=recipe.planner.wires or ASSUMED_FACTORS)
    return _normalised(problem, parts, recipe, remark)


def _normalised(
    problem: PlanProblem, parts: "SplitModel", recipe: Recipe, remark: Callable[[str], None]
) -> PlanProblem:
    """Return the problem with those numbers of parts that batch-norm allows: it would normalise each part by itself."""
    from adaptsfl.training.batchnorm import mixes_samples  # noqa: PLC0415  (needs torch)

    if max(problem.micro_batches) == 1 or not mixes_samples(parts.pieces):
        return problem
    given, ghosts = recipe.planner.micro_batches, recipe.training.ghost_batches
    most = problem.batch_size // LEAST_SAMPLES if ghosts else 1
    allowed = tuple(k for k in problem.micro_batches if k <= max(most, 1))
    if given != "auto" and not allowed:
        why = f"leaves batch-norm {problem.batch_size // given} sample in every part"
        why = why if ghosts else "batch-norm looks at all samples of a mini-batch"
        remedy = f"Give at most {most}" if ghosts else "Give 1, or allow it: training.ghost_batches = true"
        raise InvalidInput("planner.micro_batches", f"is {given}, but {why}", remedy)
    if not ghosts:
        remark(
            "mini-batches stay whole: batch-norm looks at all of their samples. Parts are considered with "
            "training.ghost_batches = true."
        )
    return replace(problem, micro_batches=allowed)


def model_costs(model: ModelConfig, batch_size: int, optimizer: Optimizer) -> CutCosts:
    """Measure what every cut costs of the model that a recipe names, or of the one charged in its place."""
    return costs_of(*charged_model(model), model, batch_size, optimizer)


def charged_model(model: ModelConfig) -> "tuple[SplitModel, Tensor]":
    """Split the model that a recipe names, or the one charged in its place; return it with one sample of its input."""
    return split_model(model.model_copy(update={"options": {**model.options, **(model.charged_as or {})}}))


def costs_of(
    parts: "SplitModel", example: "Tensor", model: ModelConfig, batch_size: int, optimizer: Optimizer
) -> CutCosts:
    """Measure what every cut of a split model costs, with activations sent as the recipe says."""
    from adaptsfl import models  # noqa: PLC0415

    return models.profile(parts, example, batch_size=batch_size, wire_dtype=model.usual_wire_dtype, optimizer=optimizer)


def split_model(model: ModelConfig, *, to_train: bool = False) -> "tuple[SplitModel, Tensor]":
    """Build the model that a recipe names and split it; return it with one sample of its input.

    The model is first built on the meta device, which gives its size without using memory. Up to `LARGEST_BUILT`, or if
    it will be trained, it is then built on the CPU, so that `split` can compare its layers with it. A factory that
    fails on the meta device also runs on the CPU: it may need real numbers.
    """
    try:
        import torch  # noqa: PLC0415  (an extra: problem files are planned without it)

        from adaptsfl import models  # noqa: PLC0415
    except ModuleNotFoundError:
        raise InvalidInput("model", "needs torch", "Install it: pip install 'adaptsfl[train]'") from None
    if "device" in model.options:
        raise InvalidInput(
            "model.options.device", f"is {model.options['device']!r}", "Remove it: models are planned without one"
        )
    with _options_named():
        for_real = to_train
        if not to_train:
            try:
                built, device = models.build(model.name, device="meta", **model.options), "meta"
                for_real = sum(tensor.nbytes for tensor in built.module.parameters()) <= LARGEST_BUILT
            except InvalidInput:
                for_real = True
        if for_real:
            built, device = models.build(model.name, device="cpu", **model.options), "cpu"
    example = built.example_input
    if model.input_shape:
        example = torch.zeros(1, *model.input_shape, dtype=getattr(torch, model.input_dtype), device=device)
    if example is None:
        raise InvalidInput(
            "model.input_shape", f"is missing, and {model.name} gives no example input", "Give the shape of one sample"
        )
    return models.split(built.module, example, model.granularity), example


def classes_of(model: "SplitModel", example: "Tensor") -> int:
    """Return the number of classes: the size of the last dimension of the model's output."""
    import torch  # noqa: PLC0415

    module = model.module
    mode = module.training
    with torch.no_grad():
        outputs = module.eval()(example)
    module.train(mode)
    return int(outputs.shape[-1])


@contextmanager
def _options_named() -> Iterator[None]:
    """Prefix the field of an error about a model option with its place in the recipe."""
    try:
        yield
    except InvalidInput as error:
        raise (error if error.field.startswith("model") else error.inside("model.options")) from None


def problem_from_file(file: ProblemFile) -> PlanProblem:
    """Return the problem that a problem file states."""
    with inside("server"):
        server = Server(**file.server.model_dump())
    with inside("devices"):
        devices = file.devices.model_dump(exclude={"memory_bytes", "names"}, exclude_none=True)
        limits = file.devices.memory_bytes
        if limits is not None:  # null means no limit; a file must not contain infinity
            checks.vector("memory_bytes", [1.0 if limit is None else limit for limit in limits], positive=True)
        memory = None if limits is None else memory_limits(limits)
        fleet = Fleet(**devices, server=server, memory_bytes=memory, names=tuple(file.devices.names or ()))
    with inside("cuts"):
        costs = CutCosts(**{**file.cuts.model_dump(), "names": tuple(file.cuts.names or ())})
    with inside("convergence"):
        model = model_from(file.convergence, file.learning_rate, fleet.size, costs.layers)
    return replace(_constrained(fleet, costs, model, file.batch_size, file.planner), wires=file.planner.wires)


def _constrained(
    fleet: Fleet, costs: CutCosts, model: RoundsModel, batch_size: int, limits: PlannerConfig
) -> PlanProblem:
    cuts = [limits.cuts] * fleet.size if isinstance(limits.cuts, int) else limits.cuts
    return PlanProblem(
        fleet,
        costs,
        model,
        batch_size,
        interval=limits.interval,
        max_interval=LONGEST_INTERVAL if limits.max_interval is None else limits.max_interval,
        cuts=cuts,
        allowed_cuts=limits.allowed_cuts,
        micro_batches=limits.parts(batch_size),
    )
