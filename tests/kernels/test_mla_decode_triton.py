"""The portable kernel's values, interpreted, and its compilation for every target."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from mla_decode_cases import SM_SCALE, check_case, make_case

from sglang_fp8mla.kernels.mla_decode import MlaDecodePlan

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="compiled in tests/gpu")


def attend(case, *, split_len=None, plan=None):
    plan = plan or MlaDecodePlan(
        max_bs=max(1, case.bs),
        num_heads=case.q_nope.shape[1],
        device="cpu",
        kpe_dim=0 if case.q_pe is None else 64,
        q_dtype=case.q_nope.dtype,
        pool_dtype=case.pool.dtype,
        split_len=split_len,
        backend="triton",
    )
    plan.plan(case.kv_indptr, case.bs)
    plan.run(
        case.q_nope, case.q_pe, case.pool, case.kv_indices, case.kv_indptr, case.out,
        sm_scale=SM_SCALE, lse_log2=case.lse,
    )  # fmt: skip
    return plan


@interpreted
@pytest.mark.parametrize("kv_lens", [[0], [1], [31, 32, 33], [0, 65, 0, 130], [1100]], ids=str)
@pytest.mark.parametrize("heads", [1, 12, 20])
def test_matches_float64(kv_lens, heads):
    """Tails, empty rows and a request longer than BLOCK_N ** 2, in one or several splits."""
    case = make_case(kv_lens, heads=heads, pad_rows=1)
    attend(case)
    check_case(case)


@interpreted
@pytest.mark.parametrize("heads", [8, 16, 64, 128])
def test_every_head_block(heads):
    case = make_case([40], heads=heads)
    attend(case)
    check_case(case)


@interpreted
@pytest.mark.parametrize("kpe_dim", [0, 64])
@pytest.mark.parametrize("pool_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("q_dtype", [torch.float16, torch.bfloat16], ids=str)
def test_dtypes(kpe_dim, pool_dtype, q_dtype):
    case = make_case([50], heads=3, kpe_dim=kpe_dim, pool_dtype=pool_dtype, q_dtype=q_dtype)
    attend(case)
    check_case(case)


@interpreted
@pytest.mark.parametrize("q_scale", [1e-5, 1e3, 1e5])
def test_any_logit_scale(q_scale):
    case = make_case([150], heads=2, q_scale=q_scale)
    attend(case)
    check_case(case)


@interpreted
def test_fixed_splits_do_not_depend_on_the_batch():
    case = make_case([10, 300, 0], heads=2)
    plan = attend(case, split_len=64)
    check_case(case)
    start = case.kv_indptr[1]
    alone = torch.empty_like(case.out[1:2])
    plan.plan(torch.tensor([0, 300], dtype=torch.int32), 1)
    plan.run(
        case.q_nope[1:2], case.q_pe[1:2], case.pool, case.kv_indices[start:],
        torch.tensor([0, 300], dtype=torch.int32), alone, sm_scale=SM_SCALE,
    )  # fmt: skip
    assert torch.equal(alone[0], case.out[1])


@interpreted
@pytest.mark.parametrize("pool_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_every_code_is_exact(pool_dtype):
    """One token makes softmax 1: the output is the row itself, bit for bit, NaN codes included."""
    codes = torch.arange(256, dtype=torch.uint8)
    case = make_case([1], heads=1, q_dtype=torch.float16, pool_dtype=pool_dtype)
    slot = case.kv_indices[0].long()
    finite = codes.view(pool_dtype).float().isfinite()
    row = torch.where(finite, codes, torch.zeros_like(codes))
    case.pool.view(torch.uint8)[slot, 0, :512] = row.repeat(2)
    attend(case)
    assert torch.equal(case.out[0, 0, :256].float(), row.view(pool_dtype).float())
    case.pool.view(torch.uint8)[slot, 0, :512] = codes.repeat(2)
    attend(case)
    assert case.out[0, 0].isnan().any()


_COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from sglang_fp8mla.kernels import mla_decode_triton as m

BF16 = ("q_nope", "q_pe", "out")
I32 = ("kv_indices", "kv_indptr", "batch")
F32 = ("lse_log2", "part_out", "part_lse")
for arch in (80, 86, 89, 90, 100, 120):
    cast = arch >= 89
    for kernel in (m._decode_kernel, m._merge_kernel):
        constants = dict(HAS_LSE=True, ROUND=64)
        if kernel is m._decode_kernel:
            constants.update(KPE=64, CAST=cast, E5M2=False, BLOCK_H=m.BLOCK_H, BLOCK_N=32)
        types = dict.fromkeys(kernel.arg_names, "i32")
        types.update(dict.fromkeys(constants, "constexpr"))
        types.update({n: "*bf16" for n in BF16 if n in types})
        types.update({n: "*i32" for n in I32 if n in types})
        types.update({n: "*fp32" for n in F32 if n in types})
        types.update({n: "fp32" for n in ("scale_log2", "v_scale") if n in types})
        if "pool" in types:
            types["pool"] = "*fp8e4nv" if cast else "*u8"
        values = {(kernel.arg_names.index(k),): v for k, v in constants.items()}
        source = ASTSource(kernel, types, constexprs=values)
        options = dict(num_warps=4, num_stages=1)
        done = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
        print(arch, kernel.__name__, done.metadata.shared)
"""


def test_compiles_for_every_target():
    """triton.compile needs no GPU; SM86, SM89 and SM120 give a block 99 KB."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line.split() for line in done.stdout.splitlines()]
    assert len(rows) == 12
    for arch, kernel, shared in rows:
        limit = 101_376 if arch in ("86", "89", "120") else 166_912
        assert int(shared) <= limit, f"{kernel} on SM{arch}: {shared} bytes"
