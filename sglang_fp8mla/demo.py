"""`sglang-fp8mla demo`: what the backend does to one decode layer, on any CPU, in seconds.

Needs torch and nothing else: no GPU, no SGLang, no model. The attention is the float64 reference,
so the demo shows bytes, rows and exactness; the times are this CPU's and say nothing about a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from .errors import IncompatibleEnvironment, InvalidArgument
from .tables import human_bytes, print_table

if TYPE_CHECKING:
    import torch

HEAD_DIM_CKV = 512
HEAD_DIM_KPE = 64
DIM = HEAD_DIM_CKV + HEAD_DIM_KPE

# one FP8 byte read and one bf16 value written per element
_CAST_BYTES_PER_ROW = DIM * (1 + 2)
_INDEX_BYTES = 4  # int32 slot ids

_KV_DTYPES = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}

_DESCRIPTION = """\
Run the backend's main job once on this machine's CPU, without a GPU and without
SGLang.

It fills an FP8 KV pool, takes a batch of requests that share a prefix, and
attends twice:
  stock  casts the whole pool to bf16, as `--attention-backend flashinfer` does
         on every layer
  ours   casts only the distinct rows that live requests reference, into a
         NaN-filled workspace
Every dead row of the pool is NaN as well, so one wrong row would show in the
output. The outputs must be equal to the last bit, else the exit code is 1.
Where triton is installed, the kernels that the server runs do the cast once
more, in Triton's interpreter, and must give the same bits."""

_EPILOG = """\
examples:
  sglang-fp8mla demo                            131,072 tokens, 8 requests
  sglang-fp8mla demo --pool 495552 --layers 78  pool and layers of GLM-5
  sglang-fp8mla demo --batch 1 --prefix 0 --own 64
  sglang-fp8mla demo --json                     the same as data

exit codes: 0 outputs equal, 1 they differ or torch is missing, 2 wrong argument"""


@dataclass(frozen=True)
class Case:
    """One decode layer: a pool, and a batch whose requests share a prefix."""

    pool: int = 131_072  # slots
    batch: int = 8  # requests
    prefix: int = 2_048  # tokens that all requests share
    own: int = 256  # tokens of each request alone
    heads: int = 16  # query heads on this GPU
    layers: int = 61
    kv_dtype: str = "fp8_e4m3"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (
            ("pool", 2),
            ("batch", 1),
            ("prefix", 0),
            ("own", 0),
            ("heads", 1),
            ("layers", 1),
        ):
            if getattr(self, name) < least:
                raise InvalidArgument(
                    f"demo: --{name} must be >= {least}, got {getattr(self, name)}"
                )
        if self.prefix + self.own == 0:
            raise InvalidArgument("demo: --prefix plus --own must be >= 1 token, got 0")
        # slot 0 is SGLang's padding slot
        if self.live_slots > self.pool - 1:
            raise InvalidArgument(
                f"demo: the live tokens must fit in the pool of {self.pool:,} slots, got "
                f"{self.live_slots:,}; raise --pool or lower --batch, --prefix or --own"
            )

    @property
    def live_slots(self) -> int:
        """Distinct slots that the batch references."""
        return self.prefix + self.batch * self.own

    @property
    def nnz(self) -> int:
        """Slots that the batch references, the shared ones counted once per request."""
        return self.batch * (self.prefix + self.own)

    @property
    def stock_bytes(self) -> int:
        return self.pool * _CAST_BYTES_PER_ROW

    @property
    def our_bytes(self) -> int:
        return self.live_slots * (_CAST_BYTES_PER_ROW + _INDEX_BYTES)

    @property
    def workspace_bytes(self) -> int:
        return self.pool * DIM * 2


@dataclass(frozen=True)
class Arm:
    """One way to feed the attention: what it moved, and how long that took here."""

    rows_cast: int
    bytes_per_layer: int
    bytes_per_step: int
    cast_ms: float
    workspace_bytes: int
    allocated: str


@dataclass(frozen=True)
class Report:
    case: Case
    stock: Arm
    ours: Arm
    find_slots_ms: float
    bitwise_equal: bool
    max_abs_difference: float
    nonfinite_outputs: int
    kernels_skipped: str  # why the Triton kernels were left out; empty when they ran
    machine: str

    @property
    def ok(self) -> bool:
        return self.bitwise_equal and self.nonfinite_outputs == 0


def _import_torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise IncompatibleEnvironment(
            f"demo: torch must be installed, got: {error}; "
            "pip install torch --index-url https://download.pytorch.org/whl/cpu"
        ) from None
    return torch


def _require_memory(case: Case) -> None:
    # the FP8 pool, our workspace, and stock's cast twice: the allocator may hold the last one
    wanted = case.pool * DIM * (1 + 2 + 2 + 2)
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return
    if wanted > free:
        raise InvalidArgument(
            f"demo: --pool must fit in memory, {case.pool:,} slots need {human_bytes(wanted)} and "
            f"{human_bytes(free)} are free; try --pool {max(2, free // (DIM * 8) // 1000 * 1000)}"
        )


def _median_ms(work: Callable[[], object], budget_s: float = 1.5) -> float:
    """Median of up to seven runs after one warm-up, fewer when they are slow."""
    work()
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < 7 and (len(times) < 3 or time.perf_counter() - begin < budget_s):
        start = time.perf_counter()
        work()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def _make_slots(case: Case, generator: torch.Generator) -> list[torch.Tensor]:
    """One int32 index tensor per request: the shared prefix, then its own slots, all shuffled."""
    import torch

    slots = torch.randperm(case.pool - 1, generator=generator)[: case.live_slots] + 1
    shared, rest = slots[: case.prefix], slots[case.prefix :]
    return [
        torch.cat([shared, rest[i * case.own : (i + 1) * case.own]]).to(torch.int32)
        for i in range(case.batch)
    ]


def _make_pool(case: Case, live: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """[pool, 576] FP8: random live rows, NaN in every other one."""
    import torch

    # 0x7F is NaN in e4m3fn and in e5m2
    pool = torch.full((case.pool, DIM), 0x7F, dtype=torch.uint8)
    rows = torch.randn(live.numel(), DIM, generator=generator)
    dtype = getattr(torch, _KV_DTYPES[case.kv_dtype])
    # FP8 tensors are indexed as bytes: not every torch can index the FP8 dtypes
    pool[live.long()] = rows.to(dtype).view(torch.uint8)
    return pool.view(dtype)


def cast_all(pool: torch.Tensor) -> torch.Tensor:
    """What stock does: [pool, 576] FP8 to a new bf16 tensor of the same shape."""
    import torch

    return pool.to(torch.bfloat16)


def cast_live(pool: torch.Tensor, live: torch.Tensor, workspace: torch.Tensor) -> None:
    """What we do: cast the rows `live` into the first rows of `workspace`, and no others."""
    import torch

    rows = pool.view(torch.uint8).index_select(0, live).view(pool.dtype)
    workspace[: live.numel()].copy_(rows)


def _cast_with_kernels(
    pool: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    workspace: torch.Tensor,
    kv_rows: torch.Tensor,
) -> str:
    """Do the work of `cast_live`, and find `kv_rows`, with the package's Triton kernels.

    Returns:
        Why they cannot run, or nothing.
    """
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        return "triton was imported before the demo could ask for its interpreter"
    # read once, when triton is first imported
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        from triton.runtime.errors import InterpreterError

        from .kernels.gather_cast import gather_cast
        from .workspace import LiveSlots
    except ImportError as error:
        return str(error)
    live = LiveSlots(pool.shape[0], pool.device)
    try:
        kv_rows.copy_(live.update(kv_indices, kv_indptr, len(kv_indptr) - 1))
        gather_cast(pool, live.slots, live.count, live.tickets, workspace)
    # Symptom: TypeError in every loop. Cause: the interpreter turns an array of one element into an
    # int, which numpy 2.5 refuses (seen with triton 3.6). Enough: no server uses the interpreter.
    # Remove: when the oldest triton that we support runs with the numpy that pip brings.
    except InterpreterError as error:
        return f"Triton's interpreter does not run with this numpy: {error}"
    return ""


def run_case(case: Case) -> Report:
    """Attend once over the whole cast pool and once over the live rows, and compare."""
    torch = _import_torch()
    _require_memory(case)
    if case.stock_bytes > 4e8:
        print(f"casting {case.pool:,} slots a few times, some seconds ...", file=sys.stderr)

    from .reference import ref_mla

    generator = torch.Generator().manual_seed(case.seed)
    slots = _make_slots(case, generator)
    kv_indices = torch.cat(slots)
    kv_indptr = torch.arange(case.batch + 1, dtype=torch.int32) * (case.prefix + case.own)
    live, kv_rows = torch.unique(kv_indices, return_inverse=True)
    live, kv_rows = live.long(), kv_rows.to(torch.int32)
    pool = _make_pool(case, live, generator)
    q = torch.randn(case.batch, case.heads, DIM, generator=generator).to(torch.bfloat16)
    sm_scale = (128 + HEAD_DIM_KPE) ** -0.5  # DeepSeek: 128 values of a head before absorption

    def attend(rows: Any, kv_indices: Any) -> Any:
        q_nope, q_pe = q[..., :HEAD_DIM_CKV], q[..., HEAD_DIM_CKV:]
        out, _ = ref_mla(q_nope, q_pe, rows[:, None], kv_indices, kv_indptr, sm_scale=sm_scale)
        return out

    stock_ms = _median_ms(lambda: cast_all(pool))
    stock_out = attend(cast_all(pool), kv_indices)

    workspace = torch.full((case.pool, DIM), float("nan"), dtype=torch.bfloat16)
    find_ms = _median_ms(lambda: torch.unique(kv_indices, return_inverse=True))
    our_ms = _median_ms(lambda: cast_live(pool, live, workspace))
    # the timed runs wrote the rows already: poison them, so that this one run is what is compared
    workspace.fill_(float("nan"))
    cast_live(pool, live, workspace)
    outputs = [attend(workspace, kv_rows)]

    workspace.fill_(float("nan"))
    kernels_skipped = _cast_with_kernels(pool, kv_indices, kv_indptr, workspace, kv_rows)
    if not kernels_skipped:
        outputs.append(attend(workspace, kv_rows))

    return Report(
        case=case,
        stock=Arm(
            rows_cast=case.pool,
            bytes_per_layer=case.stock_bytes,
            bytes_per_step=case.stock_bytes * case.layers,
            cast_ms=stock_ms,
            workspace_bytes=case.workspace_bytes,
            allocated="per layer, per step",
        ),
        ours=Arm(
            rows_cast=live.numel(),
            bytes_per_layer=case.our_bytes,
            bytes_per_step=case.our_bytes * case.layers,
            cast_ms=our_ms,
            workspace_bytes=case.workspace_bytes,
            allocated="once, at start",
        ),
        find_slots_ms=find_ms,
        bitwise_equal=all(bool(torch.equal(stock_out, out)) for out in outputs),
        max_abs_difference=max(float((stock_out - out).abs().max()) for out in outputs),
        nonfinite_outputs=sum(int((~out.isfinite()).sum()) for out in outputs),
        kernels_skipped=kernels_skipped,
        machine=f"CPU, {torch.get_num_threads()} threads, torch {torch.__version__}",
    )


def to_json(report: Report) -> dict[str, Any]:
    """The report as JSON data. NaN is not JSON, so a difference that is NaN becomes null."""
    data = asdict(report)
    data["ok"] = report.ok
    data["case"]["live_slots"] = report.case.live_slots
    data["case"]["nnz"] = report.case.nnz
    if report.max_abs_difference != report.max_abs_difference:
        data["max_abs_difference"] = None
    return data


def _ratio(stock: float, ours: float) -> str:
    if ours <= 0:
        return "-"
    ratio = stock / ours
    return f"{ratio:,.0f}x less" if ratio >= 10 else f"{ratio:.1f}x less"


def print_report(report: Report) -> None:
    case, stock, ours = report.case, report.stock, report.ours
    print(
        f"One decode step of {case.batch} requests: {case.prefix:,} shared + {case.own:,} own "
        f"tokens each,\n{case.layers} MLA layers, {case.heads} heads, {case.kv_dtype} pool of "
        f"{case.pool:,} tokens ({human_bytes(case.pool * DIM)} per layer)\n"
    )
    rows = [
        ("rows referenced, with repeats", f"{case.nnz:,}", f"{case.nnz:,}", "the same"),
        (
            "rows cast per layer",
            f"{stock.rows_cast:,}",
            f"{ours.rows_cast:,}",
            _ratio(stock.rows_cast, ours.rows_cast),
        ),
        (
            "bytes moved per layer",
            human_bytes(stock.bytes_per_layer),
            human_bytes(ours.bytes_per_layer),
            _ratio(stock.bytes_per_layer, ours.bytes_per_layer),
        ),
        (
            f"bytes moved per {case.layers} layers",
            human_bytes(stock.bytes_per_step),
            human_bytes(ours.bytes_per_step),
            _ratio(stock.bytes_per_step, ours.bytes_per_step),
        ),
        (
            "cast of one layer, this CPU",
            f"{stock.cast_ms:.2f} ms",
            f"{ours.cast_ms:.2f} ms",
            _ratio(stock.cast_ms, ours.cast_ms),
        ),
        ("finding live slots, per step", "-", f"{report.find_slots_ms:.2f} ms", ""),
        (
            "bf16 workspace",
            human_bytes(stock.workspace_bytes),
            human_bytes(ours.workspace_bytes),
            "the same",
        ),
        ("... allocated", stock.allocated, ours.allocated, ""),
    ]
    print_table(None, ("", "stock", "ours", ""), rows, right=(1, 2, 3))
    if report.ok:
        print("Outputs: equal to the last bit (difference 0); every row not referenced was NaN.")
        if report.kernels_skipped:
            print(f"Kernels: not run ({report.kernels_skipped}); torch did the cast.")
        else:
            print("Kernels: the package's Triton kernels, interpreted, gave the same bits.")
    else:
        print(
            f"Outputs DIFFER: max difference {report.max_abs_difference:g}, "
            f"{report.nonfinite_outputs:,} values not finite. This is a bug: please report it."
        )
    print(f"Machine: {report.machine}. Times on a GPU: docs/benchmarks.md.")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="the main job on a CPU: what stock moves, what we move, equal outputs",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    case = Case()
    add = parser.add_argument
    add(
        "--pool",
        type=int,
        default=case.pool,
        metavar="SLOTS",
        help="KV pool, in tokens (%(default)s)",
    )
    add("--batch", type=int, default=case.batch, metavar="N", help="requests (%(default)s)")
    add(
        "--prefix",
        type=int,
        default=case.prefix,
        metavar="N",
        help="tokens all requests share (%(default)s)",
    )
    add(
        "--own",
        type=int,
        default=case.own,
        metavar="N",
        help="tokens of each request alone (%(default)s)",
    )
    add(
        "--heads",
        type=int,
        default=case.heads,
        metavar="N",
        help="query heads per GPU (%(default)s)",
    )
    add(
        "--layers",
        type=int,
        default=case.layers,
        metavar="N",
        help="layers, for the bytes per step (%(default)s)",
    )
    add(
        "--kv-dtype",
        choices=sorted(_KV_DTYPES),
        default=case.kv_dtype,
        help="pool dtype (%(default)s)",
    )
    add("--seed", type=int, default=case.seed, help="seed of slots and values (%(default)s)")
    add("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    case = Case(
        pool=args.pool,
        batch=args.batch,
        prefix=args.prefix,
        own=args.own,
        heads=args.heads,
        layers=args.layers,
        kv_dtype=args.kv_dtype,
        seed=args.seed,
    )
    report = run_case(case)
    if args.json:
        print(json.dumps(to_json(report), indent=2))
    else:
        print_report(report)
    return 0 if report.ok else 1
