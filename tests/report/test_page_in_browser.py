"""The page as a browser shows it."""

import json
import re
from pathlib import Path

import pytest

from adaptsfl.report.page import write_page
from adaptsfl.runs.folder import RUN, find_runs, write_run
from browser import asked, chromium, dom, needs_chromium
from simulated_runs import POLICIES, as_deployed, write_experiment, write_simulated_run

pytestmark = needs_chromium

CHARTS = ("accuracy", "phases", "interval", "cuts", "blocks", "lanes")
HOSTILE = "</script><script>document.title = 'owned'</script><img src=x onerror=\"document.title='owned'\">{{js}}"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_experiment(tmp_path_factory.mktemp("experiment"))
    write_page(find_runs([folder]), folder / "report.html")
    return folder / "report.html"


def no_fault(text: str) -> bool:
    return re.search(r'<p id="errors" role="alert" hidden=""></p>', text) is not None


def chosen_from(text: str, name: str) -> int:
    return re.search(rf'<select id="{name}">(.*?)</select>', text, re.DOTALL).group(1).count("<option")


def chart(text: str, name: str) -> str:
    found = re.search(rf'id="chart-{name}">(.*?)</svg>', text, re.DOTALL)
    assert found is not None, name
    return found.group(1)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_chart_is_drawn(page, tmp_path, scheme):
    text = dom(tmp_path, page, scheme=scheme)
    assert no_fault(text)
    for name in CHARTS:
        assert "aria-label=" in chart(text, name)
    # per policy a band, a mean and one line per seed
    assert chart(text, "accuracy").count("<path") == len(POLICIES) * (2 + 2)
    assert chart(text, "phases").count("<rect") >= len(POLICIES) * 5
    assert chart(text, "lanes").count("<path") == 5
    assert text.count('aria-pressed="true"') == len(POLICIES)
    assert chosen_from(text, "choose-run") == 2 * len(POLICIES)
    assert chosen_from(text, "choose-device") == 1 + 20
    assert "NaN" not in text
    assert "undefined" not in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)


def test_a_fault_would_be_seen(page, tmp_path):
    broken = tmp_path / "broken.html"
    broken.write_text(re.sub(r'"targets":\[[^]]*\]', '"targets":null', page.read_text(), count=1))
    text = dom(tmp_path, broken)
    assert "This page has a fault: drawAccuracy:" in text
    assert "<rect" in chart(text, "phases")  # the other views are there


@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_sticks_out(page, tmp_path, width):
    question = """
        const root = page.document.documentElement;
        const charts = [...page.document.querySelectorAll(".chart svg")];
        return [root.scrollWidth - root.clientWidth, charts.length,
            Math.max(...charts.map((chart) => chart.getBoundingClientRect().right)) <= root.clientWidth,
            page.document.getElementById("errors").textContent];
    """
    too_wide, charts, inside, faults = asked(tmp_path, page, question, width=width)
    assert too_wide <= 0
    assert charts > len(CHARTS)
    assert inside
    assert faults == ""


def test_toggles_axis_run_and_block(page, tmp_path):
    question = """
        const doc = page.document, at = (id) => doc.getElementById(id);
        const press = (name, value) => doc.querySelector(`input[name=${name}][value=${value}]`).click();
        const label = (id) => at(id).querySelector("svg").getAttribute("aria-label");
        const change = (id, value, event) => { at(id).value = value; at(id).dispatchEvent(new page.Event(event)); };
        const answers = {};
        const button = doc.querySelector("#policies button");
        button.click();
        answers.pressed = button.getAttribute("aria-pressed");
        const first = () => doc.querySelector("#chart-accuracy g[data-series='0']");
        answers.shown = page.getComputedStyle(first()).display;
        press("axis", "rounds");
        answers.kept = first().classList.contains("off");
        answers.rounds = label("chart-accuracy");
        press("value", "losses");
        answers.loss = label("chart-accuracy");
        press("per", "share");
        answers.share = at("chart-phases").textContent.includes("100 %");
        change("choose-run", "7", "change");
        answers.run = label("chart-cuts");
        answers.estimates = at("charts-estimates").textContent;
        change("choose-block", "0", "input");
        answers.block = label("chart-lanes");
        answers.faults = at("errors").textContent;
        return answers;
    """
    answers = asked(tmp_path, page, question, width=900)
    assert answers["faults"] == ""
    assert answers["pressed"] == "false"
    assert answers["shown"] == "none"
    assert answers["kept"]
    assert answers["rounds"].startswith("Test accuracy against rounds")
    assert answers["loss"].startswith("Test loss against rounds")
    assert answers["share"]
    assert "RMA+RMS, seed 1" in answers["run"]
    assert "does not ask" in answers["estimates"]
    assert answers["block"].startswith("One round of block 1,")


@pytest.mark.parametrize(("width", "devices"), [(360, 3), (1280, 50)])
def test_the_fleet_over_time(tmp_path, width, devices):
    """A few devices are a line each, many are shares; one can be chosen; nothing sticks out."""
    place = write_simulated_run(tmp_path / "adaptsfl-seed0", "adaptsfl", "AdaptSFL", 0, devices=devices, blocks=6)
    write_page([as_deployed(run) for run in find_runs([place])], tmp_path / "report.html")
    question = """
        const doc = page.document, at = (id) => doc.getElementById(id);
        const charts = () => [...at("charts-fleet").querySelectorAll("svg")];
        const change = (id, value) => { at(id).value = value; at(id).dispatchEvent(new page.Event("change")); };
        const label = (chart) => chart.getAttribute("aria-label");
        const thick = () => charts()[3].querySelector(".ink").getAttribute("d");
        const answers = { time: charts().map(label), median: thick() };
        answers.paths = charts()[3].querySelectorAll("path").length;
        const chart = charts()[3], seen = chart.getBoundingClientRect();
        chart.dispatchEvent(new page.PointerEvent("pointermove", { clientX: seen.left + 80, clientY: seen.top + 40 }));
        answers.tip = chart.parentElement.querySelector(".tip").textContent;
        change("choose-device", "2");
        answers.chosen = thick();
        answers.note = at("fleet-time-note").textContent;
        doc.querySelector("input[name=fleet][value=spread]").click();
        answers.spread = charts().map(label);
        answers.servers = at("server-table").textContent;
        answers.wide = doc.documentElement.scrollWidth - doc.documentElement.clientWidth;
        answers.faults = at("errors").textContent;
        return answers;
    """
    answers = asked(tmp_path, tmp_path / "report.html", question, width=width)
    assert (answers["faults"], answers["wide"]) == ("", 0)
    assert len(answers["time"]) == len(answers["spread"]) == 11
    assert re.match(r"uplink to the edge server over time, .*: between \d+(\.\d+)?\sMbit/s and", answers["time"][3])
    assert answers["paths"] == (2 if devices <= 12 else 3)  # behind the thick line: devices, or two shares
    assert re.match(r"block 1, planned after 0 smedian [\d.]+\sMbit/slowest .*highest ", answers["tip"])
    assert answers["chosen"] != answers["median"]
    assert answers["note"].endswith("the thick line is phone 2.")
    assert answers["spread"][0].startswith("Histogram of processor over devices")
    assert "averaging at the fed server" in answers["servers"]


def test_pointer_and_arrow_keys_show_values(page, tmp_path):
    question = """
        const doc = page.document, texts = [];
        for (const id of ["accuracy", "phases", "interval", "cuts", "blocks", "lanes"]) {
            const chart = doc.querySelector(`#chart-${id} svg`), place = chart.getBoundingClientRect();
            const pointer = { clientX: place.left + place.width / 2, clientY: place.top + 40 };
            chart.dispatchEvent(new page.PointerEvent("pointermove", pointer));
            texts.push(doc.querySelector(`#chart-${id} .tip`).textContent);
        }
        const chart = doc.querySelector("#chart-accuracy svg");
        chart.dispatchEvent(new page.KeyboardEvent("keydown", { key: "ArrowLeft" }));
        texts.push(doc.querySelector("#chart-accuracy .tip").textContent);
        chart.dispatchEvent(new page.KeyboardEvent("keydown", { key: "Escape" }));
        texts.push(doc.querySelector("#chart-accuracy .tip").hidden);
        return texts;
    """
    *texts, hidden = asked(tmp_path, page, question, width=900)
    expected = [r"MA\+RMS: \d+\.\d % ± ", "activation upload: ", "averaged every", "cut after layer", "held up by"]
    for text, pattern in zip(texts, [*expected, "server's turn", r"MA\+RMS: \d+\.\d %"], strict=True):
        assert re.search(pattern, text), text
    assert hidden is True


def test_hostile_names_are_text(tmp_path):
    for seed in (0, 1):
        place = write_simulated_run(
            tmp_path / f"x-seed{seed}", "x", HOSTILE, seed, devices=2, blocks=3, ended_by=HOSTILE
        )
        info = json.loads((place / RUN).read_text())
        changes = {"name": HOSTILE, "recipe": {HOSTILE: {"name": HOSTILE}}, "devices": [HOSTILE, "</style>"]}
        write_run(place, {**info, **changes, "layers": [HOSTILE] * len(info["layers"])})
    write_page(find_runs([tmp_path]), tmp_path / "report.html")
    text = dom(tmp_path, tmp_path / "report.html")
    assert no_fault(text)
    assert "<title>owned" not in text
    assert "<img" not in text
    assert text.count("<script") == 2


def test_the_policy_stops_a_script_that_got_in(page, tmp_path):
    """Were the escaping to fail, the page's security policy would still run nothing foreign."""
    infected = tmp_path / "infected.html"
    infected.write_text(page.read_text().replace("<main>", "<main><script>document.title = 'owned'</script>"))
    text = dom(tmp_path, infected)
    assert "<title>owned" not in text
    assert "<path" in chart(text, "accuracy")


def test_runs_without_anything_to_draw(tmp_path):
    write_simulated_run(tmp_path / "sl-seed0", "sl", "Vanilla SL", 0, devices=2, blocks=3, trainer="relay")
    place = write_simulated_run(tmp_path / "new-seed0", "new", "New", 0, devices=1, blocks=1, status="running")
    (place / "record.jsonl").unlink()
    write_page(find_runs([tmp_path]), tmp_path / "report.html")
    text = dom(tmp_path, tmp_path / "report.html")
    assert no_fault(text)
    assert "devices take turns under this policy" in text
    write_page(find_runs([place]), tmp_path / "alone.html")
    assert no_fault(dom(tmp_path, tmp_path / "alone.html"))


def test_paper_and_picture(page, tmp_path):
    chromium(tmp_path, page, "--no-pdf-header-footer", f"--print-to-pdf={tmp_path / 'report.pdf'}")
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")
    assert (tmp_path / "report.pdf").stat().st_size > 50_000
    chromium(tmp_path, page, "--window-size=1280,2000", f"--screenshot={tmp_path / 'report.png'}")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_printing_shows_policies_that_were_switched_off(page, tmp_path):
    question = """
        const doc = page.document;
        doc.querySelector("#policies button").click();
        const rules = [...doc.styleSheets[0].cssRules].filter((rule) => rule.cssText.includes(".off"));
        page.dispatchEvent(new page.Event("beforeprint"));
        const faults = doc.getElementById("errors").textContent;
        return [rules.map((rule) => rule.conditionText), doc.querySelector("details").open, faults];
    """
    media, opened, faults = asked(tmp_path, page, question, width=900)
    assert media == ["screen"]  # hidden on screens only
    assert opened
    assert faults == ""
