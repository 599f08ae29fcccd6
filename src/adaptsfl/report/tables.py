"""The look that all tables share."""

from rich import box
from rich.table import Table


def plain_table(title: str) -> Table:
    """Return an empty table without vertical lines."""
    return Table(title=title, title_justify="left", title_style="italic", box=box.SIMPLE_HEAD, pad_edge=False)
