"""`@case(n)`: which row of the table of reported inputs a test is about; read by the meta test."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Test = TypeVar("Test", bound=Callable[..., object])


def case(*numbers: int) -> Callable[[Test], Test]:
    """Say that a test stands for these rows. The meta test reads the decorator in the source."""

    def mark(test: Test) -> Test:
        assert all(1 <= n <= 37 for n in numbers)
        for n in numbers:
            assert f"case{n:02d}" in test.__name__, f"{test.__name__} must name case{n:02d}"
        return test

    return mark
