"""Draws a step of a trace: a stacked bar of where the time goes, and a timeline of its kernels.

matplotlib is imported only when something is drawn.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from .errors import IncompatibleEnvironment
from .trace import CAST, GAP, Stage, analyse_rank, category_of, typical_steps
from .trace_file import Rank, Trace

# one colour per category in every plot, the cast in red
COLOURS = {
    CAST: "#d62728",
    "live-row cast": "#ff9896",
    "attention": "#1f77b4",
    "KV write": "#9467bd",
    "GEMM": "#2ca02c",
    "MoE": "#98df8a",
    "norm": "#bcbd22",
    "rope": "#17becf",
    "activation": "#8c564b",
    "quantisation": "#c49c94",
    "communication": "#ff7f0e",
    "index building": "#e377c2",
    "sampling": "#f7b6d2",
    "memory copy": "#7f7f7f",
    "elementwise": "#c7c7c7",
    "other": "#aec7e8",
    GAP: "#eeeeee",
}
_LAYERS_SHOWN = 3


def require_matplotlib() -> None:
    """Raises: IncompatibleEnvironment, when matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise IncompatibleEnvironment(
            "--plot needs matplotlib: pip install 'sglang-fp8mla[plot]' (or pip install matplotlib)"
        )


def plot_step(trace: Trace, out: Path, *, row: int = 576) -> None:
    """Draw the first rank's decode step (else its longest stage) to `out`, a PNG, PDF or SVG.

    Raises:
        IncompatibleEnvironment: no matplotlib, or nothing to draw.
    """
    require_matplotlib()
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    label, rank = min(trace.ranks.items())
    stages, _, steps = analyse_rank(rank, row=row)
    if not stages:
        raise IncompatibleEnvironment(f"{trace.path}: no GPU events to plot")
    stage = stages.get("DECODE") or max(stages.values(), key=lambda s: s.step_ms * s.num_steps)
    # one of those that the bar is the mean of
    step = typical_steps([s for s in steps if s.mode == stage.mode])[0]
    figure, (bars, whole, part) = pyplot.subplots(
        3, 1, figsize=(11, 6.2), height_ratios=[1.5, 1, 1], constrained_layout=True
    )
    title = f"{trace.path.name}{' ' + label if label else ''}: one {stage.mode} step"
    figure.suptitle(f"{title}, {stage.step_ms:.2f} ms, {stage.layers} attention layers")
    _draw_bars(bars, stage)
    order = sorted(range(len(rank.ts)), key=rank.ts.__getitem__)
    mine = order[step.first : step.last]
    spans = _coloured_spans(rank, mine, stage, step.start)
    _draw_timeline(whole, spans, 0.0, (step.end - step.start) / 1e3)
    whole.set_title("the whole step", fontsize=9, loc="left")
    first, last = _some_layers(rank, mine, step.start)
    _draw_timeline(part, spans, first, last)
    part.set_title(f"{_LAYERS_SHOWN} layers of it", fontsize=9, loc="left")
    part.set_xlabel("ms")
    figure.savefig(out, dpi=150)
    pyplot.close(figure)


def _draw_bars(axes: Any, stage: Stage) -> None:
    """The step as one stacked bar, and below it the same step without the cast, if it has one."""
    labels = ["this step"] + (["without\nthe cast"] if stage.cast else [])
    for y, skipped in enumerate([None, CAST][: len(labels)]):
        left = 0.0
        for name, values in stage.categories.items():
            if name == skipped:
                continue
            width = values["ms"]
            share = width / stage.step_ms
            shown = f"{name} {width:.2f} ms ({share:.0%})" if y == 0 and share >= 0.005 else None
            axes.barh(y, width, left=left, color=COLOURS.get(name, "#000000"), label=shown)
            left += width
        axes.text(left, y, f" {left:.2f} ms", va="center", fontsize=9)
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlim(0, stage.step_ms * 1.08)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.05), fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def _coloured_spans(
    rank: Rank, mine: list[int], stage: Stage, start: float
) -> dict[str, list[tuple[float, float]]]:
    """Per category, (begin, width) in milliseconds since the step's start."""
    spans: dict[str, list[tuple[float, float]]] = {}
    for i in mine:
        name = rank.names[rank.name[i]]
        long = stage.cast is not None and rank.dur[i] >= 0.5 * stage.cast.us_per_layer
        is_cast = stage.cast is not None and name == stage.cast.kernel and long
        category = CAST if is_cast else category_of(name)
        span = ((rank.ts[i] - start) / 1e3, rank.dur[i] / 1e3)
        spans.setdefault(category, []).append(span)
    return spans


def _draw_timeline(
    axes: Any, spans: dict[str, list[tuple[float, float]]], first: float, last: float
) -> None:
    for category, ranges in spans.items():
        shown = [r for r in ranges if r[0] + r[1] >= first and r[0] <= last]
        axes.broken_barh(shown, (0, 1), color=COLOURS.get(category, "#000000"), linewidth=0)
    axes.set_xlim(first, last)
    axes.set_yticks([])
    axes.spines[["top", "right", "left"]].set_visible(False)


def _some_layers(rank: Rank, mine: list[int], start: float) -> tuple[float, float]:
    """Begin and end, in milliseconds, of a few layers in the middle of the step."""
    starts, inside = [], False
    for i in mine:
        attends = category_of(rank.names[rank.name[i]]) == "attention"
        if attends and not inside:
            starts.append((rank.ts[i] - start) / 1e3)
        inside = attends
    if len(starts) <= _LAYERS_SHOWN + 1:
        end = max(rank.ts[i] + rank.dur[i] for i in mine)
        return 0.0, (end - start) / 1e3
    middle = (len(starts) - _LAYERS_SHOWN) // 2
    return starts[middle], starts[middle + _LAYERS_SHOWN]
