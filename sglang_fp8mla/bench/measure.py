"""Runs paths on a case: the gate first, on the operands that are timed, then the time.

A path that gives a wrong result gets no time; one that cannot run here says why.
"""

from __future__ import annotations

import gc
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from triton.errors import TritonError

from ..errors import Fp8MlaError
from ..probe import _MAX_RELATIVE_RMS
from ..reference import ref_mla
from .cases import DIM, Case
from .operands import SM_SCALE, Operands, make_operands
from .paths import BUILDERS, Path
from .timing import Timer

# the oracle runs in float64 on the CPU; a part of each case keeps it to seconds
_CHECKED_HEADS = 16


# what a missing compiler, a shape that a kernel refuses or a changed signature raises
_FINDINGS = (
    Fp8MlaError,
    ImportError,
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    OSError,
    subprocess.SubprocessError,
    TritonError,
)


@dataclass
class Row:
    """One path on one case. Times are microseconds per layer; `step_us` comes once per forward."""

    case: str
    path: str
    check: str  # ok | FAILED | SKIPPED | unavailable
    detail: str = ""
    error: float | None = None
    us: float | None = None
    us_p20: float | None = None
    us_p80: float | None = None
    step_us: float | None = None
    tb_per_s: float | None = None
    ratio: float | None = None
    of_roofline: float | None = None
    seconds: float = 0.0  # that building, checking and timing took
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Expected:
    """Part of a case's result in float64: `tokens` and `heads` of `out`."""

    tokens: slice
    heads: torch.Tensor
    exact: torch.Tensor


def expect(op: Operands) -> list[Expected]:
    """The result for the last layer, of the first, a middle and the last request.

    At most `_CHECKED_HEADS` heads, spread over all, and queries at both ends of a long extend.
    """
    case = op.case
    every = max(1, case.num_heads // _CHECKED_HEADS)
    heads = torch.arange(0, case.num_heads, every)[:_CHECKED_HEADS].to(op.device)
    found = []
    for request in sorted({0, case.bs // 2, case.bs - 1}):
        rows = slice(request * case.kv_len, (request + 1) * case.kv_len)
        for first, last in _query_ranges(case):
            tokens = slice(request * case.q_len + first, request * case.q_len + last)
            # the last of these queries sees this many rows, the earlier ones one fewer each
            seen = case.kv_len - (case.q_len - last)
            exact, _ = ref_mla(
                op.q_nope[tokens][:, heads],
                op.q_pe[tokens][:, heads],
                op.pools[-1],
                op.kv_indices[rows],
                torch.tensor([0, seen]),
                sm_scale=SM_SCALE,
                qo_indptr=torch.tensor([0, last - first]),
                causal=case.causal,
            )
            found.append(Expected(tokens, heads, exact))
    return found


def _query_ranges(case: Case) -> list[tuple[int, int]]:
    """The queries of a request to compare: all, or eight at either end."""
    if case.q_len <= 16:
        return [(0, case.q_len)]
    return [(0, 8), (case.q_len - 8, case.q_len)]


def relative_error(expected: Sequence[Expected], out: torch.Tensor) -> float:
    """||out - exact|| / ||exact|| over everything that is expected."""
    difference, norm = 0.0, 0.0
    for part in expected:
        found = out[part.tokens][:, part.heads].double().cpu()
        difference += float((found - part.exact).square().sum())
        norm += float(part.exact.square().sum())
    return float((difference / norm) ** 0.5) if norm else float("nan")


def _gate(expected: Sequence[Expected], path: Path, stock: torch.Tensor | None, row: Row) -> None:
    """Fill in `check` and `error`. The result is that of the replay that will be timed."""
    out = path.result()
    row.error = relative_error(expected, out)
    allowed = _MAX_RELATIVE_RMS if path.tolerance is None else path.tolerance
    row.check = "ok"
    if not row.error <= allowed:  # NaN must fail
        row.check = "FAILED"
        row.detail = f"relative RMS error {row.error:.1e}, allowed {allowed:.1e}"
    elif path.exact and stock is not None and not torch.equal(out, stock):
        row.check = "FAILED"
        row.detail = "not bitwise equal to stock's output"


def run_path(
    op: Operands,
    name: str,
    build: Callable[[Operands], Path],
    timer: Timer,
    *,
    stock: torch.Tensor | None,
    expected: Sequence[Expected] | None,
    floor_bytes_per_s: float,
) -> tuple[Row, torch.Tensor | None]:
    """Check one path (unless `expected` is None) and time it; return its row and its output."""
    row = Row(op.case.name, name, "unavailable")
    begin = time.monotonic()
    op.out.fill_(torch.nan)
    try:
        path = build(op)

        def layers() -> None:
            for i in range(len(op.pools)):
                path.layer(i)

        replay = timer.capture(layers)
        op.out.fill_(torch.nan)
        path.step()
        replay()
        if op.device.type == "cuda":
            torch.cuda.synchronize(op.device)
        row.check, row.note = "SKIPPED", path.note
        if expected is not None:
            _gate(expected, path, stock, row)
        if row.check == "FAILED":
            return row, None
        output: torch.Tensor | None = path.result().clone()
        times = timer.measure(replay, per=len(op.pools))
        row.us, row.us_p20, row.us_p80 = times.p50, times.p20, times.p80
        if path.step.__name__ != "_nothing":
            row.step_us = timer.measure(timer.capture(path.step)).p50
        row.tb_per_s = op.case.bytes_moved(name) / times.p50 / 1e6
        row.of_roofline = op.case.floor_bytes / floor_bytes_per_s * 1e6 / times.p50
    # a peer that does not import, compile or support the shape is a finding of the benchmark; so is
    # a device error, after which nothing else can run and every later row says so
    except _FINDINGS as error:
        lines = str(error).strip().splitlines() or [""]
        row.check, row.detail = "unavailable", f"{type(error).__name__}: {lines[0][:200]}"
        output = None
    finally:
        row.seconds = round(time.monotonic() - begin, 2)
    return row, output


def _num_layers(case: Case, device: torch.device, wanted: int) -> int:
    """Layers to rotate through: as many as leave half of the free memory unused."""
    if device.type != "cuda":
        return min(wanted, 2)
    free, _ = torch.cuda.mem_get_info(device)
    # each layer's pool in FP8 and, for the bf16 row, in 16 bits
    return max(1, min(wanted, int(free / 2 / (case.pool * DIM * 3))))


def run_case(
    case: Case,
    names: Sequence[str],
    timer: Timer,
    *,
    check: bool,
    bandwidth: float,
    num_layers: int = 4,
    tick: Callable[[str], None] = lambda what: None,
) -> list[Row]:
    """Rows of one case, stock first where it is among `names`: the others are held against it."""
    device = timer.device
    # once per case: what the last one held in cycles; with SGLang imported a collection takes long
    gc.collect()
    op = make_operands(case, device, _num_layers(case, device, num_layers))
    tick("reference")
    expected = expect(op) if check else None
    rows: list[Row] = []
    stock: torch.Tensor | None = None
    stock_us: float | None = None
    for name in sorted(names, key=lambda n: n != "stock"):
        tick(name)
        row, output = run_path(
            op,
            name,
            BUILDERS[name],
            timer,
            stock=stock,
            expected=expected,
            floor_bytes_per_s=bandwidth,
        )
        if name == "stock":
            stock, stock_us = output, row.us
        if row.us and stock_us:
            row.ratio = stock_us / row.us
        rows.append(row)
        del output
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return rows
