"""Tables, comparisons and plots of benchmark results; the results are plain JSON.

Imports neither torch nor, unless it draws, matplotlib.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import IncompatibleEnvironment, InvalidArgument
from ..machine import machine_line
from ..tables import print_table

SCHEMA = 1
COLOURS = {
    "stock": "#d62728",
    "gather_cast": "#1f77b4",
    "native": "#ff7f0e",
    "fused": "#2ca02c",
    "bf16": "#7f7f7f",
    "sglang_triton": "#9467bd",
    "flashmla": "#8c564b",
}


def load(path: Path) -> dict[str, Any]:
    """Results that `bench --json` wrote.

    Raises:
        InvalidArgument: the file is missing, no JSON, or of another schema.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"bench: {path} must be a result of --json: {error}") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA or "rows" not in data:
        raise InvalidArgument(f"bench: {path} must be a result of --json with schema {SCHEMA}")
    return data


def _us(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if value < 1000 else f"{value:,.0f}"


def show(data: Mapping[str, Any], old: Mapping[str, Any] | None = None) -> None:
    """The table, on stderr, below the machine line; with `old`, what changed since."""
    out = sys.stderr
    out.write(machine_line(data["machine"]) + "\n")
    out.write(
        f"copy bandwidth {data['bandwidth'] / 1e12:.2f} TB/s, measured in this run; times are "
        "medians of CUDA graph replays, cold L2\n\n"
    )
    before = _by_key(old["rows"]) if old is not None else {}
    columns = ["path", "check", "error", "us/layer", "p20-p80", "us/step", "TB/s"]
    columns += ["vs stock", "roofline"] + (["old us", "old/new"] if old is not None else [])
    for name, case in data["cases"].items():
        rows = [row for row in data["rows"] if row["case"] == name]
        styles = ["red" if r["check"] == "FAILED" else "dim" if not r["us"] else "" for r in rows]
        cells = [_cells(row, before if old is not None else None) for row in rows]
        right = range(2, len(columns))
        out.write(_title(case) + "\n")
        print_table("", columns, cells, right=right, styles=styles, file=out)
        for row in rows:
            if row["detail"] or row["note"]:
                out.write(f"  {row['path']}: {row['detail'] or row['note']}\n")
        out.write("\n")


def _title(case: Mapping[str, Any]) -> str:
    """`name: 16 heads, 32 x 4,096 tokens, 131,072 of 495,552 slots live (about)`."""
    text = f"{case['name']}: {case['num_heads']} heads, {case['bs']} x {case['kv_len']:,} tokens"
    if case["q_len"] > 1:
        text += f", {case['q_len']} queries each"
    text += f", {case['live']:,} of {case['pool']:,} slots live"
    return text + (f" ({case['about']})" if case["about"] else "")


def _cells(
    row: Mapping[str, Any], before: Mapping[tuple[str, str], Mapping[str, Any]] | None
) -> list[str]:
    spread = "-" if row["us"] is None else f"{_us(row['us_p20'])}-{_us(row['us_p80'])}"
    cells = [
        row["path"],
        row["check"],
        "-" if row["error"] is None else f"{row['error']:.1e}",
        _us(row["us"]),
        spread,
        _us(row["step_us"]),
        "-" if row["tb_per_s"] is None else f"{row['tb_per_s']:.2f}",
        "-" if row["ratio"] is None else f"{row['ratio']:.2f}x",
        "-" if row["of_roofline"] is None else f"{row['of_roofline']:.0%}",
    ]
    if before is not None:
        found = before.get((row["case"], row["path"]))
        then = found["us"] if found else None
        cells += [_us(then), f"{then / row['us']:.2f}x" if then and row["us"] else "-"]
    return cells


def _by_key(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], Mapping[str, Any]]:
    return {(row["case"], row["path"]): row for row in rows}


def slower(
    data: Mapping[str, Any], old: Mapping[str, Any], percent: float
) -> list[tuple[str, str, float]]:
    """(case, path, new / old) of what takes more than `percent` longer than in `old`."""
    before = _by_key(old["rows"])
    found = []
    for key, row in _by_key(data["rows"]).items():
        then = before.get(key)
        if then and then["us"] and row["us"] and row["us"] > then["us"] * (1 + percent / 100):
            found.append((*key, row["us"] / then["us"]))
    return found


def sweep_series(
    data: Mapping[str, Any],
) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Per sweep, per path: (size, microseconds per layer) in rising order, and `floor`."""
    sweeps: defaultdict[str, defaultdict[str, list[tuple[int, float]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    cases = data["cases"]
    for row in data["rows"]:
        case = cases[row["case"]]
        kind = case.get("sweep")
        if not kind or row["us"] is None:
            continue
        size = {"length": case["kv_len"], "batch": case["bs"], "pool": case["pool"]}[kind]
        title = f"{kind}, {case['num_heads']} heads"
        if kind != "batch":
            title += f", batch {case['bs']}"
        if kind != "length":
            title += f", {case['kv_len']:,} tokens each"
        if kind != "pool":
            title += f", pool {case['pool']:,}"
        series = sweeps[title]
        series[row["path"]].append((size, row["us"]))
        floor = (size, case["floor_bytes"] / data["bandwidth"] * 1e6)
        if floor not in series["floor"]:
            series["floor"].append(floor)
    return {
        title: {name: sorted(points) for name, points in series.items()}
        for title, series in sweeps.items()
    }


def plot(data: Mapping[str, Any], out: Path) -> None:
    """Draw every sweep of the results: time per layer against the size, per path, with the floor.

    Raises:
        IncompatibleEnvironment: matplotlib is missing.
        InvalidArgument: the results hold no sweep.
    """
    from ..trace_plot import require_matplotlib

    require_matplotlib()
    sweeps = sweep_series(data)
    if not sweeps:
        raise InvalidArgument("bench: --plot needs a sweep: add --sweep length, batch or pool")
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, len(sweeps), figsize=(6.2 * len(sweeps), 5.4), squeeze=False, constrained_layout=True
    )
    figure.suptitle(_wrapped(machine_line(data["machine"]), 62 * len(sweeps)), fontsize=7)
    for panel, (title, series) in zip(axes[0], sweeps.items()):
        for name, points in series.items():
            xs, ys = [x for x, _ in points], [y for _, y in points]
            if name == "floor":
                panel.plot(xs, ys, "k:", linewidth=1.2, label="floor: live FP8 bytes / bandwidth")
            else:
                colour = COLOURS.get(name, "#000000")
                panel.plot(xs, ys, "o-", color=colour, label=name, markersize=3.5, linewidth=1.5)
        # a floor far below every time would squeeze them all into the upper edge
        fastest = min(y for name, points in series.items() if name != "floor" for _, y in points)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_ylim(bottom=max(fastest / 12, panel.get_ylim()[0]))
        kind = re.split(r"\W", title)[0]
        labels = {"length": "tokens per request", "batch": "requests", "pool": "pool slots"}
        panel.set_xlabel(labels[kind])
        panel.set_ylabel("microseconds per layer")
        panel.set_title(title, fontsize=10)
        panel.grid(True, which="major", alpha=0.3)
    handles, labels = axes[0][0].get_legend_handles_labels()
    columns = min(len(labels), 4 * len(sweeps))
    figure.legend(handles, labels, loc="outside lower center", ncol=columns, fontsize=8)
    figure.savefig(out, dpi=150)
    pyplot.close(figure)


def _wrapped(text: str, width: int) -> str:
    import textwrap

    return "\n".join(textwrap.wrap(text, width))


def require_results(data: Mapping[str, Any]) -> None:
    """Raises: IncompatibleEnvironment, when not one row was timed."""
    if not any(row["us"] is not None for row in data["rows"]):
        raise IncompatibleEnvironment(
            "bench: no path could run here; the reasons stand above each row"
        )
