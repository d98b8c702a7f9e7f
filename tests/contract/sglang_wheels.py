"""What the contract tests put on PYTHONPATH: other releases of SGLang, and installed plugins.

A wheel is downloaded once, without its dependencies, into ~/.cache/fp8mla-ci (or the directory in
FP8MLA_TEST_CACHE). FP8MLA_TEST_SGLANG_0522 names a directory with an unpacked 0.5.22.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

SGLANG_0522 = "0.5.22"


# what pip says when no index answers; anything else that it says is a failure to look into
_NO_ANSWER = ("Retrying (", "Connection", "Temporary failure", "timed out", "Could not connect")


class IndexUnreachable(Exception):
    """No package index answered; the text is pip's."""


def fetch_sglang(version: str) -> Path:
    """The `sglang` package directory of a release; its parent can go first on PYTHONPATH.

    Raises:
        IndexUnreachable: it is not in the cache and no package index answers.
    """
    given = os.environ.get(f"FP8MLA_TEST_SGLANG_{version.replace('.', '')}")
    if given:
        return Path(given) / "sglang"
    home = os.environ.get("FP8MLA_TEST_CACHE") or Path.home() / ".cache" / "fp8mla-ci"
    cache = Path(home)
    target = cache / f"sglang-{version}"
    # written last, so a directory with it is whole
    if not (target / f"sglang-{version}.dist-info" / "RECORD").exists():
        cache.mkdir(parents=True, exist_ok=True)
        download = subprocess.run(
            [
                *(sys.executable, "-m", "pip", "download", "-q", "--no-deps"),
                *("--only-binary=:all:", "-d", str(cache), f"sglang=={version}"),
            ],
            capture_output=True,
            text=True,
        )
        wheels = sorted(cache.glob(f"sglang-{version}-*.whl"))
        if not wheels:
            said = download.stderr.strip()[-800:]
            if any(sign in said for sign in _NO_ANSWER):
                raise IndexUnreachable(said)
            raise RuntimeError(f"pip download sglang=={version}: {said}")
        with zipfile.ZipFile(wheels[-1]) as wheel:
            wheel.extractall(target)
    return target / "sglang"


def make_distribution(site: Path, name: str, version: str, entry_points: str = "") -> None:
    """Write the metadata of an installed distribution into `site`, a directory of PYTHONPATH."""
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if entry_points:
        (info / "entry_points.txt").write_text(entry_points)


def install_plugin(site: Path) -> str:
    """Make this checkout count as installed, entry points included; returns the PYTHONPATH."""
    root = Path(__file__).parents[2]
    make_distribution(site, "sglang_fp8mla", "0.1.0", (root / "entry_points.txt").read_text())
    return os.pathsep.join([str(site), str(root)])
