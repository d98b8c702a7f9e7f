"""`gather_cast` as CANDIDATE of ../shared/gpu/tools/kernel_ab.py, and its cast alone.

    CANDIDATE=bench.gather_candidate:attend python ~/p/tools/kernel_ab.py
    CANDIDATE=bench.gather_candidate:control python ~/p/tools/kernel_ab.py   # the tool's own cast
    python -m bench.gather_candidate        # list and cast, the cast as a share of copy bandwidth

As in the backend, the live slots are listed once per step, outside the layers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from sglang_fp8mla.workspace import LiveSlots, Workspace

_state: dict[str, Any] = {}


def attend(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    pool: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    out: torch.Tensor,
    sm_scale: float,
) -> None:
    """One layer: cast the live rows, then FlashInfer's bf16 kernel. Planned at its first call."""
    bs, heads, ckv = q_nope.shape
    if _state.get("kv_indices") is not kv_indices:
        _state.clear()
        live = LiveSlots(pool.shape[0], pool.device)
        kv_rows = live.update(kv_indices, kv_indptr, bs, q_rows=heads)
        wrapper = make_wrapper(
            torch.arange(bs + 1, dtype=torch.int32, device=pool.device),
            kv_indptr,
            kv_rows,
            heads,
            kpe=pool.shape[-1] - ckv,
            sm_scale=sm_scale,
            dtype=q_nope.dtype,
        )
        rows = Workspace(pool.shape[0], pool.shape[-1], q_nope.dtype, pool.device)
        _state.update(kv_indices=kv_indices, live=live, wrapper=wrapper, workspace=rows)
    rows = _state["workspace"].fill(pool, _state["live"])
    _state["wrapper"].run(q_nope, q_pe, rows[..., :ckv], rows[..., ckv:], out=out)


def control(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    pool: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    out: torch.Tensor,
    sm_scale: float,
) -> None:
    """kernel_ab.py's own cast in the candidate's place, in rows of its own: what the place does."""
    (bs, heads, ckv), live = q_nope.shape, kv_indices.numel()
    if _state.get("kv_indices") is not kv_indices:
        _state.clear()
        i32: dict[str, Any] = {"dtype": torch.int32, "device": pool.device}
        rows = torch.empty(pool.shape, dtype=q_nope.dtype, device=pool.device)
        qo_indptr, kv_rows = torch.arange(bs + 1, **i32), torch.arange(live, **i32)
        wrapper = make_wrapper(qo_indptr, kv_indptr, kv_rows, heads, sm_scale=sm_scale)
        _state.update(kv_indices=kv_indices, wrapper=wrapper, rows=rows)
    rows = _state["rows"]
    cast: Any = sys.modules["__main__"]
    cast._gather_cast[(-(-live // 8),)](pool, kv_indices, rows, live, 576, 1024, 8, num_warps=4)
    _state["wrapper"].run(q_nope, q_pe, rows[..., :ckv], rows[..., ckv:], out=out)


def make_wrapper(
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    heads: int,
    *,
    sm_scale: float,
    kpe: int = 64,
    causal: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
) -> Any:
    """FlashInfer's MLA wrapper, planned, for a CUDA graph; without `kv_dtype` rows are `dtype`."""
    from flashinfer import BatchMLAPagedAttentionWrapper

    lens = kv_indptr[1:] - kv_indptr[:-1]
    wrapper = BatchMLAPagedAttentionWrapper(
        torch.empty(256 << 20, dtype=torch.uint8, device=kv_indices.device),
        backend="auto",
        use_cuda_graph=True,
        qo_indptr=torch.empty_like(qo_indptr),
        kv_indptr=torch.empty_like(kv_indptr),
        kv_indices=torch.empty_like(kv_indices),
        kv_len_arr=torch.empty_like(lens),
    )
    wrapper.plan(
        qo_indptr, kv_indptr, kv_indices, lens, heads, 512, kpe, 1, causal, sm_scale,
        dtype, kv_dtype or dtype,
    )  # fmt: skip
    return wrapper


def time_graphs(fns: list[Callable[[], Any]], repeat: int = 15) -> list[float]:
    """Median microseconds of one replay of a graph of each; they take turns, so drift is shared."""
    graphs = []
    for fn in fns:
        fn()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            fn()
        graphs.append(graph)
    times: list[list[float]] = [[] for _ in graphs]
    for number in range(repeat + 3):
        for graph, found in zip(graphs, times, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if number >= 3:
                found.append(begin.elapsed_time(end) * 1e3)
    return [sorted(found)[repeat // 2] for found in times]


def time_graph(fn: Callable[[], Any], repeat: int = 15) -> float:
    """Median microseconds of one replay of a graph of `fn`."""
    return time_graphs([fn], repeat)[0]


def fill_all(workspace: Workspace, pools: list[torch.Tensor], live: LiveSlots) -> None:
    """One step of as many layers as there are pools."""
    for pool in pools:
        workspace.fill(pool, live)


def make_slots(num_slots: int, live: int, run: int, device: torch.device) -> torch.Tensor:
    """`live` slots in shuffled runs of `run` neighbours, [live] int32; slots below `run` unused."""
    starts = torch.randperm(num_slots // run - 1, device=device)[: live // run] + 1
    return (starts[:, None] * run + torch.arange(run, device=device)).flatten().to(torch.int32)


def copy_tb_s(device: torch.device) -> float:
    """The better of two ways to move 2 GiB, read and written, as kernel_ab.py takes it."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    wide, wide_target = source.view(torch.bfloat16), target.view(torch.bfloat16)
    ways = partial(target.copy_, source), partial(torch.add, wide, 1, out=wide_target)
    return 2 * source.numel() / min(time_graph(way) for way in ways) / 1e6


def main() -> None:
    """Time the list and the cast for a few shapes; JSON lines."""
    device, num_slots, layers = torch.device("cuda"), 495_552, 4
    bandwidth = copy_tb_s(device)
    print(json.dumps({"copy_TB_s": round(bandwidth, 3), "gpu": torch.cuda.get_device_name()}))
    pools = [
        torch.randn(num_slots, 1, 576, device=device, dtype=torch.bfloat16).to(torch.float8_e4m3fn)
        for _ in range(layers)
    ]
    # runs of 64 slots as a paged allocator leaves them (and kernel_ab.py makes them), or lone slots
    shapes = [(1, 64, 64), (1, 1024, 64), (1, 8192, 64), (32, 4096, 64), (32, 4096, 1)]
    for bs, length, run in shapes:
        live_tokens = bs * length
        slots = make_slots(num_slots, live_tokens, run, device)
        kv_indptr = torch.arange(bs + 1, dtype=torch.int32, device=device) * length
        live = LiveSlots(num_slots, device)
        workspace = Workspace(num_slots, 576, torch.bfloat16, device)
        list_us = time_graph(partial(live.update, slots, kv_indptr, bs))
        us = time_graph(partial(fill_all, workspace, pools, live)) / layers
        tb_s = live_tokens * 576 * 3 / us / 1e6
        row = {"shape": f"{bs}x{length}", "run": run, "list_us": round(list_us, 1)}
        row |= {"cast_us": round(us, 2), "TB_s": round(tb_s, 3)}
        row |= {"of_copy": round(tb_s / bandwidth, 3)}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
