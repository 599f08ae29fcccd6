import dataclasses
import json
import sys

import pytest
from typer.testing import CliRunner

from adaptsfl import __version__, loading, models, planner
from adaptsfl.cli import app
from adaptsfl.costs import ASSUMED_FACTORS
from problems import by_hand

GOOD = {
    "batch_size": 2,
    "learning_rate": 0.1,
    "devices": {
        "flops": [100, 200],
        "uplink_bps": [10, 5],
        "downlink_bps": [20, 10],
        "fed_uplink_bps": [4, 8],
        "fed_downlink_bps": [8, 16],
        "memory_bytes": None,
    },
    "server": {"flops": 1000, "to_fed_bps": 16, "from_fed_bps": 32},
    "cuts": {
        "forward_flops": [100, 300, 600],
        "backward_flops": [200, 600, 1200],
        "activation_bits": [50, 20, 5],
        "gradient_bits": [50, 20, 5],
        "client_model_bits": [16, 48, 160],
        "memory_bytes": None,
    },
    "convergence": {"initial_gap": 2.0, "budget": 1.0, "drift": {"per_layer": [0.01, 0.02, 0.03], "power": 2.0}},
}
NEEDED = {"interval", "cuts", "predicted_time_s", "lower_bound_s", "status", "solve_s"}


def changed(path: str, value):
    """GOOD with one value replaced (or removed, if the value is ...)."""
    problem = json.loads(json.dumps(GOOD))
    if path == ".":
        return {**problem, **value}
    *sections, key = path.split(".")
    section = problem
    for name in sections:
        section = section[name]
    if value is ...:
        del section[key]
    else:
        section[key] = value
    return problem


@pytest.fixture
def write(tmp_path):
    def write_file(name: str, content) -> str:
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return write_file


def run(*arguments: str):
    return CliRunner().invoke(app, ["plan", *arguments])


def lines(answer) -> list[dict]:
    return [json.loads(line) for line in answer.stdout.splitlines()]


def test_json_is_the_plan_of_the_planner(write):
    answer = run(write("good.json", GOOD), "--json")
    assert answer.exit_code == 0, answer.output
    (data,) = lines(answer)
    expected = planner.plan(by_hand())
    assert data.keys() >= NEEDED
    assert (data["interval"], data["cuts"]) == (expected.interval, expected.cuts.tolist())
    assert data["predicted_time_s"] == expected.predicted_time_s
    assert data["status"] == "optimal"
    assert [phase["phase"] for phase in data["phases"]] == ["a1", "a2", "a3", "a4", "a5", "b1", "b2", "b3"]
    assert "sensitivity" not in data


def test_json_has_the_plans_for_other_rounds_unless_the_fleet_is_large(write, monkeypatch):
    file = write("good.json", GOOD)
    (asked,), (unasked,) = lines(run(file, "--json", "--sensitivity")), lines(run(file, "--json"))
    assert [row["factor"] for row in unasked["other_rounds"]] == [0.5, 2.0]
    assert unasked["other_rounds"] == asked["other_rounds"]
    (refused,) = lines(run(file, "--json", "--no-sensitivity"))
    monkeypatch.setattr("adaptsfl.cli.planning.OTHER_ROUNDS_UP_TO", 1)
    (large,) = lines(run(file, "--json"))
    assert "other_rounds" not in refused | large
    (large,) = lines(run(file, "--json", "--sensitivity"))
    assert large["other_rounds"] == asked["other_rounds"]


@pytest.mark.parametrize("solver", planner.SOLVERS)
def test_every_solver_can_be_asked(write, solver):
    (data,) = lines(run(write("good.json", GOOD), "--json", "--solver", solver))
    assert data["solver"] == solver
    assert data["predicted_time_s"] == pytest.approx(planner.plan(by_hand()).predicted_time_s)


def test_one_line_per_file_in_order(write):
    names = [write(f"{k}.json", changed("batch_size", k)) for k in (3, 1, 2)]
    data = lines(run(*names, "--json"))
    assert [row["file"] for row in data] == names
    assert data[1]["predicted_time_s"] < data[2]["predicted_time_s"] < data[0]["predicted_time_s"]


def test_fixed_seconds_are_planned_with_and_shown(write):
    """All of an uplink's 1000 s beside rates of a few: every phase that has fixed seconds shows them."""
    fixed = changed("devices.uplink_s", [1000, 1000])
    fixed["server"] |= {"turn_s": 100, "averaging_s": 500}
    file = write("fixed.json", fixed)
    (data,) = lines(run(file, "--json", "--sensitivity"))
    phases = {phase["phase"]: phase["seconds"] for phase in data["phases"]}
    assert phases["a2"] > 1000
    assert phases["a3"] >= 100
    assert phases["b2"] == 500
    assert data["interval"] >= lines(run(write("good.json", GOOD), "--json"))[0]["interval"]
    rows = {(row["resource"], row["factor"]): row["kept_time_s"] for row in data["sensitivity"]}
    kept = [rows["fixed seconds", factor] for factor in (0.5, 2.0)]
    assert kept[0] < data["predicted_time_s"] < kept[1]
    for solver in ("bcd", "exhaustive"):
        (other,) = lines(run(file, "--json", "--solver", solver))
        assert other["predicted_time_s"] == pytest.approx(data["predicted_time_s"])


def test_sensitivity_on_request(write):
    (data,) = lines(run(write("good.json", GOOD), "--json", "--sensitivity"))
    assert {row["resource"] for row in data["sensitivity"]} == set(planner.whatif.RESOURCES)
    assert data["alternatives"][0]["title"] == "one cut for all"


GROWTH = {"growth": {"factors": [0.02, 0.05, 0.1]}}
POWERS = {"powers": [0.1, 0.1, 0.2]}
TABLE = {"table": {"intervals": [1, 3, 9], "rounds": [[1, 1.1, 1.5], [1, 1.1, 2], [1.2, 2, 9]]}}


@pytest.mark.parametrize(
    ("convergence", "model"),
    [(GOOD["convergence"], "bound"), (GROWTH, "growth"), (POWERS, "powers"), (TABLE, "table")],
)
def test_a_plan_says_which_rounds_it_counts_on(write, convergence, model):
    file = write("good.json", changed("convergence", convergence))
    (data,) = lines(run(file, "--json", "--sensitivity"))
    assert (data["status"], data["rounds_model"]) == ("optimal", model)
    assert data["relative_rounds"] == pytest.approx(1 / (1 - data["drift_share"]))
    assert [row["factor"] for row in data["other_rounds"]] == [0.5, 2.0]
    assert all(row["predicted_time_s"] <= row["kept_time_s"] * (1 + 1e-9) for row in data["other_rounds"])
    shown = " ".join(run(file).stdout.split())
    assert f"{data['relative_rounds']:.3g} × those of I = 1 with the same cuts" in shown
    scale = {"bound": "drift", "growth": "c", "powers": "p", "table": "log R"}[model]
    for words in (f"{scale} halved", f"{scale} doubled", "plan kept"):
        assert words in shown


@pytest.mark.parametrize(
    ("convergence", "words"),
    [(GROWTH, "one round of I = 1"), (POWERS, "one round of I = 1"), (TABLE, "the table's rounds")],
)
def test_measured_rounds_promise_no_target(write, convergence, words):
    shown = " ".join(run(write("good.json", changed("convergence", convergence))).stdout.split())
    assert f"As far as {words}" in shown
    assert "Average every 3 rounds" in shown
    assert "Target" not in shown


def test_double_the_drift_can_leave_no_plan(write):
    file = write("good.json", {**GOOD, "planner": {"interval": 5, "cuts": [1, 2]}})
    assert "drift doubled – none makes progress" in " ".join(run(file).stdout.split())
    (data,) = lines(run(file, "--json", "--sensitivity"))
    doubled = data["other_rounds"][1]
    assert (doubled["kept_time_s"], doubled["predicted_time_s"], doubled["cuts"]) == (None, None, None)


def test_compare_runs_both_solvers(write):
    file = write("good.json", GOOD)
    (data,) = lines(run(file, "--json", "--compare"))
    assert (data["solver"], data["compared"][0]["solver"]) == ("exact", "bcd")
    assert "bcd" in run(file, "--compare").stdout


def test_table_for_people(write):
    answer = run(write("good.json", GOOD))
    assert answer.exit_code == 0, answer.output
    shown = " ".join(answer.stdout.split())
    for words in ("2 devices, 3 layers", "proven optimal", "activation upload", "edge server", "doubled", "uplink"):
        assert words in shown


@pytest.mark.parametrize(("smoothness", "noted"), [(9.0, False), (11.0, True)])
def test_a_learning_rate_beyond_the_theorem_is_noted(write, smoothness, noted):
    constants = {"smoothness": smoothness, "gradient_moment": [1e-3] * 3, "gradient_variance": [1e-3] * 3}
    answer = run(write("good.json", changed("convergence", {**constants, "initial_gap": 2.0, "target": 1.0})))
    assert ("Theorem 1 holds up to 1" in answer.stdout) == noted


def test_version():
    assert CliRunner().invoke(app, ["--version"]).stdout.strip() == f"adaptsfl {__version__}"


@pytest.mark.parametrize("command", ["plan", "simulate", "report", "retime"])
def test_help_says_all_defaults(command, monkeypatch):
    """Text in square brackets is taken for a style, and not shown."""
    monkeypatch.setenv("COLUMNS", "150")
    answer = CliRunner().invoke(app, [command, "--help"])
    assert answer.exit_code == 0
    assert "default: " in answer.stdout
    assert " ." not in " ".join(answer.stdout.split()).replace(" .toml", "")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("devices.uplink_bps", [10, -5], r"devices.uplink_bps[1]: is -5. Give a number above zero"),
        ("devices.uplink_bps", [10, float("nan")], r"devices.uplink_bps[1]: is nan. Give a finite number"),
        ("devices.flops", [float("inf"), 1], r"devices.flops[0]: is inf. Give a finite number"),
        ("devices.downlink_bps", [10], r"devices.downlink_bps: has 1 entries, expected 2. Give 2, one per device"),
        ("devices.flops", [], r"devices.flops: is empty"),
        ("devices.flops", "fast", r"devices.flops: is 'fast'. Give a list"),
        ("devices.flops", [1, "2"], r"devices.flops[1]: is '2'. Give a number"),
        ("devices.flops", ..., r"devices.flops: is missing. Add it"),
        ("devices.memory_bytes", [1, float("inf")], r"devices.memory_bytes[1]: is inf. Give a finite number"),
        ("devices.names", ["a", "\ud800"], r"devices.names[1]: is"),
        ("devices.memory_bytes", [1, None], r"cuts.memory_bytes: is missing, but devices.memory_bytes sets limits"),
        ("server.flops", 0, r"server.flops: is 0. Give a number above zero"),
        ("server", 3, r"server: is 3. Give a table of keys"),
        ("cuts.activation_bits", [1, 2], r"cuts.activation_bits: has 2 entries, expected 3. Give 3, one per cut"),
        ("cuts.forward_flops", [3, 2, 1], r"cuts.forward_flops[1]: is 2, below 3 before it"),
        ("convergence.drift.per_layer", [1], r"convergence.drift.per_layer: has 1 entries, expected 3"),
        ("convergence.drift.power", -1, r"convergence.drift.power: is -1. Give a number above zero"),
        ("convergence.budget", ..., r"convergence.budget: is missing"),
        ("convergence.target", 0.1, r"convergence.target: is given beside budget"),
        ("convergence.initial_gap", -1, r"convergence.initial_gap: is -1"),
        (
            "convergence.initial_gap",
            ...,
            r"convergence.initial_gap: is missing. Give all of: initial_gap, drift, budget",
        ),
        ("convergence.powers", [0.1, 0.2, 0.3], r"convergence.initial_gap: is given beside powers"),
        ("convergence", {}, r"convergence: is empty. Give one of: growth; powers; table"),
        ("convergence", {"powers": [0.1, 0.2]}, r"convergence.powers: has 2 entries, expected 3"),
        (
            "convergence",
            {"table": {"intervals": [1, 4], "rounds": [[1, 2]] * 2}},
            r"convergence.table.rounds: has 2 rows, expected 3",
        ),
        (
            "convergence",
            {"table": {"intervals": [1, 4], "rounds": [[1, 2], [1, 2], [1, float("nan")]]}},
            r"convergence.table.rounds[2][1]: is nan. Give a finite number",
        ),
        (
            "convergence",
            {"table": {"intervals": [1.5], "rounds": [[1]] * 3}},
            r"convergence.table.intervals[0]: is 1.5. Give a whole number",
        ),
        ("convergence", {"table": {"intervals": [1]}}, r"convergence.table.rounds: is missing"),
        (
            "convergence.initail_gap",
            1,
            r"convergence.initail_gap: is not a known key (its value is 1). Did you mean 'initial",
        ),
        ("convergence.drift.powr", 1, r"convergence.drift.powr: is not a known key (its value is 1). Did you mean"),
        ("float", 1, r"float: is not a known key"),
        ("", 1, r"'': is not a known key"),
        ("convergence.budget", -1e60, r"convergence.budget: is -1e+60"),
        ("devices.uplink_s", [1.0], r"devices.uplink_s: has 1 entries, expected 2. Give 2, one per device"),
        ("devices.uplink_s", [], r"devices.uplink_s: is empty. Give a plain list"),
        ("devices.uplink_s", [1.0, -1.0], r"devices.uplink_s[1]: is -1. Give a number ≥ 0"),
        ("server.averaging_s", -1, r"server.averaging_s: is -1. Give a number ≥ 0"),
        ("server.averaging_bps", 0, r"server.averaging_bps: is 0. Give a number above zero"),
        ("batch_size", 1.5, r"batch_size: is 1.5. Give a whole number"),
        ("batch_size", 0, r"batch_size: is 0"),
        ("learning_rate", 0, r"learning_rate: is 0. Give a number above zero"),
        ("planner", {"cuts": [1, 9]}, r"planner.cuts[1]: is 9. Give a whole number from 1 to 3"),
        ("planner", {"cuts": 9}, r"planner.cuts[0]: is 9. Give a whole number from 1 to 3"),
        ("planner", {"interval": "x"}, r"planner.interval: is 'x'. Give"),
    ],
)
def test_bad_files_name_file_field_value_and_remedy(write, path, value, message):
    bad, good = write("bad.json", changed(path, value)), write("good.json", GOOD)
    answer = run(bad, good, "--json")
    assert answer.exit_code == 1
    assert f"{bad}: {message}" in answer.stderr
    first, second = lines(answer)
    assert (first["status"], first["cuts"], second["status"]) == ("error", None, "optimal")
    assert message in first["error"]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("convergence.budget", 0, "convergence.budget: is 0"),
        ("convergence.budget", -0.5, "convergence.budget: is -0.5"),
        (".", {"convergence": TABLE, "planner": {"interval": 2}}, "planner.interval: is 2, which convergence.table"),
        ("planner", {"interval": 50}, "convergence.budget: is 1, and the drift with interval 50"),
        (
            "convergence",
            {
                "smoothness": 20,
                "gradient_moment": [1, 1, 1],
                "gradient_variance": [1, 1, 1],
                "initial_gap": 2,
                "target": 0.5,
            },
            "convergence.target: is 0.5, but no number of rounds gets below 3",
        ),
    ],
)
def test_infeasible_files_say_why_and_what_would_help(write, path, value, message):
    bad, good = write("bad.json", changed(path, value)), write("good.json", GOOD)
    answer = run(bad, good, "--json")
    assert answer.exit_code == 1
    assert f"{bad}: {message}" in answer.stderr
    first, second = lines(answer)
    assert first.keys() >= NEEDED
    assert (first["status"], first["interval"], second["status"]) == ("infeasible", None, "optimal")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("bad.json", "{", "is not valid JSON"),
        ("bad.json", "[" * 100_000, "is not valid JSON"),
        ("bad.json", f'{{"batch_size": {"9" * 5000}}}', "is not valid JSON"),
        ("bad.json", '{"batch_size": 1, "batch_size": 2}', "batch_size: appears twice in one table"),
        ("bad.toml", "x = " + "[" * 100_000, "is not valid TOML"),
        ("bad.toml", f"x = {'9' * 5000}", "is not valid TOML"),
        ("bad.json", "[]", "is []. Give"),
        ("bad.toml", "= 3", "is not valid TOML"),
        ("bad.toml", "", "model: is missing"),
        ("bad.yaml", "", "ends in '.yaml'. Give a recipe (.toml) or a problem (.json)"),
    ],
)
def test_files_that_cannot_be_read_are_explained(write, name, content, message):
    answer = run(write(name, content))
    assert answer.exit_code == 1
    assert name in answer.stderr
    assert message in answer.stderr


def test_missing_and_binary_files_are_explained(tmp_path):
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "folder.json").mkdir()
    names = ("nowhere.json", "binary.json", "folder.json")
    answer = run(*(str(tmp_path / name) for name in names))
    assert answer.exit_code == 1
    assert "nowhere.json: cannot be read: No such file" in answer.stderr
    assert "binary.json: is not UTF-8 text" in answer.stderr
    assert "folder.json: cannot be read: Is a directory" in answer.stderr


def test_byte_order_mark_and_capital_suffix_are_no_matter(tmp_path):
    (tmp_path / "good.JSON").write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode())
    assert run(str(tmp_path / "good.JSON")).exit_code == 0


def test_a_bug_in_one_file_does_not_lose_the_others(write, monkeypatch):
    def broken(problem, solver, time_limit_s):
        if problem.batch_size == 3:
            raise ZeroDivisionError("oh")
        return real(problem, solver, time_limit_s)

    real = planner.plan
    monkeypatch.setattr(planner, "plan", broken)
    answer = run(write("bad.json", changed("batch_size", 3)), write("good.json", GOOD), "--json")
    assert answer.exit_code == 1
    assert "bad.json: internal error in test_cli.py" in answer.stderr
    assert [row["status"] for row in lines(answer)] == ["error", "optimal"]


def test_a_model_that_costs_nothing_can_be_shown(write):
    cuts = {key: value and [0] * 3 for key, value in GOOD["cuts"].items()}
    answer = run(write("free.json", changed("cuts", cuts)), "--compare")
    assert answer.exit_code == 0, answer.stderr
    assert "Target reached after 0 ms" in answer.stdout


def test_names_are_printed_as_they_are(write):
    answer = run(write("named.json", changed("devices.names", ["[red]a", "[/x]"])))
    assert answer.exit_code == 0, answer.stderr
    assert "[red]a" in answer.stdout or "[/x]" in answer.stdout


def test_a_plan_at_the_edge_of_numbers_is_shown_without_what_lies_beyond(write):
    answer = run(write("edge.json", changed("devices.flops", [1e50, 1e50])))
    assert answer.exit_code == 0, answer.stderr
    assert "–" in answer.stdout


def test_exhaustive_search_of_a_large_problem_is_refused(write):
    devices = {key: value * 20 for key, value in GOOD["devices"].items() if value}
    answer = run(write("large.json", changed("devices", devices)), "--solver", "exhaustive")
    assert answer.exit_code == 1
    assert "Use the exact solver" in answer.stderr


RECIPE = f"""
[model]
name = "vgg16"
[convergence]
initial_gap = 2.3
budget = 0.3
drift = {{ power = 1.0, per_layer = {[1e-4] * 16} }}
"""


def test_recipe_is_planned_for_its_fleet(write):
    (data,) = lines(run(write("recipe.toml", RECIPE + "[fleet]\ndevices = 7\n"), "--json"))
    assert data["status"] == "optimal"
    assert len(data["cuts"]) == 7


@pytest.mark.parametrize(
    ("convergence", "model"),
    [
        (f"growth = {{ factors = {[k / 40 for k in range(16)]}, power = 0.7 }}", "growth"),
        (f"powers = {[k / 40 for k in range(16)]}", "powers"),
        (f"table = {{ intervals = [1, 8], rounds = {[[1.0, 1.0 + k / 10] for k in range(16)]} }}", "table"),
    ],
)
def test_recipes_take_measured_rounds(write, convergence, model):
    recipe = f'[model]\nname = "vgg16"\n[convergence]\n{convergence}\n'
    (data,) = lines(run(write("recipe.toml", recipe), "--json"))
    assert (data["status"], data["rounds_model"]) == ("optimal", model)


@pytest.mark.parametrize(
    ("addition", "message"),
    [
        ("[fleet]\nbase = 'moon'", "fleet.base: is 'moon'. Choose one of: paper, heterogeneous"),
        ("[fleet]\nuplink_mbps = [1, -2]", "fleet.uplink_mbps[1]: is -2"),
        (
            "[fleet]\nuplink_mpbs = 2",
            "fleet.uplink_mpbs: is not a known key (its value is 2). Did you mean 'uplink_mbps'?",
        ),
        ("[fleet]\ntrace = 'nowhere.csv'", "nowhere.csv: cannot be read"),
        ("[fleet.noise]\nuplink_cv = -1", "fleet.noise.uplink_cv: is -1"),
        ("[training]\nbatch_size = 0", "training.batch_size: is 0"),
        ("[training]\nlearning_rate = 0", "training.learning_rate: is 0"),
        ("[planner]\nallowed_cuts = [17]", "planner.allowed_cuts[0]: is 17. Give a whole number from 1 to 16"),
        ("[fleet]\nmemory_mb = 1", "device 1: cut 1 needs 4.405 MB"),
    ],
)
def test_bad_recipes_are_explained(write, addition, message):
    answer = run(write("recipe.toml", RECIPE + addition))
    assert answer.exit_code == 1
    assert message in answer.stderr


def test_unknown_model_is_explained(write):
    answer = run(write("recipe.toml", RECIPE.replace("vgg16", "vgg61")))
    assert answer.exit_code == 1
    assert "recipe.toml: model: 'vgg61' is unknown. Did you mean 'vgg16'?" in answer.stderr


def test_recipe_of_a_model_of_the_users_own(write, tmp_path, monkeypatch):
    layers = "nn.Linear(4, width), nn.Linear(width, 2)"
    write("mynets.py", f"from torch import nn\ndef net(width):\n    return nn.Sequential({layers})\n")
    monkeypatch.chdir(tmp_path)
    recipe = """
        model = { name = "mynets:net", options = { width = 8 }, input_shape = [4], granularity = "layer" }
        convergence = { initial_gap = 1.0, budget = 1.0, drift = { power = 1.0, per_layer = [1e-3, 1e-3] } }
    """
    (data,) = lines(run(write("own.toml", recipe), "--json"))
    assert data["status"] == "optimal"
    answer = run(write("own.toml", recipe.replace("input_shape = [4], ", "")))
    assert answer.exit_code == 1
    assert "own.toml: model.input_shape: is missing, and mynets:net gives no example input" in answer.stderr


# ── parts and types of numbers ──────────────────────────────────────────────────────────────────────────────────────

TYPES = {"float32": 1.0, "int8": 1.01}


SENT = {"activation_bits": [6400.0, 3200.0, 320.0], "gradient_bits": [6400.0, 3200.0, 320.0]}  # 200, 100, 10 numbers


def both(**changes):
    """The problem by hand with larger payloads, in batches of 4, with parts and types of numbers to choose from."""
    problem = changed("batch_size", 4)
    problem["cuts"] |= SENT
    return {**problem, "planner": {"micro_batches": "auto", "wires": TYPES, **changes}}


def test_a_problem_file_with_parts_and_types_of_numbers_is_planned(write):
    file = write("both.json", both())
    (data,) = lines(run(file, "--json", "--sensitivity"))
    plain = by_hand(batch_size=4, costs=dataclasses.replace(by_hand().costs, **SENT))
    expected = planner.plan(dataclasses.replace(plain, micro_batches=(1, 2, 4), wires=TYPES))
    assert data["predicted_time_s"] == expected.predicted_time_s
    assert (data["micro_batches"], data["wire_dtype"]) == (expected.micro_batches, expected.wire_dtype) == (4, "int8")
    assert (data["wires"], data["wires_assumed"]) == (TYPES, False)
    rows = {(row["title"], row["replanned"]): row for row in data["without"]}
    plain_s = planner.plan(plain).predicted_time_s
    assert rows["both", True]["predicted_time_s"] == pytest.approx(plain_s)
    assert rows["both", True]["time_ratio"] == pytest.approx(plain_s / expected.predicted_time_s)
    assert {"micro_batches", "wire_dtype"} <= data["sensitivity"][0].keys()
    shown = " ".join(run(file).stdout.split())
    for words in ("in 4 parts", "sent in int8: 1.01 times the rounds, given", "parts, planned anew", "both, rest kept"):
        assert words in shown
    (oracle,) = lines(run(file, "--json", "--solver", "exhaustive"))
    assert oracle["predicted_time_s"] == pytest.approx(data["predicted_time_s"])


def test_cuts_may_be_counted_in_another_type(write):
    """Cuts counted in int8 (8 bits a number and 16 bits of scale) are converted to the types to choose from."""
    problem = both(wires={"float32": 1.0})
    problem["cuts"] |= {
        "activation_bits": [32 + 16, 16 + 16, 8 + 16],
        "gradient_bits": [48, 32, 24],
        "wire_dtype": "int8",
    }
    (data,) = lines(run(write("int8.json", problem), "--json"))
    problem["cuts"] |= {"activation_bits": [128, 64, 32], "gradient_bits": [128, 64, 32], "wire_dtype": "float32"}
    (same,) = lines(run(write("float32.json", problem), "--json"))
    assert data["predicted_time_s"] == same["predicted_time_s"]


@pytest.mark.parametrize(
    ("wires", "message"),
    [
        ({}, "planner.wires: is empty"),
        ({"int2": 1.0}, "planner.wires.int2: is 'int2'. Choose from: float32, float16, bfloat16, int8, int4"),
        ({"int8": 0.9}, "planner.wires.int8: is 0.9. Give a number ≥ 1"),
        ({"int8": "x"}, "planner.wires.int8: is 'x'"),
        (["int8"], "planner.wires: is ['int8']"),
    ],
)
def test_bad_types_of_numbers_are_explained(write, wires, message):
    answer = run(write("bad.json", both(wires=wires)))
    assert answer.exit_code == 1
    assert message in answer.stderr


@pytest.mark.parametrize("key", ["micro_batches", "wires"])
def test_bcd_refuses_parts_and_types(write, key):
    answer = run(
        write("both.json", both(**({"wires": None} if key != "wires" else {"micro_batches": 1}))), "--solver", "bcd"
    )
    assert answer.exit_code == 1
    assert f"planner.{key}:" in answer.stderr
    assert "or use the exact solver" in answer.stderr


AUTO = RECIPE.replace('name = "vgg16"', 'name = "vgg16"\nwire_dtype = "auto"')


def test_a_recipe_may_leave_the_type_of_numbers_to_the_plan(write):
    file = write("auto.toml", AUTO + '[planner]\nmicro_batches = "auto"\n')
    (data,) = lines(run(file, "--json"))
    assert (data["wires"], data["wires_assumed"]) == (dict(ASSUMED_FACTORS), True)
    assert data["wire_dtype"] in ("int8", "int4")
    assert data["micro_batches"] == 16
    assert " times the rounds, assumed." in " ".join(run(file).stdout.split())
    (given,) = lines(run(write("given.toml", AUTO + "[planner]\nwires = { float32 = 1.0, int4 = 1.2 }\n"), "--json"))
    assert (given["wires"], given["wires_assumed"]) == ({"float32": 1.0, "int4": 1.2}, False)
    (exact,) = lines(run(write("exact.toml", RECIPE), "--json"))
    (alone,) = lines(run(write("alone.toml", AUTO + "[planner]\nwires = { float32 = 1.0 }\n"), "--json"))
    assert exact["predicted_time_s"] == alone["predicted_time_s"]


def test_types_to_choose_from_are_refused_where_the_type_is_given(write):
    answer = run(write("recipe.toml", RECIPE + "[planner]\nwires = { int8 = 1.0 }\n"))
    assert answer.exit_code == 1
    message = (
        "planner.wires: gives types to choose from, but model.wire_dtype is 'float32'. Set model.wire_dtype to 'auto'"
    )
    assert message in answer.stderr


NORMS = RECIPE.replace('name = "vgg16"', 'name = "vgg16"\noptions = { norm = "batch" }')


def test_with_batch_norm_mini_batches_stay_whole(write):
    answer = run(write("norms.toml", NORMS + '[planner]\nmicro_batches = "auto"\n'), "--json")
    (data,) = lines(answer)
    assert data["micro_batches"] == 1
    assert "norms.toml: mini-batches stay whole: batch-norm looks at all of their samples" in answer.stderr
    answer = run(write("norms.toml", NORMS + "[planner]\nmicro_batches = 4\n"))
    assert answer.exit_code == 1
    assert "planner.micro_batches: is 4, but batch-norm looks at all samples of a mini-batch" in answer.stderr


def test_ghost_batches_have_two_samples_at_least(write):
    ghosts = NORMS + "[training]\nghost_batches = true\n"
    (data,) = lines(run(write("ghosts.toml", ghosts + '[planner]\nmicro_batches = "auto"\n'), "--json"))
    assert data["micro_batches"] == 8
    answer = run(write("ghosts.toml", ghosts + "[planner]\nmicro_batches = 16\n"))
    assert "planner.micro_batches: is 16, but leaves batch-norm 1 sample in every part. Give at most 8" in answer.stderr


# ── profile ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def profile(*arguments: str):
    return CliRunner().invoke(app, ["profile", *arguments])


def test_profile_prints_every_cut():
    answer = profile("resnet18")
    assert answer.exit_code == 0, answer.output
    shown = " ".join(answer.stdout.split())
    assert "10 layers" in shown
    assert "1 stem 3.54 3.54 262.14" in shown  # MFLOPs forward and backward, kB of activations


def test_profile_json_can_be_planned(write):
    answer = profile("vgg_digits", "--json", "--wire-dtype", "float16", "--option", "width=0.5")
    problem = changed("cuts", json.loads(answer.stdout))
    problem["convergence"]["drift"]["per_layer"] = [0.001] * 6
    assert run(write("digits.json", problem)).exit_code == 0


def test_profile_draws_a_figure(tmp_path):
    answer = profile("vgg_digits", "--plot", str(tmp_path / "cuts.png"))
    assert answer.exit_code == 0, answer.output
    assert (tmp_path / "cuts.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["vgg61"], "model: 'vgg61' is unknown. Did you mean 'vgg16'?"),
        (["nowhere.at:all"], "model: nowhere.at:all: importing 'nowhere.at' raised ModuleNotFoundError"),
        (["badnets:raises"], "model: badnets:raises raised RuntimeError: no weights today"),
        (["badnets:number"], "model: badnets:number returned a int. Return a torch.nn.Module"),
        (["badnets:one_layer", "--input-shape", "4"], "model: has 1 layer(s) with weights, so there is no legal cut"),
        (["badnets:two_layers"], "model.input_shape: is missing"),
        (
            ["badnets:two_layers", "--input-shape", "5"],
            "example_input: of shape (batch, 5) and dtype torch.float32 fails",
        ),
        (["badnets:two_layers", "--input-shape", "5"], "in layer '0' (Linear)"),
        (["badnets:two_layers", "--input-shape", "4,x"], "input-shape: is '4,x'. Give whole numbers"),
        (["badnets:two_layers", "--input-shape", "-4"], "model.input_shape[0]: is -4"),
        (["vgg16", "--option", "colour=red"], "model: vgg16 does not take these options"),
        (["vgg16", "--option", "classes"], "option: is 'classes'. Give KEY=VALUE"),
        (["vgg16", "--option", "norm=best"], "model.options.norm: is 'best'. Give 'none', 'batch' or 'group'"),
        (["vgg16", "--option", "device=cpu"], "model.options.device: is 'cpu'"),
        (["badnets:leaves"], "model: badnets:leaves raised SystemExit"),
        (["builtins:dict"], "model: builtins:dict returned a dict"),
        (["vgg_digits", "--plot", "cuts.bmp"], "plot: is 'cuts.bmp'. Give a file name that ends in .png or .svg"),
    ],
)
def test_bad_models_are_explained(write, tmp_path, monkeypatch, arguments, message):
    write("badnets.py", BAD_NETS)
    monkeypatch.chdir(tmp_path)  # a factory is found from the working directory
    monkeypatch.delitem(sys.modules, "badnets", raising=False)
    answer = profile(*arguments)
    assert answer.exit_code == 1
    assert message in answer.stderr
    assert answer.stdout == ""


def test_what_a_factory_prints_does_not_mix_with_json(write, tmp_path, monkeypatch):
    write("badnets.py", BAD_NETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "badnets", raising=False)
    answer = profile("badnets:talks", "--input-shape", "4", "--json")
    assert answer.exit_code == 0, answer.output
    assert len(json.loads(answer.stdout)["names"]) == 2
    assert "hello" in answer.stderr


def test_a_model_too_large_to_build_is_measured_by_its_shapes(monkeypatch):
    """As if vgg_digits were too large: nothing is built for real, and the costs are the same."""
    real = profile("vgg_digits", "--json").stdout
    built: list[str] = []

    def build(name, *, device, **options):
        built.append(device)
        return original(name, device=device, **options)

    original = models.build
    monkeypatch.setattr(models, "build", build)
    monkeypatch.setattr(loading, "LARGEST_BUILT", 0)
    assert profile("vgg_digits", "--json").stdout == real
    assert built == ["meta"]


BAD_NETS = """
from torch import nn

def raises():
    raise RuntimeError("no weights today")

def number():
    return 3

def leaves():
    raise SystemExit(0)

def talks():
    print("hello")
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))

def one_layer():
    return nn.Sequential(nn.Linear(4, 2), nn.ReLU())

def two_layers():
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
"""
