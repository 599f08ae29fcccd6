"""The page as text: what it says, how large it gets, and that it fetches nothing."""

import base64
import dataclasses
import html
import json
import re

import numpy as np
import pytest

from adaptsfl.errors import InvalidInput
from adaptsfl.fleet import FIXED, RATES
from adaptsfl.latency import PHASES
from adaptsfl.report.page import page_text, write_page
from adaptsfl.report.page_data import ESTIMATE_TITLES, MOST_COLUMNS, MOST_ROWS, RESOURCES, page_data
from adaptsfl.runs.folder import find_runs
from simulated_runs import as_deployed, write_simulated_run

MEGABYTE = 1_000_000


def embedded(text: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL).group(1))


def test_nothing_is_fetched(runs):
    text = page_text(runs)
    assert not re.findall(r"""(?:src|href|action|data)\s*=\s*["']?\s*(?:https?:)?//""", text)
    assert not re.findall(r"url\(|@import|\bfetch\(|XMLHttpRequest|WebSocket|\bimport\(|<link|<img|<iframe", text)
    assert "default-src 'none'" in text
    assert "unsafe" not in text


def test_nothing_is_left_to_fill_in(runs):
    assert not re.findall(r"\{\{\w+\}\}", page_text(runs))


def test_the_page_says_what_was_run_and_how_it_went(runs):
    text = html.unescape(page_text(runs))
    for words in (
        "VGG-16 on twenty devices",
        "4 policies, 2 seeds, 6 devices, a model of 16 layers, batches of 16",
        "adaptsfl-seed1",
        "learning_rate</dt><dd>0.05",
        "options.classes</dt><dd>10",
        "name</dt><dd>adaptsfl, ma+rms, rma+ms, rma+rms",
        "torch</dt><dd>2.13.0",
    ):
        assert words in text, words
    assert "did not finish" not in text
    stopped = [dataclasses.replace(runs[0], status="stopped", ended_by="seconds"), *runs[1:]]
    assert "1 of 8 runs did not finish" in page_text(stopped)


def test_users_text_is_escaped(runs):
    wild = "</script><b>'\"&{{data}}"
    run = dataclasses.replace(runs[0], name=wild, title=wild, recipe={wild: wild}, devices=(wild, *runs[0].devices[1:]))
    text = page_text([run])
    assert text.count("</script>") == 2
    assert wild not in text
    assert "<b>'" not in text
    assert embedded(text)["series"][0]["label"] == wild
    assert embedded(text)["details"][0]["plan"]["rows"][0] == wild


def test_seconds_by_phase_are_those_of_the_record(runs):
    first = page_data(runs)["series"][0]
    ours = [run for run in runs if run.policy == "adaptsfl"]
    for phase in PHASES:
        mean = np.mean([sum(block.seconds[phase] for block in run.blocks) for run in ours])
        assert first["phases"][phase] == pytest.approx(mean, rel=1e-4)


def test_cuts_can_be_read_back(runs):
    run = runs[0]
    plan = page_data([run])["details"][0]["plan"]
    cuts = np.frombuffer(base64.b64decode(plan["cuts"]), dtype="u1").reshape(len(plan["rows"]), -1)
    assert cuts.T.tolist() == [list(block.cuts) for block in run.blocks]
    assert plan["interval"] == [block.interval for block in run.blocks]


def test_only_scalar_estimates_are_shown_with_words_and_ranges(runs):
    charts = page_data(runs)["details"][0]["estimates"]["charts"]
    titles = [chart["title"] for chart in charts]
    assert titles[0] == "Rounds that the plan needs, relative to I = 1"
    assert [title.partition(":")[0] for title in titles[1:]] == ["κ", "gradient norm2"]  # those without words come last
    assert [sorted(chart) for chart in charts] == [["high", "low", "title", "values"]] * 2 + [["title", "values"]]
    for low, value, high in zip(*(charts[0][key] for key in ("low", "values", "high")), strict=True):
        assert low <= value <= high


def test_what_was_believed_of_the_fleet_is_shown_block_by_block(runs):
    """In words and units; a device that was absent has no value, and the median is that of those present."""
    run = runs[0]
    fleet = page_data([run])["details"][0]["fleet"]
    assert fleet["edges"] == pytest.approx([0.0, *(block.time_s for block in run.blocks)], rel=1e-4)
    assert [one["title"] for one in fleet["resources"]] == ["processor", *(f"{link} server" for link in LINKS)]
    uplink = fleet["resources"][1]
    recorded = np.array([block.resources["uplink_bps"] for block in run.blocks]) / 1e6
    assert uplink["unit"] == "Mbit/s"
    np.testing.assert_allclose(np.array(uplink["lines"], dtype=float).T, recorded, rtol=1e-2)
    assert uplink["quantiles"][2] == pytest.approx(np.nanmedian(recorded, axis=1), rel=1e-2)
    assert np.isnan(recorded).any()


LINKS = ("uplink to the edge", "downlink from the edge", "uplink to the fed", "downlink from the fed")


def test_a_deployed_run_shows_all_that_it_believed(runs):
    detail = page_data([as_deployed(runs[0])])["details"][0]
    titles = [chart["title"] for chart in detail["estimates"]["charts"]]
    assert titles[:3] == [ESTIMATE_TITLES[name] for name in ("relative_rounds", "kappa", "averagings")]
    assert [one["title"] for one in detail["fleet"]["resources"]] == [title for title, *_ in RESOURCES.values()]
    latency = next(one for one in detail["fleet"]["resources"] if one["title"].startswith("latency of the uplink"))
    assert latency["lines"][2][:3] == pytest.approx([3.0, 4.0, 5.0])
    turn, to_fed, from_fed, averaging = detail["fleet"]["servers"]["rows"]
    assert turn["fixed_ms"] == pytest.approx([2.0, 24.0])
    assert (to_fed["unit"], from_fed["fixed_ms"], averaging["rates"]) == ("Mbit/s", [0.0, 0.0], [2000.0, 2000.0])
    assert set(RESOURCES) == {*RATES, *FIXED}


def test_what_did_not_change_is_not_drawn_over_time(runs):
    first = runs[0].blocks[0].resources
    blocks = [
        dataclasses.replace(block, resources={**block.resources, "flops": first["flops"]}) for block in runs[0].blocks
    ]
    processor, uplink, *_ = page_data([dataclasses.replace(runs[0], blocks=tuple(blocks))])["details"][0]["fleet"][
        "resources"
    ]
    assert ("lines" in processor, "lines" in uplink) == (False, True)
    assert processor["values"] == pytest.approx(np.array(first["flops"]) / 1e9, rel=1e-3)


def test_a_large_experiment_stays_small(tmp_path):
    """Four policies, two seeds, 1000 blocks and 100 devices."""
    for name in ("adaptsfl", "rma+rms"):
        write_simulated_run(tmp_path / f"{name}-seed0", name, name, 0, devices=120, blocks=1000)
    large = find_runs([tmp_path])
    many = [
        dataclasses.replace(run, policy=f"{run.policy}{k}", title=f"{run.title} {k}") for run in large for k in range(4)
    ]
    text = page_text(many)
    assert len(text.encode()) < 3 * MEGABYTE
    data = embedded(text)
    assert len(data["details"]) == 8
    plan = data["details"][0]["plan"]
    assert (len(plan["block"]), len(plan["rows"]), plan["devices"]) == (MOST_COLUMNS, MOST_ROWS, 120)
    assert plan["edges"][-1] == pytest.approx(large[0].time_s, rel=1e-4)
    assert plan["block"][0] <= 5
    assert plan["block"] == sorted(plan["block"])
    assert plan["block"][-1] >= 995


def test_of_many_runs_the_first_seeds_are_shown_in_detail(runs):
    many = [dataclasses.replace(run, seed=seed) for run in runs for seed in range(3)]
    assert [entry["series"] for entry in page_data(many)["details"]] == [0, 1, 2, 3]


def test_models_of_many_layers(runs):
    """Cuts beyond 255 need two bytes."""
    run, layers = runs[0], 300
    costs = dataclasses.replace(
        run.costs,
        **{
            field: np.linspace(1, 2, layers)
            for field in ("forward_flops", "backward_flops", "activation_bits", "gradient_bits", "client_model_bits")
        },
        memory_bytes=None,
        names=(),
    )
    blocks = tuple(dataclasses.replace(block, cuts=(300,) * len(block.cuts)) for block in run.blocks)
    names = tuple(f"layer {k}" for k in range(layers))
    plan = page_data([dataclasses.replace(run, costs=costs, blocks=blocks, layers=names)])["details"][0]["plan"]
    assert plan["bytes"] == 2
    assert set(np.frombuffer(base64.b64decode(plan["cuts"]), dtype="<u2").tolist()) == {300}


def test_a_place_that_cannot_be_written(runs, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match="cannot be written"):
        write_page(runs, tmp_path / "file" / "report.html")
