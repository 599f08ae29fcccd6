"""The style that all tables share."""

from collections.abc import Container, Iterable, Sequence

from rich import box
from rich.table import Table


def plain_table(title: str) -> Table:
    """Return an empty table without vertical lines."""
    return Table(title=title, title_justify="left", title_style="italic", box=box.SIMPLE_HEAD, pad_edge=False)


def filled_table(
    title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], *, left: Container[str] = ()
) -> Table:
    """Return a table with these rows; columns in `left` are aligned left, all others right."""
    table = plain_table(title)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right")
    for row in rows:
        table.add_row(*row)
    return table
