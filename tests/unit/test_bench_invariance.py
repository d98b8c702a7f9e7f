"""What `bench.load.invariance` concludes from hashes and answers; its servers need a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.load.answers import Answer
from bench.load.invariance import Asker, explain, first_foreign, hook_words, take_passes

ALONE = {"norm out 0": {1, 2}, "attn out 0": {3, 4}}


@pytest.mark.parametrize(
    ("passes", "says"),
    [
        ([], ""),
        # any order, any number of times
        ([{"norm out 0": [2, 1, 2], "attn out 0": [4, 4, 3]}], ""),
        (
            [{"norm out 0": [1, 2], "attn out 0": [3, 5]}, {"norm out 0": [9, 9]}],
            "step 0, attn out 0: 1 rows of 2: [1]",
        ),
        ([{"other": [1]}], "step 0, other: 1 rows of 1: [0]"),
    ],
)
def test_first_foreign_row_is_named(passes, says):
    assert first_foreign(ALONE, passes) == says


def test_passes_are_taken_once(tmp_path: Path):
    path = tmp_path / "hashes"
    path.write_text('{"a": [1]}\n{"a": [2]}\n')
    assert take_passes(path) == [{"a": [1]}, {"a": [2]}]
    assert take_passes(path) == []


def test_each_hooked_module_has_its_name(tmp_path: Path):
    specs = json.loads(hook_words(tmp_path)[-1])
    assert [[spec["config"]["name"]] for spec in specs] == [s["target_modules"] for s in specs]
    # the last one writes the line
    assert specs[-1]["target_modules"] == ["logits_processor"]


def test_moved_answers_are_explained_by_the_other_server():
    overlap, plain = (Asker(lambda _what, _found: None) for _ in range(2))
    plain.alone = {"a": Answer((1, 2), (-0.5, -0.25))}
    overlap.moved = [
        ("a", Answer((1, 2), (-0.5, -0.25))),
        ("a", Answer((1, 2), (-0.5, -0.2))),
        ("b", Answer((1,), (-0.5,))),
    ]
    assert explain(overlap, plain).startswith("1 of the 3 ")
