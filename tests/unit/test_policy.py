"""The choice of a path: from the table, from the environment, and when a check fails."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from sglang_fp8mla import policy
from sglang_fp8mla.checks import Check
from sglang_fp8mla.envs import Settings
from sglang_fp8mla.errors import IncompatibleEnvironment, InvalidArgument
from sglang_fp8mla.probe import Facts, check_supported

H200 = Facts("NVIDIA H200", (9, 0), 16, 512, 64, "bfloat16", "float8_e4m3fn", "0.7.2")
TABLE = {
    "schema": 1,
    "generations": {
        "SM90": {
            "source": "a test",
            "decode": [
                {"max_heads": 128, "max_batch": 1000, "path": "gather_cast"},
                {"max_heads": 16, "max_batch": 4, "path": "native"},
                {"max_heads": 16, "max_batch": 1000, "path": "fused"},
            ],
            "extend": [{"max_heads": 128, "max_batch": 1000, "path": "gather_cast"}],
        }
    },
}


@pytest.fixture
def profile(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(TABLE))
    return Settings(profile=str(path))


class Probe:
    """Passes all but the paths named; remembers what it was asked."""

    def __init__(self, *failing):
        self.failing = failing
        self.asked = []

    def __call__(self, path, phase):
        self.asked.append((path, phase))
        if path in self.failing:
            return Check(path, "fail", "CompileFailed: no compiler", "install one")
        return Check(path, "ok", "right")


def test_takes_the_narrowest_head_class_and_its_batches(profile):
    decision, _ = policy.choose(H200, profile, Probe())
    assert [decision.decode.path(bs) for bs in (1, 4, 5, 1000, 5000)] == [
        "native",
        "native",
        "fused",
        "fused",
        "fused",
    ]
    assert decision.decode.paths == ("native", "fused")
    wide, _ = policy.choose(replace(H200, num_heads=64), profile, Probe())
    assert wide.decode.paths == ("gather_cast",)
    assert decision.extend.path(1) == "gather_cast"
    assert str(decision.decode) == "native to batch 4, fused to batch 1000"


def test_probes_only_what_the_choice_hangs_on(profile):
    probe = Probe()
    policy.choose(replace(H200, num_heads=64), profile, probe)
    assert probe.asked == [("gather_cast", "decode"), ("gather_cast", "extend")]


def test_a_failed_check_falls_back_and_says_why(profile):
    decision, checks = policy.choose(H200, profile, Probe("fused"))
    assert [decision.decode.path(bs) for bs in (4, 5)] == ["native", "gather_cast"]
    assert decision.decode.reason == (
        "fused is fastest when measured but failed its check: fused: CompileFailed: no compiler "
        "(install one)"
    )
    assert any(check.level == "fail" for check in checks)


def test_two_failures_become_one_path(profile):
    decision, _ = policy.choose(H200, profile, Probe("fused", "native"))
    assert decision.decode.paths == ("gather_cast",)
    assert len(decision.decode.by_batch) == 1


def test_refuses_when_nothing_can_run(profile):
    with pytest.raises(IncompatibleEnvironment, match="decode: no path can run here: native: Comp"):
        policy.choose(H200, profile, Probe("fused", "native", "gather_cast"))


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (10, 0), (12, 0), (12, 1)])
def test_an_unmeasured_generation_gets_gather_cast(capability):
    """cases.md 29: the documented path for each, no crash."""
    facts = replace(H200, device_name="some GPU", capability=capability)
    decision, _ = policy.choose(facts, Settings(), Probe())
    assert decision.decode.paths == decision.extend.paths == ("gather_cast",)
    sm = f"SM{capability[0]}{capability[1]}"
    assert decision.decode.reason == f"no measured table for some GPU ({sm})"


def test_a_forced_path_is_taken_and_probed():
    probe = Probe()
    decision, _ = policy.choose(H200, Settings(decode_path="native"), probe)
    assert decision.decode.paths == ("native",)
    assert decision.decode.reason == "forced by SGLANG_FP8MLA_DECODE_PATH; native: right"
    assert ("native", "decode") in probe.asked


def test_a_forced_path_that_cannot_run_is_an_error_that_names_the_check():
    with pytest.raises(IncompatibleEnvironment) as caught:
        policy.choose(H200, Settings(extend_path="native"), Probe("native"))
    assert str(caught.value) == (
        "SGLANG_FP8MLA_EXTEND_PATH=native cannot run here: native: CompileFailed: no compiler "
        "(install one); unset SGLANG_FP8MLA_EXTEND_PATH, or set it to auto"
    )


def test_the_shipped_table_is_sound():
    """Every head count that FlashInfer takes has a rule, on the one generation measured."""
    for heads in (1, 8, 16, 20, 64, 128):
        decision, _ = policy.choose(replace(H200, num_heads=heads), Settings(), Probe())
        assert decision.decode.reason.startswith("fastest when measured (")
        assert decision.extend.paths == ("gather_cast",)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "must be a JSON table of `sglang-fp8mla calibrate`"),
        ("{", "must be a JSON table of `sglang-fp8mla calibrate`"),
        ("[]", "must have schema 1"),
        ('{"schema": 2}', "must have schema 1"),
        ('{"schema": 1}', "must have an object `generations`"),
        ('{"schema": 1, "generations": {"SM120": {}}}', "must hold rules for SM90, got ['SM120']"),
        ('{"schema": 1, "generations": {"SM90": {}}}', "must hold rules for decode"),
        (
            '{"schema": 1, "generations": {"SM90": {"decode": [{"path": "fused"}]}}}',
            "must hold rules of max_heads, max_batch and path",
        ),
        (
            '{"schema": 1, "generations": {"SM90": {"decode": '
            '[{"max_heads": 1, "max_batch": 1, "path": "os.system"}]}}}',
            "must hold rules with a path of ('fused', 'native', 'gather_cast')",
        ),
        ('{"schema": 1, "generations": {"SM90": []}}', "must hold rules of max_heads"),
    ],
    ids=range(10),
)
def test_a_damaged_profile_is_refused(tmp_path, text, says):
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(InvalidArgument) as caught:
        policy.choose(H200, Settings(profile=str(path)), Probe())
    assert says in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_missing_profile_is_refused(tmp_path):
    with pytest.raises(InvalidArgument, match="No such file"):
        policy.choose(H200, Settings(profile=str(tmp_path / "none.json")), Probe())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"capability": (12, 0)}, "SM120; FlashInfer's FP8 MLA kernel is SM90 only"),
        ({"q_dtype": "float16"}, "q is float16; the kernel takes bfloat16 only"),
        ({"pool_dtype": "float8_e5m2"}, "the pool is float8_e5m2; the kernel takes e4m3 only"),
        ({"kpe_dim": 128}, "ckv 512, kpe 128; the kernel takes ckv 512, kpe 0 or 64"),
    ],
    ids=str,
)
def test_native_names_what_it_lacks(change, says):
    check = check_supported("native", replace(H200, **change))
    assert (check.level, check.found) == ("fail", says)
    assert check_supported("native", H200).ok


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kpe_dim": 32}, "ckv 512, kpe 32 on SM90"),
        ({"ckv_dim": 300}, "ckv 300, kpe 64 on SM90"),
        ({"capability": (7, 5)}, "ckv 512, kpe 64 on SM75"),
        ({"num_heads": 160}, "160 heads on one rank"),
    ],
    ids=str,
)
def test_the_fallback_names_its_limits(change, says):
    """cases.md 16: where not even FlashInfer's 16-bit kernel runs, an error with the limits."""
    check = check_supported("gather_cast", replace(H200, **change))
    assert (check.level, check.found) == ("fail", says)
    assert check.fix
    for fine in ({"ckv_dim": 256}, {"kpe_dim": 128}, {"kpe_dim": 0}, {"q_dtype": "float16"}):
        assert check_supported("gather_cast", replace(H200, **fine)).ok
