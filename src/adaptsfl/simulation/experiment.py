"""An experiment: several policies, seeds and fleets from one recipe, in one folder; safe to stop and to start again.

EXPERIMENT/
  recipe.json             the recipe with every default filled in
  trajectories/           training results by schedule: runs with the same schedule share them
  adaptsfl-seed0/         run.json  record.jsonl  checkpoint…  model.safetensors
  rma+rms-seed0/          …

The same call restarts a run that was stopped. The run repeats the decisions of its blocks, with the same outcome, and
looks up the blocks that were already trained, so it continues where it stopped.
"""

import json
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from adaptsfl import checks
from adaptsfl.config import FleetConfig, Recipe, RunConfig, parse
from adaptsfl.errors import (
    AdaptSFLError,
    InvalidInput,
    RankFailed,
    TrainingDiverged,
    first_line,
    inside,
    message_of,
)
from adaptsfl.files import about_tensors, held, replace_file, waits_for, write_tensors, writing
from adaptsfl.fleet import Fleet, resources_from
from adaptsfl.fleet.recipe import BESIDE_A_TRACE
from adaptsfl.policies import Policy, TrainerName, make_policy
from adaptsfl.runs.ending import rounds_planned
from adaptsfl.runs.folder import RECORD, RUN, Run, append_block, read_run, write_run
from adaptsfl.runs.loop import BlockLoop
from adaptsfl.runs.recipe import about_run, check_run, norm_remark, seeded, targets_of
from adaptsfl.runs.record import Block
from adaptsfl.simulation.backend import SimulatedBackend
from adaptsfl.simulation.claim import RECIPE, TRAJECTORIES, claim
from adaptsfl.simulation.faults import Faults, faults_from
from adaptsfl.simulation.jobs import Job, Watcher
from adaptsfl.simulation.learner import Learner
from adaptsfl.simulation.rank_speeds import RankSpeeds
from adaptsfl.simulation.store import Store
from adaptsfl.simulation.trainers import trainer_kind
from adaptsfl.simulation.validity import Contents, Identity, depends_on_seed, identity_of, why_outdated
from adaptsfl.simulation.world import World, make_world
from adaptsfl.training.checkpoint import remove_checkpoint
from adaptsfl.training.ranks import ALONE, Ranks

MODEL = "model.safetensors"
GO_ON = "Free some space or give another folder by --out; the same call goes on where this one stopped"


@dataclass(frozen=True)
class Announcement:
    """What the first rank broadcasts before a run; `fingerprint` is that of its `World`."""

    job: Job
    trainer: TrainerName
    divergence: bool
    fingerprint: str


class Experiment:
    """All runs of a recipe, in `folder`.

    Args:
        policies: their names; those of the recipe if not given. Options come from the recipe's [run.options].
        seeds: the number of seeds, from the recipe's own seed on.
        trajectories: the folder of training results; several experiments may share it. By default in `folder`.
        keep_models: whether to write trained models. Without them, a run whose blocks are all stored trains nothing.
        ranks: the processes that train every run together. All of them make the same experiment and execute it; the
            first decides, writes and calls the watcher.
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
        for name in [*names, *run.options]:  # a recipe may have options of policies that this call does not run
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
        self._contents: dict[int | None, Contents] = {}
        self._stores: dict[str, Store] = {}

    def make_policy(self, name: str) -> Policy:
        """Return a new policy with its options from the recipe; `fixed@2` is `fixed` with the options of that name."""
        assert self.recipe.run is not None
        with inside("run"):
            return make_policy(name.partition("@")[0], **self.recipe.run.options.get(name, {}))

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another process, which makes its own worlds and reads training results from files."""
        return {**self.__dict__, "_worlds": {}, "_contents": {}, "_stores": {}}

    def execute(self, watcher: Watcher | None = None) -> list[Run]:
        """Execute every unfinished run; return all runs in order, on ranks after the first an empty list.

        If one rank fails, all ranks end; the next call continues from there.
        """
        self.forget_worlds()  # files may have changed since the last call
        timed = RankSpeeds(self.recipe, self.folder, self.ranks)
        self.ranks.speeds = timed.speeds
        if not self.ranks.first:
            self._follow()
            return []
        watcher = watcher or Watcher()
        try:
            self.check()
            with held(self.folder):
                self.claim()
                with writing(self.folder, GO_ON):
                    timed.keep()
                runs = [run for job in self.jobs if (run := self.attempt(job, watcher)) is not None]
        except RankFailed:
            raise
        except Exception:
            self.ranks.broadcast(None)
            raise
        self.ranks.broadcast(None)
        return runs

    def _follow(self) -> None:
        """Train what the first rank announces, run by run, until it announces the end."""
        nothing: Announcement | None = None
        me = f"rank {self.ranks.rank}"
        while (announced := self.ranks.broadcast(nothing)) is not None:
            try:
                world = self.world(announced.job)
                fingerprint = world.fingerprint
            except Exception as error:
                raise RankFailed(f"{me}: {message_of(error)}") from error
            if fingerprint != announced.fingerprint:
                problem = f"{me}: model, data, versions or recipe are others than on the first rank"
                raise RankFailed(f"{problem}. Give all ranks the same files and packages.")
            if not (self.folder / RECIPE).is_file():
                problem = f"{me}: {self.folder} is not the folder of the first rank, which wrote {RECIPE}"
                raise RankFailed(f"{problem}. Give a folder by --out that all machines see.")
            folder = self.folder / announced.job.folder_name
            Learner(world, announced.trainer, divergence=announced.divergence, folder=folder).follow()

    def check(self) -> None:
        """Refuse a recipe that cannot run, before it claims a folder; a recipe in its folder has passed this check."""
        if not (self.folder / RECIPE).exists():
            self.world(self.jobs[0])

    def attempt(self, job: Job, watcher: Watcher) -> Run | None:
        """Execute one run. If it fails and the watcher does not raise the error, return what is stored of it."""
        try:
            run = self._run(job, watcher)
        except RankFailed:
            raise
        except Exception as error:
            watcher.fails(job, error)
            return self.stored_if_readable(job)
        watcher.ends(job, run)
        return run

    def stored(self, job: Job) -> Run | None:
        """Return a stored run; None if its files are missing or damaged: repeating the run gives the same files."""
        folder = self.folder / job.folder_name
        if not (folder / RUN).exists():
            return None
        try:
            return read_run(folder)
        except InvalidInput as error:
            if error.field == "format":  # written by another version: do not overwrite it
                raise
            return None

    def finished(self, job: Job, remark: Callable[[Job, str], None]) -> Run | None:
        """Return a finished run that is still valid, else None; call `remark` with the reason if it is outdated."""
        run = self.stored(job)
        if run is None or not run.whole:
            return None
        why = why_outdated(run.identity, self.identity(job))
        if why:
            remark(job, f"{why}; running it again")
            return None
        return self._for_targets(run)

    def _for_targets(self, run: Run) -> Run:
        """Return a finished run with the recipe's targets in its run.json: other targets change no result."""
        assert self.recipe.run is not None
        wanted = targets_of(self.recipe.run)
        if list(run.targets) == wanted:
            return run
        info = json.loads((run.folder / RUN).read_bytes())
        info["recipe"]["run"]["targets"] = self.recipe.run.targets
        with writing(run.folder, GO_ON):
            write_run(run.folder, {**info, "targets": wanted})
        return read_run(run.folder)

    def identity(self, job: Job) -> Identity:
        """Return the current state of everything that a run depends on."""
        recipe = seeded(self._recipe_for(job.fleet), job.seed)
        world = next((world for (seed, _), world in self._worlds.items() if seed == job.seed), None)
        if world is not None:
            return identity_of(recipe, job.seed, job.policy, Contents.of(world))
        key = job.seed if depends_on_seed(recipe) else None
        if key not in self._contents:
            self._contents[key] = Contents.read(recipe, job.seed)
        return identity_of(recipe, job.seed, job.policy, self._contents[key])

    def stored_if_readable(self, job: Job) -> Run | None:
        """Return what is stored of a run that failed; None if it cannot be read."""
        with suppress(InvalidInput):
            return self.stored(job)
        return None

    def claim(self) -> None:
        """Write the recipe to the folder, or refuse a folder whose runs would not be valid under this recipe."""
        with writing(self.folder, GO_ON):
            claim(self.folder, self.recipe, [job.policy for job in self.jobs])

    def forget_worlds(self) -> None:
        """Free the memory of models and data; the next run loads them again from the current files."""
        self._worlds.clear()
        self._contents.clear()

    def world(self, job: Job) -> World:
        """Return the world of a job; jobs with the same seed and fleet share it."""
        key = (job.seed, job.fleet)
        if key not in self._worlds:
            alike = next((world for (seed, _), world in self._worlds.items() if seed == job.seed), None)
            pooled = any(trainer_kind(self.make_policy(other.policy).trainer).pooled for other in self.jobs)
            recipe = self._recipe_for(job.fleet)
            # Only one world at a time is in memory.
            self._worlds = {key: make_world(recipe, job.seed, alike, ranks=self.ranks, pooled=pooled)}
        return self._worlds[key]

    def _recipe_for(self, fleet: str) -> Recipe:
        assert self.recipe.run is not None
        changes = self.recipe.run.fleets.get(fleet)
        if not changes:
            return self.recipe
        kept = self.recipe.fleet.model_dump(exclude_unset=True)
        if "trace" in changes:  # a trace defines the whole fleet
            kept = {key: value for key, value in kept.items() if key in BESIDE_A_TRACE}
        content = {**kept, **changes}
        with inside(f"run.fleets.{fleet}"):
            return self.recipe.model_copy(update={"fleet": parse(FleetConfig, content)})

    def _check_fleet(self, name: str) -> None:
        """Refuse a fleet, or faults, that would stop a run later."""
        recipe = self._recipe_for(name)
        with inside(f"run.fleets.{name}" if name else "fleet"):
            fleet = resources_from(recipe.fleet).at(0)
        _faults(recipe, fleet)

    def _store(self, world: World) -> Store:
        name = world.learning_identity
        if name not in self._stores:
            # If the model's code cannot be read, no other run can know that it has the same model.
            known = world.model_code is not None
            self._stores[name] = Store(self.trajectories / f"{name}.jsonl" if known else None)
        return self._stores[name]

    def _run(self, job: Job, watcher: Watcher) -> Run:
        """Return the finished run: the stored one if it is valid, else trained now."""
        done = self.finished(job, watcher.remarks)
        if done is not None:
            return done
        world, policy, folder = self.world(job), self.make_policy(job.policy), self.folder / job.folder_name
        kind = trainer_kind(policy.trainer)
        if self.ranks.size > 1 and kind.takes_turns:
            problem = f"{policy.title} lets devices take turns with one model, so only one rank could work at a time"
            raise InvalidInput("run.policies", problem, "Run it in one process")
        remark = norm_remark(world.recipe, world.model)
        is_first = job.folder_name == self.jobs[0].folder_name
        if remark and is_first and kind.averages:  # once
            watcher.remarks(job, remark)
        watcher.begins(job, rounds_planned(world.run, world.batch_size))
        info = {**_about(job, world, policy), "identity": self.identity(job)}
        backend = SimulatedBackend(
            world,
            policy,
            _faults(world.recipe, world.fleet_at(1)),
            self._store(world),
            folder=folder,
            on_round=lambda round_, _loss: watcher.on_round(job, round_, 1),
        )
        self.ranks.broadcast(Announcement(job, policy.trainer, policy.divergence, world.fingerprint))
        with writing(folder, GO_ON), backend, waits_for(folder):
            self._train(folder, info, backend, policy, partial(watcher.on_block, job))
        return read_run(folder)

    def _train(
        self,
        folder: Path,
        info: dict[str, Any],
        backend: SimulatedBackend,
        policy: Policy,
        on_block: Callable[[Block], None],
    ) -> None:
        """Train a run and record every block; run.json says how it ended, also after an error."""
        started = time.monotonic()
        write_run(folder, {**info, "status": "running"})
        how: dict[str, Any] = {"status": "stopped"}
        try:
            loop = BlockLoop(backend, policy)
            with (folder / RECORD).open("w") as record:
                for block in loop:
                    append_block(record, block)
                    on_block(block)
            self._write_model(folder, backend)
            how = {"status": "done", "ended_by": loop.ended_by, "rounds": loop.rounds}
        except KeyboardInterrupt:
            if self.ranks.size == 1:  # with several ranks, the others were stopped too
                with suppress(AdaptSFLError):  # a full disk, or weights that are not finite: stop anyway
                    backend.save()
            raise
        except RankFailed:
            raise
        except Exception as error:
            how = {"status": "failed", "error": first_line(error)}
            raise
        finally:
            write_run(folder, {**info, **how, "wall_s": time.monotonic() - started})
        remove_checkpoint(folder)  # nothing is left to train

    def _write_model(self, folder: Path, backend: SimulatedBackend) -> None:
        """Write the final weights if `keep_models`: copied from a run with the same schedule, or the run's own."""
        about = {"trajectory": backend.key}
        if about_tensors(folder / MODEL) == about:  # written before the record was lost
            return
        (folder / MODEL).unlink(missing_ok=True)  # an older model is not the result of this run
        if not self.keep_models:
            return
        for other in sorted(self.folder.glob(f"*/{MODEL}")):
            if other.parent != folder and about_tensors(other) == about:
                replace_file(folder / MODEL, partial(shutil.copyfile, other))
                return
        state = {name: tensor.contiguous().cpu() for name, tensor in backend.state().items()}
        for name, _ in backend.world.model.module.named_parameters():  # the last round's loss is from before its update
            if not torch.isfinite(state[name]).all():
                remedy = "Lower the learning rate, or use a model with normalisation"
                raise TrainingDiverged(f"round {backend.round}: {name} has weights that are not finite. {remedy}.")
        replace_file(folder / MODEL, lambda path: write_tensors(path, state, about))


def _about(job: Job, world: World, policy: Policy) -> dict[str, Any]:
    """Return the content of run.json at the start of a run."""
    fleet = world.fleet_at(1)
    names = [fleet.name(k) for k in range(fleet.size)]
    known = about_run(world.recipe, job.seed, job.policy, policy, names, world.costs, fleet.server)
    return {**known, "fleet": job.fleet, "epoch_rounds": world.epoch_rounds}


def _faults(recipe: Recipe, fleet: Fleet) -> Faults:
    with inside("faults"):
        return faults_from(recipe.faults, [fleet.name(k) for k in range(fleet.size)])
