"""`sglang-fp8mla trace`: where the GPU time of a step goes, and whether the pool cast is in it.

Works on the traces that SGLang's `/start_profile` writes; needs neither a GPU nor SGLang.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .errors import IncompatibleEnvironment, InvalidArgument
from .outputs import require_writable
from .trace_file import Rank, Trace, read_trace

EXIT_CAST_FOUND = 3

# FP8 byte read + bf16 written, per element
_CAST_BYTES = 3
_ROW = 576
# casting fewer rows costs less than a launch (2,048 x 576 x 3 bytes: 1 us at 4 TB/s)
_MIN_ROWS = 2048
_MIN_CAST_US = 5.0
# what casting a few live rows takes at least: 3.7 us for 1,024 rows on an H200, a launch's own time
_MIN_LIVE_CAST_US = 3.7
# kernels between one layer's attention and the next one's: more than this; on a side stream: fewer
_LAYER_GAP = 3
# kernels between the cast and the attention that reads it: none today; a copy of q would be one
_NEAR = 4
# steps that count as equally fast: their KV grows by a token each
_AS_FAST = 1.03
# eager launches differ in number by a few per step; a graph's or a layer's do not
_PER_LAYER = 0.8

CAST = "pool cast"
GAP = "idle gap"
OTHER = "other"

# first match wins; names of SGLang 0.5.22-0.5.23, FlashInfer 0.6-0.7, torch 2.9-2.14
_CATEGORIES: tuple[tuple[str, str], ...] = (
    ("communication", r"nccl|all_?reduce|all_?gather|reduce_?scatter|cross_device|multimem|nvshmem|"
     r"deep_?ep|all_?to_?all|Broadcast(?:_|Kernel)"),
    ("live-row cast", r"gather_cast|live_slots|(?:claim|count|compact)_slots|find_rows"),
    ("KV write", r"set_(?:mla_)?kv_buffer|store_(?:kv_?)?cache|fused_store|reshape_and_cache|"
     r"append_paged|kv_?cache_(?:write|store|copy)|copy_kv|float8_copy_kernel"),
    ("attention", r"MLAPage|mla_decode(?!_plan)|flash_?mla|fmha|cutlass_mla|"
     r"mla_(?:fwd|kernel|attn)|"
     r"BatchPrefill|SinglePrefill|BatchDecode|SingleDecode|PrefillWithKV|PersistentVariableLength|"
     r"VariableLengthMerge|merge_state|MergeState|^_fwd_(?:grouped_)?kernel|flash_fwd|"
     r"FlashAttn|splitkv|get_mla_metadata|unified_attention|attention_kernel|"
     r"^_(?:decode|merge)_kernel"),
    ("MoE", r"moe|expert|topk_?gating|grouped_topk|biased_topk|align_block|count_and_sort"),
    ("GEMM", r"gemm|gemv|nvjet|xmma|cutlass|cublas|splitK|matmul|\bdot_kernel|_mm_kernel|_bmm"),
    ("norm", r"rms_?norm|layer_?norm|RMSNorm|LayerNorm|_norm_kernel|fused_add_rms"),
    ("rope", r"rope|rotary"),
    ("activation", r"silu|gelu|act_and_mul|swiglu"),
    ("quantisation", r"quant"),
    ("index building", r"mla_decode_plan|kv_indices|kv_indptr|page_table|req_to_token|MLAPlan|"
     r"metadata|compute_position|clamp_position|assign_req|alloc_(?:decode|extend)"),
    ("sampling", r"argmax|softmax|sampl|multinomial|top_?[kp]|radix|sort|penalt|logit"),
    ("memory copy", r"^Mem(?:cpy|set)|memcpy|memset"),
    ("elementwise", r"elementwise|CatArray|index_|gather|scatter|Fill|copy_kernel|cumsum|scan|"
     r"reduce_kernel|triton_poi|triton_red|triton_per|arange"),
)  # fmt: skip
_PATTERNS = [(name, re.compile(pattern, re.IGNORECASE)) for name, pattern in _CATEGORIES]

# torch's dtype-changing copy: `direct_copy_kernel_cuda`, `bfloat16_copy_kernel_cuda`, ...
_COPY_KERNEL = re.compile(r"elementwise.*copy_kernel", re.IGNORECASE | re.DOTALL)
_STEP = re.compile(r"step\[(?P<mode>\w+)(?: bs=(?P<bs>\d+))?")
_LIVE = re.compile(r"\bg_sk=(\d+)")


def category_of(kernel: str) -> str:
    """A kernel's category by its name alone; a pool cast is found later, by what surrounds it."""
    for name, pattern in _PATTERNS:
        if pattern.search(kernel):
            return name
    return OTHER


def is_copy_kernel(kernel: str) -> bool:
    """Whether this is torch's elementwise copy, which a cast of a tensor is."""
    return _COPY_KERNEL.search(kernel) is not None


def elements_per_thread(kernel: str) -> int:
    """Elements that one thread of torch's elementwise kernel handles, from its template arguments.

    torch (aten/src/ATen/native/cuda): `elementwise_kernel<threads, work, ...>`,
    `vectorized_elementwise_kernel<vector, ...>`, `unrolled_elementwise_kernel<..., work, ...>`.
    """
    if match := re.search(r"unrolled_elementwise_kernel<.*?std::array<[^>]*>,\s*(\d+)", kernel):
        return int(match[1])
    if match := re.search(r"\belementwise_kernel<\d+,\s*(\d+)", kernel):
        return int(match[1])
    if match := re.search(r"vectorized(?:_templated)?_elementwise_kernel<(\d+)", kernel):
        return max(4, int(match[1]))
    return 4


def short_name(kernel: str, width: int = 60) -> str:
    """A kernel's name without template arguments, return type and namespaces."""
    name = kernel.removeprefix("void ")
    detail = ""
    if match := re.search(r"(\w+_kernel_cuda|\w+Functor\b)", name):
        detail = f"<{match[1]}>"
    plain = re.split(r"[<(]", name)[0].rstrip()
    plain = plain.split("::")[-1] or name
    text = plain + (detail if "elementwise" in plain else "")
    return text if len(text) <= width else text[: width - 1] + "…"


@dataclass
class Step:
    """One forward on the GPU: kernels `first` to `last` (exclusive) in time order, its window."""

    mode: str
    label: str
    start: float
    end: float
    first: int = 0
    last: int = 0
    # whether `end` is where the next step begins, so that `end - start` is what a token costs
    whole: bool = False

    @property
    def bs(self) -> int:
        """Requests in the batch, 0 where the mark does not say."""
        match = _STEP.match(self.label)
        return int(match["bs"] or 0) if match else 0

    @property
    def live_tokens(self) -> int | None:
        """KV rows that the step's requests hold, where SGLang's detailed annotations say."""
        match = _LIVE.search(self.label)
        return int(match[1]) if match else None


def find_steps(rank: Rank, order: Sequence[int]) -> list[Step]:
    """The steps of a rank, in time order.

    By SGLang's marks on the CPU and the launches below them; else by its marks on the GPU; else
    each CUDA graph replay (many kernels with one correlation) is a step; else there is none.
    """
    spans: list[tuple[str, float, float]] = []
    if rank.cpu_steps and len(rank.launch_ts):
        spans = _spans_from_launches(rank)
    if not spans and rank.gpu_steps:
        spans = _merged((name, ts, ts + dur) for ts, dur, name in rank.gpu_steps)
    if not spans:
        spans = _spans_from_graphs(rank)
    spans.sort(key=lambda span: span[1])
    steps = []
    for name, start, end in spans:
        match = _STEP.match(name)
        steps.append(Step(match["mode"] if match else "GRAPH", name, start, end))
    starts = [rank.ts[i] for i in order]
    for i, step in enumerate(steps):
        if i + 1 < len(steps):
            # what runs between two forwards (sampling, index building) belongs to the first
            step.end, step.whole = steps[i + 1].start, True
        step.first = bisect_right(starts, step.start - 1e-6)
        bound = bisect_right(starts, step.end - 1e-6)
        step.last = bound if step.whole else max(bound, step.first)
    return [step for step in steps if step.last > step.first]


def _merged(spans: Iterable[tuple[str, float, float]]) -> list[tuple[str, float, float]]:
    """Spans in time order, those that overlap made one: the profiler marks a step per stream."""
    result: list[tuple[str, float, float]] = []
    for name, start, end in sorted(spans, key=lambda span: span[1]):
        if result and start < result[-1][2] and name == result[-1][0]:
            result[-1] = (name, result[-1][1], max(end, result[-1][2]))
        else:
            result.append((name, start, end))
    return result


def _spans_from_launches(rank: Rank) -> list[tuple[str, float, float]]:
    launches = sorted(zip(rank.launch_ts, rank.launch_correlation))
    times = [ts for ts, _ in launches]
    owner: dict[int, int] = {}
    for index, (ts, dur, _) in enumerate(rank.cpu_steps):
        for _, correlation in launches[bisect_right(times, ts) : bisect_right(times, ts + dur)]:
            owner[correlation] = index
    lo: dict[int, float] = {}
    hi: dict[int, float] = {}
    for ts, dur, correlation in zip(rank.ts, rank.dur, rank.correlation):
        found = owner.get(correlation)
        if found is not None:
            lo[found] = min(lo.get(found, ts), ts)
            hi[found] = max(hi.get(found, ts + dur), ts + dur)
    return [(rank.cpu_steps[i][2], lo[i], hi[i]) for i in lo]


def _spans_from_graphs(rank: Rank, min_kernels: int = 16) -> list[tuple[str, float, float]]:
    counts = Counter(rank.correlation)
    lo: dict[int, float] = {}
    hi: dict[int, float] = {}
    for ts, dur, correlation in zip(rank.ts, rank.dur, rank.correlation):
        if correlation and counts[correlation] >= min_kernels:
            lo[correlation] = min(lo.get(correlation, ts), ts)
            hi[correlation] = max(hi.get(correlation, ts + dur), ts + dur)
    return [("", lo[c], hi[c]) for c in lo]


@dataclass
class PoolCast:
    """The full-pool cast as found. Times are per layer unless they say otherwise."""

    kernel: str
    evidence: str
    per_step: int
    us_per_layer: float
    ms_per_step: float
    share: float
    share_of_busy: float
    pool_rows: int | None
    bytes_per_step: int | None
    tb_per_s: float | None
    live_rows: int | None
    live_share: float | None
    step_ms_without: float
    step_ms_with_live_rows: float | None


@dataclass
class Stage:
    """Steps of one forward mode; times are means over the `num_used` least disturbed ones."""

    mode: str
    num_steps: int
    num_used: int
    bs: int
    step_ms: float
    busy_ms: float
    step_ms_range: tuple[float, float]
    whole_steps: bool
    layers: int
    categories: dict[str, dict[str, float]]
    kernels: list[dict[str, Any]]
    cast: PoolCast | None = None


@dataclass
class Report:
    """What one rank of one file showed."""

    file: str
    rank: str
    gpu: str
    num_events: int
    num_gpu_events: int
    stages: dict[str, Stage] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def cast_found(self) -> bool:
        return any(stage.cast for stage in self.stages.values())

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "cast_found": self.cast_found}


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2


@dataclass(frozen=True)
class _CastKernel:
    """A kernel that casts the pool: its name, its elements if the trace tells, its signs."""

    name: int
    elements: int | None
    evidence: str


def count_layers(rank: Rank, order: Sequence[int], step: Step, categories: Sequence[str]) -> int:
    """Runs of attention kernels in a step: a layer may attend in two (split, then merge)."""
    layers, since = 0, _LAYER_GAP
    for i in order[step.first : step.last]:
        if categories[rank.name[i]] == "attention":
            layers += since >= _LAYER_GAP
            since = 0
        else:
            since += 1
    return layers


def find_cast(
    rank: Rank, order: Sequence[int], steps: Sequence[Step], categories: Sequence[str], row: int
) -> _CastKernel | None:
    """The kernel that casts a whole KV pool in these steps, or None.

    It is torch's copy kernel, of `_MIN_ROWS` rows or more of `row` values, right before the
    attention of nearly every layer, nothing multiplied in between: a cast of live prefix rows goes
    through a GEMM first. Where shapes were recorded (eager launches) they tell the size, and that
    the source is an 8-bit float; a graph replay has no operators, there the launch size tells.
    """
    copying = [is_copy_kernel(name) for name in rank.names]
    # (name, elements, from recorded shapes) -> attention launches that it preceded
    near: Counter[tuple[int, int, bool]] = Counter()
    layers = 0
    for step in steps:
        last: tuple[int, tuple[int, int, bool]] | None = None
        since = _LAYER_GAP
        for position in range(step.first, step.last):
            i = order[position]
            name = rank.name[i]
            if categories[name] == "attention":
                if since >= _LAYER_GAP:
                    layers += 1
                    if last is not None and position - last[0] <= _NEAR:
                        near[last[1]] += 1
                last, since = None, 0
            else:
                since += 1
            if categories[name] in ("GEMM", "MoE"):
                last = None
            if not copying[name]:
                continue
            size = rank.threads[i] * elements_per_thread(rank.names[name])
            key = (name, size, False)
            copy = rank.copies.get(rank.external[i]) if rank.external[i] else None
            if copy is not None:
                if copy.dims[-1] != row or "loat8" not in copy.in_type:
                    continue
                key = (name, _product(copy.dims), True)
            if key[1] >= _MIN_ROWS * row or (not key[1] and rank.dur[i] >= _MIN_CAST_US):
                last = (position, key)
    for (name, elements, shaped), count in near.most_common(1):
        if count < _PER_LAYER * layers:
            continue
        if shaped:
            signs = f"aten::copy_ of {elements // row:,} rows x {row} from 8-bit float"
        elif elements:
            signs = f"{elements // row:,} rows by its launch size"
        else:
            signs = "large by its time"
        return _CastKernel(name, elements or None, f"copy before each layer's attention, {signs}")
    return None


def _product(numbers: Sequence[int]) -> int:
    result = 1
    for number in numbers:
        result *= number
    return result


def _exclusive(rank: Rank, order: Sequence[int]) -> list[float]:
    """GPU time of each event, in `order`, with overlaps given to whoever started first.

    A kernel launched early (programmatic dependent launch) waits inside its own duration, and a
    side stream hides behind the main one: so the sums add up to the time that the GPU was busy.
    """
    result, busy_until = [], float("-inf")
    for i in order:
        start, end = rank.ts[i], rank.ts[i] + rank.dur[i]
        result.append(max(0.0, end - max(start, busy_until)))
        busy_until = max(busy_until, end)
    return result


def typical_steps(steps: Sequence[Step]) -> list[Step]:
    """Steps to average over: whole ones if any, of the most frequent batch size, the fastest few.

    The profiler itself and a wait for requests only ever add time, between kernels.
    """
    whole = [s for s in steps if s.whole] or list(steps)
    sizes = Counter(s.bs for s in whole)
    bs = max(sizes, key=lambda size: (sizes[size], size))
    same = [s for s in whole if s.bs == bs]
    fastest = min(s.end - s.start for s in same)
    return [s for s in same if s.end - s.start <= _AS_FAST * fastest]


def analyse_rank(
    rank: Rank, *, row: int = _ROW, live_tokens: int | None = None, top: int = 10
) -> tuple[dict[str, Stage], list[str], list[Step]]:
    """Stages by forward mode, notes for the reader, and all steps.

    Args:
        row: values per KV row, to recognise the cast (`kv_lora_rank + qk_rope_head_dim`).
        live_tokens: KV rows in use, where the trace does not say.
        top: how many kernels to list per stage.
    """
    order = sorted(range(len(rank.ts)), key=rank.ts.__getitem__)
    notes: list[str] = []
    if not order:
        return {}, ["no GPU events: record with activities CPU and GPU"], []
    steps = find_steps(rank, order)
    if not steps:
        notes.append("no steps found (no step[...] marks, no graph replay): the whole trace is one")
        end = max(rank.ts[i] + rank.dur[i] for i in order)
        steps = [Step("TRACE", "", rank.ts[order[0]], end, 0, len(order))]
    categories = [category_of(name) for name in rank.names]
    exclusive = _exclusive(rank, order)
    stages: dict[str, Stage] = {}
    by_mode: defaultdict[str, list[Step]] = defaultdict(list)
    for step in steps:
        by_mode[step.mode].append(step)
    for mode, mine in by_mode.items():
        stages[mode] = _stage_of(
            mode, mine, rank, order, exclusive, categories, row, live_tokens, top
        )
    return stages, notes, steps


def _stage_of(
    mode: str,
    steps: list[Step],
    rank: Rank,
    order: Sequence[int],
    exclusive: Sequence[float],
    categories: Sequence[str],
    row: int,
    live_tokens: int | None,
    top: int,
) -> Stage:
    used = typical_steps(steps)
    cast = find_cast(rank, order, used, categories, row)
    time: defaultdict[str, float] = defaultdict(float)
    count: Counter[str] = Counter()
    kernel_time: defaultdict[int, float] = defaultdict(float)
    kernel_count: Counter[int] = Counter()
    cast_time, cast_count = 0.0, 0
    for step in used:
        for position in range(step.first, step.last):
            i = order[position]
            name = rank.name[i]
            is_cast = cast is not None and name == cast.name and _same_size(rank, i, cast)
            category = CAST if is_cast else categories[name]
            time[category] += exclusive[position]
            count[category] += 1
            kernel_time[name] += exclusive[position]
            kernel_count[name] += 1
            cast_time += is_cast * rank.dur[i]
            cast_count += is_cast
    n = len(used)
    total = sum(step.end - step.start for step in used)
    time[GAP] = max(0.0, total - sum(time.values()))
    step_ms = total / n / 1e3
    shown = {
        name: {
            "ms": us / n / 1e3,
            "share": us / total if total else 0.0,
            "per_step": count[name] / n,
        }
        for name, us in sorted(time.items(), key=lambda item: -item[1])
    }
    cast_name = cast.name if cast is not None else -1
    kernels = [
        {
            "name": rank.names[name],
            "category": CAST if name == cast_name else categories[name],
            "ms": us / n / 1e3,
            "share": us / total if total else 0.0,
            "per_step": kernel_count[name] / n,
        }
        for name, us in sorted(kernel_time.items(), key=lambda item: -item[1])[:top]
    ]
    spans = [(s.end - s.start) / 1e3 for s in steps if s.whole] or [step_ms]
    stage = Stage(
        mode,
        len(steps),
        n,
        used[0].bs,
        step_ms,
        step_ms - time[GAP] / n / 1e3,
        (min(spans), max(spans)),
        all(s.whole for s in used),
        round(_median([count_layers(rank, order, s, categories) for s in used])),
        shown,
        kernels,
    )
    if cast is not None and cast_count:
        found = [s.live_tokens for s in used if s.live_tokens is not None]
        live = live_tokens if live_tokens is not None else round(_median(found)) if found else None
        us = cast_time / cast_count
        per_step = cast_count / n
        rows = cast.elements // row if cast.elements else None
        ms = shown[CAST]["ms"]
        tb_per_s = rows * row * _CAST_BYTES / us / 1e6 if rows else None
        with_live = None
        if live is not None and tb_per_s:
            live_us = max(live * row * _CAST_BYTES / tb_per_s / 1e6, _MIN_LIVE_CAST_US)
            with_live = step_ms - ms + per_step * live_us / 1e3
        stage.cast = PoolCast(
            kernel=rank.names[cast.name],
            evidence=cast.evidence,
            per_step=round(per_step),
            us_per_layer=us,
            ms_per_step=ms,
            share=shown[CAST]["share"],
            share_of_busy=ms / stage.busy_ms,
            pool_rows=rows,
            bytes_per_step=round(rows * row * _CAST_BYTES * per_step) if rows else None,
            tb_per_s=tb_per_s,
            live_rows=live,
            live_share=live / rows if live is not None and rows else None,
            step_ms_without=step_ms - ms,
            step_ms_with_live_rows=with_live,
        )
    return stage


def _same_size(rank: Rank, i: int, cast: _CastKernel) -> bool:
    """Whether GPU event `i` has the cast's size: the same kernel also copies small things."""
    if cast.elements is None:
        return rank.dur[i] >= _MIN_CAST_US
    copy = rank.copies.get(rank.external[i]) if rank.external[i] else None
    if copy is not None:
        return _product(copy.dims) == cast.elements
    size = rank.threads[i] * elements_per_thread(rank.names[rank.name[i]])
    # a launch is rounded up to whole blocks, of a few thousand elements at most
    return abs(size - cast.elements) <= 8192


def analyse(
    trace: Trace, *, row: int = _ROW, live_tokens: int | None = None, top: int = 10
) -> list[Report]:
    """One report per rank of a trace file."""
    devices = trace.header.get("deviceProperties")
    names = {
        str(d.get("id")): str(d.get("name"))
        for d in (devices if isinstance(devices, list) else [])
        if isinstance(d, dict)
    }
    reports = []
    for label, rank in sorted(trace.ranks.items()):
        stages, notes, _ = analyse_rank(rank, row=row, live_tokens=live_tokens, top=top)
        found = label or _rank_in_name(trace.path.name)
        gpu = names.get(rank.device, "")
        reports.append(
            Report(str(trace.path), found, gpu, trace.num_events, len(rank.ts), stages, notes)
        )
    return reports


def _rank_in_name(name: str) -> str:
    """`TP-0-DP-1` out of SGLang's file names."""
    return "-".join(re.findall(r"\b(?:TP|DP|PP|EP)-\d+", name))


def show(reports: Sequence[Report], *, top: int) -> None:
    """Tables and the answer, on stdout."""
    from .tables import print_table

    for report in reports:
        where = ", ".join(filter(None, (Path(report.file).name, report.rank, report.gpu)))
        sys.stdout.write(f"{where}\n")
        for note in report.notes:
            sys.stdout.write(f"note: {note}\n")
        # decode first: it is what the question is about
        for stage in sorted(report.stages.values(), key=lambda s: (s.mode != "DECODE", s.mode)):
            lo, hi = stage.step_ms_range
            batch = f", batch {stage.bs}" if stage.bs else ""
            sys.stdout.write(
                f"{stage.mode}{batch}: {stage.step_ms:.2f} ms a step, the GPU busy for "
                f"{stage.busy_ms:.2f}; {stage.layers} attention layers; fastest {stage.num_used} "
                f"of {stage.num_steps} steps ({lo:.2f} to {hi:.2f} ms)\n"
            )
            rows = [
                [name, f"{v['ms']:.3f}", f"{v['share']:.1%}", f"{v['per_step']:.0f}" or ""]
                for name, v in stage.categories.items()
            ]
            styles = ["bold red" if row[0] == CAST else "" for row in rows]
            columns = ["what", "ms per step", "share", "launches"]
            print_table("", columns, rows, right=(1, 2, 3), styles=styles)
            if top:
                rows = [
                    [short_name(k["name"]), k["category"], f"{k['ms']:.3f}", f"{k['share']:.1%}",
                     f"{k['per_step']:.0f}"]
                    for k in stage.kernels[:top]
                ]  # fmt: skip
                columns = ["kernel", "counted as", "ms per step", "share", "launches"]
                print_table("largest kernels", columns, rows, right=(2, 3, 4))
            if stage.cast:
                sys.stdout.write(_describe(stage.cast, stage.mode))
    if any(report.cast_found for report in reports):
        sys.stdout.write(
            "The full-pool cast is in this trace; "
            "--attention-backend flashinfer_mla_fp8 removes it.\n"
        )
    else:
        sys.stdout.write("No full-pool cast in this trace.\n")


def _describe(cast: PoolCast, mode: str) -> str:
    lines = [
        f"pool cast in {mode}: {cast.ms_per_step:.2f} ms of each step ({cast.share:.1%}; "
        f"{cast.share_of_busy:.1%} of its GPU time), {cast.per_step} x {cast.us_per_layer:.0f} us",
        f"  seen as: {cast.evidence}; kernel {short_name(cast.kernel)}",
    ]
    if cast.pool_rows and cast.bytes_per_step and cast.tb_per_s:
        live = ""
        if cast.live_share is not None:
            live = f"; {cast.live_rows:,} rows were live ({cast.live_share:.3%})"
        lines.append(
            f"  moves {cast.bytes_per_step / 1e9:.1f} GB per step ({cast.pool_rows:,} rows per "
            f"layer, {cast.tb_per_s:.2f} TB/s){live}"
        )
    text = f"  a step without it: {cast.step_ms_without:.2f} ms"
    if cast.step_ms_with_live_rows is not None:
        text += f"; casting only the live rows: about {cast.step_ms_with_live_rows:.2f} ms"
    return "\n".join([*lines, text, ""])


def _read_all(paths: Sequence[Path], cut_off: bool) -> list[Trace]:
    """Read every file, with a progress bar on a terminal."""
    from .progress import Bar

    total = sum(path.stat().st_size for path in paths if path.is_file())
    traces = []
    with Bar(total, in_bytes=True) as bar:
        for path in paths:
            bar.describe(path.name)
            traces.append(read_trace(path, partial=cut_off, tick=bar.advance))
    return traces


def run(args: argparse.Namespace) -> int:
    """Analyse the files; 0 when the cast is in none, 3 when it is in one."""
    if args.row < 1 or args.top < 0 or (args.live_tokens is not None and args.live_tokens < 0):
        raise InvalidArgument(
            "trace: --row must be positive, --top and --live-tokens not negative, got "
            f"{args.row}, {args.top} and {args.live_tokens}"
        )
    require_writable(args.plot, "trace: --plot")
    if args.plot:
        from .trace_plot import require_matplotlib

        require_matplotlib()
    traces = _read_all([Path(name) for name in args.files], args.partial)
    reports = [
        report
        for trace in traces
        for report in analyse(
            trace, row=args.row, live_tokens=args.live_tokens, top=max(args.top, 10)
        )
    ]
    if not any(report.stages for report in reports):
        raise IncompatibleEnvironment(
            f"trace: {reports[0].file}: {'; '.join(reports[0].notes) or 'nothing to analyse'}"
        )
    if args.json:
        data = {
            "cast_found": any(r.cast_found for r in reports),
            "traces": [r.to_json() for r in reports],
        }
        sys.stdout.write(json.dumps(data, indent=1) + "\n")
    else:
        show(reports, top=args.top)
    if args.plot:
        from .trace_plot import plot_step

        plot_step(traces[0], Path(args.plot), row=args.row)
        sys.stderr.write(f"plot: {args.plot}\n")
    return EXIT_CAST_FOUND if any(report.cast_found for report in reports) else 0


_DESCRIPTION = """\
Read PyTorch profiler traces of an SGLang server (.json or .json.gz, one per rank or merged) and say
where the GPU time of a step goes. Stock flashinfer with an FP8 KV pool casts the whole pool to
16 bits on every layer of every step; this finds that cast, what share of a step it is, and what a
step would take without it."""

_EPILOG = """\
examples:
  sglang-fp8mla trace 1790000000.5-TP-0.trace.json.gz
  sglang-fp8mla trace traces/*.trace.json.gz --plot step.png
  sglang-fp8mla trace trace.json.gz --json | jq .cast_found

To record one: `sglang-fp8mla profile URL`, or POST /start_profile to the server with
{"output_dir": "/tmp/t", "num_steps": 5, "activities": ["CPU", "GPU"], "with_stack": false,
"profile_by_stage": true, "detailed_annotations": true}. The last one tells the live rows.

exit codes: 0 no full-pool cast; 3 it is there; 2 a file is missing, cut off or no trace."""


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments that `trace` and `profile` share."""
    parser.add_argument("--json", action="store_true", help="the analysis as JSON on stdout")
    parser.add_argument(
        "--plot", metavar="PNG", help="draw the step as a stacked bar and a timeline"
    )
    parser.add_argument(
        "--top", type=int, default=8, metavar="N", help="largest kernels to list (%(default)s)"
    )
    parser.add_argument(
        "--row", type=int, default=_ROW, metavar="N", help="values per KV row (%(default)s)"
    )
    parser.add_argument(
        "--live-tokens", type=int, metavar="N", help="KV rows in use, if the trace does not say"
    )
    parser.add_argument("--partial", action="store_true", help="analyse what a cut-off file holds")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `trace` to the command line."""
    parser = subparsers.add_parser(
        "trace",
        help="find the full-pool cast in a profiler trace, and what it costs",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="traces, one per rank")
    add_output_arguments(parser)
    parser.set_defaults(func=run)
