"""Decoded images are kept, never believed when the files changed, and made anew when the cache is damaged."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from adaptsfl.config import DataConfig
from adaptsfl.data import load_dataset
from adaptsfl.data.cache import cache_folder
from pictures import random_images


@pytest.fixture
def config(small_cifar, tmp_path) -> DataConfig:
    return DataConfig(name="cifar10", path=str(small_cifar), cache=str(tmp_path / "kept"))


def cache_file(tmp_path: Path) -> Path:
    (file,) = (tmp_path / "kept").glob("cifar10-train-*.safetensors")
    return file


def test_images_are_decoded_once(config, decoded) -> None:
    first, second = load_dataset(config), load_dataset(config)
    assert decoded == [40, 10]
    assert torch.equal(first.train.inputs, second.train.inputs)
    assert torch.equal(first.test.labels, second.test.labels)
    assert first.classes == second.classes


def test_a_changed_file_is_decoded_anew_and_replaces_the_old_cache(
    config, small_cifar, decoded, write_parquet, tmp_path
) -> None:
    load_dataset(config)
    write_parquet(small_cifar / "cifar10" / "train.parquet", random_images(20, seed=9), [k % 10 for k in range(20)])
    np.testing.assert_array_equal(load_dataset(config).train.inputs.permute(0, 2, 3, 1), random_images(20, seed=9))
    assert decoded == [40, 10, 20]
    assert len(os.listdir(tmp_path / "kept")) == 2


def test_a_touched_file_is_decoded_anew(config, small_cifar, decoded) -> None:
    load_dataset(config)
    os.utime(small_cifar / "cifar10" / "test.parquet", ns=(1, 1))
    load_dataset(config)
    assert decoded == [40, 10, 10]


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def one_bit_flipped(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1000] ^= 1
    file.write_bytes(content)


def empty(file: Path) -> None:
    file.write_bytes(b"")


def of_another_program(file: Path) -> None:
    save_file({"inputs": torch.zeros(3)}, file)


@pytest.mark.parametrize("damage", [cut_short, one_bit_flipped, empty, of_another_program, Path.unlink])
def test_a_damaged_cache_is_made_anew(config, decoded, tmp_path, damage) -> None:
    whole = load_dataset(config)
    damage(cache_file(tmp_path))
    assert torch.equal(load_dataset(config).train.inputs, whole.train.inputs)
    assert decoded == [40, 10, 40]
    load_dataset(config)
    assert decoded == [40, 10, 40]


def test_a_write_that_fails_leaves_the_old_file_and_no_other(config, small_cifar, tmp_path, monkeypatch) -> None:
    load_dataset(config)
    before = load_file(cache_file(tmp_path))
    os.utime(small_cifar / "cifar10" / "train.parquet", ns=(1, 1))

    def full(*_) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(UserWarning, match="cannot keep decoded images .No space left.*ADAPTSFL_CACHE"):
        load_dataset(config)
    assert torch.equal(load_file(cache_file(tmp_path))["inputs"], before["inputs"])
    assert len(os.listdir(tmp_path / "kept")) == 2


def test_a_cache_that_cannot_be_written_costs_time_only(config, tmp_path) -> None:
    (tmp_path / "kept").write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="cannot keep decoded images"):
        assert len(load_dataset(config).train) == 40


def test_the_same_folder_read_with_other_classes_is_not_taken_from_the_cache(image_folder) -> None:
    load_dataset(DataConfig(name="images", path=str(image_folder)))
    extra = image_folder / "train" / "ant"
    extra.mkdir()
    (extra / "0.png").write_bytes((image_folder / "train" / "cat" / "0.png").read_bytes())
    dataset = load_dataset(DataConfig(name="images", path=str(image_folder)))
    assert dataset.test.labels.tolist() == [1, 1, 2, 2]  # ant, cat, dog


def test_where_the_cache_is(monkeypatch, tmp_path) -> None:
    assert cache_folder("/given") == Path("/given")
    assert cache_folder(None) == tmp_path / "cache"  # ADAPTSFL_CACHE, as set for all tests here
    monkeypatch.delenv("ADAPTSFL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder(None) == Path("/xdg/adaptsfl")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder(None) == Path.home() / ".cache" / "adaptsfl"
