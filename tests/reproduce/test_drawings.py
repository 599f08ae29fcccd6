"""The paper's figures as files."""

import csv
import dataclasses
import sys
from pathlib import Path

import pytest

from adaptsfl import loading
from adaptsfl.errors import InvalidInput
from adaptsfl.paper_costs import vgg16
from adaptsfl.reproduce import numbers
from adaptsfl.reproduce.drawings import write_figure
from adaptsfl.reproduce.numbers import Evidence
from reproduced import evaluated_as, evidence_of

# What is written in each figure: one of every kind.
WORDS = {
    "motivation-interval": ("(a) Test accuracy versus epochs", "rounds of model aggregation", " = 15", "epochs"),
    "motivation-cut": ("(a) Computing and communication overhead", "GFLOP", "16 fc3", " = 12", "activations"),
    "accuracy": ("(d) CIFAR-100", "training time (minutes)", "AdaptSFL", "DAMA+RMS", "test accuracy (%)"),
    "converged": ("(d) CIFAR-100", "accuracy (%)", "time (minutes)", "RMA+AMS"),
    "uncertainty": ("(b) Uplink transmission", "coefficient of variation", "% accuracy", "MA+RMS"),
}


@pytest.fixture(autouse=True)
def _matplotlib(request: pytest.FixtureRequest) -> None:
    if "without" not in request.node.name:
        pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'adaptsfl[plots]'")


@pytest.fixture(autouse=True)
def _costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """VGG-16 as counted by hand: measuring the real one takes seconds."""
    monkeypatch.setattr(loading, "model_costs", lambda model, batch_size, optimizer: vgg16(10, batch_size))


def study_of(evidence: Evidence, name: str):
    return next(study for study in evidence.studies if study.name == name)


def drawn(name: str, folder: Path, seeds: int = 1, **changes) -> Evidence:
    evidence = evidence_of(["accuracy", name] if name == "converged" else [name], seeds=seeds, **changes)
    write_figure(study_of(evidence, name), evidence, folder)
    return evidence


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("seeds", [1, 2])
@pytest.mark.parametrize("name", WORDS)
def test_every_kind(name, seeds, tmp_path):
    evidence = drawn(name, tmp_path, seeds)
    study = study_of(evidence, name)
    names = {f"{name}.png", f"{name}.svg", *(f"{name}-{panel.name}.csv" for panel in study.panels)}
    assert {file.name for file in tmp_path.iterdir()} == names
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    svg = (tmp_path / f"{name}.svg").read_text()
    rounds = f"{study.panels[0].recipe.run.rounds} rounds"
    for words in (*WORDS[name], "Scale: smoke", f"{seeds} seed", rounds, "at width 0.0625, charged at width 1.0"):
        assert words in svg, words


def test_tables_have_the_numbers_of_the_runs_to_the_last_digit(tmp_path):
    evidence = drawn("motivation-interval", tmp_path, seeds=2)
    found = rows(tmp_path / "motivation-interval-epochs.csv")
    for run in evidence.of("motivation-interval/epochs"):
        own = [row for row in found if row["policy"] == run.policy and row["seed"] == str(run.seed)]
        assert [float(row["accuracy"]) for row in own] == run.evaluations.accuracies.tolist()
        assert [int(row["round"]) for row in own] == run.evaluations.rounds.tolist()
        assert [float(row["epochs"]) for row in own] == numbers.epochs(run).tolist()
        assert {row["label"] for row in own} == {numbers.label_of(run)}
    assert {row["seed"] for row in found} == {"0", "1", "mean"}


def test_the_table_of_the_overhead(tmp_path):
    drawn("motivation-cut", tmp_path)
    found = rows(tmp_path / "motivation-cut-overhead.csv")
    costs = vgg16(10, 16)
    assert [row["layer"] for row in found] == list(costs.names)
    assert [int(row["cut"]) for row in found] == list(range(1, 17))
    assert float(found[7]["compute_gflop"]) == pytest.approx(16e-9 * (costs.forward_flops + costs.backward_flops)[7])
    assert float(found[7]["model_mb"]) == pytest.approx(costs.client_model_bits[7] / 8e6)


def test_the_same_files_from_the_same_runs(tmp_path):
    for folder in ("one", "two"):
        drawn("accuracy", tmp_path / folder)
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes(), file.name


def test_a_panel_without_runs_says_so(tmp_path):
    evidence = evidence_of(["accuracy"], seeds=1)
    kept = {"accuracy/cifar10-iid": evidence.runs["accuracy/cifar10-iid"]}
    evidence = Evidence(evidence.studies, kept)
    files = write_figure(evidence.studies[0], evidence, tmp_path)
    assert [file.name for file in files] == ["accuracy.png", "accuracy.svg", "accuracy-cifar10-iid.csv"]
    svg = (tmp_path / "accuracy.svg").read_text()
    assert "accuracy/cifar100-iid was not run" in svg
    assert "6 of 24 runs" in svg


@pytest.mark.parametrize("name", ["accuracy", "motivation-cut"])
def test_a_figure_without_runs_is_left_out(name, tmp_path):
    evidence = evidence_of([name])
    assert write_figure(evidence.studies[0], Evidence(evidence.studies, {}), tmp_path / "figures") == []
    assert not (tmp_path / "figures").exists()


def test_work_and_traffic_alone_need_no_runs(tmp_path):
    study = evidence_of(["motivation-cut"]).studies[0]
    alone = dataclasses.replace(study, panels=study.panels[:1])
    assert alone.panels[0].draw == "overhead"
    assert len(write_figure(alone, Evidence((alone,), {}), tmp_path)) == 3
    assert "GFLOP" in (tmp_path / "motivation-cut.svg").read_text()


@pytest.mark.parametrize("apart", [{"psl"}, {"psl", "sfl", "fixed@I=15", "adaptsfl"}])
def test_seeds_that_share_no_time_have_no_mean(apart, tmp_path):
    """One seed has ended before the other is first evaluated."""
    evidence = evidence_of(["ablation-interval"], seeds=2)
    times = [[(100.0, 0.3), (200.0, 0.4)], [(300.0, 0.3), (400.0, 0.4)]]
    runs = {
        key: tuple(evaluated_as(run, times[run.seed]) if run.policy in apart else run for run in found)
        for key, found in evidence.runs.items()
    }
    write_figure(evidence.studies[0], Evidence(evidence.studies, runs), tmp_path)
    svg = (tmp_path / "ablation-interval.svg").read_text()
    assert "PSL" in svg
    assert "have no x in common" in svg
    assert ("no mean: seeds" in svg) == (len(apart) == 4)
    found = [row["accuracy"] for row in rows(tmp_path / "ablation-interval-iid.csv") if row["policy"] == "psl"]
    assert found == ["0.3", "0.4", "0.3", "0.4"]


def test_a_policy_looks_the_same_whoever_is_beside_it(tmp_path):
    evidence = evidence_of(["devices"], seeds=1)
    alone = {key: tuple(run for run in runs if run.policy == "rma+rms") for key, runs in evidence.runs.items()}
    write_figure(evidence.studies[0], Evidence(evidence.studies, alone), tmp_path)
    svg = (tmp_path / "devices.svg").read_text()
    assert "#cc79a7" in svg
    assert "#0072b2" not in svg


@pytest.mark.parametrize("seeds", [1, 2])
def test_a_policy_that_never_gets_a_number(seeds, tmp_path):
    evidence = evidence_of(["devices"], seeds=seeds)
    nan = float("nan")
    runs = {
        key: tuple(evaluated_as(run, [(9, nan)]) if run.policy == "ma+rms" else run for run in found)
        for key, found in evidence.runs.items()
    }
    write_figure(evidence.studies[0], Evidence(evidence.studies, runs), tmp_path)
    svg = (tmp_path / "devices.svg").read_text()
    assert "AdaptSFL</text>" in svg
    assert "MA+RMS</text>" not in svg.replace("RMA+RMS", "")  # in no legend
    assert "nan" not in (tmp_path / "devices-iid.csv").read_text()
    assert "MA+RMS has no run that ended with an accuracy in: CIFAR-10 under IID setting; CIFAR-10 under non-IID" in (
        svg.replace("RMA+RMS", "")
    )


def test_runs_of_very_different_lengths(tmp_path):
    """A hundred times slower, and evaluated before the first second too."""
    evidence = evidence_of(["ablation-interval"], seeds=1)
    slow = [(1000.0 * k, 0.05 * k) for k in range(1, 13)]
    fast = [(10.0 * k - 10.0, 0.06 * k) for k in range(1, 13)]
    runs = {
        key: tuple(evaluated_as(run, slow if run.policy == "psl" else fast) for run in found)
        for key, found in evidence.runs.items()
    }
    write_figure(evidence.studies[0], Evidence(evidence.studies, runs), tmp_path)
    assert "Time is logarithmic" in (tmp_path / "ablation-interval.svg").read_text()


def test_names_that_matplotlib_and_csv_would_read_as_something_else(tmp_path):
    odd = '_$x^2$, "quoted"\n=1+1 é'
    evidence = evidence_of(["accuracy"], seeds=2, title=odd)
    study = evidence.studies[0]
    renamed = tuple(dataclasses.replace(panel, title="50 % of $a_b & <c>") for panel in study.panels)
    study = dataclasses.replace(study, panels=renamed)
    write_figure(study, Evidence((study,), evidence.runs), tmp_path)
    assert "(a) 50 % of $a_b &amp; &lt;c&gt;" in (tmp_path / "accuracy.svg").read_text()
    assert {row["label"] for row in rows(tmp_path / "accuracy-cifar10-iid.csv")} == {odd}


@pytest.mark.parametrize("count", [1, 3])
def test_other_numbers_of_panels(count, tmp_path):
    evidence = evidence_of(["accuracy"], seeds=1)
    study = dataclasses.replace(evidence.studies[0], panels=evidence.studies[0].panels[:count])
    files = write_figure(study, Evidence((study,), evidence.runs), tmp_path)
    assert len(files) == 2 + count


def test_without_matplotlib_the_tables_are_there(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    evidence = evidence_of(["devices"])
    with pytest.raises(InvalidInput, match=r"need matplotlib\. Install it"):
        write_figure(evidence.studies[0], evidence, tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"devices-iid.csv", "devices-noniid.csv"}


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "figures").write_text("a file")
    with pytest.raises(InvalidInput, match="cannot be written"):
        drawn("devices", tmp_path / "figures")
