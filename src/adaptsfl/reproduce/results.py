"""What is left for people when figures were run: pictures and their numbers, a page, and the table of claims."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from adaptsfl.errors import InvalidInput
from adaptsfl.report.markup import write_text
from adaptsfl.report.page import write_page
from adaptsfl.report.tables import plain_table
from adaptsfl.reproduce.claims import JudgedClaim, judge
from adaptsfl.reproduce.claims_page import claims_markdown, load_findings, with_findings
from adaptsfl.reproduce.drawings import write_figure
from adaptsfl.reproduce.numbers import Evidence
from adaptsfl.reproduce.results_page import machine_words, write_results_page
from adaptsfl.reproduce.speed_ups import speed_up_rows, speed_ups

FIGURES, CLAIMS, PAGE = "figures", "claims.md", "report.html"


@dataclass(frozen=True)
class Results:
    """What was written.

    Attributes:
        tables: for the terminal.
        places: (what, where).
        complaint: why there are no pictures; empty where there are.
    """

    tables: tuple[Table, ...]
    places: tuple[tuple[str, Path], ...]
    complaint: str


def write_results(evidence: Evidence, out: Path, results: Path, recipes: Path, command: str) -> Results:
    """Write everything.

    Args:
        out: where the runs are; their pages and the page of all figures go beside them.
        results: where the claims and the figures go.
        recipes: the folder of the figures' files, with the findings of people.
        command: what was typed.
    """
    complaint = ""
    for study in evidence.studies:
        try:
            write_figure(study, evidence, results / FIGURES)
        except InvalidInput as error:  # the numbers are written, and the page needs no pictures
            complaint = str(error)
    for key, runs in evidence.runs.items():
        if runs:
            write_page(runs, out / key / PAGE)
    scale = evidence.studies[0].scale
    rows = with_findings(judge(evidence), load_findings(recipes, scale))
    write_text(claims_markdown(rows, evidence, command, machine_words()), results / CLAIMS)
    write_results_page(evidence, results / FIGURES, rows, out / PAGE, commands=[command])
    places = (("figures", results / FIGURES), ("claims", results / CLAIMS), ("page", out / PAGE))
    tables = (*_speed_up_tables(evidence), _verdict_table(rows))
    return Results(tables, tuple((what, path) for what, path in places if path.exists()), complaint)


def _speed_up_tables(evidence: Evidence) -> Iterator[Table]:
    """Give one table, or none where the headline was not run."""
    headings, rows = speed_up_rows(speed_ups(evidence))
    if not rows:
        return
    table = plain_table("Virtual time of AdaptSFL to one accuracy, and how many times as long the others take")
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left")
    for row in rows:
        table.add_row(*row)
    yield table


def _verdict_table(rows: list[JudgedClaim]) -> Table:
    table = plain_table("Claims of the paper, tried")
    table.add_column("verdict")
    table.add_column("claims", justify="right")
    for verdict, count in Counter(row.verdict for row in rows).most_common():
        table.add_row(verdict, str(count))
    return table
