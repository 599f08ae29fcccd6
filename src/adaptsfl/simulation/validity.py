"""Checks whether a finished run is still valid: compares all that it depended on, part by part, then and now."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

import adaptsfl
from adaptsfl import factories
from adaptsfl.config import DataConfig, Recipe, RunConfig
from adaptsfl.data import content_of
from adaptsfl.data.samples import fingerprint
from adaptsfl.models.build import build
from adaptsfl.simulation.world import World

Identity = Mapping[str, str | None]  # by part; None where it cannot be known

WORDS = {
    "versions": "the version of AdaptSFL or torch",
    "recipe": "what the recipe says about it",
    "data": "the data",
    "initial_weights": "the model that its factory gives",
    "model_code": "the code of the model",
    "policy_code": "the code of the policy",
    "fleet_trace": "the trace of the fleet",
    "faults_trace": "the trace of the faults",
}

# Keys of a recipe that do not change the result of a run: which runs there are, what is reported, how often they are
# saved. Files are compared by content, not by path.
IRRELEVANT: dict[str, Any] = {
    "name": True,
    "deploy": True,
    "run": {"policies", "options", "fleets", "seed", "targets", "checkpoint_every"},
    "data": {"path": True, "cache": True, "partition": {"files"}},
    "fleet": {"trace"},
    "faults": {"trace"},
}


@dataclass(frozen=True)
class Contents:
    """Fingerprints of the inputs of one seed's runs: the samples, and the initial weights of a user's own model."""

    data: str
    initial_weights: str

    @classmethod
    def of(cls, world: World) -> "Contents":
        """Return the fingerprints of an existing world."""
        return cls(world.data.content, _weights(world.recipe, world.model.module))

    @classmethod
    def read(cls, recipe: Recipe, seed: int) -> "Contents":
        """Return the fingerprints for a recipe without building its world: no splitting, profiling or partitioning."""
        weights = ""
        if _is_own(recipe.model.name):
            torch.manual_seed(seed)
            weights = _weights(recipe, build(recipe.model.name, device="cpu", **recipe.model.options).module)
        torch.manual_seed(seed)
        return cls(content_of(recipe.data or DataConfig()), weights)


def depends_on_seed(recipe: Recipe) -> bool:
    """Whether contents may differ between seeds: a user's own factory may use random numbers."""
    return any(_is_own(name) for name in (recipe.model.name, (recipe.data or DataConfig()).name))


def identity_of(recipe: Recipe, seed: int, policy: str, contents: Contents) -> Identity:
    """Return all that the run of a policy depends on.

    Args:
        recipe: that of the run's world, with its final seeds and its fleet.
    """
    return {
        "versions": f"adaptsfl {adaptsfl.__version__}, torch {torch.__version__}",
        "recipe": _relevant(recipe, seed, policy),
        "data": contents.data,
        "initial_weights": contents.initial_weights,
        "model_code": factories.code_of("model", recipe.model.name),
        "policy_code": factories.code_of("policy", policy.partition("@")[0]),
        "fleet_trace": _file(recipe.fleet.trace),
        "faults_trace": _file(recipe.faults.trace),
    }


def why_outdated(then: Identity | None, now: Identity) -> str:
    """Return the reason why a run may be outdated, as text; empty if the run is valid."""
    if not then:
        return "its run.json does not say what code and data it ran with"
    changed = [WORDS[part] for part, value in now.items() if then.get(part) != value]
    if changed:
        return f"{' and '.join(changed)} {'have' if len(changed) > 1 else 'has'} changed since it ran"
    unknown = [WORDS[part] for part, value in now.items() if value is None]
    if unknown:
        return f"{' and '.join(unknown)} cannot be read as a file, so a change would not be noticed"
    return ""


def _is_own(name: str) -> bool:
    return ":" in name


def _weights(recipe: Recipe, module: torch.nn.Module) -> str:
    return fingerprint(*module.state_dict().values()) if _is_own(recipe.model.name) else ""


def _relevant(recipe: Recipe, seed: int, policy: str) -> str:
    """Return a fingerprint of what a recipe says about one run."""
    content = recipe.model_dump(mode="json", exclude=IRRELEVANT)
    options = (recipe.run or RunConfig()).options.get(policy, {})
    text = json.dumps([content, seed, policy, options], sort_keys=True, default=str)
    return sha256(text.encode()).hexdigest()[:16]


def _file(path: str | None) -> str:
    return "" if path is None else sha256(Path(path).read_bytes()).hexdigest()[:16]
