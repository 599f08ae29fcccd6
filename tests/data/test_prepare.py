"""From a recipe to mini-batches, with every error before training starts."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from adaptsfl.config import DataConfig, PartitionConfig, load_recipe
from adaptsfl.data import prepare, share_out
from adaptsfl.errors import InvalidInput
from pictures import random_images

RECIPE = """
[model]
name = "vgg_digits"
[convergence]
initial_gap = 2.3
budget = 0.3
drift = { power = 1.0, per_layer = [1e-5] }
"""


def test_digits_for_twenty_devices() -> None:
    config = DataConfig(partition=PartitionConfig(kind="shards"))
    ready = prepare(config, devices=20, batch_size=16, classes=10)
    assert [len(part) for part in ready.parts] == [72] * 20
    assert ready.weights.tolist() == [0.05] * 20
    batch = ready.batches.at(0)
    assert batch.inputs.shape == (320, 1, 8, 8)
    assert torch.equal(batch.labels, ready.dataset.train.labels[batch.indices.flatten()])
    assert len(ready.batches) == 20


def test_the_recipe_reaches_the_batches() -> None:
    def first(**keys) -> torch.Tensor:
        return prepare(DataConfig(**keys), devices=4, batch_size=8).batches.at(0).inputs

    assert torch.equal(first(), first())
    for keys in ({"seed": 1}, {"augmentation": "crop-flip"}, {"mean": [0.0], "std": [1.0]}):
        assert not torch.equal(first(), first(**keys))
    uneven = PartitionConfig(kind="dirichlet", alpha=0.3)
    ready = prepare(DataConfig(weights="size", partition=uneven), devices=4, batch_size=8)
    assert ready.weights == pytest.approx([len(part) / 1440 for part in ready.parts])
    assert len(set(ready.weights.tolist())) > 1


@pytest.mark.parametrize(
    ("keys", "arguments", "message"),
    [
        ({}, {"devices": 200}, r"leaves device 40 with only 7, but a mini-batch takes 8"),
        ({}, {"devices": 2000, "batch_size": 1}, r"leaves device 1440 with no samples"),
        ({}, {"classes": 7}, r"data: has the label 9 among its training samples, outside of the model's outputs"),
        ({}, {"batch_size": 0}, r"training.batch_size: is 0"),
        ({"partition": PartitionConfig(kind="shards")}, {"devices": 7}, r"do not divide into 7 × 2"),
        ({"partition": PartitionConfig(kind="files")}, {}, r"data.partition.files: has 0 entries for 4 devices"),
    ],
)
def test_errors_before_training(keys, arguments, message) -> None:
    with pytest.raises(InvalidInput, match=message):
        prepare(DataConfig(**keys), **{"devices": 4, "batch_size": 8, **arguments})


def shared(image_folder: Path, *files: Path | str) -> DataConfig:
    partition = PartitionConfig(kind="files", files=[str(file) for file in files])
    return DataConfig(name="images", path=str(image_folder), partition=partition)


def test_devices_bring_folders_of_their_own(image_folder, tmp_path) -> None:
    """One device has dogs only: its labels still follow the classes of the whole."""
    for device, name in (("a", "cat"), ("b", "dog")):
        shutil.copytree(image_folder / "train" / name, tmp_path / device / name)
    dataset, parts = share_out(shared(image_folder, tmp_path / "b", tmp_path / "a"), 2)
    assert [dataset.train.labels[part].unique().tolist() for part in parts] == [[1], [0]]
    np.testing.assert_array_equal(dataset.train.inputs[parts[0]].permute(0, 2, 3, 1), random_images(16, seed=2)[6:12])
    assert len(dataset.test) == 4


def test_devices_bring_parquet_files_of_their_own(small_cifar, tmp_path, write_parquet) -> None:
    files = [
        write_parquet(tmp_path / f"{k}.parquet", random_images(4 + k, seed=k), [k] * (4 + k), format_="PNG")
        for k in range(3)
    ]
    partition = PartitionConfig(kind="files", files=[str(file) for file in files])
    config = DataConfig(name="cifar10", path=str(small_cifar), weights="size", partition=partition)
    ready = prepare(config, devices=3, batch_size=4)
    assert [len(part) for part in ready.parts] == [4, 5, 6]
    assert ready.dataset.train.labels.tolist() == [0] * 4 + [1] * 5 + [2] * 6
    assert ready.weights == pytest.approx([4 / 15, 5 / 15, 6 / 15])


@pytest.mark.parametrize("kind", ["iid", "dirichlet"])
def test_some_devices_alone_get_the_same_mini_batches_from_their_own_samples(kind) -> None:
    config = DataConfig(partition=PartitionConfig(kind=kind), weights="size", seed=3)
    whole = prepare(config, devices=5, batch_size=4)
    some = prepare(config, devices=5, batch_size=4, mine=[3, 1])
    assert len(some.dataset.train) == len(whole.parts[3]) + len(whole.parts[1]) < len(whole.dataset.train)
    assert some.dataset.train.inputs.untyped_storage().nbytes() == some.dataset.train.inputs.nbytes  # not a view of all
    for round_ in (0, 7, 200):
        found, expected = some.batches.at(round_), whole.batches.at(round_, [3, 1])
        assert found.inputs.equal(expected.inputs)
        assert found.labels.equal(expected.labels)
    assert some.labels.equal(whole.dataset.train.labels)
    assert all(np.array_equal(mine, theirs) for mine, theirs in zip(some.parts, whole.parts, strict=True))
    assert some.weights.tolist() == whole.weights.tolist()
    assert len(prepare(config, devices=5, batch_size=4, mine=[]).dataset.train) == 1


def test_of_other_devices_files_only_labels_are_read(small_cifar, image_folder, tmp_path, write_parquet) -> None:
    """Those of the others hold images that nobody can decode."""
    good = write_parquet(tmp_path / "good.parquet", random_images(6), [0, 1, 2, 3, 4, 5])
    broken = write_parquet(tmp_path / "broken.parquet", [b"nothing"] * 5, [1, 1, 2, 2, 3])
    partition = PartitionConfig(kind="files", files=[str(broken), str(good)])
    config = DataConfig(name="cifar10", path=str(small_cifar), partition=partition)
    ready = prepare(config, devices=2, batch_size=4, mine=[1])
    assert ready.labels.tolist() == [1, 1, 2, 2, 3, 0, 1, 2, 3, 4, 5]
    assert [part.tolist() for part in ready.parts] == [[*range(5)], [*range(5, 11)]]
    assert len(ready.dataset.train) == 6
    with pytest.raises(InvalidInput, match=r"files\[0\]: .*the image in row 0 cannot be decoded"):
        prepare(config, devices=2, batch_size=4)
    for device, name in (("a", "cat"), ("b", "dog")):
        shutil.copytree(image_folder / "train" / name, tmp_path / device / name)
    for image in (tmp_path / "a" / "cat").iterdir():
        image.write_bytes(b"nothing")
    folders = prepare(shared(image_folder, tmp_path / "a", tmp_path / "b"), devices=2, batch_size=4, mine=[1])
    assert [folders.labels[part].unique().tolist() for part in folders.parts] == [[0], [1]]
    assert folders.dataset.train.labels.unique().tolist() == [1]


def test_bad_files_of_devices(image_folder, tmp_path, write_parquet) -> None:
    train = image_folder / "train"
    (tmp_path / "numbers.txt").write_text("1\n2\n")
    large = write_parquet(tmp_path / "large.parquet", random_images(2, size=9), [0, 1])
    foreign = write_parquet(tmp_path / "foreign.parquet", random_images(2), [0, 7])
    damaged = write_parquet(tmp_path / "damaged.parquet", [b"nothing"], [0])
    shutil.copytree(train, tmp_path / "other" / "lion")
    for files, message in (
        ([train], r"files: has 1 entries for 2 devices"),
        ([train, "/no/such"], r"files\[1\]: /no/such does not exist"),
        ([train, tmp_path / "numbers.txt"], r"files\[1\]: .*are of different kinds"),
        ([train, large], r"files\[1\]: .*large.parquet has samples of shape \(3, 9, 9\)"),
        ([train, foreign], r"label 7 among its training samples"),
        ([train, damaged], r"files\[1\]: .*damaged.parquet: the image in row 0 cannot be decoded"),
        ([train, tmp_path / "other"], r"files\[1\]: 'other/lion' is unknown"),
    ):
        with pytest.raises(InvalidInput, match=message):
            share_out(shared(image_folder, *files), 2)


def test_paths_in_a_recipe_are_seen_from_the_recipe(tmp_path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text(
        RECIPE
        + '[data]\nname = "images"\npath = "pictures"\ncache = "/absolute"\n'
        + '[data.partition]\nkind = "files"\nfiles = ["a.txt", "b.txt"]\n'
    )
    data = load_recipe(file).data
    assert data is not None
    assert data.path == str(tmp_path / "pictures")
    assert data.cache == "/absolute"
    assert data.partition.files == [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]


def test_a_recipe_without_data_and_one_with_a_wrong_key(tmp_path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text(RECIPE)
    assert load_recipe(file).data is None
    file.write_text(RECIPE + "[data.partition]\nalpa = 0.5\n")
    with pytest.raises(InvalidInput, match=r"data.partition.alpa: is not a known key.*Did you mean 'alpha'"):
        load_recipe(file)
    file.write_text(RECIPE + '[data]\naugmentation = "flip"\n')
    with pytest.raises(InvalidInput, match=r"data.augmentation: is 'flip'. Give 'none' or 'crop-flip'"):
        load_recipe(file)
