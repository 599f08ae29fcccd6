"""Runs over several ranks: the records and weights of one process, also after a rank was killed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

import adaptsfl
import warm
from adaptsfl.errors import RankFailed
from adaptsfl.runs.folder import RECORD, find_runs
from adaptsfl.simulation.experiment import MODEL, Experiment
from adaptsfl.simulation.rank_speeds import EQUAL, VARIABLE
from adaptsfl.simulation.world import make_world
from adaptsfl.training.ranks import ALONE, Ranks
from ranks import PATIENCE_S, free_port, in_threads, on_ranks
from simulation.ranked import alone, executed, small
from training.cases import largest_difference

SINGLE = 1e-4  # of weights and losses: single precision, summed in another order

RECIPE = """
name = "ranked"
[model]
name = "vgg_digits"
options = { width = 0.25 }
[training]
batch_size = 4
learning_rate = 0.05
optimizer = "momentum"
[data]
name = "digits"
[fleet]
base = "heterogeneous"
devices = 3
[run]
policies = ["simulation.ranked:Killer"]
options = { "simulation.ranked:Killer" = { interval = 2, cut = 3 } }
rounds = 10
evaluate_every = 5
test_samples = 40
checkpoint_every = 1
"""


@pytest.fixture(scope="module", autouse=True)
def equal_ranks():
    """Here they are not timed: who trains which devices decides about the last bits of weights."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, EQUAL)
        yield


def same(found, expected, where="record") -> None:
    """Compare two records: what was decided exactly, what was learned up to rounding."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            same(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for k, (one, other) in enumerate(zip(found, expected, strict=True)):
            same(one, other, f"{where}[{k}]")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-3, abs=SINGLE, nan_ok=True), where
    else:
        assert found == expected, where


@pytest.mark.parametrize("start", [in_threads, on_ranks], ids=["threads", "processes"])
def test_records_and_weights_are_those_of_one_process(tmp_path, start):
    """With devices that come and go, two ranks, batch-norm over both, and drift measured: the plans are the same."""
    first, second = start(2, executed, tmp_path / "two")
    assert second == {}
    assert list(first) == ["vanilla-sl"]
    assert "lets devices take turns with one model" in first["vanilla-sl"]
    assert alone(tmp_path / "one") == {}
    runs = {run.folder.name: run for run in find_runs([tmp_path / "one"]) if run.policy != "vanilla-sl"}
    assert len(runs) == 3
    for name, run in runs.items():
        files = [folder / name / RECORD for folder in (tmp_path / "two", tmp_path / "one")]
        found, expected = ([json.loads(line) for line in file.read_text().splitlines()] for file in files)
        same(found, expected, name)
        weights = (load_file(folder / name / MODEL) for folder in (tmp_path / "two", tmp_path / "one"))
        assert largest_difference(*weights) < SINGLE
        assert run.whole


def held(ranks: Ranks) -> list[tuple[tuple[int, ...], int, str]]:
    """Return whose samples a rank holds, how many, and what it takes for the run's identity."""
    worlds = [make_world(small(), 0, ranks=ranks, pooled=pooled) for pooled in (False, True)]
    return [(world.data.mine, len(world.data.dataset.train), world.learning_identity) for world in worlds]


def test_every_rank_holds_the_samples_of_its_own_devices_alone():
    (whole, _), (first, first_of_all), (second, second_of_all) = held(ALONE), held(Ranks(0, 2)), held(Ranks(1, 2))
    assert (whole[0], first[0], second[0]) == ((0, 1, 2, 3), (0, 2), (1, 3))
    assert first[1] + second[1] == whole[1] == 1440
    assert first[1] < whole[1]
    assert first_of_all[:2] == whole[:2]  # it trains on all of them by itself
    assert second_of_all == second
    assert len({identity for _, _, identity in (whole, first, second, first_of_all)}) == 1


def elsewhere(ranks: Ranks, folder: Path) -> None:
    Experiment(small(), folder / str(ranks.rank), policies=["sfl"], ranks=ranks).execute()


def test_ranks_that_do_not_see_one_folder_say_so(tmp_path):
    with pytest.raises(RankFailed, match=r"rank 1: .*/1 is not the folder of the first rank, which wrote recipe.json"):
        in_threads(2, elsewhere, tmp_path)


def torchrun(folder: Path, *ways: list[str], kill: int | None = None) -> tuple[list[int | None], str]:
    """Run the recipe over two ranks, by one torchrun for each way; return how they ended and what they said.

    Where a rank is killed, its process number is found in the folder.
    """
    folder.mkdir()
    (folder / "small.toml").write_text(RECIPE)
    call = ["-m", "adaptsfl", "simulate", str(folder / "small.toml"), "--out", str(folder / "out")]
    agents, said = [], folder / "said"
    with said.open("w") as file:
        for way in ways:
            command = [sys.executable, "-m", "torch.distributed.run", *way, *call]
            environment = {**surroundings(), **({} if kill is None else {"KILL": str(folder), "KILL_RANK": str(kill)})}
            agents.append(subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True))
        try:
            for agent in agents:
                agent.wait(PATIENCE_S)
        finally:
            for agent in agents:
                if agent.poll() is None:
                    os.killpg(agent.pid, signal.SIGKILL)
    return [agent.returncode for agent in agents], said.read_text()


def surroundings() -> dict[str, str]:
    paths = [Path(adaptsfl.__file__).parents[1], Path(__file__).parents[1], os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}


def one_machine(restarts: int) -> list[str]:
    return ["--standalone", "--nproc-per-node", "2", "--max-restarts", str(restarts)]


def outcome(folder: Path) -> tuple[bytes, dict[str, Tensor]]:
    (run,) = find_runs([folder / "out"])
    assert run.whole
    return (run.folder / RECORD).read_bytes(), load_file(run.folder / MODEL)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What two ranks give that nobody kills; only the first of them prints."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "small.toml").write_text(RECIPE)
    call = ["simulate", str(folder / "small.toml"), "--out", str(folder / "out")]
    told = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}  # as torchrun does
    ranks = [
        warm.Command(call, {**surroundings(), **told, "RANK": rank, "LOCAL_RANK": rank}, without=["matplotlib"])
        for rank in "01"
    ]
    said = [rank.communicate(PATIENCE_S)[0] for rank in ranks]
    assert [rank.wait(PATIENCE_S) for rank in ranks] == [0, 0], said
    assert [text.count("report:") for text in said] == [1, 0]
    return outcome(folder)


@pytest.mark.parametrize(("machines", "killed"), [(1, 0), pytest.param(2, 1, marks=pytest.mark.slow)])
def test_a_killed_rank_is_started_again_and_nothing_is_lost(tmp_path, undisturbed, machines, killed):
    """Also where its machine, here a second torchrun, is another than the first rank's, which was well and restarts."""
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "test"]
    one_of_two = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "1", *meeting]
    ways = [one_machine(1)] if machines == 1 else [one_of_two] * 2
    ended, said = torchrun(tmp_path / "run", *ways, kill=killed)
    assert ended == [0] * machines, said
    assert (tmp_path / "run" / "done").exists()
    record, weights = outcome(tmp_path / "run")
    assert record == undisturbed[0]
    assert largest_difference(weights, undisturbed[1]) == 0


def test_without_restarts_the_job_ends_and_one_process_goes_on(tmp_path, undisturbed):
    ended, said = torchrun(tmp_path / "run", one_machine(0), kill=1)
    assert ended == [1], said
    assert "Signal 9 (SIGKILL) received" in said or "another rank is gone" in said
    folder = tmp_path / "run"
    call = ["simulate", str(folder / "small.toml"), "--out", str(folder / "out")]
    code, said = warm.run(call, surroundings(), timeout=PATIENCE_S)
    assert code == 0, said
    record, weights = outcome(folder)
    records = [[json.loads(line) for line in lines.splitlines()] for lines in (record, undisturbed[0])]
    same(*records)
    assert largest_difference(weights, undisturbed[1]) < SINGLE
