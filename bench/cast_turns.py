"""`gather_cast` and the plain cast of ../shared/gpu/tools/kernel_ab.py, in turns, on a GPU.

    python -m bench.cast_turns ~/p/tools/kernel_ab.py [--instances N] [--json FILE]

Each in front of FlashInfer's bf16 kernel, four layers in a CUDA graph. kernel_ab.py times one arm
after the other on buffers made once: at one request the same arm then differs by a tenth from run
to run. Here every instance has new slots, and new rows and a new wrapper for each arm; the arms of
an instance take turns. `control` is the plain cast once more. Ratios are to the plain cast.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.gather_candidate import (
    DIM,
    LAYERS,
    POOL,
    SHAPES,
    Attention,
    load_plain_cast,
    make_pools,
    make_slots,
    time_graph,
    time_graphs,
)
from sglang_fp8mla.machine import machine
from sglang_fp8mla.workspace import LiveSlots

ARMS = ("plain", "control", "gather_cast")


class Instance:
    """One batch, and an arm's way to attend over it."""

    def __init__(self, heads: int, bs: int, tokens: int, pools: list[torch.Tensor]) -> None:
        device, self.pools = pools[0].device, pools
        self.heads, self.bs, live = heads, bs, bs * tokens
        self.slots = make_slots(POOL, -(-live // 64) * 64, 64, device)[:live]
        self.kv_indptr = torch.arange(bs + 1, dtype=torch.int32, device=device) * tokens
        q = torch.randn(bs, heads, DIM, dtype=torch.bfloat16, device=device) * 0.3
        self.q_nope, self.q_pe = q[..., :512], q[..., 512:]
        self.out = torch.empty(bs, heads, 512, dtype=torch.bfloat16, device=device)

    def make_arm(self, plain_cast: Any) -> Callable[[], None]:
        """All layers of one arm, on rows and a wrapper of its own; None: `gather_cast`."""
        attention = Attention(
            self.q_nope, self.pools[0], self.kv_indptr, self.slots, 192**-0.5, plain_cast
        )

        def step() -> None:
            for pool in self.pools:
                attention.run(self.q_nope, self.q_pe, pool, self.out)

        return step

    def time_list(self) -> float:
        """Microseconds to list the live slots and to renumber a copy of the indices."""
        live = LiveSlots(POOL, self.slots.device)
        list_all = partial(live.update, self.slots, self.kv_indptr, self.bs, q_rows=self.heads)
        return time_graph(list_all, 31)


def time_shape(
    shape: tuple[int, int, int], instances: int, pools: list[torch.Tensor], plain_cast: Any
) -> dict[str, Any]:
    """Microseconds a layer of each arm, and its ratios to the plain cast, an entry an instance."""
    times: dict[str, list[float]] = {name: [] for name in ARMS}
    list_us = []
    for _ in range(instances):
        instance = Instance(*shape, pools)
        # what is made first lies elsewhere: no arm is always the first
        names = random.sample(ARMS, len(ARMS))
        arms = [instance.make_arm(None if n == "gather_cast" else plain_cast) for n in names]
        outputs = []
        for arm in arms:
            arm()
            outputs.append(instance.out.clone())
        if not all(torch.equal(output, outputs[0]) for output in outputs):
            raise AssertionError(f"{shape}: the arms differ")
        for name, us in zip(names, time_graphs(arms, 31), strict=True):
            times[name].append(round(us / LAYERS, 2))
        list_us.append(round(instance.time_list(), 1))
    ratios = {
        name: [round(us / plain, 4) for us, plain in zip(times[name], times["plain"], strict=True)]
        for name in ARMS[1:]
    }
    return {"us": times, "ratio": ratios, "list_us": list_us}


def main() -> None:
    """Time every shape; a line each, and the whole as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tool", type=Path, help="kernel_ab.py, whose cast is the plain one")
    parser.add_argument(
        "--instances", type=int, default=12, metavar="N", help="of each shape, 12 if not given"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    plain_cast = load_plain_cast(options.tool)
    torch.manual_seed(0)
    random.seed(0)
    pools = make_pools(torch.device("cuda"))
    result: dict[str, Any] = {"machine": machine(), "instances": options.instances, "shapes": {}}
    for heads, bs, tokens in SHAPES:
        found = time_shape((heads, bs, tokens), options.instances, pools, plain_cast)
        result["shapes"][f"{heads}x{bs}x{tokens}"] = found
        line = f"{heads:>3} x {bs:>3} x {tokens:>6}  plain {median(found['us']['plain']):7.2f} us"
        for name, ratios in found["ratio"].items():
            line += f"  {name} {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        print(line + f"  list {median(found['list_us']):.1f} us", flush=True)
        if options.json:
            options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
