"""What happens to real fleets: parties are killed, stopped and cut off, and the run goes on.

A wire between device-1 and a server is held still at a chosen byte, so that faults happen amid a round or amid an
averaging, however fast this machine is. Where nothing is lost for good, the weights are those of the simulator.
"""

import json
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from torch import Tensor

from adaptsfl.config import load_recipe
from adaptsfl.simulation.experiment import Experiment
from deploy import told_time
from deploy.deployed import HERE, PATIENCE_S, RECIPE, Fleets, Talk, deployment, finish, model_of, record_of
from deploy.proxy import Proxy

TOLERANCE = 2e-5
TWO = RECIPE.replace("[31234, 22222, 53142]", "[314, 412, 531]").replace("rounds = 20", "rounds = 14")
FIRST_ROUNDS = [1, 4, 8, 13]
ALL_NEEDED = "deploy.quorum=1.0"
NO_DEADLINE = "deploy.round_deadline_s=100000.0"
PARTS = 'run.options={"scripted_policy:Scripted"={plans=[314,412,531],sent=[40]}}'
ALSO_IN_PARTS = pytest.mark.parametrize("changes", [(ALL_NEEDED,), (ALL_NEEDED, PARTS)], ids=["whole", "in parts"])
# What device-1 is sent, in bytes: some to begin with, and 16 kB of gradients every round.
ROUND = 16_700
SMALL_ROUND = 4_300  # of device-2 at the second cut
AMID_BLOCK_2 = 62_000 + 3 * ROUND - 25_000


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """Return the weights that the simulator learns, without faults."""
    folder = tmp_path_factory.mktemp("simulated")
    (folder / "recipe.toml").write_text(TWO)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        recipe = load_recipe(folder / "recipe.toml", ["fleet.devices=2"])
        (run,) = Experiment(recipe, folder / "run").execute()
    return load_file(run.folder / "model.safetensors")


def assert_undisturbed(fleet: Fleets, expected: dict[str, Tensor], talk: Talk) -> None:
    """Hold weights and record against those of a run without faults."""
    record = record_of(fleet)
    assert [block["first_round"] for block in record] == FIRST_ROUNDS, talk.everything()
    assert [block["block"] for block in record] == [1, 2, 3, 4]
    assert all(block.get("present") is None for block in record), talk.everything()
    found = model_of(fleet)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, atol=TOLERANCE, rtol=TOLERANCE, msg=lambda m, n=name: f"{n}: {m}\n{talk.everything()}"
        )


class Wires:
    """What a test holds in its hands: device-1's wires to both servers."""

    edge: Proxy
    fed: Proxy

    def __call__(self, fleet: Fleets) -> None:
        self.edge, self.fed = Proxy(fleet.edge), Proxy(fleet.fed)
        self.edge.hold("down", AMID_BLOCK_2)
        fleet.options["device-1"] = ["--edge", self.edge.address, "--fed", self.fed.address, "--no-probe-links"]

    def wait_amid_block_2(self, talk: Talk) -> None:
        """Wait until device-1 is amid the gradients of a round of block 2, and everybody waits for it."""
        self.edge.wait_until_held()
        talk.wait_for("edge", "block 2:")
        assert "block 3:" not in talk.of("edge"), "the wire was held too late: adapt AMID_BLOCK_2"


def killed(fleet: Fleets, party: str) -> None:
    """Kill a party as a power cut would, and wait until it is gone."""
    fleet.processes[party].kill()
    fleet.processes[party].wait(PATIENCE_S)


def no_traceback(talk: Talk) -> None:
    assert "Traceback" not in talk.everything(), talk.everything()
    assert "internal error" not in talk.everything(), talk.everything()


@ALSO_IN_PARTS
def test_a_killed_edge_server_goes_on_from_the_last_block(
    expected: dict[str, Tensor], changes: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wires = Wires()
    with deployment(tmp_path, monkeypatch, *changes, devices=2, recipe=TWO, prepare=wires) as (fleet, talk):
        wires.wait_amid_block_2(talk)
        killed(fleet, "edge")
        wires.edge.hold("down", ROUND)
        fleet.start("edge")
        talk.wait_for("edge", "going on after round 3")
        wires.edge.wait_until_held()
        wires.fed.hold("up", 0)
        wires.edge.release()
        wires.fed.wait_until_held()  # device-1 delivers its layers
        killed(fleet, "edge")  # while the block is being closed
        wires.fed.release()
        fleet.start("edge")
        talk.wait_for("edge", "going on after round 3", times=2)
        finish(fleet, talk)
    assert_undisturbed(fleet, expected, talk)
    no_traceback(talk)


@ALSO_IN_PARTS
def test_a_killed_fed_server_goes_on_from_its_last_version(
    expected: dict[str, Tensor], changes: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wires = Wires()
    with deployment(tmp_path, monkeypatch, *changes, devices=2, recipe=TWO, prepare=wires) as (fleet, talk):
        wires.wait_amid_block_2(talk)
        killed(fleet, "fed")  # amid a round
        fleet.start("fed")
        talk.wait_for("fed", "listening", times=2)
        wires.fed.hold("up", 0)
        wires.edge.release()
        wires.fed.wait_until_held()  # device-1 delivers its layers, and device-2 has or will
        killed(fleet, "fed")
        wires.fed.release()
        fleet.start("fed")
        talk.wait_for("fed", "version 3")  # just published
        killed(fleet, "fed")
        fleet.start("fed")
        finish(fleet, talk)
    assert_undisturbed(fleet, expected, talk)
    no_traceback(talk)


@ALSO_IN_PARTS
def test_a_lost_connection_costs_no_round_and_none_is_trained_twice(
    expected: dict[str, Tensor], changes: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wires = Wires()
    with deployment(tmp_path, monkeypatch, *changes, devices=2, recipe=TWO, prepare=wires) as (fleet, talk):
        wires.wait_amid_block_2(talk)  # amid gradients
        wires.edge.cut()
        wires.edge.hold("up", ROUND // 2)  # amid activations, after the handshake
        wires.edge.wait_until_held()
        wires.edge.cut()
        wires.fed.hold("up", 300)  # amid layers
        wires.fed.wait_until_held()
        wires.edge.hold("down", 0)
        wires.fed.cut()
        wires.edge.wait_until_held()  # what was sent up is answered, and the answer does not come through
        wires.edge.cut()
        finish(fleet, talk)
        assert "trying again" in talk.of("device-1")
    assert_undisturbed(fleet, expected, talk)
    no_traceback(talk)


def test_devices_killed_amid_a_round_leave_the_others_training_and_may_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wires = Wires()
    recipe = RECIPE.replace("[31234, 22222, 53142]", "[3142, 9123, 9123]").replace("rounds = 20", "rounds = 21")
    with deployment(tmp_path, monkeypatch, NO_DEADLINE, devices=3, recipe=recipe, prepare=wires) as (fleet, talk):
        wires.wait_amid_block_2(talk)
        killed(fleet, "device-3")
        wires.edge.hold("down", 2 * ROUND)
        wires.edge.wait_until_held()  # two have gone on without the third
        fleet.start("device-3")
        talk.wait_for("device-3", "block 2:", times=2)  # in the same block again
        wires.edge.hold("down", 8 * ROUND)
        wires.edge.wait_until_held()
        talk.wait_for("edge", "block 3:")
        for name in ("device-2", "device-3"):
            killed(fleet, name)
        wires.edge.release()
        talk.wait_for("edge", "waiting for devices: 1 of 2 that are needed")
        for name in ("device-1", "fed"):
            killed(fleet, name)
        wires.edge.hold("down", 25_000)
        for name in ("fed", "device-1"):
            fleet.start(name)
        talk.wait_for("device-1", "block 3:", times=2)
        for name in ("device-2", "device-3"):
            fleet.start(name)
        for name in ("device-2", "device-3"):
            talk.wait_for(name, "block 3:", times=2)
        wires.edge.wait_until_held()  # nothing goes on without device-1
        wires.edge.release()
        finish(fleet, talk)
    record = record_of(fleet)
    assert [block["first_round"] for block in record] == [1, 4, 13]
    rounds = [present for block in record for present in block.get("present") or [[0, 1, 2]] * block["rounds"]]
    assert len(rounds) == 21
    assert all(len(present) >= 2 for present in rounds)
    assert [0, 1] in rounds[3:12], talk.everything()  # while device-3 was away
    assert rounds[11] == rounds[20] == [0, 1, 2], talk.everything()
    assert record[1]["cuts"] == [1, 2, 3]
    assert all(bool(torch.isfinite(tensor).all()) for tensor in model_of(fleet).values())
    assert record[-1]["loss"] < record[0]["loss"]
    no_traceback(talk)


def test_a_straggler_is_left_behind_and_one_that_is_away_at_the_end_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deadlines pass by a signal; between two of them everybody has as much time as this machine needs."""
    wires = Wires()
    recipe = TWO.replace("[314, 412, 531]", "[314, 912, 531]")

    def prepare(fleet: Fleets) -> None:
        wires(fleet)
        wires.second = Proxy(fleet.edge)
        fleet.options["device-2"] = ["--edge", wires.second.address]
        fleet.first["edge"] = told_time.by_signal

    with deployment(tmp_path, monkeypatch, NO_DEADLINE, devices=2, recipe=recipe, prepare=prepare) as (fleet, talk):
        wires.wait_amid_block_2(talk)
        slow = fleet.processes["device-1"]
        slow.send_signal(signal.SIGSTOP)
        wires.second.hold("down", 3 * SMALL_ROUND)  # device-2 takes a few rounds of the block alone, and not all
        fleet.processes["edge"].send_signal(signal.SIGUSR1)
        talk.wait_for("edge", "goes on without device-1")
        wires.second.wait_until_held()
        wires.edge.release()
        wires.edge.hold("up", ROUND + ROUND // 2)  # what it has for a round that is over, and half of the next
        slow.send_signal(signal.SIGCONT)
        wires.edge.wait_until_held()
        wires.fed.hold("up", 300)
        wires.second.release()
        wires.edge.release()
        wires.fed.wait_until_held()  # the block's last round is over, and device-1 amid delivering its layers
        wires.second.refusing = True
        wires.second.cut()
        wires.fed.release()
        talk.wait_for("edge", "waiting for device-2 to hear that the run is over")
        wires.second.refusing = False
        finish(fleet, talk)
        assert "the run is over" in talk.of("device-2")
        assert [process.wait(PATIENCE_S) for process in fleet.processes.values()] == [0, 0, 0, 0]
    record = record_of(fleet)
    assert [block["first_round"] for block in record] == [1, 4, 13]
    assert record[0].get("present") is None
    assert [1] in record[1]["present"], talk.everything()
    assert record[1]["present"][-1] == [0, 1], talk.everything()  # it takes part again
    no_traceback(talk)


@pytest.mark.skipif(sys.platform != "linux", reason="limits of another process can be set on Linux only")
def test_a_full_disk_ends_a_server_with_a_word_and_the_run_goes_on_once_there_is_space(
    expected: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wires = Wires()
    with deployment(tmp_path, monkeypatch, ALL_NEEDED, devices=2, recipe=TWO, prepare=wires) as (fleet, talk):
        wires.wait_amid_block_2(talk)
        resource.prlimit(fleet.processes["fed"].pid, resource.RLIMIT_FSIZE, (1000, 1000))
        wires.edge.release()
        assert fleet.processes["fed"].wait(PATIENCE_S) == 1, talk.everything()
        talk.wait_for("fed", "version-2.safetensors: cannot be written")
        assert sorted(file.name for file in (fleet.folder / "fed").glob("*.safetensors")) == [
            "version-0.safetensors",
            "version-1.safetensors",
        ]
        resource.prlimit(fleet.processes["edge"].pid, resource.RLIMIT_FSIZE, (1000, 1000))
        before = (fleet.folder / "edge" / "edge.safetensors").read_bytes()
        fleet.start("fed")
        assert fleet.processes["edge"].wait(PATIENCE_S) == 1, talk.everything()
        talk.wait_for("edge", "cannot be written")
        assert (fleet.folder / "edge" / "edge.safetensors").read_bytes() == before
        fleet.start("edge")
        finish(fleet, talk)
    assert_undisturbed(fleet, expected, talk)
    no_traceback(talk)


def test_signals_end_every_party_in_order_and_the_same_commands_go_on(
    expected: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wires = Wires()
    signals = {"device-1": signal.SIGTERM, "device-2": signal.SIGINT, "edge": signal.SIGTERM, "fed": signal.SIGINT}
    with deployment(tmp_path, monkeypatch, ALL_NEEDED, devices=2, recipe=TWO, prepare=wires) as (fleet, talk):
        wires.wait_amid_block_2(talk)
        for party, number in signals.items():
            fleet.processes[party].send_signal(number)
        for party in signals:
            assert fleet.processes[party].wait(PATIENCE_S) == 130, talk.everything()
            talk.wait_for(party, "stopped; the same command goes on")
        wires.edge.release()
    # `up` in the same folder takes over, is stopped itself, and is started again.
    command = [sys.executable, "-m", "adaptsfl", "up", str(fleet.recipe), "--devices", "2", "--out", str(fleet.folder)]
    command += ["--set", ALL_NEEDED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as up:
        assert up.stdout is not None
        heard = [line for line in iter(up.stdout.readline, "") if _passed_on(line, up)]
    assert up.returncode == 130, "".join(heard)
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert_undisturbed(fleet, expected, talk)
    no_traceback(talk)
    assert "Traceback" not in "".join(heard) + ended.stdout + ended.stderr


def _passed_on(line: str, up: subprocess.Popen[str]) -> bool:
    """End `up` once its edge server waits for devices."""
    if "going on after round 3" in line:
        up.send_signal(signal.SIGTERM)
    return True


def test_devices_with_bad_data_say_so_and_the_others_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digits = load_digits()

    def written(name: str, samples: slice, **renamed: str) -> str:
        for split, rows in (("train", samples), ("test", slice(200, 240))):
            for k, (image, label) in enumerate(zip(digits.images[rows], digits.target[rows], strict=True)):
                place = tmp_path / name / split / renamed.get(f"n{label}", str(label))
                place.mkdir(parents=True, exist_ok=True)
                Image.fromarray((image * 15).astype("uint8")).save(place / f"{k}.png")
        return str(tmp_path / name)

    def prepare(fleet: Fleets) -> None:
        good = written("good", slice(0, 100))
        few, unknown = written("few", slice(0, 5)), written("unknown", slice(0, 100), n7="seven")
        for name, folder in (("device-1", good), ("device-2", good), ("device-3", few), ("device-4", unknown)):
            fleet.options[name] = ["--data", folder]

    changes = (
        'data.name="images"',
        "data.mean=[0.3]",
        "data.std=[0.4]",
        f"data.classes={json.dumps([str(k) for k in range(10)])}",
        "deploy.start_deadline_s=100000.0",
        "run.rounds=3",
    )
    with deployment(tmp_path, monkeypatch, *changes, prepare=prepare) as (fleet, talk):
        finish(fleet, talk)
        assert [fleet.processes[f"device-{k}"].wait(PATIENCE_S) for k in (1, 2, 3, 4)] == [0, 0, 1, 1]
    assert "has 5 samples to train on, but a mini-batch takes 8" in talk.of("device-3")
    assert "seven" in talk.of("device-4")
    for name in ("device-3", "device-4"):
        assert f"{name} gave up" in talk.of("edge"), talk.everything()
    assert record_of(fleet)[0]["present"] == [[0, 1]] * 3
    no_traceback(talk)
