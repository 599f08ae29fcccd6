"""The claims as a page in Markdown, and the reasons that people found where one does not hold."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from pydantic import Field

from adaptsfl.config import Section, parse, read_toml
from adaptsfl.errors import unknown
from adaptsfl.report.plan_report import seconds
from adaptsfl.reproduce.claims import CLAIMS, JudgedClaim, Verdict
from adaptsfl.reproduce.compare import POINTS, TIMES
from adaptsfl.reproduce.numbers import NEARLY, SAFELY, WINDOW, WORTHWHILE, Evidence
from adaptsfl.reproduce.speed_ups import speed_up_rows
from adaptsfl.reproduce.study import SCALES, Scale, all_differences

FINDINGS = "findings.toml"
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)


class FindingsFile(Section):
    """Why claims do not hold, by claim and scale."""

    findings: dict[str, dict[str, str]] = Field(default_factory=dict)


def load_findings(folder: Path, scale: Scale) -> dict[str, str]:
    """Read people's findings at a scale, by claim; empty if the folder has no such file."""
    path = folder / FINDINGS
    if not path.exists():
        return {}
    found = parse(FindingsFile, read_toml(path), source=str(path)).findings
    names = [claim.name for claim in CLAIMS]
    for name, by_scale in found.items():
        if name not in names:
            remedy = "Give the name of a claim, as the page of claims has it"
            raise unknown(f"findings.{name}", name, names, remedy).from_file(str(path))
        for given in by_scale:
            if given not in SCALES:
                remedy = f"Give one of {', '.join(SCALES)}"
                raise unknown(f"findings.{name}.{given}", given, SCALES, remedy).from_file(str(path))
    return {name: by_scale[scale].strip() for name, by_scale in found.items() if scale in by_scale}


def with_findings(rows: Sequence[JudgedClaim], findings: Mapping[str, str]) -> list[JudgedClaim]:
    """Return the rows; each that does not hold in full gets its finding as note."""
    return [replace(row, note=findings.get(row.claim.name, "") if row.verdict != "holds" else "") for row in rows]


def claims_markdown(rows: Sequence[JudgedClaim], evidence: Evidence, command: str, machine: str) -> str:
    """Return the page.

    Args:
        command: the command that writes it.
        machine: the hardware, in words.
    """
    head = _head(evidence, command, machine)
    parts = [head, _speed_ups(evidence), _counts(rows), _table(rows, evidence), _details(rows), RULES]
    return "\n\n".join(part for part in parts if part) + "\n"


def _markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]], rule: str = "") -> str:
    lines = ["| " + " | ".join(map(_cell, row)) + " |" for row in rows]
    return "\n".join(["| " + " | ".join(headings) + " |", rule or "|" + "---|" * len(headings), *lines])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", "<br>")


def _speed_ups(evidence: Evidence) -> str:
    headings, rows = speed_up_rows(evidence)
    if not rows:
        return ""
    words = "AdaptSFL's virtual time to one accuracy, and how many times as long the others take to it:"
    rule = "| " + " | ".join(["---"] * len(headings)) + " |"
    return f"## How much sooner\n\n{words}\n\n{_markdown_table(list(map(_cell, headings)), rows, rule)}"


def _head(evidence: Evidence, command: str, machine: str) -> str:
    studies = evidence.studies
    words = dict.fromkeys(word.strip() for study in studies for word in study.changes)
    scale = studies[0].scale if studies else "–"
    changed = _differences(all_differences(studies))
    wall_s = sum(run.wall_s for runs in evidence.runs.values() for run in runs)
    return "\n\n".join(
        [
            "# The paper's claims, tried",
            f"Every claim of Sections I and VII that our runs can say something about, at the scale **{scale}**. "
            "Written by a command; reasons in the notes are by people.",
            *(["What the scale changes of the paper's setting: " + " ".join(words)] if words else []),
            *([changed] if changed else []),
            f"- command: `{command}`\n- seeds: {_seeds(evidence)}\n- hardware: {machine}\n"
            f"- took: {seconds(wall_s)}, the sum over all runs, of which several may have run at once",
        ]
    )


def _differences(differences: Sequence[tuple[str, Any, Any, str]]) -> str:
    rows = [(f"`{key}`", _value(paper), _value(here), where) for key, paper, here, where in differences]
    return _markdown_table(("key of the recipe", "paper", "here", "where"), rows) if rows else ""


def _value(value: Any) -> str:
    return "–" if value is None else f"`{value}`"


def _seeds(evidence: Evidence) -> str:
    counts = {study.figure: _seed_count(evidence, study.figure) for study in evidence.studies}
    numbers = sorted({count for count in counts.values() if count}, reverse=True)
    if len(numbers) <= 1:
        return f"{numbers[0] if numbers else 0}"
    said = [f"{number} in {', '.join(f for f, count in counts.items() if count == number)}" for number in numbers]
    return "; ".join(said)


def _seed_count(evidence: Evidence, figure: str) -> int:
    """Return the number of seeds behind one figure of the paper, or behind several."""
    numbers = set(re.findall(r"\d+", figure))
    panels = [
        panel for study in evidence.studies if set(re.findall(r"\d+", study.figure)) & numbers for panel in study.panels
    ]
    return max((len({run.seed for run in evidence.of(panel.key)}) for panel in panels if panel.runs), default=0)


def _counts(rows: Sequence[JudgedClaim]) -> str:
    counts = Counter(row.verdict for row in rows)
    lines = [*((verdict, str(counts[verdict])) for verdict in VERDICTS), ("all", str(len(rows)))]
    return _markdown_table(("verdict", "claims"), lines, "|---|---:|")


def _table(rows: Sequence[JudgedClaim], evidence: Evidence) -> str:
    lines = [
        (
            row.claim.figure,
            f"{row.claim.claim} [{row.claim.name}](#{row.claim.name})",
            _tried_at(row, evidence),
            row.claim.paper,
            row.measured,
            f"**{row.verdict}**",
        )
        for row in rows
    ]
    return "## Claims\n\n" + _markdown_table(("figure", "claim", "tried at", "paper", "measured", "verdict"), lines)


def _tried_at(row: JudgedClaim, evidence: Evidence) -> str:
    if row.verdict == "not tried":
        return "–"
    seeds = _seed_count(evidence, row.claim.figure)
    scale = evidence.studies[0].scale
    return scale if not (seeds and row.claim.trained) else f"{scale}, {seeds} seed{'s' if seeds > 1 else ''}"


def _details(rows: Sequence[JudgedClaim]) -> str:
    parts = ["## Criteria and notes"]
    for row in rows:
        parts.append(f"### {row.claim.name}\n\n{row.claim.figure}, {row.verdict}. Criterion: {row.claim.criterion}")
        parts += [f"Why: {row.note}"] if row.note else []
    return "\n\n".join(parts)


RULES = f"""\
## How claims are judged

Times are virtual seconds: what the paper's devices and links would take.

- **Accuracy** is the mean of {WINDOW} evaluations in a row. **Converged accuracy** is the highest that a run has.
- **Time to an accuracy** is when a run first has it. **The common accuracy** is {SAFELY:g} of the lowest converged
  accuracy among the runs that are compared, so that all reach it, but at least {WORTHWHILE:g} of the best policy's
  mean: one that learns next to nothing would set a target that all others pass at once. A run that never gets there
  takes longer than the whole run, and gives a bound: "> 3.2×" is at least 3.2. A bound that does not decide counts
  against the claim.
- The paper calls a run converged when accuracy rises by less than 0.02 % over 5 rounds. Test accuracy jumps by more
  than that from one evaluation to the next, so times are compared to one accuracy instead. Where a figure shows a run's
  own converged time, it is when it first comes within {100 * (1 - NEARLY):.0f} % of its converged accuracy.
- **Noise**: accuracies within {POINTS:g} point, or within the seeds' spread, are equal; so are times within
  {100 * TIMES:.0f} %, or within the seeds' spread. Sooner, longer, higher and lower mean by more than that, unless a
  criterion says that equal counts. Printed numbers are compared with the mean as it is.
- **±** is the standard deviation over seeds, of the comparison made seed by seed; none is given for one seed alone.
- **Several comparisons**: a claim holds if all of them do, and in part if the scores make at least half of what they
  could: 1 for one that is as claimed, half where a criterion says so. Where panels are missing it holds in part at
  best.
"""
