"""Partitions: every sample at most once, the same for the same seed, and as uneven as they should be."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptsfl.config import PartitionConfig, parse
from adaptsfl.data import averaging_weights, check_parts, dirichlet, iid, make_partition, shards
from adaptsfl.data.partition import Parts
from adaptsfl.errors import InvalidInput, inside

seeds = st.integers(0, 2**32)
CIFAR10_LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 5000))


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def assert_shared_out(parts: Parts, samples: int, *, all_used: bool = True) -> None:
    """Every sample at most once, within range, each part rising."""
    used = np.concatenate(parts)
    assert len(np.unique(used)) == len(used)
    assert used.size == 0 or (used.min() >= 0 and used.max() < samples)
    assert all((np.diff(part) > 0).all() for part in parts)
    assert not all_used or len(used) == samples


def assert_same(first: Parts, second: Parts) -> None:
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@given(samples=st.integers(1, 300), devices=st.integers(1, 40), seed=seeds)
def test_iid_deals_everything_out_evenly(samples, devices, seed) -> None:
    parts = iid(samples, devices, rng(seed))
    assert_shared_out(parts, samples)
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert_same(parts, iid(samples, devices, rng(seed)))


@given(
    per_shard=st.integers(1, 12),
    devices=st.integers(1, 12),
    each=st.integers(1, 4),
    classes=st.integers(1, 10),
    seed=seeds,
)
def test_shards_are_equal_and_hold_neighbours_in_the_order_of_labels(per_shard, devices, each, classes, seed) -> None:
    samples = per_shard * devices * each
    labels = rng(seed + 1).integers(0, classes, samples)
    parts = shards(labels, devices, rng(seed), shards_per_device=each)
    assert_shared_out(parts, samples)
    rank = np.empty(samples, dtype=int)  # each sample's place when sorted by label
    rank[np.argsort(labels, kind="stable")] = np.arange(samples)
    for part in parts:
        assert len(part) == each * per_shard
        assert len(np.unique(rank[part] // per_shard)) == each  # whole shards
    assert_same(parts, shards(labels, devices, rng(seed), shards_per_device=each))


def test_the_papers_shards() -> None:
    """50,000 samples in 40 shards of 1,250: a quarter of a class each, so 2 shards are at most 2 classes."""
    parts = shards(CIFAR10_LABELS, 20, rng())
    assert [len(part) for part in parts] == [2500] * 20
    assert_shared_out(parts, 50_000)
    held = [len(np.unique(CIFAR10_LABELS[part])) for part in parts]
    assert max(held) == 2
    assert sum(held) > 30  # hardly any device has two shards of one class


@given(samples=st.integers(20, 200), size=st.integers(1, 10), devices=st.integers(1, 10), seed=seeds)
def test_shards_of_a_given_size_leave_the_rest(samples, size, devices, seed) -> None:
    labels = rng(seed).integers(0, 5, samples)
    if samples // size < 2 * devices:
        with pytest.raises(InvalidInput, match=r"shard_size: is .* Give at most"):
            shards(labels, devices, rng(seed), shard_size=size)
        return
    parts = shards(labels, devices, rng(seed), shard_size=size)
    assert_shared_out(parts, samples, all_used=False)
    assert {len(part) for part in parts} == {2 * size}


@given(
    samples=st.integers(1, 300),
    devices=st.integers(1, 20),
    classes=st.integers(1, 10),
    magnitude=st.floats(-3, 3),
    fullness=st.floats(0, 1),
    seed=seeds,
)
def test_dirichlet_shares_everything_out_and_keeps_the_minimum(
    samples, devices, classes, magnitude, fullness, seed
) -> None:
    labels = rng(seed).integers(0, classes, samples)
    least = int(fullness * samples / devices)  # up to what only equal parts satisfy

    def draw() -> Parts:
        return dirichlet(labels, devices, rng(seed), alpha=10**magnitude, min_samples=least)

    parts = draw()
    assert_shared_out(parts, samples)
    assert min(len(part) for part in parts) >= least
    assert_same(parts, draw())


def share_of_the_largest_class(alpha: float) -> float:
    parts = dirichlet(CIFAR10_LABELS, 20, rng(), alpha=alpha, min_samples=16)
    return float(np.mean([np.bincount(CIFAR10_LABELS[part]).max() / len(part) for part in parts]))


def test_a_small_alpha_makes_devices_one_sided() -> None:
    """IID devices hold about 10 % of each of ten classes; α → 0 leaves one or two classes."""
    alphas = [0.05, 0.5, 5, 1000]
    shares = [share_of_the_largest_class(alpha) for alpha in alphas]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.6
    assert shares[-1] < 0.13


def test_dirichlet_with_many_devices_and_a_small_alpha_comes_to_an_end() -> None:
    parts = dirichlet(CIFAR10_LABELS, 100, rng(), alpha=0.01, min_samples=64)
    assert min(len(part) for part in parts) == 64


@pytest.mark.parametrize("kind", ["iid", "shards", "dirichlet"])
def test_the_seed_of_the_recipe_decides(kind) -> None:
    labels = CIFAR10_LABELS[:1000]
    first, again, other = (make_partition(PartitionConfig(kind=kind, seed=seed), labels, 10) for seed in (1, 1, 2))
    assert_same(first, again)
    assert any(not np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_dirichlet_gives_every_device_a_batch_unless_the_recipe_says_otherwise() -> None:
    def smallest(**keys) -> int:
        config = PartitionConfig(kind="dirichlet", alpha=0.01, **keys)
        return min(len(part) for part in make_partition(config, CIFAR10_LABELS[:1000], 20, batch_size=16))

    assert smallest() == 16
    assert smallest(min_samples=0) == 0
    assert smallest(min_samples=30) == 30


def files(folder: Path, *contents: str) -> PartitionConfig:
    paths = [folder / f"device{k}.txt" for k in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_text(content)
    return PartitionConfig(kind="files", files=[str(path) for path in paths])


def test_numbers_of_samples_from_files(tmp_path) -> None:
    config = files(tmp_path, "3\n1\n", "0\n\n4\n")
    np.save(tmp_path / "device2.npy", np.array([2, 5], dtype=np.int32))
    given_files = [*(config.files or []), str(tmp_path / "device2.npy")]
    parts = make_partition(PartitionConfig(kind="files", files=given_files), np.zeros(7, dtype=np.int64), 3)
    assert [part.tolist() for part in parts] == [[1, 3], [0, 4], [2, 5]]


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (["0\n9\n"], r"files\[0\]: .*device0.txt names sample 9.*0 … 6"),
        (["-1"], r"names sample -1"),
        (["0\n1", "2\n1"], r"files\[1\]: .*device1.txt has sample 1, .*device0.txt has it too"),
        (["0\n1\n0"], r"device0.txt has sample 0, more than once"),
        (["cat"], r"device0.txt is not a list of numbers"),
    ],
)
def test_bad_files(tmp_path, contents, message) -> None:
    with pytest.raises(InvalidInput, match=message):
        make_partition(files(tmp_path, *contents), np.zeros(7, dtype=np.int64), len(contents))


def test_arrays_with_objects_are_not_unpickled(tmp_path) -> None:
    np.save(tmp_path / "bad.npy", np.array([{}], dtype=object), allow_pickle=True)
    config = PartitionConfig(kind="files", files=[str(tmp_path / "bad.npy")])
    with pytest.raises(InvalidInput, match=r"bad.npy is not a list of numbers"):
        make_partition(config, np.zeros(7, dtype=np.int64), 1)


@pytest.mark.parametrize(
    ("config", "devices", "message"),
    [
        (
            {"kind": "shards"},
            30,
            r"shards_per_device: is 2: 1000 samples do not divide into 30 × 2 = 60 equal shards\. "
            r"Set shard_size = 16 and leave the rest, or use 20 or 25 devices",
        ),
        ({"kind": "shards"}, 600, r"do not divide into 600 × 2 = 1200 equal shards\. Use 250 or 500 devices"),
        ({"kind": "shards", "shards_per_device": 0}, 10, r"shards_per_device: is 0"),
        ({"kind": "shards", "shard_size": 0}, 10, r"shard_size: is 0"),
        ({"kind": "dirichlet", "alpha": 0.0}, 10, r"data.partition.alpha: is 0"),
        ({"kind": "dirichlet", "alpha": float("nan")}, 10, r"data.partition.alpha: is nan"),
        ({"kind": "dirichlet", "min_samples": 200}, 10, r"min_samples: is 200, for 10 devices and 1000 samples.*100"),
        ({"kind": "iid", "alpha": 0.5}, 10, r"data.partition.alpha: is given, but kind is 'iid'.*'dirichlet'"),
        ({"kind": "dirichlet", "shard_size": 3}, 10, r"data.partition.shard_size: is given, but kind is 'dirichlet'"),
        ({"seed": -1}, 10, r"data.partition.seed: is -1"),
        ({}, 0, r"devices: is 0"),
    ],
)
def test_bad_partitions(config, devices, message) -> None:
    def parsed_and_made() -> None:
        with inside("data.partition"):
            given = parse(PartitionConfig, config)
        make_partition(given, CIFAR10_LABELS[:1000], devices)

    with pytest.raises(InvalidInput, match=message):
        parsed_and_made()


def test_samples_with_many_labels_have_no_shards() -> None:
    labels = np.zeros((8, 4), dtype=np.int64)
    assert len(make_partition(PartitionConfig(), labels, 2)) == 2
    for kind in ("shards", "dirichlet"):
        with pytest.raises(InvalidInput, match=rf"data.partition.kind: is '{kind}'.*Use 'iid' or 'files'"):
            make_partition(PartitionConfig(kind=kind), labels, 2)  # type: ignore[arg-type]


def test_devices_without_enough_samples() -> None:
    parts = iid(10, 3, rng())
    check_parts(parts, 3)
    with pytest.raises(InvalidInput, match=r"leaves device 1 with only 3, but a mini-batch takes 4.*batch_size to 3"):
        check_parts(parts, 4)
    with pytest.raises(InvalidInput, match=r"leaves device 2 with no samples.*Use fewer devices"):
        check_parts(iid(2, 3, rng()), 1)


def test_weights_of_the_devices() -> None:
    parts = (np.arange(1), np.arange(1, 4))
    assert averaging_weights(parts, "equal").tolist() == [0.5, 0.5]
    assert averaging_weights(parts, "size").tolist() == [0.25, 0.75]
