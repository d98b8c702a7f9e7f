"""Time the fused decode kernel: a CANDIDATE for kernel_ab.py, and a table of its variants by
itself.

    CANDIDATE=bench.decode_candidate:decode python ../shared/gpu/tools/kernel_ab.py
    python -m bench.decode_candidate [--shapes 16x32x4096,...] [--variants NAME,...] [--json FILE]

A shape is heads x batch x tokens. As in kernel_ab.py, one CUDA graph runs four pools in turn and
the median of the replays counts; the plan, made once per step of some sixty layers, is timed apart.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from typing import Any

import torch

from sglang_fp8mla.kernels.mla_decode import CudaConfig, MlaDecodePlan

SHAPES = "8x1x1024,16x1x4096,8x1x32768,16x32x4096,16x128x3000,16x1x131072,64x32x4096,128x32x4096"
POOL = 495_552
LAYERS = 4
SM_SCALE = 192**-0.5
# name: (configuration or None for the shipped choice, machine code, merge overlaps, backend)
VARIANTS: dict[str, tuple[CudaConfig | None, str | None, bool, str]] = {
    "shipped": (None, None, True, "cuda"),
    "no-overlap": (None, None, False, "cuda"),
    "h8-2x2": (CudaConfig(8, 1, 2, True, 2), None, True, "cuda"),
    "h8-1x5": (CudaConfig(8, 1, 5, True, 1), None, True, "cuda"),
    "h16-2x2": (CudaConfig(16, 1, 2, True, 2), None, True, "cuda"),
    "h16-1x5": (CudaConfig(16, 1, 5, True, 1), None, True, "cuda"),
    "h16-2grp": (CudaConfig(16, 2, 5, True, 1), None, True, "cuda"),
    "h16-apart": (CudaConfig(16, 2, 5, True, 1, apart=True), None, True, "cuda"),
    "h16-inline": (CudaConfig(16, 1, 2, False, 2), None, True, "cuda"),
    "h16-mma": (CudaConfig(16, 1, 2, True, 2), "sm_90", True, "cuda"),
    "h16-mma-inline": (CudaConfig(16, 1, 2, False, 2), "sm_90", True, "cuda"),
    "h32-2grp": (CudaConfig(32, 2, 4, True, 1), None, True, "cuda"),
    "h32-apart": (CudaConfig(32, 2, 4, True, 1, apart=True), None, True, "cuda"),
    "h64-2grp": (CudaConfig(64, 2, 3, True, 1), None, True, "cuda"),
    "h64-apart": (CudaConfig(64, 2, 3, True, 1, apart=True), None, True, "cuda"),
    "triton": (None, None, True, "triton"),
}

_plans: dict[Any, MlaDecodePlan] = {}


def decode(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    pool: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    out: torch.Tensor,
    sm_scale: float,
) -> None:
    """kernel_ab.py's candidate. A batch's first call plans, as a step does."""
    bs, heads = q_nope.shape[:2]
    key = (bs, heads, kv_indptr.data_ptr())
    if key not in _plans:
        _plans.clear()
        _plans[key] = MlaDecodePlan(
            max_bs=bs,
            num_heads=heads,
            device=q_nope.device,
            q_dtype=q_nope.dtype,
            pool_dtype=pool.dtype,
        )
        _plans[key].plan(kv_indptr, bs)
    _plans[key].run(q_nope, q_pe, pool, kv_indices, kv_indptr, out, sm_scale=sm_scale)


def replay_us(fn: Any, repeats: int = 15, warm: int = 3) -> float:
    """Median microseconds of one graph replay of `fn`."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        fn()
        fn()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fn()
    for _ in range(warm):
        graph.replay()
    times = []
    for _ in range(repeats):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        graph.replay()
        b.record()
        torch.cuda.synchronize()
        times.append(a.elapsed_time(b) * 1e3)
    return sorted(times)[len(times) // 2]


def measure(
    shape: tuple[int, int, int],
    names: list[str],
    pools: list[torch.Tensor],
    *,
    scattered: bool = False,
) -> dict[str, Any]:
    """One row: microseconds and error of each variant."""
    heads, bs, length = shape
    device = pools[0].device
    n = bs * length
    if scattered:
        indices = (torch.randperm(POOL - 1, device=device)[:n] + 1).to(torch.int32)
    else:  # as kernel_ab.py: shuffled pages of 64 slots, each request's first page its own
        pages = -(-length // 64)
        page = torch.randperm(POOL // 64 - 1, device=device)[: bs * pages] + 1
        slots = page.view(bs, pages, 1) * 64 + torch.arange(64, device=device)
        indices = slots.view(bs, -1)[:, :length].reshape(-1).to(torch.int32)
    indptr = torch.arange(bs + 1, dtype=torch.int32, device=device) * length
    q = torch.randn(bs, heads, 576, device=device, dtype=torch.bfloat16) * 0.3
    q_nope, q_pe = q[..., :512], q[..., 512:]
    keys = pools[0].view(torch.uint8)[indices[:length].long(), 0].view(pools[0].dtype).double()
    weights = torch.softmax(q[0].double() @ keys.T * SM_SCALE, -1)
    exact = weights @ keys[:, :512]
    row: dict[str, Any] = {"shape": "x".join(map(str, shape)), "floor": round(n * 576 / 4.28e6, 1)}
    for name in names:
        config, arch, overlap, backend = VARIANTS[name]
        if config is not None and (
            config.heads >= 2 * max(8, heads) or (heads > 16 and config.heads < 16)
        ):
            continue
        out = torch.full((bs, heads, 512), torch.nan, device=device, dtype=torch.bfloat16)
        try:
            plan = MlaDecodePlan(
                max_bs=bs,
                num_heads=heads,
                device=device,
                q_dtype=q.dtype,
                pool_dtype=pools[0].dtype,
                backend=backend,
                config=config,
                arch=arch,
            )
            plan._overlap = overlap
            plan.plan(indptr, bs)

            def layer(i: int, plan: MlaDecodePlan = plan, out: torch.Tensor = out) -> None:
                plan.run(q_nope, q_pe, pools[i], indices, indptr, out, sm_scale=SM_SCALE)

            layer(0)
            torch.cuda.synchronize()
            error = ((out[0].double() - exact).norm() / exact.norm()).item()
            if not error <= 0.005 or out.isnan().any():
                row[name] = f"WRONG {error:.4f}"
                continue
            row[name] = round(replay_us(lambda: [layer(i) for i in range(LAYERS)]) / LAYERS, 1)
            row[name + "_err"] = round(error, 5)
            if name == "shipped":
                row["plan"] = round(replay_us(partial(plan.plan, indptr, bs)), 1)
        except RuntimeError as exc:
            row[name] = f"ERR {exc}"[:200]
    return row


def main(argv: list[str] | None = None) -> int:
    """Print one JSON row per shape to stdout and a table to stderr."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--json")
    parser.add_argument("--scattered", action="store_true", help="slots at random, not pages of 64")
    args = parser.parse_args(argv)
    shapes = [tuple(map(int, s.split("x"))) for s in args.shapes.split(",")]
    names = args.variants.split(",")
    torch.manual_seed(0)
    pools = [
        torch.randn(POOL, 1, 576, device="cuda", dtype=torch.bfloat16).to(torch.float8_e4m3fn)
        for _ in range(LAYERS)
    ]
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    rows = [measure(shape, names, pools, scattered=args.scattered) for shape in shapes]
    for row in rows:
        sys.stdout.write(json.dumps(row) + "\n")
    width = max(map(len, names))
    sys.stderr.write(
        f"{machine}\n{'':{width}} " + " ".join(f"{r['shape']:>12}" for r in rows) + "\n"
    )
    for name in ["floor", "plan", *names]:
        cells = " ".join(f"{r.get(name, '-')!s:>12.12}" for r in rows)
        sys.stderr.write(f"{name:{width}} {cells}\n")
    worst = max((v for r in rows for k, v in r.items() if k.endswith("_err")), default=float("nan"))
    sys.stderr.write(f"largest error {worst}\n")
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"machine": machine, "rows": rows}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
