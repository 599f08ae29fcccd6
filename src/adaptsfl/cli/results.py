"""Results that commands show after an experiment: a table, figures and a page."""

from collections.abc import Sequence
from pathlib import Path

from adaptsfl.cli.printing import plain_console, say
from adaptsfl.errors import InvalidInput
from adaptsfl.report.figures import write_figures
from adaptsfl.report.page import write_page
from adaptsfl.report.predicted import predicted_table
from adaptsfl.report.summary import summary_table
from adaptsfl.runs.folder import Run


def show_runs(runs: Sequence[Run], page: Path) -> None:
    """Print the table of runs, draw the figures, write the page, and print the paths."""
    console = plain_console()
    console.print(summary_table(runs))
    for run in runs:
        table = predicted_table(run)
        if table is not None:
            console.print(table)
    try:
        folder = page.parent / "figures"
        write_figures(runs, folder)
        console.print(f"figures: {folder}", soft_wrap=True)
    except InvalidInput as error:  # the page needs no figures
        say(str(error))
    write_page(runs, page)
    console.print(f"report:  {page}", soft_wrap=True)
