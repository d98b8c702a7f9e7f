"""Microseconds per layer of paged extend over an FP8 pool: stock, native, gather_cast, bf16 pool.

    python -m bench.extend_ab [--pool 495552] > extend.jsonl

Shapes are heads x requests x (new tokens, all tokens): prefix hits, target verify, whole prompts.
Every row attends the operands that it times and is held against stock first; medians of CUDA-graph
replays over four pools in turn.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import Any

import torch

from bench.gather_candidate import make_wrapper, time_graph
from sglang_fp8mla.machine import machine
from sglang_fp8mla.workspace import LiveSlots, Workspace

CKV, DIM, LAYERS = 512, 576, 4
SHAPES = [
    (16, 1, 64, 64),
    (16, 1, 512, 512),
    (16, 1, 4096, 4096),
    (16, 1, 16, 8192),
    (16, 1, 512, 8192),
    (16, 1, 2048, 131072),
    (16, 8, 4, 8192),
    (16, 32, 4, 4096),
    (8, 1, 512, 8192),
    (128, 1, 512, 8192),
    (128, 32, 4, 4096),
]


def measure(pools: list[torch.Tensor], heads: int, bs: int, new: int, total: int) -> dict[str, Any]:
    """One row: the median of each arm, and its largest difference from stock."""
    num_slots = pools[0].shape[0]
    i32 = {"dtype": torch.int32, "device": "cuda"}
    slots = (torch.randperm(num_slots - 1, device="cuda")[: bs * total] + 1).to(torch.int32)
    qo_indptr = torch.arange(bs + 1, **i32) * new
    kv_indptr = torch.arange(bs + 1, **i32) * total
    plan = partial(make_wrapper, qo_indptr, kv_indptr, causal=True, sm_scale=DIM**-0.5)
    q = (torch.randn(bs * new, heads, DIM, device="cuda") * 0.3).to(torch.bfloat16)
    out = torch.empty(bs * new, heads, CKV, dtype=torch.bfloat16, device="cuda")
    bf16, native = plan(slots, heads), plan(slots, heads, kv_dtype=torch.float8_e4m3fn)
    live = LiveSlots(num_slots, torch.device("cuda"))
    packed = plan(live.update(slots, kv_indptr, bs), heads)
    workspace = Workspace(num_slots, DIM, torch.bfloat16, torch.device("cuda"))

    def run(wrapper: Any, rows: torch.Tensor, **scales: float) -> None:
        wrapper.run(q[..., :CKV], q[..., CKV:], rows[..., :CKV], rows[..., CKV:], out=out, **scales)

    wide = pools[0].to(torch.bfloat16)
    arms = {
        "stock": lambda pool: run(bf16, pool.to(torch.bfloat16)),
        "native": lambda pool: run(native, pool, ckv_scale=1.0, kpe_scale=1.0),
        "gather_cast": lambda pool: run(packed, workspace.fill(pool, live)),
        "bf16_pool": lambda pool: run(bf16, wide),
    }

    def layers(arm: Any) -> None:
        for pool in pools:
            arm(pool)

    row: dict[str, Any] = {"shape": f"{heads}x{bs}x({new},{total})"}
    arms["stock"](pools[0])
    stock = out.clone()
    for name, arm in arms.items():
        arm(pools[0])
        row[f"{name}_diff"] = float((out - stock).abs().max())
        row[name] = round(time_graph(partial(layers, arm)) / LAYERS, 1)
    return row


def main() -> None:
    """Print the machine line and one JSON row per shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pool", type=int, default=495_552, help="slots of the pool")
    args = parser.parse_args()
    print(json.dumps({"machine": machine()}))
    pools = [
        torch.randn(args.pool, 1, DIM, device="cuda", dtype=torch.bfloat16).to(torch.float8_e4m3fn)
        for _ in range(LAYERS)
    ]
    for shape in SHAPES:
        print(json.dumps(measure(pools, *shape)), flush=True)


if __name__ == "__main__":
    main()
