"""An experiment: several policies, seeds and fleets from one recipe, in one folder; safe to stop and to start again.

EXPERIMENT/
  recipe.json             the recipe with every default filled in
  trajectories/           what was learned, by schedule: runs with the same schedule share it
  adaptsfl-seed0/         run.json  record.jsonl  checkpoint…  model.safetensors
  rma+rms-seed0/          …

A run that was stopped is started again by the same call. Its blocks are decided anew, with the same outcome, and what
was already learned is looked up, so it goes on where it stopped.
"""

import fcntl
import json
import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import adaptsfl
from adaptsfl import checks
from adaptsfl.config import FleetConfig, Recipe, RunConfig, parse
from adaptsfl.errors import (
    AdaptSFLError,
    InvalidInput,
    NotWritten,
    RankFailed,
    TrainingDiverged,
    first_line,
    message_of,
)
from adaptsfl.files import about_tensors, replace_file, write_tensors
from adaptsfl.fleet import noise_from, resources_from
from adaptsfl.fleet.recipe import BESIDE_A_TRACE
from adaptsfl.loading import inside
from adaptsfl.policies import Policy, Trainer, make_policy
from adaptsfl.simulation.faults import faults_from
from adaptsfl.simulation.folder import RECORD, RUN, Run, append_block, read_run, write_run
from adaptsfl.simulation.learner import Learner
from adaptsfl.simulation.rank_speeds import RankSpeeds
from adaptsfl.simulation.record import Block, plain
from adaptsfl.simulation.run import Simulation
from adaptsfl.simulation.trajectory import Store, Trajectory
from adaptsfl.simulation.world import World, check_run, make_world
from adaptsfl.training.checkpoint import remove_checkpoint
from adaptsfl.training.ranks import ALONE, Ranks

RECIPE, MODEL, TRAJECTORIES = "recipe.json", "model.safetensors", "trajectories"


@dataclass(frozen=True)
class Job:
    """One run of an experiment: its policy by name, its seed, and its fleet by name where there are several."""

    policy: str
    seed: int
    fleet: str = ""

    @property
    def folder_name(self) -> str:
        """What its folder is called."""
        name = "-".join(part for part in (self.policy, self.fleet, f"seed{self.seed}") if part)
        return re.sub(r"[^\w.+@-]", "-", name.replace(":", ".")).lstrip(".")


@dataclass(frozen=True)
class Order:
    """What the first rank tells the others about a run: `identity` is that of all that decides what is learned."""

    job: Job
    trainer: Trainer
    divergence: bool
    identity: str


def give_up(job: Job, error: Exception) -> None:
    """Let the error of a run stop the experiment."""
    raise error


@dataclass(frozen=True)
class Watcher:
    """Who is told how things go.

    Attributes:
        begins: before a run.
        on_round: after every round that is trained, with its number and loss.
        on_block: after every block.
        ends: after a run, also one that was done before.
        fails: when a run fails. If it returns, the other runs go on; by default it does not.
    """

    begins: Callable[[Job, World], None] = lambda _job, _world: None
    on_round: Callable[[int, float], None] = lambda _round, _loss: None
    on_block: Callable[[Block], None] = lambda _block: None
    ends: Callable[[Job, Run], None] = lambda _job, _run: None
    fails: Callable[[Job, Exception], None] = give_up


class Experiment:
    """All runs of a recipe, in `folder`.

    Args:
        policies: their names; those of the recipe if not given. Options come from the recipe's [run.options].
        seeds: how many, from the recipe's own seed on.
        trajectories: where what was learned is kept; several experiments may share it. By default in `folder`.
        keep_models: whether to write trained models. Without them, a run whose every step was looked up trains nothing.
        ranks: the processes that train every run together. All of them make the same experiment and execute it; the
            first decides, writes and tells the watcher.
    """

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        *,
        policies: Sequence[str] = (),
        seeds: int = 1,
        trajectories: Path | None = None,
        keep_models: bool = True,
        ranks: Ranks = ALONE,
    ) -> None:
        run = recipe.run or RunConfig()
        self.recipe = recipe.model_copy(update={"run": run})
        self.folder, self.keep_models, self.ranks = folder, keep_models, ranks
        self.trajectories = folder / TRAJECTORIES if trajectories is None else trajectories
        checks.whole_number("seeds", seeds)
        names = list(policies) or run.policies
        if not names or len(set(names)) < len(names):
            raise InvalidInput("run.policies", f"is {names}", "Give at least one policy, each once")
        for name in [*names, *run.options]:  # options of known policies that do not run may be for another call
            self.make_policy(name)
        fleets = list(run.fleets) or [""]
        self.jobs = [Job(name, run.seed + seed, fleet) for seed in range(seeds) for fleet in fleets for name in names]
        if len({job.folder_name for job in self.jobs}) < len(self.jobs):
            field = "run.fleets" if run.fleets else "run.policies"
            raise InvalidInput(field, "has names that lead to one folder", "Use letters, digits, - and _")
        check_run(run)
        for fleet in fleets:
            self._check_fleet(fleet)
        self._worlds: dict[tuple[int, str], World] = {}
        self._stores: dict[str, Store] = {}

    def make_policy(self, name: str) -> Policy:
        """Return a new policy with its options from the recipe; `fixed@2` is `fixed` with the options of that name."""
        assert self.recipe.run is not None
        with inside("run"):
            return make_policy(name.partition("@")[0], **self.recipe.run.options.get(name, {}))

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs; worlds and steps it makes and reads for itself."""
        return {**self.__dict__, "_worlds": {}, "_stores": {}}

    def execute(self, watcher: Watcher | None = None) -> list[Run]:
        """Do every run that is not done yet; return all that there are, in order, but none on ranks after the first.

        A rank that is gone ends it for all of them: the next call goes on.
        """
        timed = RankSpeeds(self.recipe, self.folder, self.ranks)
        self.ranks.speeds = timed.speeds
        if not self.ranks.first:
            self._follow()
            return []
        watcher = watcher or Watcher()
        try:
            self.check()
            self.claim()
            with _writing(self.folder):
                timed.keep()
            runs = [run for job in self.jobs if (run := self.attempt(job, watcher)) is not None]
        except RankFailed:
            raise
        except Exception:
            self.ranks.from_first(None)
            raise
        self.ranks.from_first(None)
        return runs

    def _follow(self) -> None:
        """Train what the first rank is asked to train, run by run, until it has done all."""
        nothing: Order | None = None
        while (order := self.ranks.from_first(nothing)) is not None:
            try:
                world = self.world(order.job)
                identity = world.learning_identity
            except Exception as error:
                raise RankFailed(f"rank {self.ranks.rank}: {message_of(error)}") from error
            if identity != order.identity:
                problem = f"rank {self.ranks.rank}: model, data, versions or recipe are others than on the first rank"
                raise RankFailed(f"{problem}. Give all ranks the same files and packages.")
            if not (self.folder / RECIPE).is_file():
                problem = (
                    f"rank {self.ranks.rank}: {self.folder} is not the folder of the first rank, which wrote {RECIPE}"
                )
                raise RankFailed(f"{problem}. Give a folder by --out that all machines see.")
            folder = self.folder / order.job.folder_name
            Learner(world, order.trainer, divergence=order.divergence, ranks=self.ranks, folder=folder).follow()

    def check(self) -> None:
        """Refuse a recipe that cannot run, before it claims a folder; one that claimed its folder could run."""
        if not (self.folder / RECIPE).exists():
            self.world(self.jobs[0])

    def attempt(self, job: Job, watcher: Watcher) -> Run | None:
        """Do one run; if it fails and the watcher lets the others go on, return what there is of it."""
        try:
            run = self._run(job, self.folder / job.folder_name, watcher)
        except RankFailed:
            raise
        except Exception as error:
            watcher.fails(job, error)
            return self.remains(job)
        watcher.ends(job, run)
        return run

    def found(self, job: Job) -> Run | None:
        """Return what there is of a run; none where its files are damaged, as doing it again gives the same ones."""
        folder = self.folder / job.folder_name
        if not (folder / RUN).exists():
            return None
        try:
            return read_run(folder)
        except InvalidInput as error:
            if error.field == "format":  # another version's: not ours to write over
                raise
            return None

    def remains(self, job: Job) -> Run | None:
        """Return what there is of a run that failed, whoever wrote it; none where that cannot be read."""
        with suppress(InvalidInput):
            return self.found(job)
        return None

    def claim(self) -> None:
        """Write down whose folder this is, or refuse one that holds another experiment."""
        with _writing(self.folder):
            self._claim()

    def _claim(self) -> None:
        file = self.folder / RECIPE
        self.folder.mkdir(parents=True, exist_ok=True)
        mine = plain(self.recipe.model_dump(mode="json", exclude={"run": {"policies"}}))
        if file.exists():
            try:
                theirs = json.loads(file.read_text())
            except ValueError:
                theirs = None
            if theirs == mine:
                return
            if self._holds_something():
                if theirs is None:
                    problem, remedy = "is damaged: not valid JSON", "Restore it, or give another folder by --out"
                    raise InvalidInput("", problem, remedy, source=str(file))
                key = _first_difference(theirs, mine)
                remedy = "Give another folder by --out, or remove this one to begin anew"
                raise InvalidInput(key, "is another than in the experiment in this folder", remedy, source=str(file))
        replace_file(file, lambda path: path.write_text(json.dumps(mine, indent=1) + "\n"))

    def _holds_something(self) -> bool:
        """Whether anything was learned or recorded here: a mistake that stops every run leaves nothing to keep.

        What experiments share lies elsewhere, by names that tell recipes apart, and does not count.
        """
        files = [*self.folder.glob(f"{TRAJECTORIES}/*"), *self.folder.glob(f"*/{RECORD}")]
        return any(file.stat().st_size for file in files)

    def forget_worlds(self) -> None:
        """Free the memory that models and data take; the next run makes them anew."""
        self._worlds.clear()

    def world(self, job: Job) -> World:
        """Return the world of a job; jobs with the same seed and fleet share it."""
        key = (job.seed, job.fleet)
        if key not in self._worlds:
            alike = next((world for (seed, _), world in self._worlds.items() if seed == job.seed), None)
            pooled = any(self.make_policy(other.policy).trainer == "centralized" for other in self.jobs)
            recipe = self._recipe_for(job.fleet)
            # One at a time in memory.
            self._worlds = {key: make_world(recipe, job.seed, alike, ranks=self.ranks, pooled=pooled)}
        return self._worlds[key]

    def _recipe_for(self, fleet: str) -> Recipe:
        assert self.recipe.run is not None
        changes = self.recipe.run.fleets.get(fleet)
        if not changes:
            return self.recipe
        kept = self.recipe.fleet.model_dump(exclude_unset=True)
        if "trace" in changes:  # it fixes the whole fleet
            kept = {key: value for key, value in kept.items() if key in BESIDE_A_TRACE}
        content = {**kept, **changes}
        with inside(f"run.fleets.{fleet}"):
            return self.recipe.model_copy(update={"fleet": parse(FleetConfig, content)})

    def _check_fleet(self, name: str) -> None:
        """Refuse a fleet, or faults, that would stop a run later."""
        recipe = self._recipe_for(name)
        with inside(f"run.fleets.{name}" if name else "fleet"):
            fleet = resources_from(recipe.fleet).at(0)
            with inside("noise"):
                noise_from(recipe.fleet.noise, recipe.fleet.seed)
        with inside("faults"):
            faults_from(recipe.faults, [fleet.name(k) for k in range(fleet.size)])

    def _store(self, world: World) -> Store:
        name = world.learning_identity
        if name not in self._stores:
            self._stores[name] = Store(self.trajectories / f"{name}.jsonl")
        return self._stores[name]

    def _run(self, job: Job, folder: Path, watcher: Watcher) -> Run:
        found = self.found(job)
        if found is not None and found.whole:
            return found
        world = self.world(job)
        policy = self.make_policy(job.policy)
        with inside("faults"):
            names = [world.fleet_at(1).name(k) for k in range(world.devices)]
            faults = faults_from(world.recipe.faults, names)
        if self.ranks.size > 1 and policy.trainer in ("turns", "relay"):
            problem = (
                f"{policy.title} lets devices take turns with one model, so that only one rank could work at a time"
            )
            raise InvalidInput("run.policies", problem, "Run it in one process")
        watcher.begins(job, world)
        info = _about(job, world, policy)
        trajectory = Trajectory(
            world,
            policy.trainer,
            self._store(world),
            folder=folder,
            divergence=policy.divergence,
            on_round=watcher.on_round,
            ranks=self.ranks,
        )
        self.ranks.from_first(Order(job, policy.trainer, policy.divergence, world.learning_identity))
        started = time.monotonic()
        with _writing(folder), trajectory, _alone(folder):
            found = self.found(job)
            if found is not None and found.whole:  # by another process, while this one waited
                return found
            write_run(folder, {**info, "status": "running"})
            how: dict[str, Any] = {"status": "failed"}
            try:
                simulation = Simulation(world, policy, faults, trajectory)
                with (folder / RECORD).open("w") as record:
                    for block in simulation:
                        append_block(record, block)
                        watcher.on_block(block)
                if self.keep_models:
                    self._write_model(folder, trajectory)
                how = {"status": "done", "ended_by": simulation.ended_by, "rounds": trajectory.round}
            except KeyboardInterrupt:
                how = {"status": "stopped"}
                if self.ranks.size == 1:  # else the others were stopped too
                    with suppress(AdaptSFLError):  # a full disk, or weights that are no numbers: stopping counts
                        trajectory.save()
                raise
            except RankFailed:
                how = {"status": "stopped"}
                raise
            except Exception as error:
                how["error"] = first_line(error)
                raise
            finally:
                write_run(folder, {**info, **how, "wall_s": time.monotonic() - started})
            remove_checkpoint(folder)  # nothing is left to train
        return read_run(folder)

    def _write_model(self, folder: Path, trajectory: Trajectory) -> None:
        """Write the final weights: those of another run with the same schedule, which need no training, or its own."""
        about = {"trajectory": trajectory.key}
        if about_tensors(folder / MODEL) == about:  # written before the record was lost
            return
        for other in sorted(self.folder.glob(f"*/{MODEL}")):
            if other.parent != folder and about_tensors(other) == about:
                replace_file(folder / MODEL, partial(shutil.copyfile, other))
                return
        state = {name: tensor.contiguous().cpu() for name, tensor in trajectory.state().items()}
        for name, _ in trajectory.world.model.module.named_parameters():  # the last round's loss does not show them
            if not torch.isfinite(state[name]).all():
                remedy = "Lower the learning rate, or use a model with normalisation"
                raise TrainingDiverged(f"round {trajectory.round}: {name} has weights that are not finite. {remedy}.")
        replace_file(folder / MODEL, lambda path: write_tensors(path, state, about))


def _about(job: Job, world: World, policy: Policy) -> dict[str, Any]:
    """Return what run.json says from the start."""
    fleet, costs = world.fleet_at(1), plain(world.costs)
    layers = costs.pop("names")
    return {
        "name": world.recipe.name,
        "policy": job.policy,
        "title": title_of(job.policy, policy),
        "trainer": policy.trainer,
        "estimates": policy.estimates,
        "adapt": {**world.recipe.adapt.model_dump(mode="json"), **policy.adapt},
        "seed": job.seed,
        "fleet": job.fleet,
        "recipe": world.recipe.model_dump(mode="json"),
        "versions": {
            "adaptsfl": adaptsfl.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "devices": [fleet.name(k) for k in range(fleet.size)],
        "layers": layers or [f"layer {k}" for k in range(1, world.costs.layers + 1)],
        "batch_size": world.batch_size,
        "epoch_rounds": world.epoch_rounds,
        "costs": costs,
        "server": plain(fleet.server),
        "targets": targets_of(world.run),
    }


def title_of(name: str, policy: Policy) -> str:
    """Return what people read: the policy's title, and which of several it is."""
    variant = name.partition("@")[2]
    return f"{policy.title} {variant}" if variant else policy.title


def targets_of(run: RunConfig) -> list[float]:
    """Return the accuracies to which times are reported, in order."""
    own = [] if run.target_accuracy is None else [run.target_accuracy]
    return sorted({*run.targets, *own})


def _first_difference(theirs: Any, mine: Any, field: str = "") -> str:
    """Return the key at which two recipes first differ."""
    if isinstance(theirs, Mapping) and isinstance(mine, Mapping):
        for key in [*mine, *theirs]:
            if theirs.get(key) != mine.get(key):
                inner = f"{field}.{key}" if field else key
                return _first_difference(theirs.get(key), mine.get(key), inner)
    return field or "recipe"


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until no other process does the run in this folder: two would write over each other's files."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # where there are no locks, one has to take care oneself
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Turn a full disk or a missing permission into words."""
    try:
        yield
    except OSError as error:
        remedy = "Free some space or give another folder by --out; the same call goes on where this one stopped."
        raise NotWritten(f"{folder}: cannot be written ({error.strerror or error}). {remedy}") from error
