"""The tables that commands print: columns without lines between them."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Column, Table


def plain_table(columns: Sequence[Column]) -> Table:
    """Return an empty table with two spaces between its columns."""
    return Table(*columns, box=None, pad_edge=False, padding=(0, 2, 0, 0))


def table_console(width: int) -> Console:
    """Return a console on stdout that has the width of the terminal; elsewhere lines of `width` are not wrapped."""
    console = Console()
    return console if console.is_terminal else Console(width=width)
