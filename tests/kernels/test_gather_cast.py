"""gather_cast and the list of live slots: exact, nothing unread, nothing else written.

The same tests run interpreted on the CPU and compiled on a GPU.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from sglang_fp8mla.errors import IncompatibleEnvironment, InvalidArgument  # noqa: E402
from sglang_fp8mla.kernels import gather_cast as kernels  # noqa: E402
from sglang_fp8mla.kernels.gather_cast import (  # noqa: E402
    gather_cast,
    list_live_slots,
    make_scratch,
    make_tickets,
)
from sglang_fp8mla.workspace import LiveSlots, Workspace, require_memory  # noqa: E402

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NAN_CODES = {E4M3: (0x7F, 0xFF), E5M2: (*range(0x7D, 0x80), *range(0xFD, 0x100))}


def make_indices(kv_lens, num_slots, device, *, shared=0, seed=0):
    """(kv_indptr, kv_indices): shuffled slots, the first `shared` of each request in common.

    Entries past nnz name a valid slot that no request holds: reading one would show.
    """
    generator = torch.Generator().manual_seed(seed)
    slots = (torch.randperm(num_slots - 2, generator=generator) + 2).tolist()
    prefix = [slots.pop() for _ in range(shared)]
    rows = [prefix[:n] + [slots.pop() for _ in range(n - len(prefix[:n]))] for n in kv_lens]
    flat = [slot for row in rows for slot in row]
    kv_indptr = torch.tensor([0, *kv_lens]).cumsum(0).to(torch.int32).to(device)
    kv_indices = torch.tensor(flat + [1] * 7, dtype=torch.int32, device=device)
    return kv_indptr, kv_indices, sorted(set(flat))


def make_pool(num_slots, dim, dtype, device, live, *, pad=16, seed=0):
    """A pool with its own row stride: random codes in live rows, NaN codes everywhere else."""
    generator = torch.Generator().manual_seed(seed)
    storage = torch.full((num_slots, 1, dim + pad), 0x7F, dtype=torch.uint8)
    codes = torch.randint(0, 256, (len(live), 1, dim), generator=generator, dtype=torch.int32)
    storage[live, :, :dim] = codes.to(torch.uint8)
    # moved whole, then sliced: a padded view would become contiguous on the way
    return storage.to(device)[..., :dim].view(dtype)


def cast_by_torch(pool, dtype):
    """The meaning of a cast, as stock does it, on the CPU."""
    return pool.cpu().to(dtype)


def same(actual, expected):
    """Equal to the last bit, NaN equal to NaN."""
    torch.testing.assert_close(actual.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("pool_dtype", [E4M3, E5M2], ids=str)
def test_every_code_is_exact(pool_dtype, out_dtype, device):
    """All 256 codes, subnormals and both zeros included; NaN codes give NaN."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(3)[:576].view(1, 1, 576).repeat(2, 1, 1)
    codes[1] = codes[0].roll(256, -1)  # the codes that the 576 columns of row 0 leave out
    pool = codes.to(device).view(pool_dtype)
    out = torch.full(pool.shape, 7.0, dtype=out_dtype, device=device)
    both = torch.tensor([1, 0], dtype=torch.int32, device=device)
    two = torch.tensor([2], dtype=torch.int32, device=device)
    gather_cast(pool, both, two, make_tickets(device), out)
    expected = cast_by_torch(pool, out_dtype).flip(0)  # packed in the list's order
    codes = codes.flip(0)
    same(out, expected)
    finite = expected.isfinite()
    assert torch.equal(
        out.cpu()[finite].view(torch.int32 if out_dtype == torch.float32 else torch.int16),
        expected[finite].view(torch.int32 if out_dtype == torch.float32 else torch.int16),
    ), "a signed zero or a subnormal differs in its bits"
    is_nan_code = torch.isin(codes.int(), torch.tensor(NAN_CODES[pool_dtype]))
    assert torch.equal(out.cpu().isnan(), is_nan_code)


# 257 and more entries pass one block of the list kernels, 3 * 256 one round of their grid
@pytest.mark.parametrize(
    ("kv_lens", "shared"),
    [
        ([0], 0),
        ([1], 0),
        ([0, 5, 0, 3], 0),
        ([7, 8, 9], 0),
        ([101] * 8, 100),
        ([257, 0, 255, 256], 0),
        ([4000], 0),
        ([1500, 1500, 1500], 1400),
    ],
    ids=str,
)
def test_lists_each_slot_once(kv_lens, shared, device):
    """A prefix that requests share is moved once; entries past nnz are not read."""
    num_slots = 6000
    kv_indptr, kv_indices, live = make_indices(kv_lens, num_slots, device, shared=shared)
    scratch = make_scratch(num_slots, device).fill_(123456789)
    slots = torch.full((num_slots,), -1, dtype=torch.int32, device=device)
    count = torch.tensor([77], dtype=torch.int32, device=device)
    kv_rows = torch.full_like(kv_indices, -5)
    bs, nnz = len(kv_lens), sum(kv_lens)
    list_live_slots(kv_indices, kv_indptr, bs, scratch, slots, count, kv_rows)
    assert count.item() == len(live)
    assert sorted(slots[: len(live)].tolist()) == live
    assert (slots[len(live) :] == -1).all(), "entries past the count were written"
    assert torch.equal(slots[kv_rows[:nnz].long()], kv_indices[:nnz])
    assert (kv_rows[nnz:] == -5).all(), "entries past nnz were written"
    renumbered = kv_indices.clone()
    list_live_slots(renumbered, kv_indptr, bs, scratch, slots, count, renumbered)
    assert torch.equal(slots[renumbered[:nnz].long()], kv_indices[:nnz])
    assert torch.equal(renumbered[nnz:], kv_indices[nnz:])


def read_first(kv_lens, pieces, rows):
    """The entries that FlashInfer's decode kernel reads first, by the rule of its plan."""
    nnz = sum(kv_lens)
    limit = -(-nnz // (pieces * 256)) * 256
    of_a_piece = limit * rows // nnz
    found, begin = set(), 0
    for length in kv_lens[:pieces]:
        for start in range(0, length, limit):
            end = min(start + limit, length)
            since = (end - of_a_piece) // 32 * 32
            found |= set(range(begin + max(start, since), begin + end))
        begin += length
    return found


# two clusters, or one where a request has more than 64 rows of q
@pytest.mark.parametrize("q_rows", [16, 128])
@pytest.mark.parametrize("first_rows", [9, 700, 3999])
@pytest.mark.parametrize(
    "kv_lens",
    [[4000], [1500, 1500, 1500], [0, 1025, 0, 0, 1023, 0, 2048, 0], [5, 4000, 1], [1] * 4001],
    ids=lambda lens: f"{len(lens)}x{max(lens)}",
)
def test_lists_in_the_batch_order_but_what_is_read_first_last(
    kv_lens, first_rows, q_rows, device, monkeypatch
):
    """The whole list, entry by entry; a batch that fits the cache is listed as it is."""
    facts = dataclasses.replace(
        kernels._device_facts(device), multiprocessors=2, l2_bytes=first_rows * 1152 * 3 // 2 + 1
    )
    assert facts.first_rows == first_rows
    monkeypatch.setattr(kernels, "_device_facts", lambda device: facts)
    kv_indptr, kv_indices, _ = make_indices(kv_lens, 6000, device)
    slots = LiveSlots(6000, device)
    kv_rows = slots.update(kv_indices, kv_indptr, len(kv_lens), q_rows=q_rows)
    nnz = sum(kv_lens)
    last = read_first(kv_lens, 2 if q_rows <= 64 else 1, first_rows)
    assert last or not kv_lens[0]
    order = sorted(range(nnz), key=lambda entry: (entry in last, entry))
    assert slots.slots[:nnz].tolist() == kv_indices[order].tolist()
    assert kv_rows[order].tolist() == list(range(nnz))
    # the same batch where the cache holds it
    facts = dataclasses.replace(facts, l2_bytes=2 * facts.l2_bytes + nnz * 1728)
    slots.update(kv_indices, kv_indptr, len(kv_lens), q_rows=q_rows)
    assert torch.equal(slots.slots[:nnz], kv_indices[:nnz])


# the last shape has more chunks than one round of the interpreted grid: 3 programs x 256; rows of
# 36 and 33 columns are cut into chunks of 4 and of 1
@pytest.mark.parametrize("kv_lens", [[0], [1], [0, 5, 0, 3], [7, 8, 9], [90, 0, 41]], ids=str)
@pytest.mark.parametrize("dim", [64, 512, 576, 640, 320, 36, 33])
@pytest.mark.parametrize("pool_dtype", [E4M3, E5M2], ids=str)
def test_writes_live_rows_and_no_others(kv_lens, dim, pool_dtype, device):
    """Dead rows of the pool are NaN; rows of the workspace past the live ones keep theirs."""
    num_slots = 160
    kv_indptr, kv_indices, live = make_indices(kv_lens, num_slots, device)
    pool = make_pool(num_slots, dim, pool_dtype, device, live)
    storage = torch.full((num_slots, 1, dim + 8), -3.0, dtype=torch.bfloat16, device=device)
    out = storage[..., :dim]
    slots = LiveSlots(num_slots, device)
    kv_rows = slots.update(kv_indices, kv_indptr, len(kv_lens))
    assert gather_cast(pool, slots.slots, slots.count, slots.tickets, out) is out
    assert not slots.tickets.any(), "the next launch would start past its first blocks"
    nnz = sum(kv_lens)
    expected = cast_by_torch(pool, torch.bfloat16)[kv_indices[:nnz].cpu().long()]
    same(out[kv_rows[:nnz].long()], expected)
    assert (out[len(live) :] == -3).all(), "a row past the live ones was written"
    assert (storage[..., dim:] == -3).all(), "the padding of a row was written"


@settings(derandomize=True, deadline=None, max_examples=15)
@given(
    kv_lens=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    shared=st.integers(0, 30),
    seed=st.integers(0, 99),
)
def test_any_batch(kv_lens, shared, seed):
    """Lengths, sharing and slots at random, on the device that the session has."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    num_slots = 300
    kv_indptr, kv_indices, live = make_indices(kv_lens, num_slots, device, shared=shared, seed=seed)
    pool = make_pool(num_slots, 576, E4M3, device, live, seed=seed)
    workspace = Workspace(num_slots, 576, torch.bfloat16, device)
    workspace.rows.fill_(float("nan"))
    slots = LiveSlots(num_slots, device)
    given_indices = kv_indices.clone()
    kv_rows = slots.update(kv_indices, kv_indptr, len(kv_lens))
    assert torch.equal(kv_indices, given_indices), "the caller's indices were renumbered"
    rows = workspace.fill(pool, slots)
    nnz = sum(kv_lens)
    expected = cast_by_torch(pool, torch.bfloat16)[kv_indices[:nnz].cpu().long()]
    same(rows[kv_rows[:nnz].long()], expected)
    assert (kv_rows[nnz:] == 0).all()
    assert slots.count.item() == len(live)


def test_a_list_is_good_for_one_step_only(device):
    """A slot freed, rewritten and read again; a batch that shrinks: nothing stale is listed."""
    slots = LiveSlots(64, device)
    for kv_lens, seed in (([20, 5], 1), ([3], 2), ([0], 3), ([20, 5], 1)):
        kv_indptr, kv_indices, live = make_indices(kv_lens, 64, device, seed=seed)
        slots.update(kv_indices, kv_indptr, len(kv_lens))
        assert sorted(slots.slots[: slots.count.item()].tolist()) == live


def test_workspaces_are_shared_unless_exclusive(device):
    """One layer's worth of rows for all backends of a stream; gone with the last of them."""
    first = Workspace.get(40, 576, torch.bfloat16, device)
    assert Workspace.get(40, 576, torch.bfloat16, device) is first
    assert Workspace.get(40, 576, torch.bfloat16, device, exclusive=True) is not first
    assert Workspace.get(41, 576, torch.bfloat16, device) is not first


BAD = [
    ({"pool": "int8"}, "gather_cast: pool must be float8_e4m3fn or float8_e5m2, got torch.int8"),
    ({"out": "int32"}, "gather_cast: out must be bfloat16, float16 or float32, got torch.int32"),
    (
        {"shape": (3, 1, 576)},
        "gather_cast: pool and out must both be [num_slots, 1, dim], got (4, 1, 576) "
        "and (3, 1, 576)",
    ),
    (
        {"columns": 2},
        "gather_cast: the columns of pool and out must be contiguous, got strides "
        "(1152, 1152, 2) and (576, 576, 1)",
    ),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[str(change) for change, _ in BAD])
def test_refuses_operands_that_break_the_contract(change, message):
    step = change.get("columns", 1)
    pool = torch.zeros(4, 1, 576 * step, dtype=torch.uint8)[..., ::step]
    pool = pool.view(torch.int8) if "pool" in change else pool.view(E4M3)
    out = torch.zeros(
        change.get("shape", (4, 1, 576)), dtype=getattr(torch, change.get("out", "bfloat16"))
    )
    one = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(InvalidArgument) as caught:
        gather_cast(pool, one, one, make_tickets(pool.device), out)
    assert str(caught.value) == message


def test_refuses_tickets_of_another_kind():
    pool = torch.zeros(4, 1, 576, dtype=torch.uint8).view(E4M3)
    one = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(
        InvalidArgument, match=r"tickets must be make_tickets' \[64\] int32, got \[1\] torch.int32"
    ):
        gather_cast(pool, one, one, one, torch.zeros(4, 1, 576, dtype=torch.bfloat16))


def test_refuses_more_chunks_than_an_int32_counts():
    """A pool of one row shown 30 M times: 72 chunks of 8 columns a row pass 2**31."""
    pool = torch.zeros(1, 1, 576, dtype=torch.uint8).view(E4M3).expand(30_000_000, 1, 576)
    out = torch.zeros(1, 1, 576, dtype=torch.bfloat16).expand(30_000_000, 1, 576)
    one = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(
        InvalidArgument, match="at most 29593144 slots of 576 columns, got 30000000"
    ):
        gather_cast(pool, one, one, make_tickets(pool.device), out)


def test_list_refuses_int64_indices():
    narrow = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(
        InvalidArgument, match=r"kv_indices must be contiguous int32, got torch\.int64"
    ):
        list_live_slots(narrow.long(), narrow, 1, narrow, narrow, narrow, narrow)
    with pytest.raises(InvalidArgument, match="kv_indptr must hold bs \\+ 1 = 6 entries, got 4"):
        list_live_slots(narrow, narrow, 5, narrow, narrow, narrow, narrow)
    scratch = make_scratch(5, narrow.device)
    with pytest.raises(InvalidArgument, match=r"scratch must be make_scratch' of 4 slots, got 11"):
        list_live_slots(narrow, narrow, 1, scratch, narrow, narrow, narrow)


_COMPILE = r"""
import re
import sys
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from sglang_fp8mla.kernels import gather_cast as g

arch = int(sys.argv[1])
target = GPUTarget("cuda", arch, 32)
i32, u8 = "*i32", "*u8"
lists = {"kv_indices": i32, "kv_indptr": i32, "owner": i32, "bs": "i32"}
counts = {**lists, "counts": i32, "pieces": "i32"}
ordered = {"BLOCK": g._BLOCK_LIST, "FIRST_ROWS": 36000}
jobs = [
    (g._claim_slots_kernel, lists, {"BLOCK": g._BLOCK_LIST}),
    (g._count_slots_kernel, counts, ordered),
    (
        g._compact_slots_kernel,
        {**counts, "live_slots": i32, "count": i32},
        {**ordered, "PROGRAMS": 1024},
    ),
    (g._find_rows_kernel, {**lists, "kv_rows": i32}, {"BLOCK": g._BLOCK_LIST}),
]
cast = {"pool": u8, "live_slots": i32, "count": i32, "tickets": i32, "capacity": "i32"}
facts = g.DeviceFacts(132, divmod(arch, 10), 50 << 20)
strides = {"STRIDE_POOL": 576, "STRIDE_OUT": 576}
for dtype in g.POOL_DTYPES:
    for out in ("*bf16", "*fp16"):
        constants = {**strides, **g.cast_constants(576, dtype, torch.bfloat16, facts)}
        jobs.append((g._gather_cast_kernel, {**cast, "out": out}, constants))
for kernel, signature, constants in jobs:
    names = [p for p in kernel.arg_names if p not in constants]
    signature = {n: signature[n] for n in names} | dict.fromkeys(constants, "constexpr")
    # what the launcher finds out: torch's pointers are multiples of 16
    aligned = [i for i, name in enumerate(kernel.arg_names) if "*" in signature[name]]
    attrs = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attrs)
    compiled = triton.compile(source, target=target, options={"num_warps": 4})
    assert compiled.metadata.shared <= 101376, compiled.metadata.shared
    print(kernel.__name__, compiled.metadata.shared)
    if "OVERLAP" not in constants:
        continue
    # no value takes a detour through shared memory, which tells a program its ticket alone
    assert compiled.metadata.shared == 4
    # nothing is touched before the wait
    text = compiled.asm["ptx"]
    assert ("griddepcontrol.wait" in text) == (arch >= 90)
    before, wait, _ = text.partition("griddepcontrol.wait")
    assert not wait or not {"ld.global", "st.global"} & set(re.findall(r"..\.global", before))
"""


@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100, 120])
def test_compiles_for_every_generation(arch):
    """No GPU needed; 101,376 bytes is what a block may have on SM86, 89 and 120."""
    import os

    environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE, str(arch)], capture_output=True, text=True, env=environ
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("_gather_cast_kernel") == 4


def test_a_workspace_that_does_not_fit_is_refused_with_the_numbers(monkeypatch):
    """cases.md 2: bytes wanted, bytes free, the flags that help; before anything is allocated."""
    gib = 2**30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * gib, 140 * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 * gib)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: gib)
    device = torch.device("cuda", 0)
    require_memory(11 * gib, device)
    with pytest.raises(IncompatibleEnvironment) as caught:
        Workspace.get(16_500_000, 576, torch.bfloat16, device)
    assert str(caught.value) == (
        "workspace: the gather_cast rows must have 17.70 GiB, got 11.00 GiB free on cuda:0; lower "
        "--max-total-tokens or --mem-fraction-static (stock `flashinfer` needs the same amount in "
        "every step)"
    )


def test_a_step_of_an_empty_batch_lists_nothing(device):
    """bs 0: the first entry of kv_indptr is the count, and it is 0."""
    slots = LiveSlots(16, device)
    one = torch.tensor([3], dtype=torch.int32, device=device)
    slots.update(one, torch.zeros(1, dtype=torch.int32, device=device), 0)
    assert slots.count.item() == 0


# rows that the cache holds are shared out, in two ways, more than that are drawn for: all of one
# kind, and some of each
@pytest.mark.parametrize("l2_bytes", [0, 16_384, 1 << 20, 1 << 30])
@pytest.mark.parametrize("dim", [64, 576])
@pytest.mark.parametrize("bound", [None, 0, 1, 8, 533, 10_000])  # 533: 150 programs, 132 queues
def test_no_result_depends_on_who_casts_a_block(bound, dim, l2_bytes, device, monkeypatch):
    """A bound far too small or too large sizes the grid, a cache says how it divides its work."""
    facts = dataclasses.replace(kernels._device_facts(device), l2_bytes=l2_bytes)
    monkeypatch.setattr(kernels, "_device_facts", lambda device: facts)
    decode, casts = kernels._decode_fp8, []
    if device.type == "cpu":  # interpreted, a kernel looks its helpers up at each call
        monkeypatch.setattr(kernels, "_decode_fp8", lambda *x: (casts.append(0), decode(*x))[1])
    slots = LiveSlots(700, device)
    workspace = Workspace(700, dim, torch.bfloat16, device)
    for kv_lens in ([90, 0, 41], [1, 0, 0], [600, 0, 3], [0, 0, 0]):  # one launch after another
        kv_indptr, kv_indices, live = make_indices(kv_lens, 700, device)
        nnz = len(live)
        pool = make_pool(700, dim, E4M3, device, live)
        workspace.rows.fill_(float("nan"))
        kv_rows = slots.update(kv_indices, kv_indptr, 3, bound)[:nnz].long()
        expected = cast_by_torch(pool, torch.bfloat16)[kv_indices[:nnz].cpu().long()]
        rows = workspace.fill(pool, slots)
        same(rows[kv_rows], expected)
        assert rows[nnz:].isnan().all(), "a row past the live ones was written"
        assert not slots.tickets.any(), "the next launch would start past its first blocks"
        if device.type == "cpu":
            blocks = -(-nnz * (dim // 8) // kernels._BLOCK_CAST)
            assert len(casts) == blocks, "a block was cast twice"
            casts.clear()


@pytest.mark.parametrize(
    ("chunks", "capturing", "programs"),
    [
        (None, False, 120),
        (72 * 64, True, 120),
        (72 * 64, False, 18),
        (0, False, 10),
        (72 << 20, False, 1920),
    ],
)
def test_the_grid_is_fixed_under_a_graph_and_cut_elsewhere(
    monkeypatch, chunks, capturing, programs
):
    """A captured grid must do for any replay; an eager one need not launch idle programs."""
    facts = kernels.DeviceFacts(10, (9, 0), 1 << 20)
    monkeypatch.setattr(kernels, "_device_facts", lambda device: facts)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    assert kernels._cast_programs(torch.device("cuda"), chunks) == programs
