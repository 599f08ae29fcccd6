"""Observations for tests of policies."""

import dataclasses

import numpy as np

from adaptsfl.policies import Observation
from problems import by_hand, paper_like


def seen(seed: int = 0, **changes) -> Observation:
    """The problem worked out by hand: two devices, three layers."""
    return of(by_hand(), seed, **changes)


def of(problem, seed: int = 0, **changes) -> Observation:
    observation = Observation(
        round=0,
        block=0,
        fleet=problem.fleet,
        costs=problem.costs,
        batch_size=problem.batch_size,
        convergence=problem.convergence,
        epoch_rounds=7,
        rng=np.random.default_rng(seed),
    )
    return dataclasses.replace(observation, **changes)


def wide(seed: int = 0, **changes) -> Observation:
    """VGG-16 on six very different devices."""
    return of(paper_like(6, 1, "heterogeneous"), seed, **changes)
