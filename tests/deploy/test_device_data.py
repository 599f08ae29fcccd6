"""The samples of one device: its part of the recipe's dataset, and nothing else of it."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from adaptsfl.config import load_recipe
from adaptsfl.data import load_dataset, prepare
from adaptsfl.data.samples import Samples
from adaptsfl.deploy.parties.device.data import load_device_data
from adaptsfl.deploy.terms import Terms
from pictures import encoded, random_images

REAL = Path(os.environ.get("ADAPTSFL_DATA", "absent")).resolve()
RECIPE = """
name = "shared out"
[model]
name = "vgg16"
[training]
batch_size = 4
[data]
name = "cifar10"
augmentation = "crop-flip"
[data.partition]
kind = "dirichlet"
[fleet]
devices = 5
[run]
seed = 3
rounds = 1
test_samples = 17
"""
DEVICES = range(5)

MEASURE = """
import sys
from pathlib import Path

import adaptsfl.data.hub  # whatever reading takes beside samples is there before
from adaptsfl.config import load_recipe
from adaptsfl.deploy.parties.device.data import load_device_data
from adaptsfl.deploy.terms import Terms

def kib(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))

terms = Terms.of(load_recipe(Path(sys.argv[1]), ["fleet.devices=20"]))
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
before = kib("VmRSS")
data = load_device_data(terms, 3, None, 10)
print(data.samples, (kib("VmHWM") - before) // 1024)
"""


@pytest.fixture
def terms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Terms:
    """A run with 120 + 20 images."""
    for split, count in (("train", 120), ("test", 20)):
        content = [{"bytes": encoded(image)} for image in random_images(count, seed=count)]
        table = pa.table({"img": content, "label": pa.array([k % 10 for k in range(count)], pa.int64())})
        (tmp_path / "cifar10").mkdir(exist_ok=True)
        pq.write_table(table, tmp_path / "cifar10" / f"{split}.parquet", row_group_size=50)
    monkeypatch.setenv("ADAPTSFL_DATA", str(tmp_path))
    monkeypatch.setenv("ADAPTSFL_CACHE", str(tmp_path / "cache"))
    return terms_in(tmp_path)


def terms_in(folder: Path) -> Terms:
    (folder / "recipe.toml").write_text(RECIPE)
    return Terms.of(load_recipe(folder / "recipe.toml"))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many samples were put into memory together, each time."""
    counts: list[int] = []
    check: Callable[[Samples], None] = Samples.__post_init__

    def counting(samples: Samples) -> None:
        counts.append(len(samples.inputs))
        check(samples)

    monkeypatch.setattr(Samples, "__post_init__", counting)
    return counts


@pytest.mark.parametrize("cached", [False, True])
def test_no_samples_but_its_own_are_ever_in_memory(cached: bool, terms: Terms, made: list[int]) -> None:
    assert terms.recipe.data is not None
    if cached:
        load_dataset(terms.recipe.data)
    made.clear()
    data = load_device_data(terms, 3, None, 10)
    assert made == [data.samples, 3]
    assert data.samples < 60
    for samples in (data.dataset.train, data.dataset.test):
        assert samples.inputs.untyped_storage().nbytes() == samples.inputs.nbytes
        assert samples.labels.untyped_storage().nbytes() == samples.labels.nbytes


def test_mini_batches_are_those_of_a_simulation_bit_by_bit(terms: Terms) -> None:
    assert terms.recipe.data is not None
    simulated = prepare(terms.recipe.data, devices=5, batch_size=4)
    for device in DEVICES:
        data = load_device_data(terms, device, None, 10)
        for round_ in (1, 2, 40):
            inputs, labels = data.at(round_)
            expected = simulated.batches.at(round_ - 1, [device])
            assert inputs.equal(expected.inputs)
            assert labels.equal(expected.labels)


def test_the_first_test_samples_are_dealt_out(terms: Terms) -> None:
    """17 of 20, one after the other to 5 devices."""
    assert terms.recipe.data is not None
    whole = load_dataset(terms.recipe.data).test
    for device in DEVICES:
        own = load_device_data(terms, device, None, 10).dataset.test
        rows = torch.arange(17)[device::5]
        assert own.inputs.equal(whole.inputs[rows])
        assert own.labels.equal(whole.labels[rows])


@pytest.mark.parametrize("cached", [False, True])
def test_a_device_takes_the_memory_of_its_part(cached: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CIFAR-10 is 184 MB; a twentieth of it 9 MB. Without a cache there are Arrow and one row group beside it."""
    if not sys.platform.startswith("linux") or not (REAL / "cifar10" / "train.parquet").exists():
        pytest.skip("no Linux, or ADAPTSFL_DATA names no folder with cifar10/train.parquet")
    monkeypatch.setenv("ADAPTSFL_DATA", str(REAL))
    monkeypatch.setenv("ADAPTSFL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    terms = terms_in(tmp_path)
    if cached:
        assert terms.recipe.data is not None
        load_dataset(terms.recipe.data)
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "recipe.toml")]
    measured = subprocess.run(command, capture_output=True, text=True, check=True)
    samples, peak_mb = map(int, measured.stdout.split())
    assert samples < 6000
    assert peak_mb < (60 if cached else 120)
