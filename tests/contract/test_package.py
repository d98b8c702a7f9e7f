"""What pip sees: an install that moves nothing else, and archives that hold the entry points."""

from __future__ import annotations

import configparser
import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def pip(*words: str) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(wheel, sdist), built by the project's own backend."""
    pytest.importorskip("build")
    out = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return next(out.glob("*.whl")), next(out.glob("*.tar.gz"))


@pytest.mark.sglang
def test_installing_beside_stock_moves_nothing(archives: tuple[Path, Path]) -> None:
    """pip's own plan, in the environment of the stock pair: our package and no other."""
    wheel, _ = archives
    report = json.loads(
        pip("install", "--dry-run", "--quiet", "--no-index", "--report", "-", "--ignore-installed",
            "--no-deps", str(wheel))
    )  # fmt: skip
    assert [item["metadata"]["name"] for item in report["install"]] == ["sglang-fp8mla"]
    # and its dependencies are met by what stock SGLang brings, without an index
    plan = json.loads(
        pip("install", "--dry-run", "--quiet", "--no-index", "--report", "-", str(wheel))
    )
    assert {item["metadata"]["name"] for item in plan["install"]} <= {"sglang-fp8mla"}


def test_nothing_of_the_serving_stack_is_required(archives: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(archives[0]) as wheel:
        name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = wheel.read(name).decode()
    required = [
        line.removeprefix("Requires-Dist: ")
        for line in metadata.splitlines()
        if line.startswith("Requires-Dist: ") and "extra ==" not in line
    ]
    assert required == ["packaging>=21", "rich>=12"]


def test_archives_hold_the_entry_points_and_the_data(archives: tuple[Path, Path]) -> None:
    source = configparser.ConfigParser()
    source.read(ROOT / "entry_points.txt")
    with zipfile.ZipFile(archives[0]) as wheel:
        names = wheel.namelist()
        entry = next(n for n in names if n.endswith(".dist-info/entry_points.txt"))
        built = configparser.ConfigParser()
        built.read_string(wheel.read(entry).decode())
    assert {s: dict(built[s]) for s in built.sections()} == {
        s: dict(source[s]) for s in source.sections()
    }
    for path in ROOT.glob("sglang_fp8mla/**/*"):
        if path.suffix in (".py", ".json", ".cu", ".typed"):
            assert path.relative_to(ROOT).as_posix() in names, f"{path} is not in the wheel"
    with tarfile.open(archives[1]) as sdist:
        held = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"entry_points.txt", "pyproject.toml", "README.md", "LICENSE"} <= held
