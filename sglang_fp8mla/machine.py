"""The machine line that every result carries: GPU, driver, clocks, versions, date.

Reads package metadata, git and nvidia-smi; imports no torch and creates no CUDA context.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from importlib import metadata
from pathlib import Path

_PACKAGES = ("torch", "triton", "flashinfer-python", "sglang", "sglang-kernel")


def output_of(*command: str) -> str:
    """Stripped stdout of a command, empty when it is missing, fails or hangs."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def version_of(package: str) -> str:
    """Installed version, or `none`."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _commit() -> str:
    """Commit of the checkout around this file, `+` when modified; empty for an installed copy."""
    here = Path(__file__).resolve().parent
    if not (here.parent / ".git").exists():
        return ""
    commit = output_of("git", "-C", str(here), "rev-parse", "--short", "HEAD")
    dirty = output_of("git", "-C", str(here), "status", "--porcelain", "--untracked-files=no", ".")
    return commit + ("+" if commit and dirty else "")


def machine() -> dict[str, str]:
    """What the numbers depend on, as strings, in a fixed order."""
    from . import __version__

    gpus = output_of(
        "nvidia-smi",
        "--query-gpu=name,driver_version,clocks.sm,clocks.max.sm,memory.total",
        "--format=csv,noheader",
    )
    fields = [field.strip() for field in gpus.splitlines()[0].split(",")] if gpus else []
    named = dict(zip(("gpu", "driver", "sm_clock", "max_sm_clock", "memory"), fields))
    found = {"gpu": "none", **named}
    if gpus:
        found["num_gpus"] = str(len(gpus.splitlines()))
    else:
        found["cpu"] = f"{platform.machine()}, {os.cpu_count()} cores"
    found["python"] = platform.python_version()
    found.update({package: version_of(package) for package in _PACKAGES})
    commit = _commit() or os.environ.get("FP8MLA_COMMIT", "")
    found["sglang-fp8mla"] = str(__version__) + (f" ({commit})" if commit else "")
    found["date"] = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    return found


def machine_line(found: dict[str, str]) -> str:
    """One line for people: `NVIDIA H200, driver 580.82, torch 2.11.0, ...`."""
    parts = [found["gpu"] if found["gpu"] != "none" else f"no GPU ({found.get('cpu', '')})"]
    skipped = ("gpu", "cpu", "date", "num_gpus")
    parts += [f"{k.replace('_', ' ')} {v}" for k, v in found.items() if k not in skipped]
    return ", ".join([*parts, found["date"]])
