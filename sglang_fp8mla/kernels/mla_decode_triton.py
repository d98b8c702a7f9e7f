"""The portable MLA decode kernel: the contract of `mla_decode.cu` in Triton, for SM80 to SM120.

FP8 bytes become fp16 exactly, by the hardware's conversion where there is one (SM89 and newer)
and else by integer arithmetic; 99 KB of shared memory suffice. Imports neither sglang nor
flashinfer.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

CKV_DIM = 512
TILE = 64  # split lengths are multiples of it, as in mla_decode.cu
MAX_SPLITS = 16  # with a fixed split length
_BALANCED_SPLITS = 64
_PROGRAMS_PER_MULTIPROCESSOR = 2
BLOCK_H = 16  # the least M of a tensor-core dot


@triton.jit
def _to_fp16(x, CAST: tl.constexpr, E5M2: tl.constexpr):
    """FP8 to fp16. By bits, e4m3 comes out times 2**-8: fp16's exponent bias is 15, not 7."""
    if CAST:
        y = x.to(tl.float16)
    elif E5M2:
        y = (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    else:
        w = x.to(tl.uint16)
        h = ((w & 0x80) << 8) | ((w & 0x7F) << 7)
        # the only NaN codes are 0x7F and 0xFF
        y = tl.where((w & 0x7F) == 0x7F, 0x7E00, h).to(tl.uint16).to(tl.float16, bitcast=True)
    return y


@triton.jit
def _split_size(length, splits, fixed, ROUND: tl.constexpr):
    """Tokens per split: shared out evenly or `fixed`, never more than `splits` per request."""
    even = tl.cdiv(tl.cdiv(length, splits), ROUND) * ROUND
    return tl.maximum(tl.maximum(even, fixed), 1)


@triton.jit(do_not_specialize=["splits", "fixed", "heads"])
def _decode_kernel(
    q_nope,  # *bf16/f16 [tokens, heads, 512]
    q_pe,  # *bf16/f16 [tokens, heads, 64]
    pool,  # *fp8, or *u8 when not CAST [slots, 512 + KPE]
    kv_indices,  # *i32
    kv_indptr,  # *i32 [bs + 1]
    batch,  # *i32 [1] the batch size
    out,  # *bf16/f16 [tokens, heads, 512]
    lse_log2,  # *f32 [tokens, heads]
    part_out,  # *f32 [tokens, splits, heads, 512]
    part_lse,  # *f32 [tokens, splits, heads]
    scale_log2,  # f32 sm_scale * log2(e), and 2**8 where the bits came out times 2**-8
    v_scale,  # f32 1, or 2**8 likewise
    splits,
    fixed,
    heads,
    stride_qn_t,
    stride_qn_h,
    stride_qp_t,
    stride_qp_h,
    stride_pool,
    stride_out_t,
    stride_out_h,
    stride_lse_t,
    stride_lse_h,
    KPE: tl.constexpr,
    HAS_LSE: tl.constexpr,
    CAST: tl.constexpr,
    E5M2: tl.constexpr,
    ROUND: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """softmax(q . K^T) . K[:, :512] over one split of one request, for BLOCK_H heads.

    A request of one split goes to `out`, else (normalised output, log2 of the sum) goes to the
    parts.
    """
    request = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    if request >= tl.load(batch):
        return
    begin = tl.load(kv_indptr + request)
    length = tl.load(kv_indptr + request + 1) - begin
    size = _split_size(length, splits, fixed, ROUND)
    low = split * size
    high = tl.minimum(length, low + size)
    if low >= high:
        return

    offs_h = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)  # [BLOCK_H]
    mask_h = offs_h < heads
    offs_d = tl.arange(0, 512)
    offs_n = tl.arange(0, BLOCK_N)
    head = offs_h.to(tl.int64)[:, None]
    qn = tl.load(
        q_nope + request * stride_qn_t + head * stride_qn_h + offs_d[None, :],
        mask=mask_h[:, None],
        other=0.0,
    ).to(tl.float32)  # [BLOCK_H, 512]
    top = tl.max(tl.abs(qn), 1)
    if KPE > 0:
        offs_r = tl.arange(0, KPE)
        qp = tl.load(
            q_pe + request * stride_qp_t + head * stride_qp_h + offs_r[None, :],
            mask=mask_h[:, None],
            other=0.0,
        ).to(tl.float32)
        top = tl.maximum(top, tl.max(tl.abs(qp), 1))
    # q times a power of two per head: fp16 then holds bf16's values down to 2**-28 of the largest
    exponent = 14 + 127 - (top.to(tl.int32, bitcast=True) >> 23)
    exponent = tl.where(top > 0, tl.minimum(tl.maximum(exponent, -113), 100), 0)
    up = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    down = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    qn16 = (qn * up[:, None]).to(tl.float16)
    if KPE > 0:
        qp16 = (qp * up[:, None]).to(tl.float16)
    scale = scale_log2 * down  # [BLOCK_H]

    m = tl.full([BLOCK_H], float("-inf"), tl.float32)
    norm = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, 512], tl.float32)
    for start in range(low, high, BLOCK_N):
        mask_n = start + offs_n < high
        slot = tl.load(kv_indices + begin + start + offs_n, mask=mask_n, other=0).to(tl.int64)
        row = pool + slot[:, None] * stride_pool
        k = tl.load(row + offs_d[None, :], mask=mask_n[:, None], other=0.0)
        k16 = _to_fp16(k, CAST, E5M2)  # [BLOCK_N, 512]
        s = tl.dot(qn16, tl.trans(k16), out_dtype=tl.float32)
        if KPE > 0:
            kp = tl.load(row + 512 + offs_r[None, :], mask=mask_n[:, None], other=0.0)
            s += tl.dot(qp16, tl.trans(_to_fp16(kp, CAST, E5M2)), out_dtype=tl.float32)
        s = tl.where(mask_n[None, :], s * scale[:, None], float("-inf"))
        # p up to 2**7 keeps small ones out of fp16's subnormals
        fresh = tl.maximum(m, tl.max(s, 1) - 7.0)
        ref = tl.where(fresh == float("-inf"), 0.0, fresh)
        alpha = tl.where(m == fresh, 1.0, tl.exp2(m - ref))
        p = tl.where(mask_n[None, :], tl.exp2(s - ref[:, None]), 0.0)
        norm = norm * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None] + tl.dot(p.to(tl.float16), k16, out_dtype=tl.float32)
        m = fresh

    inverse = tl.where(norm == 0.0, 0.0, v_scale / norm)
    result = acc * inverse[:, None]
    lse = tl.where(norm == 0.0, float("-inf"), m + tl.log2(norm))
    if size >= length:
        at = out + request * stride_out_t + head * stride_out_h + offs_d[None, :]
        tl.store(at, result.to(out.dtype.element_ty), mask=mask_h[:, None])
        if HAS_LSE:
            tl.store(lse_log2 + request * stride_lse_t + offs_h * stride_lse_h, lse, mask=mask_h)
    else:
        part = (request * splits + split) * heads + offs_h  # [BLOCK_H]
        tl.store(part_out + part[:, None] * 512 + offs_d[None, :], result, mask=mask_h[:, None])
        tl.store(part_lse + part, lse, mask=mask_h)


@triton.jit(do_not_specialize=["splits", "fixed", "heads"])
def _merge_kernel(
    kv_indptr,  # *i32 [bs + 1]
    batch,  # *i32 [1]
    out,  # *bf16/f16 [tokens, heads, 512]
    lse_log2,  # *f32 [tokens, heads]
    part_out,  # *f32 [tokens, splits, heads, 512]
    part_lse,  # *f32 [tokens, splits, heads]
    splits,
    fixed,
    heads,
    stride_out_t,
    stride_out_h,
    stride_lse_t,
    stride_lse_h,
    HAS_LSE: tl.constexpr,
    ROUND: tl.constexpr,
):
    """Merge the splits of one (request, head) in order; an empty request gives 0 and -inf."""
    request = tl.program_id(1).to(tl.int64)
    head = tl.program_id(0)
    length = 0
    if request < tl.load(batch):
        length = tl.load(kv_indptr + request + 1) - tl.load(kv_indptr + request)
    size = _split_size(length, splits, fixed, ROUND)
    if length > 0 and size >= length:
        return  # the decode kernel wrote it
    offs_d = tl.arange(0, 512)
    acc = tl.zeros([512], tl.float32)
    norm = 0.0
    m = float("-inf")
    for split in range(0, tl.cdiv(length, size)):
        part = (request * splits + split) * heads + head
        lse = tl.load(part_lse + part)
        fresh = tl.maximum(m, lse)
        ref = tl.where(fresh == float("-inf"), 0.0, fresh)
        alpha = tl.where(m == fresh, 1.0, tl.exp2(m - ref))
        w = tl.exp2(lse - ref)
        acc = acc * alpha + w * tl.load(part_out + part * 512 + offs_d)
        norm = norm * alpha + w
        m = fresh
    acc = tl.where(norm == 0.0, 0.0, acc / tl.where(norm == 0.0, 1.0, norm))
    at = out + request * stride_out_t + head * stride_out_h + offs_d
    tl.store(at, acc.to(out.dtype.element_ty))
    if HAS_LSE:
        total = tl.where(norm == 0.0, float("-inf"), m + tl.log2(norm))
        tl.store(lse_log2 + request * stride_lse_t + head * stride_lse_h, total)


class TritonDecode:
    """Scratch and launches behind `MlaDecodePlan(backend="triton")`, which checks the arguments."""

    def __init__(
        self,
        *,
        max_bs: int,
        num_heads: int,
        device: torch.device,
        kpe_dim: int,
        pool_dtype: torch.dtype,
        split_len: int | None,
        multiprocessors: int,
    ) -> None:
        self._max_bs = max_bs
        self._heads = num_heads
        self._kpe_dim = kpe_dim
        self._e5m2 = pool_dtype == torch.float8_e5m2
        on_gpu = device.type == "cuda"
        # the interpreter reads e4m3's NaN codes as numbers: there, and below SM89, decode the bits
        self._cast = on_gpu and torch.cuda.get_device_capability(device) >= (8, 9)
        self._fixed = 0 if split_len is None else -(-split_len // TILE) * TILE
        blocks = -(-num_heads // BLOCK_H)
        self._programs = max(1, _PROGRAMS_PER_MULTIPROCESSOR * multiprocessors // blocks)
        parts = max_bs * MAX_SPLITS if self._fixed else self._programs + max_bs
        self._part_out = torch.empty(parts * num_heads, CKV_DIM, device=device)
        self._part_lse = torch.empty(parts * num_heads, device=device)
        self._batch = torch.zeros(1, dtype=torch.int32, device=device)
        self.workspace_bytes = 4 * (parts * num_heads * (CKV_DIM + 1) + 1)

    def plan(self, bs: int) -> None:
        """Keep the batch size on the device; lengths are read there by every launch."""
        self._batch.fill_(bs)

    def splits(self, tokens: int) -> int:
        """Programs per (request, head block), from the number of rows alone."""
        if self._fixed:
            return MAX_SPLITS
        if tokens > self._max_bs:
            return 1
        return max(1, min(_BALANCED_SPLITS, self._programs // tokens))

    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor | None,
        pool: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_indptr: torch.Tensor,
        out: torch.Tensor,
        sm_scale: float,
        lse_log2: torch.Tensor | None,
    ) -> None:
        tokens = q_nope.shape[0]
        splits = self.splits(tokens)
        bias = 1.0 if self._cast or self._e5m2 else 256.0
        pe = q_nope if q_pe is None else q_pe
        lse = self._part_lse.view(1, -1) if lse_log2 is None else lse_log2
        shared: dict[str, Any] = {"HAS_LSE": lse_log2 is not None, "ROUND": TILE}
        _decode_kernel[(-(-self._heads // BLOCK_H), tokens, splits)](
            q_nope,
            pe,
            pool if self._cast else pool.view(torch.uint8),
            kv_indices,
            kv_indptr,
            self._batch,
            out,
            lse,
            self._part_out,
            self._part_lse,
            sm_scale * math.log2(math.e) * bias,
            bias,
            splits,
            self._fixed,
            self._heads,
            q_nope.stride(0),
            q_nope.stride(1),
            pe.stride(0),
            pe.stride(1),
            pool.stride(0),
            out.stride(0),
            out.stride(1),
            lse.stride(0),
            lse.stride(1),
            KPE=self._kpe_dim,
            CAST=self._cast,
            E5M2=self._e5m2,
            BLOCK_H=BLOCK_H,
            BLOCK_N=32,
            num_warps=4,
            num_stages=1,
            **shared,
        )
        _merge_kernel[(self._heads, tokens)](
            kv_indptr,
            self._batch,
            out,
            lse,
            self._part_out,
            self._part_lse,
            splits,
            self._fixed,
            self._heads,
            out.stride(0),
            out.stride(1),
            lse.stride(0),
            lse.stride(1),
            num_warps=4,
            **shared,
        )
