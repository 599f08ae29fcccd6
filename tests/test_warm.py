"""Processes that are forked with their imports done are like those that are started anew."""

import importlib
import os
import signal
import subprocess
import sys
from multiprocessing import forkserver
from pathlib import Path

import pytest

import warm

PATIENCE_S = 600.0
MISSING = ["plan", "nowhere.toml"]


@pytest.mark.parametrize("name", warm.PRELOADED)
def test_whatever_is_imported_before_exists(name: str) -> None:
    """`multiprocessing` says nothing about modules that it could not import."""
    importlib.import_module(name)


@pytest.mark.skipif(sys.platform != "linux", reason="threads of another process are to be seen on Linux")
def test_no_thread_runs_where_processes_are_forked_that_they_would_lack() -> None:
    """But for one of jemalloc, which begins anew in every forked process."""
    warm.run(["--version"], timeout=PATIENCE_S)  # so that all imports are done
    pid = forkserver._forkserver._forkserver_pid
    threads = [(task / "comm").read_text().strip() for task in Path(f"/proc/{pid}/task").iterdir()]
    assert sorted(set(threads) - {"jemalloc_bg_thd"}) == [Path(f"/proc/{pid}/comm").read_text().strip()]
    assert len(threads) <= 2


@pytest.mark.parametrize("arguments", [["--version"], MISSING, ["--no-such-option"]])
def test_output_and_exit_code_are_those_of_an_interpreter(arguments: list[str]) -> None:
    command = warm.Command(arguments, apart=True)
    found = *command.communicate(PATIENCE_S), command.returncode
    anew = [sys.executable, "-m", "adaptsfl", *arguments]
    expected = subprocess.run(anew, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert found == (expected.stdout, expected.stderr, expected.returncode)


def test_environment_and_folder_are_those_of_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("import os\n\n\ndef model():\n    raise ValueError(os.environ['OWN'])\n")
    surroundings = {**os.environ, "OWN": "a word", "PYTHONPATH": str(tmp_path)}
    code, printed = warm.run(["profile", "own:model"], surroundings, timeout=PATIENCE_S)
    assert code == 1, printed
    assert "a word" in printed


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_signal_ends_it(number: signal.Signals) -> None:
    command = warm.Command(["join", "--edge", "127.0.0.1:1", "--fed", "127.0.0.1:1", "--name", "a", "--insecure"])
    assert "trying again" in command.stdout.readline()
    assert command.poll() is None
    command.send_signal(number)
    assert command.wait(PATIENCE_S) == (-signal.SIGKILL if number == signal.SIGKILL else 130)
    command.stdout.close()


def test_modules_that_it_shall_do_without_are_not_there() -> None:
    call = ["certs", "here", "--devices", "1"]
    command = warm.Command(call, without=["cryptography"])
    printed, _ = command.communicate(PATIENCE_S)
    assert "cryptography" in printed
    assert command.returncode == 1
