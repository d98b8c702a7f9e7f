"""The stand-ins for FlashInfer keep its contract: they accept and refuse what it does.

Every test runs twice, over our reference wrapper and over FlashInfer's own one with a torch module
for a kernel, so that the first cannot drift from the second.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from contract.cpu_sglang import hopper, reference_flashinfer
from contract.scene import Shape, dequantise, fp8_values, make_q, ref_attention

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

SHAPE = Shape(slots=64)
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16


@pytest.fixture(params=[reference_flashinfer, hopper], ids=["reference", "flashinfer"])
def make_wrapper(request: pytest.FixtureRequest) -> Iterator[Any]:
    with request.param():
        import sglang.srt.layers.attention.flashinfer_mla_backend as stock

        workspace = torch.empty(1024, dtype=torch.uint8)
        yield lambda **kwargs: stock.BatchMLAPagedAttentionWrapper(
            workspace, backend="auto", **kwargs
        )


def ints(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def plan_args(kv_lens: list[int], q_lens: list[int] | None = None, **over: Any) -> tuple[Any, ...]:
    q_lens = q_lens or [1] * len(kv_lens)
    args: dict[str, Any] = {
        "qo_indptr": ints(0, *torch.tensor(q_lens).cumsum(0).tolist()),
        "kv_indptr": ints(0, *torch.tensor(kv_lens).cumsum(0).tolist()),
        "kv_indices": torch.arange(1, sum(kv_lens) + 1, dtype=torch.int32),
        "kv_len_arr": ints(*kv_lens),
        "heads": SHAPE.heads,
        "ckv": 512,
        "kpe": 64,
        "page_size": 1,
        "causal": False,
        "sm_scale": SHAPE.sm_scale,
        "q_dtype": BF16,
        "kv_dtype": BF16,
    }
    return tuple((args | over).values())


def make_pool(dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(64, 1, 576, generator=generator).to(dtype)


def run(wrapper: Any, pool: torch.Tensor, n: int, **kwargs: Any) -> Any:
    q = make_q(n, SHAPE)
    return wrapper.run(q[..., :512], q[..., 512:], pool[..., :512], pool[..., 512:], **kwargs)


@pytest.mark.parametrize("kv_dtype", [BF16, E4M3], ids=["bf16", "e4m3"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_attends_like_the_oracle(make_wrapper: Any, kv_dtype: torch.dtype, causal: bool) -> None:
    """Values, per request and per query token, with scales where an FP8 plan wants them."""
    kv_lens, q_lens = [5, 9], [2, 3]
    wrapper, pool = make_wrapper(), make_pool(kv_dtype)
    wrapper.plan(*plan_args(kv_lens, q_lens, causal=causal, kv_dtype=kv_dtype))
    scales = {"ckv_scale": 1.0, "kpe_scale": 1.0} if kv_dtype == E4M3 else {}
    out, lse_log2 = run(wrapper, pool, 5, return_lse=True, **scales)
    q, at, begin = make_q(5, SHAPE), 0, 1
    for kv_len, q_len in zip(kv_lens, q_lens):
        rows = dequantise(pool[begin : begin + kv_len, 0])
        exact, exact_lse = ref_attention(
            q[at : at + q_len], rows, ckv=512, sm_scale=SHAPE.sm_scale, causal=causal
        )
        # one rounding to bf16 at the end, one to fp32
        torch.testing.assert_close(out[at : at + q_len].double(), exact, rtol=2**-8, atol=1e-6)
        torch.testing.assert_close(
            lse_log2[at : at + q_len].double(), exact_lse, rtol=2**-22, atol=2**-22
        )
        at, begin = at + q_len, begin + kv_len


@pytest.mark.parametrize("name", ["qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"])
def test_refuses_metadata_that_is_not_int32(make_wrapper: Any, name: str) -> None:
    position = ["qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"].index(name)
    args = list(plan_args([3, 4]))
    args[position] = args[position].long()
    with pytest.raises(ValueError, match="int32"):
        make_wrapper().plan(*args)


def test_refuses_an_empty_batch(make_wrapper: Any) -> None:
    """cases.md 19: an idle rank must never plan."""
    with pytest.raises(ValueError, match="nonempty batch"):
        make_wrapper().plan(*plan_args([]))


def test_refuses_lengths_that_disagree_with_kv_indptr(make_wrapper: Any) -> None:
    with pytest.raises(ValueError, match="kv_indptr"):
        make_wrapper().plan(*plan_args([3, 4], kv_len_arr=ints(3, 5)))


def test_refuses_indices_shorter_than_kv_indptr(make_wrapper: Any) -> None:
    with pytest.raises(ValueError, match="kv_indices"):
        make_wrapper().plan(*plan_args([3, 4], kv_indices=ints(1, 2, 3)))


@pytest.mark.parametrize(
    ("kv_dtype", "q_dtype"),
    [(torch.uint8, BF16), (torch.float8_e5m2, BF16), (E4M3, torch.float16), (torch.float16, BF16)],
    ids=["uint8", "e5m2", "e4m3-fp16", "fp16-bf16"],
)
def test_refuses_dtypes_its_kernel_lacks(
    make_wrapper: Any, kv_dtype: torch.dtype, q_dtype: torch.dtype
) -> None:
    """cases.md 14, 32, 33."""
    with pytest.raises(ValueError, match=r"dtype|q_data_type"):
        make_wrapper().plan(*plan_args([3], kv_dtype=kv_dtype, q_dtype=q_dtype))


@pytest.mark.parametrize(
    "scales",
    [{}, {"ckv_scale": 1.0}, {"kpe_scale": 1.0}, {"ckv_scale": 0.0, "kpe_scale": 1.0}],
    ids=["none", "ckv", "kpe", "zero"],
)
def test_an_fp8_run_needs_both_scales(make_wrapper: Any, scales: dict[str, float]) -> None:
    """cases.md 10: the scale omitted at run."""
    wrapper = make_wrapper()
    wrapper.plan(*plan_args([3], kv_dtype=E4M3))
    with pytest.raises(ValueError, match="scale"):
        run(wrapper, make_pool(E4M3), 1, **scales)


def test_a_16_bit_run_takes_no_scale(make_wrapper: Any) -> None:
    wrapper = make_wrapper()
    wrapper.plan(*plan_args([3]))
    with pytest.raises(ValueError, match="only valid when kv_data_type is FP8"):
        run(wrapper, make_pool(BF16), 1, ckv_scale=1.0, kpe_scale=1.0)


def test_the_dtype_at_run_is_the_planned_one(make_wrapper: Any) -> None:
    """The stock crash when the cast is simply removed: an FP8 pool under a bf16 plan."""
    wrapper = make_wrapper()
    wrapper.plan(*plan_args([3]))
    with pytest.raises(ValueError, match="does not match the planned"):
        run(wrapper, make_pool(E4M3), 1)


def test_graph_buffers_hold_the_batch(make_wrapper: Any) -> None:
    """A wrapper captured for two requests takes two, from its own buffers, and refuses three."""
    wrapper = make_wrapper(
        use_cuda_graph=True,
        qo_indptr=torch.zeros(3, dtype=torch.int32),
        kv_indptr=torch.zeros(3, dtype=torch.int32),
        kv_indices=torch.zeros(32, dtype=torch.int32),
        kv_len_arr=torch.zeros(2, dtype=torch.int32),
    )
    wrapper.plan(*plan_args([3, 4]))
    assert wrapper._kv_indices_buf[:7].tolist() == list(range(1, 8))
    with pytest.raises(ValueError, match="buffer"):
        wrapper.plan(*plan_args([3, 4, 5]))


def test_reads_only_what_the_plan_names(make_wrapper: Any) -> None:
    """Rows that no request references may be NaN."""
    wrapper, pool = make_wrapper(), make_pool(BF16)
    pool[0] = pool[8:] = torch.nan
    wrapper.plan(*plan_args([3, 4]))
    assert run(wrapper, pool, 2).isfinite().all()


def test_rows_past_the_queries_keep_their_contents(make_wrapper: Any) -> None:
    """cases.md 18: q has 8 rows and qo_indptr ends at 5."""
    wrapper, pool = make_wrapper(), make_pool(BF16)
    wrapper.plan(*plan_args([3, 4], [2, 3], causal=True))
    out = torch.full((8, SHAPE.heads, 512), 7.0, dtype=BF16)
    run(wrapper, pool, 8, out=out)
    assert (out[5:] == 7.0).all()
    assert (out[:5] != 7.0).any()


@pytest.mark.parametrize("dtype", [E4M3, torch.float8_e5m2], ids=["e4m3", "e5m2"])
def test_the_byte_table_is_torchs_for_all_codes(dtype: torch.dtype) -> None:
    """The oracle decodes bytes from the format's definition; torch must agree on all 256."""
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float().double()
    torch.testing.assert_close(fp8_values(dtype), codes, rtol=0, atol=0, equal_nan=True)
