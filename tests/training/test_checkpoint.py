"""A run that goes on from its checkpoint is the run that was never stopped, and no accident costs the checkpoint."""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from adaptsfl.decisions import Decision
from adaptsfl.errors import InvalidInput, NotWritten, TrainingDiverged
from adaptsfl.models import SplitModel, split
from adaptsfl.training import (
    Engine,
    EngineState,
    OptimizerSettings,
    Sequential,
    has_checkpoint,
    load_checkpoint,
    save_checkpoint,
    train,
)
from training.cases import make_batches

SHAPE = (1, 6, 6)
PLAN, NEXT = Decision((1, 3, 2, 2), 3, {2: 6}), Decision((2, 1, 4, 1), 2)
IDENTITY = {"recipe": "5f3a", "layers": ["a", "b", "c"], "settings": {"rate": 0.01}}
ROUNDS = 8


def make_model() -> SplitModel:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.Dropout(0.3),
        nn.Conv2d(4, 4, 3),
        nn.Sequential(nn.ReLU(), nn.Flatten()),
        nn.Linear(16, 8),
        nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.2)),
        nn.Linear(8, 10),
    )
    return split(net, torch.zeros(2, *SHAPE))


def advance(engine: Engine, batches, rounds: range) -> None:
    for t in rounds:
        if t == 4:
            engine.change_plan(NEXT)
        present = (0, 1, 2, 3) if t % 3 == 0 else (1, 3)
        engine.round([batches(t)[k] for k in present], present)


def assert_same(found: EngineState, expected: EngineState) -> None:
    for name in ("plan", "round", "planned_at", "ages", "steps", "present"):
        assert getattr(found, name) == getattr(expected, name), name
    for mine, theirs in zip(found.tensors, expected.tensors, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize("optimizer", [("momentum", "average"), ("adam", "average"), ("adam", "keep")], ids=str)
@pytest.mark.parametrize("stop", range(ROUNDS + 1))
def test_a_resumed_run_equals_one_that_never_stopped(stop: int, optimizer: tuple[str, Any], tmp_path: Path) -> None:
    """With dropout too, though the program does other things with random numbers in between."""
    model = make_model()
    name, rule = optimizer
    batches, settings = make_batches(model, SHAPE), OptimizerSettings(name, 0.01, at_averaging=rule)
    torch.manual_seed(3)
    whole = Engine(model, PLAN, settings)
    advance(whole, batches, range(1, stop + 1))
    save_checkpoint(tmp_path, whole.snapshot(), extra={"clock_s": 0.1 + 0.2}, identity=IDENTITY)
    advance(whole, batches, range(stop + 1, ROUNDS + 1))
    torch.manual_seed(99)
    other = Engine(model, Decision((1,) * 4, 1), settings)
    checkpoint = load_checkpoint(tmp_path, identity=IDENTITY)
    checkpoint.resume(other)
    assert checkpoint.extra == {"clock_s": 0.1 + 0.2}
    assert other.schedule.round == stop
    advance(other, batches, range(stop + 1, ROUNDS + 1))
    assert_same(other.snapshot(), whole.snapshot())


def test_dropout_would_show_another_random_state(tmp_path: Path) -> None:
    """So the test above can fail: with the weights alone, the next round is another."""
    model = make_model()
    batches, engine = make_batches(model, SHAPE), Engine(make_model(), PLAN, OptimizerSettings())
    save_checkpoint(tmp_path, engine.snapshot(), extra={}, identity={})
    engine.round(batches(1))
    other = Engine(model, PLAN, OptimizerSettings())
    other.restore(load_checkpoint(tmp_path, identity={}).state)
    torch.manual_seed(99)
    other.round(batches(1))
    assert not torch.equal(other.state()["3.weight"], engine.state()["3.weight"])


@pytest.mark.parametrize("relayed", [False, True])
@pytest.mark.parametrize("stop", [1, 2, 3])
def test_devices_that_take_turns_go_on(stop: int, relayed: bool, tmp_path: Path) -> None:
    model = make_model()
    batches = make_batches(model, SHAPE)
    torch.manual_seed(3)
    whole, other = (
        Sequential(model, 2, 4, OptimizerSettings("adam", 0.01), interval=2, relayed=relayed) for _ in range(2)
    )
    for t in range(1, 6):
        whole.round(batches(t))
        if t == stop:
            save_checkpoint(tmp_path, whole.snapshot(), extra={}, identity=IDENTITY)
    load_checkpoint(tmp_path, identity=IDENTITY).resume(other)
    for t in range(stop + 1, 6):
        other.round(batches(t))
    assert_same(other.snapshot(), whole.snapshot())


def test_another_way_of_taking_turns_is_refused() -> None:
    model = make_model()
    state = Sequential(model, 2, 4, OptimizerSettings(), interval=2).snapshot()
    with pytest.raises(InvalidInput, match=r"state.plan: is Decision\(cuts=\(2, 2, 2, 2\), interval=2"):
        Sequential(model, 2, 4, OptimizerSettings(), interval=3).restore(state)


def test_the_caller_s_own_data_comes_back_exactly(tmp_path: Path) -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    extra = {"a": [0.1, 1e-308, math.pi, -math.inf], "b": {"c": None, "d": True, "e": 2**70}, "text": "γ ‖w‖"}
    own = {"matrix": weight.T, "same memory": weight, "count": torch.tensor(3)}
    state = Engine(make_model(), PLAN, OptimizerSettings()).snapshot()
    save_checkpoint(tmp_path, state, extra={**extra, "nan": math.nan, "pair": (1, 2)}, identity={}, tensors=own)
    found = load_checkpoint(tmp_path, identity={})
    assert {key: found.extra[key] for key in extra} == extra
    assert math.isnan(found.extra["nan"])
    assert found.extra["pair"] == [1, 2]
    assert found.tensors.keys() == own.keys()
    assert all(torch.equal(found.tensors[key], own[key]) for key in own)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"estimates": {"G": [torch.zeros(2)]}}, r"extra.estimates.G\[0\]: is a Tensor. Give numbers, texts"),
        ({"rounds": {1: 2}}, r"extra.rounds: has the key 1. Give texts as keys"),
    ],
)
def test_what_json_cannot_hold_is_refused(extra: dict[str, Any], message: str, tmp_path: Path) -> None:
    state = Engine(make_model(), PLAN, OptimizerSettings()).snapshot()
    with pytest.raises(InvalidInput, match=message):
        save_checkpoint(tmp_path, state, extra=extra, identity={})
    assert not has_checkpoint(tmp_path)


@pytest.fixture
def two_states() -> tuple[EngineState, EngineState]:
    model = make_model()
    engine, batches = Engine(model, PLAN, OptimizerSettings()), make_batches(model, SHAPE)
    engine.round(batches(1))
    older = engine.snapshot()
    engine.round(batches(2))
    return older, engine.snapshot()


STEPS = ((os, "fsync"), (os, "replace"), (Path, "unlink"), (Path, "write_text"))


def test_a_program_killed_at_any_moment_leaves_a_sound_checkpoint(two_states, tmp_path: Path, monkeypatch) -> None:
    """Around every step that touches the disk the folder is copied: that is what a kill there would leave."""
    folder, images = tmp_path / "run", []
    older, newer = two_states
    save_checkpoint(folder, older, extra={"round": 1}, identity=IDENTITY)

    def watched(original: Callable[..., Any]) -> Callable[..., Any]:
        def step(*given: Any, **options: Any) -> Any:
            images.append(shutil.copytree(folder, tmp_path / f"before {len(images)}"))
            result = original(*given, **options)
            images.append(shutil.copytree(folder, tmp_path / f"after {len(images)}"))
            return result

        return step

    with monkeypatch.context() as patch:
        for owner, name in STEPS:
            patch.setattr(owner, name, watched(getattr(owner, name)))
        save_checkpoint(folder, newer, extra={"round": 2}, identity=IDENTITY)
    rounds = []
    for image in images:
        found = load_checkpoint(image, identity=IDENTITY)
        rounds.append(found.extra["round"])
        assert_same(found.state, (older, newer)[rounds[-1] - 1])
        save_checkpoint(image, newer, extra={}, identity=IDENTITY)  # and a program that goes on there leaves no rubbish
        assert len(os.listdir(image)) == 2
    assert rounds == sorted(rounds)
    assert set(rounds) == {1, 2}
    assert len(rounds) >= 16
    assert len(os.listdir(folder)) == 2


@pytest.mark.parametrize("failing", range(7))
def test_a_write_that_fails_keeps_the_older_checkpoint(two_states, tmp_path: Path, monkeypatch, failing: int) -> None:
    """Two files, each written, made safe, renamed and its folder made safe; after the last rename it is the newer."""
    older, newer = two_states
    save_checkpoint(tmp_path, older, extra={}, identity=IDENTITY)
    calls = iter(range(100))

    def full(original: Callable[..., Any]) -> Callable[..., Any]:
        def step(*given: Any, **options: Any) -> Any:
            if next(calls) == failing:
                raise OSError(28, "No space left on device")
            return original(*given, **options)

        return step

    with monkeypatch.context() as patch:
        for owner, name in (*STEPS[:2], STEPS[3]):
            patch.setattr(owner, name, full(getattr(owner, name)))
        with pytest.raises(NotWritten, match=r"written \(No space left on device\). Free some.*older checkpoint is"):
            save_checkpoint(tmp_path, newer, extra={}, identity=IDENTITY)
    assert_same(load_checkpoint(tmp_path, identity=IDENTITY).state, newer if failing == 6 else older)
    assert len(os.listdir(tmp_path)) == 2


def test_a_folder_that_cannot_be_made(two_states, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file where the folder should be")
    with pytest.raises(
        NotWritten, match=r"run: the checkpoint cannot be written .*give a folder that can be written.$"
    ):
        save_checkpoint(tmp_path / "run", two_states[0], extra={}, identity={})


def tensors_of(folder: Path) -> Path:
    (file,) = folder.glob("*.safetensors")
    return file


def truncated(folder: Path) -> None:
    tensors_of(folder).write_bytes(tensors_of(folder).read_bytes()[:-10])


def flipped(folder: Path) -> None:
    content = bytearray(tensors_of(folder).read_bytes())
    content[-9] ^= 4
    tensors_of(folder).write_bytes(content)


def another_safetensors(folder: Path) -> None:
    save_file({"x": torch.zeros(2)}, tensors_of(folder))


def gone(folder: Path) -> None:
    tensors_of(folder).unlink()


def no_json(folder: Path) -> None:
    (folder / "checkpoint.json").write_bytes((folder / "checkpoint.json").read_bytes()[:-7])


def no_text(folder: Path) -> None:
    (folder / "checkpoint.json").write_bytes(b"\xff\xfe\xfa{}")


def edited(folder: Path) -> None:
    text = (folder / "checkpoint.json").read_text()
    (folder / "checkpoint.json").write_text(text.replace('"round": 1', '"round": 3'))


def foreign(folder: Path) -> None:
    (folder / "checkpoint.json").write_text("[1, 2]")


def foreign_object(folder: Path) -> None:
    (folder / "checkpoint.json").write_text('{"epoch": 3}')


def of_the_future(folder: Path) -> None:
    (folder / "checkpoint.json").write_text('{"format": "adaptsfl-checkpoint-7"}')


def incomplete(folder: Path) -> None:
    """Content that nobody wrote, with the checksum that it should have."""
    manifest = json.loads((folder / "checkpoint.json").read_text())
    del manifest["content"]["state"]["ages"]
    manifest["sha256"] = hashlib.sha256(json.dumps(manifest["content"]).encode()).hexdigest()
    (folder / "checkpoint.json").write_text(json.dumps(manifest))


def nothing(folder: Path) -> None:
    (folder / "checkpoint.json").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            truncated,
            r"checkpoint-1-\w+.safetensors: checkpoint: is damaged: its checksum is another. Begin the run anew",
        ),
        (flipped, r"checkpoint-1-\w+.safetensors: checkpoint: is damaged: its checksum is another. Begin the run anew"),
        (another_safetensors, r"safetensors: checkpoint: is damaged: its checksum is another. Begin the run anew"),
        (gone, r"safetensors: checkpoint: is gone, but checkpoint.json names it. Begin the run anew"),
        (no_json, r"checkpoint.json: checkpoint: is damaged: not valid JSON .*Begin the run anew"),
        (no_text, r"checkpoint.json: checkpoint: is damaged: not valid JSON .*Begin the run anew"),
        (edited, r"checkpoint.json: checkpoint: is damaged: its checksum is another. Begin the run anew"),
        (foreign, r"checkpoint.json: checkpoint: is a file of another program. Give the folder of a training run"),
        (foreign_object, r"checkpoint.json: checkpoint: is a file of another program. Give the folder"),
        (of_the_future, r"format: is 'adaptsfl-checkpoint-7', this version reads 'adaptsfl-checkpoint-\d'. Go on with"),
        (incomplete, r"checkpoint: lacks what a checkpoint holds \(KeyError: 'ages'\). Begin the run anew"),
        (nothing, r"checkpoint.json: checkpoint: there is none here. Give the folder of a run that wrote one"),
    ],
)
def test_damage_is_noticed(damage: Callable[[Path], None], message: str, two_states, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, two_states[0], extra={}, identity=IDENTITY)
    load_checkpoint(tmp_path, identity=IDENTITY)
    damage(tmp_path)
    with pytest.raises(InvalidInput, match=message):
        load_checkpoint(tmp_path, identity=IDENTITY)
    save_checkpoint(tmp_path, two_states[1], extra={}, identity=IDENTITY)
    assert load_checkpoint(tmp_path, identity=IDENTITY).state.round == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"recipe": "77"},
            r"identity.recipe: was '5f3a' when the checkpoint was made, is '77' now. Go on with the same",
        ),
        ({"layers": ("a", "x", "c")}, r"identity.layers\[1\]: was 'b' when the checkpoint was made, is 'x' now"),
        ({"layers": ["a"]}, r"identity.layers: was \['a', 'b', 'c'\] when .*, is \['a'\] now"),
        ({"settings": {"rate": 0.02}}, r"identity.settings.rate: was 0.01 when .*, is 0.02 now"),
        ({"settings": {}}, r"identity.settings.rate: was 0.01 when .*, is absent now"),
        ({"seed": 1}, r"identity.seed: was absent when .*, is 1 now"),
    ],
)
def test_another_run_s_checkpoint_is_refused(change: dict[str, Any], message: str, two_states, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, two_states[0], extra={}, identity=IDENTITY)
    load_checkpoint(tmp_path, identity={**IDENTITY, "layers": ("a", "b", "c")})
    with pytest.raises(InvalidInput, match=message):
        load_checkpoint(tmp_path, identity={**IDENTITY, **change})


@pytest.mark.parametrize("fault", ["data", "update"])
def test_a_run_that_diverges_keeps_its_last_good_checkpoint(fault: str, tmp_path: Path) -> None:
    """A bad batch shows in the round's loss; a bad update shows in the next round's only, so weights are looked at."""
    model = make_model()
    sound = make_batches(model, SHAPE)
    engine = Engine(model, PLAN, OptimizerSettings())

    def batches(t: int):
        return [(x * math.nan if fault == "data" and t == 4 else x, y) for x, y in sound(t)]

    def run() -> None:
        for record in train(engine, batches, ROUNDS):
            if fault == "update" and record.round == 4:
                engine.layers[1].parameters[engine.layers[1].trained[0]][:] = math.inf
            save_checkpoint(tmp_path, engine.snapshot(), extra={"round": record.round}, identity={})

    with pytest.raises(TrainingDiverged, match=r"round 4: (the loss of device 0 is nan|.*not finite)"):
        run()
    found = load_checkpoint(tmp_path, identity={})
    assert found.extra["round"] == found.state.round == 3
    assert all(bool(tensor.isfinite().all()) for layer in found.state.tensors for tensor in layer.values())
