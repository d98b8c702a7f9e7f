"""`sglang-fp8mla estimate`: what the cast costs and what leaving it out gains, from a config alone.

Arithmetic over sizes and three measured rates; no GPU, no torch, no SGLang. Times are estimates and
are printed as such: `bench` and `selftest` measure.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from dataclasses import asdict, dataclass
from typing import Any

from .errors import InvalidArgument
from .models import BUILT_IN, MlaModel, heads_per_gpu, load_model
from .tables import human_bytes, print_table

# stock's cast moves 495,552 * 576 * 3 bytes in 830 us on an H200, the same in 828 us on an
# RTX PRO 6000, and 131,072 * 576 * 3 in 226 us on an H200: its own speed, not the memory's
_STOCK_CAST_GB_S = 1030.0
# our gather-cast on the H200: 131,072 rows in 60 us, some 3 us of them also
# where a layer has nothing to move; a copy there reaches 4,280 GB/s
_OUR_CAST_OF_COPY = 0.93
_OUR_CAST_FLOOR_US = 3.0
# a copy reaches 4,280 of the 4,800 GB/s that the H200's data sheet gives
_COPY_OF_PEAK = 0.89

_DEFAULT_POOL = 495_552


@dataclass(frozen=True)
class Gpu:
    """Memory bandwidth: the copy that we measured, or a share of the data sheet's peak."""

    name: str
    copy_gb_s: float
    source: str


def _sheet(name: str, peak_gb_s: float) -> Gpu:
    return Gpu(name, round(peak_gb_s * _COPY_OF_PEAK), f"89 % of the {peak_gb_s:,.0f} on paper")


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("h200", 4280, "measured"),
        _sheet("h100", 3350),
        _sheet("b200", 8000),
        _sheet("a100-80g", 2039),
        _sheet("rtx-pro-6000", 1792),
        _sheet("l40s", 864),
    )
}

_DESCRIPTION = """\
Say what stock SGLang's cast of the FP8 pool costs for a model, and what this
package leaves of it. Reads a config.json, or knows the model by name; needs
neither a GPU nor the weights."""

_NAMES = textwrap.fill(", ".join(BUILT_IN), 76).replace("\n", "\n  ")
_EPILOG = f"""\
models known by name:
  {_NAMES}
GPUs known by name (any other: --bandwidth):
  {", ".join(GPUS)}

examples:
  sglang-fp8mla estimate glm-5 --tp 8 --pool 495552 --step-ms 93
  sglang-fp8mla estimate deepseek-r1 --kv-memory 40 --batch 32 --length 4096
  sglang-fp8mla estimate ./my-model/config.json --gpu h100 --json
  sglang-fp8mla estimate deepseek-v2-lite --bandwidth 900

--pool is `max_total_num_tokens` in the server's log. Under tensor parallelism
each GPU holds whole rows and casts the whole pool: bytes do not shrink with --tp.

exit codes: 0 done, 2 a wrong argument or an unreadable config"""


@dataclass(frozen=True)
class Workload:
    """A decode batch on one GPU."""

    batch: int = 1
    length: int = 4096
    prefix: int = 0  # tokens that all requests share

    @property
    def live_tokens(self) -> int:
        return self.prefix + self.batch * (self.length - self.prefix)


@dataclass(frozen=True)
class Estimate:
    """Everything the table shows; bytes, milliseconds and tokens of one GPU."""

    model: str
    source: str
    layers: int
    heads_per_gpu: int
    row_values: int
    live_tokens: int
    pool_tokens_fp8: int
    pool_tokens_bf16: int
    pool_bytes: int
    kv_bytes_per_token_fp8: int
    kv_bytes_per_token_bf16: int
    workspace_bytes: int
    slot_list_bytes: int
    stock_cast_bytes: int
    our_cast_bytes: int
    stock_cast_ms: float
    our_cast_ms: float
    saved_ms: float
    step_ms: float | None
    our_step_ms: float | None
    notes: tuple[str, ...]


def estimate(
    model: MlaModel,
    *,
    tp: int = 1,
    pool: int | None = None,
    kv_memory_gb: float | None = None,
    work: Workload = Workload(),
    copy_gb_s: float = GPUS["h200"].copy_gb_s,
    cast_gb_s: float | None = None,
    step_ms: float | None = None,
) -> Estimate:
    """Compute the estimate.

    Args:
        model: the model's MLA dimensions.
        tp: tensor-parallel size; splits the heads, never the rows.
        pool: FP8 pool, in tokens; excludes `kv_memory_gb`. 495,552 when both are None.
        kv_memory_gb: memory of one GPU for the pool, in GB (1e9 bytes).
        work: the decode batch.
        copy_gb_s: memory bandwidth that a copy reaches, read plus written, in GB/s.
        cast_gb_s: rate of stock's cast; what was measured, or `copy_gb_s` where that is lower.
        step_ms: a measured stock step, to put the saving into proportion.

    Raises:
        InvalidArgument: a number is out of range, or the batch does not fit in the pool.
    """
    heads = heads_per_gpu(model, tp)
    fp8_token = model.layers * model.dim
    for name, value in (("pool", pool), ("kv-memory", kv_memory_gb), ("step-ms", step_ms)):
        if value is not None and value <= 0:
            raise InvalidArgument(f"estimate: --{name} must be > 0, got {value:g}")
    if pool is not None and kv_memory_gb is not None:
        raise InvalidArgument("estimate: --pool and --kv-memory must not both be given")
    if kv_memory_gb is not None:
        pool = int(kv_memory_gb * 1e9 // fp8_token)
    elif pool is None:
        pool = _DEFAULT_POOL
    _require_work(work, pool)
    if copy_gb_s <= 0 or (cast_gb_s is not None and cast_gb_s <= 0):
        raise InvalidArgument("estimate: --bandwidth and --cast-rate must be > 0 GB/s")
    stock_gb_s = cast_gb_s or min(_STOCK_CAST_GB_S, copy_gb_s)

    live = work.live_tokens
    # one FP8 byte read, one bf16 value written; ours reads a 4-byte slot id besides
    stock_bytes = model.layers * pool * model.dim * 3
    our_bytes = model.layers * live * (model.dim * 3 + 4)
    stock_ms = stock_bytes / stock_gb_s / 1e6
    our_ms = (
        our_bytes / (copy_gb_s * _OUR_CAST_OF_COPY) / 1e6 + model.layers * _OUR_CAST_FLOOR_US / 1e3
    )
    saved = stock_ms - our_ms
    notes = []
    if saved <= 0:
        notes.append("the batch fills the pool: there is nothing to save here")
    if step_ms is not None and step_ms <= stock_ms:
        notes.append(
            f"the cast alone is estimated at {stock_ms:.1f} ms, more than the step of {step_ms:g} "
            "ms: check --pool, --step-ms and --cast-rate"
        )
    if model.sparse:
        notes.append(
            f"{model.name} is a sparse-attention model: it runs here only densely, see "
            "docs/models.md"
        )
    if model.ckv_dim % 128 or model.kpe_dim % 64:
        notes.append("FlashInfer's MLA kernel does not take rows of this size")
    known_step = step_ms is not None and step_ms > stock_ms
    return Estimate(
        model=model.name,
        source=model.source,
        layers=model.layers,
        heads_per_gpu=heads,
        row_values=model.dim,
        live_tokens=live,
        pool_tokens_fp8=pool,
        pool_tokens_bf16=pool // 2,
        pool_bytes=pool * fp8_token,
        kv_bytes_per_token_fp8=fp8_token,
        kv_bytes_per_token_bf16=fp8_token * 2,
        workspace_bytes=pool * model.dim * 2,
        slot_list_bytes=pool * 8,
        stock_cast_bytes=stock_bytes,
        our_cast_bytes=our_bytes,
        stock_cast_ms=stock_ms,
        our_cast_ms=our_ms,
        saved_ms=saved,
        step_ms=step_ms,
        our_step_ms=step_ms - saved if known_step and step_ms is not None else None,
        notes=tuple(notes),
    )


def _require_work(work: Workload, pool: int) -> None:
    for name, value, least in (
        ("batch", work.batch, 1),
        ("length", work.length, 1),
        ("prefix", work.prefix, 0),
    ):
        if value < least:
            raise InvalidArgument(f"estimate: --{name} must be >= {least}, got {value}")
    if work.prefix > work.length:
        raise InvalidArgument(
            f"estimate: --prefix must be <= --length, got {work.prefix} and {work.length}"
        )
    if work.live_tokens > pool:
        raise InvalidArgument(
            f"estimate: the batch's {work.live_tokens:,} tokens must fit in the pool of {pool:,}; "
            "lower --batch or --length, or raise --pool or --kv-memory"
        )


def print_estimate(found: Estimate, gpu: str) -> None:
    print(
        f"{found.model}: {found.layers} layers, {found.heads_per_gpu} heads per GPU, rows of "
        f"{found.row_values} values\n"
        f"live tokens: {found.live_tokens:,}; {gpu}\n"
    )

    def ms(value: float) -> str:
        return f"{value:,.2f} ms" if value < 10 else f"{value:,.1f} ms"

    rows = [
        (
            "KV per token, all layers",
            human_bytes(found.kv_bytes_per_token_bf16),
            human_bytes(found.kv_bytes_per_token_fp8),
            human_bytes(found.kv_bytes_per_token_fp8),
        ),
        (
            f"tokens in {human_bytes(found.pool_bytes)}",
            f"{found.pool_tokens_bf16:,}",
            f"{found.pool_tokens_fp8:,}",
            f"{found.pool_tokens_fp8:,}",
        ),
        (
            "bf16 rows besides",
            "-",
            f"{human_bytes(found.workspace_bytes)}, per layer",
            f"{human_bytes(found.workspace_bytes)}, once",
        ),
        ("slot lists besides", "-", "-", human_bytes(found.slot_list_bytes)),
        (
            "cast moves, per step",
            "-",
            human_bytes(found.stock_cast_bytes),
            human_bytes(found.our_cast_bytes),
        ),
        ("cast takes, per step (est.)", "-", ms(found.stock_cast_ms), ms(found.our_cast_ms)),
    ]
    if found.step_ms is not None and found.our_step_ms is not None:
        rows.append(("a step of yours (est.)", "", ms(found.step_ms), ms(found.our_step_ms)))
    print_table(None, ("", "bf16 pool", "FP8, stock", "FP8, gather_cast"), rows, right=(1, 2, 3))
    print(f"Saved per step: about {ms(max(found.saved_ms, 0.0))}.", end="")
    if found.our_step_ms is not None and found.step_ms is not None:
        print(f" That is {found.step_ms / found.our_step_ms:.1f}x the steps per second, at most.")
    else:
        print(" --step-ms puts it in proportion to a step that you measured.")
    print("`fused` and `native`, where they run, cast nothing: `sglang-fp8mla doctor` tells.")
    for note in found.notes:
        print(f"Note: {note}.")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "estimate",
        help="what the cast costs and what is gained, from a model config",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    work = Workload()
    add("model", metavar="MODEL", help="config.json, a folder with one, or a name from below")
    add("--tp", type=int, default=1, metavar="N", help="tensor-parallel size (%(default)s)")
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--pool", type=int, metavar="TOKENS", help=f"FP8 KV pool, in tokens ({_DEFAULT_POOL})"
    )
    size.add_argument(
        "--kv-memory", type=float, metavar="GB", help="or: memory per GPU for the pool, in GB"
    )
    add("--batch", type=int, default=work.batch, metavar="N", help="requests (%(default)s)")
    add("--length", type=int, default=work.length, metavar="N", help="tokens each (%(default)s)")
    add("--prefix", type=int, default=0, metavar="N", help="of these, shared by all (%(default)s)")
    add(
        "--gpu",
        choices=tuple(GPUS),
        default="h200",
        metavar="NAME",
        help="for the bandwidth (%(default)s)",
    )
    add("--bandwidth", type=float, metavar="GB/S", help="bandwidth of a copy, read + written")
    add(
        "--cast-rate",
        type=float,
        metavar="GB/S",
        help=f"rate of stock's cast ({_STOCK_CAST_GB_S:.0f}, or the bandwidth if lower)",
    )
    add("--step-ms", type=float, metavar="MS", help="a decode step that you measured on stock")
    add("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    gpu = GPUS[args.gpu]
    copy_gb_s = args.bandwidth if args.bandwidth is not None else gpu.copy_gb_s
    found = estimate(
        load_model(args.model),
        tp=args.tp,
        pool=args.pool,
        kv_memory_gb=args.kv_memory,
        work=Workload(args.batch, args.length, args.prefix),
        copy_gb_s=copy_gb_s,
        cast_gb_s=args.cast_rate,
        step_ms=args.step_ms,
    )
    if args.json:
        data: dict[str, Any] = asdict(found)
        print(json.dumps(data, indent=2))
        return 0
    source = "as given" if args.bandwidth is not None else gpu.source
    label = "GPU" if args.bandwidth is not None else gpu.name
    print_estimate(found, f"{label}: a copy at {copy_gb_s:,.0f} GB/s ({source})")
    return 0
