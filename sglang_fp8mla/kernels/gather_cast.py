"""Cast the FP8 rows that live requests reference, and no others.

`list_live_slots` runs once per step and names each distinct slot once, so a prefix that many
requests share is moved once; `gather_cast` runs once per layer over that list, and packs the rows
in its order, since scattered writes cost a tenth more. Both read their counts on the device: a
captured CUDA graph replays with a new batch, with no sync and no allocation. The cost follows the
distinct live slots, never the size of the pool.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ..errors import InvalidArgument

POOL_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_BLOCK_LIST = 256
_LIST_PROGRAMS_PER_SM = 4
# measured on an H200 (bench/results/cast-lab.json): 24 and more programs cost a request of some
# thousand tokens 1 us, 8 cost a large batch 3 %
_CHUNK = 8  # columns of a thread: 8 bytes loaded, 16 stored, both coalesced without shared memory
_BLOCK_CAST = 256  # chunks
_CAST_PROGRAMS_PER_SM = 12
# counters of one cache line would wait for each other
_TICKET_STRIDE = tl.constexpr(32)
# int32 counts the chunks of all listed rows; the margin is what the last block may pass them by
_MAX_CHUNKS = 2**31 - 2**24
# few and odd, and a cache of a few rows, so that tests walk every loop
_INTERPRETED_PROGRAMS = 3
_INTERPRETED_QUEUES = 2
_INTERPRETED_L2_BYTES = 16384


# bs changes every batch: specialising on it would compile again at bs = 1 and multiples of 16
@triton.jit(do_not_specialize=["bs"])
def _claim_slots_kernel(
    kv_indices,  # *i32 [capacity], first kv_indptr[bs] valid
    kv_indptr,  # *i32 [bs + 1]
    owner,  # *i32 [num_slots]
    bs,
    BLOCK: tl.constexpr,
):
    """owner[kv_indices[t]] = t for t < kv_indptr[bs]; of the t that share a slot, any one wins.

    Programs stride over blocks of BLOCK entries.
    """
    nnz = tl.load(kv_indptr + bs)
    for start in range(tl.program_id(0) * BLOCK, nnz, tl.num_programs(0) * BLOCK):
        offs = start + tl.arange(0, BLOCK)  # [BLOCK]
        mask = offs < nnz
        slot = tl.load(kv_indices + offs, mask=mask, other=0).to(tl.int64)
        tl.store(owner + slot, offs, mask=mask)


@triton.jit
def _segment(nnz, BLOCK: tl.constexpr):
    """The entries of this program, one run of whole blocks: (first, past the last)."""
    each = tl.cdiv(tl.cdiv(nnz, tl.num_programs(0)), BLOCK) * BLOCK
    start = tl.program_id(0) * each
    return start, tl.minimum(start + each, nnz)


@triton.jit
def _is_read_first(kv_indptr, offs, nnz, bs, pieces, ROWS: tl.constexpr):
    """Whether entries are among the about ROWS that attention reads first, [BLOCK] bool.

    FlashInfer has `pieces` clusters of thread blocks, cuts requests into pieces of at most `limit`
    entries, as many as there are clusters where requests are long (MLAPlan in its scheduler.cuh,
    0.7.2), and each cluster reads its piece from the end (mla.cuh, mla_hopper.cuh).
    """
    limit = tl.cdiv(tl.cdiv(nnz, pieces), 256) * 256
    rows = limit.to(tl.int64) * ROWS // nnz  # of a piece
    # the last request that begins at or before the entry; as nnz lies behind it, it is not empty
    request = tl.zeros_like(offs)
    step = 1
    while step < bs:
        step *= 2
    while step > 0:
        later = request + step
        begin = tl.load(kv_indptr + later, mask=later < bs, other=2147483647)
        request = tl.where(begin <= offs, later, request)
        step //= 2
    begin = tl.load(kv_indptr + request)
    at = offs - begin
    end = tl.minimum((at // limit + 1) * limit, tl.load(kv_indptr + request + 1) - begin)
    # whole runs of 32 rows, as pages have them: 9 blocks of the cast, in whole lines of memory
    since = (end - rows) // 32 * 32
    # more requests than clusters: those behind have to wait
    return (at >= since) & (request < pieces)


@triton.jit
def _find_winners(
    kv_indices, kv_indptr, owner, offs, end, nnz, bs, pieces, FIRST_ROWS: tl.constexpr
):
    """(slots, whether the claim of each entry won, and is read first) of entries offs [BLOCK]."""
    mask = offs < end
    slot = tl.load(kv_indices + offs, mask=mask, other=0).to(tl.int64)
    won = mask & (tl.load(owner + slot, mask=mask, other=-1) == offs)
    first = tl.zeros_like(won)
    if nnz > FIRST_ROWS:
        inside = tl.minimum(offs, end - 1)
        first = won & _is_read_first(kv_indptr, inside, nnz, bs, pieces, FIRST_ROWS)
    return slot, won, first


@triton.jit(do_not_specialize=["bs", "pieces"])
def _count_slots_kernel(
    kv_indices,  # *i32 [capacity], first kv_indptr[bs] valid
    kv_indptr,  # *i32 [bs + 1]
    owner,  # *i32 [num_slots]
    counts,  # *i32 [2, programs]
    bs,
    pieces,
    BLOCK: tl.constexpr,
    FIRST_ROWS: tl.constexpr,
):
    """Entries of each program's segment that won their claim: read later, and read first."""
    nnz = tl.load(kv_indptr + bs)
    begin, end = _segment(nnz, BLOCK)
    later, sooner = 0, 0
    for start in range(begin, end, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        _, won, first = _find_winners(
            kv_indices, kv_indptr, owner, offs, end, nnz, bs, pieces, FIRST_ROWS
        )
        later += tl.sum((won & ~first).to(tl.int32), 0)
        sooner += tl.sum(first.to(tl.int32), 0)
    tl.store(counts + tl.program_id(0), later)
    tl.store(counts + tl.num_programs(0) + tl.program_id(0), sooner)


@triton.jit(do_not_specialize=["bs", "pieces"])
def _compact_slots_kernel(
    kv_indices,  # *i32 [capacity], first kv_indptr[bs] valid
    kv_indptr,  # *i32 [bs + 1]
    owner,  # *i32 [num_slots]
    counts,  # *i32 [2, programs], of _count_slots_kernel with the same grid
    live_slots,  # *i32 [num_slots]
    count,  # *i32 [1]
    bs,
    pieces,
    BLOCK: tl.constexpr,
    FIRST_ROWS: tl.constexpr,
    PROGRAMS: tl.constexpr,  # a power of two, at least the grid
):
    """live_slots[:count] = the slots of the entries that won their claim: each slot once.

    In the order of the entries, but that those read first come last. The winner leaves
    -1 - (its place in the list) in `owner`. No loser takes that for its own claim, since claims
    are not negative.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    each = tl.arange(0, PROGRAMS)
    later = tl.load(counts + each, mask=each < programs, other=0)
    sooner = tl.load(counts + programs + each, mask=each < programs, other=0)
    row_later = tl.sum(tl.where(each < program, later, 0), 0)
    row_sooner = tl.sum(later, 0) + tl.sum(tl.where(each < program, sooner, 0), 0)
    if program == 0:
        tl.store(count, tl.sum(later, 0) + tl.sum(sooner, 0))
    nnz = tl.load(kv_indptr + bs)
    begin, end = _segment(nnz, BLOCK)
    for start in range(begin, end, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        slot, won, first = _find_winners(
            kv_indices, kv_indptr, owner, offs, end, nnz, bs, pieces, FIRST_ROWS
        )
        # two ranks in one scan: BLOCK is less than 2**16; 1-based
        rank = tl.cumsum((won & ~first).to(tl.int32) + (first.to(tl.int32) << 16), 0)
        row = tl.where(first, row_sooner + (rank >> 16), row_later + (rank & 0xFFFF)) - 1
        tl.store(live_slots + row, slot.to(tl.int32), mask=won)
        tl.store(owner + slot, -1 - row, mask=won)
        row_later += tl.sum((won & ~first).to(tl.int32), 0)
        row_sooner += tl.sum(first.to(tl.int32), 0)


@triton.jit(do_not_specialize=["bs"])
def _find_rows_kernel(
    kv_indices,  # *i32 [capacity], first kv_indptr[bs] valid
    kv_indptr,  # *i32 [bs + 1]
    owner,  # *i32 [num_slots], as _compact_slots_kernel leaves it
    kv_rows,  # *i32 [capacity], may be kv_indices
    bs,
    BLOCK: tl.constexpr,
):
    """kv_rows[t] = the place in live_slots of kv_indices[t], for t < kv_indptr[bs]."""
    nnz = tl.load(kv_indptr + bs)
    for start in range(tl.program_id(0) * BLOCK, nnz, tl.num_programs(0) * BLOCK):
        offs = start + tl.arange(0, BLOCK)  # [BLOCK]
        mask = offs < nnz
        slot = tl.load(kv_indices + offs, mask=mask, other=0).to(tl.int64)
        tl.store(kv_rows + offs, -1 - tl.load(owner + slot, mask=mask, other=-1), mask=mask)


@triton.jit
def _decode_fp8(code, E5M2: tl.constexpr, HW_E4M3: tl.constexpr):
    """The float value of FP8 bytes, exact, as float16 or float32; NaN codes give NaN.

    Without HW_E4M3 the e4m3 fields go into a float32 whose exponent is 120 too small (the biases
    differ by 127 - 7); times 2**120 is exact, subnormal codes included.
    """
    if E5M2:
        # e5m2 is the upper byte of a float16, specials included
        value = (code.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    elif HW_E4M3:
        value = code.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        bits = code.to(tl.uint32)
        magnitude = ((bits & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
        value = tl.where(bits >= 0x80, -magnitude, magnitude)
        value = tl.where((bits & 0x7F) == 0x7F, float("nan"), value)
    return value


@triton.jit
def _own_slots(live_slots, capacity, PER_ROW: tl.constexpr, BLOCK: tl.constexpr):
    """The slots of a program's own block, asked for beside the count, not behind it.

    Worth 0.3 to 0.6 us at 131,072 rows. Past the count they are old ones, and not used.
    """
    row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)) // PER_ROW
    return tl.load(live_slots + row, mask=row < capacity, other=0)


@triton.jit
def _cast_blocks(
    pool,
    live_slots,
    tickets,
    out,
    slot,  # [BLOCK], of _own_slots
    n,  # chunks
    QUEUES: tl.constexpr,
    STRIDE_POOL: tl.constexpr,
    STRIDE_OUT: tl.constexpr,
    DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    E5M2: tl.constexpr,
    HW_E4M3: tl.constexpr,
    EVICT: tl.constexpr,
    DRAW: tl.constexpr,
):
    """Cast a program's part of the chunks.

    Its queue has every QUEUES-th block. Of those it takes one of its own, and then every `step`-th
    or, with DRAW, whichever nobody has taken.
    """
    PER_ROW: tl.constexpr = DIM // CHUNK
    column = tl.arange(0, CHUNK)[None, :]
    program, programs = tl.program_id(0), tl.num_programs(0)
    # programs that share a multiprocessor share a queue, as a rule; no result depends on it
    queue, at = program % QUEUES, program // QUEUES
    step = (programs - queue + QUEUES - 1) // QUEUES  # programs of this queue
    blocks = (tl.cdiv(n, BLOCK) - queue + QUEUES - 1) // QUEUES
    while at < blocks:
        chunk = (at * QUEUES + queue) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
        mask = chunk < n
        row = chunk // PER_ROW
        part = chunk % PER_ROW * CHUNK
        # int64 before the multiply: slot * 576 passes 2**31 at 3.7 M slots
        src = pool + slot.to(tl.int64) * STRIDE_POOL + part
        dst = out + row.to(tl.int64) * STRIDE_OUT + part
        code = tl.load(
            src[:, None] + column, mask=mask[:, None], other=0, eviction_policy=EVICT
        )  # [BLOCK, CHUNK]
        at += step
        if DRAW:  # noqa: SIM102 -- `and` would evaluate both sides
            if blocks > step:
                # here it hides behind the loads
                ticket = tl.atomic_add(tickets + queue * _TICKET_STRIDE, 1, sem="relaxed")
                at = step + ticket
                # each program draws once in vain, so this was the last: the next launch finds 0
                if ticket == blocks - 1:
                    tl.store(tickets + queue * _TICKET_STRIDE, 0)
        value = _decode_fp8(code, E5M2, HW_E4M3).to(out.dtype.element_ty)
        tl.store(dst[:, None] + column, value, mask=mask[:, None])
        chunk = (at * QUEUES + queue) * BLOCK + tl.arange(0, BLOCK)
        slot = tl.load(live_slots + chunk // PER_ROW, mask=chunk < n, other=0)


@triton.jit(do_not_specialize=["capacity"])
def _gather_cast_kernel(
    pool,  # *u8 [num_slots, DIM], FP8 codes
    live_slots,  # *i32 [num_slots], first count[0] valid
    count,  # *i32 [1]
    tickets,  # *i32 [QUEUES * 32], zeros, left zeros
    out,  # *bf16 | *f16 | *f32 [>= count[0], DIM]
    capacity,  # num_slots
    STRIDE_POOL: tl.constexpr,  # a pool has one; as a variable it cost 1 to 2 us of 62
    STRIDE_OUT: tl.constexpr,
    DIM: tl.constexpr,
    CHUNK: tl.constexpr,  # columns; divides DIM
    BLOCK: tl.constexpr,  # chunks
    QUEUES: tl.constexpr,
    CACHED_ROWS: tl.constexpr,  # rows of `out` that the L2 cache holds
    E5M2: tl.constexpr,
    HW_E4M3: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out[r] = cast(pool[live_slots[r]]) for r < count[0]; other rows keep their contents.

    Programs take blocks of the listed rows, laid end to end and cut into chunks: no thread idles
    where 576 columns end short of a power of two. With OVERLAP a program may start while the kernel
    before it drains; all that it reads or writes lies behind the wait.

    Rows that fit the cache stay there for attention, so where they fill much of it the FP8 bytes
    are marked to leave first; a small batch has room for both. More rows than the cache holds pass
    through. Then the warps of a multiprocessor drift apart if each has its share, which costs
    memory its order and up to 3 %; so they draw the next block. One counter for all would be slower
    still: it gives one block in two nanoseconds at most.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    slot = _own_slots(live_slots, capacity, DIM // CHUNK, BLOCK)
    rows = tl.load(count)
    n = rows * (DIM // CHUNK)
    if rows <= CACHED_ROWS // 8:
        _cast_blocks(
            pool, live_slots, tickets, out, slot, n, 1,
            STRIDE_POOL, STRIDE_OUT, DIM, CHUNK, BLOCK, E5M2, HW_E4M3,
            EVICT="", DRAW=False,
        )  # fmt: skip
    elif rows <= CACHED_ROWS:
        _cast_blocks(
            pool, live_slots, tickets, out, slot, n, 1,
            STRIDE_POOL, STRIDE_OUT, DIM, CHUNK, BLOCK, E5M2, HW_E4M3,
            EVICT="evict_first", DRAW=False,
        )  # fmt: skip
    else:
        _cast_blocks(
            pool, live_slots, tickets, out, slot, n, QUEUES,
            STRIDE_POOL, STRIDE_OUT, DIM, CHUNK, BLOCK, E5M2, HW_E4M3,
            EVICT="", DRAW=True,
        )  # fmt: skip


@dataclass(frozen=True)
class DeviceFacts:
    """What the cast asks of a device; on the CPU, interpreted, it is made up."""

    multiprocessors: int
    capability: tuple[int, int]
    l2_bytes: int

    @property
    def queues(self) -> int:
        return self.multiprocessors or _INTERPRETED_QUEUES

    @property
    def first_rows(self) -> int:
        """Rows of 576 16-bit values that a cast leaves in the L2 cache: its FP8 bytes take 1/3."""
        return self.l2_bytes * 2 // 3 // (576 * 2)

    @property
    def tickets(self) -> int:
        """Entries of `make_tickets`."""
        return self.queues * int(_TICKET_STRIDE.value)


@functools.cache
def _device_facts(device: torch.device) -> DeviceFacts:
    if device.type != "cuda":
        return DeviceFacts(0, (0, 0), _INTERPRETED_L2_BYTES)
    properties = torch.cuda.get_device_properties(device)
    capability = properties.major, properties.minor
    return DeviceFacts(properties.multi_processor_count, capability, properties.L2_cache_size)


def cast_constants(
    dim: int, pool_dtype: torch.dtype, out_dtype: torch.dtype, facts: DeviceFacts
) -> dict[str, Any]:
    """The compile-time constants of the cast kernel for rows of `dim` FP8 values."""
    return {
        "DIM": dim,
        "CHUNK": math.gcd(dim, _CHUNK),
        "BLOCK": _BLOCK_CAST,
        "QUEUES": facts.queues,
        "CACHED_ROWS": facts.l2_bytes // (dim * out_dtype.itemsize),
        "E5M2": pool_dtype == torch.float8_e5m2,
        # cvt of e4m3x2 exists from SM89 on (PTX ISA, `cvt`), griddepcontrol from SM90 on
        "HW_E4M3": facts.capability >= (8, 9),
        "OVERLAP": facts.capability >= (9, 0),
    }


def make_tickets(device: torch.device) -> torch.Tensor:
    """What the casts of one stream share to divide their work: int32 zeros, one line a queue."""
    return torch.zeros(_device_facts(device).tickets, dtype=torch.int32, device=device)


def _list_programs(facts: DeviceFacts) -> int:
    return max(facts.multiprocessors * _LIST_PROGRAMS_PER_SM, _INTERPRETED_PROGRAMS)


def make_scratch(num_slots: int, device: torch.device) -> torch.Tensor:
    """What `list_live_slots` works in, for a pool of `num_slots`; needs no initial value."""
    programs = _list_programs(_device_facts(device))
    return torch.empty(num_slots + 2 * programs, dtype=torch.int32, device=device)


def list_live_slots(
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    bs: int,
    scratch: torch.Tensor,
    live_slots: torch.Tensor,
    count: torch.Tensor,
    kv_rows: torch.Tensor,
    *,
    q_rows: int = 1,
) -> None:
    """Write each distinct slot of the batch once into `live_slots`, and where into `kv_rows`.

    Slots are listed in the order of the batch. Where it has more rows than the L2 cache holds,
    those that FlashInfer's decode kernel reads first come last: the cast leaves them in the cache.

    Args:
        kv_indices: [capacity] int32, slot ids. Entries at or past kv_indptr[bs] are never read.
        kv_indptr: [>= bs + 1] int32, prefix sum of kv lengths (tokens); read on the device.
        bs: requests in the batch; 0 gives an empty list.
        scratch: of `make_scratch`.
        live_slots: [num_slots] int32, out. Entries at or past count[0] keep their contents.
        count: [1] int32, out: how many.
        kv_rows: [>= kv_indptr[bs]] int32, out: live_slots[kv_rows[t]] == kv_indices[t], so it
            indexes the packed rows of `gather_cast` as `kv_indices` indexes the pool. May be
            `kv_indices` itself. Entries at or past kv_indptr[bs] keep their contents.
        q_rows: heads times new tokens of a request. Only the order depends on it.

    Raises:
        InvalidArgument: a shape, dtype or stride breaks the contract above.
    """
    for name, tensor in (
        ("kv_indices", kv_indices),
        ("kv_indptr", kv_indptr),
        ("scratch", scratch),
        ("live_slots", live_slots),
        ("count", count),
        ("kv_rows", kv_rows),
    ):
        if tensor.dtype != torch.int32 or not tensor.is_contiguous():
            raise InvalidArgument(
                f"list_live_slots: {name} must be contiguous int32, got {tensor.dtype}, "
                f"strides {tuple(tensor.stride())}"
            )
    if kv_indptr.numel() < bs + 1:
        raise InvalidArgument(
            f"list_live_slots: kv_indptr must hold bs + 1 = {bs + 1} entries, "
            f"got {kv_indptr.numel()}"
        )
    facts = _device_facts(kv_indices.device)
    programs = _list_programs(facts)
    owner, counts = scratch[: -2 * programs], scratch[-2 * programs :]
    if owner.numel() != live_slots.numel():
        raise InvalidArgument(
            f"list_live_slots: scratch must be make_scratch' of {live_slots.numel()} slots, "
            f"got {scratch.numel()} entries"
        )
    grid = (programs,)
    # FlashInfer takes two thread blocks for a cluster where q has more rows than one tile of 64
    pieces = facts.queues // (2 if q_rows > 64 else 1)
    constants = {"BLOCK": _BLOCK_LIST, "FIRST_ROWS": facts.first_rows}
    _claim_slots_kernel[grid](kv_indices, kv_indptr, owner, bs, BLOCK=_BLOCK_LIST)
    _count_slots_kernel[grid](kv_indices, kv_indptr, owner, counts, bs, pieces, **constants)
    _compact_slots_kernel[grid](
        kv_indices, kv_indptr, owner, counts, live_slots, count, bs, pieces,
        PROGRAMS=triton.next_power_of_2(programs), **constants,
    )  # fmt: skip
    _find_rows_kernel[grid](kv_indices, kv_indptr, owner, kv_rows, bs, BLOCK=_BLOCK_LIST)


def _cast_programs(device: torch.device, chunks: int | None) -> int:
    """Programs of a cast: fixed where a graph is captured, else cut to what the host knows.

    At least one for each queue.
    """
    facts = _device_facts(device)
    sms = facts.multiprocessors
    resident = sms * _CAST_PROGRAMS_PER_SM or _INTERPRETED_PROGRAMS
    # a graph replays with other counts than it was captured with
    if chunks is None or (sms and torch.cuda.is_current_stream_capturing()):
        return resident
    # as many blocks as there are rows to cast, up to more than fit at once, which is 2 % faster
    return max(facts.queues, min(-(-chunks // _BLOCK_CAST), resident * 16 if sms else resident))


def gather_cast(
    pool: torch.Tensor,
    live_slots: torch.Tensor,
    count: torch.Tensor,
    tickets: torch.Tensor,
    out: torch.Tensor,
    *,
    bound: int | None = None,
) -> torch.Tensor:
    """Cast the listed rows of `pool` into the first rows of `out`, exactly, and return `out`.

    The scale is 1: every e4m3 and e5m2 value is exact in bfloat16, float16 and float32, and the
    NaN codes give NaN.

    Args:
        pool: [num_slots, 1, dim] or [num_slots, dim], float8_e4m3fn or float8_e5m2. Rows may be
            strided; the columns of a row are contiguous. dim is 576 for DeepSeek's MLA, of which
            29 million slots are the limit.
        live_slots: [num_slots] int32, distinct slot ids. Entries at or past count[0] are loaded,
            and not used.
        count: [1] int32, read on the device.
        tickets: of `make_tickets`; zeros before and after. Casts that may run at the same time need
            their own.
        out: shape of `pool`, bfloat16, float16 or float32, caller-owned, rows may be strided.
            out[r] becomes pool[live_slots[r]]; rows at or past count[0] keep their contents.
        bound: about how many slots may be listed, where the host knows; it sizes the grid and no
            result depends on it. Not used while a CUDA graph is captured.

    Raises:
        InvalidArgument: a shape, dtype or stride breaks the contract above.
    """
    if pool.dtype not in POOL_DTYPES:
        raise InvalidArgument(
            f"gather_cast: pool must be float8_e4m3fn or float8_e5m2, got {pool.dtype}"
        )
    if out.dtype not in OUT_DTYPES:
        raise InvalidArgument(
            f"gather_cast: out must be bfloat16, float16 or float32, got {out.dtype}"
        )
    dim = pool.shape[-1]
    if out.shape != pool.shape or pool.numel() != pool.shape[0] * dim:
        raise InvalidArgument(
            "gather_cast: pool and out must both be [num_slots, 1, dim], "
            f"got {tuple(pool.shape)} and {tuple(out.shape)}"
        )
    facts = _device_facts(pool.device)
    if tickets.dtype != torch.int32 or tickets.shape != (facts.tickets,):
        raise InvalidArgument(
            f"gather_cast: tickets must be make_tickets' [{facts.tickets}] int32, "
            f"got {list(tickets.shape)} {tickets.dtype}"
        )
    if pool.stride(-1) != 1 or out.stride(-1) != 1:
        raise InvalidArgument(
            "gather_cast: the columns of pool and out must be contiguous, "
            f"got strides {tuple(pool.stride())} and {tuple(out.stride())}"
        )
    constants = cast_constants(dim, pool.dtype, out.dtype, facts)
    per_row = dim // constants["CHUNK"]
    if pool.shape[0] * per_row > _MAX_CHUNKS:
        raise InvalidArgument(
            f"gather_cast: pool must hold at most {_MAX_CHUNKS // per_row} slots of {dim} columns, "
            f"got {pool.shape[0]}"
        )
    programs = _cast_programs(pool.device, None if bound is None else bound * per_row)
    _gather_cast_kernel[(programs,)](
        pool.view(torch.uint8),
        live_slots,
        count,
        tickets,
        out,
        live_slots.numel(),
        STRIDE_POOL=pool.stride(0),
        STRIDE_OUT=out.stride(0),
        **constants,
        num_warps=4,
        launch_pdl=constants["OVERLAP"],
    )
    return out
