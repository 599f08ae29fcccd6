"""All policies by name, and the user's own as `package.module:Class`."""

import inspect
from collections.abc import Mapping
from typing import Any, get_args

from adaptsfl import factories
from adaptsfl.checks import short
from adaptsfl.errors import InvalidInput, unknown
from adaptsfl.policies.adaptsfl import AdaptSFL
from adaptsfl.policies.dama_rms import DepthAware
from adaptsfl.policies.fedlama import LayerwiseAdaptive
from adaptsfl.policies.fixed import Centralized, FederatedAveraging, Fixed, ParallelSplit, SplitFederated
from adaptsfl.policies.interval_rules import AdaComm, PostLocal, QuadraticSynchronisation
from adaptsfl.policies.policy import Policy, TrainerName
from adaptsfl.policies.random_plans import RandomCuts, RandomInterval, RandomIntervalAndCuts
from adaptsfl.policies.rma_ams import ResourceAware
from adaptsfl.policies.split_learning import SplitFedV1, SplitFedV2, VanillaSplit

POLICIES: dict[str, type[Policy]] = {
    "adaptsfl": AdaptSFL,
    "rma+ms": RandomInterval,
    "ma+rms": RandomCuts,
    "rma+rms": RandomIntervalAndCuts,
    "dama+rms": DepthAware,
    "rma+ams": ResourceAware,
    "sfl": SplitFederated,
    "psl": ParallelSplit,
    "fixed": Fixed,
    "fedavg": FederatedAveraging,
    "splitfed-v1": SplitFedV1,
    "splitfed-v2": SplitFedV2,
    "vanilla-sl": VanillaSplit,
    "centralized": Centralized,
    "adacomm": AdaComm,
    "post-local": PostLocal,
    "qsr": QuadraticSynchronisation,
    "fedlama": LayerwiseAdaptive,
}

_NEEDED = ("title", "trainer", "estimates", "divergence", "precision", "adapt", "decide")


def make_policy(name: str, **options: Any) -> Policy:
    """Return a new policy; `options` are keyword arguments of its constructor."""
    if ":" in name:
        return _own(name, options)
    if name not in POLICIES:
        remedy = f"Choose one of: {', '.join(POLICIES)}, or give package.module:Class of your own"
        raise unknown("policy", name, POLICIES, remedy)
    known = option_names(name)
    for option in options:
        if option not in known:
            takes = f"{name} takes: {', '.join(known)}" if known else f"{name} takes no options"
            raise unknown(f"policy.{option}", option, known, takes)
    try:
        return POLICIES[name](**options)
    except InvalidInput as error:
        raise error.inside("policy") from None


def option_names(name: str) -> list[str]:
    """Return the options of a built-in policy."""
    policy: Any = POLICIES[name]
    return [] if policy.__init__ is object.__init__ else list(inspect.signature(policy).parameters)


def _own(name: str, options: dict[str, Any]) -> Policy:
    """Return the user's own policy."""
    with factories.importing_from_here():
        made: Any = factories.call("policy", name, factories.find("policy", name, "a policy"), options)
    missing = [attribute for attribute in _NEEDED if not hasattr(made, attribute)]
    if missing:
        remedy = "Make it a subclass of adaptsfl.policies.BasePolicy"
        raise InvalidInput("policy", f"{name} gives something without {missing[0]!r}", remedy)
    policy: Policy = made
    if not isinstance(policy.title, str) or not policy.title:
        raise InvalidInput("policy", f"{name} has the title {short(policy.title)}", "Give it a text")
    if policy.trainer not in get_args(TrainerName):
        known = ", ".join(get_args(TrainerName))
        raise unknown("policy", str(policy.trainer), get_args(TrainerName), f"The trainer of {name} is one of: {known}")
    if not isinstance(policy.adapt, Mapping):
        raise InvalidInput("policy", f"{name} has {short(policy.adapt)} as adapt", "Give a mapping of [adapt]'s keys")
    return policy
