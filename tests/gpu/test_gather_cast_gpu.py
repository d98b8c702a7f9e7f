"""On a GPU: FlashInfer over gather_cast equals FlashInfer over the cast pool, bitwise.

Stock is `wrapper.run` on `pool.to(q.dtype)`; ours is the same call on the packed rows, which are
NaN past the live ones. Plans and operands are the same but for the indices, so one wrong row shows.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest

torch = pytest.importorskip("torch")

from sglang_fp8mla import probe  # noqa: E402
from sglang_fp8mla.kernels import gather_cast as kernels  # noqa: E402
from sglang_fp8mla.reference import ref_mla  # noqa: E402
from sglang_fp8mla.workspace import LiveSlots, Workspace  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

CKV, DIM = 512, 576
SM_SCALE = 192**-0.5


def make_batch(kv_lens, num_slots, device, *, heads, q_lens=None, pool_dtype=None, seed=0):
    """Operands on the device: q, an FP8 pool with NaN in dead rows, and the index arrays."""
    generator = torch.Generator(device=device).manual_seed(seed)
    q_lens = q_lens or [1] * len(kv_lens)
    nnz = sum(kv_lens)
    kv_indptr = torch.tensor([0, *kv_lens], device=device).cumsum(0).to(torch.int32)
    qo_indptr = torch.tensor([0, *q_lens], device=device).cumsum(0).to(torch.int32)
    slots = torch.randperm(num_slots - 1, generator=generator, device=device)[:nnz] + 1
    codes = torch.full((num_slots, 1, DIM), 0x7F, dtype=torch.uint8, device=device)
    rows = torch.randn(nnz, 1, DIM, generator=generator, device=device)
    dtype = pool_dtype or torch.float8_e4m3fn
    codes[slots] = rows.to(dtype).view(torch.uint8)
    q = torch.randn(sum(q_lens), heads, DIM, generator=generator, device=device) * 0.3
    return q.to(torch.bfloat16), codes.view(dtype), qo_indptr, kv_indptr, slots.to(torch.int32)


def make_wrapper(device, **graph_buffers):
    from flashinfer import BatchMLAPagedAttentionWrapper

    scratch = torch.empty(128 << 20, dtype=torch.uint8, device=device)
    return BatchMLAPagedAttentionWrapper(scratch, backend="auto", **graph_buffers)


def plan(wrapper, qo_indptr, kv_indptr, slots, heads, *, causal, kv_dtype=torch.bfloat16):
    lens = kv_indptr[1:] - kv_indptr[:-1]
    wrapper.plan(
        qo_indptr, kv_indptr, slots, lens, heads, CKV, DIM - CKV, 1, causal, SM_SCALE,
        torch.bfloat16, kv_dtype,
    )  # fmt: skip


def run(wrapper, q, rows, **scales):
    out = torch.full((*q.shape[:2], CKV), float("nan"), dtype=q.dtype, device=q.device)
    wrapper.run(q[..., :CKV], q[..., CKV:], rows[..., :CKV], rows[..., CKV:], out=out, **scales)
    return out


def run_packed(q, pool, qo, kv, slots, heads, *, causal):
    """Our way: list the slots, cast their rows, attend over the rows."""
    live = LiveSlots(pool.shape[0], pool.device)
    kv_rows = live.update(slots, kv, len(kv) - 1)
    wrapper = make_wrapper(pool.device)
    plan(wrapper, qo, kv, kv_rows, heads, causal=causal)
    return run(wrapper, q, poisoned_workspace(pool.shape[0], pool.device).fill(pool, live))


def poisoned_workspace(num_slots, device):
    workspace = Workspace(num_slots, DIM, torch.bfloat16, device)
    workspace.rows.fill_(float("nan"))
    return workspace


@pytest.mark.parametrize("pool_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("heads", [8, 16, 128])
@pytest.mark.parametrize("kv_lens", [[1], [64], [65, 1, 1000], [4096] * 8], ids=str)
def test_decode_equals_the_full_cast_bitwise(kv_lens, heads, pool_dtype, device):
    num_slots = 40_000
    q, pool, qo, kv, slots = make_batch(
        kv_lens, num_slots, device, heads=heads, pool_dtype=pool_dtype
    )
    wrapper = make_wrapper(device)
    plan(wrapper, qo, kv, slots, heads, causal=False)
    ours = run_packed(q, pool, qo, kv, slots, heads, causal=False)
    stock = run(wrapper, q, pool.to(torch.bfloat16))
    assert not ours.isnan().any()
    assert torch.equal(ours.view(torch.int16), stock.view(torch.int16))


@pytest.mark.parametrize(
    ("q_lens", "kv_lens"),
    [([1], [1]), ([7, 3], [65, 130]), ([512], [600]), ([64, 1, 300], [64, 900, 4000])],
    ids=str,
)
@pytest.mark.parametrize("heads", [8, 16, 20])
def test_extend_equals_the_full_cast_bitwise(q_lens, kv_lens, heads, device):
    """20 heads: both sides planned with 32, as the backend does (cases.md 11 and 12)."""
    num_slots = 9000
    q, pool, qo, kv, slots = make_batch(kv_lens, num_slots, device, heads=heads, q_lens=q_lens)
    padded = probe.plan_heads(heads)
    wrapper = make_wrapper(device)
    plan(wrapper, qo, kv, slots, padded, causal=True)
    wide = probe.pad_heads(q, padded)
    ours = run_packed(wide, pool, qo, kv, slots, padded, causal=True)
    stock = run(wrapper, wide, pool.to(torch.bfloat16))
    assert torch.equal(ours.view(torch.int16), stock.view(torch.int16))
    exact, _ = ref_mla(
        q[..., :CKV], q[..., CKV:], pool, slots, kv,
        sm_scale=SM_SCALE, qo_indptr=qo, causal=True,
    )  # fmt: skip
    error = (ours[:, :heads].cpu().double() - exact).norm() / exact.norm()
    assert error < 2**-7, f"relative RMS error {error:.1e}: a key was dropped or misread"


# 32,000 rows fit the cache of a data-centre GPU; a smaller one has blocks drawn for, and rows in
# the order in which they are read
@pytest.mark.parametrize("l2_bytes", [None, 4 << 20, 0])
def test_replays_with_new_lengths_bitwise(l2_bytes, device, monkeypatch):
    """One captured list + cast + run, replayed over batches that grow, shrink and share slots."""
    if l2_bytes is not None:
        facts = dataclasses.replace(kernels._device_facts(device), l2_bytes=l2_bytes)
        monkeypatch.setattr(kernels, "_device_facts", lambda device: facts)
    num_slots, bs, heads, capacity = 40_000, 4, 16, 32_768
    i32 = {"dtype": torch.int32, "device": device}
    kv_buffer, index_buffer = torch.zeros(bs + 1, **i32), torch.zeros(capacity, **i32)
    wrapper, stock = (
        make_wrapper(
            device,
            use_cuda_graph=True,
            qo_indptr=torch.zeros(bs + 1, **i32),
            kv_indptr=torch.zeros(bs + 1, **i32),
            kv_indices=indices,
            kv_len_arr=torch.zeros(bs, **i32),
        )
        for indices in (index_buffer, torch.zeros(capacity, **i32))
    )
    live = LiveSlots(num_slots, device)
    workspace = poisoned_workspace(num_slots, device)
    batches = [[1, 1, 1, 1], [4096, 1, 65, 8000], [2, 700, 64, 63], [8000] * 4, [1, 1, 1, 1]]
    first = make_batch(batches[0], num_slots, device, heads=heads)
    q_buffer, pool = first[0].clone(), first[1].clone()
    out = torch.empty((bs, heads, CKV), dtype=torch.bfloat16, device=device)

    def step():
        # the wrapper reads this buffer, which `load` filled with slots
        live.update(index_buffer, kv_buffer, bs, in_place=True)
        rows = workspace.fill(pool, live)
        wrapper.run(
            q_buffer[..., :CKV], q_buffer[..., CKV:], rows[..., :CKV], rows[..., CKV:], out=out
        )

    def load(batch):
        q, codes, qo, kv, slots = batch
        q_buffer.copy_(q)
        pool.view(torch.uint8).copy_(codes.view(torch.uint8))
        kv_buffer.copy_(kv)
        plan(wrapper, qo, kv, slots, heads, causal=False)
        plan(stock, qo, kv, slots, heads, causal=False)
        return q, codes, qo, kv, slots

    load(first)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    load(first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for number, kv_lens in enumerate(batches):
        q, codes, *_ = load(make_batch(kv_lens, num_slots, device, heads=heads, seed=number))
        out.fill_(float("nan"))
        graph.replay()
        expected = run(stock, q, codes.to(torch.bfloat16))
        assert torch.equal(out.view(torch.int16), expected.view(torch.int16)), kv_lens


def first_pieces(wrapper):
    """FlashInfer's clusters, and the first piece of each: (kv_indptr, kv_start, kv_end)."""
    info = list(wrapper._plan_info)  # MLAPlanInfo in its scheduler.cuh: offsets in bytes
    numbers = wrapper._int_workspace_buffer.view(torch.int32).cpu()
    starts = numbers[info[15] // 4 :][: info[1] + 1].tolist()
    fields = [numbers[info[field] // 4 :][: starts[-1]].tolist() for field in (3, 13, 14)]
    busy = [start for start, end in itertools.pairwise(starts) if start < end]
    return info[1], [tuple(field[work] for field in fields) for work in busy]


@pytest.mark.sm90
@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize(
    "kv_lens",
    [[4096] * 32, [3000] * 64, [700] * 256, [100_000], [500 + 97 * n for n in range(48)]],
    ids=lambda lens: f"{len(lens)}x{max(lens)}",
)
def test_what_is_cast_last_is_what_flashinfer_reads_first(kv_lens, heads, device):
    """Speed alone hangs on it: the pieces that the list assumes are those that FlashInfer plans."""
    num_slots, nnz = 200_000, sum(kv_lens)
    kv = torch.tensor([0, *kv_lens], device=device).cumsum(0).to(torch.int32)
    qo = torch.arange(len(kv), dtype=torch.int32, device=device)
    slots = torch.randperm(num_slots, device=device)[:nnz].to(torch.int32)
    wrapper = make_wrapper(device)
    plan(wrapper, qo, kv, slots, heads, causal=False)
    clusters, pieces = first_pieces(wrapper)
    limit = -(-nnz // (clusters * 256)) * 256
    assert max(end - start for _, start, end in pieces) == min(limit, max(kv_lens))
    rows = limit * kernels._device_facts(device).first_rows // nnz
    theirs = {
        begin + entry
        for begin, start, end in pieces
        for entry in range(max(start, (end - rows) // 32 * 32), end)
    }
    live = LiveSlots(num_slots, device)
    order = torch.argsort(live.update(slots, kv, len(kv_lens), q_rows=heads)).cpu()
    # the list goes through the batch twice
    (again,) = (order[1:] < order[:-1]).nonzero().flatten().tolist()
    ours = set(order[again + 1 :].tolist())
    assert len(ours & theirs) >= 0.99 * len(theirs)
    # more where requests differ: a cluster then has two pieces, of which one waits
    assert len(ours) <= (1.01 if len(set(kv_lens)) == 1 else 1.4) * len(theirs)


def test_addresses_past_2_31_elements(device):
    """Live slots around slot 3,728,271, where slot * 576 passes 2**31, and at the end."""
    num_slots, heads = 4_000_000, 8
    edge = 2**31 // DIM
    slots = torch.tensor(
        [edge - 1, edge, edge + 1, num_slots - 1, num_slots - 2, 5], dtype=torch.int32,
        device=device,
    )  # fmt: skip
    pool = torch.full((num_slots, 1, DIM), 0x7F, dtype=torch.uint8, device=device)
    values = torch.randn(6, 1, DIM, device=device).to(torch.float8_e4m3fn)
    pool[slots.long()] = values.view(torch.uint8)
    pool = pool.view(torch.float8_e4m3fn)
    kv = torch.tensor([0, 6], dtype=torch.int32, device=device)
    live = LiveSlots(num_slots, device)
    kv_rows = live.update(slots, kv, 1)
    rows = Workspace(num_slots, DIM, torch.bfloat16, device).fill(pool, live)
    assert torch.equal(rows[kv_rows.long()], values.to(torch.bfloat16))
    q = (torch.randn(1, heads, DIM, device=device) * 0.3).to(torch.bfloat16)
    wrapper = make_wrapper(device)
    qo = torch.tensor([0, 1], dtype=torch.int32, device=device)
    plan(wrapper, qo, kv, kv_rows, heads, causal=False)
    exact, _ = ref_mla(q[..., :CKV], q[..., CKV:], pool, slots, kv, sm_scale=SM_SCALE)
    error = (run(wrapper, q, rows).cpu().double() - exact).norm() / exact.norm()
    assert error < 2**-7


def test_cost_does_not_follow_the_pool(device):
    """List and cast of 8 x 8192 tokens: pools of 131,072 and 2,097,152 slots within noise."""
    medians = []
    for num_slots in (131_072, 2_097_152):
        _, pool, _, kv, slots = make_batch([8192] * 8, num_slots, device, heads=1)
        live = LiveSlots(num_slots, device)
        workspace = Workspace(num_slots, DIM, torch.bfloat16, device)
        live.update(slots, kv, 8)
        workspace.fill(pool, live)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(10):
                live.update(slots, kv, 8)
                workspace.fill(pool, live)
        times = []
        for _ in range(21):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        medians.append(sorted(times)[10])
        del pool, live, workspace, graph
    # rows scattered over 16 x the memory miss the TLB more often; the cast of the pool took 16 x
    assert medians[1] < 1.25 * medians[0], medians


@pytest.mark.sm90
@pytest.mark.parametrize("phase", ["decode", "extend"])
@pytest.mark.parametrize("path", ["gather_cast", "native"])
@pytest.mark.parametrize("heads", [8, 16, 20, 128])
def test_probe_passes(path, phase, heads, device):
    """The shipped probe itself, per path, phase and head count."""
    facts = probe.Facts(
        torch.cuda.get_device_name(), torch.cuda.get_device_capability(), heads, 512, 64,
        "bfloat16", "float8_e4m3fn",
    )  # fmt: skip
    check = probe.run_probe(path, phase, facts, str(device))
    assert check.ok, check


@pytest.mark.sm90
@pytest.mark.parametrize("kv_lens", [[1], [65, 1, 1000], [4096] * 8], ids=str)
def test_native_stays_within_its_budget(kv_lens, device):
    """Error at most twice that of the bf16 kernel on the same rows, plus one ulp."""
    heads = 16
    q, pool, qo, kv, slots = make_batch(kv_lens, 40_000, device, heads=heads)
    native, bf16 = make_wrapper(device), make_wrapper(device)
    plan(native, qo, kv, slots, heads, causal=False, kv_dtype=torch.float8_e4m3fn)
    plan(bf16, qo, kv, slots, heads, causal=False)
    exact, _ = ref_mla(q[..., :CKV], q[..., CKV:], pool, slots, kv, sm_scale=SM_SCALE)
    # the native kernel reads the NaN codes as +-480, so NaN rows are no poison for it: compare
    ours = run(native, q, pool, ckv_scale=1.0, kpe_scale=1.0).cpu().double()
    base = run(bf16, q, pool.to(torch.bfloat16)).cpu().double()
    budget = 2 * ((base - exact).abs().max() + 2**-8 * exact.abs().max())
    assert (ours - exact).abs().max() <= budget
    assert (ours - exact).norm() / exact.norm() <= 2**-8
