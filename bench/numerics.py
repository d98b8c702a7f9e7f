"""Errors of every way to attend an FP8 MLA pool, against float64, over kind and nasty data.

    python bench/numerics.py --json FILE        # on a GPU, stock SGLang beside the checkout
    python bench/numerics.py --storage          # on any CPU: what each pool dtype loses, no kernel

Each arm is a backend by name over SGLang's own pool, decode, one layer. Two errors a case, both
||out - exact|| / ||exact||: `kernel` against float64 on the rows as the pool stores them, `total`
against float64 on the rows before they were stored. An arm that does not run is a row of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from contract.arms import OURS, forced
from contract.scene import Scene, Shape, make_requests, ref_attention, shuffled_slots

from sglang_fp8mla.machine import machine

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16


def _normal(n: int, g: torch.Generator) -> torch.Tensor:
    return torch.randn(n, 576, generator=g)


def _rms_normed(n: int, g: torch.Generator) -> torch.Tensor:
    """Latents after DeepSeek's RMSNorm, rope keys of standard deviation 2."""
    rows = _normal(n, g)
    rows[:, :512] /= rows[:, :512].pow(2).mean(-1, keepdim=True).sqrt()
    rows[:, 512:] *= 2
    return rows


@dataclass(frozen=True)
class Case:
    """Rows and queries of one request; `q_scale` sets the spread of the logits."""

    name: str
    kv_len: int
    make: Callable[[int, torch.Generator], torch.Tensor]
    q_scale: float = 1.0
    q_like_row: bool = False  # the query is a row: its key dominates


def _outliers(n: int, g: torch.Generator) -> torch.Tensor:
    rows = _rms_normed(n, g)
    rows[:, torch.randperm(512, generator=g)[:8]] *= 30
    return rows


def _large_rope(n: int, g: torch.Generator) -> torch.Tensor:
    """Rope keys up to 1e3 in four channels, as published for MLA models; e4m3 ends at 448."""
    rows = _rms_normed(n, g)
    rows[:, 512:516] = (torch.rand(n, 4, generator=g) * 2 - 1) * 1000
    return rows


def _equal(n: int, g: torch.Generator) -> torch.Tensor:
    return _normal(1, g).expand(n, -1).contiguous()


def _tiny(n: int, g: torch.Generator) -> torch.Tensor:
    """Rows among e4m3's subnormals (below 2**-6)."""
    return _normal(n, g) * 2.0**-8


CASES = (
    Case("normal 1k", 1024, _normal),
    Case("normed 1k", 1024, _rms_normed),
    Case("normed 8k", 8192, _rms_normed),
    Case("normed 131k", 131072, _rms_normed),
    Case("outlier channels", 4096, _outliers),
    Case("rope to 1e3", 4096, _large_rope),
    Case("logits ~1e-5", 4096, _normal, q_scale=1e-5),
    Case("logits ~1e2", 4096, _normal, q_scale=1e2 / 24),
    Case("logits ~1e5", 4096, _normal, q_scale=1e5 / 24),
    Case("one dominant key", 4096, _normal, q_like_row=True),
    Case("equal keys", 4096, _equal),
    Case("subnormals", 4096, _tiny),
)


@dataclass(frozen=True)
class Arm:
    name: str
    backend: str
    path: str = ""
    kv_dtype: torch.dtype = E4M3
    page_size: int = 1


ARMS = (
    Arm("stock, bf16 pool", "flashinfer", kv_dtype=BF16),
    Arm("stock, FP8 pool", "flashinfer"),
    Arm("gather_cast", OURS, "gather_cast"),
    Arm("fused", OURS, "fused"),
    Arm("native", OURS, "native"),
    Arm("triton, FP8 pool", "triton"),
    Arm("flashmla, FP8 pool", "flashmla", page_size=64),
)


@contextlib.contextmanager
def _chosen(arm: Arm) -> Iterator[None]:
    with forced(arm.path, "auto") if arm.path else contextlib.nullcontext():
        yield


def relative(out: torch.Tensor, exact: torch.Tensor) -> float:
    return float((out.double() - exact).norm() / exact.norm())


def make_request(case: Case, heads: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """rows [kv_len, 576] float32 and q [1, heads, 576] bf16 of a case."""
    generator = torch.Generator().manual_seed(seed)
    rows = case.make(case.kv_len, generator)
    q = torch.randn(1, heads, 576, generator=generator) * case.q_scale
    if case.q_like_row:
        q = rows[case.kv_len // 2].expand(1, heads, 576).clone()
    return rows, q.to(BF16)


def measure_storage(case: Case, heads: int, seeds: int) -> dict[str, Any]:
    """`total` of a kernel without error: float64 over rows as each dtype stores them."""
    found: dict[str, Any] = {"case": case.name}
    for name, dtype in (("e4m3", E4M3), ("e5m2", torch.float8_e5m2)):
        errors = []
        for seed in range(seeds):
            rows, q = make_request(case, heads, seed)
            rows = rows.to(BF16)
            exact, stored = (
                ref_attention(q, r.double(), ckv=512, sm_scale=576**-0.5)[0]
                for r in (rows, rows.to(dtype).to(BF16))
            )
            errors.append(relative(stored, exact))
        found[name] = max(errors)
    return found


def measure(arm: Arm, case: Case, device: str, heads: int, seed: int) -> dict[str, Any]:
    """Both errors of one arm on one case."""
    rows, q = make_request(case, heads, seed)
    shape = Shape(
        heads=heads,
        kv_dtype=arm.kv_dtype,
        page_size=arm.page_size,
        slots=case.kv_len + 1024,
        max_bs=1,
        max_context=case.kv_len + 64,
    )
    with _chosen(arm):
        scene = Scene(arm.backend, shape, device)
        slots = shuffled_slots(case.kv_len, shape)
        scene.write(slots, rows)
        requests = make_requests(slots)
        # only flashinfer takes q in halves
        out = scene.run(requests, q, split=arm.backend in ("flashinfer", OURS))[0]
        stored = scene.expected(requests, q)[0]
        # what the model hands to the pool is bf16
        exact = ref_attention(
            q, rows.to(BF16).double().to(device), ckv=512, sm_scale=shape.sm_scale
        )[0][0]
    return {
        "arm": arm.name,
        "case": case.name,
        "kernel": relative(out, stored.to(out.device)),
        "total": relative(out, exact),
    }


def markdown(results: list[dict[str, Any]], error: str) -> str:
    """A table of `error` (`kernel` or `total`): cases down, arms across."""
    arms = list(dict.fromkeys(r["arm"] for r in results))
    cases = list(dict.fromkeys(r["case"] for r in results))
    cells = {(r["arm"], r["case"]): r for r in results}
    lines = [f"| {error} | " + " | ".join(arms) + " |", "|---" * (len(arms) + 1) + "|"]
    for case in cases:
        row = (cells.get((arm, case), {}).get(error) for arm in arms)
        lines.append(
            f"| {case} | " + " | ".join("" if v is None else f"{v:.2g}" for v in row) + " |"
        )
    return "\n".join(lines)


def plot(results: list[dict[str, Any]], file: Path) -> None:
    """One mark an arm and case: kernel error to the left, total error to the right.

    Arms stand below each other within a case, since some give the same bits. Errors too small for
    the axis are in its column "0", NaN in its last one.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    arms = list(dict.fromkeys(r["arm"] for r in results))
    cases = list(dict.fromkeys(r["case"] for r in results))
    # Okabe and Ito's colours, which the colour-blind can tell apart; full marks are our paths
    colours = ("#000000", "#8a8a8a", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#B8860B")
    ours = {arm.name for arm in ARMS if arm.path}
    smallest, at_zero, at_nan = 1e-6, 2e-7, 1e1

    def place(value: float) -> float:
        if math.isnan(value):
            return at_nan
        return value if value >= smallest else at_zero

    height = 1.3 + 0.58 * len(cases)
    figure, axes = pyplot.subplots(1, 2, figsize=(11, height), sharex=True, sharey=True)
    for axis, error in zip(axes, ("kernel", "total")):
        for row in range(0, len(cases), 2):
            axis.axhspan(row - 0.5, row + 0.5, color="#f2f2f2", zorder=0)
        for i, arm in enumerate(arms):
            own = [r for r in results if r["arm"] == arm and error in r]
            axis.plot(
                [place(r[error]) for r in own],
                [cases.index(r["case"]) + 0.13 * (i - (len(arms) - 1) / 2) for r in own],
                "osD^vPX"[i % 7],
                color=colours[i % len(colours)],
                fillstyle="full" if arm in ours else "none",
                label=arm,
                markersize=4.5,
            )
        axis.set_xscale("log")
        axis.set_xlim(at_zero / 2, at_nan * 2)
        axis.set_xticks(
            [at_zero, *(10.0**e for e in range(-6, 1)), at_nan],
            ["0", *(f"$10^{{{e}}}$" for e in range(-6, 0)), "1", "NaN"],
        )
        axis.minorticks_off()
        axis.grid(axis="x", color="#dddddd")
        axis.set_axisbelow(True)
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
    axes[0].set_title("kernel: against float64 on the rows as stored", fontsize=10)
    axes[1].set_title("total: against float64 on the rows as written", fontsize=10)
    axes[0].set_yticks(range(len(cases)), cases)
    axes[0].set_ylim(len(cases) - 0.5, -0.5)
    figure.supxlabel("‖out - exact‖ / ‖exact‖", fontsize=10)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=len(arms), fontsize=9, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.97))
    figure.savefig(file, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=3, help="the worst of so many seeds is kept")
    parser.add_argument("--cases", default="", help="only cases whose name contains this")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--storage", action="store_true", help="what the pool's dtype alone loses")
    parser.add_argument("--load", type=Path, help="print the tables of an earlier --json instead")
    parser.add_argument("--plot", type=Path, help="with --load: draw it into this file")
    options = parser.parse_args()
    if options.load:
        loaded = json.loads(options.load.read_text())["results"]
        print(markdown(loaded, "kernel"), markdown(loaded, "total"), sep="\n\n")
        if options.plot:
            plot(loaded, options.plot)
        return
    if options.storage:
        for case in CASES:
            if options.cases in case.name:
                print(json.dumps(measure_storage(case, options.heads, options.seeds)), flush=True)
        return
    results: list[dict[str, Any]] = []
    where = machine()
    for arm in ARMS:
        for case in CASES:
            if options.cases not in case.name:
                continue
            try:
                found = [
                    measure(arm, case, options.device, options.heads, seed)
                    for seed in range(options.seeds)
                ]
            except Exception as error:  # whatever keeps an arm from running is the finding
                reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
                results.append({"arm": arm.name, "case": case.name, "failed": reason})
            else:
                results.append(
                    found[0]
                    | {name: max(one[name] for one in found) for name in ("kernel", "total")}
                )
            print(json.dumps(results[-1]), flush=True)
            if options.json:  # as it goes: a cut keeps what was measured
                what = {"heads": options.heads, "seeds": options.seeds, "machine": where}
                options.json.write_text(json.dumps({**what, "results": results}, indent=1))


if __name__ == "__main__":
    main()
