"""The look of tables on a terminal: `qsdp report`, `qsdp sweep` and `qsdp tune`."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table


def new_table(title: str, caption: str, header: Sequence[str]) -> Table:
    """An empty table: a column of names, which wrap, then columns of numbers, which do not."""
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    names, *numbers = header
    table.add_column(names, overflow="fold")
    for number in numbers:
        table.add_column(number, justify="right", no_wrap=True)
    return table


def print_table(table: Table, *, width: int = 100) -> None:
    """Print it as wide as the terminal; ``width`` columns where the output is none."""
    console = Console()
    if not console.is_terminal:
        console.width = width
    console.print(table)
