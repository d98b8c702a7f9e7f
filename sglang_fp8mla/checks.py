"""Findings as data: what was looked at, what was found, and what to do about it.

The backend factory, the probe and `doctor` share these records, so they cannot disagree.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """One finding. `fix` is a command or setting that the reader can act on; empty when ok."""

    name: str
    level: Level
    found: str
    fix: str = ""

    @property
    def ok(self) -> bool:
        return self.level != "fail"

    def to_json(self) -> dict[str, str]:
        return asdict(self)

    def __str__(self) -> str:
        remedy = f" ({self.fix})" if self.fix else ""
        return f"{self.name}: {self.found}{remedy}"


def failed(checks: list[Check]) -> list[Check]:
    """The checks that forbid running, in order."""
    return [check for check in checks if check.level == "fail"]
