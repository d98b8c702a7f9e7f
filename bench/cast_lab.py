"""Ways to lay out and schedule the cast of `gather_cast`, alone and before attention, on a GPU.

    python -m bench.cast_lab ~/p/tools/kernel_ab.py [--attention] [--json FILE]

What was tried on the way to the shipped kernel (bench/results/cast-lab.json, docs/benchmarks.md),
and what it is held against (`plain`, kernel_ab.py's own). Microseconds a layer, four layers in a
CUDA graph; a shape is batch x tokens x run, the run being how many live slots are neighbours. Each
variant's rows are compared with torch's cast before it is timed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from bench.gather_candidate import (
    DIM,
    LAYERS,
    POOL,
    SHAPES,
    cast_plainly,
    copy_tb_s,
    load_plain_cast,
    make_pools,
    make_slots,
    make_wrapper,
    time_graphs,
)
from sglang_fp8mla.kernels.gather_cast import (
    _CHUNK,
    _cast_blocks,
    _own_slots,
    gather_cast,
    make_tickets,
)
from sglang_fp8mla.machine import machine

ROWS = 8  # of a block of whole rows
CASTS = ((1, 64, 64), (1, 1024, 64), (1, 8192, 64), (32, 4096, 64), (32, 4096, 1))
# heads, batch, tokens: kernel_ab.py's, then those about as large as the L2 cache
ATTENTION = (
    *SHAPES,
    *((16, 32, 256), (16, 8, 1000), (16, 16, 1000), (16, 8, 4096), (16, 12, 4096), (16, 16, 4096)),
)


@dataclass(frozen=True)
class Variant:
    """One way to cast: as shipped, its blocks divided in another way, or blocks of whole rows."""

    shipped: bool = False
    chunks: int = 0  # of a block; 0: ROWS whole rows
    programs: int = 12  # a multiprocessor; 0: one a block, which a CUDA graph cannot have
    warps: int = 4
    queues: int = 0  # counters that blocks are drawn from; 0: each program has its share
    evict: str = ""  # of the FP8 loads
    packed: bool = True  # row r of the list to row r, not to its own slot
    plain: bool = False  # kernel_ab.py's cast, whose grid is cut to the batch

    def __str__(self) -> str:
        """What differs from the defaults."""
        mine, plain = asdict(self), asdict(Variant())
        return " ".join(f"{k}={v}" for k, v in mine.items() if v != plain[k]) or f"rows={ROWS}"


FIRST = "evict_first"
# the first two also behind a list in another order
VARIANTS = (
    Variant(plain=True),
    Variant(shipped=True),
    Variant(),
    Variant(programs=0),
    Variant(packed=False),
    Variant(chunks=256, programs=0),
    Variant(chunks=256),
    Variant(chunks=256, programs=8),
    Variant(chunks=256, programs=16),
    Variant(chunks=256, programs=32),
    Variant(chunks=256, programs=64),
    Variant(chunks=256, programs=128),
    Variant(chunks=512, programs=6, warps=8),
    Variant(chunks=1024, programs=3, warps=16),
    Variant(chunks=256, evict=FIRST),
    Variant(chunks=256, queues=1),
    Variant(chunks=256, queues=4),
    Variant(chunks=256, queues=12),
    Variant(chunks=256, queues=132),
    Variant(chunks=256, queues=132, evict=FIRST),
    Variant(chunks=256, queues=132, programs=16),
)


@triton.jit
def _rows_kernel(
    pool,  # *u8 [num_slots, DIM]
    live_slots,  # *i32 [num_slots], first count[0] valid
    count,  # *i32 [1]
    out,  # *bf16 [num_slots, DIM]
    DIM: tl.constexpr,
    T: tl.constexpr,
    PACKED: tl.constexpr,
):
    """As the shipped kernel, over blocks of T whole rows."""
    columns = tl.arange(0, 1024)
    n = tl.load(count)
    for start in range(tl.program_id(0) * T, n, tl.num_programs(0) * T):
        offs_t = start + tl.arange(0, T)
        mask_t = offs_t < n
        slot = tl.load(live_slots + offs_t, mask=mask_t, other=0)
        src = pool + slot.to(tl.int64) * DIM
        dst = out + (offs_t if PACKED else slot).to(tl.int64) * DIM
        mask = mask_t[:, None] & (columns < DIM)[None, :]
        code = tl.load(src[:, None] + columns[None, :], mask=mask, other=0)
        value = code.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(tl.bfloat16)
        tl.store(dst[:, None] + columns[None, :], value, mask=mask)


@triton.jit
def _chunks_kernel(
    pool,  # *u8 [num_slots, DIM]
    live_slots,  # *i32 [num_slots], first count[0] valid
    count,  # *i32 [1]
    tickets,  # *i32, zeros, left zeros
    out,  # *bf16 [num_slots, DIM]
    capacity,  # num_slots
    DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    QUEUES: tl.constexpr,
    EVICT: tl.constexpr,
):
    """The package's blocks, all of them shared out (QUEUES 0) or drawn for, at any count."""
    tl.extra.cuda.gdc_wait()
    slot = _own_slots(live_slots, capacity, DIM // CHUNK, BLOCK)
    n = tl.load(count) * (DIM // CHUNK)
    _cast_blocks(
        pool, live_slots, tickets, out, slot, n, max(QUEUES, 1),
        DIM, DIM, DIM, CHUNK, BLOCK, False, True, EVICT=EVICT, DRAW=QUEUES > 0,
    )  # fmt: skip


class Lab:
    """Four pools, one buffer of rows, and the launch of a variant on them."""

    def __init__(self, plain_cast: Any) -> None:
        self.device = torch.device("cuda")
        torch.manual_seed(0)
        self.multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
        self.pools = make_pools(self.device)
        self.rows = torch.empty(POOL, 1, DIM, dtype=torch.bfloat16, device=self.device)
        self._plain_cast, self._tickets = plain_cast, make_tickets(self.device)

    def make_list(self, live: int, run: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(slots [POOL] int32, first `live` valid; count [1] int32)."""
        slots = torch.zeros(POOL, dtype=torch.int32, device=self.device)
        slots[:live] = make_slots(POOL, live, run, self.device)
        return slots, torch.tensor([live], dtype=torch.int32, device=self.device)

    def cast(self, layer: int, variant: Variant, slots: Any, count: Any, live: int) -> None:
        """One layer. `live` is the count as the host knows it: the grid of `programs=0`."""
        pool = self.pools[layer]
        if variant.plain:
            cast_plainly(self._plain_cast, pool, slots[:live], self.rows)
            return
        if variant.shipped:
            gather_cast(pool, slots, count, self._tickets, self.rows)
            return
        fixed = variant.programs * self.multiprocessors
        if variant.chunks:
            blocks = -(-live * (DIM // _CHUNK) // variant.chunks)
            _chunks_kernel[(fixed or blocks,)](
                pool.view(torch.uint8),
                slots,
                count,
                self._tickets,
                self.rows,
                POOL,
                DIM=DIM,
                CHUNK=_CHUNK,
                BLOCK=variant.chunks,
                QUEUES=variant.queues,
                EVICT=variant.evict,
                num_warps=variant.warps,
                launch_pdl=True,
            )
            return
        _rows_kernel[(fixed or -(-live // ROWS),)](
            pool.view(torch.uint8),
            slots,
            count,
            self.rows,
            DIM=DIM,
            T=ROWS,
            PACKED=variant.packed,
            num_warps=variant.warps,
        )

    def layers(self, ways: list[Callable[[int], None]]) -> list[float]:
        """Microseconds a layer of each way, called with the layer; the ways take turns."""

        def all_layers(one: Callable[[int], None]) -> None:
            for layer in range(LAYERS):
                one(layer)

        return [us / LAYERS for us in time_graphs([partial(all_layers, one) for one in ways], 61)]

    def check(self, variant: Variant, slots: torch.Tensor, count: Any, live: int) -> None:
        """Raise unless the variant's rows are torch's."""
        self.rows.fill_(torch.nan)
        self.cast(0, variant, slots, count, live)
        mine = slots[:live].long()
        got = self.rows[:live] if variant.packed else self.rows[mine]
        if not torch.equal(got, self.pools[0][mine].to(torch.bfloat16)):
            raise AssertionError(f"{variant} casts wrong rows")
        if self._tickets.any():
            raise AssertionError(f"{variant} leaves tickets behind")


def attend_after(lab: Lab, heads: int, bs: int, tokens: int) -> dict[str, float]:
    """FlashInfer's bf16 kernel alone, and behind each packed variant.

    Rows lie in the order of the batch; `shuffled`: in blocks of 1024 at random.
    """
    live = bs * tokens
    slots, count = lab.make_list(live, 64)
    i32 = {"dtype": torch.int32, "device": lab.device}
    qo_indptr, kv_rows = torch.arange(bs + 1, **i32), torch.arange(live, **i32)
    blocks = torch.randperm(-(-live // 1024), device=lab.device)
    mixed = torch.cat([kv_rows[block * 1024 : (block + 1) * 1024] for block in blocks.tolist()])
    q = torch.randn(bs, heads, DIM, dtype=torch.bfloat16, device=lab.device) * 0.3
    out = torch.empty(bs, heads, 512, dtype=torch.bfloat16, device=lab.device)

    def attend(wrapper: Any, variant: Variant | None, layer: int) -> None:
        if variant is not None:
            lab.cast(layer, variant, slots, count, live)
        rows = lab.rows
        wrapper.run(q[..., :512], q[..., 512:], rows[..., :512], rows[..., 512:], out=out)

    plain, shuffled = (
        make_wrapper(qo_indptr, qo_indptr * tokens, rows, heads, sm_scale=192**-0.5)
        for rows in (kv_rows, mixed)
    )
    ways = {"no cast": partial(attend, plain, None)}
    packed = [variant for variant in VARIANTS if variant.packed]
    ways |= {str(variant): partial(attend, plain, variant) for variant in packed}
    ways |= {f"{v} shuffled": partial(attend, shuffled, v) for v in packed[:2]}
    ways["no cast, last"] = ways["no cast"]
    found = lab.layers(list(ways.values()))
    return {name: round(us, 2) for name, us in zip(ways, found, strict=True)}


def main() -> None:
    """Time every variant; a line each shape, and the whole as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tool", type=Path, help="kernel_ab.py, whose cast is the plain one")
    parser.add_argument("--attention", action="store_true", help="with FlashInfer's kernel behind")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    lab = Lab(load_plain_cast(options.tool))
    bandwidth = copy_tb_s(lab.device)
    result: dict[str, Any] = {"machine": machine(), "copy_TB_s": round(bandwidth, 3)}
    result["columns"] = ["x".join(map(str, shape)) for shape in CASTS] + ["of copy, 32x4096x64"]
    times: dict[str, list[float]] = {str(variant): [] for variant in VARIANTS}
    for bs, tokens, run in CASTS:
        live = bs * tokens
        slots, count = lab.make_list(live, run)
        ways: list[Callable[[int], None]] = []
        for variant in VARIANTS:
            lab.check(variant, slots, count, live)
            ways.append(partial(lab.cast, variant=variant, slots=slots, count=count, live=live))
        for variant, us in zip(VARIANTS, lab.layers(ways), strict=True):
            times[str(variant)].append(round(us, 2))
    for row in times.values():
        row.append(round(32 * 4096 * DIM * 3 / row[3] / 1e6 / bandwidth, 3))
    result["rows"] = times
    print(json.dumps(result["columns"]))
    for name, row in times.items():
        print(f"{name:52}", row, flush=True)
    if options.attention:
        result["attention"] = {}
        for heads, bs, tokens in ATTENTION:
            found = attend_after(lab, heads, bs, tokens)
            result["attention"][f"{heads}x{bs}x{tokens}"] = found
        for name in found:
            line = [found[name] for found in result["attention"].values()]
            print(f"{name:52}", line, flush=True)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
