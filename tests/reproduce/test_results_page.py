"""All figures and claims as one page: what it says, that it is safe, and how a browser shows it."""

import dataclasses
import html
import re
from pathlib import Path

import pytest

from adaptsfl.errors import InvalidInput
from adaptsfl.reproduce.claims import Claim, JudgedClaim
from adaptsfl.reproduce.drawings import write_figure
from adaptsfl.reproduce.numbers import Evidence
from adaptsfl.reproduce.results_page import write_results_page
from browser import asked, chromium, dom, needs_chromium
from reproduced import evidence_of

HOSTILE = (
    "</style></script><script>document.title = 'owned'</script><img src=x onerror=\"document.title='owned'\">{{css}}"
)


ROW = JudgedClaim(
    Claim(
        name="devices-fastest",
        figure="Fig. 10",
        claim="AdaptSFL is fastest with any number of devices",
        criterion="Holds if it is at every point",
        panels=["devices/iid"],
        compare="sooner",
    ),
    measured="6.1 times",
    verdict="holds",
)
CLAIMS = [
    ROW,
    dataclasses.replace(ROW, verdict="holds in part", measured="IID: 6.1 times\nnon-IID: 0.9 times"),
    dataclasses.replace(ROW, verdict="does not hold", note="one seed"),
    dataclasses.replace(ROW, verdict="not tried"),
]


def written(folder: Path, evidence: Evidence, claims=CLAIMS, **given) -> str:
    for study in evidence.studies:
        write_figure(study, evidence, folder / "figures")
    write_results_page(evidence, folder / "figures", claims, folder / "report.html", **given)
    return (folder / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'adaptsfl[plots]'")
    folder = tmp_path_factory.mktemp("results")
    evidence = evidence_of(["motivation-interval", "devices", "uncertainty"], seeds=1)
    (folder / "devices" / "iid").mkdir(parents=True)
    (folder / "devices" / "iid" / "report.html").write_text("<p>the runs</p>")
    runs = {key: found for key, found in evidence.runs.items() if not key.startswith("uncertainty")}
    commands = ["adaptsfl reproduce devices --scale smoke", "echo '<done>'"]
    written(folder, Evidence(evidence.studies, runs), commands=commands)
    return folder / "report.html"


def test_it_says_what_was_run_and_what_the_scale_changes(page):
    text = html.unescape(page.read_text(encoding="utf-8"))
    for words in (
        "The paper’s figures at smoke scale",
        "2 of 3 figures, from 20 runs.",
        "Without runs: Fig. 9.",
        "Handwritten digits of 32×32 pixels instead of CIFAR",
        '<th scope="row">run.rounds</th><td>31250</td><td>24</td><td>all</td>',
        '<th scope="row">data.name</th><td>cifar10</td><td>digits32</td><td>all</td>',
        '<th scope="row">model.charged_as.width</th><td>–</td><td>1.0</td>',
        "with any number of devices<small>Holds if it is at every point</small>",
        "IID: 6.1 times\nnon-IID: 0.9 times",
        "6.1 times<small>one seed</small>",
        "Fig. 2: The impact of client-side model aggregation",
        "Fig. 10: Converged time versus number of edge devices",
        "adaptsfl reproduce devices --scale smoke\necho '<done>'",
        "devices/iid</dt><dd>8 min 12 s, 8 runs",
        "all</dt><dd>20 min 30 s",
        "torch</dt><dd>2.13.0",
    ):
        assert words in text, words
    assert "Fig. 9: " not in text
    assert not re.findall(r"\{\{\w+\}\}", text)


def test_verdicts_have_colours(page):
    text = page.read_text(encoding="utf-8")
    found = re.findall(r'class="verdict (\w+)">([^<]*)<', text)
    assert found == [("good", "holds"), ("part", "holds in part"), ("bad", "does not hold"), ("open", "not tried")]


def test_links_lead_to_files_that_are_there(page):
    links = re.findall(r'href="([^"#]+)"', page.read_text(encoding="utf-8"))
    assert "figures/devices.svg" in links
    assert "figures/motivation-interval-aggregations.csv" in links
    assert "devices/iid/report.html" in links
    assert "devices/noniid/report.html" not in links  # nobody wrote it
    assert all((page.parent / link).is_file() for link in links)


def test_nothing_is_fetched(page):
    text = page.read_text(encoding="utf-8")
    assert not re.findall(r"""(?:src|href|action)\s*=\s*["']?\s*(?:https?:)?//""", text)
    assert not re.findall(r"url\(|@import|<link|<iframe|<script", text)
    assert set(re.findall(r'src="([a-z]+:[a-z/]+)', text)) == {"data:image/png"}
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', text).group(1)
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "img-src data:" in policy
    assert "script-src" not in policy


def test_the_papers_own_scale_changes_nothing(tmp_path):
    evidence = evidence_of(["devices"], "paper", seeds=1)
    write_results_page(evidence, tmp_path, [], tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Nothing: this is the paper’s setting." in text
    assert "None were judged." in text
    assert "Not drawn." in text  # no figure lies there
    assert "Scale: paper" in text


def test_runs_that_did_not_finish_are_counted(tmp_path):
    evidence = evidence_of(["devices"], seeds=1)
    first, *others = evidence.runs["devices/iid"]
    runs = {**evidence.runs, "devices/iid": (dataclasses.replace(first, status="stopped"), *others)}
    write_results_page(Evidence(evidence.studies, runs), tmp_path, [], tmp_path / "report.html")
    assert "1 of 16 runs did not finish" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match="cannot be written"):
        write_results_page(evidence_of(["devices"]), tmp_path, [], tmp_path / "file" / "report.html")


@needs_chromium
@pytest.mark.parametrize("width", [360, 1280])
def test_every_picture_is_seen_and_nothing_sticks_out(page, tmp_path, width):
    question = """
        const root = page.document.documentElement;
        const pictures = [...page.document.images];
        return [root.scrollWidth - root.clientWidth, pictures.map((picture) => picture.naturalWidth),
            pictures.every((picture) => picture.getBoundingClientRect().right <= root.clientWidth),
            page.getComputedStyle(page.document.querySelector(".verdict.good")).borderRadius];
    """
    too_wide, widths, inside, radius = asked(tmp_path, page, question, width=width)
    assert too_wide <= 0
    assert widths == [1440, 1440]  # decoded, not blocked
    assert inside
    assert radius == "999px"  # the style's hash is right


@needs_chromium
def test_hostile_text_is_text(tmp_path):
    evidence = evidence_of(["devices"], seeds=1, title=HOSTILE, versions={HOSTILE: HOSTILE})
    study = evidence.studies[0]
    panels = tuple(
        dataclasses.replace(panel, title=HOSTILE, differences=((HOSTILE, HOSTILE, {"a": HOSTILE}),))
        for panel in study.panels
    )
    study = dataclasses.replace(study, title=HOSTILE, figure=HOSTILE, changes=(HOSTILE,), panels=panels)
    texts = dict.fromkeys(("name", "figure", "claim", "criterion", "compare", "paper"), HOSTILE)
    claim = Claim(**texts, panels=[])
    claims = [JudgedClaim(claim, HOSTILE, HOSTILE, HOSTILE)]
    evidence = Evidence((study,), evidence.runs)
    write_results_page(evidence, tmp_path, claims, tmp_path / "report.html", commands=[HOSTILE])
    text = dom(tmp_path, tmp_path / "report.html")
    assert "<title>owned" not in text
    assert "<script" not in text
    assert "<img" not in text
    assert text.count("</style>") == 1


@needs_chromium
def test_a_browser_complains_of_nothing(page, tmp_path):
    """A page that its own policy stops in anything says so on the console, which goes to a log file."""

    def console(path: Path) -> list[str]:
        log = tmp_path / f"{path.stem}.log"
        chromium(tmp_path, path, "--enable-logging", f"--log-file={log}", "--dump-dom")
        return [line for line in log.read_text(errors="replace").splitlines() if "CONSOLE" in line]

    assert console(page) == []
    wrong = tmp_path / "wrong.html"
    wrong.write_text(page.read_text(encoding="utf-8").replace("<main>", "<main><script>1</script>"), encoding="utf-8")
    assert len(console(wrong)) == 1  # the test would see it
