"""MLA decode that reads the FP8 pool in place: the `fused` path's kernel, its plan and its limits.

One query token per request, q in bf16 or fp16 (never rounded to FP8), any slots. A step calls
`plan` once and `run` once per layer; both only launch kernels of fixed grids, so a CUDA graph
replays with new lengths. Imports neither sglang nor flashinfer. The CUDA source is
`mla_decode.cu`, the portable one `mla_decode_triton.py`.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from ..checks import Check
from ..errors import InvalidArgument
from . import nvrtc

if TYPE_CHECKING:
    import torch

CKV_DIM = 512
TILE = 64  # tokens; mla_decode.cu's TILE
MAX_HEADS = 128
MAX_SPLITS = 16  # per request with a fixed split length: bounds the scratch
_MAX_PARTS = 512  # mla_decode.cu's merge: 16 warps with a weight per lane
_HEADER = 8
_POOL_DTYPES = ("float8_e4m3fn", "float8_e5m2")
_Q_DTYPES = ("bfloat16", "float16")


@dataclass(frozen=True)
class CudaConfig:
    """Compile-time shape of the CUDA kernel.

    Attributes:
        heads: heads of one block (8, 16, 32 or 64); more heads take more blocks over the same
            tokens.
        groups: warp groups of one block; each computes heads / groups logits and 512 / groups
            columns.
        stages: tiles of 64 tokens in shared memory.
        bulk: a warp of its own fetches rows with the bulk copy engine (sm_90 and newer); else
            every thread copies 16 bytes at a time.
        min_blocks: blocks that one multiprocessor must hold.
        apart: each group keeps all columns of its own heads, instead of its columns of all heads.
    """

    heads: int
    groups: int
    stages: int
    bulk: bool
    min_blocks: int
    apart: bool = False

    def threads(self, arch: str) -> int:
        """Threads of one block: those that compute, and with `bulk` those that fetch."""
        if not self.bulk:
            return 128 * self.groups
        # the source's REBALANCE: beside several groups of wgmma a whole group fetches
        return 128 * self.groups + (128 if self.groups > 1 and arch == "sm_90a" else 64)

    def shared_bytes(self, kpe_dim: int) -> int:
        """Dynamic shared memory of one block, as `mla_decode` in the source lays it out."""
        row = CKV_DIM + kpe_dim
        tiles = self.stages * (TILE * (row + 16) + 16)
        return tiles + self.heads * (row * 2 + 2 * TILE * 2 + 6 * 4)

    def options(self, *, kpe_dim: int, e5m2: bool, q_bf16: bool) -> tuple[str, ...]:
        """Macro definitions for the compiler."""
        values = {
            "HEADS": self.heads,
            "GROUPS": self.groups,
            "STAGES": self.stages,
            "BULK": int(self.bulk),
            "MIN_BLOCKS": self.min_blocks,
            "APART": int(self.apart),
            "KPE": kpe_dim,
            "E5M2": int(e5m2),
            "Q_BF16": int(q_bf16),
        }
        return tuple(f"-D{name}={value}" for name, value in values.items())


# SM90, by heads of a block, measured on H200 (docs/kernels.md). For one or two requests fewer,
# deeper blocks win, because fewer parts are merged; for more, two blocks of a multiprocessor do.
SMALL_BATCH = 2
_SM90_SMALL = {8: CudaConfig(8, 1, 5, True, 1), 16: CudaConfig(16, 2, 5, True, 1)}
_SM90 = {
    8: CudaConfig(8, 1, 2, True, 2),
    16: CudaConfig(16, 1, 2, True, 2),
    32: CudaConfig(32, 2, 4, True, 1),
    64: CudaConfig(64, 2, 3, True, 1),
}


def choose_config(capability: tuple[int, int], num_heads: int, bs: int) -> CudaConfig:
    """The measured shape for a GPU generation, head count and batch size."""
    if capability != (9, 0):
        # 99 KB of shared memory (SM86, SM89, SM120) hold two stages and 16 heads
        return CudaConfig(8 if num_heads <= 8 else 16, 1, 2, False, 1)
    heads = next((heads for heads in _SM90 if num_heads <= heads), 64)
    if bs <= SMALL_BATCH and heads in _SM90_SMALL:
        return _SM90_SMALL[heads]
    return _SM90[heads]


def architecture(capability: tuple[int, int]) -> str:
    """The compiler's name of a GPU: sm_90 needs its `a` form for wgmma."""
    major, minor = capability
    return f"sm_{major}{minor}" + ("a" if capability == (9, 0) else "")


@lru_cache(maxsize=1)
def cuda_source() -> str:
    """Text of `mla_decode.cu`."""
    return resources.files(__package__).joinpath("mla_decode.cu").read_text(encoding="utf-8")


def _dtype_name(dtype: Any) -> str:
    return str(dtype).rpartition(".")[2]


def supported(
    capability: tuple[int, int],
    num_heads: int,
    q_dtype: Any,
    pool_dtype: Any,
    ckv_dim: int,
    kpe_dim: int,
) -> Check:
    """Whether the kernel takes these shapes. Metadata only: nothing is compiled or run.

    Args:
        capability: (major, minor) of the GPU.
        q_dtype: torch dtype or its name; pool_dtype likewise.
    """
    wrong = []
    if capability < (8, 0):
        wrong.append(f"GPU must be SM80 or newer, got SM{capability[0]}{capability[1]}")
    if not 1 <= num_heads <= MAX_HEADS:
        wrong.append(f"num_heads must be 1 to {MAX_HEADS}, got {num_heads}")
    if _dtype_name(q_dtype) not in _Q_DTYPES:
        wrong.append(f"q must be bfloat16 or float16, got {_dtype_name(q_dtype)}")
    if _dtype_name(pool_dtype) not in _POOL_DTYPES:
        wrong.append(f"pool must be float8_e4m3fn or float8_e5m2, got {_dtype_name(pool_dtype)}")
    if ckv_dim != CKV_DIM:
        wrong.append(f"ckv must have {CKV_DIM} columns, got {ckv_dim}")
    if kpe_dim not in (0, 64):
        wrong.append(f"kpe must have 0 or 64 columns, got {kpe_dim}")
    if wrong:
        return Check("fused decode shapes", "fail", "; ".join(wrong), "use gather_cast")
    found = f"{num_heads} heads, q {_dtype_name(q_dtype)}, pool {_dtype_name(pool_dtype)}"
    return Check("fused decode shapes", "ok", f"{found}, ckv {ckv_dim}, kpe {kpe_dim}")


class _Params(ctypes.Structure):
    """`Params` of mla_decode.cu: strides of q and out in elements, of the pool in bytes."""

    _fields_ = (
        ("q_nope", ctypes.c_void_p),
        ("q_nope_token", ctypes.c_longlong),
        ("q_nope_head", ctypes.c_longlong),
        ("q_pe", ctypes.c_void_p),
        ("q_pe_token", ctypes.c_longlong),
        ("q_pe_head", ctypes.c_longlong),
        ("pool", ctypes.c_void_p),
        ("pool_row", ctypes.c_uint),
        ("kv_indices", ctypes.c_void_p),
        ("kv_indptr", ctypes.c_void_p),
        ("plan", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("out_token", ctypes.c_longlong),
        ("out_head", ctypes.c_longlong),
        ("lse", ctypes.c_void_p),
        ("lse_token", ctypes.c_longlong),
        ("lse_head", ctypes.c_longlong),
        ("part_out", ctypes.c_void_p),
        ("part_lse", ctypes.c_void_p),
        ("scale_log2", ctypes.c_float),
        ("heads", ctypes.c_int),
        ("head_blocks", ctypes.c_int),
        ("workers", ctypes.c_int),
        ("fixed", ctypes.c_int),
        ("max_splits", ctypes.c_int),
        ("max_bs", ctypes.c_int),
        ("tokens", ctypes.c_int),
    )


@lru_cache(maxsize=64)
def _load_module(device_index: int, arch: str, options: tuple[str, ...]) -> nvrtc.Module:
    import torch

    cubin = nvrtc.cached_cubin(cuda_source(), arch=arch, options=options)
    with torch.cuda.device(device_index):
        torch.cuda.current_stream()  # the primary context must be current before the driver loads
        return nvrtc.Module(cubin)


@dataclass(frozen=True)
class _Shape:
    """A compiled kernel, the grid it runs on, and its work list on the device."""

    config: CudaConfig
    module: Any
    head_blocks: int
    workers: int
    threads: int
    shared: int
    work: torch.Tensor


class MlaDecodePlan:
    """Scratch, plan and launches of one decode shape; `workspace_bytes` is all that it allocates.

    The kernels run on a fixed grid of workers. `plan` cuts the batch's tiles of 64 tokens into
    one equal, contiguous run per worker, so a single long request fills the GPU and a replay with
    new lengths stays balanced; `run` merges requests that several workers shared. Results are
    deterministic. With `split_len` a request is cut at multiples of a length that depends on
    nothing but its own length, and merged in order: its result then does not depend on the rest
    of the batch, bitwise.

    One object serves every batch size up to `max_bs`, and all layers, as long as all its launches
    are ordered on one stream: `plan` overwrites the work list and `run` the partial results.
    Concurrent streams need an object each. `plan` may run inside a captured graph or before its
    replay. The kernel's shape depends on the rows of q alone, so a captured graph keeps its grid.

    Args:
        max_bs: largest batch size that `plan` will get.
        num_heads: query heads of this rank, 1 to 128.
        device: CUDA device.
        kpe_dim: 64, or 0 for models without a rope part.
        q_dtype: torch.bfloat16 or torch.float16, also of the output.
        pool_dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        split_len: tokens per split (rounded up to 64) for batch-invariant results; None balances.
        backend: `cuda`, `triton`, or None: `cuda` where its speed was measured (SM90), else
            `triton`.
        config: shape of the CUDA kernel; None chooses by GPU and heads.
        arch: machine code to compile for; None is the device's own.

    Raises:
        InvalidArgument: the shapes are not supported (see `supported`).
        CompilerMissing, CompileFailed: the kernel cannot be built here.
    """

    def __init__(
        self,
        *,
        max_bs: int,
        num_heads: int,
        device: Any,
        kpe_dim: int = 64,
        q_dtype: torch.dtype,
        pool_dtype: torch.dtype,
        split_len: int | None = None,
        backend: str | None = None,
        config: CudaConfig | None = None,
        arch: str | None = None,
        _module: Any = None,
    ) -> None:
        import torch

        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        on_gpu = self.device.type == "cuda"
        capability = torch.cuda.get_device_capability(self.device) if on_gpu else (9, 0)
        check = supported(capability, num_heads, q_dtype, pool_dtype, CKV_DIM, kpe_dim)
        if not check.ok:
            raise InvalidArgument(f"MlaDecodePlan: {check}")
        if split_len is not None and split_len < 1:
            raise InvalidArgument(f"MlaDecodePlan: split_len must be at least 1, got {split_len}")
        if max_bs < 1:
            raise InvalidArgument(f"MlaDecodePlan: max_bs must be at least 1, got {max_bs}")
        if backend is None:
            backend = "cuda" if capability == (9, 0) and (on_gpu or _module) else "triton"
        if backend not in ("cuda", "triton"):
            raise InvalidArgument(f"MlaDecodePlan: backend must be cuda or triton, got {backend!r}")
        self.backend = backend
        self.max_bs = max_bs
        self.num_heads = num_heads
        self.kpe_dim = kpe_dim
        self.q_dtype = q_dtype
        self.pool_dtype = pool_dtype
        self.split_len = split_len
        self._multiprocessors = (
            torch.cuda.get_device_properties(self.device).multi_processor_count if on_gpu else 2
        )
        if backend == "triton":
            from .mla_decode_triton import TritonDecode

            self._triton: Any = TritonDecode(
                max_bs=max_bs,
                num_heads=num_heads,
                device=self.device,
                kpe_dim=kpe_dim,
                pool_dtype=pool_dtype,
                split_len=split_len,
                multiprocessors=self._multiprocessors,
            )
            self.workspace_bytes: int = self._triton.workspace_bytes
            return
        self._triton = None
        arch = architecture(capability) if arch is None else arch
        # with a split length one shape serves every batch: the results must not depend on the batch
        sizes = (max_bs,) if split_len is not None else (min(max_bs, SMALL_BATCH), max_bs)
        configs = [choose_config(capability, num_heads, bs) for bs in sizes]
        self._fixed = 0 if split_len is None else -(-split_len // TILE)
        self._shapes = [
            self._build(shape, arch, _module)
            for shape in (dict.fromkeys(configs) if config is None else [config])
        ]
        parts = [
            (max_bs * MAX_SPLITS if self._fixed else 2 * shape.workers)
            * (shape.head_blocks * shape.config.heads)
            for shape in self._shapes
        ]
        rows = max(parts)
        self._part_out = torch.empty(rows * CKV_DIM, dtype=torch.float16, device=self.device)
        self._part_lse = torch.empty(rows, dtype=torch.float32, device=self.device)
        words = sum(shape.work.numel() for shape in self._shapes)
        self.workspace_bytes = rows * (2 * CKV_DIM + 4) + 4 * words
        self._overlap = capability >= (9, 0)

    def _build(self, config: CudaConfig, arch: str, module: Any) -> _Shape:
        """Compile and load one shape; `module` stands in for the compiled one in tests."""
        import torch

        head_blocks = -(-self.num_heads // config.heads)
        room = self._multiprocessors * config.min_blocks
        workers = min(_MAX_PARTS, max(1, room // head_blocks))
        words = _HEADER + 4 * workers + 13 * self.max_bs + 1
        if module is None:
            options = config.options(
                kpe_dim=self.kpe_dim,
                e5m2=self.pool_dtype == torch.float8_e5m2,
                q_bf16=self.q_dtype == torch.bfloat16,
            )
            module = _load_module(self.device.index or 0, arch, options)
        return _Shape(
            config=config,
            module=module,
            head_blocks=head_blocks,
            workers=workers,
            threads=config.threads(arch),
            shared=config.shared_bytes(self.kpe_dim),
            work=torch.zeros(words, dtype=torch.int32, device=self.device),
        )

    def plan(self, kv_indptr: torch.Tensor, bs: int) -> None:
        """Divide a step's work among the workers: one small launch per shape, no sync.

        Args:
            kv_indptr: [>= bs + 1] int32 on the device, prefix sums of lengths. Read when the
                launch runs.
            bs: requests; rows of q past them give 0 and LSE -inf. At most `max_bs`; 0 is allowed.

        Raises:
            InvalidArgument: bs or kv_indptr breaks the contract.
        """
        import torch

        if not 0 <= bs <= self.max_bs:
            raise InvalidArgument(f"plan: bs must be 0 to {self.max_bs}, got {bs}")
        if kv_indptr.dtype != torch.int32 or kv_indptr.stride(0) != 1:
            found = f"{kv_indptr.dtype} with stride {kv_indptr.stride(0)}"
            raise InvalidArgument(f"plan: kv_indptr must be contiguous int32, got {found}")
        if kv_indptr.shape[0] < bs + 1:
            size = kv_indptr.shape[0]
            raise InvalidArgument(f"plan: kv_indptr must have {bs + 1} entries, got {size}")
        if self._triton is not None:
            self._triton.plan(bs)
            return
        # for both shapes: a graph keeps the one of its capture, whatever batch sizes came since
        for shape in self._shapes:
            shape.module.launch(
                "mla_decode_plan",
                (1, 1),
                1024,
                ctypes.c_void_p(kv_indptr.data_ptr()),
                ctypes.c_int(bs),
                ctypes.c_int(shape.workers),
                ctypes.c_int(self._fixed),
                ctypes.c_int(MAX_SPLITS),
                ctypes.c_int(self.max_bs),
                ctypes.c_void_p(shape.work.data_ptr()),
                stream=self._stream(),
            )

    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor | None,
        pool: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_indptr: torch.Tensor,
        out: torch.Tensor,
        *,
        sm_scale: float,
        lse_log2: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend one layer with the plan of this step and return `out`.

        Args:
            q_nope: [tokens, heads, 512] of q_dtype; last dim contiguous, other strides even.
            q_pe: [tokens, heads, 64] likewise; None when kpe_dim is 0.
            pool: [slots, 512 + kpe_dim] or [slots, 1, 512 + kpe_dim] of pool_dtype; row stride a
                multiple of 16 bytes. Only the slots named by kv_indices are read.
            kv_indices: [>= kv_indptr[bs]] int32, slots in any order. Entries past that are not
                read.
            kv_indptr: the tensor that `plan` got.
            out: [tokens, heads, 512] of q_dtype; last dim contiguous, other strides even. Every
                element of it is written.
            sm_scale: softmax scale, applied to q . k.
            lse_log2: [tokens, heads] float32, written when given: log2 of the softmax denominator.

        Raises:
            InvalidArgument: a shape, dtype, stride or alignment breaks the contract.
        """
        self._check_run(q_nope, q_pe, pool, kv_indices, kv_indptr, out, lse_log2)
        tokens = q_nope.shape[0]
        if tokens == 0:
            return out
        if self._triton is not None:
            self._triton.run(q_nope, q_pe, pool, kv_indices, kv_indptr, out, sm_scale, lse_log2)
            return out
        pe = q_nope if q_pe is None else q_pe
        shape = self._shapes[0 if tokens <= SMALL_BATCH else -1]
        params = _Params(
            q_nope=q_nope.data_ptr(),
            q_nope_token=q_nope.stride(0),
            q_nope_head=q_nope.stride(1),
            q_pe=pe.data_ptr(),
            q_pe_token=pe.stride(0),
            q_pe_head=pe.stride(1),
            pool=pool.data_ptr(),
            pool_row=pool.stride(0),
            kv_indices=kv_indices.data_ptr(),
            kv_indptr=kv_indptr.data_ptr(),
            plan=shape.work.data_ptr(),
            out=out.data_ptr(),
            out_token=out.stride(0),
            out_head=out.stride(1),
            part_out=self._part_out.data_ptr(),
            part_lse=self._part_lse.data_ptr(),
            scale_log2=sm_scale * math.log2(math.e),
            heads=self.num_heads,
            head_blocks=shape.head_blocks,
            workers=shape.workers,
            fixed=self._fixed,
            max_splits=MAX_SPLITS,
            max_bs=self.max_bs,
            tokens=tokens,
        )
        if lse_log2 is not None:
            params.lse = lse_log2.data_ptr()
            params.lse_token = lse_log2.stride(0)
            params.lse_head = lse_log2.stride(1)
        stream = self._stream()
        shape.module.launch(
            "mla_decode",
            (shape.workers * shape.head_blocks, 1),
            shape.threads,
            params,
            shared=shape.shared,
            stream=stream,
            overlap=self._overlap,
        )
        shape.module.launch(
            "mla_decode_merge",
            (min(2 * self._multiprocessors, 4 * self.num_heads * tokens), 1),
            512,
            params,
            stream=stream,
            overlap=self._overlap,
        )
        return out

    def _stream(self) -> int:
        import torch

        if self.device.type != "cuda":
            return 0
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def _check_run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor | None,
        pool: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_indptr: torch.Tensor,
        out: torch.Tensor,
        lse_log2: torch.Tensor | None,
    ) -> None:
        import torch

        tokens = q_nope.shape[0]
        queries = [("q_nope", q_nope, CKV_DIM), ("out", out, CKV_DIM)]
        if self.kpe_dim:
            if q_pe is None:
                raise InvalidArgument("run: q_pe must be a tensor for kpe_dim 64, got None")
            queries.append(("q_pe", q_pe, self.kpe_dim))
        for name, x, dim in queries:
            want = (tokens, self.num_heads, dim)
            if tuple(x.shape) != want or x.dtype != self.q_dtype:
                raise InvalidArgument(
                    f"run: {name} must be {list(want)} {self.q_dtype}, "
                    f"got {list(x.shape)} {x.dtype}"
                )
            strides = x.stride()
            if strides[2] != 1 or strides[0] % 2 or strides[1] % 2 or x.data_ptr() % 4:
                raise InvalidArgument(
                    f"run: {name} must have a contiguous last dim, even strides and 4-byte "
                    f"alignment, got strides {strides} at {x.data_ptr():#x}"
                )
        row = CKV_DIM + self.kpe_dim
        if pool.dtype != self.pool_dtype or pool.shape[-1] != row or pool.numel() < row:
            raise InvalidArgument(
                f"run: pool must be [slots, 1, {row}] {self.pool_dtype}, "
                f"got {list(pool.shape)} {pool.dtype}"
            )
        if pool.stride(-1) != 1 or pool.stride(0) % 16 or pool.data_ptr() % 16:
            raise InvalidArgument(
                f"run: pool must have contiguous rows, 16-byte aligned, "
                f"got strides {pool.stride()} at {pool.data_ptr():#x}"
            )
        for name, x in (("kv_indices", kv_indices), ("kv_indptr", kv_indptr)):
            if x.dtype != torch.int32 or x.dim() != 1 or (x.numel() > 1 and x.stride(0) != 1):
                raise InvalidArgument(
                    f"run: {name} must be contiguous 1-D int32, got {list(x.shape)} {x.dtype}"
                )
        if lse_log2 is not None and (
            tuple(lse_log2.shape) != (tokens, self.num_heads) or lse_log2.dtype != torch.float32
        ):
            raise InvalidArgument(
                f"run: lse_log2 must be {[tokens, self.num_heads]} torch.float32, "
                f"got {list(lse_log2.shape)} {lse_log2.dtype}"
            )


def mla_decode(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor | None,
    pool: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    *,
    sm_scale: float,
    split_len: int | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plan and run once, allocating everything: `(out, lse_log2)`. For tests and trials."""
    import torch

    bs = kv_indptr.shape[0] - 1
    tokens, heads, _ = q_nope.shape
    plan = MlaDecodePlan(
        max_bs=max(1, bs),
        num_heads=heads,
        device=q_nope.device,
        kpe_dim=0 if q_pe is None else q_pe.shape[-1],
        q_dtype=q_nope.dtype,
        pool_dtype=pool.dtype,
        split_len=split_len,
        backend=backend,
    )
    out = torch.empty(tokens, heads, CKV_DIM, dtype=q_nope.dtype, device=q_nope.device)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=q_nope.device)
    plan.plan(kv_indptr, bs)
    plan.run(q_nope, q_pe, pool, kv_indices, kv_indptr, out, sm_scale=sm_scale, lse_log2=lse)
    return out, lse
