"""Checks where results are to be written before the minutes of work that make them."""

from __future__ import annotations

from pathlib import Path

from .errors import InvalidArgument


def require_writable(path: str | None, option: str) -> None:
    """Refuse a file that could not be written; None and `-` (stdout) always can.

    Raises:
        InvalidArgument: its folder does not exist, or it is a folder itself.
    """
    if path in (None, "-"):
        return
    target = Path(str(path))
    if target.is_dir():
        raise InvalidArgument(f"{option} must name a file, got the folder {path}")
    if not target.resolve().parent.is_dir():
        raise InvalidArgument(f"{option} must name a file in a folder that exists, got {path}")
