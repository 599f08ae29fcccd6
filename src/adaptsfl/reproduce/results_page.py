"""All figures and claims of one scale as one HTML page that fetches nothing and runs no script."""

import base64
import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from adaptsfl.report.markup import asset, filled, merged, row, security, settings, table, write_text
from adaptsfl.report.plan_report import seconds
from adaptsfl.reproduce import panels
from adaptsfl.reproduce.claims import JudgedClaim
from adaptsfl.reproduce.drawings import csv_name
from adaptsfl.reproduce.numbers import Evidence
from adaptsfl.reproduce.study import Study, all_differences
from adaptsfl.runs.folder import Run

CLAIM_COLUMNS = ("figure", "claim", "paper", "measured", "verdict")
DIFFERENCE_COLUMNS = ("key", "paper", "here", "in")
COLOURS = {"holds": "good", "holds in part": "part", "does not hold": "bad"}  # CSS classes; any other is `open`


def write_results_page(
    evidence: Evidence, figures: Path, claims: Sequence[JudgedClaim], out: Path, *, commands: Sequence[str] = ()
) -> None:
    """Write the page to `out`.

    Args:
        figures: the folder into which `drawings.write_figure` wrote.
        claims: in the order of the table.
        commands: command lines that reproduce the page.
    """
    css = asset("page.css") + asset("results.css")
    shown = [study for study in evidence.studies if panels.worth_drawing(evidence, study)]
    scales = " and ".join(dict.fromkeys(study.scale for study in evidence.studies)) or "no"
    parts = {
        "policy": security(css, images=True),
        "css": css,
        "title": escape(f"The paper’s figures at {scales} scale"),
        "lead": escape(_lead(evidence, shown)),
        "nav": " ".join(f'<a href="#{_anchor(study)}">{escape(study.figure)}</a>' for study in shown),
        "claims": _claims(claims),
        "figures": "".join(_figure(study, evidence, figures, out.parent) for study in shown),
        "scale": _scale(evidence.studies),
        "setup": "".join(_setup(evidence, commands)),
    }
    write_text(filled(asset("results.html"), parts), out)


def _lead(evidence: Evidence, shown: Sequence[Study]) -> str:
    absent = [study.figure for study in evidence.studies if study not in shown]
    runs = [run for found in evidence.runs.values() for run in found]
    words = f"{len(shown)} of {len(evidence.studies)} figures, from {len(runs):,} runs. "
    words += "Training times are virtual: what the fleet would have taken."
    unfinished = sum(not run.whole for run in runs)
    if unfinished:
        words += f" {unfinished} of {len(runs):,} runs did not finish and are left out."
    return words + (f" Without runs: {', '.join(absent)}." if absent else "")


def _anchor(study: Study) -> str:
    return "figure-" + quote(study.name, safe="")


def _claims(claims: Sequence[JudgedClaim]) -> str:
    if not claims:
        return '<p class="note">None were judged.</p>'
    rows = []
    for judged in claims:
        claim = judged.claim
        badge = f'<span class="verdict {COLOURS.get(judged.verdict, "open")}">{escape(judged.verdict)}</span>'
        said = f"{escape(claim.claim)}<small>{escape(claim.criterion)}</small>"
        note = f"<small>{escape(judged.note)}</small>" if judged.note else ""
        cells = [said, escape(claim.paper), escape(judged.measured) + note, badge]
        rows.append(row(escape(claim.figure), cells))
    return _scrolling("Claims", "claims", table(CLAIM_COLUMNS, rows))


def _scrolling(label: str, kind: str, content: str) -> str:
    return f'<div class="scroll {kind}" tabindex="0" role="region" aria-label="{label}">{content}</div>'


def _figure(study: Study, evidence: Evidence, figures: Path, here: Path) -> str:
    name = _anchor(study)
    drawn = (figures / f"{study.name}.png").is_file()
    words = [panels.explanation(study), *(() if drawn else panels.caption(study, evidence))]  # a picture has its own
    files = [(label, file) for label, file in _files(study, figures, here) if file.is_file()]
    links = "".join(f'<li><a href="{_link(file, here)}">{escape(label)}</a></li>' for label, file in files)
    return (
        f'<section id="{name}" aria-labelledby="h-{name}">'
        f'<h2 id="h-{name}">{escape(study.figure)}: {escape(study.title)}</h2>'
        f"<figure>{_picture(study, figures)}<figcaption>{escape(' '.join(words))}</figcaption></figure>"
        f'<ul class="files">{links}</ul></section>'
    )


def _picture(study: Study, figures: Path) -> str:
    """Return the figure, embedded as PNG, which looks the same whatever fonts are installed."""
    file = figures / f"{study.name}.png"
    if not file.is_file():
        return '<p class="note">Not drawn. Its numbers are in the files below.</p>'
    data = base64.b64encode(file.read_bytes()).decode()
    titles = "; ".join(panel.title for panel in study.panels)
    words = escape(f"{study.figure}, {study.title}: {titles}. Its numbers are in the files below.")
    return f'<img class="picture" alt="{words}" src="data:image/png;base64,{data}">'


def _files(study: Study, figures: Path, here: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files to link: the picture, the numbers of every panel, the pages of the experiments."""
    yield "PNG", figures / f"{study.name}.png"
    yield "SVG", figures / f"{study.name}.svg"
    for panel in study.panels:
        yield f"{panel.title}: numbers (CSV)", figures / csv_name(panel)
    for runs in dict.fromkeys(panel.runs for panel in study.panels if panel.runs):
        yield f"{runs}: every run", here / runs / "report.html"


def _link(file: Path, here: Path) -> str:
    return quote(Path(os.path.relpath(file, here)).as_posix())


def _scale(studies: Sequence[Study]) -> str:
    """Return the differences from the paper's setting, in words and key by key."""
    words = list(dict.fromkeys(change for study in studies for change in study.changes))
    rows = [
        row(escape(key), map(escape, (_value(paper), _value(here), where)))
        for key, paper, here, where in all_differences(studies)
    ]
    if not words and not rows:
        return '<p class="note">Nothing: this is the paper’s setting.</p>'
    spoken = "".join(f"<li>{escape(change.strip())}</li>" for change in words)
    listed = _scrolling("Differences", "changes", table(DIFFERENCE_COLUMNS, rows)) if rows else ""
    return f'<ul class="words">{spoken}</ul><h3>Key by key</h3>{listed}'


def _value(value: Any) -> str:
    if value is None:
        return "–"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _setup(evidence: Evidence, commands: Sequence[str]) -> Iterator[str]:
    if commands:
        lines = "\n".join(escape(command) for command in commands)
        yield f"<h3>Commands</h3><pre>{lines}</pre>"
    runs = [run for found in evidence.runs.values() for run in found]
    yield "<h3>Real time</h3>"
    took = {key: f"{seconds(_wall_s(found))}, {len(found)} runs" for key, found in evidence.runs.items()}
    yield settings({**took, "all": seconds(_wall_s(runs))})
    yield "<h3>Machine</h3>"
    yield settings({**_machine(), **merged([run.versions for run in runs])})


def _wall_s(runs: Sequence[Run]) -> float:
    return sum(run.wall_s for run in runs)


def _machine() -> Mapping[str, str]:
    """Return the hardware of this machine, on which the runs were made, unless they were copied."""
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": str(os.cpu_count() or "unknown"),
        "system": platform.system(),
    }


def machine_words() -> str:
    """Return the hardware of this machine in one line."""
    return ", ".join(f"{name} {value}" for name, value in _machine().items())
