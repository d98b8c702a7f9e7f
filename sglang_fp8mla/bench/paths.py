"""Every way to attend over an FP8 pool, each as the same three calls: per step, per layer, result.

Each builder raises when its path is not to be had here; the caller makes a row of that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import IncompatibleEnvironment
from .cases import CKV, KPE, PAGE
from .operands import SM_SCALE, Operands


def _nothing() -> None:
    """A path that prepares nothing per step."""


@dataclass
class Path:
    """`step()` runs once per forward, `layer(i)` per layer; `result()` is the last layer's.

    `exact`: computes with stock's own numbers, so its output must equal stock's to the last bit.
    """

    name: str
    layer: Callable[[int], None]
    result: Callable[[], torch.Tensor]
    step: Callable[[], None] = _nothing
    exact: bool = False
    # of ||out - ref|| / ||ref||; None: the probe's
    tolerance: float | None = None
    note: str = ""


class FlashInferAttention:
    """FlashInfer's MLA wrapper over slots of a pool, planned as SGLang plans a captured decode.

    `kv_indices` is the buffer that the captured kernel reads.
    """

    def __init__(self, op: Operands, kv_dtype: torch.dtype, backend: str = "auto") -> None:
        from flashinfer import BatchMLAPagedAttentionWrapper

        from ..probe import pad_heads, plan_heads

        case = op.case
        heads = plan_heads(case.num_heads) if case.causal else case.num_heads
        self._op, self._fp8 = op, kv_dtype == torch.float8_e4m3fn
        self._q_nope, self._q_pe, self._out = op.q_nope, op.q_pe, op.out
        if heads != case.num_heads:
            self._q_nope = pad_heads(op.q_nope, heads)
            self._q_pe = pad_heads(op.q_pe, heads)
            self._out = torch.empty_like(self._q_nope)
        self.kv_indices = torch.empty_like(op.kv_indices)
        scratch = torch.empty(256 << 20, dtype=torch.uint8, device=op.device)
        self._wrapper = BatchMLAPagedAttentionWrapper(
            scratch,
            backend=backend,
            use_cuda_graph=True,
            qo_indptr=torch.empty_like(op.qo_indptr),
            kv_indptr=torch.empty_like(op.kv_indptr),
            kv_indices=self.kv_indices,
            kv_len_arr=torch.empty_like(op.kv_lens),
        )
        self._wrapper.plan(
            op.qo_indptr,
            op.kv_indptr,
            op.kv_indices,
            op.kv_lens,
            heads,
            CKV,
            KPE,
            1,
            case.causal,
            SM_SCALE,
            torch.bfloat16,
            kv_dtype,
        )

    def run(self, rows: torch.Tensor) -> None:
        """Attend over `rows` [pool, 1, 576] of the planned dtype, into the operands' `out`."""
        scales = {"ckv_scale": 1.0, "kpe_scale": 1.0} if self._fp8 else {}
        self._wrapper.run(
            self._q_nope, self._q_pe, rows[..., :CKV], rows[..., CKV:], out=self._out, **scales
        )

    def result(self) -> torch.Tensor:
        return self._out[:, : self._op.case.num_heads]


class TorchAttention:
    """Stands in for FlashInfer's 16-bit kernel where there is no GPU; its times mean nothing."""

    def __init__(self, op: Operands, kv_dtype: torch.dtype) -> None:
        if kv_dtype != torch.bfloat16:
            raise IncompatibleEnvironment("needs a GPU: FlashInfer's FP8 kernel has no CPU form")
        self._op = op
        self.kv_indices = op.kv_indices.clone()

    def run(self, rows: torch.Tensor) -> None:
        op, case = self._op, self._op.case
        for request in range(case.bs):
            begin = request * case.kv_len
            slots = self.kv_indices[begin : begin + case.kv_len].long()
            keys = rows[slots, 0].float()
            tokens = slice(request * case.q_len, (request + 1) * case.q_len)
            logits = torch.einsum("thd,kd->thk", op.q[tokens].float(), keys) * SM_SCALE
            if case.causal:
                last = torch.arange(case.kv_len - case.q_len, case.kv_len)
                hidden = torch.arange(case.kv_len)[None, :] > last[:, None]
                logits.masked_fill_(hidden[:, None, :], -torch.inf)
            probabilities = torch.softmax(logits, dim=-1)
            op.out[tokens] = torch.einsum("thk,kd->thd", probabilities, keys[:, :CKV]).to(
                torch.bfloat16
            )

    def result(self) -> torch.Tensor:
        return self._op.out


def _attention(op: Operands, kv_dtype: torch.dtype, backend: str = "auto") -> Any:
    if op.device.type == "cpu":
        return TorchAttention(op, kv_dtype)
    return FlashInferAttention(op, kv_dtype, backend)


def build_stock(op: Operands) -> Path:
    """What stock does on every layer: cast the whole pool, then the 16-bit kernel."""
    attention = _attention(op, torch.bfloat16)
    return Path(
        "stock",
        lambda i: attention.run(op.pools[i].to(torch.bfloat16)),
        attention.result,
        exact=True,
    )


def build_gather_cast(op: Operands) -> Path:
    """Ours: list the live slots once per step, cast them per layer, then the 16-bit kernel."""
    from ..workspace import LiveSlots, Workspace

    live = LiveSlots(op.case.pool, op.device)
    workspace = Workspace(op.case.pool, CKV + KPE, torch.bfloat16, op.device)
    # rows that are not live must never be read
    workspace.rows.fill_(torch.nan)
    attention = _attention(op, torch.bfloat16)

    def step() -> None:
        attention.kv_indices.copy_(op.kv_indices)
        live.update(
            attention.kv_indices, op.kv_indptr, op.case.bs, q_rows=op.case.num_heads, in_place=True
        )

    step()
    return Path(
        "gather_cast",
        lambda i: attention.run(workspace.fill(op.pools[i], live)),
        attention.result,
        step=step,
        exact=True,
    )


def build_native(op: Operands) -> Path:
    """FlashInfer's kernel that reads FP8 in place; of its two builds the one it picks itself."""
    attention = _attention(op, torch.float8_e4m3fn)
    return Path("native", lambda i: attention.run(op.pools[i]), attention.result)


def build_fused(op: Operands) -> Path:
    """Our own decode kernel, reading FP8 in place."""
    if op.case.causal:
        raise IncompatibleEnvironment("decode only: one query token per request")
    from ..kernels.mla_decode import MlaDecodePlan

    plan = MlaDecodePlan(
        max_bs=op.case.bs,
        num_heads=op.case.num_heads,
        device=op.device,
        q_dtype=torch.bfloat16,
        pool_dtype=torch.float8_e4m3fn,
    )
    plan.plan(op.kv_indptr, op.case.bs)

    def layer(i: int) -> None:
        plan.run(
            op.q_nope,
            op.q_pe,
            op.pools[i],
            op.kv_indices,
            op.kv_indptr,
            op.out,
            sm_scale=SM_SCALE,
        )

    return Path(
        "fused",
        layer,
        lambda: op.out,
        step=lambda: plan.plan(op.kv_indptr, op.case.bs),
        note=plan.backend,
    )


def build_bf16(op: Operands) -> Path:
    """A 16-bit pool of the same size: twice the memory, and what an FP8 user gave up."""
    rows = [pool.to(torch.bfloat16) for pool in op.pools]
    attention = _attention(op, torch.bfloat16)
    return Path("bf16", lambda i: attention.run(rows[i]), attention.result, exact=True)


# an e4m3 query has 3 mantissa bits: errors up to 2**-4 of each value, which the softmax passes on
_FP8_QUERY = 2.0**-4


def build_sglang_triton(op: Operands) -> Path:
    """Peer: SGLang's triton decode kernel, which casts the query to FP8."""
    if op.case.causal:
        raise IncompatibleEnvironment("decode only")
    _require_gpu(op)
    from sglang.kernels.ops.attention import decode_attention

    bs, heads = op.case.bs, op.case.num_heads
    # SGLang's default (triton_attention_num_kv_splits) is 8; a few requests are faster with more:
    # two programs per multiprocessor of an H200, of 16 heads each, and a page at least
    wanted = 2 * 132 // (bs * -(-heads // 16))
    splits = max(8, min(64, 1 << max(0, wanted - 1).bit_length(), op.case.kv_len // PAGE))
    logits = torch.empty(bs, heads, splits, CKV, dtype=torch.float32, device=op.device)
    lse = torch.empty(bs, heads, splits, dtype=torch.float32, device=op.device)
    num_splits = torch.full((bs,), splits, dtype=torch.int32, device=op.device)

    def layer(i: int) -> None:
        decode_attention.decode_attention_fwd(
            op.q,
            op.pools[i],
            op.pools[i][..., :CKV],
            op.out,
            op.kv_indptr,
            op.kv_indices,
            logits,
            lse,
            num_splits,
            splits,
            SM_SCALE,
            1.0,
            1.0,
            has_mla=True,
        )

    note = f"q in FP8, {splits} splits"
    return Path("sglang_triton", layer, lambda: op.out, tolerance=_FP8_QUERY, note=note)


def build_flashmla(op: Operands) -> Path:
    """Peer: FlashMLA's dense FP8 kernel (page 64), which takes the query in FP8."""
    if op.case.causal:
        raise IncompatibleEnvironment("decode only")
    _require_gpu(op)
    from sgl_kernel import flash_mla  # type: ignore[import-untyped]

    bs, heads = op.case.bs, op.case.num_heads
    q = op.q.to(torch.float8_e4m3fn).view(bs, 1, heads, CKV + KPE)
    one = torch.ones(1, device=op.device)
    metadata, num_splits = flash_mla.get_mla_metadata(op.kv_lens, heads, 1, is_fp8_kvcache=True)
    kept: dict[str, torch.Tensor] = {}

    def layer(i: int) -> None:
        kept["out"] = flash_mla.flash_mla_with_kvcache(
            q=q,
            k_cache=op.pools[i].view(-1, PAGE, 1, CKV + KPE),
            block_table=op.page_table,
            cache_seqlens=op.kv_lens,
            head_dim_v=CKV,
            tile_scheduler_metadata=metadata,
            num_splits=num_splits,
            softmax_scale=SM_SCALE,
            causal=True,
            descale_q=one,
            descale_k=one,
        )[0]

    return Path(
        "flashmla",
        layer,
        lambda: kept["out"].view(bs, heads, CKV),
        tolerance=_FP8_QUERY,
        note="q in FP8, page 64",
    )


def _require_gpu(op: Operands) -> None:
    if op.device.type != "cuda":
        raise IncompatibleEnvironment("needs a GPU")


BUILDERS: dict[str, Callable[[Operands], Path]] = {
    "stock": build_stock,
    "gather_cast": build_gather_cast,
    "native": build_native,
    "fused": build_fused,
    "bf16": build_bf16,
    "sglang_triton": build_sglang_triton,
    "flashmla": build_flashmla,
}
OURS = ("gather_cast", "native", "fused")
