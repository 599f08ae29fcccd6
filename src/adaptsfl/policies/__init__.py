"""Policies choose the interval and the cuts: AdaptSFL, the paper's benchmarks, classical methods, the user's own."""

from adaptsfl.decisions import Decision
from adaptsfl.policies.policy import BasePolicy, Observation, Policy, TrainerName, Trust
from adaptsfl.policies.registry import POLICIES, make_policy, option_names

__all__ = [
    "POLICIES",
    "BasePolicy",
    "Decision",
    "Observation",
    "Policy",
    "TrainerName",
    "Trust",
    "make_policy",
    "option_names",
]
