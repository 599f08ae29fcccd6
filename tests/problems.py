"""Planning problems for tests: one by hand, and hypothesis strategies for small ones of every kind."""

import dataclasses
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from adaptsfl.checks import SMALLEST
from adaptsfl.convergence import Constants, ConvergenceModel, GrowthRounds, PowerRounds, RoundsModel, RoundsTable
from adaptsfl.costs import WIRE_DTYPES, CutCosts
from adaptsfl.fleet import FIXED, FLEETS, SERVER_FIXED, Fleet, Server
from adaptsfl.paper_costs import vgg16
from adaptsfl.planner import PlanProblem

MAX_INTERVAL = 60  # keeps exhaustive search small where there is little or no drift


def by_hand(**changes) -> PlanProblem:
    """Two devices, three layers, round numbers; tests/test_latency.py works its times out."""
    problem = {
        "fleet": Fleet(
            flops=[100.0, 200.0],
            uplink_bps=[10.0, 5.0],
            downlink_bps=[20.0, 10.0],
            fed_uplink_bps=[4.0, 8.0],
            fed_downlink_bps=[8.0, 16.0],
            server=Server(flops=1000.0, to_fed_bps=16.0, from_fed_bps=32.0),
        ),
        "costs": CutCosts(
            forward_flops=[100.0, 300.0, 600.0],
            backward_flops=[200.0, 600.0, 1200.0],
            activation_bits=[50.0, 20.0, 5.0],
            gradient_bits=[50.0, 20.0, 5.0],
            client_model_bits=[16.0, 48.0, 160.0],
        ),
        "convergence": ConvergenceModel(
            learning_rate=0.1, initial_gap=2.0, drift_per_layer=[0.01, 0.02, 0.03], power=2.0, budget=1.0
        ),
        "batch_size": 2,
    }
    return PlanProblem(**{**problem, **changes})


def paper_like(devices: int, seed: int, fleet: str = "paper") -> PlanProblem:
    """VGG-16 on a sampled fleet, with constants that give sensible intervals."""
    rng = np.random.default_rng(seed)
    costs = vgg16(10, 16)
    shape = np.linspace(0.2, 3.0, costs.layers) * np.exp(rng.normal(0, 0.3, costs.layers))
    moment = np.exp(rng.uniform(np.log(0.1), np.log(10))) * shape / shape.sum()
    constants = Constants(20.0, moment, moment / 2, np.log(10), rng.uniform(0.1, 0.5))
    model = ConvergenceModel.from_constants(constants, 5e-4, devices)
    return PlanProblem(FLEETS[fleet].sample(devices, rng), costs, model, 16)


def measured_like(problem: PlanProblem, form: str) -> PlanProblem:
    """The same problem with rounds as they are measured: p rising with depth, as powers or as a table of them."""
    depth = np.arange(1, problem.layers + 1) / problem.layers
    model = PowerRounds(1 - np.exp(-0.5 * depth))
    if form == "powers":
        return dataclasses.replace(problem, convergence=model)
    intervals = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64])
    rounds = model.rounds(intervals[None].astype(float), np.arange(1, problem.layers + 1)[:, None])
    return dataclasses.replace(problem, convergence=RoundsTable(intervals, rounds))


def server_bound(devices: int, seed: int, layers: int = 8) -> PlanProblem:
    """A server too slow for its fleet, and log-uniform rates and costs: the server's turn decides about most cuts."""
    rng = np.random.default_rng(seed)

    def draw(low: float, high: float, size: int) -> np.ndarray:
        return np.exp(rng.uniform(np.log(low), np.log(high), size))

    rates = [draw(1e8, 4e10, devices), *(draw(*ends, devices) for ends in [(1e6, 1e8)] * 2 + [(3e6, 1e9)] * 2)]
    costs = CutCosts(
        *(np.cumsum(np.floor(draw(2e6, 1e9, layers))) for _ in range(2)),
        *(np.floor(draw(4e3, 3e7, layers)) for _ in range(2)),
        np.cumsum(np.floor(draw(2e5, 2e8, layers))),
    )
    drift = draw(0.2, 3.0, layers) * draw(1e-5, 1e-3, 1)
    links = draw(1e7, 1e11, 2)
    fleet = Fleet(*rates, server=Server(1e9 * devices, *links))
    return PlanProblem(fleet, costs, ConvergenceModel(5e-4, 2.3, drift, 2.0, 0.3), batch_size=16)


def whole_if_tiny(value: float) -> float:
    """Keep hypothesis away from numbers that no input accepts."""
    return value if abs(value) > SMALLEST else 0.0


@dataclass(frozen=True)
class Small:
    """What a strategy for small problems may draw."""

    most_devices: int = 4
    most_layers: int = 4
    restricted: bool = True
    rounds: str = "bound"
    slow_server: bool = False  # the server's turn takes about as long as everything else
    choices: bool = False  # several numbers of parts and types of numbers to choose from


def rounds_models(kind: str, layers: int) -> st.SearchStrategy[RoundsModel]:
    """Rounds models of one form: `bound`, `growth`, `powers` or `table`."""
    return {"bound": bounds, "growth": growths, "powers": powers, "table": tables}[kind](layers)


@st.composite
def bounds(draw, layers: int) -> ConvergenceModel:
    drift = st.sampled_from([0.0, 1e-4, 1e-3, 1e-2, 0.1, 1.0]) | st.floats(0, 0.1).map(whole_if_tiny)
    return ConvergenceModel(
        learning_rate=draw(st.sampled_from([1e-3, 0.5])),
        initial_gap=draw(st.sampled_from([0.1, 2.3])),
        drift_per_layer=draw(st.lists(drift, min_size=layers, max_size=layers)),
        power=draw(st.sampled_from([0.1, 0.3, 0.5, 1.0, 2.0, 3.0])),
        budget=draw(st.sampled_from([0.01, 0.3, 1.0, 5.0]) | st.floats(-0.1, 5).map(whole_if_tiny)),
    )


@st.composite
def growths(draw, layers: int) -> GrowthRounds:
    """Among them no growth at all, so little that it is lost in the last digit, and more than intervals are worth."""
    factor = st.sampled_from([0.0, 1e-12, 0.02, 0.15, 1.0, 5.0]) | st.floats(0, 2).map(whole_if_tiny)
    factors = sorted(draw(st.lists(factor, min_size=layers, max_size=layers)))
    return GrowthRounds(factors, draw(st.sampled_from([0.3, 0.8, 1.0, 2.0])))


def powers(layers: int) -> st.SearchStrategy[PowerRounds]:
    """Among them no power at all, equal ones, hardly any, nearly 1, 1 and beyond."""
    power = st.sampled_from([0.0, 1e-9, 0.05, 0.2, 0.5, 0.8, 1 - 1e-9, 1.0, 1.5, 10.0]) | st.floats(0, 2)
    return st.lists(power.map(whole_if_tiny), min_size=layers, max_size=layers).map(sorted).map(PowerRounds)


@st.composite
def tables(draw, layers: int) -> RoundsTable:
    """Any positive shape that does not fall: few different numbers make plateaus and ties, running maxima steps."""
    intervals = draw(st.sets(st.integers(2, MAX_INTERVAL + 20), max_size=8))
    size = (layers, len(intervals) + 1)
    entry = draw(
        st.sampled_from([st.sampled_from([1.0, 1.5, 4.0]), st.floats(0.5, 20), st.floats(-3, 3).map(lambda x: 10**x)])
    )
    rounds = np.array(draw(st.lists(entry, min_size=size[0] * size[1], max_size=size[0] * size[1]))).reshape(size)
    climb = draw(st.sampled_from([np.maximum.accumulate, np.cumsum]))
    return RoundsTable(np.array([1, *sorted(intervals)]), climb(climb(rounds, axis=0), axis=1))


@st.composite
def with_fixed_costs(draw, fleet: Fleet) -> Fleet:
    """The fleet with fixed seconds, some of them 0, and with a fed server that takes time to average."""
    seconds = st.sampled_from([0.0, 0.0, 1.0]) | st.floats(0, 50).map(whole_if_tiny)
    server = dataclasses.replace(
        fleet.server,
        **{name: draw(seconds) for name in SERVER_FIXED},
        averaging_bps=draw(st.none() | st.floats(0.1, 1000)),
    )
    of_devices = {name: draw(st.lists(seconds, min_size=fleet.size, max_size=fleet.size)) for name in FIXED}
    return dataclasses.replace(fleet, server=server, **of_devices)


@st.composite
def with_choices(draw, problem: PlanProblem) -> PlanProblem:
    """The problem with a larger batch, and with parts and types of numbers to choose from, each type with a factor."""
    batch_size = draw(st.sampled_from([1, 2, 4, 8, 8]))
    divisors = [k for k in (1, 2, 4, 8) if batch_size % k == 0]
    factor = st.sampled_from([1.0, 1.0, 1.01, 1.1, 2.0]) | st.floats(1, 3)
    types = draw(st.lists(st.sampled_from(WIRE_DTYPES), min_size=1, max_size=5, unique=True))
    return dataclasses.replace(
        problem,
        batch_size=batch_size,
        micro_batches=tuple(draw(st.lists(st.sampled_from(divisors), min_size=1, max_size=4, unique=True))),
        wires=draw(st.none() | st.just({dtype: draw(factor) for dtype in types})),
    )


@st.composite
def small_problems(draw, kind: Small = Small()) -> PlanProblem:  # noqa: B008
    """Problems that exhaustive search can solve, among them ties, equal devices, infeasible ones and odd drifts."""
    devices = draw(st.integers(1, kind.most_devices))
    layers = draw(st.integers(1, kind.most_layers))
    # Few different whole numbers make ties and equal devices common; floats make them rare.
    amount = draw(st.sampled_from([st.integers(1, 3), st.integers(1, 1000), st.floats(0.01, 1000)]))
    # Costs of very different sizes in one problem are the ones that rounding can hurt.
    wide = st.floats(-6, 14).map(lambda digits: 10.0**digits)
    cost = draw(st.sampled_from([st.integers(0, 2), st.integers(0, 1000), st.floats(0, 1000).map(whole_if_tiny), wide]))

    def rates() -> list[float]:
        return draw(st.lists(amount, min_size=devices, max_size=devices))

    def per_layer() -> list[float]:
        return draw(st.lists(cost, min_size=layers, max_size=layers))

    memory = draw(st.none() | st.just(per_layer())) if kind.restricted else None
    limit = st.floats(1, 2000) | st.just(np.inf)
    limits = draw(st.lists(limit, min_size=devices, max_size=devices)) if memory is not None else None
    server = Server(*draw(st.lists(amount, min_size=3, max_size=3)))
    if kind.slow_server:
        server = dataclasses.replace(server, flops=server.flops * draw(st.sampled_from([0.1, 1.0, 3.0])))
    fleet = Fleet(*(rates() for _ in range(5)), server=server, memory_bytes=limits)
    if draw(st.booleans()):
        fleet = draw(with_fixed_costs(fleet))
    costs = CutCosts(
        forward_flops=np.cumsum(per_layer()),
        backward_flops=np.cumsum(per_layer()),
        activation_bits=per_layer(),
        gradient_bits=per_layer(),
        client_model_bits=np.cumsum(per_layer()),
        memory_bytes=memory,  # not cumulative: it need not rise with the cut
    )
    model = draw(rounds_models(kind.rounds, layers))
    cuts = st.integers(1, layers)
    fixed = st.none() | st.lists(cuts, min_size=devices, max_size=devices)
    problem = PlanProblem(
        fleet,
        costs,
        model,
        batch_size=draw(st.integers(1, 4)),
        max_interval=MAX_INTERVAL,
        interval=draw(st.none() | st.none() | st.integers(1, 6)) if kind.restricted else None,
        cuts=draw(st.none() | st.none() | fixed) if kind.restricted else None,
        allowed_cuts=draw(st.none() | st.none() | st.sets(cuts, min_size=1).map(sorted)) if kind.restricted else None,
    )
    return draw(with_choices(problem)) if kind.choices else problem
