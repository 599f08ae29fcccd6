"""One device's part of a dataset: the same samples as from the whole, which is never in memory."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from adaptsfl.config import DataConfig, PartitionConfig
from adaptsfl.data import load_dataset, load_part, share_out
from adaptsfl.data.samples import Dataset, Samples
from adaptsfl.errors import InvalidInput
from data.test_cache import cut_short, empty, of_another_program, one_bit_flipped
from data.test_datasets import FakeHub
from pictures import encoded, random_images

TESTS = np.array([1, 5, 9])


@pytest.fixture
def config(small_cifar, tmp_path) -> DataConfig:
    partition = PartitionConfig(kind="dirichlet", seed=4)
    return DataConfig(name="cifar10", path=str(small_cifar), cache=str(tmp_path / "kept"), partition=partition)


@pytest.fixture
def made(monkeypatch) -> list[int]:
    """How many samples were put into memory together, each time."""
    counts: list[int] = []
    check = Samples.__post_init__

    def counting(samples: Samples) -> None:
        counts.append(len(samples.inputs))
        check(samples)

    monkeypatch.setattr(Samples, "__post_init__", counting)
    return counts


def part(config: DataConfig, device: int = 2) -> Dataset:
    return load_part(config, 4, device, tests=lambda _labels: TESTS, batch_size=4)


def assert_same(found: Dataset, config: DataConfig, device: int = 2) -> None:
    whole, parts = share_out(config, 4, batch_size=4)
    rows = torch.from_numpy(parts[device])
    for samples, of, chosen in ((found.train, whole.train, rows), (found.test, whole.test, torch.from_numpy(TESTS))):
        assert torch.equal(samples.inputs, of.inputs[chosen])
        assert torch.equal(samples.labels, of.labels[chosen])
        assert samples.inputs.untyped_storage().nbytes() == samples.inputs.nbytes  # not a view of all
    assert (found.classes, found.normalisation) == (whole.classes, whole.normalisation)


@pytest.mark.parametrize("name", ["digits", "digits32"])
def test_of_a_dataset_without_files(name) -> None:
    config = DataConfig(name=name, partition=PartitionConfig(kind="shards"))
    assert_same(part(config), config)


def test_with_a_cache_nothing_is_decoded_and_no_other_sample_is_in_memory(config, decoded, made) -> None:
    load_dataset(config)
    decoded.clear()
    made.clear()
    found = part(config)
    assert decoded == []
    assert made == [len(found.train), 3]
    assert len(found.train) < 20
    assert_same(found, config)


def test_without_a_cache_its_own_images_are_decoded_and_the_first(config, decoded, made, tmp_path) -> None:
    found = part(config)
    assert decoded == [len(found.train) + 1, 3 + 1]
    assert made == [len(found.train), 3]
    assert not (tmp_path / "kept").exists()
    assert_same(found, config)


@pytest.mark.parametrize("damage", [cut_short, one_bit_flipped, empty, of_another_program, Path.unlink])
def test_a_damaged_cache_is_not_believed(config, decoded, tmp_path, damage) -> None:
    expected = part(config)
    load_dataset(config)
    (file,) = (tmp_path / "kept").glob("cifar10-train-*.safetensors")
    damage(file)
    decoded.clear()
    found = part(config)
    assert torch.equal(found.train.inputs, expected.train.inputs)
    assert decoded == [len(expected.train) + 1]  # the cache of the test samples is whole


def test_a_cache_of_other_files_is_not_believed(config, small_cifar, write_parquet) -> None:
    load_dataset(config)
    write_parquet(small_cifar / "cifar10" / "train.parquet", random_images(40, seed=9), [k % 10 for k in range(40)])
    assert_same(part(config), config)


def test_rows_of_several_files_are_numbered_through(config, small_cifar, write_parquet) -> None:
    (small_cifar / "cifar10" / "train.parquet").unlink()
    for k, count in enumerate((7, 23, 10)):
        pictures, labels = random_images(count, seed=k), [number % 10 for number in range(count)]
        write_parquet(small_cifar / "cifar10" / f"train-{k}.parquet", pictures, labels)
    for device in range(4):
        assert_same(part(config, device), config, device)


def test_the_first_image_says_whether_all_have_colours(config, small_cifar, write_parquet) -> None:
    """As where all are decoded; those of this device are grey."""
    pictures = [encoded(image if k == 0 else image[..., 0], "PNG") for k, image in enumerate(random_images(40))]
    for split in ("train", "test"):
        write_parquet(small_cifar / "cifar10" / f"{split}.parquet", pictures, [k % 10 for k in range(40)])
    found = part(config, 1)
    assert 0 not in share_out(config, 4, batch_size=4)[1][1]
    assert found.train.inputs.shape[1] == 3
    assert_same(found, config, 1)


def test_from_the_hub_it_comes_out_of_the_cache_from_the_second_time_on(
    config, small_cifar, decoded, monkeypatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", FakeHub(small_cifar / "cifar10"))
    config = config.model_copy(update={"path": None})
    first = part(config)
    assert decoded == [40, 10]
    assert_same(part(config), config)
    assert_same(first, config)
    assert decoded == [40, 10]


@pytest.mark.parametrize(
    ("image", "problem"), [(b"nothing", "the image in row {} cannot be decoded"), (None, r"row {} has no img\.bytes")]
)
def test_an_image_that_cannot_be_read_is_named_by_whoever_needs_it(
    image, problem, config, small_cifar, write_parquet
) -> None:
    _, parts = share_out(config, 4, batch_size=4)
    row = int(parts[2][-1])
    pictures = [image if k == row else encoded(picture) for k, picture in enumerate(random_images(40))]
    write_parquet(small_cifar / "cifar10" / "train.parquet", pictures, [k % 10 for k in range(40)])
    with pytest.raises(InvalidInput, match=problem.format(row)):
        part(config)
    assert len(part(config, 1).train) == len(parts[1])
