"""What is learned is trained once: steps are looked up, trained on from checkpoints, and never mixed up."""

import os
from pathlib import Path

import pytest
import torch

import warm
from adaptsfl.errors import InvalidInput
from adaptsfl.simulation.backend import SimulatedBackend
from adaptsfl.simulation.store import Store
from adaptsfl.simulation.world import World
from adaptsfl.training import Engine
from simulation.beside import LONG, add_steps, learned
from simulation.tiny import learning, step, world

STEPS = [
    step(2, 2, 2),
    step(3, 3, 4, measure=True),
    step(2, 2, 1, present=((0, 2, 3), (2, 3))),
    step(2, 1, 3, measure=True),
    step(4, 2, 3, ((3, 4),), final=True),
    step(3, None, 2),
]


@pytest.fixture(scope="module")
def here() -> World:
    return world(run={"evaluate_every": 3})


@pytest.fixture(scope="module")
def with_dropout() -> World:
    return world(model={"options": {"width": 0.25, "dropout": 0.5}})


@pytest.fixture(scope="module")
def whole(here: World) -> SimulatedBackend:
    """All steps in one go."""
    trajectory = learning(here, "engine", Store())
    learned_by(trajectory)
    return trajectory


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many devices took part in every round that an engine trained."""
    counted: list[int] = []
    original = Engine.round

    def counting(self, batches, present=None):
        counted.append(len(batches))
        return original(self, batches, present)

    monkeypatch.setattr(Engine, "round", counting)
    return counted


def learned_by(trajectory: SimulatedBackend, steps=STEPS) -> list[str]:
    return [repr(trajectory.learn(one)) for one in steps]


def outcome(trajectory: SimulatedBackend) -> list[str]:
    """What the steps gave, of a trajectory that trained all of them."""
    return [repr(learned) for learned in trajectory.store.known.values()]


def equal_states(a: SimulatedBackend, b: SimulatedBackend) -> bool:
    first, second = a.state(), b.state()
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def test_a_step_is_trained_once(here: World, trained: list[int]) -> None:
    """16 rounds, two of them with three devices and with two; the second run through looks everything up."""
    store = Store()
    first, second = (learning(here, "engine", store) for _ in range(2))
    expected = learned_by(first)
    assert trained == [4] * 5 + [3, 2] + [4] * 9
    assert learned_by(second) == expected
    assert len(trained) == 16
    assert second.round == first.round == 16
    assert second.key == first.key
    assert equal_states(first, second)  # for this the second had to train


def test_evaluations_are_at_their_rounds(here: World) -> None:
    """Every third round, and after the last round of the step that asks for it: round 13."""
    trajectory = learning(here, "engine", Store())
    rounds = [[t for t, _, _ in trajectory.learn(step).evaluations] for step in STEPS]
    assert rounds == [[], [3], [6], [9], [12, 13], [15]]


def test_trajectories_are_shared_until_decisions_differ(here: World, trained: list[int]) -> None:
    """A run that shares two steps (5 rounds) and then goes another way trains these anew, and gets its own weights."""
    store = Store()
    learned_by(learning(here, "engine", store))
    trained.clear()
    other = [*STEPS[:2], step(2, 2, 3)]
    parted, alone = learning(here, "engine", store), learning(here, "engine", Store())
    found = learned_by(parted, other)
    assert len(trained) == 7
    assert found == learned_by(alone, other)
    assert equal_states(parted, alone)


@pytest.mark.parametrize(
    "change",
    [
        {"training": {"learning_rate": 0.06}},
        {"training": {"weight_decay": 0.01}},
        {"training": {"common_learning_rate": 0.01}},
        {"data": {"weights": "size"}},
        {"data": {"seed": 5}},
        {"model": {"options": {"width": 0.5}}},
        {"fleet": {"devices": 5}},
        {"run": {"test_samples": 30}},
        {"run": {"evaluate_every": 5}},
    ],
    ids=str,
)
def test_what_changes_learning_changes_the_name(change: dict) -> None:
    assert world(**change).learning_identity != world().learning_identity


def test_what_does_not_change_learning_keeps_the_name() -> None:
    changed = world(
        fleet={"base": "paper", "seed": 3},
        run={"rounds": 99, "targets": [0.5], "checkpoint_every": 1},
        adapt={"measure_every": 9},
        planner={"max_interval": 3},
        faults={"participation": 0.5},
    )
    assert changed.learning_identity == world().learning_identity
    assert world(seed=1).learning_identity != world().learning_identity


def test_trainers_do_not_share(here: World) -> None:
    store = Store()
    block = step(2, 1, 1)
    keys = set()
    for trainer, divergence in (("engine", False), ("engine", True), ("centralized", False), ("turns", False)):
        trajectory = learning(here, trainer, store, divergence=divergence)
        trajectory.learn(block)
        keys.add(trajectory.key)
    assert len(keys) == 4


class Stop(Exception):
    """What breaks a run off."""


def interrupted(here: World, folder: Path, after: int) -> None:
    """Run until so many rounds were trained, saving on the way out as an experiment does."""

    def on_round(round_: int, _loss: float) -> None:
        if round_ == after:
            raise Stop

    trajectory = learning(here, "engine", Store(folder / "steps.jsonl"), folder=folder, on_round=on_round)
    try:
        learned_by(trajectory)
    except Stop:
        trajectory.save()


@pytest.mark.parametrize("after", [1, 2, 4, 5, 7, 8, 11, 13, 14])
def test_going_on_after_any_round(here: World, whole: SimulatedBackend, tmp_path: Path, after: int) -> None:
    """Broken off at the end of a step or the middle of a step, which is then taken again from its beginning."""
    interrupted(here, tmp_path, after)
    again = learning(here, "engine", Store(tmp_path / "steps.jsonl"), folder=tmp_path)
    assert learned_by(again) == outcome(whole)
    assert equal_states(again, whole)


def test_dropout_draws_the_same_after_an_interruption(with_dropout: World, tmp_path: Path) -> None:
    whole = learning(with_dropout, "engine", Store())
    expected = learned_by(whole)
    interrupted(with_dropout, tmp_path, 9)
    torch.rand(3)  # whatever else this process drew
    again = learning(with_dropout, "engine", Store(tmp_path / "steps.jsonl"), folder=tmp_path)
    assert learned_by(again) == expected
    assert equal_states(again, whole)


@pytest.mark.parametrize("damage", ["gone", "tensors", "manifest", "another run's"])
def test_a_checkpoint_is_only_a_shortcut(here: World, whole: SimulatedBackend, tmp_path: Path, damage: str) -> None:
    interrupted(here, tmp_path, 9)
    (tensors,) = tmp_path.glob("checkpoint-*.safetensors")
    manifest = tmp_path / "checkpoint.json"
    if damage == "gone":
        manifest.unlink()
    elif damage == "tensors":
        tensors.write_bytes(tensors.read_bytes()[:-9])
    elif damage == "manifest":
        manifest.write_text(manifest.read_text()[:-9])
    else:
        other = learning(here, "engine", Store(), folder=tmp_path)
        other.learn(step(4, 2, 5))
        other.save()
    again = learning(here, "engine", Store(tmp_path / "steps.jsonl"), folder=tmp_path)
    assert learned_by(again) == outcome(whole)
    assert equal_states(again, whole)


@pytest.mark.parametrize("line", [0, 3, 5])
def test_a_torn_line_is_learned_again(here: World, tmp_path: Path, trained: list[int], line: int) -> None:
    """Any line of the file, also with bytes that are no text; all the others are still looked up."""
    file = tmp_path / "steps.jsonl"
    whole = learning(here, "engine", Store(file))
    expected = learned_by(whole)
    lines = file.read_bytes().splitlines(keepends=True)
    torn = lines[line][: len(lines[line]) // 2]
    last = line == len(lines) - 1
    lines[line] = torn if last else torn + b"\xff\n"
    file.write_bytes(b"".join(lines))
    again = learning(here, "engine", Store(file))
    assert learned_by(again) == expected
    assert equal_states(again, whole)
    trained.clear()
    third = learning(here, "engine", Store(file))
    assert learned_by(third) == expected
    assert trained == []  # what was learned again was written to a line of its own


def test_divergence_survives_a_checkpoint(here: World, tmp_path: Path) -> None:
    """Layer 2 is averaged every 4 rounds, steps have 2: every other step reports what was measured before it."""
    steps = [step(2, 2, 2, ((2, 4),)) for _ in range(5)]
    whole = learning(here, "engine", Store(), divergence=True)
    expected = learned_by(whole, steps)
    assert all("divergence=()" not in text for text in expected)
    file = tmp_path / "steps.jsonl"
    first = learning(here, "engine", Store(file), folder=tmp_path, divergence=True)
    learned_by(first, steps[:4])
    first.save()
    again = learning(here, "engine", Store(file), folder=tmp_path, divergence=True)
    assert learned_by(again, steps) == expected


def test_a_batch_of_one_cannot_be_measured() -> None:
    lone = world(training={"batch_size": 1})
    trajectory = learning(lone, "engine", Store())
    with pytest.raises(InvalidInput, match=r"raise training\.batch_size"):
        trajectory.learn(step(2, 2, 2, measure=True))


def tokens(count: int = 64) -> tuple[list, list]:
    """Sequences of 8 tokens that count up by one, and what follows every token."""
    rows = [(torch.arange(k, k + 8) % 11, torch.arange(k + 1, k + 9) % 11) for k in range(count)]
    return rows, rows[:20]


def test_sequences_are_trained_and_evaluated() -> None:
    """Accuracy and loss are means over tokens: before training a loss near log 11 = 2.4, and accuracies are k/160."""
    language = world(
        model={"name": "gpt", "options": {"vocabulary": 11, "width": 0.125, "depth": 1, "context": 8}},
        data={"name": "simulation.test_backend:tokens", "partition": {"kind": "iid"}},
        run={"test_samples": None},
    )
    accuracy, loss = language.evaluate(language.model.module.state_dict())
    assert loss == pytest.approx(2.4, abs=0.3)
    assert accuracy * 160 == pytest.approx(round(accuracy * 160))
    trajectory = learning(language, "engine", Store())
    learned = trajectory.learn(step(8, 4, 2, measure=True))
    assert learned.losses[-1] < learned.losses[0]
    ((_, _, after),) = learned.evaluations[-1:]
    assert after < loss


def test_another_model_under_the_same_name_has_another_name() -> None:
    """A factory that was changed, or a partition whose files were, must not find what was learned before."""
    first = world()
    changed = world()
    with torch.no_grad():
        next(changed.model.module.parameters()).add_(1)
    other = world()
    other.data.parts[0][[0, 1]] = other.data.parts[0][[1, 0]]
    assert len({each.learning_identity for each in (first, changed, other)}) == 3


def test_a_line_that_was_changed_is_not_believed(tmp_path: Path, here: World) -> None:
    file = tmp_path / "steps.jsonl"
    learned = learning(here, "engine", Store(file)).learn(step(2, 1, 1))
    assert list(Store(file).known.values()) == [learned]
    file.write_text(file.read_text().replace('"losses": [', '"losses": [1'))
    assert Store(file).known == {}


def test_processes_may_add_to_one_file_at_the_same_time(tmp_path: Path) -> None:
    """Lines of more than 8 kB, which a buffered file would write in pieces."""
    warm.start_parent()
    file, together = tmp_path / "new" / "steps.jsonl", warm.CONTEXT.Barrier(3)
    processes = [warm.CONTEXT.Process(target=add_steps, args=(file, name, 50, together)) for name in "abc"]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    lines = [line for line in file.read_bytes().splitlines() if line]
    assert len(lines) == 150
    assert all(len(line) > 8192 for line in lines)
    assert Store(file).known == {f"{name} {k}": learned(k) for name in "abc" for k in range(50)}


def test_a_step_is_appended_by_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    original = os.write

    def write(handle: int, content: bytes) -> int:
        written.append(len(content))
        return original(handle, content)

    monkeypatch.setattr(os, "write", write)
    Store(tmp_path / "steps.jsonl").add("a", learned(1))
    assert written == [(tmp_path / "steps.jsonl").stat().st_size]


def test_a_full_disk_is_an_error_and_costs_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, original = Store(tmp_path / "steps.jsonl"), os.write
    store.add("a", learned(1))
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda handle, content: original(handle, content[:100]))
        with pytest.raises(OSError, match="No space left"):
            store.add("b", learned(2))
    store.add("c", learned(3))
    assert Store(tmp_path / "steps.jsonl").known == {"a": learned(1), "c": learned(3)}


def test_steps_that_others_add_are_found(tmp_path: Path) -> None:
    """Also one that is read in the middle of being written, and those after a line that was torn for good."""
    file = tmp_path / "steps.jsonl"
    ours, theirs = Store(file), Store(file)
    assert ours.find("a") is None
    theirs.add("a", learned(1))
    assert ours.find("a") == learned(1)
    theirs.add("b", learned(2))
    whole = file.read_bytes()
    file.write_bytes(whole[:-LONG])
    assert ours.find("b") is None
    file.write_bytes(whole)
    assert ours.find("b") == learned(2)
    file.write_bytes(whole + b'{"key": "c", "lear')
    ours.add("d", learned(4))
    theirs.add("e", learned(5))
    assert [ours.find(key) for key in "abcde"] == [learned(1), learned(2), None, learned(4), learned(5)]
    assert Store(file).known.keys() == set("abde")


def test_a_step_that_another_process_took_is_not_trained(here: World, tmp_path: Path, trained: list[int]) -> None:
    file = tmp_path / "steps.jsonl"
    first, second = (learning(here, "engine", Store(file)) for _ in range(2))
    expected = learned_by(first)
    trained.clear()
    assert learned_by(second) == expected
    assert trained == []
