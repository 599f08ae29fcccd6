"""Real links, real clocks: wall time to 95 % on digits, of AdaptSFL, of every fixed plan of a grid, and of others.

Eight devices, an edge server and a fed server, each a process in a network namespace of its own, behind links of three
kinds: fast, slow, and bursty (a tenth of its rate, now and then). In one setting links stay as they are; in the other,
a third of them becomes ten times slower, `CHANGE_S` seconds after training began. Labels are unevenly distributed
(Dirichlet 0.5). A run ends with the first evaluation at the target, or after `BUDGET` times the fastest run so far of
its setting and seed. Policies take turns, seed by seed, so that a noisy hour is everybody's.

    python benchmarks/live.py                    # as root; goes on with what docs/results/live.jsonl lacks
    python benchmarks/live.py --seeds 1          # one seed only
    python benchmarks/live.py --page             # no runs: the page from what is there

Every run is a line of live.jsonl; the tables are printed and saved as live.md.
"""

import argparse
import json
import math
import multiprocessing
import os
import runpy
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from adaptsfl.deploy.parties.local_fleet import LocalFleet
from adaptsfl.deploy.parties.relay import enter_namespace
from adaptsfl.deploy.parties.shaped_network import ShapedNetwork, shaped_network
from adaptsfl.deploy.security.certs import make_certificates
from adaptsfl.fleet import Device, Fleet, Server

TARGET, SEEDS, BUDGET, FIRST_BUDGET_S = 0.95, 3, 2.5, 240.0
RECIPE = """
name = "live"
[model]
name = "vgg_digits"
options = { norm = "group", width = 0.5 }
[training]
batch_size = 32
learning_rate = 0.05
[data]
name = "digits"
partition = { kind = "dirichlet", alpha = 0.5 }
[fleet]
devices = 8
[run]
rounds = 100000
evaluate_every = 8
[deploy]
private_start = false
round_deadline_s = 600.0
start_deadline_s = 600.0
"""
DEPTHS, INTERVALS = (2, 4, 6), (4, 16, 64)
POLICIES: dict[str, dict[str, Any]] = {
    "adaptsfl": {},
    **{f"cut {cut}, I = {interval}": {"cut": cut, "interval": interval} for cut in DEPTHS for interval in INTERVALS},
    "sfl": {},
    "rma+ms": {},
    "rma+rms": {},
}
TITLES = {"adaptsfl": "AdaptSFL", "sfl": "SFL (I = 1)", "rma+ms": "RMA+MS", "rma+rms": "RMA+RMS"}
# Up and down in Mbit/s, and the delay each way in ms: Wi-Fi, a mobile link, and Wi-Fi with somebody else on it.
KINDS = {"fast": (40.0, 80.0, 3.0), "slow": (4.0, 16.0, 25.0), "bursty": (20.0, 40.0, 5.0)}
LINKS = ("fast", "fast", "fast", "slow", "slow", "slow", "bursty", "bursty")
CHANGED, FACTOR, CHANGE_S = (0, 3, 6), 0.1, 6.0  # one of each kind
BURST, CALM_S, BURST_S, STEP_S = 0.1, (1.0, 3.0), (0.2, 0.8), 0.05
SETTINGS = ("steady", "changing")
SERVERS = Server(1.0, 1e9, 1e9, to_fed_s=1e-3, from_fed_s=1e-3)
# Modules that every process imports, once: nothing that starts threads.
PRELOADED = ("adaptsfl.cli", "adaptsfl.deploy.parties.processes", "sklearn.datasets", "torch._dynamo")


@dataclass(frozen=True)
class Case:
    """One run."""

    setting: str
    seed: int
    policy: str

    @property
    def key(self) -> tuple[str, int, str]:
        """What identifies it among the results."""
        return self.setting, self.seed, self.policy


# --- links ---


def fleet_at(setting: str, seed: int, seconds: float) -> Fleet:
    """Return all links so many seconds after training began."""
    devices = []
    for number, kind in enumerate(LINKS):
        up, down, delay_ms = KINDS[kind]
        factor = FACTOR if setting == "changing" and number in CHANGED and seconds >= CHANGE_S else 1.0
        if kind == "bursty" and _is_disturbed(seed, number, seconds):
            factor *= BURST
        rates, delay_s = (1e6 * factor * up, 1e6 * factor * down), delay_ms / 1e3
        fixed = dict.fromkeys(("uplink_s", "downlink_s", "fed_uplink_s", "fed_downlink_s"), delay_s)
        devices.append(Device(f"device-{number + 1}", 1.0, *rates, *rates, **fixed))
    return Fleet.of(devices, SERVERS)


def _is_disturbed(seed: int, number: int, seconds: float) -> bool:
    """Whether a bursty link is slow at that moment: calm and disturbed times of random length follow each other."""
    rng, passed = np.random.default_rng([seed, number]), 0.0
    while passed <= seconds:
        passed += rng.uniform(*CALM_S)
        if seconds < passed:
            return False
        passed += rng.uniform(*BURST_S)
    return True


def follow(network: ShapedNetwork, case: Case, began: float, over: threading.Event) -> None:
    """Shape links as time goes by."""
    while not over.wait(STEP_S):
        network.shape(fleet_at(case.setting, case.seed, time.monotonic() - began))


# --- processes that start at once ---


class WarmFleet(LocalFleet):
    """A fleet whose processes are forked from one that has imported torch, each then moves into its namespace."""

    def start(self, party: str) -> None:
        """Start one party."""
        assert self.network is not None
        _ip, _netns, _exec, namespace, _python, _m, _adaptsfl, *arguments = self.command(party)
        reading, writing = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(target=_party, args=(namespace, arguments, writing))
        process.start()
        writing.close()
        self.processes[party] = Forked(process)  # type: ignore[assignment]
        lines = os.fdopen(os.dup(reading.fileno()), encoding="utf-8")
        self.processes[party].stdout = lines
        threading.Thread(target=self._relay, args=(party, self.processes[party]), daemon=True).start()


CONTEXT = multiprocessing.get_context("forkserver")


class Forked:
    """A forked process with those methods of `subprocess.Popen` that a fleet uses."""

    stdout: Any = None

    def __init__(self, process: Any) -> None:
        self._process = process
        self.pid = process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit code; None while it runs."""
        return self.poll()

    def poll(self) -> int | None:
        """Return its exit code; None while it runs."""
        return int(self._process.exitcode) if self._process.exitcode is not None else None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("adaptsfl", timeout or 0.0)
        return int(self._process.exitcode)

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


def _party(namespace: str, arguments: list[str], out: Any) -> None:
    """Become one party: in its namespace, in a session of its own, with its output in a pipe."""
    os.setsid()
    for number in (1, 2):
        os.dup2(out.fileno(), number)
    sys.stdout, sys.stderr = (open(number, "w", encoding="utf-8", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
    enter_namespace(namespace)
    sys.modules["matplotlib"] = None  # type: ignore[assignment]  # figures take seconds to draw
    sys.argv = ["adaptsfl", *arguments]
    runpy.run_module("adaptsfl", run_name="__main__", alter_sys=True)


# --- runs ---


def run(case: Case, folder: Path, certs: Path, budget_s: float, changes: Sequence[str] = ()) -> dict[str, Any]:
    """Train until the target or the end of the budget, the recipe changed as `--set` does; return the result."""
    began_text, lines, begun = "block 1:", [], threading.Event()

    def say(party: str, text: str) -> None:
        lines.append(f"{party}: {text}")
        if party == "edge" and began_text in text:
            begun.set()

    recipe = folder / "recipe.toml"
    folder.mkdir(parents=True)
    recipe.write_text(RECIPE)
    shutil.copytree(certs, folder / "run" / "certs")
    over = threading.Event()
    with shaped_network(fleet_at("steady", case.seed, 0.0)) as network:
        more = [*_settings(case, budget_s), *changes]
        fleet = WarmFleet(recipe, len(LINKS), folder / "run", say, more=more, network=network)
        try:
            _start(fleet, lines)
            if not begun.wait(120.0):
                raise RuntimeError("\n".join(["training did not begin", *lines[-30:]]))
            arguments = (network, case, time.monotonic(), over)
            threading.Thread(target=follow, args=arguments, daemon=True).start()
            fleet.wait()
        except Exception as error:
            raise RuntimeError("\n".join([str(error), *lines[-30:]])) from error
        finally:
            over.set()
            fleet.stop()
    return _result(case, fleet, budget_s)


def _start(fleet: LocalFleet, lines: Sequence[str]) -> None:
    """Start the servers, and the devices once these listen."""
    for server in ("fed", "edge"):
        fleet.start(server)
    deadline = time.monotonic() + 120.0
    while not all(
        any(line.startswith(f"{server}: ") and "listening" in line for line in lines) for server in ("fed", "edge")
    ):
        if time.monotonic() > deadline:
            raise RuntimeError("the servers did not start")
        time.sleep(0.05)
    for name in fleet.names:
        fleet.start(name)


def _settings(case: Case, budget_s: float) -> list[str]:
    name, options = case.policy, POLICIES[case.policy]
    if options:
        name = "fixed"
    settings = [f'run.policies=["{name}"]', f"run.seed={case.seed}", f"run.target_accuracy={TARGET}"]
    settings.append(f"run.seconds={budget_s:.1f}")
    if options:
        settings.append(f"run.options.fixed={{cut={options['cut']}, interval={options['interval']}}}")
    return settings


def _result(case: Case, fleet: LocalFleet, budget_s: float) -> dict[str, Any]:
    blocks = [json.loads(line) for line in (fleet.folder / "edge" / "record.jsonl").read_text().splitlines()]
    evaluations = [row for block in blocks for row in block["evaluations"]]
    reached = next(((row[1], row[0]) for row in evaluations if row[2] >= TARGET), None)
    predicted, measured = (
        sum(block["predicted_s"] for block in blocks),
        sum(block["estimates"]["measured"]["wall_s"] for block in blocks),
    )
    return {
        "setting": case.setting,
        "seed": case.seed,
        "policy": case.policy,
        "seconds": None if reached is None else reached[0],
        "rounds": None if reached is None else reached[1],
        "budget_s": budget_s,
        "best": max((row[2] for row in evaluations), default=0.0),
        "predicted_over_measured": predicted / measured,
        "plans": [[block["first_round"], block["interval"], block["cuts"]] for block in blocks],
        "times": [round(block["time_s"], 3) for block in blocks],
    }


# --- results ---


def charged_s(result: dict[str, Any]) -> float:
    """Return the seconds to the target; a run that missed it is charged its budget, which is less than it needs."""
    return float(result["seconds"] or result["budget_s"])


def table(results: Sequence[dict[str, Any]], setting: str) -> list[tuple[str, ...]]:
    """Return a line per policy, the fastest first: seconds by seed, their mean, its ratio to the best fixed plan's.

    A policy that has not run with all seeds of AdaptSFL has no mean.
    """
    rows: dict[str, dict[int, dict[str, Any]]] = {}
    for result in results:
        if result["setting"] == setting:
            rows.setdefault(result["policy"], {})[result["seed"]] = result
    seeds = sorted(rows.get("adaptsfl", {}))
    means = {
        policy: statistics.geometric_mean([charged_s(found[seed]) for seed in seeds])
        for policy, found in rows.items()
        if seeds and all(seed in found for seed in seeds)
    }
    fixed = [mean for policy, mean in means.items() if POLICIES[policy]]
    lines: list[tuple[str, ...]] = []
    for policy in sorted(rows, key=lambda name: means.get(name, math.inf)) if fixed else ():
        found = [rows[policy].get(seed) for seed in seeds]
        missed = "> " if any(result is not None and result["seconds"] is None for result in found) else ""
        each, rounds = ", ".join(map(_seconds, found)), ", ".join(map(_rounds, found))
        mean = means.get(policy)
        end = ("–", "–") if mean is None else (f"{missed}{mean:.1f}", f"{missed}{mean / min(fixed):.2f}")
        lines.append((TITLES.get(policy, policy), each, rounds, *end))
    return lines


def _seconds(result: dict[str, Any] | None) -> str:
    if result is None:
        return "–"
    return f"{result['seconds']:.1f}" if result["seconds"] else f"> {result['budget_s']:.0f}"


def _rounds(result: dict[str, Any] | None) -> str:
    return "–" if result is None else str(result["rounds"] or "–")


COLUMNS = ("policy", "seconds to 95 %, by seed", "rounds", "mean", "over the best fixed plan")


def page(results: Sequence[dict[str, Any]]) -> str:
    """Return the results as a Markdown page."""
    parts = []
    for setting, title in zip(
        SETTINGS, ("Links stay as they are", "A third of the links becomes ten times slower"), strict=True
    ):
        lines = table(results, setting)
        if lines:
            rows = "\n".join(f"| {' | '.join(line)} |" for line in [COLUMNS, ("---",) * len(COLUMNS), *lines])
            parts.append(f"## {title}\n\n{rows}\n")
    errors = [abs(np.log(r["predicted_over_measured"])) for r in results if r["setting"] == "steady"]
    accuracy = f"{100 * float(np.expm1(np.median(errors))):.0f} %" if errors else "–"
    seeds = {setting: len({r["seed"] for r in results if r["setting"] == setting}) for setting in SETTINGS}
    repeats = f"Seeds: {seeds['steady']} with steady, {seeds['changing']} with changing links."
    links = ", ".join(f"{kind}: {up:g}/{down:g} Mbit/s, {ms:g} ms" for kind, (up, down, ms) in KINDS.items())
    return f"""# Wall time behind real links

Written by `python benchmarks/live.py`; every run is in live.jsonl. Eight device processes, an edge server and a fed
server in network namespaces of one machine with {os.cpu_count()} cores; digits, Dirichlet 0.5, target {TARGET:.0%} of
the devices' test samples, evaluated every 8 rounds or at the next averaging. Links up/down with their delay each way:
{links}; bursty ones
fall to a tenth for {BURST_S[0]} to {BURST_S[1]} s every {CALM_S[0]:g} to {CALM_S[1]:g} s. The change comes
{CHANGE_S:g} s after training began. Means are geometric; a run that does not arrive within {BUDGET:g} times the
fastest one so far is charged that much, marked ">". Predicted and measured time of whole runs differ by {accuracy}
(median, steady links). {repeats}

{"".join(part + chr(10) for part in parts).rstrip()}
"""


def missing(results: Sequence[dict[str, Any]], seeds: int) -> list[Case]:
    """Return the runs that are not done yet, in turns."""
    done = {(r["setting"], r["seed"], r["policy"]) for r in results}
    cases = [Case(setting, seed, policy) for seed in range(seeds) for setting in SETTINGS for policy in POLICIES]
    return [case for case in cases if case.key not in done]


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--page", action="store_true", help="write the page, without further runs")
    parser.add_argument("--only", nargs="*", help="these policies only")
    parser.add_argument("--keep", type=Path, help="keep the folders of runs here")
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="folder of live.jsonl and live.md")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    CONTEXT.set_forkserver_preload(list(PRELOADED))
    console, file = Console(width=140), options.out / "live.jsonl"
    options.out.mkdir(parents=True, exist_ok=True)
    results = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    with tempfile.TemporaryDirectory() as scratch:
        certs = Path(scratch) / "certs"
        make_certificates(certs, [f"device-{k + 1}" for k in range(len(LINKS))])
        for case in [] if options.page else missing(results, options.seeds):
            if options.only and case.policy not in options.only:
                continue
            fastest = [r["seconds"] for r in results if (r["setting"], r["seed"]) == case.key[:2] and r["seconds"]]
            budget_s = BUDGET * min(fastest) if fastest else FIRST_BUDGET_S
            place = (options.keep or Path(scratch)) / "-".join(map(str, case.key)).replace(" ", "")
            found = run(case, place, certs, budget_s)
            results.append(found)
            with file.open("a", encoding="utf-8") as out:
                out.write(json.dumps(found) + "\n")
            result = "missed" if found["seconds"] is None else f"{found['seconds']:.1f} s, {found['rounds']} rounds"
            console.print(f"{case.setting:9} {case.seed} {case.policy:16} {result}")
    for setting in SETTINGS:
        shown = Table(*COLUMNS, title=setting)
        for line in table(results, setting):
            shown.add_row(*line)
        console.print(shown)
    (options.out / "live.md").write_text(page(results))


if __name__ == "__main__":
    main()
