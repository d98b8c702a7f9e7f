"""The tensors of a case: shuffled slots, poison in every row that nobody may read, strided views.

Imports torch; the operands lie on one device and are made there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .cases import CKV, DIM, PAGE, Case

# the NaN code of e4m3: a row that is read by mistake shows in the output
_POISON = 0x7F
# of the models named here: (qk_nope_head_dim + qk_rope_head_dim) ** -0.5, before absorption
SM_SCALE = 192**-0.5


@dataclass
class Operands:
    """One batch and `len(pools)` layers of it.

    q: [bs * q_len, num_heads, 576] bfloat16, the two halves are views of it.
    pools: per layer [pool, 1, 576] float8_e4m3fn; the same slots are live in each, other values.
    kv_indices: [nnz] int32 in request order; pages of 64 slots lie together, in shuffled order.
    page_table: [bs, kv_len / 64] int32, the same as pages.
    out: [bs * q_len, num_heads, 512] bfloat16.
    """

    case: Case
    q: torch.Tensor
    pools: list[torch.Tensor]
    kv_indices: torch.Tensor
    kv_indptr: torch.Tensor
    kv_lens: torch.Tensor
    qo_indptr: torch.Tensor
    page_table: torch.Tensor
    out: torch.Tensor

    @property
    def q_nope(self) -> torch.Tensor:
        return self.q[..., :CKV]

    @property
    def q_pe(self) -> torch.Tensor:
        return self.q[..., CKV:]

    @property
    def device(self) -> torch.device:
        return self.q.device


def make_operands(case: Case, device: torch.device, num_layers: int, seed: int = 0) -> Operands:
    """Random operands of a case, the same for the same seed and device type."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32)

    pages_each = case.kv_len // PAGE
    shared, own = case.shared // PAGE, (case.kv_len - case.shared) // PAGE
    # page 0 holds slot 0, SGLang's padding: no request owns it
    free = torch.randperm(case.pool // PAGE - 1, generator=generator, device=device) + 1
    table = torch.empty(case.bs, pages_each, dtype=torch.int64, device=device)
    table[:, :shared] = free[:shared]
    table[:, shared:] = free[shared : shared + case.bs * own].view(case.bs, own)
    offsets = torch.arange(PAGE, device=device)
    slots = (table[:, :, None] * PAGE + offsets).reshape(-1)
    live = torch.unique(slots)
    pools = []
    for _ in range(num_layers):
        codes = torch.full((case.pool, 1, DIM), _POISON, dtype=torch.uint8, device=device)
        _fill_rows(codes, live, random)
        pools.append(codes.view(torch.float8_e4m3fn))
    starts = torch.arange(case.bs + 1, dtype=torch.int32, device=device)
    num_tokens = case.bs * case.q_len
    return Operands(
        case=case,
        q=(random(num_tokens, case.num_heads, DIM) * 0.3).to(torch.bfloat16),
        pools=pools,
        kv_indices=slots.to(torch.int32),
        kv_indptr=starts * case.kv_len,
        kv_lens=torch.full((case.bs,), case.kv_len, dtype=torch.int32, device=device),
        qo_indptr=starts * case.q_len,
        page_table=table.to(torch.int32),
        out=torch.full(
            (num_tokens, case.num_heads, CKV), torch.nan, dtype=torch.bfloat16, device=device
        ),
    )


def _fill_rows(
    codes: torch.Tensor, slots: torch.Tensor, random: Callable[..., torch.Tensor]
) -> None:
    """Write random values to the rows at `slots`, some 150 MB of float32 at a time."""
    step = 65_536
    for begin in range(0, slots.numel(), step):
        part = slots[begin : begin + step]
        rows = random(part.numel(), 1, DIM).to(torch.float8_e4m3fn)
        codes[part] = rows.view(torch.uint8)
