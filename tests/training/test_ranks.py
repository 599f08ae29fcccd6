"""However many ranks train together: the weights, losses, estimates and checkpoints are those of one process."""

import json
import secrets
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import HashStore

from adaptsfl.decisions import Decision
from adaptsfl.errors import InvalidInput, NotWritten, RankFailed, TrainingDiverged
from adaptsfl.models import split
from adaptsfl.rate_schedule import RateSchedule
from adaptsfl.training import Engine, OptimizerSettings, load_checkpoint, save_checkpoint
from adaptsfl.training.ranks import ALONE, Ranks, _this_start, joined, launched
from adaptsfl.training.sharding import Sharding, assigned
from ranks import free_port, in_threads, on_ranks
from training.cases import largest_difference, make_batches, make_model
from training.ranked import EVERYBODY, SIZES, Case, engine_of, gone_on, measured, mine, stopped, trained
from training.test_engine import ByShape

pytestmark = pytest.mark.filterwarnings("ignore::adaptsfl.training.TrainingWarning")

EXACT = 1e-10
SINGLE = 1e-4  # of weights of size 1, after nine rounds in single precision
COMING_AND_GOING = ((0, 1, 2), (1,), (3, 4), (0, 2, 4))  # with two ranks one is sometimes idle, with three often
FALLING = RateSchedule("cosine", 8, floor=0.1, warmup_rounds=2)

# The first ones on real processes too.
CASES = [
    Case("none", weights=None),
    Case("batch", "pooled", rule="keep", present=COMING_AND_GOING, options={"record_divergence": True}),
    Case("batch", "device", optimizer="adam", rule="reset", schedule=FALLING),
    Case("group", optimizer="adam", options={"record_divergence": True}),
    Case("batch", "pooled"),
    Case("none", optimizer="adam", present=COMING_AND_GOING),
    Case("batch", "device", optimizer="sgd", present=COMING_AND_GOING),
    Case("odd", "pooled", optimizer="sgd", present=COMING_AND_GOING),
    Case("group", wire_dtype="int4", present=COMING_AND_GOING),
    Case("batch", "pooled", wire_dtype="int8"),
    Case("twice", "device", present=COMING_AND_GOING),
    Case("batch", "pooled", micro_batches=2, present=COMING_AND_GOING),
    Case("batch", "device", optimizer="adam", micro_batches=2, wire_dtype="int4", present=COMING_AND_GOING),
    Case("group", dtype=torch.float32),
]
ON_PROCESSES = 3
MEASURED = [Case("batch", "pooled"), Case("none", present=((0, 2, 3),))]
KEPT = Case("batch", optimizer="adam", rule="keep", present=((0, 1, 2, 3, 4), (1, 2, 4)), schedule=FALLING)

WAYS = [(2, in_threads), (3, in_threads), (1, on_ranks), (2, on_ranks), (3, on_ranks)]
NAMES = ["two threads", "three threads", "one process", "two processes", "three processes"]


@pytest.fixture(scope="module", params=WAYS, ids=NAMES)
def several(request, tmp_path_factory):
    """All that tests of that many ranks need, from one start of them: where they kept a run, and what each gave."""
    size, start = request.param
    folders = [tmp_path_factory.mktemp("kept") for _ in range(2)]
    stopped(ALONE, KEPT, 2, folders[0])
    return folders[1], start(size, everything, ON_PROCESSES if start is on_ranks else len(CASES), *folders)


def everything(ranks: Ranks, cases: int, theirs: Path, ours: Path):
    """On every rank: train, measure, go on from one process's checkpoint, and write one."""
    stopped(ranks, KEPT, 2, ours)
    return trained(ranks, CASES[:cases]), measured(ranks, MEASURED), gone_on(ranks, KEPT, 2, theirs)


@pytest.fixture(scope="module")
def single():
    return trained(ALONE, CASES)


def test_weights_and_losses_are_those_of_one_process(several, single):
    for found, *_ in several[1]:
        for case, (losses, state, apart), (expected_losses, expected, expected_apart) in zip(
            CASES, found, single, strict=False
        ):
            tolerance = EXACT if case.dtype == torch.float64 else SINGLE
            assert largest_difference(state, expected) < tolerance, case
            for found_losses, theirs in zip(losses, expected_losses, strict=True):
                assert found_losses == pytest.approx(theirs, abs=tolerance), case
            assert apart == pytest.approx(expected_apart, abs=tolerance), case


def test_all_ranks_have_the_same_weights_bit_for_bit(several):
    first, *others = (found for found, *_ in several[1])
    for other in others:
        for (losses, state, _), (other_losses, other_state, _) in zip(first, other, strict=True):
            assert losses == other_losses
            assert all(torch.equal(state[key], other_state[key]) for key in state)


def test_estimates_are_those_of_one_process_and_leave_the_weights_alone(several):
    for expected, *others in zip(measured(ALONE, MEASURED), *(found for _, found, _ in several[1]), strict=True):
        for constants, smoothness, state in others:
            assert largest_difference(state, expected[2]) < EXACT
            assert smoothness == pytest.approx(expected[1])
            for name, value in expected[0].items():
                assert np.allclose(constants[name], value, rtol=1e-8, atol=1e-12), name


def test_checkpoints_fit_any_number_of_ranks(several, tmp_path):
    ours, found = several
    stopped(ALONE, KEPT, 2, tmp_path)
    expected = gone_on(ALONE, KEPT, 2, tmp_path)
    for _, _, from_one_process in found:
        assert largest_difference(from_one_process, expected) < EXACT
    assert largest_difference(gone_on(ALONE, KEPT, 2, ours), expected) < EXACT
    for size in (2, 3, 6):  # with six ranks, one has no device
        for weights in in_threads(size, gone_on, KEPT, 2, ours):
            assert largest_difference(weights, expected) < EXACT


def test_every_rank_writes_the_copies_of_its_own_devices(tmp_path):
    in_threads(3, stopped, KEPT, 2, tmp_path)
    manifest = json.loads((tmp_path / "checkpoint.json").read_text())["content"]
    assert [part["devices"] for part in manifest["parts"]] == [[1, 4], [3], [0, 2]]
    for part in manifest["parts"]:
        tensors = load_file(tmp_path / part["file"])
        copies = {name: tensor for name, tensor in tensors.items() if name.startswith("own.")}
        assert {len(tensor) for tensor in copies.values()} == {len(part["devices"])}
        assert len(copies) == len(tensors) or part["file"] == manifest["tensors"]["file"]
    assert len([*tmp_path.iterdir()]) == 4


def kept_twice(ranks: Ranks, folder: Path, spoil: str) -> str:
    """Write a checkpoint, then another one that the last rank cannot write; return what this rank says then."""
    engine = engine_of(KEPT, ranks)
    batches = make_batches(engine.model, (1, 8, 8), SIZES)
    engine.round(mine(engine, batches(1), EVERYBODY))
    save_checkpoint(folder, engine.snapshot(), extra={"which": 1}, identity={}, ranks=ranks)
    engine.round(mine(engine, batches(2), EVERYBODY))
    state = engine.snapshot()
    if ranks.rank == ranks.size - 1 and spoil == "weights":
        next(iter(state.tensors[0].values()))[0] = torch.nan
    elsewhere = {"disk": folder / "checkpoint.json", "machine": folder.with_name("elsewhere")}
    place = elsewhere.get(spoil, folder) if ranks.rank == ranks.size - 1 else folder
    with pytest.raises((NotWritten, TrainingDiverged)) as caught:
        save_checkpoint(place, state, extra={"which": 2}, identity={}, ranks=ranks)
    return str(caught.value)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        ("weights", "has weights that are not finite"),
        ("disk", "the checkpoint cannot be written"),
        ("machine", "-rank1.safetensors to another disk than the first one's. Give a folder that all machines see"),
    ],
)
def test_what_one_rank_cannot_write_none_does_and_the_older_checkpoint_stays(tmp_path, spoil, says):
    folder = tmp_path / "kept"
    messages = in_threads(2, kept_twice, folder, spoil)
    assert all(says in message for message in messages)
    assert load_checkpoint(folder, identity={}).extra == {"which": 1}
    assert len([*folder.iterdir()]) == 3


def test_a_snapshot_of_other_devices_is_refused(tmp_path):
    stopped(ALONE, KEPT, 2, tmp_path)
    engine = engine_of(KEPT, ALONE)
    some = load_checkpoint(tmp_path, identity={}, devices=[1, 3]).state
    with pytest.raises(InvalidInput, match=r"holds the copies of devices \[1, 3\], this rank those of all devices"):
        engine.restore(some)


def test_devices_are_shared_out_by_their_work():
    assert assigned([1, 1, 1, 1, 1], [1, 1]) == ((0, 2, 4), (1, 3))
    assert assigned([1, 5, 1, 2, 1], [1, 1]) == ((1,), (0, 2, 3, 4))
    assert assigned([1, 1], [1, 1, 1]) == ((0,), (1,), ())
    work = [float(size) for size in np.random.default_rng(0).integers(1, 9, 100)]
    loads = [sum(work[k] for k in part) for part in assigned(work, [1] * 7)]
    assert max(loads) - min(loads) <= max(work)


def test_slow_ranks_get_fewer_devices():
    assert assigned([1] * 6, [1, 0.5]) == ((0, 2, 3, 5), (1, 4))
    assert assigned([1] * 4, [0.1, 1]) == ((), (0, 1, 2, 3))
    work, speeds = [float(size) for size in np.random.default_rng(0).integers(1, 9, 100)], [1, 0.25, 0.5, 0.7]
    ends = [sum(work[k] for k in part) / speed for part, speed in zip(assigned(work, speeds), speeds, strict=True)]
    assert max(ends) - min(ends) <= max(work) / min(speeds)


@pytest.mark.parametrize("parts", [[[0, 1], [1, 2, 3]], [[0, 1], [2]], [[0, 1, 2, 3]], [[0, 1], [2, 3, 4]]])
def test_parts_that_do_not_fit_are_refused(parts):
    model = make_model("vgg_digits", torch.float64, width=0.25)
    with pytest.raises(InvalidInput, match=r"parts: is .* for 2 ranks and 4 devices"):
        Engine(model, Decision((1,) * 4, 2), OptimizerSettings(), sharding=Sharding.of(4, Ranks(0, 2), parts))


def one_sums_alone(ranks: Ranks) -> str:
    ranks.sum_numbers([1.0])  # all are there
    if ranks.rank == 1:
        return "left"
    try:
        ranks.all_reduce_sum([torch.zeros(3)])
    except RankFailed as error:
        return str(error)
    return "nothing happened"


def test_a_rank_that_leaves_is_noticed_at_once():
    message, left = on_ranks(2, one_sums_alone)
    assert left == "left"
    assert message.startswith("rank 0: another rank is gone or did not answer (")
    assert message.endswith("--max-restarts: it goes on from the last checkpoint.")


def test_without_a_launcher_there_is_one_rank(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    assert not launched()
    with joined() as ranks:
        assert ranks is ALONE
    values = [1.5, 2.5]
    assert ALONE.sum_numbers(values) == values
    assert ALONE.broadcast("a") == "a"


def launch(monkeypatch, **changes: str) -> None:
    """Make this process believe that it is the first of two ranks."""
    named = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **changes}
    for name, value in named.items():
        monkeypatch.setenv(name, value)


def test_a_timeout_that_is_no_number_is_explained(monkeypatch):
    launch(monkeypatch, ADAPTSFL_RANK_TIMEOUT_S="1m")
    with pytest.raises(InvalidInput, match="ADAPTSFL_RANK_TIMEOUT_S: is '1m'"), joined():
        pass


def test_ranks_that_do_not_come_are_explained(monkeypatch):
    launch(monkeypatch, ADAPTSFL_RANK_TIMEOUT_S="1")
    message = r"rank 0: cannot meet the others at 127.0.0.1:\d+ \(Timed out after"
    with pytest.raises(RankFailed, match=message), joined():
        pass


def test_one_gpu_for_several_ranks_is_refused(monkeypatch):
    launch(monkeypatch)
    with pytest.raises(InvalidInput, match=r"training.device: is 'cuda:1', but there are several ranks\. Give cuda"):
        joined("cuda:1").__enter__()


def started(ranks: Ranks, store: HashStore) -> str:
    """Return what the first rank left where all that start together meet."""
    place = _this_start(store, ranks.rank, ranks.size, 120)
    if ranks.first:
        place.set("said", secrets.token_hex(4))
    return place.get("said").decode()


def test_whoever_starts_again_does_not_find_what_the_dead_left():
    """As after torchrun's restarts: also where somebody died while the others were still looking for each other."""
    store = HashStore()
    found = [in_threads(3, started, store)]
    store.add("tickets", 1)  # died before anybody told it where to meet
    found.append(in_threads(3, started, store))
    found.append(in_threads(2, started, store))  # a machine less
    assert [len(set(said)) for said in found] == [1, 1, 1]
    assert len({said[0] for said in found}) == 3


def test_pooled_statistics_over_ranks_need_batch_norm_modules():
    model = split(ByShape().double(), torch.zeros(2, 1, 8, 8, dtype=torch.float64))
    with pytest.raises(InvalidInput, match="statistics: is 'pooled' over several ranks, but tracing turned"):
        Engine(model, Decision((1,) * 4, 2), OptimizerSettings(), sharding=Sharding.of(4, Ranks(0, 2)))
