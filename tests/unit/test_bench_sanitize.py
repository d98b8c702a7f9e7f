"""bench/sanitize.py: what it makes of compute-sanitizer's words, and its cases interpreted."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from bench import sanitize  # noqa: E402

HEAD = "========= COMPUTE-SANITIZER\ncase edges 16 heads\n"
DONE = '{"cases": 7}\n'
CLEAN = HEAD + DONE + "========= ERROR SUMMARY: 0 errors\n"
OUT_OF_BOUNDS = (
    HEAD
    + """========= Invalid __global__ read of size 16 bytes
=========     at mla_decode+0x1d40
=========     by thread (3,0,0) in block (17,0,0)
=========     Access at 0x7f2d3c000a40 is out of bounds
=========     and is 65 bytes after the nearest allocation at 0x7f2d3c000000 of size 2560 bytes
=========
========= Target application returned an error
========= ERROR SUMMARY: 1 error
"""
)
UNINITIALIZED = (
    HEAD
    + DONE
    + """========= Uninitialized __global__ memory read of size 4 bytes
=========     at void at::native::vectorized_elementwise_kernel<(int)4, at::native::FillFunctor\
<float>, std::array<char *, (unsigned long)1>>(int, T2, T3)+0x1d0
=========     by thread (0,0,0) in block (0,0,0)
=========     Access to 0x7f00 (0 bytes inside allocation of size 64 bytes)
=========
========= Uninitialized access at 0x7f0000000200 on access by cudaMemcpy source.
=========
========= ERROR SUMMARY: 2 errors
"""
)
RACE = (
    HEAD
    + DONE
    + """========= Error: Race reported between Write access at _merge_kernel+0x340 in \
mla_decode_triton.py:190
=========     and Read access at _merge_kernel+0x400 in mla_decode_triton.py:191 [508 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
)
UNSUPPORTED = """========= COMPUTE-SANITIZER
========= Error: Device not supported. Please refer to the "Supported Devices" section
=========
Traceback (most recent call last):
  File "bench/sanitize.py", line 1, in <module>
torch.AcceleratorError: CUDA error: unknown error
========= Target application returned an error
========= ERROR SUMMARY: 1 error
"""


def judge(tool, output, returncode=0, expected=7):
    return sanitize.judge(tool, output, returncode, expected)


def test_a_clean_run_needs_the_summary_all_cases_and_the_exit_status():
    assert judge("memcheck", CLEAN)["status"] == "clean"
    assert judge("memcheck", CLEAN, expected=8)["status"] == "failed"
    assert judge("memcheck", CLEAN, returncode=1)["status"] == "failed"
    assert judge("memcheck", CLEAN, returncode=None)["status"] == "timeout"
    assert judge("memcheck", HEAD + DONE)["status"] == "cannot run"
    assert judge("memcheck", CLEAN.replace(DONE, ""))["status"] == "failed"
    # a summary of another tool is none
    assert judge("racecheck", CLEAN)["status"] == "cannot run"
    clean_race = HEAD + DONE + "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 "
    assert judge("racecheck", clean_race + "warnings)\n")["status"] == "clean"
    assert judge(sanitize.BARE, "case a\n" + DONE)["status"] == "clean"


def test_an_access_out_of_bounds_is_a_finding_with_its_kernel():
    row = judge("memcheck", OUT_OF_BOUNDS, returncode=1)
    assert (row["status"], row["errors"], row["ours"], row["others"]) == ("findings", 1, 1, 0)
    assert row["first"].startswith(
        "Invalid __global__ read of size 16 bytes | at mla_decode+0x1d40 | by thread (3,0,0)"
    )


def test_initcheck_counts_what_it_finds_in_our_kernels_only():
    row = judge("initcheck", UNINITIALIZED)
    assert (row["status"], row["ours"], row["others"], row["unnamed"]) == ("clean", 0, 1, 1)
    # of which kernel, nobody knows: more errors than were printed
    more = UNINITIALIZED.replace("SUMMARY: 2", "SUMMARY: 900") + (
        "========= ERROR SUMMARY: 898 errors were not printed. Use --print-limit option to adjust "
        "the number of printed errors\n"
    )
    assert judge("initcheck", more)["errors"] == 900
    assert judge("initcheck", more)["status"] == "findings"
    ours = UNINITIALIZED.replace("     at void at::", "     at mla_decode_plan+0x10 at::")
    assert judge("initcheck", ours)["status"] == "findings"
    # the other tools see our kernels alone, so there an error is an error
    assert judge("synccheck", UNINITIALIZED)["status"] == "findings"


def test_races_and_warnings_are_findings():
    row = judge("racecheck", RACE)
    assert (row["status"], row["errors"], row["ours"]) == ("findings", 1, 1)
    warned = RACE.replace("Error: Race", "Warning: Race").replace(
        "(1 error, 0 warnings)", "(0 errors, 1 warning)"
    )
    assert judge("racecheck", warned)["status"] == "findings"


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("    at _decode_kernel+0x1d0 in mla_decode_triton.py:120", "_decode_kernel"),
        ("    at mla_decode_merge():0x160 in mla_decode.cu:6", "mla_decode_merge"),
        ("    at 0x1d0 in _claim_slots_kernel", "_claim_slots_kernel"),
        ("    at ns::kernel(int *, int *)+0x90 in a.cu:41", "kernel"),
        ("    and is 1 bytes after the nearest allocation at 0x7f00 of size 4 bytes", None),
    ],
)
def test_reads_the_kernel_of_each_spelling(line, name):
    assert sanitize.kernel_of(line) == name


def test_a_tool_that_cannot_run_says_its_first_words():
    row = judge("racecheck", UNSUPPORTED, returncode=1)
    assert row["status"] == "cannot run"
    assert row["why"].startswith("========= Error: Device not supported.")
    assert judge("memcheck", UNSUPPORTED, returncode=1)["status"] == "cannot run"
    assert judge("memcheck", "", returncode=127)["why"] == "no output"


def test_a_wrong_answer_fails_without_any_tool():
    output = "case edges\nTraceback (most recent call last):\nAssertionError: edges: NaN\n"
    row = judge(sanitize.BARE, output, returncode=1)
    assert row["status"] == "failed"
    assert row["why"] == "case edges: AssertionError: edges: NaN"


def test_command_lines():
    child = [sys.executable, "-m", "bench.sanitize", "--child", "triton", "--device", "cuda"]
    assert sanitize.make_command("none", "triton", "", 1) == child
    memcheck = sanitize.make_command("memcheck", "triton", "/bin/cs", 21020)
    assert memcheck[:3] == ["/bin/cs", "--tool", "memcheck"]
    assert memcheck[-len(child) :] == child
    assert memcheck[memcheck.index("--port") + 1] == "21020"
    assert "kernel_substring=_gather_cast" in memcheck
    initcheck = sanitize.make_command("initcheck", "triton", "/bin/cs", 1)
    assert "--kernel-name" not in initcheck
    assert initcheck[-1] == "--no-poison"
    # an older tool without an option gets none
    few = sanitize.make_command("racecheck", "triton", "cs", 1, known="--print-limit --kernel-name")
    assert few[3:5] == ["--print-limit", str(sanitize.PRINT_LIMIT)]
    assert "--port" not in few


def test_the_filter_names_each_of_our_kernels():
    """A kernel that is renamed or added must not fall out of the checks."""
    source = (ROOT / "sglang_fp8mla/kernels/mla_decode.cu").read_text()
    names = set()
    for line in source.splitlines():
        if line.startswith('extern "C" __global__'):
            names.add(line.partition("(const")[0].split()[-1])
    for file in ("gather_cast.py", "mla_decode_triton.py"):
        text = (ROOT / "sglang_fp8mla/kernels" / file).read_text()
        names |= {
            part.partition("def ")[2].partition("(")[0] for part in text.split("@triton.jit")[1:]
        }
    kernels = {name for name in names if name.endswith("_kernel") or name.startswith("mla_")}
    assert kernels == set(sanitize.KERNELS)
    for name in sanitize.KERNELS:
        assert any(part in name for part in sanitize._NAME_PARTS), name


@pytest.mark.parametrize("poison", [True, False])
@pytest.mark.parametrize("group", ["gather", "triton-dtypes"])
def test_cases_hold_interpreted(group, poison, device):
    number = 0
    for _, run in sanitize.cases(group, str(device), poison=poison):
        run()
        number += 1
    assert number == sanitize.number_of_cases(group, str(device))


def test_cases_cover_what_the_kernels_branch_on():
    lengths = {n for _, lens, *_ in sanitize.DECODE_CASES for n in lens}
    assert {0, 1, 63, 64, 65, 4097} <= lengths
    heads = {h for backend, hs, _ in sanitize.DECODE.values() if backend == "cuda" for h in hs}
    assert heads == {1, 8, 16, 64, 128}
    for backend in ("cuda", "triton"):
        kinds = {k for b, _, some in sanitize.DECODE.values() if b == backend for k in some}
        assert [{kind[i] for kind in kinds} for i in range(3)] == [
            {"bfloat16", "float16"}, {"float8_e4m3fn", "float8_e5m2"}, {0, 64},
        ]  # fmt: skip


def test_a_whole_run_against_a_stand_in_of_the_tool(tmp_path):
    """Bare run, then the tool around the same process: rows, logs, exit status."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(
        "#!/bin/sh\n"
        'case "$1" in --version|--help) echo "stand-in --port --print-limit"; exit 0;; esac\n'
        'echo "========= COMPUTE-SANITIZER"\n'
        'while [ "$1" != "$PYTHON" ]; do shift; done\n'
        '"$@"; code=$?\n'
        'echo "========= ERROR SUMMARY: 0 errors"\n'
        "exit $code\n"
    )
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    done = subprocess.run(
        [sys.executable, "-m", "bench.sanitize", "--device", "cpu", "--group", "gather",
         "--tool", "memcheck,racecheck", "--json", tmp_path / "rows.json"],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "OUT": str(tmp_path),
             "PYTHON": sys.executable, "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    found = {row["tool"]: (row["status"], row["cases"]) for row in rows}
    assert found == {
        "none": ("clean", 13), "memcheck": ("clean", 13), "racecheck": ("cannot run", 13),
    }, done.stdout + done.stderr  # fmt: skip
    assert done.returncode == 1
    assert (tmp_path / "memcheck-gather.log").exists()
