"""`gather_cast` as CANDIDATE of ../shared/gpu/tools/kernel_ab.py, and its cast alone.

    CANDIDATE=bench.gather_candidate:attend python ~/p/tools/kernel_ab.py
    CANDIDATE=bench.gather_candidate:control python ~/p/tools/kernel_ab.py   # the tool's own cast
    python -m bench.gather_candidate        # list and cast, the cast as a share of copy bandwidth

As in the backend, the live slots are listed once per step, outside the layers.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sglang_fp8mla.workspace import LiveSlots, Workspace

POOL, LAYERS, DIM = 495_552, 4, 576
# heads, batch, tokens: kernel_ab.py's
SHAPES = (
    *((8, 1, 1024), (16, 1, 4096), (128, 1, 4096), (8, 1, 32768), (8, 32, 4096), (16, 32, 4096)),
    *((16, 128, 3000), (16, 1, 131_072), (64, 32, 4096), (128, 32, 4096), (128, 128, 3000)),
)

_planned: list[Attention] = []  # the last, if any


class Attention:
    """A cast of the live rows into rows of its own and FlashInfer's bf16 kernel behind, planned."""

    def __init__(
        self,
        q_nope: torch.Tensor,
        pool: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        sm_scale: float,
        plain_cast: Any = None,
    ) -> None:
        """`plain_cast`: kernel_ab.py's Triton kernel; without it `gather_cast`."""
        (bs, heads, ckv), (num_slots, _, dim) = q_nope.shape, pool.shape
        i32: dict[str, Any] = {"dtype": torch.int32, "device": pool.device}
        self.kv_indices, self.plain_cast = kv_indices, plain_cast
        self._workspace = Workspace(num_slots, dim, q_nope.dtype, pool.device)
        self._live = LiveSlots(num_slots, pool.device)
        if plain_cast is None:
            kv_rows = self._live.update(kv_indices, kv_indptr, bs, q_rows=heads)
        else:
            kv_rows = torch.arange(kv_indices.numel(), **i32)
        self._wrapper = make_wrapper(
            torch.arange(bs + 1, **i32),
            kv_indptr,
            kv_rows,
            heads,
            kpe=dim - ckv,
            sm_scale=sm_scale,
            dtype=q_nope.dtype,
        )

    def run(
        self, q_nope: torch.Tensor, q_pe: torch.Tensor, pool: torch.Tensor, out: torch.Tensor
    ) -> None:
        """One layer."""
        if self.plain_cast is None:
            rows = self._workspace.fill(pool, self._live)
        else:
            rows = self._workspace.rows
            cast_plainly(self.plain_cast, pool, self.kv_indices, rows)
        ckv = q_nope.shape[-1]
        self._wrapper.run(q_nope, q_pe, rows[..., :ckv], rows[..., ckv:], out=out)


def attend(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    pool: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    out: torch.Tensor,
    sm_scale: float,
    plain_cast: Any = None,
) -> None:
    """One layer: cast the live rows, then FlashInfer's bf16 kernel. Planned at its first call."""
    if not _planned or _planned[0].kv_indices is not kv_indices:
        _planned.clear()
        _planned.append(Attention(q_nope, pool, kv_indptr, kv_indices, sm_scale, plain_cast))
    _planned[0].run(q_nope, q_pe, pool, out)


def control(*operands: Any) -> None:
    """kernel_ab.py's own cast in the candidate's place, in rows of its own: what the place does."""
    tool: Any = sys.modules["__main__"]
    attend(*operands, plain_cast=tool._gather_cast)


def load_plain_cast(tool: Path) -> Any:
    """The Triton kernel of kernel_ab.py, which runs when it is imported: all but its last line."""
    source = tool.expanduser().read_text().rstrip()
    if not source.endswith("\nmain()"):
        raise SystemExit(f"{tool}: expected to end in main()")
    copy = Path(tempfile.mkdtemp()) / "kernel_ab_cast.py"  # triton reads the source of a kernel
    copy.write_text(source.removesuffix("main()"))
    spec = importlib.util.spec_from_file_location(copy.stem, copy)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module._gather_cast


def cast_plainly(
    plain_cast: Any, pool: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor
) -> None:
    """rows[r] = pool[slots[r]], launched as kernel_ab.py does: one program for eight rows."""
    live = slots.numel()
    plain_cast[(-(-live // 8),)](pool, slots, rows, live, pool.shape[-1], 1024, 8, num_warps=4)


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


def make_pools(device: torch.device) -> list[torch.Tensor]:
    """As many FP8 pools as layers, [POOL, 1, DIM] each: no layer finds its rows in the cache."""
    made = (torch.randn(POOL, 1, DIM, device=device) for _ in range(LAYERS))
    return [rows.to(torch.float8_e4m3fn) for rows in made]


def copy_tb_s(device: torch.device) -> float:
    """The better of two ways to move 2 GiB, read and written, as kernel_ab.py takes it."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    wide, wide_target = source.view(torch.bfloat16), target.view(torch.bfloat16)
    ways = partial(target.copy_, source), partial(torch.add, wide, 1, out=wide_target)
    return 2 * source.numel() / min(time_graph(way) for way in ways) / 1e6


def main() -> None:
    """Time the list and the cast for a few shapes; JSON lines."""
    device = torch.device("cuda")
    bandwidth = copy_tb_s(device)
    print(json.dumps({"copy_TB_s": round(bandwidth, 3), "gpu": torch.cuda.get_device_name()}))
    pools = make_pools(device)
    # runs of 64 slots as a paged allocator leaves them (and kernel_ab.py makes them), or lone slots
    shapes = [(1, 64, 64), (1, 1024, 64), (1, 8192, 64), (32, 4096, 64), (32, 4096, 1)]
    for bs, length, run in shapes:
        live_tokens = bs * length
        slots = make_slots(POOL, live_tokens, run, device)
        kv_indptr = torch.arange(bs + 1, dtype=torch.int32, device=device) * length
        live = LiveSlots(POOL, device)
        workspace = Workspace(POOL, DIM, torch.bfloat16, device)
        list_us = time_graph(partial(live.update, slots, kv_indptr, bs))
        us = time_graph(partial(fill_all, workspace, pools, live)) / LAYERS
        tb_s = live_tokens * DIM * 3 / us / 1e6
        row = {"shape": f"{bs}x{length}", "run": run, "list_us": round(list_us, 1)}
        row |= {"cast_us": round(us, 2), "TB_s": round(tb_s, 3)}
        row |= {"of_copy": round(tb_s / bandwidth, 3)}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
