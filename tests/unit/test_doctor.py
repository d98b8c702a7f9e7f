"""Doctor: survives whatever is missing, says what to do, and agrees with the factory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from sglang_fp8mla import BACKEND_NAME, cli, doctor
from sglang_fp8mla.checks import Check

ROOT = Path(__file__).parents[2]

# refuses to import the named packages, as if they were not installed
_BLOCK = """
import importlib.abc, importlib.metadata as metadata, sys
BLOCKED = set({blocked!r})
class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
real = metadata.version
def version(name):
    if name.removesuffix("-python") in BLOCKED:
        raise metadata.PackageNotFoundError(name)
    return real(name)
metadata.version = version
from sglang_fp8mla.cli import main
sys.exit(main({words!r}))
"""


def run_doctor(
    *words: str, blocked: tuple[str, ...] = (), **environ: str
) -> subprocess.CompletedProcess[str]:
    code = _BLOCK.format(blocked=blocked, words=["doctor", *words])
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "80", **environ},
        timeout=300,
    )


def checks_of(data: dict) -> dict[str, dict[str, str]]:
    return {check["name"]: check for section in data["sections"] for check in section["checks"]}


@pytest.mark.parametrize(
    ("blocked", "name", "level"),
    [
        (("torch",), "torch", "fail"),
        (("triton",), "triton", "fail"),
        (("sglang",), "sglang", "fail"),
        (("flashinfer",), "flashinfer-python", "fail"),
        (("packaging",), "packaging", "fail"),
        (("rich",), "rich", "warn"),
        (("torch", "triton", "sglang", "flashinfer", "packaging", "rich"), "torch", "fail"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else "",
)
def test_survives_missing_packages(blocked, name, level):
    """Each package absent, then all: a row with a remedy, exit 1, valid JSON, no traceback."""
    done = run_doctor("--json", "--no-probe", blocked=blocked)
    assert done.stderr == ""
    data = json.loads(done.stdout)
    assert checks_of(data)[name]["level"] == level
    assert checks_of(data)[name]["fix"]
    assert data["ok"] is (done.returncode == 0)
    if level == "fail":
        assert done.returncode == 1


def test_table_without_rich():
    """The table is aligned text where rich is missing."""
    done = run_doctor("--no-probe", blocked=("rich", "sglang", "flashinfer", "torch"))
    assert done.returncode == 1
    assert done.stderr == ""
    assert f"{BACKEND_NAME} cannot run here:" in done.stdout
    assert max(map(len, done.stdout.splitlines()[:-3])) <= 80


def test_no_heavy_import_at_module_level():
    code = (
        "import sys, sglang_fp8mla.doctor;"
        "print(sorted({'torch', 'triton', 'sglang', 'flashinfer', 'rich', 'packaging'}"
        " & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stderr


class FakeEntryPoint:
    def __init__(self, distribution: str) -> None:
        self.name = BACKEND_NAME
        self.value = "somewhere:register"
        self.dist = type("Dist", (), {"name": distribution})


@pytest.fixture
def entry_points(monkeypatch):
    found: list[FakeEntryPoint] = []
    monkeypatch.setattr(metadata, "entry_points", lambda group: found)
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    return found


def test_entry_point_missing(entry_points):
    (check,) = doctor.check_plugin()
    assert check.level == "fail"
    assert "pip install" in check.fix


def test_entry_point_of_another_package(entry_points):
    """Two packages, one name: the row names both."""
    entry_points += [FakeEntryPoint("sglang-fp8mla"), FakeEntryPoint("rival")]
    (check,) = doctor.check_plugin()
    assert check.level == "fail"
    assert "rival, sglang-fp8mla" in check.found


@pytest.mark.parametrize(
    ("allowed", "level"),
    [("", "ok"), ("other", "fail"), (f"other, {BACKEND_NAME}", "ok"), (BACKEND_NAME, "ok")],
)
def test_plugin_whitelist(entry_points, monkeypatch, allowed, level):
    """SGLANG_PLUGINS=other silently keeps us out of SGLang: doctor must say so."""
    entry_points.append(FakeEntryPoint("sglang-fp8mla"))
    monkeypatch.setenv("SGLANG_PLUGINS", allowed)
    check = doctor.check_plugin()[-1]
    assert (check.name, check.level) == ("SGLANG_PLUGINS", level)
    if level == "fail":
        assert check.fix == f"add {BACKEND_NAME} to it, or unset it"


def test_typo_in_the_environment(monkeypatch):
    monkeypatch.setenv("SGLANG_FP8MLA_DECODE_PATH", "fast")
    check = doctor.check_settings()[-1]
    assert check.level == "fail"
    assert check.found == (
        "SGLANG_FP8MLA_DECODE_PATH must be auto, native, fused or gather_cast, got 'fast'"
    )


@pytest.mark.parametrize(
    ("text", "level"),
    [
        (None, "fail"),
        ("", "fail"),
        ("[]", "fail"),
        ("{}", "fail"),
        ('{"generations": {"SM90": {}, "SM120": {}}}', "ok"),
    ],
)
def test_profile_is_looked_at_without_a_gpu(tmp_path, monkeypatch, text, level):
    """A missing or damaged table is found where the variable is set, not on the GPU machine."""
    path = tmp_path / "table.json"
    if text is not None:
        path.write_text(text)
    monkeypatch.setenv("SGLANG_FP8MLA_PROFILE", str(path))
    check = doctor.check_settings()[-1]
    assert (check.name, check.level) == ("profile", level)
    assert str(path) in check.found


def test_caches_are_where_the_kernels_put_them(monkeypatch, tmp_path):
    """Doctor derives the folders by itself, to survive without torch."""
    nvrtc = pytest.importorskip("sglang_fp8mla.kernels.nvrtc")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = {check.name: check.found for check in doctor.check_toolchain()}
    assert found["fused kernel cache"].split(" (")[0] == str(nvrtc.cache_dir())


def test_read_only_cache_is_a_warning(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    rows = {check.name: check for check in doctor.check_toolchain()}
    assert rows["fused kernel cache"].level == "warn"
    assert "XDG_CACHE_HOME" in rows["fused kernel cache"].fix


def test_prints_no_foreign_environment():
    """A bug report must not leak what else the environment holds."""
    done = run_doctor(
        "--report", "--no-probe", blocked=("sglang", "torch"), HF_TOKEN="hf_secret_value"
    )
    assert done.stdout.startswith("```\nsglang-fp8mla doctor")
    assert "hf_secret_value" not in done.stdout


def test_report_hides_the_home_folder(monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: Path("/home/jane"))
    section = doctor.Section("package", [Check("cache", "ok", "/home/jane/.cache/flashinfer")])
    text = doctor.report_text(doctor.Diagnosis([section]))
    assert "jane" not in text
    assert "~/.cache/flashinfer" in text


def test_a_crashing_check_is_a_row():
    def explode() -> list[Check]:
        raise RuntimeError("driver is unhappy")

    assert doctor._guarded("GPU", explode) == [
        Check("GPU", "fail", "the check failed with RuntimeError: driver is unhappy")
    ]


def test_imports_that_print_do_not_reach_the_output():
    """SGLang and C libraries print while they are imported: `--json` must stay JSON."""
    code = (
        "import os\nfrom sglang_fp8mla import doctor\n"
        "with doctor._quiet(True):\n    os.write(1, b'1'); print('2'); os.write(2, b'3')\n"
        "print('signal')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.stdout, done.stderr) == ("signal\n", "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--heads", "0"], "doctor: --heads must be >= 1, got 0"),
        (["--model", "deepseek-v3", "--tp", "3"], "--tp must divide the 128 heads"),
        (["--model", "no/such/model"], "model must be a config.json"),
    ],
)
def test_bad_arguments(words, message, capsys):
    assert cli.main(["doctor", *words]) == cli.EXIT_USAGE
    assert message in capsys.readouterr().err


class TestPaths:
    """The choice on a pretended GPU; the table, the policy and the reasons are real."""

    @pytest.fixture(autouse=True)
    def gpu(self, monkeypatch):
        torch = pytest.importorskip("torch")
        from sglang_fp8mla import probe

        self.capability = (9, 0)
        self.failing: set[tuple[str, str]] = set()
        self.probed: list[tuple[str, str]] = []
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA Test")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: self.capability)

        def run_probe(path: str, phase: str, facts: probe.Facts, device: str) -> Check:
            self.probed.append((path, phase))
            if (path, phase) in self.failing:
                return Check(f"{path} {phase}", "fail", "CompilationError: no nvcc", "install nvcc")
            return Check(f"{path} {phase}", "ok", "relative RMS error 1e-3 against float64")

        monkeypatch.setattr(probe, "run_probe", run_probe)
        for name in ("DECODE_PATH", "EXTEND_PATH", "PROFILE"):
            monkeypatch.delenv(f"SGLANG_FP8MLA_{name}", raising=False)

    def test_agrees_with_the_policy(self):
        """Doctor's decision is policy.choose's on the same facts, not a second opinion."""
        from sglang_fp8mla import policy, probe
        from sglang_fp8mla.envs import Settings

        rows, decision = doctor.check_paths(doctor.Served(), "needed")
        facts = probe.Facts(
            "NVIDIA Test", (9, 0), 16, 512, 64, "bfloat16", "float8_e4m3fn",
            metadata.version("flashinfer-python"),
        )  # fmt: skip
        want, _ = policy.choose(facts, Settings(), lambda path, phase: Check(path, "ok", ""))
        assert decision["decode"]["by_batch"] == [list(step) for step in want.decode.by_batch]
        assert decision["extend"]["by_batch"] == [list(step) for step in want.extend.by_batch]
        assert all(row.level != "fail" for row in rows)

    def test_unknown_gpu_falls_back(self):
        self.capability = (12, 0)
        rows, decision = doctor.check_paths(doctor.Served(), "needed")
        assert decision["decode"]["paths"] == ["gather_cast"]
        assert "no measured table for NVIDIA Test (SM120)" in decision["decode"]["reason"]
        native = next(row for row in rows if row.name == "native decode")
        assert native.found.startswith("not here: SM120")
        assert "SM90 only" in native.found

    def test_forced_incapable_path_fails(self, monkeypatch):
        monkeypatch.setenv("SGLANG_FP8MLA_DECODE_PATH", "native")
        self.failing.add(("native", "decode"))
        rows, decision = doctor.check_paths(doctor.Served(), "needed")
        assert decision is None
        assert rows[-1].level == "fail"
        assert "SGLANG_FP8MLA_DECODE_PATH=native cannot run here" in rows[-1].found
        assert "no nvcc" in rows[-1].found

    def test_all_paths_probes_all(self):
        doctor.check_paths(doctor.Served(), "all")
        assert len(set(self.probed)) == 5

    def test_no_probe_probes_nothing(self):
        rows, _ = doctor.check_paths(doctor.Served(), "none")
        assert self.probed == []
        gather = next(row for row in rows if row.name == "gather_cast decode")
        assert gather.found.startswith("possible, not probed")

    def test_failed_probe_of_another_path_is_a_warning(self):
        """A path that cannot be built here is worth a word, and no reason to refuse."""
        self.failing.add(("native", "decode"))
        rows, decision = doctor.check_paths(doctor.Served(), "all")
        native = next(row for row in rows if row.name == "native decode")
        assert (native.level, native.fix) == ("warn", "install nvcc")
        assert "native" not in decision["decode"]["paths"]

    def test_measured_path_that_fails_is_a_warning(self, monkeypatch, tmp_path):
        """The table wants native, its probe fails: gather_cast, and the row says why."""
        rule = {"max_heads": 128, "max_batch": 1 << 20}
        table = {
            "schema": 1,
            "generations": {
                "SM90": {
                    "decode": [{**rule, "path": "native"}],
                    "extend": [{**rule, "path": "gather_cast"}],
                }
            },
        }
        path = tmp_path / "table.json"
        path.write_text(json.dumps(table))
        monkeypatch.setenv("SGLANG_FP8MLA_PROFILE", str(path))
        self.failing.add(("native", "decode"))
        rows, decision = doctor.check_paths(doctor.Served(), "needed")
        decode = next(row for row in rows if row.name == "decode")
        assert decode.level == "warn"
        assert "failed its check" in decode.found
        assert decision["decode"]["paths"] == ["gather_cast"]

    def test_unneeded_paths_are_not_probed(self):
        """A JIT build of minutes for a path that the table does not want helps nobody."""
        doctor.check_paths(doctor.Served(), "needed")
        from sglang_fp8mla import policy, probe
        from sglang_fp8mla.envs import Settings

        asked: list[tuple[str, str]] = []

        def ask(path: str, phase: str) -> Check:
            asked.append((path, phase))
            return Check(path, "ok", "")

        facts = probe.Facts("NVIDIA Test", (9, 0), 16, 512, 64, "bfloat16", "float8_e4m3fn")
        policy.choose(facts, Settings(), ask)
        assert set(self.probed) == set(asked)


def test_self_test_on_this_machine():
    """All 256 codes through the real kernel, compiled or interpreted."""
    pytest.importorskip("triton")
    (check,) = doctor.self_test()
    assert check.level == "ok", check
    assert "exact on" in check.found


def test_self_test_without_a_working_interpreter(monkeypatch, capsys):
    """No GPU and a numpy that the interpreter does not know: a warning, not a wrong kernel."""
    errors = pytest.importorskip("triton.runtime.errors")
    from sglang_fp8mla import workspace

    def fail(*args: object, **kwargs: object) -> None:
        raise errors.InterpreterError("only 0-dimensional arrays can be converted")

    monkeypatch.setattr(workspace, "list_live_slots", fail)
    code = doctor._self_test_main()
    line = capsys.readouterr().out
    done = subprocess.CompletedProcess([], code, stdout=line, stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: done)
    (check,) = doctor.self_test()
    assert check.level == "warn"
    assert "interpreter does not run here" in check.found


def test_self_test_reports_a_wrong_kernel(monkeypatch, capsys):
    """The self-test can fail: a kernel that casts nothing is found out."""
    gather_cast = pytest.importorskip("sglang_fp8mla.kernels.gather_cast")
    monkeypatch.setattr(gather_cast, "gather_cast", lambda *operands: None)
    assert doctor._self_test_main() == 1
    assert "wrong values" in capsys.readouterr().out


_REGISTRATION = """
import json, sys
{before}
from sglang_fp8mla import doctor
with doctor._quiet(True):
    rows = doctor.check_registration()
print(json.dumps([row.to_json() for row in rows]))
"""
_OURS = "from sglang_fp8mla.plugin import register; register()"
_RIVAL = """
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
def rival(runner): pass
rival.__module__ = 'rival_package.backend'
ATTENTION_BACKENDS['flashinfer_mla_fp8'] = rival
"""


@pytest.mark.sglang
@pytest.mark.parametrize(
    ("before", "level", "found"),
    [
        (_OURS, "ok", "flashinfer_mla_fp8 is ours (sglang_fp8mla.plugin)"),
        ("", "fail", "SGLang did not load the plugin"),
        (_RIVAL, "fail", "flashinfer_mla_fp8 belongs to rival_package.backend"),
    ],
    ids=["ours", "not-loaded", "rival"],
)
def test_registration_in_real_sglang(before, level, found):
    """Who holds the name in SGLang's own registry, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", _REGISTRATION.format(before=before)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        # keeps the installed entry point, if any, out of the way: `before` decides
        env={**os.environ, "SGLANG_PLUGINS": "none-of-them"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert (rows[0]["name"], rows[0]["level"]) == ("name registered", level)
    assert rows[0]["found"].startswith(found)
    if level == "ok":
        assert rows[1:] == [
            {"name": "sglang seams", "level": "ok", "found": "all installed", "fix": ""}
        ]
