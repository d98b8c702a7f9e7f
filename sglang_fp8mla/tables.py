"""Tables for people: rich where it is installed, aligned text where it is not.

Only the standard library at module level, so that `doctor` can report a missing rich.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import TextIO

# a pipe or a file has no width; 100 keeps a pasted table readable in a bug report
_PIPE_WIDTH = 100


def human_bytes(count: float) -> str:
    """`count` bytes in decimal units with three significant digits: 285.4 MB is `285 MB`."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(value) < 999.5 or unit == "TB":
            break
        value /= 1000
    digits = 0 if unit == "B" or abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:,.{digits}f} {unit}"


def width() -> int:
    """Columns to fill: COLUMNS where set, the terminal's, else a width for files and pipes."""
    return shutil.get_terminal_size((_PIPE_WIDTH, 24)).columns


def print_table(
    title: str | None,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Sequence[int] = (),
    styles: Sequence[str] = (),
    header: bool = True,
    file: TextIO | None = None,
) -> None:
    """Print `rows` under `columns`.

    Args:
        right: indices of right-aligned columns.
        title: printed above the table; None for none.
        header: whether to print the column names.
        styles: one rich style per row, or empty; ignored where rich is missing or output is a file.
        file: stdout by default.
    """
    out = sys.stdout if file is None else file
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        _print_plain(title, columns if header else (), rows, right, out)
        return
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        show_header=header,
    )
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i in right else "left", overflow="fold")
    for i, row in enumerate(rows):
        table.add_row(*(Text(cell) for cell in row), style=styles[i] if styles else None)
    Console(file=out, width=width(), highlight=False).print(table)
    print(file=out)


def _print_plain(
    title: str | None,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Sequence[int],
    out: TextIO,
) -> None:
    cells = [list(row) for row in (*((columns,) if columns else ()), *rows)]
    if not cells:
        return
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    # the widest column gives way, the others keep their longest cell
    spare = width() - (sum(widths) + 2 * (len(widths) - 1))
    if spare < 0:
        widest = widths.index(max(widths))
        widths[widest] = max(20, widths[widest] + spare)
    if title:
        print(title, file=out)
    for n, row in enumerate(cells):
        folded = [textwrap.wrap(cell, w) or [""] for cell, w in zip(row, widths)]
        for line in range(max(len(part) for part in folded)):
            parts = [part[line] if line < len(part) else "" for part in folded]
            text = "  ".join(
                part.rjust(w) if i in right else part.ljust(w)
                for i, (part, w) in enumerate(zip(parts, widths))
            )
            print(text.rstrip(), file=out)
        if n == 0 and columns:
            print("-" * min(width(), sum(widths) + 2 * (len(widths) - 1)), file=out)
    print(file=out)
