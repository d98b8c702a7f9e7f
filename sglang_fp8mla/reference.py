"""Float64 oracles: what attention over an FP8 pool means, with no word about speed.

They run on the CPU, on dequantised values: the loss of FP8 itself is not their subject.
"""

from __future__ import annotations

import math

import torch


def ref_rows(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The rows of `pool` at `slots`, in float64 on the CPU.

    Args:
        pool: [num_slots, 1, dim] or [num_slots, dim], any float dtype, FP8 included.
        slots: [n] integer.

    Returns:
        [n, dim] float64.
    """
    rows = pool.reshape(pool.shape[0], -1)
    # FP8 rows are indexed as bytes: indexing FP8 itself is not implemented on every device
    if rows.dtype.itemsize == 1:
        picked = rows.view(torch.uint8)[slots.long().to(rows.device)].cpu().view(rows.dtype)
        return picked.float().double()
    return rows[slots.long().to(rows.device)].cpu().double()


def ref_mla(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor | None,
    pool: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    *,
    sm_scale: float,
    qo_indptr: torch.Tensor | None = None,
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Absorbed MLA: softmax(q · [ckv, kpe]^T · sm_scale) · ckv, request by request.

    Args:
        q_nope: [num_tokens, num_heads, ckv].
        q_pe: [num_tokens, num_heads, kpe], or None where the model has no rope part.
        pool: [num_slots, 1, ckv + kpe], FP8 or wider.
        kv_indices: [>= kv_indptr[-1]] integer, slots in request order.
        kv_indptr: [bs + 1] integer, prefix sum of kv lengths (tokens).
        sm_scale: the softmax scale.
        qo_indptr: [bs + 1] integer, prefix sum of query lengths; one query a request when None.
        causal: query i of n sees the first kv_len - n + i + 1 keys, as FlashInfer aligns them.

    Returns:
        out [num_tokens, num_heads, ckv] float64 and lse_log2 [num_tokens, num_heads] float64. A
        query that sees no key gives 0 and -inf.
    """
    num_tokens, num_heads, ckv = q_nope.shape
    q = q_nope if q_pe is None else torch.cat([q_nope, q_pe], dim=-1)
    q = q.detach().cpu().double()
    starts = kv_indptr.tolist()
    q_starts = list(range(len(starts))) if qo_indptr is None else qo_indptr.tolist()
    out = torch.zeros(num_tokens, num_heads, ckv, dtype=torch.float64)
    lse_log2 = torch.full((num_tokens, num_heads), -torch.inf, dtype=torch.float64)
    for request in range(len(starts) - 1):
        begin, end = starts[request], starts[request + 1]
        q_begin, q_end = q_starts[request], q_starts[request + 1]
        rows = ref_rows(pool, kv_indices[begin:end])
        for token in range(q_begin, q_end):
            seen = end - begin - (q_end - 1 - token) if causal else end - begin
            if seen <= 0:
                continue
            keys = rows[:seen, : q.shape[-1]]
            logits = q[token] @ keys.T * sm_scale  # [num_heads, seen]
            out[token] = torch.softmax(logits, dim=-1) @ keys[:, :ckv]
            lse_log2[token] = torch.logsumexp(logits, dim=-1) / math.log(2)
    return out, lse_log2
