"""Which rank holds which devices, and what ranks exchange about them."""

import pytest
import torch

from adaptsfl.decisions import Decision
from adaptsfl.errors import RankFailed, TrainingDiverged
from adaptsfl.training import Engine, OptimizerSettings, PooledEngine
from adaptsfl.training.dispatch import Replicated, on_all_ranks
from adaptsfl.training.ranks import ALONE, Ranks
from adaptsfl.training.sharding import Sharding
from ranks import in_threads
from training.cases import largest_difference, make_batches, make_model
from training.ranked import MAKING


def test_one_process_holds_all_devices():
    whole = Sharding.of(3)
    assert (whole.local, whole.shard, whole.rows) == ((0, 1, 2), None, 3)
    assert whole.row_shares([0.5, 0.2, 0.3]) == [0.5, 0.2, 0.3]


def test_a_rank_has_rows_for_its_own_devices_and_at_least_two():
    first, second = (Sharding.of(3, Ranks(rank, 2), [[0, 2], [1]]) for rank in range(2))
    assert (first.local, first.shard, first.rows) == ((0, 2), (0, 2), 2)
    assert (second.local, second.shard, second.rows) == ((1,), (1,), 2)
    assert second.row_shares([0.5, 0.2, 0.3]) == [0.2, 0.0]
    assert first.here((1, 2)) == [2]
    assert [first.rank_of(device) for device in range(3)] == [0, 1, 0]


def exchanged(ranks: Ranks):
    own = torch.full((2,), float(ranks.rank + 1))
    mapped = ranks.map_numbers(lambda item: [item, -item], iter([1.0, 2.0, 3.0]), 2)
    tensors = [own.clone()]
    ranks.broadcast_tensors(tensors)
    return ranks.stack_rows([own])[0].tolist(), mapped, tensors[0].tolist(), ranks.all_gather(ranks.rank)


def test_what_ranks_exchange_is_the_same_on_all():
    assert exchanged(ALONE) == ([[1.0, 1.0]], [1.0, -1.0, 2.0, -2.0, 3.0, -3.0], [1.0, 1.0], [0])
    for found in in_threads(2, exchanged):
        assert found == ([[1.0, 1.0], [2.0, 2.0]], [1.0, -1.0, 2.0, -2.0, 3.0, -3.0], [1.0, 1.0], [0, 1])


class Counter(Replicated):
    """Adds what it is given, on all ranks."""

    total = 0

    @on_all_ranks
    def add(self, number: int) -> int:
        if number < 0:
            raise TrainingDiverged("below zero")
        self.total += number
        return sum(self.ranks.all_gather(self.total))

    @on_all_ranks
    def fail(self) -> None:
        raise ValueError("no")


def counted(ranks: Ranks) -> int:
    counter = Counter(ranks)
    if not ranks.first:
        counter.follow()
        return counter.total
    assert counter.add(2) == 2 * ranks.size
    with pytest.raises(TrainingDiverged):
        counter.add(-1)
    counter.add(3)
    counter.end()
    return counter.total


def test_all_ranks_run_what_the_first_is_asked_to():
    assert counted(ALONE) == 5
    assert in_threads(3, counted) == [5, 5, 5]


def failed(ranks: Ranks) -> None:
    counter = Counter(ranks)
    with pytest.raises(RankFailed, match=f"rank {ranks.rank}: .*no"):
        counter.fail() if ranks.first else counter.follow()


def test_an_error_of_one_rank_names_it():
    in_threads(2, failed)
    with pytest.raises(ValueError, match="no"):
        Counter(ALONE).fail()


def pooled(ranks: Ranks):
    with MAKING:
        model = make_model("vgg_digits", width=0.25)
    trainer = PooledEngine(model, Decision((2,) * 4, 1), OptimizerSettings(), devices=4, ranks=ranks)
    batches = make_batches(model, (1, 8, 8))
    losses = [trainer.round([batches(t)[k] for k in trainer.batch_devices]).tolist() for t in (1, 2)]
    return losses, trainer.state()


@pytest.mark.parametrize("size", [1, 2])
def test_pooled_batches_are_one_batch_of_one_device_on_the_first_rank(size):
    model = make_model("vgg_digits", width=0.25)
    plain, batches = Engine(model, Decision((2,), 1), OptimizerSettings()), make_batches(model, (1, 8, 8))
    losses = [plain.round([tuple(map(torch.cat, zip(*batches(t), strict=True)))]).tolist() for t in (1, 2)]
    for found, state in [pooled(ALONE)] if size == 1 else in_threads(size, pooled):
        assert found == losses
        assert largest_difference(state, plain.state()) == 0
