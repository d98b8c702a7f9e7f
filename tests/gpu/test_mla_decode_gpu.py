"""The fused decode kernel on a device: CUDA (each matrix path) and Triton against float64."""

from __future__ import annotations

import pytest
import torch
from mla_decode_cases import SM_SCALE, Case, check_case, make_case

from sglang_fp8mla.kernels.mla_decode import CudaConfig, MlaDecodePlan, mla_decode

pytestmark = pytest.mark.gpu
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

# what the shipped choice does not take on this GPU: other copies, other warp groups, mma.sync in
# place of wgmma
SHAPES = {
    "async": (CudaConfig(16, 1, 2, False, 2), None),
    "h8": (CudaConfig(8, 1, 2, True, 2), None),
    "two-groups": (CudaConfig(16, 2, 5, True, 1), None),
    "h8-five-stages": (CudaConfig(8, 1, 5, True, 1), None),
    "h32": (CudaConfig(32, 2, 4, True, 1), None),
    "h64": (CudaConfig(64, 2, 3, True, 1), None),
    "h64-apart": (CudaConfig(64, 2, 3, True, 1, apart=True), None),
    "one-block": (CudaConfig(16, 1, 5, True, 1), None),
    "mma": (CudaConfig(16, 1, 2, False, 2), "sm_90"),
}


def attend(case: Case, backend: str | None = None, plan: MlaDecodePlan | None = None, **options):
    if plan is None:
        plan = MlaDecodePlan(
            max_bs=max(1, case.bs),
            num_heads=case.q_nope.shape[1],
            device="cuda",
            kpe_dim=0 if case.q_pe is None else 64,
            q_dtype=case.q_nope.dtype,
            pool_dtype=case.pool.dtype,
            backend=backend,
            **options,
        )
    plan.plan(case.kv_indptr, case.bs)
    plan.run(
        case.q_nope, case.q_pe, case.pool, case.kv_indices, case.kv_indptr, case.out,
        sm_scale=SM_SCALE, lse_log2=case.lse,
    )  # fmt: skip
    return plan


@pytest.fixture(params=["cuda", "triton"])
def backend(request):
    if request.param == "cuda" and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("needs SM80")
    return request.param


LENGTHS = [
    [1],
    [64],
    [0, 1, 63, 64, 65, 0],
    [5000],
    [300, 0, 4100, 17, 129, 1],
    [7] * 300,
    list(range(90, 120)),
]


@pytest.mark.parametrize("kv_lens", LENGTHS, ids=lambda x: f"{len(x)}x{x[0]}")
@pytest.mark.parametrize("heads", [1, 8, 16, 128])
def test_matches_float64(kv_lens, heads, backend):
    """Tails, empty and padded rows, split requests, more requests than workers."""
    case = make_case(kv_lens, heads=heads, device="cuda", pad_rows=2, seed=heads)
    attend(case, backend)
    check_case(case)


@pytest.mark.parametrize("heads", [2, 4, 12, 20, 32, 40, 64, 96])
def test_every_head_count(heads, backend):
    case = make_case([65, 700], heads=heads, device="cuda")
    attend(case, backend)
    check_case(case)


@pytest.mark.parametrize("kpe_dim", [0, 64])
@pytest.mark.parametrize("pool_dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("q_dtype", [torch.float16, torch.bfloat16], ids=str)
def test_dtypes(kpe_dim, pool_dtype, q_dtype, backend):
    case = make_case(
        [1000, 3], heads=16, device="cuda", kpe_dim=kpe_dim, pool_dtype=pool_dtype, q_dtype=q_dtype
    )
    attend(case, backend)
    check_case(case)


@pytest.mark.parametrize("q_scale", [1e-5, 1e-2, 30.0, 1e3, 1e5])
def test_any_logit_scale(q_scale, backend):
    case = make_case([3000], heads=16, device="cuda", q_scale=q_scale)
    attend(case, backend)
    check_case(case)


@pytest.mark.sm90
@pytest.mark.parametrize("name", list(SHAPES))
@pytest.mark.parametrize("kv_lens", [[5000], [300, 0, 4100, 17, 129, 1]], ids=str)
def test_other_shapes_of_the_kernel(name, kv_lens):
    config, arch = SHAPES[name]
    case = make_case(kv_lens, heads=min(config.heads, 40), device="cuda", pad_rows=1)
    attend(case, "cuda", config=config, arch=arch)
    check_case(case, name=name)


def test_replays_with_new_lengths(backend):
    """One captured graph of two layers, five batches: lengths live on the device only."""
    bs, heads = 5, 16
    cases = [
        make_case(lens, heads=heads, device="cuda", num_slots=24_000, seed=i)
        for i, lens in enumerate(
            [
                [100] * 5,
                [0, 0, 0, 0, 1],
                [20_000, 1, 0, 64, 65],
                [33] * 5,
                [4000, 3000, 2000, 1000, 1],
            ]
        )
    ]
    static = make_case([4900] * bs, heads=heads, device="cuda", num_slots=24_000 + 600)
    pool = torch.empty_like(cases[0].pool)
    plan = MlaDecodePlan(
        max_bs=8, num_heads=heads, device="cuda", q_dtype=torch.bfloat16, pool_dtype=E4M3,
        backend=backend,
    )  # fmt: skip

    def step():
        plan.plan(static.kv_indptr, bs)
        for _ in range(2):
            plan.run(
                static.q_nope, static.q_pe, pool, static.kv_indices, static.kv_indptr, static.out,
                sm_scale=SM_SCALE, lse_log2=static.lse,
            )  # fmt: skip

    pool.view(torch.uint8).copy_(cases[0].pool.view(torch.uint8))
    static.kv_indptr.copy_(cases[0].kv_indptr)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for case in cases:
        pool.view(torch.uint8).copy_(case.pool.view(torch.uint8))
        static.kv_indptr.copy_(case.kv_indptr)
        static.kv_indices[: case.kv_indices.shape[0]] = case.kv_indices
        static.q_nope.copy_(case.q_nope)
        static.q_pe.copy_(case.q_pe)
        static.out.fill_(torch.nan)
        static.lse.fill_(torch.nan)
        graph.replay()
        case.out.copy_(static.out)
        case.lse.copy_(static.lse)
        check_case(case)


def test_offsets_past_two_gib(backend):
    """Slot 3,728,271 times 576 bytes passes 2**31."""
    slots = 3_800_000
    case = make_case([257], heads=16, device="cuda")
    rows = torch.randint(3_728_271, slots, (257,), device="cuda").unique()
    rows = rows[torch.randperm(rows.numel(), device="cuda")]
    big = torch.full((slots, 1, 576), 0x7F, dtype=torch.uint8, device="cuda").view(E4M3)
    old = case.kv_indices[: rows.numel()].long()
    big.view(torch.uint8)[rows] = case.pool.view(torch.uint8)[old]
    case.kv_indices[: rows.numel()] = rows.to(torch.int32)
    case.kv_indptr[1] = rows.numel()
    case.pool = big
    attend(case, backend)
    check_case(case)


def test_is_deterministic(backend):
    case = make_case([5000, 100, 0, 777], heads=16, device="cuda")
    attend(case, backend)
    first, lse = case.out.clone(), case.lse.clone()
    for _ in range(5):
        case.out.fill_(torch.nan)
        attend(case, backend)
        assert torch.equal(case.out, first)
        assert torch.equal(case.lse, lse)


@pytest.mark.parametrize("heads", [8, 16, 128])
def test_fixed_splits_do_not_depend_on_the_batch(heads, backend):
    """Batch-invariant mode: every request alone, and in three batches of other order, bitwise."""
    lens = [1, 5000, 64, 777, 0, 2049, 30_000]
    case = make_case(lens, heads=heads, device="cuda")
    plan = attend(case, backend, split_len=512)
    check_case(case)
    want, want_lse = case.out.clone(), case.lse.clone()
    starts = case.kv_indptr.tolist()
    for seed in range(4):
        order = torch.randperm(len(lens), generator=torch.Generator().manual_seed(seed)).tolist()
        if seed == 3:
            order = order[:1]
        indices = torch.cat([case.kv_indices[starts[r] : starts[r + 1]] for r in order])
        indptr = torch.tensor([0] + [lens[r] for r in order], device="cuda").cumsum(0).int()
        out, lse = torch.empty_like(want[: len(order)]), torch.empty_like(want_lse[: len(order)])
        plan.plan(indptr, len(order))
        plan.run(
            case.q_nope[order], case.q_pe[order], case.pool, indices, indptr, out,
            sm_scale=SM_SCALE, lse_log2=lse,
        )  # fmt: skip
        assert torch.equal(out, want[order])
        assert torch.equal(lse, want_lse[order])


def test_fixed_splits_do_not_depend_on_how_many_units_a_worker_has(backend):
    """80 requests and padded rows, some 500 units for 264 workers: requests alone, bitwise."""
    generator = torch.Generator().manual_seed(1)
    lens = torch.randint(1, 8300, (60,), generator=generator).tolist() + list(range(1, 81, 4))
    case = make_case(lens, heads=16, device="cuda", pad_rows=3)
    plan = attend(case, backend, split_len=512)
    starts = case.kv_indptr.tolist()
    for r in range(0, len(lens), 3):
        indices = case.kv_indices[starts[r] : starts[r + 1]]
        indptr = torch.tensor([0, lens[r]], dtype=torch.int32, device="cuda")
        out, lse = torch.empty_like(case.out[:1]), torch.empty_like(case.lse[:1])
        plan.plan(indptr, 1)
        plan.run(
            case.q_nope[r : r + 1], case.q_pe[r : r + 1], case.pool, indices, indptr, out,
            sm_scale=SM_SCALE, lse_log2=lse,
        )  # fmt: skip
        assert torch.equal(out[0], case.out[r])
        assert torch.equal(lse[0], case.lse[r])


def test_foreign_nan_stays_out(backend):
    """A NaN code in one request's row shows there and nowhere else."""
    case = make_case([300, 300], heads=16, device="cuda")
    case.pool.view(torch.uint8)[case.kv_indices[5].long(), 0, 7] = 0x7F
    attend(case, backend)
    assert case.out[0].isnan().any()
    assert not case.out[1].isnan().any()


def test_empty_batch(backend):
    case = make_case([], heads=16, device="cuda", pad_rows=3)
    attend(case, backend)
    assert (case.out == 0).all()
    assert (case.lse == -torch.inf).all()


def test_convenience_function(backend):
    case = make_case([500, 20], heads=16, device="cuda")
    out, lse = mla_decode(
        case.q_nope, case.q_pe, case.pool, case.kv_indices, case.kv_indptr[:3],
        sm_scale=SM_SCALE, backend=backend,
    )  # fmt: skip
    case.out.copy_(out)
    case.lse.copy_(lse)
    check_case(case)
