"""Whole deployments for tests: processes of their own on this machine, told what to do by a recipe."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

import warm
from adaptsfl.deploy.parties.local_fleet import LocalFleet

PATIENCE_S = 600.0  # only turns a hang into a failure, however busy the machine is
HERE = Path(__file__).parent

RECIPE = """
name = "tiny"
[model]
name = "vgg_digits"
options = { width = 0.25, norm = "group" }
[training]
batch_size = 8
learning_rate = 0.05
[data]
name = "digits"
[fleet]
devices = 4
[run]
policies = ["scripted_policy:Scripted"]
options = { "scripted_policy:Scripted" = { plans = [31234, 22222, 53142] } }
rounds = 20
evaluate_every = 5
test_samples = 40
[deploy]
private_start = false
round_deadline_s = 1200.0
start_deadline_s = 1200.0
"""


class Talk:
    """What all parties said, while they say it."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self._new = threading.Condition()

    def __call__(self, party: str, text: str) -> None:
        with self._new:
            self.lines.append((party, text))
            self._new.notify_all()

    def of(self, party: str) -> str:
        return "\n".join(text for who, text in self.lines if who == party)

    def wait_for(self, party: str, text: str, times: int = 1) -> None:
        """Wait until a party has said something so many times."""

        def heard() -> bool:
            return sum(who == party and text in line for who, line in self.lines) >= times

        with self._new:
            if not self._new.wait_for(heard, PATIENCE_S):
                raise AssertionError(f"{party} never said {text!r}:\n{self.everything()}")

    def everything(self) -> str:
        return "\n".join(f"{party:>9} | {text}" for party, text in self.lines)


class Fleets(LocalFleet):
    """A fleet in which devices may reach the servers by detours, and have options of their own.

    Attributes:
        options: by party: what is added to its command line; of options given twice the last counts.
        first: by party: what its process does before its command.
    """

    options: dict[str, list[str]]
    first: dict[str, Callable[[], None]]

    def command(self, party: str) -> list[str]:
        return [*super().command(party), *self.options.get(party, [])]

    def start(self, party: str) -> None:
        """Start one party, as `up` does but with its imports done, and without figures, which take seconds to draw."""
        _python, _m, _adaptsfl, *arguments = self.command(party)
        one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = warm.Command(arguments, one_thread, without=["matplotlib"], first=self.first.get(party))
        self.processes[party] = process  # type: ignore[assignment]
        threading.Thread(target=self._relay, args=(party, process), daemon=True).start()


@contextmanager
def deployment(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *changes: str,
    devices: int = 4,
    recipe: str = RECIPE,
    prepare: Callable[[Fleets], None] = lambda _fleet: None,
) -> Iterator[tuple[Fleets, Talk]]:
    """Start all parties of a recipe, changed as `--set` does."""
    before = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), *before]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    file = folder / "recipe.toml"
    file.write_text(recipe)
    talk = Talk()
    fleet = Fleets(file, devices, folder / "run", talk, status_port=0, more=list(changes))
    fleet.options, fleet.first = {}, {}
    prepare(fleet)
    try:
        fleet.start_all()
        yield fleet, talk
    finally:
        fleet.stop()


def finish(fleet: LocalFleet, talk: Talk) -> None:
    """Wait until the run is over, and everybody has gone home."""
    watch = threading.Timer(PATIENCE_S, fleet.stop)
    watch.start()
    try:
        fleet.wait()
    except Exception as error:
        raise AssertionError(f"{error}\n{talk.everything()}") from error
    finally:
        watch.cancel()


def model_of(fleet: LocalFleet) -> dict[str, Tensor]:
    return load_file(fleet.folder / "fed" / "model.safetensors")


def record_of(fleet: LocalFleet) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (fleet.folder / "edge" / "record.jsonl").read_text().splitlines()]


def eventually(what: Callable[[], bool], talk: Talk) -> None:
    """Wait until something is true."""
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline, talk.everything()
        time.sleep(0.05)
