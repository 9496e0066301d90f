"""A plain table for terminals: columns as wide as they must be, numbers to the right."""

from __future__ import annotations

from collections.abc import Sequence


def format_columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lines of cells, two spaces apart; a column of numbers (and gaps, "-") is aligned right."""
    columns = list(zip(header, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    numeric = [all(_is_number(cell) for cell in column[1:]) for column in columns]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(cells, widths, numeric, strict=True)
        )
        return "  ".join(padded).rstrip()

    return "\n".join([line(header), "  ".join("-" * width for width in widths), *map(line, rows)])


def _is_number(cell: str) -> bool:
    text = cell.strip().rstrip("%x").replace(",", "")
    try:
        float(text)
    except ValueError:
        return text in ("", "-", "none")
    return True
