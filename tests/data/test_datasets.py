"""Datasets by name, and what is said when they cannot be had."""

import hashlib
import os
import sys
import types
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from adaptsfl.config import DataConfig
from adaptsfl.data import Dataset, Normalisation, Samples, load_dataset
from adaptsfl.data.hub import HUB
from adaptsfl.data.samples import measured_normalisation
from adaptsfl.errors import InvalidInput
from pictures import encoded, random_images

REAL = Path(os.environ.get("ADAPTSFL_DATA", "absent")).resolve()


def normalised_moments(dataset: Dataset) -> tuple[torch.Tensor, torch.Tensor]:
    assert dataset.normalisation is not None
    values = dataset.normalisation(dataset.train.inputs).double()
    return values.mean((0, 2, 3)), values.std((0, 2, 3), correction=0)


def test_digits_are_split_by_class_and_always_the_same() -> None:
    dataset = load_dataset(DataConfig())
    assert dataset.train.inputs.shape == (1440, 1, 8, 8)
    assert dataset.test.inputs.shape == (357, 1, 8, 8)
    assert dataset.train.inputs.min() == 0
    assert dataset.train.inputs.max() == 1
    assert set(np.bincount(dataset.test.labels.numpy()).tolist()) == {35, 36}
    pixels = (dataset.test.inputs * 16).to(torch.uint8).numpy().tobytes()
    assert hashlib.sha256(pixels).hexdigest().startswith("b625631d6eb69f5e")


def test_large_digits_are_the_same_digits_as_colour_images_of_cifars_size() -> None:
    small, large = load_dataset(DataConfig(name="digits")), load_dataset(DataConfig(name="digits32"))
    assert large.test.inputs.shape == (357, 3, 32, 32)
    assert torch.equal(large.train.labels, small.train.labels)
    for channel in range(3):
        assert torch.equal(large.test.inputs[:, channel, 1::4, 2::4], small.test.inputs[:, 0])
    assert large.normalisation.mean == 3 * small.normalisation.mean


def test_digits_normalise_to_mean_zero_and_deviation_one() -> None:
    mean, std = normalised_moments(load_dataset(DataConfig()))
    assert mean.abs().max() < 1e-3
    assert (std - 1).abs().max() < 1e-3


@pytest.mark.parametrize("format_", ["WEBP", "PNG", "BMP"])
def test_parquet_images_of_any_lossless_format_come_out_as_they_went_in(tmp_path, write_parquet, format_) -> None:
    images = random_images(7)
    for split in ("train", "test"):
        write_parquet(tmp_path / f"{split}.parquet", images, [3, 1, 4, 1, 5, 9, 2], format_=format_)
    dataset = load_dataset(DataConfig(name="cifar10", path=str(tmp_path)))
    assert dataset.train.inputs.is_contiguous()
    np.testing.assert_array_equal(dataset.train.inputs.permute(0, 2, 3, 1), images)
    assert dataset.train.labels.tolist() == [3, 1, 4, 1, 5, 9, 2]
    assert dataset.classes == tuple("0123456789")  # no metadata: the classes are numbered


def test_formats_may_differ_within_a_file(tmp_path, write_parquet) -> None:
    images = random_images(4)
    mixed = [encoded(image, format_) for image, format_ in zip(images, ["PNG", "WEBP", "WEBP", "PNG"], strict=True)]
    for split in ("train", "test"):
        write_parquet(tmp_path / f"{split}.parquet", mixed, range(4))
    dataset = load_dataset(DataConfig(name="cifar10", path=str(tmp_path)))
    np.testing.assert_array_equal(dataset.train.inputs.permute(0, 2, 3, 1), images)


def test_the_folder_of_the_environment_variable(small_cifar, monkeypatch) -> None:
    monkeypatch.setenv("ADAPTSFL_DATA", str(small_cifar))
    dataset = load_dataset(DataConfig(name="cifar10"))
    assert (len(dataset.train), len(dataset.test)) == (40, 10)
    assert dataset.classes[3] == "class 3"
    assert dataset.normalisation == HUB["cifar10"].normalisation


def test_a_path_may_hold_several_datasets(small_cifar, write_parquet) -> None:
    for split in ("train", "test"):
        write_parquet(small_cifar / "cifar100" / f"{split}.parquet", random_images(3), [0, 1, 99], label="fine_label")
    assert len(load_dataset(DataConfig(name="cifar10", path=str(small_cifar))).train) == 40
    assert len(load_dataset(DataConfig(name="cifar100", path=str(small_cifar))).train) == 3


def test_the_layout_of_a_copy_of_the_hub(tmp_path, write_parquet) -> None:
    for k in range(2):
        name = f"plain_text/train-0000{k}-of-00002.parquet"
        write_parquet(tmp_path / name, random_images(3, seed=k), [k] * 3, label="fine_label")
    write_parquet(tmp_path / "plain_text/test-00000-of-00001.parquet", random_images(2), [0, 1], label="fine_label")
    dataset = load_dataset(DataConfig(name="cifar100", path=str(tmp_path)))
    assert dataset.train.labels.tolist() == [0, 0, 0, 1, 1, 1]


def test_mean_and_deviation_of_the_recipe(small_cifar) -> None:
    given = DataConfig(name="cifar10", path=str(small_cifar), mean=[0.5, 0.5, 0.5], std=[0.25, 0.25, 0.5])
    dataset = load_dataset(given)
    assert dataset.normalisation is not None
    white = dataset.normalisation(torch.full((1, 3, 8, 8), 255, dtype=torch.uint8))
    assert white[0, :, 0, 0].tolist() == [2, 2, 1]


def test_an_image_folder(image_folder) -> None:
    (image_folder / "train" / "cat" / "notes.txt").write_text("not an image")
    dataset = load_dataset(DataConfig(name="images", path=str(image_folder)))
    assert dataset.classes == ("cat", "dog")
    assert dataset.train.labels.tolist() == [0] * 6 + [1] * 6
    assert dataset.test.inputs.shape == (4, 3, 8, 8)
    np.testing.assert_array_equal(dataset.train.inputs.permute(0, 2, 3, 1), random_images(16, seed=2)[:12])
    mean, std = normalised_moments(dataset)
    assert mean.abs().max() < 1e-5
    assert (std - 1).abs().max() < 1e-5


def test_grey_images_have_one_channel(tmp_path) -> None:
    grey = random_images(2)[..., 0]
    for split in ("train", "test"):
        for k, name in enumerate("ab"):
            (tmp_path / split / name).mkdir(parents=True)
            (tmp_path / split / name / "0.png").write_bytes(encoded(grey[k], "PNG"))
    dataset = load_dataset(DataConfig(name="images", path=str(tmp_path)))
    np.testing.assert_array_equal(dataset.train.inputs[:, 0], grey)


OWN = """
import numpy as np, torch
from PIL import Image
from torch.utils.data import Dataset, TensorDataset

class Pictures(Dataset):
    classes = ["cat", "dog"]
    def __len__(self):
        return 4
    def __getitem__(self, k):
        return Image.fromarray(np.full((5, 6, 3), 10 * k, dtype=np.uint8)), k % 2

def pictures():
    return Pictures(), Pictures()

def vectors(size=3):
    return tuple(TensorDataset(torch.ones(n, size, dtype=torch.float64), torch.arange(n)) for n in (5, 2))

def text():
    return tuple([(torch.arange(4), torch.arange(1, 5))] * n for n in (3, 2))

def one():
    return Pictures()

def ragged():
    return [(torch.zeros(2), 0), (torch.zeros(3), 1)], [(torch.zeros(2), 0)]

def mixed():
    return [(torch.zeros(2), 0), (torch.tensor([1, 2]), 1)], [(torch.zeros(2), 0)]

def nan():
    return [(torch.zeros(2), 0), (torch.tensor([0, float("nan")]), 1)], [(torch.zeros(2), 0)]

def soft():
    return [(torch.zeros(2), 0.5)], [(torch.zeros(2), 0)]

def broken():
    return [(torch.zeros(2), 0), 7], []

def empty():
    return [], []
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_data_for_test.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return lambda name, **options: load_dataset(DataConfig(name=f"own_data_for_test:{name}", options=options))


def test_torch_datasets_of_the_users_own(own) -> None:
    pictures = own("pictures")
    assert pictures.train.inputs.shape == (4, 3, 5, 6)
    assert pictures.train.inputs[3].unique().tolist() == [30]
    assert pictures.classes == ("cat", "dog")
    vectors = own("vectors", size=7)
    assert (vectors.train.inputs.dtype, vectors.train.inputs.shape) == (torch.float32, (5, 7))
    assert vectors.normalisation is None
    assert len(vectors.classes) == 5
    text = own("text")
    assert (text.train.inputs.dtype, text.train.labels.shape) == (torch.int64, (3, 4))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("one", "data.name: own_data_for_test:one returned a Pictures. Return two torch Datasets"),
        ("ragged", r"ragged \(train\): sample 1 is float32\[3\] .* sample 0 is float32\[2\]"),
        ("nan", "NaN or infinity in sample 1"),
        ("mixed", r"sample 1 is int64\[2\] .* sample 0 is float32\[2\]"),
        ("soft", r"sample 0 is .* with label float32\[\].*whole numbers"),
        ("broken", "sample 1 raised TypeError"),
        ("empty", r"empty \(train\) has no samples"),
        ("vector", "'vector' is unknown. Did you mean 'vectors'"),
        ("vectors", r"does not take these options.*'depth'.* It takes size"),
    ],
)
def test_bad_factories(own, name, message) -> None:
    with pytest.raises(InvalidInput, match=message):
        own(name, **({"depth": 1} if name == "vectors" else {}))


class FakeRows:
    """One split as the `datasets` package gives it, over a parquet file."""

    def __init__(self, file: Path) -> None:
        self.table = pq.read_table(file)
        self.cache_files = [{"filename": str(file)}]
        self.features = {"label": types.SimpleNamespace(names=[f"hub {k}" for k in range(10)])}

    def with_format(self, name):
        assert name == "arrow"
        return self

    def __getitem__(self, rows):
        return self.table[rows]


class FakeHub(types.ModuleType):
    """The `datasets` package, offline."""

    def __init__(self, folder: Path) -> None:
        super().__init__("datasets")
        self.folder, self.asked = folder, []

    def load_dataset(self, repository):
        self.asked.append(repository)
        return {split: FakeRows(self.folder / f"{split}.parquet") for split in ("train", "test")}


def test_without_local_files_the_hub_is_asked(small_cifar, monkeypatch) -> None:
    hub = FakeHub(small_cifar / "cifar10")
    monkeypatch.setitem(sys.modules, "datasets", hub)
    dataset = load_dataset(DataConfig(name="cifar10"))
    assert hub.asked == ["uoft-cs/cifar10"]
    assert len(dataset.train) == 40
    assert dataset.classes[2] == "hub 2"


def test_a_hub_that_cannot_be_reached(monkeypatch) -> None:
    hub = types.ModuleType("datasets")
    hub.load_dataset = lambda repository: Path("/nowhere").read_text()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", hub)
    with pytest.raises(InvalidInput, match=r"data.name: cifar10 cannot be had from the hub .*Check the network"):
        load_dataset(DataConfig(name="cifar10"))


def test_without_files_and_hub_the_message_says_how_to_get_the_data(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed
    with pytest.raises(InvalidInput, match=r"data.name: cifar10 .*ADAPTSFL_DATA is not set.*adaptsfl\[hub\]"):
        load_dataset(DataConfig(name="cifar10"))
    monkeypatch.setenv("ADAPTSFL_DATA", str(tmp_path))
    with pytest.raises(InvalidInput, match=rf"not in ADAPTSFL_DATA \({tmp_path}\).*cifar10/train.parquet"):
        load_dataset(DataConfig(name="cifar10"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"name": "cifar"}, "data.name: 'cifar' is unknown. Did you mean 'cifar10'.*:factory"),
        ({"name": "zzz"}, "data.name: 'zzz' is unknown. Give one of digits, digits32, cifar10, cifar100, images"),
        ({"path": "/x"}, "data.path: is '/x', but digits reads no files"),
        ({"options": {"a": 1}}, "data.options: is given, but digits takes none"),
        ({"mean": [0.5]}, "data.std: has 0 entries, and data.mean 1"),
        ({"mean": [0.5], "std": [0.0]}, r"data.std\[0\]: is 0"),
        ({"mean": [0.5, 0.5], "std": [1.0, 1.0]}, "data.mean: has 2 entries for inputs of 1 channels"),
        ({"name": "images"}, "data.path: is missing"),
        ({"name": "images", "path": "/no/such"}, "data.path: /no/such has no folder train"),
        ({"name": "cifar10", "path": "/no/such"}, "data.path: /no/such is not a folder.*ADAPTSFL_DATA"),
    ],
)
def test_bad_configurations(config, message) -> None:
    with pytest.raises(InvalidInput, match=message):
        load_dataset(DataConfig(**config))


def cifar10_with(folder: Path, **tables) -> None:
    for split in ("train", "test"):
        pq.write_table(pa.table(tables), folder / f"{split}.parquet")
    load_dataset(DataConfig(name="cifar10", path=str(folder)))


def test_parquet_with_the_wrong_columns(tmp_path) -> None:
    with pytest.raises(InvalidInput, match=r"train.parquet has the wrong columns: x \(int64\).*img or image.*label"):
        cifar10_with(tmp_path, x=[1])
    with pytest.raises(InvalidInput, match=r"wrong columns: img \(string\)"):
        cifar10_with(tmp_path, img=["a"], label=[1])
    with pytest.raises(InvalidInput, match=r"wrong columns: .*label \(string\)"):
        cifar10_with(tmp_path, img=[{"bytes": b"", "path": None}], label=["cat"])


def test_damaged_parquet(small_cifar) -> None:
    config = DataConfig(name="cifar10", path=str(small_cifar))
    file = small_cifar / "cifar10" / "train.parquet"
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(InvalidInput, match=r"data.path: .*train.parquet cannot be read as parquet.*Get the file again"):
        load_dataset(config)
    file.unlink()
    with pytest.raises(InvalidInput, match=r"has no train.parquet"):
        load_dataset(config)


@pytest.mark.parametrize(
    ("rows", "labels", "message"),
    [
        ([b"RIFF????"], [0, 1], "train.parquet: the image in row 1 cannot be decoded"),
        ([encoded(random_images(1)[0], "PNG")[:60]], [0, 1], "the image in row 1 cannot be decoded"),
        ([None], [0, 1], "row 1 has no img.bytes"),
        ([random_images(1)[0]], [0, None], "row 1 has no label"),
        ([random_images(1, size=9)[0]], [0, 1], "row 1 is 9×9 pixels, the first image is 8×8"),
        ([random_images(1)[0]], [0, -1], "has the label -1 among its training samples"),
        ([encoded(np.zeros((8, 8), np.uint16), "PNG")], [0, 1], "row 1 has more than 8 bits"),
    ],
)
def test_damaged_rows(tmp_path, write_parquet, rows, labels, message) -> None:
    for split in ("train", "test"):
        write_parquet(tmp_path / f"{split}.parquet", [*random_images(1), *rows], labels)
    with pytest.raises(InvalidInput, match=message):
        load_dataset(DataConfig(name="cifar10", path=str(tmp_path)))


def test_bad_image_folders(image_folder) -> None:
    config = DataConfig(name="images", path=str(image_folder))
    (image_folder / "test" / "dogs").mkdir()
    with pytest.raises(InvalidInput, match=r"'test/dogs' is unknown. Did you mean 'test/dog'"):
        load_dataset(config)
    (image_folder / "test" / "dogs").rmdir()
    (image_folder / "train" / "eel").mkdir()
    with pytest.raises(InvalidInput, match=r"class folder .*eel has no images"):
        load_dataset(config)
    (image_folder / "train" / "eel" / "0.png").write_bytes(b"no picture")
    with pytest.raises(InvalidInput, match=r"eel/0.png cannot be decoded"):
        load_dataset(config)


def test_samples_that_do_not_belong_together() -> None:
    good = Samples(torch.zeros(2, 3), torch.tensor([0, 1]))
    with pytest.raises(InvalidInput, match=r"inputs of shape \(2, 3\) and labels of shape \(3,\)"):
        Samples(torch.zeros(2, 3), torch.tensor([0, 1, 1]))
    with pytest.raises(InvalidInput, match=r"labels of torch.float32"):
        Samples(torch.zeros(2, 3), torch.zeros(2))
    with pytest.raises(InvalidInput, match=r"trains on .* \(3,\) and tests on .* \(4,\)"):
        Dataset(good, Samples(torch.zeros(2, 4), torch.tensor([0, 1])), ("a", "b"))
    with pytest.raises(InvalidInput, match=r"label 1 among its training samples, outside of its own class names"):
        Dataset(good, good, ("a",))


def test_a_model_with_too_few_classes() -> None:
    dataset = load_dataset(DataConfig())
    dataset.check_classes(10)
    with pytest.raises(InvalidInput, match=r"label 9 .* the model's outputs \(0 … 4\).* needs 10 classes"):
        dataset.check_classes(5)


def test_normalisation_is_exact_to_float_precision() -> None:
    pixels = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 3, 16, 16)
    kept = HUB["cifar10"].normalisation
    expected = (pixels.double() / 255 - torch.tensor(kept.mean).view(3, 1, 1)) / torch.tensor(kept.std).view(3, 1, 1)
    torch.testing.assert_close(kept(pixels).double(), expected, rtol=1e-5, atol=1e-6)
    assert kept(pixels).dtype == torch.float32


def test_one_flat_colour_can_be_normalised() -> None:
    flat = Samples(torch.full((2, 1, 2, 2), 51, dtype=torch.uint8), torch.tensor([0, 1]))
    normalisation = measured_normalisation(flat)
    assert normalisation is not None
    assert normalisation(flat.inputs).abs().max() < 1e-5
    assert isinstance(normalisation, Normalisation)


PIXELS = {  # sha256 of all rows, (H, W, C) uint8; of CIFAR-100 with the first 250 training images of each class
    ("cifar10", 50_000): "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a",
    ("cifar10", 10_000): "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04",
    ("cifar100", 25_000): "736be6dd78094f9707be4b2005bcc7bf4dcfe77f5e10f8f3902324fa1c1395e1",
    ("cifar100", 10_000): "4cb8e5d9309da489bf6b19cc10cd96c3ae6f8daf225380b605aaee4c0d6aee19",
}


@pytest.mark.parametrize(
    ("name", "classes"), [("cifar10", ("airplane", "automobile")), ("cifar100", ("apple", "aquarium_fish"))]
)
def test_the_real_cifar_pixel_by_pixel(name, classes, monkeypatch) -> None:
    if not (REAL / name / "train.parquet").exists():
        pytest.skip(f"ADAPTSFL_DATA names no folder with {name}/train.parquet")
    monkeypatch.setenv("ADAPTSFL_DATA", str(REAL))
    dataset = load_dataset(DataConfig(name=name))
    assert dataset.classes[:2] == classes
    for samples in (dataset.train, dataset.test):
        pixels = hashlib.sha256(samples.inputs.permute(0, 2, 3, 1).contiguous().numpy().tobytes()).hexdigest()
        assert pixels == PIXELS.get((name, len(samples)), pixels)
        assert len(set(np.bincount(samples.labels.numpy()).tolist())) == 1  # balanced
    measured, kept = measured_normalisation(dataset.train), HUB[name].normalisation
    assert measured is not None
    assert measured.mean == pytest.approx(kept.mean, abs=1e-3)  # half of CIFAR-100 differs a little from all of it
    assert measured.std == pytest.approx(kept.std, abs=1e-3)
