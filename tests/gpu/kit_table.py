"""The table of docs/compat.md from the results of `test_kit_gpu.py`.

    python tests/gpu/kit_table.py kit.jsonl [kit.jsonl ...]

A run that was driven twice counts by its worst outcome. Standard library only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

COLUMNS = (
    ("bf16", "stock"),
    ("bf16", "auto"),
    ("e4m3", "stock"),
    ("e4m3", "gather_cast"),
    ("e4m3", "native"),
    ("e4m3", "fused"),
)
_WORST = ("failed", "skipped", "passed")


def read(paths: Iterable[str]) -> list[dict[str, Any]]:
    """Every line of the results files."""
    lines = []
    for path in paths:
        with open(path) as file:
            lines += [json.loads(line) for line in file if line.strip()]
    return lines


def worst(lines: Sequence[dict[str, Any]]) -> dict[tuple[str, str, str], dict[str, Any]]:
    """(run, pool, arm) -> its worst line."""
    kept: dict[tuple[str, str, str], dict[str, Any]] = {}
    for line in lines:
        key = line["run"], line["pool"], line["arm"]
        if key not in kept or _rank(line) < _rank(kept[key]):
            kept[key] = line
    return kept


def _rank(line: dict[str, Any]) -> int:
    return _WORST.index(line["status"])


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Passed of tried for each mode and arm; below it, what did not pass and why."""
    kept = worst(lines)
    modes = list(dict.fromkeys(line["mode"] for line in lines))
    heads = [f"{pool} {arm}" for pool, arm in COLUMNS]
    rows = ["| mode | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for mode in [*modes, "all"]:
        cells = []
        for pool, arm in COLUMNS:
            tried = [
                line
                for (_, p, a), line in kept.items()
                if (p, a) == (pool, arm) and mode in (line["mode"], "all")
            ]
            passed = sum(line["status"] == "passed" for line in tried)
            cells.append(f"{passed} of {len(tried)}" if tried else "")
        rows.append(f"| {mode} | " + " | ".join(cells) + " |")
    equal = [line for line in kept.values() if line.get("bitwise") is not None]
    rows += ["", f"Equal to stock to the last bit: {len(equal)} of {len(equal)} compared."]
    if any(not line["bitwise"] for line in equal) or any("verdict" in x for x in kept.values()):
        rows[-1] = "Worse than stock:"
        rows += [f"- {x['arm']}, {x['pool']}: {x['verdict']}" for x in lines if "verdict" in x]
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for (run, pool, arm), line in kept.items():
        if line["status"] != "passed":
            reason = run, line["status"], line["reason"].split(" Greatest")[0]
            reasons.setdefault(reason, []).append(f"{pool} {arm}")
    rows += ["", "Not passed:", ""]
    for (run, status, why), arms in reasons.items():
        rows.append(f"- {run} ({', '.join(arms)}): {status}, {why}")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.stdout.write(table(read(sys.argv[1:])) + "\n")
