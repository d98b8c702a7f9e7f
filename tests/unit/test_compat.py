"""Refusals list every failed check with its remedy; a probe turns any failure into a finding."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from sglang_fp8mla import compat, probe
from sglang_fp8mla.checks import Check
from sglang_fp8mla.errors import IncompatibleEnvironment


def versions(monkeypatch, **found):
    """Pretend these distributions are installed, by name with underscores."""
    table = {name.replace("_", "-"): version for name, version in found.items()}
    monkeypatch.setattr(compat, "installed_version", table.get)


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ({"sglang": "0.5.21", "flashinfer_python": "0.7.2"}, ["sglang: 0.5.21, supported is"]),
        ({"sglang": "0.6.0", "flashinfer_python": "0.7.2"}, ["sglang: 0.6.0, supported is"]),
        ({"sglang": "0.5.23"}, ["flashinfer-python: not installed"]),
        (
            {"sglang": "0.5.21", "flashinfer_python": "0.6.12"},
            ["sglang: 0.5.21, supported is", "flashinfer-python: 0.6.12, supported is"],
        ),
    ],
    ids=str,
)
def test_refuses_versions_all_at_once(monkeypatch, found, says):
    """cases.md 36: old SGLang, old or missing FlashInfer; every failed check in one message."""
    versions(monkeypatch, **found)
    with pytest.raises(IncompatibleEnvironment) as caught:
        compat.require_environment()
    text = str(caught.value)
    for part in says:
        assert part in text
    assert text.count("pip install sglang==0.5.23 flashinfer-python==0.7.2") == len(says)
    assert "sglang-fp8mla doctor" in text


@pytest.mark.parametrize(
    ("sglang", "flashinfer"),
    [("0.5.22", "0.7.1"), ("0.5.23", "0.7.2"), ("0.5.24.dev1", "0.7.2")],
)
def test_takes_the_supported_versions(monkeypatch, sglang, flashinfer):
    versions(monkeypatch, sglang=sglang, flashinfer_python=flashinfer)
    assert all(check.ok for check in compat.check_versions())


def test_a_version_that_is_none_warns_and_leaves_it_to_the_names(monkeypatch):
    versions(monkeypatch, sglang="main-abc", flashinfer_python="0.7.2")
    assert [check.level for check in compat.check_versions()] == ["warn", "ok"]


@pytest.fixture
def upstream(monkeypatch):
    module = ModuleType("fp8mla_upstream")

    def plan(kv_indptr, num_heads):
        """Nothing."""

    module.plan = plan
    module.limit = 3
    monkeypatch.setitem(sys.modules, "fp8mla_upstream", module)


@pytest.mark.parametrize(
    ("attribute", "parameters", "found"),
    [
        ("plan", ("kv_indptr",), "found"),
        ("plan", (), "found"),
        ("limit", (), "found"),
        ("plan", ("kv_indptr", "kv_data_type"), "takes no kv_data_type"),
        ("run", (), "gone or renamed"),
        ("limit", ("x",), "not callable but int"),
    ],
)
@pytest.mark.usefixtures("upstream")
def test_checks_one_name(attribute, parameters, found):
    check = compat.check_name(compat.UpstreamName("fp8mla_upstream", attribute, parameters))
    assert (check.found, check.ok) == (found, found == "found")
    assert bool(check.fix) != check.ok


def test_a_module_that_does_not_import_is_a_finding():
    check = compat.check_name(compat.UpstreamName("fp8mla_no_such_module", "x"))
    assert check.found == "its module does not import: No module named 'fp8mla_no_such_module'"


FACTS = probe.Facts("NVIDIA H200", (9, 0), 16, 512, 64, "bfloat16", "float8_e4m3fn")


@pytest.fixture
def fresh_probe():
    probe.run_probe.cache_clear()
    yield
    probe.run_probe.cache_clear()


@pytest.mark.parametrize(
    ("problem", "found", "fix"),
    [
        (RuntimeError("nvcc not found\nmore"), "RuntimeError: nvcc not found", "install nvcc"),
        (FileNotFoundError(2, "No such file", "ninja"), "FileNotFoundError: [Errno 2]", "ninja"),
        (RuntimeError("ninja: build stopped"), "RuntimeError: ninja: build", "install nvcc"),
        (MemoryError("CUDA out of memory"), "MemoryError: CUDA out", "--mem-fraction-static"),
        (ValueError("odd"), "ValueError: odd", "doctor --self-test"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("fresh_probe")
def test_a_kernel_that_does_not_build_is_a_finding(monkeypatch, problem, found, fix):
    """cases.md 27 and 28: whatever JIT raises is recorded with a remedy, and never escapes."""

    def fail(*args):
        raise problem

    monkeypatch.setattr(probe, "_relative_rms", fail)
    check = probe.run_probe("native", "decode", FACTS, "cpu")
    assert check.level == "fail"
    assert check.found.startswith(found)
    assert fix in check.fix


@pytest.mark.parametrize("error", [0.02, float("nan"), float("inf")])
@pytest.mark.parametrize("wrong", [0, 1])
@pytest.mark.usefixtures("fresh_probe")
def test_a_wrong_answer_to_either_batch_is_a_finding(monkeypatch, error, wrong):
    errors = [1e-3, 1e-3]
    errors[wrong] = error
    monkeypatch.setattr(probe, "_relative_rms", lambda *args: errors.pop(0))
    assert not probe.run_probe("native", "decode", FACTS, "cpu").ok


@pytest.mark.usefixtures("fresh_probe")
def test_the_finding_is_kept_and_metadata_comes_first(monkeypatch):
    calls = []
    monkeypatch.setattr(probe, "_relative_rms", lambda *args: calls.append(args) or 1e-3)
    for _ in range(3):
        assert probe.run_probe("native", "decode", FACTS, "cpu").ok
    assert len(calls) == 2, "one call a batch, once"
    wide = probe.Facts("x", (12, 0), 16, 512, 64, "bfloat16", "float8_e4m3fn")
    assert not probe.run_probe("native", "decode", wide, "cpu").ok
    assert len(calls) == 2, "a kernel ran that metadata had refused"


def test_a_check_reads_as_one_line():
    assert str(Check("nvcc", "fail", "missing", "install it")) == "nvcc: missing (install it)"
