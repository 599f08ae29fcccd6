"""The problems of benchmarks/planner.py: VGG-16 on sampled fleets, and fleets whose server is the bottleneck."""

import dataclasses

import numpy as np

from adaptsfl.checks import FloatArray
from adaptsfl.convergence import Constants, ConvergenceModel, PowerRounds, RoundsModel, RoundsTable
from adaptsfl.costs import CutCosts
from adaptsfl.fleet import FIXED, FLEETS, Fleet, Server
from adaptsfl.paper_costs import vgg16
from adaptsfl.planner import PlanProblem

BATCH_SIZE, LEARNING_RATE, CLASSES = 16, 5e-4, 10
DEVICES_PER_SERVER = 20  # Table II: one server of 20 TFLOPS for 20 devices
KAPPAS = (0.17, 0.4, 1.0)  # how fast p rises with depth: from data that are alike to data sorted by label
INTERVALS = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64])  # of the table
BOTTLENECK = Server(flops=1e11, to_fed_bps=2.5e10, from_fed_bps=2.5e10)
BOTTLENECK_LAYERS = 20


def make_problem(fleet: str, devices: int, seed: int) -> PlanProblem:
    """Return one problem of the benchmark."""
    rng = np.random.default_rng([seed, devices])
    costs = vgg16(CLASSES, BATCH_SIZE)
    sampled = FLEETS[fleet].sample(devices, rng)
    server = ("server.flops", "server.to_fed_bps", "server.from_fed_bps")
    sampled = sampled.scaled(devices / DEVICES_PER_SERVER, *server)
    return PlanProblem(sampled, costs, make_bound(costs.layers, devices, rng), BATCH_SIZE)


def with_fixed_seconds(problem: PlanProblem, seed: int) -> PlanProblem:
    """Return the problem with fixed seconds as between phones: 20 to 80 ms a message, 1 to 5 ms a pass."""
    rng = np.random.default_rng([seed, problem.devices, 1])
    fixed = {
        name: rng.uniform(*((0.001, 0.005) if name.endswith("ward_s") else (0.02, 0.08)), problem.devices)
        for name in FIXED
    }
    server = dataclasses.replace(problem.fleet.server, turn_s=0.002)
    fleet = dataclasses.replace(problem.fleet, server=server).with_rates(fixed)
    return dataclasses.replace(problem, fleet=fleet)


def make_bound(layers: int, devices: int, rng: np.random.Generator) -> ConvergenceModel:
    """Return the paper's rounds model with drift and target that give sensible intervals."""
    shape = np.linspace(0.2, 3.0, layers) * np.exp(rng.normal(0, 0.3, layers))
    moment = np.exp(rng.uniform(np.log(0.1), np.log(10))) * shape / shape.sum()
    constants = Constants(20.0, moment, moment / 2, float(np.log(CLASSES)), rng.uniform(0.1, 0.5))
    return ConvergenceModel.from_constants(constants, LEARNING_RATE, devices)


def make_bottleneck(devices: int, seed: int) -> PlanProblem:
    """Return a problem whose server is the bottleneck."""
    rng = np.random.default_rng([seed, devices])

    def rates(low: float, high: float) -> FloatArray:
        return np.exp(rng.uniform(np.log(low), np.log(high), devices))

    def per_layer(low: float, high: float) -> FloatArray:
        return np.floor(np.exp(rng.uniform(np.log(low), np.log(high), BOTTLENECK_LAYERS)))

    fleet = Fleet(
        rates(1e8, 4e10), rates(1e6, 1e8), rates(1e6, 1e8), rates(3e6, 1e9), rates(3e6, 1e9), server=BOTTLENECK
    )
    costs = CutCosts(
        forward_flops=np.cumsum(per_layer(2e6, 1e9)),
        backward_flops=np.cumsum(per_layer(2e6, 1e9)),
        activation_bits=per_layer(4e3, 3e7),
        gradient_bits=per_layer(4e3, 3e7),
        client_model_bits=np.cumsum(per_layer(2e5, 2e8)),
    )
    return PlanProblem(fleet, costs, make_bound(BOTTLENECK_LAYERS, devices, rng), BATCH_SIZE)


def measured_rounds(layers: int, seed: int) -> dict[str, RoundsModel]:
    """Return rounds as powers, and as a table that climbs around them in uneven steps."""
    deepest = np.arange(1, layers + 1)
    powers = PowerRounds(1 - np.exp(-KAPPAS[seed % len(KAPPAS)] * deepest / layers))
    rounds = powers.rounds(INTERVALS.astype(np.float64), deepest[:, None])
    noisy = rounds * np.exp(np.random.default_rng(seed).normal(0, 0.1, rounds.shape))
    table = RoundsTable(INTERVALS, np.maximum.accumulate(np.maximum.accumulate(noisy, axis=0), axis=1))
    return {"powers": powers, "table": table}
