"""The environment is typed: bad values and unknown names raise, the default is never guessed."""

from __future__ import annotations

import pytest

from sglang_fp8mla import envs
from sglang_fp8mla.errors import InvalidArgument


def test_defaults():
    assert envs.read({}) == envs.Settings("auto", "auto", "", False)


def test_values():
    found = envs.read(
        {
            "SGLANG_FP8MLA_DECODE_PATH": "native",
            "SGLANG_FP8MLA_EXTEND_PATH": " gather_cast ",
            "SGLANG_FP8MLA_PROFILE": "/tmp/p.json",
            "SGLANG_FP8MLA_BATCH_INVARIANT": "1",
            "PATH": "/bin",
        }
    )
    assert found == envs.Settings("native", "gather_cast", "/tmp/p.json", True)


def test_an_empty_value_is_the_default():
    assert envs.read({"SGLANG_FP8MLA_DECODE_PATH": ""}) == envs.Settings()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "SGLANG_FP8MLA_DECODE_PATH",
            "fast",
            "SGLANG_FP8MLA_DECODE_PATH must be auto, native, fused or gather_cast, got 'fast'",
        ),
        (
            "SGLANG_FP8MLA_EXTEND_PATH",
            "fused",
            "SGLANG_FP8MLA_EXTEND_PATH must be auto, native or gather_cast, got 'fused'",
        ),
        (
            "SGLANG_FP8MLA_BATCH_INVARIANT",
            "yes",
            "SGLANG_FP8MLA_BATCH_INVARIANT must be 0 or 1, got 'yes'",
        ),
    ],
)
def test_a_bad_value_raises(name, value, message):
    with pytest.raises(InvalidArgument) as caught:
        envs.read({name: value})
    assert str(caught.value) == message


def test_a_typo_in_the_name_raises_and_guesses_the_right_one():
    with pytest.raises(InvalidArgument) as caught:
        envs.read({"SGLANG_FP8MLA_DECOD_PATH": "native"})
    assert "got an unknown name; did you mean SGLANG_FP8MLA_DECODE_PATH?" in str(caught.value)


def test_defaults_are_among_the_choices():
    for variable in envs.ENVIRONMENT:
        assert not variable.choices or variable.default in variable.choices
