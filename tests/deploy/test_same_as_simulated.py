"""A deployment without faults learns what the simulator learns, up to rounding."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from adaptsfl.config import load_recipe
from adaptsfl.costs import WIRE_DTYPES
from adaptsfl.simulation.experiment import Experiment
from deploy.deployed import RECIPE, deployment, finish, model_of, record_of

TOLERANCE = 2e-5  # of float32 weights after 20 rounds: sums in another order


def simulated(folder: Path, *changes: str) -> tuple[dict[str, torch.Tensor], list[int], list[float]]:
    folder.mkdir(exist_ok=True)
    file = folder / "simulated.toml"
    file.write_text(RECIPE)
    experiment = Experiment(load_recipe(file, changes), folder / "simulated")
    (run,) = experiment.execute()
    model = load_file(run.folder / "model.safetensors")
    return model, [block.deepest for block in run.blocks], [block.loss for block in run.blocks]


@pytest.mark.parametrize(
    "changes",
    [
        (),
        ('training.optimizer="momentum"', "training.learning_rate=0.02", 'data.weights="size"'),
        ('model.options={width=0.25,norm="batch"}',),
        ('training.optimizer="adam"', "training.learning_rate=0.001"),
        ("training.common_learning_rate=0.1", 'training.schedule={kind="cosine",rounds=18,floor=0.1,warmup_rounds=3}'),
    ],
    ids=["sgd", "momentum", "batch-norm", "adam", "schedule"],
)
def test_weights_are_those_of_the_simulator(
    changes: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with deployment(tmp_path, monkeypatch, *changes) as (fleet, talk):
        finish(fleet, talk)
    monkeypatch.chdir(Path(__file__).parent)
    expected, deepest, losses = simulated(tmp_path, *changes)
    found, record = model_of(fleet), record_of(fleet)
    assert [block["deepest"] for block in record] == deepest == [4, 2, 4, 4, 4]
    assert [block["cuts"] for block in record[:3]] == [[1, 2, 3, 4], [2, 2, 2, 2], [3, 1, 4, 2]]
    assert [block["loss"] for block in record] == pytest.approx(losses, abs=1e-4)
    assert_equal(found, expected)


@pytest.mark.parametrize("wire_dtype", ["float16", "bfloat16", "int8", "int4"])
def test_what_is_rounded_on_the_wire_is_rounded_alike_in_the_simulator(
    wire_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rounds with a cut of its own for every device, and weights of their own.

    In longer runs the smallest difference makes some number be rounded the other way, and grows from there to the size
    of the rounding itself: float32 sums in another order are enough.
    """
    changes = (f'model.wire_dtype="{wire_dtype}"', 'data.weights="size"', "run.rounds=3")
    with deployment(tmp_path, monkeypatch, *changes) as (fleet, talk):
        finish(fleet, talk)
    monkeypatch.chdir(Path(__file__).parent)
    expected, _, losses = simulated(tmp_path / "alike", *changes)
    exact, _, _ = simulated(tmp_path / "exact", *changes[1:])
    assert [block["loss"] for block in record_of(fleet)] == pytest.approx(losses, abs=1e-4)
    assert_equal(model_of(fleet), expected)
    assert max(float((exact[name] - tensor).abs().max()) for name, tensor in expected.items()) > 2 * TOLERANCE


SENT = 'run.options={{"scripted_policy:Scripted"={{plans=[31234,22222,53142],sent={sent}}}}}'


@pytest.mark.parametrize(
    ("sent", "rounds"),
    [
        ([40], 20),
        ([83], 3),
        ([44], 3),
        ([20, 40, 10, 80], 20),
        ([13, 41], 5),
    ],
    ids=["parts", "parts in int8", "parts in int4", "other parts in every block", "other types in every block"],
)
def test_parts_and_types_of_a_plan_are_those_of_the_simulator(
    sent: list[int], rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the simulator parts do not change what is learned, so these are sums in yet another order."""
    changes = (SENT.format(sent=sent), 'data.weights="size"', f"run.rounds={rounds}")
    with deployment(tmp_path, monkeypatch, *changes) as (fleet, talk):
        finish(fleet, talk)
    monkeypatch.chdir(Path(__file__).parent)
    expected, _, losses = simulated(tmp_path, *changes)
    record = record_of(fleet)
    assert [block["loss"] for block in record] == pytest.approx(losses, abs=1e-4)
    assert_equal(model_of(fleet), expected)
    found = [10 * block["micro_batches"] + WIRE_DTYPES.index(block["wire_dtype"]) for block in record]
    assert found == [sent[min(k, len(sent) - 1)] for k in range(len(found))]


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, atol=TOLERANCE, rtol=TOLERANCE, msg=lambda m, n=name: f"{n}: {m}"
        )
