"""Progress on stderr: a live bar on a terminal, nothing elsewhere; rich draws it if installed."""

from __future__ import annotations

import importlib.util
import sys
from types import TracebackType
from typing import Any


def can_draw() -> bool:
    """Whether a live display makes sense: a terminal, and rich to draw on it."""
    return sys.stderr.isatty() and importlib.util.find_spec("rich") is not None


class Bar:
    """A bar over `total` units (bytes or items), described by what is being done now."""

    def __init__(self, total: int | None, *, in_bytes: bool = False) -> None:
        self._bars: Any = None
        self._task: Any = None
        if not can_draw():
            return
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn() if in_bytes else MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._bars.add_task("", total=total)

    def __enter__(self) -> Bar:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def describe(self, what: str) -> None:
        """Show what is being done."""
        if self._bars is not None:
            self._bars.update(self._task, description=what)

    def advance(self, count: int = 1) -> None:
        """Count `count` more units as done."""
        if self._bars is not None:
            self._bars.advance(self._task, count)
