"""What importing costs: the launcher's processes must not load torch because of us."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "sglang_fp8mla"
HEAVY = ("torch", "triton", "sglang", "flashinfer", "matplotlib", "numpy")


@pytest.mark.parametrize(
    "module",
    ["plugin", "compat", "envs", "checks", "errors", "policy", "probe", "integration", "cli",
     "doctor", "demo", "estimate", "selftest", "trace", "profile", "calibrate"],
)  # fmt: skip
def test_import_is_light(module):
    code = (
        f"import sys, sglang_fp8mla.{module}\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield f"{'.' * node.level}{node.module or ''}"


@pytest.mark.parametrize("path", sorted((PACKAGE / "kernels").glob("*.py")), ids=lambda p: p.stem)
def test_kernels_know_nothing_of_sglang_and_flashinfer(path):
    for name in imports_of(path):
        assert name.split(".")[0] not in ("sglang", "flashinfer"), f"{path.name} imports {name}"
        assert not name.startswith("..") or name in ("..errors", "..checks"), name
