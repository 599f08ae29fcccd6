"""Statistics estimated for the mean model are those of the pooled samples, and training does not notice."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from adaptsfl.decisions import Decision
from adaptsfl.errors import InvalidInput
from adaptsfl.models import SplitModel, profile, split
from adaptsfl.models.pieces import tracked_norms
from adaptsfl.training import Batch, Engine, OptimizerSettings, Reference, Sequential
from adaptsfl.training.ranks import ALONE
from adaptsfl.training.statistics import Moments, reestimated, tracks_statistics
from ranks import in_threads
from training.cases import OddNorms, largest_difference, make_batches, make_model, make_odd_norms
from training.ranked import Case, estimated
from training.test_engine import ByShape

pytestmark = pytest.mark.filterwarnings("ignore::adaptsfl.training.TrainingWarning")

EXACT = 1e-10
SHAPE = (1, 8, 8)
WEIGHTS = (1.0, 5.0, 2.0, 3.0)
PLAN = Decision((1, 3, 2, 1), 4)
MOMENTUM = OptimizerSettings("momentum", 0.05, 0.1)


def models() -> dict[str, SplitModel]:
    return {"vgg": make_model("vgg_digits", width=0.25, norm="batch"), "odd": make_odd_norms()}


def drifted(make: Any, model: SplitModel, present: Sequence[int] = (0, 1, 2, 3), **options: Any) -> Any:
    """Return a trainer two rounds after the beginning, in the middle of an interval."""
    trainer, batches = make(model, PLAN, MOMENTUM, weights=WEIGHTS, **options), make_batches(model, SHAPE)
    for t in (1, 2):
        trainer.round([batches(t)[k] for k in present], present)
    return trainer


# --- merging ---


def test_merged_moments_are_those_of_the_pooled_numbers() -> None:
    """Batches of unequal sizes, far from zero: a sum of squares would lose every digit of the variance."""
    torch.manual_seed(0)
    x = 1e6 + torch.randn(23, 3, 4, 5, dtype=torch.float64)
    norm = nn.BatchNorm2d(3, momentum=1.0).double()
    norm(x)
    merged = Moments.merged([Moments.of(part) for part in x.split([2, 15, 1, 5])])
    assert merged.count == 23 * 20
    for found, expected in zip(merged.running, (norm.running_mean, norm.running_var), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)
    halves = [Moments.merged([Moments.of(part) for part in half.split(6)]) for half in (x[:9], x[9:])]
    torch.testing.assert_close(Moments.merged(halves).variance, merged.variance, rtol=1e-9, atol=0)


def test_a_single_batch_norm_has_the_statistics_of_all_devices_samples() -> None:
    """One go over everybody's samples, in double precision, is the same to rounding."""
    torch.manual_seed(0)
    model = split(
        nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double(), torch.zeros(2, 6).double()
    )
    inputs = [10 * k + torch.randn(8, 6, dtype=torch.float64) for k in range(5)]
    expected = model.module[0](torch.cat(inputs))
    for own in (1, 2):
        found = reestimated(model.pieces, own, inputs, [0.2] * 5, pooled=True)
        torch.testing.assert_close(found[0]["1.running_mean"], expected.mean(0), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found[0]["1.running_var"], expected.var(0), rtol=1e-12, atol=1e-12)
        assert found[1] == {}


# --- the engine, the reference, ranks, and those who take turns ---


@pytest.mark.parametrize("statistics", ["pooled", "device"])
@pytest.mark.parametrize("present", [(0, 1, 2, 3), (1, 3)], ids=["all", "some"])
@pytest.mark.parametrize("name", ["vgg", "odd"])
def test_the_engine_estimates_what_the_reference_does(name: str, present: tuple[int, ...], statistics: str) -> None:
    model = models()[name]
    batches = [make_batches(model, SHAPE)(2)[k] for k in present]
    fast, slow = (drifted(make, model, present, statistics=statistics) for make in (Engine, Reference))
    assert largest_difference(fast.state(batches), slow.state(batches)) < EXACT
    assert largest_difference(fast.state(), slow.state()) < EXACT
    changed = {key for key, value in fast.state(batches).items() if not torch.equal(value, fast.state()[key])}
    assert {key.rpartition(".")[2] for key in changed} == {"running_mean", "running_var"}
    assert len(changed) == 2 * sum(len(tracked_norms(piece)) for piece in model.pieces)


CASES = [
    Case("batch", "pooled"),
    Case("batch", "device"),
    Case("batch", "pooled", present=((1,),)),  # all ranks but one are idle
    Case("odd", "pooled", present=((0, 1, 4),)),
    Case("odd", "device", present=((1, 3),)),
    Case("group"),
]


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_estimate_what_one_process_does(size: int) -> None:
    expected = estimated(ALONE, CASES)
    for found in in_threads(size, estimated, CASES):
        for case, ours, theirs in zip(CASES, found, expected, strict=True):
            assert largest_difference(ours, theirs) < EXACT, case


def test_devices_that_take_turns() -> None:
    """All devices' samples through the mean model by hand, each normalised by themselves."""
    model = make_model("vgg_digits", width=0.25, norm="batch")
    batches = make_batches(model, SHAPE)
    trainer = Sequential(model, 3, 4, OptimizerSettings("sgd", 0.05), interval=5)
    for t in (1, 2):
        trainer.round(batches(t))
    plain, state = Reference(model, Decision((3,) * 4, 5), OptimizerSettings(), statistics="device"), trainer.state()
    for layers in [*plain.forged(), [None] * 3 + plain.server.common]:
        for layer in filter(None, layers):
            layer.piece.load_state_dict({key: state[key] for key in layer.piece.state_dict()})
    assert largest_difference(trainer.state(batches(2)), plain.state(batches(2))) < EXACT


# --- which statistics ---


class OverOne(nn.InstanceNorm1d):
    """Instance-norm over a sample's numbers as one channel."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.unsqueeze(1)).squeeze(1)


class Strange(nn.Sequential):
    """Dropout before batch-norm, one that is frozen, one that counts, one without statistics, an instance-norm."""

    def __init__(self) -> None:
        norms = nn.BatchNorm1d(8), nn.BatchNorm1d(8, momentum=None)
        odd = nn.BatchNorm1d(8, track_running_stats=False), OverOne(1, track_running_stats=True)
        super().__init__(nn.Linear(4, 8), nn.Dropout(0.5), *norms, nn.Linear(8, 8), *odd, nn.Linear(8, 10))

    def train(self, mode: bool = True) -> "Strange":
        super().train(mode)
        self[2].eval()
        return self


def make_strange() -> SplitModel:
    torch.manual_seed(0)
    strange = Strange().double()
    return split(strange, torch.zeros(2, 4).double(), layers=list(strange))


def test_only_what_training_moves_is_estimated_and_dropout_is_off() -> None:
    model = make_strange()
    assert [norm for piece in model.pieces for norm in tracked_norms(piece)] == ["3"]
    engine, batches = Engine(model, Decision((1, 1), 4), MOMENTUM), make_batches(model, (4,), (6, 6))
    for t in (1, 2):
        engine.round(batches(t))
    before, state = engine.state(), engine.state(batches(2))
    assert {key for key in state if not torch.equal(state[key], before[key])} == {"3.running_mean", "3.running_var"}
    net = Strange().double().eval()
    net.load_state_dict(before)
    seen = net[2](net[0](torch.cat([x for x, _ in batches(2)])))
    torch.testing.assert_close(state["3.running_mean"], seen.mean(0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state["3.running_var"], seen.var(0), rtol=1e-12, atol=1e-12)


def test_a_batch_norm_that_tracing_made_an_operation_of() -> None:
    """torch.export leaves no module; the same layers with modules give the same."""
    torch.manual_seed(0)
    lost, kept = (split(kind().double(), torch.zeros(2, *SHAPE).double()) for kind in (ByShape, OddNorms))
    kept.module.load_state_dict(lost.module.state_dict())
    assert lost.names == kept.names
    assert not any(isinstance(part, nn.BatchNorm2d) for piece in lost.pieces for part in piece.modules())
    assert tracks_statistics(lost.pieces)
    inputs = [x for x, _ in make_batches(lost, SHAPE)(2)]
    one, other = (reestimated(model.pieces, 1, inputs, WEIGHTS, pooled=True) for model in (lost, kept))
    assert any(one)
    for ours, theirs in zip(one, other, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.allclose(ours[name], theirs[name], rtol=EXACT, atol=EXACT) for name in ours)


@pytest.mark.parametrize("norm", ["none", "group"])
def test_a_model_without_batch_norm_has_nothing_to_estimate(norm: str) -> None:
    model = make_model("vgg_digits", width=0.25, norm=norm)
    assert not tracks_statistics(model.pieces)
    assert not any(reestimated(model.pieces, 2, [torch.zeros(2, *SHAPE).double()], [1.0], pooled=True))
    assert not profile(model, torch.zeros(1, *SHAPE).double(), batch_size=2).statistics_bits.any()


def test_bits_of_statistics() -> None:
    """Width 0.25: 8 and 8 channels, then more; a mean and a variance of 32 bits for each."""
    model = make_model("vgg_digits", torch.float32, width=0.25, norm="batch")
    channels = [
        sum(piece.get_buffer(mean).numel() for mean, _ in tracked_norms(piece).values()) for piece in model.pieces
    ]
    assert channels[0] > 0
    bits = profile(model, torch.zeros(1, *SHAPE), batch_size=2).statistics_bits
    assert bits.tolist() == (64 * torch.tensor(channels).cumsum(0)).tolist()


# --- training ---


@pytest.mark.parametrize("make", [Engine, Reference])
def test_training_goes_on_as_if_nothing_had_been_estimated(make: Any) -> None:
    """Bit for bit, with dropout too: the generator that it draws from is not touched."""
    model = make_strange()
    batches = make_batches(model, (4,), (6, 6))
    found = []
    for estimate in (False, True):
        torch.manual_seed(1)
        trainer = make(model, Decision((1, 1), 3), MOMENTUM)
        for t in range(1, 8):
            trainer.round(batches(t))
            if estimate:
                trainer.state(batches(t))
        found.append(trainer.state())
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])


def loss_of(model: SplitModel, state: dict[str, Tensor], batch: Batch) -> float:
    net = make_model("vgg_digits", width=0.25, norm="batch").module
    net.load_state_dict(state)
    with torch.no_grad():
        return float(functional.cross_entropy(net.eval()(batch[0]), batch[1]))


@pytest.mark.parametrize("seed", range(3))
def test_the_mean_of_drifted_copies_is_better_than_it_looks(seed: int) -> None:
    """Ten clusters that four devices learn over 16 rounds without averaging; loss on samples that nobody trained on."""
    model = make_model("vgg_digits", width=0.25, norm="batch")
    centres = torch.randn(10, *SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    def batch(key: int, size: int) -> Batch:
        generator = torch.Generator().manual_seed(1000 * seed + key)
        labels = torch.randint(0, 10, (size,), generator=generator)
        noise = torch.randn(size, *SHAPE, generator=generator, dtype=torch.float64)
        return centres[labels] + 0.7 * noise, labels

    engine = Engine(model, Decision((4,) * 4, 16), OptimizerSettings("sgd", 0.1))
    for t in range(1, 17):
        batches = [batch(10 * t + k, 8) for k in range(4)]
        engine.round(batches)
    fresh = batch(0, 200)
    shown, true = (loss_of(model, state, fresh) for state in (engine.state(), engine.state(batches)))
    assert true < 0.9 * shown


def test_batches_of_others_than_the_last_round_had_are_refused() -> None:
    model = make_model("vgg_digits", width=0.25, norm="batch")
    engine = drifted(Engine, model, (1, 3))
    with pytest.raises(InvalidInput, match=r"batches: has 4 entries\. Give 2"):
        engine.state(make_batches(model, SHAPE)(2))
