"""The only fakes with which SGLang's MLA code runs on the CPU: FlashInfer's kernels, CUDA's memory.

Two stand-ins for FlashInfer. `ReferenceMLAWrapper` keeps the plan/run contract for any dimensions
and for float32 too. `hopper()` runs FlashInfer's own wrapper, with its real checks, over a torch
module in place of the compiled one, as if on an H200. Both compute in float64 and read no row that
the plan does not name.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from contract.scene import fp8_values, ref_attention

# FlashInfer's dequantiser knows no NaN: 0x7F and 0xFF read as +-480
_E4M3_NAN_CODE_VALUE = 480.0


class CpuTorch:
    """torch for a module that names "cuda" and pinned memory: it allocates plain host memory."""

    _ALLOCATORS: ClassVar[set[str]] = {"empty", "zeros", "ones", "full", "arange", "tensor"}

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        if name not in self._ALLOCATORS:
            return value

        def allocate(*args: Any, **kwargs: Any) -> torch.Tensor:
            kwargs.pop("pin_memory", None)
            if str(kwargs.get("device", "cpu")).startswith("cuda"):
                kwargs["device"] = "cpu"
            tensor: torch.Tensor = value(*args, **kwargs)
            return tensor

        return allocate


def _dequantise(rows: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """FP8 rows as FlashInfer's kernel sees them: exact, times the scale, in q's dtype."""
    if rows.dtype == dtype:
        return rows
    values = fp8_values(rows.dtype)[rows.contiguous().view(torch.uint8).long()]
    values = torch.nan_to_num(values, nan=_E4M3_NAN_CODE_VALUE)
    return (values * scale).to(dtype)


def paged_mla(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    *,
    qo_indptr: list[int],
    kv_indptr: list[int],
    kv_lens: list[int],
    kv_indices: torch.Tensor,
    causal: bool,
    sm_scale: float,
    out: torch.Tensor,
    lse_log2: torch.Tensor | None = None,
    ckv_scale: float = 1.0,
    kpe_scale: float = 1.0,
) -> None:
    """Absorbed MLA over pages of one token, in float64, rounded once.

    Rows of `out` at or past qo_indptr[-1] keep their contents.
    """
    ckv = q_nope.shape[-1]
    for r, kv_len in enumerate(kv_lens):
        begin, end = qo_indptr[r], qo_indptr[r + 1]
        slots = kv_indices[kv_indptr[r] : kv_indptr[r] + kv_len].long()
        latent = _dequantise(ckv_cache[slots, 0], ckv_scale, q_nope.dtype).double()
        rope = _dequantise(kpe_cache[slots, 0], kpe_scale, q_nope.dtype).double()
        keys = torch.cat([latent, rope], dim=-1)
        q = torch.cat([q_nope[begin:end], q_pe[begin:end]], dim=-1)
        result, lse = ref_attention(q, keys, ckv=ckv, sm_scale=sm_scale, causal=causal)
        out[begin:end] = result.to(out.dtype)
        if lse_log2 is not None:
            lse_log2[begin:end] = lse


class ReferenceModule:
    """FlashInfer's compiled module: `plan` leaves a schedule by the int workspace for `run`."""

    def __init__(self) -> None:
        self._schedules: dict[int, tuple[list[int], list[int], list[int], bool]] = {}

    def plan(
        self,
        float_workspace: torch.Tensor,
        int_workspace: torch.Tensor,
        pinned_workspace: torch.Tensor,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_o: int,
        causal: bool,
    ) -> list[int]:
        for name, tensor in (
            ("qo_indptr", qo_indptr),
            ("kv_indptr", kv_indptr),
            ("kv_len_arr", kv_len_arr),
        ):
            if tensor.device.type != "cpu" or tensor.dtype != torch.int32:
                raise ValueError(
                    f"plan: {name} must be int32 on the host, got {tensor.dtype} on {tensor.device}"
                )
        schedule = (qo_indptr.tolist(), kv_indptr.tolist(), kv_len_arr.tolist(), causal)
        self._schedules[int_workspace.data_ptr()] = schedule
        return [num_heads, head_dim_o]

    def run(
        self,
        float_workspace: torch.Tensor,
        int_workspace: torch.Tensor,
        plan_info: list[int],
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv_cache: torch.Tensor,
        kpe_cache: torch.Tensor,
        kv_indices: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        mask_mode: int,
        num_heads: int,
        page_size: int,
        sm_scale: float,
        return_lse_base_on_e: bool,
        ckv_scale: float = 1.0,
        kpe_scale: float = 1.0,
        ckv_scale_arr: torch.Tensor | None = None,
        *profiler: Any,
    ) -> None:
        assert page_size == 1
        assert ckv_scale_arr is None
        assert not return_lse_base_on_e
        qo_indptr, kv_indptr, kv_lens, _ = self._schedules[int_workspace.data_ptr()]
        assert num_heads == plan_info[0] == q_nope.shape[1]
        paged_mla(
            q_nope,
            q_pe,
            ckv_cache,
            kpe_cache,
            qo_indptr=qo_indptr,
            kv_indptr=kv_indptr,
            kv_lens=kv_lens,
            kv_indices=kv_indices,
            causal=mask_mode == 1,
            sm_scale=sm_scale,
            out=out,
            lse_log2=lse,
            ckv_scale=ckv_scale,
            kpe_scale=kpe_scale,
        )


class ReferenceMLAWrapper:
    """BatchMLAPagedAttentionWrapper's contract over `ReferenceModule`, for any dimensions.

    Refuses what FlashInfer refuses: metadata that is not int32 or does not agree, empty batches,
    FP8 other than e4m3, scales missing from an FP8 run or given to another, a dtype at run that
    differs from the plan's, a graph batch that does not fit the reserved buffers. Adds float32.
    `created` collects every wrapper for tests that look at the plans.
    """

    created: ClassVar[list[ReferenceMLAWrapper]] = []

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        self.device = float_workspace_buffer.device
        self._float_workspace_buffer = float_workspace_buffer
        self._int_workspace_buffer = torch.empty(16, dtype=torch.uint8)
        self._pin_memory_int_workspace_buffer = torch.empty(16, dtype=torch.uint8)
        self._use_cuda_graph = use_cuda_graph
        self._qo_indptr_buf = qo_indptr
        self._kv_indptr_buf = kv_indptr
        self._kv_indices_buf = kv_indices
        self._kv_len_arr_buf = kv_len_arr
        self._backend = backend
        self._planned = False
        self.runs: list[dict[str, Any]] = []
        self.created.append(self)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        use_profiler: bool = False,
        **options: Any,
    ) -> None:
        named = (
            ("qo_indptr", qo_indptr),
            ("kv_indptr", kv_indptr),
            ("kv_indices", kv_indices),
            ("kv_len_arr", kv_len_arr),
        )
        for name, tensor in named:
            if tensor.dtype != torch.int32:
                raise ValueError(f"{name} must have dtype torch.int32, got {tensor.dtype}.")
        if page_size != 1:
            raise ValueError(f"page_size must be 1 as SGLang plans it, got {page_size}.")
        bs = kv_len_arr.numel()
        if bs == 0:
            raise ValueError("FA MLA native planning requires a nonempty batch.")
        if qo_indptr.numel() != bs + 1 or kv_indptr.numel() != bs + 1:
            raise ValueError("CSR metadata batch dimensions must agree.")
        lens = (kv_indptr[1:] - kv_indptr[:-1]).cpu()
        if not torch.equal(lens, kv_len_arr.cpu()):
            raise ValueError("CSR metadata page counts in kv_indptr must equal kv_len_arr.")
        if int(kv_indptr[-1]) > kv_indices.numel():
            raise ValueError("kv_indices metadata is shorter than kv_indptr[-1].")
        if kv_data_type == torch.float8_e4m3fn:
            if q_data_type != torch.bfloat16:
                raise ValueError(
                    f"FP8 kv_data_type needs q_data_type=torch.bfloat16, got {q_data_type}."
                )
        elif kv_data_type != q_data_type:
            raise ValueError(
                f"KV dtype must match query dtype, got {kv_data_type} and {q_data_type}."
            )
        if self._use_cuda_graph:
            self._stage(qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        else:
            self._qo_indptr_buf = qo_indptr
            self._kv_indptr_buf = kv_indptr
            self._kv_indices_buf = kv_indices
            self._kv_len_arr_buf = kv_len_arr
        self._cached_module = ReferenceModule()
        self._plan_info = self._cached_module.plan(
            self._float_workspace_buffer,
            self._int_workspace_buffer,
            self._pin_memory_int_workspace_buffer,
            qo_indptr.cpu(),
            kv_indptr.cpu(),
            kv_len_arr.cpu(),
            num_heads,
            head_dim_ckv,
            causal,
        )
        self._causal, self._page_size, self._sm_scale = causal, page_size, sm_scale
        self._widths = (head_dim_ckv, head_dim_kpe)
        self._q_data_type, self._kv_data_type = q_data_type, kv_data_type
        self._planned = True

    def _stage(self, *sources: torch.Tensor) -> None:
        buffers = (
            self._qo_indptr_buf,
            self._kv_indptr_buf,
            self._kv_indices_buf,
            self._kv_len_arr_buf,
        )
        for i, (buffer, source) in enumerate(zip(buffers, sources)):
            if buffer is None:
                raise ValueError("CUDA graph mode requires reserved buffers.")
            larger_ok = i == 2
            if buffer.numel() < source.numel() or (not larger_ok and buffer.shape != source.shape):
                raise ValueError(
                    f"CUDA graph buffer of {buffer.numel()} entries, {source.numel()} planned."
                )
            buffer[: source.numel()].copy_(source)

    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv_cache: torch.Tensor,
        kpe_cache: torch.Tensor,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        *,
        return_lse_base_on_e: bool = False,
        ckv_scale: float | None = None,
        ckv_scale_arr: torch.Tensor | None = None,
        kpe_scale: float | None = None,
    ) -> Any:
        if not self._planned:
            raise RuntimeError("BatchMLAPagedAttentionWrapper.run() called before plan().")
        for name, tensor, planned in (
            ("q_nope", q_nope, self._q_data_type),
            ("q_pe", q_pe, self._q_data_type),
            ("ckv_cache", ckv_cache, self._kv_data_type),
            ("kpe_cache", kpe_cache, self._kv_data_type),
        ):
            if tensor.dtype != planned:
                raise ValueError(
                    f"{name}.dtype={tensor.dtype} does not match the planned {planned}."
                )
            if tensor.ndim != 3:
                raise ValueError(f"split {name} must have rank 3, got {tensor.ndim}.")
        for left, right, name in ((q_nope, q_pe, "query"), (ckv_cache, kpe_cache, "KV cache")):
            if (left.shape[-1], right.shape[-1]) != self._widths:
                raise ValueError(f"split {name} last dimensions do not match planned widths.")
        scales = (ckv_scale, kpe_scale)
        if self._kv_data_type == torch.float8_e4m3fn:
            if (ckv_scale is None) == (ckv_scale_arr is None) or kpe_scale is None:
                raise ValueError(
                    "FP8 KV needs kpe_scale and exactly one of ckv_scale or ckv_scale_arr."
                )
            for scale in scales:
                if scale is not None and not (math.isfinite(scale) and scale > 0):
                    raise ValueError(f"scales must be finite and positive, got {scale}")
        elif any(s is not None for s in scales) or ckv_scale_arr is not None:
            raise ValueError(
                "ckv_scale / ckv_scale_arr / kpe_scale are only valid when kv_data_type is FP8."
            )
        if out is None:
            out = torch.full_like(q_nope, math.nan)
        elif out.shape != q_nope.shape or out.dtype != q_nope.dtype:
            raise ValueError(f"out must be {tuple(q_nope.shape)}, got {tuple(out.shape)}.")
        if return_lse and lse is None:
            lse = torch.full(q_nope.shape[:2], math.nan, dtype=torch.float32)
        assert self._kv_indices_buf is not None
        self.runs.append({"ckv_cache": ckv_cache, "kpe_cache": kpe_cache, "scales": scales})
        self._cached_module.run(
            self._float_workspace_buffer,
            self._int_workspace_buffer,
            self._plan_info,
            q_nope,
            q_pe,
            ckv_cache,
            kpe_cache,
            self._kv_indices_buf,
            out,
            lse,
            int(self._causal),
            q_nope.shape[1],
            self._page_size,
            self._sm_scale,
            return_lse_base_on_e,
            1.0 if ckv_scale is None else float(ckv_scale),
            1.0 if kpe_scale is None else float(kpe_scale),
            ckv_scale_arr,
        )
        return (out, lse) if return_lse else out


class ReferenceRaggedWrapper:
    """BatchPrefillWithRaggedKVCacheWrapper as SGLang's MLA prefill uses it, in float64."""

    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", **options: Any
    ) -> None:
        assert kv_layout == "NHD"
        self._plan: dict[str, Any] | None = None

    def begin_forward(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int,
        q_data_type: torch.dtype,
        causal: bool,
        **options: Any,
    ) -> None:
        self._plan = {
            "qo": qo_indptr.tolist(),
            "kv": kv_indptr.tolist(),
            "heads": (num_qo_heads, num_kv_heads),
            "widths": (head_dim_qk, head_dim_vo),
            "dtype": q_data_type,
        }

    plan = begin_forward

    def forward_return_lse(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool,
        sm_scale: float,
        logits_soft_cap: float = 0.0,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._plan is not None, "run before plan"
        if (k.shape[-1], v.shape[-1]) != self._plan["widths"] or q.dtype != self._plan["dtype"]:
            raise ValueError("ragged prefill: widths or dtype do not match the plan.")
        assert not logits_soft_cap
        out = torch.full((*q.shape[:2], v.shape[-1]), math.nan, dtype=q.dtype)
        lse_log2 = torch.full(q.shape[:2], math.nan, dtype=torch.float32)
        group = q.shape[1] // k.shape[1]
        qo, kv = self._plan["qo"], self._plan["kv"]
        for r in range(len(qo) - 1):
            q_len, kv_len = qo[r + 1] - qo[r], kv[r + 1] - kv[r]
            keys = k[kv[r] : kv[r + 1]].double().repeat_interleave(group, 1)
            values = v[kv[r] : kv[r + 1]].double().repeat_interleave(group, 1)
            for i in range(q_len):
                seen = kv_len - q_len + i + 1 if causal else kv_len
                at = qo[r] + i
                if seen <= 0:
                    out[at], lse_log2[at] = 0, -math.inf
                    continue
                logits = torch.einsum("hd,khd->hk", q[at].double(), keys[:seen]) * sm_scale
                out[at] = torch.einsum("hk,khd->hd", torch.softmax(logits, -1), values[:seen]).to(
                    q.dtype
                )
                lse_log2[at] = torch.logsumexp(logits, -1) / math.log(2)
        return out, lse_log2

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.forward_return_lse(*args, **kwargs)[0]


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """The tensors here are small: a second thread only spins, for a third of the time of a run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def reference_flashinfer() -> Iterator[pytest.MonkeyPatch]:
    """SGLang's FlashInfer MLA module on the CPU, over the reference wrappers."""
    import flashinfer
    import sglang.srt.layers.attention.flashinfer_mla_backend as stock

    ReferenceMLAWrapper.created.clear()
    with _one_thread(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(flashinfer, "BatchMLAPagedAttentionWrapper", ReferenceMLAWrapper)
        patch.setattr(stock, "torch", CpuTorch())
        patch.setattr(stock, "BatchMLAPagedAttentionWrapper", ReferenceMLAWrapper, raising=False)
        patch.setattr(
            stock, "BatchPrefillWithRaggedKVCacheWrapper", ReferenceRaggedWrapper, raising=False
        )
        yield patch


@contextlib.contextmanager
def hopper(major: int = 9, minor: int = 0) -> Iterator[pytest.MonkeyPatch]:
    """SGLang over FlashInfer's own MLA wrapper: its Python runs whole, only the kernel is torch.

    The device looks like an H200 (132 SMs, 228 KiB of shared memory each) of the given capability.
    """
    import sglang.srt.layers.attention.flashinfer_mla_backend as stock
    from flashinfer.mla import BatchMLAPagedAttentionWrapper
    from flashinfer.mla._batch_mla import _auto_policy, _backends, _wrapper
    from flashinfer.mla._batch_mla._backends import _fa_common, fa2_backend, fa3_backend

    module = ReferenceModule()

    def capability(_device: Any) -> tuple[int, int]:
        return major, minor

    with _one_thread(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(stock, "torch", CpuTorch())
        patch.setattr(
            stock, "BatchMLAPagedAttentionWrapper", BatchMLAPagedAttentionWrapper, raising=False
        )
        patch.setattr(
            stock, "BatchPrefillWithRaggedKVCacheWrapper", ReferenceRaggedWrapper, raising=False
        )
        for name in dir(_backends):
            if hasattr(getattr(_backends, name), "get_compute_capability"):
                patch.setattr(getattr(_backends, name), "get_compute_capability", capability)
        patch.setattr(_wrapper, "get_compute_capability", capability)
        patch.setattr(_auto_policy, "_get_compute_capability", capability)
        patch.setattr(_auto_policy, "is_sm90a_supported", lambda _device: major == 9)
        patch.setattr(
            _auto_policy, "is_sm120a_supported", lambda _device: (major, minor) == (12, 0)
        )
        patch.setattr(
            _auto_policy, "is_sm121a_supported", lambda _device: (major, minor) == (12, 1)
        )
        patch.setattr(_fa_common, "torch", CpuTorch())
        patch.setattr(_fa_common, "is_sm90a_supported", lambda _device: major == 9)
        patch.setattr(_fa_common, "get_device_sm_count", lambda _device: 132)
        patch.setattr(_fa_common, "_get_fa_shared_memory_limits", lambda _device: (233472, 232448))
        for backend in (fa2_backend, fa3_backend):
            patch.setattr(backend, "get_batch_mla_module", lambda *_args: module)
        yield patch
