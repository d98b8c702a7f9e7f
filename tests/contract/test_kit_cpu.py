"""SGLang's own MLA attention kit, on the CPU: stock `flashinfer`, and ours on every path.

The kit brings the pools, the index building, the updaters, the runner modes and its own reference.
FlashInfer's wrapper is the real one too; only its compiled kernel is torch (`hopper`). Every slot
that no request references is NaN before a forward.
"""

from __future__ import annotations

import os
import unittest
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NoReturn

import pytest
import torch
from contract.arms import arm
from contract.cpu_sglang import hopper, reference_flashinfer
from contract.scene import single_rank

pytest.importorskip("sglang")
pytestmark = [
    pytest.mark.sglang,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

DIMS = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "dtype": torch.bfloat16,
    "device": "cpu",
}
POOLS = {"bf16": None, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
# native takes e4m3 only (cases.md 32); a 16-bit pool is stock's business on every path
ARMS = [
    pytest.param(name, pool, id=f"{name}-{pool}")
    for name, pool in (
        ("stock", "bf16"),
        ("stock", "e4m3"),
        ("stock", "e5m2"),
        ("auto", "bf16"),
        ("gather_cast", "e4m3"),
        ("gather_cast", "e5m2"),
        ("native", "e4m3"),
    )
]
OURS = ARMS[3:]
CASES = (
    "mla_extend_page_size_1",
    "mla_extend_zero_prefix_exact_page",
    "mla_extend_zero_prefix_input_page_edges",
    "mla_extend_prefix_exact_page",
    "mla_extend_total_exact_page",
    "mla_extend_cross_page_boundary",
    "mla_extend_ragged_page_boundary",
    "mla_extend_page32_cross_boundary",
    "mla_decode_page_boundary",
    "mla_decode_bsz1_nonzero_prefix",
)


class NoSkip(unittest.TestCase):
    """The kit's `testcase`: it would skip when a backend does not build; here that is a failure."""

    def skipTest(self, reason: str) -> NoReturn:
        pytest.fail(reason)


@pytest.fixture
def kit() -> Any:
    single_rank()
    from sglang.test.kits.attention_unittest.attention_methods import mla_attention

    return mla_attention


@pytest.fixture
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    """Indirect on (arm, pool): the registered backend name, with the arm's path forced."""
    with hopper(), arm(request.param) as registered:
        yield registered


def use_pool(kit: Any, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype | None) -> None:
    """Give the kit's runner a pool of `dtype`, its reference the same rounding, and poison.

    The kit's reference attends to unrounded keys, which would need a tolerance for the loss of FP8
    itself; ours rounds the keys as the pool does, and keeps the kit's own tolerance.
    """
    runner_class, reference_class = kit.MockMLAModelRunner, kit.ReferenceDeepseekMLAAttention

    class Runner(runner_class):  # type: ignore[misc, valid-type]
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs | {"fp8_kv_cache": dtype is not None})
            if dtype == torch.float8_e5m2:
                old = self.token_to_kv_pool
                self.token_to_kv_pool = type(old)(
                    size=old.size,
                    page_size=old.page_size,
                    dtype=dtype,
                    kv_lora_rank=old.kv_lora_rank,
                    qk_rope_head_dim=old.qk_rope_head_dim,
                    layer_num=1,
                    device=self.device,
                    enable_memory_saver=False,
                )
                self.kv_cache_dtype, self.kv_cache_dtype_str = dtype, "fp8_e5m2"
                self.init_kv_index_translator()
            # 0xFF is NaN in e4m3, e5m2 and bf16
            self.token_to_kv_pool.kv_buffer[0].view(torch.uint8).fill_(0xFF)

    class Reference(reference_class):  # type: ignore[misc, valid-type]
        def project_latent_qk(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
            q, k, q_rope, k_rope = super().project_latent_qk(hidden_states)
            if dtype is not None:
                k, k_rope = k.to(dtype).to(k.dtype), k_rope.to(dtype).to(k_rope.dtype)
            return q, k, q_rope, k_rope

    monkeypatch.setattr(kit, "MockMLAModelRunner", Runner)
    monkeypatch.setattr(kit, "ReferenceDeepseekMLAAttention", Reference)


def run_eager(kit: Any, case: Any, backend: str, **dims: Any) -> tuple[torch.Tensor, torch.Tensor]:
    fixture = kit.build_mla_attention_fixture(
        NoSkip(), replace(case, backend=backend), **DIMS | dims
    )
    if backend != "flashinfer" and fixture.runner.kv_cache_dtype.itemsize == 1:
        # equality with stock would also hold if stock had attended
        forced = os.environ["SGLANG_FP8MLA_DECODE_PATH"]
        decision = fixture.backend.decision
        assert decision.decode.paths == decision.extend.paths == (forced,)
    return kit.run_mla_fixture_eager(fixture), kit.expected_mla_fixture_output(fixture)


def case_named(kit: Any, name: str) -> Any:
    return next(case for case in kit.make_mla_cases("flashinfer") if case.name == name)


def test_these_are_the_kits_cases(kit: Any) -> None:
    """A kit with other cases must not pass unseen; page sizes 1, 16 and 32 are in it."""
    cases = kit.make_mla_cases("flashinfer")
    assert tuple(case.name for case in cases) == CASES
    assert {case.page_size for case in cases} == {1, 16, 32}


def check_eager(
    kit: Any, monkeypatch: pytest.MonkeyPatch, name: str, pool: str, case: Any, **dims: Any
) -> None:
    """Within the kit's tolerance of the kit's reference, and to the last bit what stock gives.

    For `native` equality says that plan, scales and rows reach the kernel as they should; what its
    compiled kernel rounds is a matter for the GPU.
    """
    use_pool(kit, monkeypatch, POOLS[pool])
    actual, expected = run_eager(kit, case, name, **dims)
    torch.testing.assert_close(actual, expected, atol=kit.MLA_ATOL, rtol=kit.MLA_RTOL)
    if name != "flashinfer":
        stock, _ = run_eager(kit, case, "flashinfer", **dims)
        assert torch.equal(actual, stock)


@pytest.mark.parametrize("case_name", CASES)
@pytest.mark.parametrize(("name", "pool"), ARMS, indirect=["name"])
def test_eager(
    kit: Any, monkeypatch: pytest.MonkeyPatch, name: str, pool: str, case_name: str
) -> None:
    """The kit's ten eager cases with DeepSeek's row, 512 + 64."""
    check_eager(kit, monkeypatch, name, pool, case_named(kit, case_name))


@pytest.mark.parametrize("case_name", ["mla_extend_ragged_page_boundary", CASES[-2]])
@pytest.mark.parametrize(("name", "pool"), OURS, indirect=["name"])
def test_eager_without_rope(
    kit: Any, monkeypatch: pytest.MonkeyPatch, name: str, pool: str, case_name: str
) -> None:
    """cases.md 15: rows of 512 values and no rope part."""
    check_eager(kit, monkeypatch, name, pool, case_named(kit, case_name), qk_rope_head_dim=0)


@pytest.mark.parametrize("case_name", CASES)
def test_stock_keeps_the_kits_float32_precision(kit: Any, case_name: str) -> None:
    """The kit as it stands, float32 and its own small dimensions, over the reference wrapper."""
    with reference_flashinfer():
        small = {"kv_lora_rank": 32, "qk_rope_head_dim": 0, "dtype": torch.float32}
        actual, expected = run_eager(kit, case_named(kit, case_name), "flashinfer", **small)
    # fp32 sums of at most 576 products and 34 keys in the kit's reference
    torch.testing.assert_close(actual, expected, atol=2e-6, rtol=2e-6)


# runner modes ---------------------------------------------------------------------------------


def in_mode(module: Any, function: str, case: Any, **kwargs: Any) -> None:
    """Run one of the kit's runner modes; it compares with the kit's reference itself."""
    run: Callable[..., None] = getattr(module, function)
    run(NoSkip(), case, **DIMS | kwargs)


@pytest.mark.parametrize("case_name", CASES[-2:])
@pytest.mark.parametrize(("name", "pool"), ARMS, indirect=["name"])
def test_decode_graph_replay(
    kit: Any, monkeypatch: pytest.MonkeyPatch, name: str, pool: str, case_name: str
) -> None:
    """Capture with 4 lanes of one token, then replay with other lengths and padded lanes."""
    from sglang.test.kits.attention_unittest.runner_modes import cuda_graph_decode_runner as mode

    use_pool(kit, monkeypatch, POOLS[pool])
    case = replace(case_named(kit, case_name), backend=name)
    in_mode(mode, "run_mla_cuda_graph_decode_case", case)


@pytest.mark.parametrize("spec_kind", ["eagle", "dflash", "ngram"])
@pytest.mark.parametrize(
    "function", ["run_mla_eagle_verify_case", "run_mla_eagle_verify_cuda_graph_case"]
)
@pytest.mark.parametrize(("name", "pool"), ARMS, indirect=["name"])
def test_target_verify(
    kit: Any,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    pool: str,
    function: str,
    spec_kind: str,
) -> None:
    """Three draft tokens a request, eager and replayed with other lengths."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.test.kits.attention_unittest.runner_modes import (
        speculative_target_verify_runner as mode,
    )

    use_pool(kit, monkeypatch, POOLS[pool])
    case = replace(
        case_named(kit, CASES[0]),
        name="verify",
        backend=name,
        forward_mode=ForwardMode.TARGET_VERIFY,
        page_size=16,
        prefix_lens=(14, 15, 16),
        extend_lens=(3, 3, 3),
    )
    in_mode(mode, function, case, topk=1, spec_kind=spec_kind)


@pytest.mark.parametrize(("name", "pool"), ARMS, indirect=["name"])
def test_draft_extend(kit: Any, monkeypatch: pytest.MonkeyPatch, name: str, pool: str) -> None:
    """Eager draft extend: plans from pinned host arrays. (No graph: stock refuses it for MLA.)"""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.test.kits.attention_unittest.runner_modes import (
        speculative_draft_extend_runner as mode,
    )

    use_pool(kit, monkeypatch, POOLS[pool])
    case = replace(
        case_named(kit, CASES[0]),
        name="draft_extend",
        backend=name,
        forward_mode=ForwardMode.DRAFT_EXTEND_V2,
        page_size=16,
        prefix_lens=(14, 15, 16),
        extend_lens=(2, 2, 2),
    )
    fixture = kit.build_mla_attention_fixture(NoSkip(), case, **DIMS)
    mode._prepare_eagle_draft_extend_v2_batch(case, fixture.forward_batch, device="cpu")
    actual = kit.run_mla_fixture_eager(fixture)
    expected = kit.expected_mla_fixture_output(fixture)
    torch.testing.assert_close(actual, expected, atol=kit.MLA_ATOL, rtol=kit.MLA_RTOL)


@pytest.mark.parametrize("padding", [0, 5], ids=["exact", "padded"])
@pytest.mark.parametrize("breakable", [False, True], ids=["piecewise", "breakable"])
@pytest.mark.parametrize(("name", "pool"), ARMS, indirect=["name"])
def test_captured_prefill(
    kit: Any, monkeypatch: pytest.MonkeyPatch, name: str, pool: str, breakable: bool, padding: int
) -> None:
    """SGLang's captured prefill, whose static buffers hold more tokens than the batch."""
    from sglang.test.kits.attention_unittest.runner_modes import split_op_runner as mode

    use_pool(kit, monkeypatch, POOLS[pool])
    case = replace(case_named(kit, "mla_extend_cross_page_boundary"), backend=name)
    in_mode(
        mode,
        "run_mla_split_op_extend_case",
        case,
        breakable=breakable,
        static_num_tokens=case.num_input_tokens + padding,
    )
