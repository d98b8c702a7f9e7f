"""The CUDA source itself, run on the CPU: fragments, pipeline, work plan and merge against float64.

`mla_decode_emulator.cpp` gives the instructions in C++ as the PTX manual defines them; the
launcher under test is the real one, with g++'s build of the kernel in place of the GPU's.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
import torch
from mla_decode_cases import check_case, make_case

from sglang_fp8mla.kernels import mla_decode
from sglang_fp8mla.kernels.mla_decode import CudaConfig, MlaDecodePlan

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
HERE = Path(__file__).parent
SOURCE = Path(mla_decode.__file__).with_name("mla_decode.cu")
WGMMA = ("-DEMULATE_WGMMA", "-D__CUDA_ARCH__=900")
SM89 = ("-D__CUDA_ARCH__=890",)
SM80 = ("-D__CUDA_ARCH__=800",)

CONFIGS = {
    "h16-wgmma-bulk": (CudaConfig(16, 1, 2, True, 2), WGMMA),
    "h16-wgmma-async": (CudaConfig(16, 1, 3, False, 3), WGMMA),
    "h16-mma-sm80": (CudaConfig(16, 1, 2, False, 2), SM80),
    "h8-wgmma": (CudaConfig(8, 1, 2, True, 2), WGMMA),
    "h8-mma-sm89": (CudaConfig(8, 1, 2, False, 2), SM89),
    "h16-two-groups": (CudaConfig(16, 2, 5, True, 1), WGMMA),
    "h8-five-stages": (CudaConfig(8, 1, 5, True, 1), WGMMA),
    "h32-two-groups": (CudaConfig(32, 2, 4, True, 2), WGMMA),
    "h64-two-groups": (CudaConfig(64, 2, 3, True, 2), WGMMA),
    "h64-apart": (CudaConfig(64, 2, 3, True, 2, apart=True), WGMMA),
}


class EmulatedModule:
    """Stands in for nvrtc.Module: the same launches, block after block on the CPU."""

    def __init__(self, library: Path) -> None:
        self._emulate = ctypes.CDLL(str(library)).emulate

    def launch(self, name, grid, threads, *args, shared=0, stream=0, overlap=False):
        if len(args) == 1:
            packed = ctypes.string_at(ctypes.addressof(args[0]), ctypes.sizeof(args[0]))
        else:
            fields = [(f"f{i}", type(a)) for i, a in enumerate(args)]
            struct = type("Args", (ctypes.Structure,), {"_fields_": fields})
            packed = bytes(struct(*(a.value for a in args)))
        code = self._emulate(name.encode(), grid[0], grid[1], threads, packed)
        assert code == 0, f"{name}: a barrier was not reached by every thread"


@cache
def compile_options(options, target, directory):
    out = Path(directory) / f"{abs(hash((options, target))):x}.so"
    subprocess.run(
        ["g++", "-std=c++17", "-O2", "-w", "-shared", "-fPIC", *target, *options,
         f'-DMLA_DECODE_SOURCE="{SOURCE}"', str(HERE / "mla_decode_emulator.cpp"), "-o", str(out)],
        check=True,
    )  # fmt: skip
    return EmulatedModule(out)


def build(config, target, kpe_dim, e5m2, q_bf16, directory):
    options = config.options(kpe_dim=kpe_dim, e5m2=e5m2, q_bf16=q_bf16)
    return compile_options(options, target, directory)


@pytest.fixture(scope="module")
def build_dir(tmp_path_factory):
    return str(tmp_path_factory.mktemp("emulated"))


def plan_for(case, name, build_dir, *, split_len=None, max_bs=None):
    config, target = CONFIGS[name]
    kpe_dim = 0 if case.q_pe is None else 64
    e5m2, bf16 = case.pool.dtype == torch.float8_e5m2, case.q_nope.dtype == torch.bfloat16
    return MlaDecodePlan(
        max_bs=max_bs or case.bs,
        num_heads=case.q_nope.shape[1],
        device="cpu",
        kpe_dim=kpe_dim,
        q_dtype=case.q_nope.dtype,
        pool_dtype=case.pool.dtype,
        split_len=split_len,
        backend="cuda",
        config=config,
        _module=build(config, target, kpe_dim, e5m2, bf16, build_dir),
    )


def attend(plan, case):
    plan.plan(case.kv_indptr, case.bs)
    return plan.run(
        case.q_nope, case.q_pe, case.pool, case.kv_indices, case.kv_indptr, case.out,
        sm_scale=192**-0.5, lse_log2=case.lse,
    )  # fmt: skip


LENGTHS = [[1], [65, 0, 63, 64], [0, 1, 300, 0, 129], [700]]


@pytest.mark.parametrize("name", list(CONFIGS))
@pytest.mark.parametrize("kv_lens", LENGTHS, ids=str)
def test_matches_float64(name, kv_lens, build_dir):
    """Tails, empty rows, requests split between workers and workers between requests."""
    heads = min(CONFIGS[name][0].heads, 64)
    case = make_case(kv_lens, heads=heads, pad_rows=1, seed=len(kv_lens))
    attend(plan_for(case, name, build_dir), case)
    check_case(case, name=name)


@pytest.mark.parametrize("heads", [1, 12, 20])
def test_pads_heads_inside(heads, build_dir):
    """20 heads are two blocks of 16 over the same tokens; heads past the end are never stored."""
    case = make_case([70, 200], heads=heads)
    attend(plan_for(case, "h16-wgmma-bulk", build_dir), case)
    check_case(case)


@pytest.mark.parametrize("name", ["h16-wgmma-bulk", "h16-mma-sm80"])
@pytest.mark.parametrize("kpe_dim", [0, 64])
@pytest.mark.parametrize("pool_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("q_dtype", [torch.float16, torch.bfloat16], ids=str)
def test_dtypes(name, kpe_dim, pool_dtype, q_dtype, build_dir):
    case = make_case([100, 3], heads=5, kpe_dim=kpe_dim, pool_dtype=pool_dtype, q_dtype=q_dtype)
    attend(plan_for(case, name, build_dir), case)
    check_case(case)


@pytest.mark.parametrize("q_scale", [1e-5, 1.0, 1e3, 1e5])
def test_any_logit_scale(q_scale, build_dir):
    """q is scaled by a power of two per head before it becomes fp16."""
    case = make_case([333], heads=3, q_scale=q_scale)
    attend(plan_for(case, "h16-wgmma-bulk", build_dir), case)
    check_case(case)


def test_fixed_splits_do_not_depend_on_the_batch(build_dir):
    """Batch-invariant mode: request 700 alone and in company, bitwise."""
    alone = make_case([700], heads=4, seed=3)
    plan = plan_for(alone, "h16-wgmma-bulk", build_dir, split_len=128, max_bs=4)
    attend(plan, alone)
    check_case(alone)
    bs3 = make_case([90, 700, 0, 333], heads=4, seed=4, num_slots=1200)
    # the same rows at other slots, the same query, second in the batch
    bs3.pool.view(torch.uint8)[bs3.kv_indices[90:790].long()] = alone.pool.view(torch.uint8)[
        alone.kv_indices[:700].long()
    ]
    bs3.q_nope[1], bs3.q_pe[1] = alone.q_nope[0], alone.q_pe[0]
    attend(plan, bs3)
    check_case(bs3)
    assert torch.equal(bs3.out[1], alone.out[0])
    assert torch.equal(bs3.lse[1], alone.lse[0])


@pytest.mark.parametrize(("workers", "kv_len"), [(10, 1300), (20, 2300)])
def test_merges_many_parts(workers, kv_len, build_dir):
    """20 parts of one request share 4 warps, 36 share 16; every part is one tile."""
    case = make_case([kv_len, 64], heads=3)
    config = CudaConfig(8, 1, 2, True, workers)
    module = build(config, WGMMA, 64, False, True, build_dir)
    plan = MlaDecodePlan(
        max_bs=2, num_heads=3, device="cpu", q_dtype=torch.bfloat16,
        pool_dtype=torch.float8_e4m3fn, backend="cuda", config=config, _module=module,
    )  # fmt: skip
    attend(plan, case)
    check_case(case)


@pytest.mark.parametrize("heads", [3, 12])
def test_both_shapes_of_the_shipped_choice(heads, build_dir, monkeypatch):
    """One plan object, batches of one and of four rows in turn: each by its own kernel and grid."""

    def emulated(index, arch, options):
        assert arch == "sm_90a"
        return compile_options(options, WGMMA, build_dir)

    monkeypatch.setattr(mla_decode, "_load_module", emulated)
    plan = MlaDecodePlan(
        max_bs=4, num_heads=heads, device="cpu", q_dtype=torch.bfloat16,
        pool_dtype=torch.float8_e4m3fn, backend="cuda",
    )  # fmt: skip
    assert len(plan._shapes) == 2
    for kv_lens in ([500], [90, 0, 200, 1], [300], [64, 64, 64, 64]):
        case = make_case(kv_lens, heads=heads)
        attend(plan, case)
        check_case(case, name=str(kv_lens))


def test_one_plan_serves_every_batch_size(build_dir):
    """What an earlier, larger plan left behind is not read again."""
    plan = None
    for kv_lens in ([300, 200, 5], [0], [64], [1, 1]):
        case = make_case(kv_lens, heads=2, pad_rows=1)
        plan = plan or plan_for(case, "h16-wgmma-bulk", build_dir, max_bs=3)
        attend(plan, case)
        check_case(case, name=str(kv_lens))


def test_foreign_nan_stays_out(build_dir):
    """An e4m3 NaN in one request's row stays in that request."""
    case = make_case([80, 80], heads=2)
    row = case.kv_indices[5].long()
    case.pool.view(torch.uint8)[row, 0, 7] = 0x7F
    attend(plan_for(case, "h16-wgmma-bulk", build_dir), case)
    assert case.out[0].isnan().any(), "a NaN in the request's own row must show"
    assert not case.out[1].isnan().any()
