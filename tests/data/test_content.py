"""What names the content of data: the same on every rank, another one for other samples or files."""

import shutil

from adaptsfl.config import DataConfig, PartitionConfig
from adaptsfl.data import content_of, prepare
from pictures import random_images


def test_some_devices_alone_see_the_content_of_all() -> None:
    config = DataConfig(partition=PartitionConfig(kind="dirichlet"))
    whole = prepare(config, devices=5, batch_size=4).content
    assert prepare(config, devices=5, batch_size=4, mine=[3]).content == whole == content_of(config)
    assert whole != content_of(DataConfig(name="digits32"))


def test_files_that_other_devices_bring_count_too(small_cifar, tmp_path, write_parquet) -> None:
    def config(*names: str) -> DataConfig:
        partition = PartitionConfig(kind="files", files=[str(tmp_path / name) for name in names])
        return DataConfig(name="cifar10", path=str(small_cifar), partition=partition)

    for name, seed in (("a.parquet", 1), ("b.parquet", 2), ("c.parquet", 3)):
        write_parquet(tmp_path / name, random_images(6, seed=seed), [0, 1, 2, 3, 4, 5])
    whole = prepare(config("a.parquet", "b.parquet"), devices=2, batch_size=4).content
    for mine in ([0], [1]):
        assert prepare(config("a.parquet", "b.parquet"), devices=2, batch_size=4, mine=mine).content == whole
        assert prepare(config("a.parquet", "c.parquet"), devices=2, batch_size=4, mine=mine).content != whole
    assert content_of(config("b.parquet", "a.parquet")) != whole
    shutil.copy(tmp_path / "b.parquet", tmp_path / "d.parquet")
    assert content_of(config("a.parquet", "d.parquet")) == whole


def test_folders_that_devices_bring_count_by_what_is_in_them(image_folder, tmp_path) -> None:
    for device, name in (("a", "cat"), ("b", "dog")):
        shutil.copytree(image_folder / "train" / name, tmp_path / device / name)
    partition = PartitionConfig(kind="files", files=[str(tmp_path / device) for device in "ab"])
    config = DataConfig(name="images", path=str(image_folder), partition=partition)
    before = content_of(config)
    assert prepare(config, devices=2, batch_size=4, mine=[0]).content == before
    image = next((tmp_path / "b" / "dog").iterdir())
    image.write_bytes(image.read_bytes() + b" ")
    assert content_of(config) != before
