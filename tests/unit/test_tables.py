"""Tables and sizes for people: units, widths, and the same words with and without rich."""

from __future__ import annotations

import io
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_fp8mla.tables import human_bytes, print_table

ROWS = [("rows cast per layer", "131,072", "4,096"), ("a long word " * 9, "", "1")]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (9_994, "9.99 kB"),
        (9_996, "10.0 kB"),
        (99_960, "100 kB"),
        (999_500, "1.00 MB"),
        (285_437_952, "285 MB"),
        (66_782_232_576, "66.8 GB"),
        (2e15, "2,000 TB"),
    ],
)
def test_human_bytes(count, text):
    assert human_bytes(count) == text


@given(st.integers(0, 10**15 - 1))
@settings(derandomize=True, deadline=None, max_examples=200)
def test_human_bytes_is_right_within_its_digits(count):
    """Three significant digits, whatever the unit's edge: within half a percent."""
    number, unit = human_bytes(count).split()
    scale = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}[unit]
    assert float(number.replace(",", "")) * scale == pytest.approx(count, rel=0.0051)


@pytest.mark.parametrize("rich", [True, False], ids=["rich", "plain"])
@pytest.mark.parametrize("width", [50, 80, 120])
def test_width_is_kept_and_nothing_is_lost(monkeypatch, rich, width):
    """A long cell folds; no word goes missing; no line is wider than the terminal."""
    monkeypatch.setenv("COLUMNS", str(width))
    if not rich:
        monkeypatch.setitem(sys.modules, "rich", None)
    out = io.StringIO()
    print_table("bytes", ("", "stock", "ours"), ROWS, right=(1, 2), file=out)
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= width
    for word in ("bytes", "stock", "131,072", "4,096"):
        assert word in text
    assert text.count("word") == 9


@pytest.mark.parametrize("rich", [True, False], ids=["rich", "plain"])
def test_brackets_are_text(monkeypatch, rich):
    """`[num_slots, 1, dim]` is no markup of rich."""
    if not rich:
        monkeypatch.setitem(sys.modules, "rich", None)
    out = io.StringIO()
    print_table(None, ("a",), [("pool must be [bold]",)], header=False, file=out)
    assert out.getvalue().strip() == "pool must be [bold]"
