"""Writes the results of figures: pictures and their numbers, pages, and the table of claims."""

from collections import Counter
from pathlib import Path
from typing import NamedTuple

from rich.table import Table

from adaptsfl.errors import InvalidInput
from adaptsfl.report.markup import write_text
from adaptsfl.report.page import write_page
from adaptsfl.report.tables import filled_table
from adaptsfl.reproduce.claims import JudgedClaim, judge
from adaptsfl.reproduce.claims_page import claims_markdown, load_findings, with_findings
from adaptsfl.reproduce.drawings import write_figure
from adaptsfl.reproduce.numbers import Evidence
from adaptsfl.reproduce.results_page import machine_words, write_results_page
from adaptsfl.reproduce.speed_ups import speed_up_rows

FIGURES, CLAIMS, PAGE = "figures", "claims.md", "report.html"


class Written(NamedTuple):
    """The written results: tables for the terminal, (what, path), and why there are no pictures (else empty)."""

    tables: list[Table]
    places: list[tuple[str, Path]]
    complaint: str


def write_results(evidence: Evidence, out: Path, results: Path, recipes: Path, command: str) -> Written:
    """Write all results.

    Args:
        out: the folder of the runs; their pages and the page of all figures go there too.
        results: the folder for claims and figures.
        recipes: the folder of the figures' files, with the findings of people.
        command: the command line that the user typed.
    """
    complaint = ""
    for study in evidence.studies:
        try:
            write_figure(study, evidence, results / FIGURES)
        except InvalidInput as error:  # the numbers are written; the page needs no pictures
            complaint = str(error)
    for key, runs in evidence.runs.items():
        if runs:
            write_page(runs, out / key / PAGE)
    scale = evidence.studies[0].scale
    rows = with_findings(judge(evidence), load_findings(recipes, scale))
    write_text(claims_markdown(rows, evidence, command, machine_words()), results / CLAIMS)
    write_results_page(evidence, results / FIGURES, rows, out / PAGE, commands=[command])
    places = (("figures", results / FIGURES), ("claims", results / CLAIMS), ("page", out / PAGE))
    tables = [filled_table("Claims of the paper, tried", ("verdict", "claims"), _counts(rows), left=("verdict",))]
    headings, speed_ups = speed_up_rows(evidence)
    if speed_ups:
        title = "Virtual time of AdaptSFL to one accuracy, and how many times as long the others take"
        tables.insert(0, filled_table(title, headings, speed_ups, left=("",)))
    return Written(tables, [(what, path) for what, path in places if path.exists()], complaint)


def _counts(rows: list[JudgedClaim]) -> list[tuple[str, str]]:
    return [(verdict, str(count)) for verdict, count in Counter(row.verdict for row in rows).most_common()]
