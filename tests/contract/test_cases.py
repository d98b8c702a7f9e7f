"""The 37 inputs that broke somebody's FP8 MLA, and the kinds without an input, on the CPU.

Each test is named after its row (`case12`) and runs on every path that the CPU can show. Rows that
only a GPU can show whole have their other half in `tests/gpu/test_cases_gpu.py`.
"""

from __future__ import annotations

import ast
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from contract.arms import OURS, STOCK, arm, forced, write_profile
from contract.cases import case
from contract.cpu_sglang import hopper
from contract.scene import (
    Request,
    Scene,
    Shape,
    check_run,
    dequantise,
    make_q,
    make_requests,
    make_rows,
    make_scene,
    shuffled_slots,
)
from packaging.version import Version

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
PATHS = ["gather_cast", "native", "fused"]
EXTEND_PATHS = ["gather_cast", "native"]


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    with hopper(), arm(request.param):
        yield request.param


@pytest.fixture(params=EXTEND_PATHS)
def extend_path(request: pytest.FixtureRequest) -> Iterator[str]:
    with hopper(), arm(request.param):
        yield request.param


# cost and memory ------------------------------------------------------------------------------


@case(1)
@pytest.mark.parametrize("slots", [131_072, 1_048_576])
def test_case01_rows_moved_follow_live_slots(slots: int) -> None:
    """64 tokens live: 64 rows are cast, whatever the pool; the time is the GPU's to show."""
    shape = Shape(heads=4, ckv=128, kpe=0, slots=slots)
    with hopper(), arm("gather_cast"):
        scene = Scene(OURS, shape)
        live = shuffled_slots(64, shape)
        scene.write(live, make_rows(64, shape))
        rows = scene.backend._workspace.rows
        rows.fill_(7.0)  # no cast of these random rows gives a whole row of sevens
        check_run(scene, make_requests(live), split=False)
        assert int(scene.backend._live.count) == 64
        assert int((rows != 7.0).any(-1).sum()) == 64


@case(2)
def test_case02_memory_is_known_and_reported_at_start(caplog: pytest.LogCaptureFixture) -> None:
    """One workspace of one layer's pool in 16 bits, in the log; a step keeps its addresses.

    That a layer allocates nothing but its output is `test_backend_cpu`'s to show; the pool of
    16.5 M slots is the GPU's.
    """
    with hopper(), arm("gather_cast"), caplog.at_level(logging.INFO, "sglang_fp8mla"):
        scene, slots = make_scene(8, slots=200_000, ckv=128, kpe=0)
        rows = scene.backend._workspace.rows
        assert rows.nbytes == scene.pool.kv_buffer[0].shape[0] * 128 * 2
        assert f"workspace {rows.nbytes / 2**30:.2f} GiB" in caplog.text
        before = rows.data_ptr()
        check_run(scene, make_requests(slots), split=False)
        assert scene.backend._workspace.rows.data_ptr() == before


@case(3)
def test_case03_shared_prefix_longer_than_the_pool(path: str) -> None:
    """8 requests of 100 shared and one own token, 808 indices into a pool of 512 slots."""
    scene, slots = make_scene(108, slots=512, max_context=128)
    requests = [Request([*slots[:100], slots[100 + i]], i) for i in range(8)]
    check_run(scene, requests)
    if path == "gather_cast":
        assert int(scene.backend._live.count) == 108, "distinct slots are moved once"
        listed = scene.backend._live.slots[:108].tolist()
        assert sorted(listed) == sorted(slots)


@case(4)
def test_case04_page_reuse_between_replays(path: str) -> None:
    """A page is freed, rewritten by another request and read again by the same graph."""
    scene, slots = make_scene(48, page_size=16)
    graph = scene.capture(2)
    a, b, reused = slots[:16], slots[16:32], slots[32:48]
    for step, requests in enumerate(
        [make_requests(a, reused[:9]), make_requests([*b, *reused[:5]], a[:3])]
    ):
        q, new = make_q(2, scene.shape, seed=step), make_rows(2, scene.shape, seed=step)
        scene.write(reused, make_rows(16, scene.shape, seed=70 + step))
        out = graph.replay(requests, q, new)[0]
        scene.check(f"replay {step}", out, requests, q)


# values ---------------------------------------------------------------------------------------

OVERFLOW = [447.0, 448.0, 449.0, 464.0, 465.0, 480.0, 1e4, -1e4, torch.inf, -torch.inf]


def stored_e4m3(value: float) -> float:
    """What a bf16 value becomes in an e4m3 pool of this torch.

    Beyond 464, halfway between 448 and the 480 that e4m3fn lacks, torch 2.11 stores NaN; 2.12 and
    newer saturate at 448, infinities too. Up to 464 both round to 448.
    """
    if abs(value) <= 464 or Version(torch.__version__) >= Version("2.12"):
        return max(-448.0, min(448.0, value))
    return torch.nan


@case(6)
@pytest.mark.parametrize("value", OVERFLOW)
def test_case06_overflow_is_what_torch_stores(path: str, value: float) -> None:
    """The pool's value is the documented one, and no other request sees any of it."""
    scene, slots = make_scene(12)
    quiet, loud = slots[:6], slots[6:]
    q = make_q(2, scene.shape)
    alone = scene.run(make_requests(quiet), q[:1])
    rows = make_rows(6, scene.shape)
    rows[2, 5] = value
    scene.write(loud, rows)
    # bf16 rounds 447, 449 and 465 first, to 448, 448 and 464
    want = stored_e4m3(float(torch.tensor(value).bfloat16()))
    found = scene.rows(loud)[2, 5].item()
    assert found == want or (found != found and want != want)
    out = scene.run(make_requests(quiet, loud), q)
    assert torch.equal(out[:1], alone)
    if want == want:
        scene.check("stored value", out, make_requests(quiet, loud), q)
    elif path != "native":
        assert out[1].isnan().any()


@case(7)
def test_case07_stray_k_scale_on_a_bf16_pool() -> None:
    with hopper(), forced():
        scene, slots = make_scene(10, kv_dtype=torch.bfloat16)
        plain = check_run(scene, make_requests(slots))
        scene.layers[0].k_scale = torch.tensor(0.06)
        scene.layers[0].k_scale_float = 0.06
        assert torch.equal(check_run(scene, make_requests(slots)), plain)


@case(8, 9)
@pytest.mark.parametrize(
    ("k_scale", "v_scale"),
    [(0.5, 0.5), (2.0, 2.0), (0.0, 0.0), (torch.inf, 1.0), (torch.nan, 1.0), (0.5, 0.25)],
    ids=str,
)
def test_case08_case09_checkpoint_scales_are_not_applied(
    path: str, caplog: pytest.LogCaptureFixture, k_scale: float, v_scale: float
) -> None:
    """The pool is written at scale 1; k and v share one latent, so neither can be applied."""
    scene, slots = make_scene(10, layers=2)
    requests, q = make_requests(slots), make_q(1, scene.shape)
    batch = scene.batch(requests)
    scene.plan(batch)
    plain = [scene.attend(batch, q, layer=layer) for layer in (0, 1)]
    for layer in scene.layers:
        layer.k_scale, layer.v_scale = torch.tensor(k_scale), torch.tensor(v_scale)
        layer.k_scale_float, layer.v_scale_float = k_scale, v_scale
    with caplog.at_level(logging.WARNING, "sglang_fp8mla"):
        for _ in range(2):
            scaled = [scene.attend(batch, q, layer=layer) for layer in (0, 1)]
            assert all(torch.equal(a, b) for a, b in zip(plain, scaled))
    warnings = [r for r in caplog.records if "k_scale" in r.getMessage()]
    assert len(warnings) == 1, "one warning for the process, not one a layer or a step"


@case(10)
def test_case10_unit_scales_are_always_passed() -> None:
    """FlashInfer's own wrapper refuses an FP8 run without them; every run of ours has both."""
    from flashinfer import BatchMLAPagedAttentionWrapper

    seen = []
    with hopper() as patch, arm("native"):
        scene, slots = make_scene(10)
        run = BatchMLAPagedAttentionWrapper.run

        def spy(self: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append((kwargs.get("ckv_scale"), kwargs.get("kpe_scale")))
            return run(self, *args, **kwargs)

        patch.setattr(BatchMLAPagedAttentionWrapper, "run", spy)
        check_run(scene, make_requests(slots))
        check_run(scene, make_requests(slots, q_lens=[4]), "extend")
    assert seen == [(1.0, 1.0), (1.0, 1.0)]


# heads, shapes, pages -------------------------------------------------------------------------


@case(11)
@pytest.mark.parametrize("prefix", [64, 65, 128, 512])
def test_case11_twenty_heads_extend_over_a_prefix(extend_path: str, prefix: int) -> None:
    """GLM-4.7-Flash: 20 heads, 7 new tokens over a cached prefix."""
    scene, slots = make_scene(prefix + 7, heads=20, slots=640, max_context=640)
    check_run(scene, make_requests(slots, q_lens=[7]), "extend")


@case(12)
def test_case12_the_refused_plan_is_still_refused() -> None:
    """The oracle for the next test: stock at 20 heads, q 7, kv 65 hits FlashInfer's refusal."""
    with hopper():
        scene = Scene(STOCK, Shape(heads=20))
        slots = shuffled_slots(65, scene.shape)
        scene.write(slots, make_rows(65, scene.shape))
        with pytest.raises(ValueError, match="would omit a visible key"):
            scene.run(make_requests(slots, q_lens=[7]), make_q(7, scene.shape), mode="extend")


@case(12)
@pytest.mark.parametrize("heads", [10, 12, 20, 24, 40, 48, 80, 96])
def test_case12_no_head_count_drops_a_key(extend_path: str, heads: int) -> None:
    """Tiles of 64 or 128 rows end inside a query; every key stays visible."""
    scene, slots = make_scene(135, heads=heads, max_context=256)
    check_run(scene, make_requests(slots[:65], slots[65:135], q_lens=[7, 7]), "extend")


@case(12)
@pytest.mark.parametrize("kv_len", [512, 513, 575, 576, 600])
def test_case12_long_queries_drop_no_key(kv_len: int) -> None:
    """512 queries of 20 heads end 80 tiles; each key boundary among them is met."""
    with hopper(), arm("gather_cast"):
        scene, slots = make_scene(kv_len, heads=20, slots=640, max_context=640)
        check_run(scene, make_requests(slots, q_lens=[512]), "extend")


@case(13)
@pytest.mark.parametrize("heads", [1, 4, 8, 12, 16, 20, 64, 128])
def test_case13_heads_by_batch_by_queries(path: str, heads: int) -> None:
    """bs 1, 2, 17; decode, and extends of 2, 3 and 4 tokens."""
    scene, slots = make_scene(100, heads=heads, max_bs=17)
    for bs in (1, 2, 17):
        parts = [slots[i * 5 : i * 5 + 5] for i in range(bs)]
        check_run(scene, make_requests(*parts), seed=bs)
        if path == "fused":
            continue  # a decode path
        for q_len in (1, 2, 3, 4):
            requests = make_requests(*parts, q_lens=[q_len] * bs)
            check_run(scene, requests, "extend", seed=10 * bs + q_len)


@case(14)
def test_case14_the_arena_is_bytes(path: str) -> None:
    """SGLang stores the pool as uint8: it is viewed as e4m3, never planned as uint8."""
    scene, slots = make_scene(10)
    assert scene.pool.kv_buffer[0].dtype == torch.uint8
    check_run(scene, make_requests(slots))


@case(15)
@pytest.mark.parametrize("mode", ["decode", "extend"])
def test_case15_rows_without_rope(path: str, mode: str) -> None:
    if path == "fused" and mode == "extend":
        mode = "decode"
    scene, slots = make_scene(12, kpe=0)
    requests = make_requests(slots[:5], slots[5:], q_lens=[2, 3] if mode == "extend" else None)
    check_run(scene, requests, mode, split=False)


@case(16)
@pytest.mark.parametrize(("ckv", "kpe"), [(256, 64), (128, 0)])
def test_case16_other_ranks_take_the_fallback(ckv: int, kpe: int) -> None:
    with hopper(), forced():
        scene, slots = make_scene(12, ckv=ckv, kpe=kpe)
        assert scene.backend.decision.decode.paths == ("gather_cast",)
        check_run(scene, make_requests(slots[:5], slots[5:]), split=kpe > 0)


@case(16)
@pytest.mark.parametrize(("ckv", "kpe"), [(512, 32), (96, 64)])
def test_case16_ranks_beyond_flashinfer_are_refused_with_its_limits(ckv: int, kpe: int) -> None:
    from sglang_fp8mla.errors import IncompatibleEnvironment

    with hopper(), forced(), pytest.raises(IncompatibleEnvironment) as refused:
        Scene(OURS, Shape(ckv=ckv, kpe=kpe))
    assert f"ckv {ckv}, kpe {kpe}" in str(refused.value)
    assert "ckv % 128 == 0 and kpe % 64 == 0" in str(refused.value)


@case(16)
def test_case16_kpe_128_does_not_fit_flashinfers_kernel() -> None:
    """512 + 128 passes FlashInfer's divisibility but not its shared memory; it says the bytes."""
    from sglang_fp8mla.errors import IncompatibleEnvironment

    with hopper(), forced(), pytest.raises(IncompatibleEnvironment, match="shared-memory bytes"):
        Scene(OURS, Shape(kpe=128))


@case(17)
def test_case17_page_size_changes_nothing(path: str) -> None:
    """kv 65 at page sizes 1, 16 and 64: the same bits."""
    outs = []
    for page_size in (1, 16, 64):
        scene, slots = make_scene(65, page_size=page_size)
        outs.append(check_run(scene, make_requests(slots)))
        if path != "fused":
            check_run(scene, make_requests(slots, q_lens=[7]), "extend")
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


# batches --------------------------------------------------------------------------------------


@case(18)
def test_case18_padded_batch_larger_than_the_request_pool(path: str) -> None:
    """MLP sync pads 3 requests to 4: buffers are sized for 4, the padded row stays alone."""
    from sglang.srt.layers.attention import flashinfer_mla_backend as stock

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stock, "get_cuda_graph_max_batch_size", lambda n: -(-n // 4) * 4)
        scene, slots = make_scene(20, max_bs=3)
    requests = make_requests(slots[:5], slots[5:12], slots[12:20])
    # the padded row names row 0 of the request pool, with length 1, as SGLang's padding does
    padded = [*requests, Request(requests[0].slots[:1], 0)]
    q = make_q(4, scene.shape)
    batch = scene.batch([padded[3], *requests])  # fills row 0 last with the real request
    batch = scene.batch(padded[:3])
    full = scene.batch([padded[3]])
    scene.batch(requests[:1])
    for name in ("req_pool_indices", "seq_lens", "seq_lens_cpu"):
        setattr(batch, name, torch.cat([getattr(batch, name), getattr(full, name)]))
    batch.batch_size, batch.seq_lens_sum = 4, batch.seq_lens_sum + 1
    scene.runner.kv_index_translator.bind_own_plan(batch)
    scene.plan(batch)
    out = scene.attend(batch, q).view(4, 16, 512)
    scene.check("padded batch", out, padded, q)


@case(18)
def test_case18_query_rows_past_the_plan(extend_path: str) -> None:
    """8 query rows under a plan of 5: the five are right, and the rest disturbs nothing."""
    scene, slots = make_scene(40)
    requests = make_requests(slots[:20], slots[20:33], q_lens=[2, 3])
    batch = scene.batch(requests, "extend")
    scene.plan(batch)
    q = make_q(8, scene.shape)
    q[5:] = torch.nan
    out = scene.attend(batch, q, split=False).view(-1, 16, 512)
    scene.check("live rows", out[:5], requests, q[:5], mode="extend")


@case(19)
@pytest.mark.parametrize("mode", ["idle", "decode", "extend"])
def test_case19_idle_ranks(path: str, mode: str) -> None:
    """bs 0 before and after a real batch: an empty result, and the real batch stays right."""
    scene, slots = make_scene(9)
    for _ in range(2):
        batch = scene.batch([], mode)
        scene.plan(batch)
        out = scene.attend(batch, make_q(0, scene.shape))
        assert out.shape == (0, scene.shape.heads * scene.shape.ckv)
        check_run(scene, make_requests(slots))


@case(20)
def test_case20_a_graph_larger_than_the_request_pool_is_refused(path: str) -> None:
    """A graph of 8 over buffers for 4: an error at capture, nothing written out of bounds."""
    scene, slots = make_scene(9, max_bs=4)
    after = scene.backend.kv_indptr.untyped_storage().nbytes()
    with pytest.raises((RuntimeError, ValueError)):
        scene.capture(8)
    assert scene.backend.kv_indptr.untyped_storage().nbytes() == after
    check_run(scene, make_requests(slots))


@case(21)
def test_case21_capture_leaves_no_rubbish(path: str) -> None:
    """Capture attends to slot 0; a decode that does not use slot 0 sees none of it."""
    scene, slots = make_scene(9)
    scene.poison(slots)
    scene.capture(4)
    scene.bytes_of(0)[0] = 0xFF
    if path == "gather_cast":
        scene.backend._workspace.rows[0] = torch.nan
    check_run(scene, make_requests(slots))


@case(22)
def test_case22_captured_prefill_moves_live_rows_only() -> None:
    """An extend without prefix, paged as under the breakable prefill graph: live rows and no more.

    The captured run itself is in the kit's split-op mode (`test_kit_cpu`), and on the GPU.
    """
    with hopper(), arm("gather_cast"):
        scene, slots = make_scene(30)
        rows = scene.backend._workspace.rows
        rows.fill_(7.0)
        check_run(scene, make_requests(slots[:10], slots[10:30], q_lens=[10, 20]), "extend")
        assert int((rows != 7.0).any(-1).sum()) == 30


@case(23)
def test_case23_draft_extend_after_verify(extend_path: str) -> None:
    """The parent's pinned buffers exist in our subclass: a draft extend plans from them.

    In order, as NextN does: verify captured and replayed, then draft extend, then verify again.
    """
    from contract.scene import single_rank

    single_rank()
    from contract.test_kit_cpu import DIMS, NoSkip
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.test.kits.attention_unittest.attention_methods import mla_attention as kit
    from sglang.test.kits.attention_unittest.runner_modes import (
        speculative_draft_extend_runner as draft,
    )
    from sglang.test.kits.attention_unittest.runner_modes import (
        speculative_target_verify_runner as verify,
    )

    base = replace(
        kit.make_mla_cases(OURS)[0], page_size=16, prefix_lens=(14, 15, 16), extend_lens=(2, 2, 2)
    )
    dims = DIMS | {"fp8_kv_cache": True}
    fixture = kit.build_mla_attention_fixture(
        NoSkip(), replace(base, forward_mode=ForwardMode.TARGET_VERIFY), **dims
    )
    outs = []
    for mode in ("verify", "draft", "verify"):
        if mode == "verify":
            item = replace(base, forward_mode=ForwardMode.TARGET_VERIFY)
            batch = kit._make_forward_batch(item, fixture.runner, max_context_len=64, device="cpu")
            verify._prepare_spec_verify_batch(item, batch, topk=1, spec_kind="eagle", device="cpu")
        else:
            item = replace(base, forward_mode=ForwardMode.DRAFT_EXTEND_V2)
            batch = kit._make_forward_batch(item, fixture.runner, max_context_len=64, device="cpu")
            draft._prepare_eagle_draft_extend_v2_batch(item, batch, device="cpu")
        kit._populate_prefix_kv(
            fixture.actual_module,
            item,
            fixture.runner,
            fixture.backend,
            fixture.prefix_hidden,
            max_context_len=64,
        )
        fixture.forward_batch = batch
        outs.append(kit.run_mla_fixture_eager(fixture))
    # topk 1 verifies a chain: the same causal attention as the draft extend's
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@case(24)
def test_case24_dcp_writes_take_the_split_door() -> None:
    """Under DCP only `set_mla_kv_buffer` may write; names in one list pass k in halves to it."""
    with hopper(), forced():
        scene, slots = make_scene(9)
        from sglang.srt.models.deepseek_common.utils import (
            FORWARD_ABSORB_CORE_ATTENTION_BACKENDS as names,
        )

        assert OURS in names
        doors = []
        for door in ("set_mla_kv_buffer", "set_kv_buffer"):
            real = getattr(scene.pool, door)

            def spy(*args: Any, _door: str = door, _real: Any = real) -> None:
                doors.append(_door)
                _real(*args)

            setattr(scene.pool, door, spy)
        check_run(scene, make_requests(slots), split=True)
        check_run(scene, make_requests(slots, q_lens=[3]), "extend", split=True)
    assert doors == ["set_mla_kv_buffer", "set_mla_kv_buffer"]


@case(25)
def test_case25_an_fp8_prefix_is_cast_before_it_meets_bf16() -> None:
    """The chunked-prefix path gathers rows of the pool in the model's dtype, exactly."""
    with hopper(), forced():
        scene, slots = make_scene(12)
        loc = torch.tensor(slots, dtype=torch.int64)
        latent, rope = scene.pool.get_mla_kv_buffer(scene.layers[0], loc, torch.bfloat16)
        assert latent.dtype == rope.dtype == torch.bfloat16
        rows = torch.cat([latent, rope], -1)[:, 0].double()
        torch.testing.assert_close(rows, scene.rows(slots), rtol=0, atol=0)


@case(25)
def test_case25_prefix_chunks_run_as_stocks() -> None:
    """MHA over prefix chunks: ours hands it to the parent, bit for bit, and never plans paged."""
    flags = {"disable_chunked_prefix_cache": False, "flashinfer_mla_disable_ragged": False}
    outs = []
    with hopper(), forced():
        for name in (STOCK, OURS):
            shape = Shape()
            scene = Scene(name, shape, **flags)
            slots = shuffled_slots(12, shape)
            scene.write(slots, make_rows(12, shape))
            batch = scene.batch(make_requests(slots, q_lens=[4]), "extend")
            batch.num_prefix_chunks = 1
            batch.prefix_chunk_idx = 0
            batch.prefix_chunk_cu_seq_lens = [torch.tensor([0, 8], dtype=torch.int32)]
            batch.prefix_chunk_max_seq_lens = [8]
            batch.mha_one_shot = False
            batch.mha_return_lse = True
            batch.attn_attend_prefix_cache = True
            scene.plan(batch)
            with scene.context():
                scene.backend.init_mha_chunk_metadata(batch)
                generator = torch.Generator().manual_seed(3)

                def rand(*size: int, _g: torch.Generator = generator) -> torch.Tensor:
                    return torch.randn(*size, generator=_g).bfloat16()

                width = scene.runner.model_config.qk_nope_head_dim + 64
                layer = SimpleNamespace(
                    tp_q_head_num=16,
                    tp_k_head_num=16,
                    tp_v_head_num=16,
                    head_dim=width,
                    v_head_dim=512,
                    scaling=width**-0.5,
                    logit_cap=0.0,
                    layer_id=0,
                )
                out, lse = scene.backend.forward_extend(
                    rand(4, 16, width), rand(8, 16, width), rand(8, 16, 512), layer, batch, False
                )
            outs.append((out, lse))
    assert outs[0][0].isfinite().all()
    assert torch.equal(outs[0][0], outs[1][0])
    assert torch.equal(outs[0][1], outs[1][1])


@case(26)
def test_case26_lse_merged_dcp_ranks_equal_one(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks with 3 of 6 rows each."""
    from sglang_fp8mla import backend

    scene, slots = make_scene(6)
    q = make_q(1, scene.shape)
    whole = scene.expected(make_requests(slots), q)[0]
    monkeypatch.setattr(backend, "get_parallel", lambda: SimpleNamespace(dcp_enabled=True))
    outs, weights = [], []
    for rank in range(2):
        batch = scene.batch(make_requests(slots[rank::2]))
        scene.plan(batch)
        out, lse_log2 = scene.attend(batch, q)
        outs.append(out.view(16, 512).double())
        weights.append(2 ** lse_log2.view(16).double())
    merged = sum(w[:, None] * o for w, o in zip(weights, outs)) / sum(weights)[:, None]
    # each part was rounded to bf16 on its way, by at most 2**-8 relative to its largest value
    torch.testing.assert_close(merged, whole, rtol=2**-7, atol=2**-7 * float(whole.abs().max()))


# builds, GPUs, ranks --------------------------------------------------------------------------


@pytest.fixture
def fresh_probe() -> Iterator[Any]:
    """What a broken kernel's probe found must not be remembered by later tests, nor the reverse."""
    from sglang_fp8mla import probe

    probe.run_probe.cache_clear()
    yield probe
    probe.run_probe.cache_clear()


@case(27, 28)
@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (RuntimeError("ninja: build stopped: subcommand failed"), "install nvcc"),
        (
            RuntimeError("Could not find nvcc and default cuda_home='/cuda'"),
            "install nvcc",
        ),
        (RuntimeError("CUDA error: misaligned address"), "doctor"),
    ],
    ids=["build", "no-nvcc", "launch"],
)
def test_case27_case28_a_kernel_that_does_not_build_is_fallen_back_from(
    fresh_probe: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    fix: str,
) -> None:
    """The FP8 module raises at plan, on the right GPU: one line says so, and gather_cast serves."""
    from flashinfer.mla._batch_mla._backends import fa2_backend, fa3_backend

    with hopper() as patch, forced() as environment:
        real = fa3_backend.get_batch_mla_module

        def broken(backend: str, q: Any, kv: torch.dtype, *args: Any) -> Any:
            if kv == E4M3:
                raise error
            return real(backend, q, kv, *args)

        for module in (fa2_backend, fa3_backend):
            patch.setattr(module, "get_batch_mla_module", broken)
        environment.setenv(
            "SGLANG_FP8MLA_PROFILE",
            write_profile(tmp_path / "profile.json", {1 << 20: "native"}, "native"),
        )
        with caplog.at_level(logging.INFO, "sglang_fp8mla"):
            scene, slots = make_scene(10)
        for phase in ("decode", "extend"):
            lines = [
                r.getMessage() for r in caplog.records if r.getMessage().startswith(f"{phase} path")
            ]
            assert len(lines) == 1
            assert "gather_cast" in lines[0]
            assert str(error) in lines[0]
            assert fix in lines[0]
        check_run(scene, make_requests(slots))


@case(27)
def test_case27_forced_it_is_an_error_that_names_the_failure(fresh_probe: Any) -> None:
    from flashinfer.mla._batch_mla._backends import fa2_backend, fa3_backend

    from sglang_fp8mla.errors import IncompatibleEnvironment

    def broken(*args: Any) -> Any:
        raise RuntimeError("ninja: build stopped")

    with hopper() as patch, forced("native", "native"):
        for module in (fa2_backend, fa3_backend):
            patch.setattr(module, "get_batch_mla_module", broken)
        with pytest.raises(IncompatibleEnvironment, match="ninja: build stopped"):
            Scene(OURS, Shape(slots=32))


CAPABILITIES = [(8, 0), (8, 6), (8, 9), (10, 0), (12, 0), (12, 1)]


@case(29)
@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda c: f"sm{c[0]}{c[1]}")
def test_case29_other_gpus_take_the_documented_path(
    fresh_probe: Any, capability: tuple[int, int]
) -> None:
    """docs/fallback.md: no measured table for these, so gather_cast; native says SM90 only."""
    from sglang_fp8mla.errors import IncompatibleEnvironment

    with hopper(*capability):
        with forced(capability=capability):
            scene, slots = make_scene(10)
            assert scene.backend.decision.decode.paths == ("gather_cast",)
            assert scene.backend.decision.extend.paths == ("gather_cast",)
            assert "no measured table" in scene.backend.decision.decode.reason
            check_run(scene, make_requests(slots))
            check_run(scene, make_requests(slots, q_lens=[3]), "extend")
        with (
            forced("native", capability=capability),
            pytest.raises(IncompatibleEnvironment, match="SM90 only"),
        ):
            Scene(OURS, Shape(slots=32))


CHOICE = """
import sys
import torch.distributed
for name in ("all_reduce", "all_gather", "broadcast", "barrier", "init_process_group"):
    def refuse(*args, **kwargs):
        raise AssertionError("a collective in the choice of a path")
    setattr(torch.distributed, name, refuse)
from sglang_fp8mla import envs, policy, probe
from sglang_fp8mla.checks import Check
facts = probe.Facts("NVIDIA H200", (9, 0), 16, 512, 64, "bfloat16", "float8_e4m3fn", "0.7.2")
decision, checks = policy.choose(facts, envs.read(), lambda path, phase: Check(path, "ok", "ran"))
print(decision, checks)
"""


@case(30)
def test_case30_ranks_choose_alike_without_a_word() -> None:
    """Two processes, same inputs: the same choice, and no collective on the way."""
    # hash order differs between the two; nothing may depend on it
    outs = [
        subprocess.run(
            [sys.executable, "-c", CHOICE],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert outs[0] == outs[1]
    assert "gather_cast" in outs[0]


@case(31)
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_case31_dflash_verify(
    extend_path: str, monkeypatch: pytest.MonkeyPatch, graph: bool
) -> None:
    """DFLASH plans through a function of the parent's module; heads that need padding included."""
    from contract.scene import single_rank

    single_rank()
    from contract.test_kit_cpu import DIMS, NoSkip, use_pool
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.test.kits.attention_unittest.attention_methods import mla_attention as kit
    from sglang.test.kits.attention_unittest.runner_modes import (
        speculative_target_verify_runner as mode,
    )

    use_pool(kit, monkeypatch, E4M3)
    for heads in (4, 20):
        verify = replace(
            kit.make_mla_cases(OURS)[0],
            name="dflash",
            num_heads=heads,
            forward_mode=ForwardMode.TARGET_VERIFY,
            page_size=16,
            prefix_lens=(14, 15, 16),
            extend_lens=(3, 3, 3),
        )
        run = mode.run_mla_eagle_verify_cuda_graph_case if graph else mode.run_mla_eagle_verify_case
        run(NoSkip(), verify, topk=1, spec_kind="dflash", **DIMS)


# dtypes ---------------------------------------------------------------------------------------


@case(32)
@pytest.mark.parametrize("decode_path", ["gather_cast", "fused"])
def test_case32_e5m2_is_not_read_as_e4m3(decode_path: str) -> None:
    """[1, 2, 3.5, 0.25] in a row of its own: with one key the output is the row, exactly."""
    with hopper(), arm(decode_path):
        scene = Scene(OURS, Shape(kv_dtype=E5M2))
        values = torch.tensor([1.0, 2.0, 3.5, 0.25])
        row = values.repeat(scene.shape.width // 4)[None]
        scene.write([7], row)
        scene.poison([7])
        # the effect: the same bytes as e4m3 are other numbers
        assert not torch.equal(dequantise(scene.bytes_of(0)[[7]].view(E4M3)), row.double())
        out = scene.run(make_requests([7]), make_q(1, scene.shape))
        want = row[:, None, :512].expand(1, 16, 512).bfloat16()
        # fused divides by a sum of unrounded weights: its one weight may be an ulp of bf16 from 1
        ulp = 2**-7 if decode_path == "fused" else 0.0
        torch.testing.assert_close(out, want, rtol=ulp, atol=0)


@case(32, 33)
@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ({"kv_dtype": E5M2}, "takes e4m3 only"),
        ({"dtype": torch.float16}, "takes bfloat16 only"),
    ],
    ids=["e5m2", "fp16"],
)
def test_case32_case33_native_is_refused_with_its_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, shape: dict[str, Any], reason: str
) -> None:
    """Where the table prefers native, `auto` says why it does not take it."""
    with hopper(), forced() as environment:
        environment.setenv(
            "SGLANG_FP8MLA_PROFILE",
            write_profile(tmp_path / "profile.json", {1 << 20: "native"}, "native"),
        )
        with caplog.at_level(logging.INFO, "sglang_fp8mla"):
            scene, slots = make_scene(10, **shape)
        assert scene.backend.decision.decode.paths == ("gather_cast",)
        assert reason in caplog.text
        check_run(scene, make_requests(slots))


@case(33)
@pytest.mark.parametrize("decode_path", ["gather_cast", "fused"])
@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_case33_fp16_models(decode_path: str, kv_dtype: torch.dtype) -> None:
    with hopper(), arm(decode_path):
        scene, slots = make_scene(12, dtype=torch.float16, kv_dtype=kv_dtype)
        check_run(scene, make_requests(slots[:5], slots[5:]))
        check_run(scene, make_requests(slots[:5], slots[5:], q_lens=[2, 3]), "extend")


# plugins --------------------------------------------------------------------------------------

PRINTER = """
from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
print("choices:", "flashinfer_mla_fp8" in ATTENTION_BACKEND_CHOICES)
"""


@case(34)
@pytest.mark.parametrize("plugins", [None, "other"], ids=["all", "SGLANG_PLUGINS=other"])
def test_case34_modules_that_load_no_plugins(tmp_path: Path, plugins: str | None) -> None:
    """`python -m sglang_fp8mla.run MODULE` loads them, or says which setting leaves us out."""
    (tmp_path / "module_under_test.py").write_text(PRINTER)
    # an installation of the checkout, as entry points need one
    import sglang_fp8mla

    site = tmp_path / "site"
    info = site / "sglang_fp8mla-0.1.0.dist-info"
    info.mkdir(parents=True)
    root = Path(sglang_fp8mla.__file__).parents[1]
    (info / "entry_points.txt").write_text((root / "entry_points.txt").read_text())
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang-fp8mla\nVersion: 0.1.0\n")
    environment = os.environ | {"PYTHONPATH": f"{site}:{root}:{tmp_path}"}
    environment.pop("SGLANG_PLUGINS", None)
    if plugins:
        environment["SGLANG_PLUGINS"] = plugins
    done = subprocess.run(
        [sys.executable, "-m", "sglang_fp8mla.run", "module_under_test"],
        env=environment,
        capture_output=True,
        text=True,
    )
    if plugins is None:
        assert "choices: True" in done.stdout, done.stderr[-2000:]
    else:
        assert done.returncode != 0
        assert "SGLANG_PLUGINS" in done.stderr
        assert "Traceback" not in done.stderr


@case(35)
def test_case35_registering_twice_adds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES

    from sglang_fp8mla import plugin

    plugin.register()
    plugin.register()
    assert ATTENTION_BACKEND_CHOICES.count(OURS) == 1


@case(35)
def test_case35_a_name_held_by_another_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    from sglang_fp8mla import plugin
    from sglang_fp8mla.errors import IncompatibleEnvironment

    def foreign(runner: Any) -> None: ...

    foreign.__module__ = "some_other_plugin.backends"
    monkeypatch.setitem(ATTENTION_BACKENDS, OURS, foreign)
    with pytest.raises(IncompatibleEnvironment, match=r"some_other_plugin\.backends"):
        plugin.register()
    assert ATTENTION_BACKENDS[OURS] is foreign


@case(36)
@pytest.mark.parametrize(
    ("found", "texts"),
    [
        ({"sglang": "0.5.21", "flashinfer-python": "0.7.2"}, ["sglang: 0.5.21"]),
        ({"sglang": "0.5.23", "flashinfer-python": "0.6.12"}, ["flashinfer-python: 0.6.12"]),
        ({"sglang": "0.5.23"}, ["flashinfer-python: not installed"]),
        ({"sglang": "0.5.21"}, ["sglang: 0.5.21", "flashinfer-python: not installed"]),
    ],
    ids=["sglang-0.5.21", "flashinfer-0.6.12", "no-flashinfer", "both"],
)
def test_case36_the_user_learns_why(
    monkeypatch: pytest.MonkeyPatch, found: dict[str, str], texts: list[str]
) -> None:
    from sglang_fp8mla import compat, plugin
    from sglang_fp8mla.errors import IncompatibleEnvironment

    monkeypatch.setattr(compat, "installed_version", found.get)
    plugin.register()  # the name stays valid, so the refusal below is what the user sees
    with pytest.raises(IncompatibleEnvironment) as refused:
        plugin.create_backend(object())
    message = str(refused.value)
    assert all(text in message for text in texts)
    assert "pip install sglang==0.5.23 flashinfer-python==0.7.2" in message


@case(37)
@pytest.mark.parametrize("mode", ["decode", "extend"])
def test_case37_rows_are_read_after_hicaches_wait(path: str, mode: str) -> None:
    """The rows arrive while `get_key_buffer` waits for the layer's transfer."""
    scene, slots = make_scene(12)
    arrived = scene.bytes_of(0).clone()
    requests = make_requests(slots, q_lens=[3] if mode == "extend" else None)
    q = make_q(3 if mode == "extend" else 1, scene.shape)
    want = scene.run(requests, q, mode=mode)
    scene.bytes_of(0).fill_(0xFF)

    class Transfer:
        def wait_until(self, layer: int) -> None:
            scene.bytes_of(0).copy_(arrived)

    scene.pool.layer_transfer_counter = Transfer()
    assert torch.equal(scene.run(requests, q, mode=mode), want)


# kinds without an input -----------------------------------------------------------------------


@pytest.mark.parametrize("byte", [0x7F, 0xFF, 0x7E, 0xFE, 0x80], ids=hex)
def test_values_nobody_references_reach_nothing(path: str, byte: int) -> None:
    """Decode, extend and replay, with the rest of the pool NaN, ±448 or -0: the same bits."""
    scene, slots = make_scene(20)
    requests = make_requests(slots[:7], slots[7:20])
    want = check_run(scene, requests)
    scene.poison(slots, byte)
    assert torch.equal(check_run(scene, requests), want)


@pytest.mark.parametrize("byte", [0x7F, 0xFF, 0x7E], ids=["nan", "-nan", "448"])
def test_a_requests_bad_rows_stay_its_own(path: str, byte: int) -> None:
    """Its neighbours' outputs keep every bit, also where they share a prefix up to the bad row."""
    scene, slots = make_scene(30)
    shared = slots[:8]
    requests = make_requests([*shared, *slots[8:12]], [*shared, *slots[12:20]], slots[20:30])
    q = make_q(3, scene.shape)
    want = scene.run(requests, q)
    scene.bytes_of(0)[slots[13]] = byte
    out = scene.run(requests, q)
    assert torch.equal(out[[0, 2]], want[[0, 2]])
    assert not torch.equal(out[1], want[1])


@pytest.mark.parametrize("scale", [1e-5, 1e2, 1e4])
def test_extreme_but_finite_logits(path: str, scale: float) -> None:
    """Logits from 1e-5 to 1e5: uniform weights to one hot key, no overflow on the way."""
    scene, slots = make_scene(70, max_context=128)
    requests = make_requests(slots)
    q = make_q(1, scene.shape, scale=scale)
    out = scene.run(requests, q)
    assert out.isfinite().all()
    logits = (q.double() @ scene.rows(slots).T) * scene.shape.sm_scale
    top = logits.topk(2, dim=-1).values[0]
    if scale == 1e4:
        # one key has all the weight (the next is below by 2**-30), so the output is its row
        sure = (top[:, 0] - top[:, 1]) > 21
        assert sure.any()
        best = scene.rows(slots)[logits[0].argmax(-1)][:, :512].bfloat16()
        assert torch.equal(out[0][sure], best[sure])
    else:
        scene.check(f"scale {scale}", out, requests, q)


def test_equal_keys_and_one_dominant_key(path: str) -> None:
    """Equal rows give the row; a row that dominates gives itself."""
    scene, slots = make_scene(40)
    row = make_rows(1, scene.shape, seed=9)
    scene.write(slots, row.expand(40, -1).contiguous())
    stored = scene.rows(slots[:1])[:, :512].bfloat16()
    out = scene.run(make_requests(slots), make_q(1, scene.shape))
    # 40 equal weights sum to 1 within bf16's half ulp
    torch.testing.assert_close(out[0], stored.expand(16, -1), rtol=2**-7, atol=0)


def test_decode_equals_extend_on_the_same_rows(extend_path: str) -> None:
    """One query token, paged extend or decode: the torch kernel gives the same bits."""
    scene, slots = make_scene(30)
    decode = make_requests(slots[:11], slots[11:30])
    extend = make_requests(slots[:11], slots[11:30], q_lens=[1, 1])
    q = make_q(2, scene.shape)
    assert torch.equal(scene.run(decode, q), scene.run(extend, q, mode="extend"))


def test_the_batch_can_be_permuted(path: str) -> None:
    """A permuted batch gives the permuted bits."""
    scene, slots = make_scene(60)
    parts = [slots[:1], slots[1:20], slots[20:25], slots[25:60]]
    q = make_q(4, scene.shape)
    want = scene.run(make_requests(*parts), q)
    order = [2, 0, 3, 1]
    out = scene.run(make_requests(*(parts[i] for i in order)), q[order])
    assert torch.equal(out, want[order])


def test_an_empty_row_in_a_batch(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A padded row of length 0 gives 0 and LSE -inf, and leaves its neighbours alone."""
    from sglang_fp8mla import backend

    scene, slots = make_scene(12)
    batch = scene.batch(make_requests(slots[:5], slots[5:6], slots[6:12]))
    lens = [5, 0, 6]
    batch.seq_lens = torch.tensor(lens, dtype=torch.int32)
    batch.seq_lens_cpu = batch.seq_lens.clone()
    batch.seq_lens_sum = sum(lens)
    monkeypatch.setattr(backend, "get_parallel", lambda: SimpleNamespace(dcp_enabled=True))
    scene.plan(batch)
    q = make_q(3, scene.shape)
    out, lse_log2 = scene.attend(batch, q)
    out = out.view(3, 16, 512)
    assert (out[1] == 0).all()
    assert (lse_log2[1] == -torch.inf).all()
    scene.check("neighbours", out[[0, 2]], make_requests(slots[:5], slots[6:12]), q[[0, 2]])


def test_replays_whose_lengths_change_a_lot(path: str) -> None:
    """One lane from 1 to 250 tokens and back, beside a steady one."""
    scene, slots = make_scene(256, slots=300, max_context=300)
    graph = scene.capture(2)
    for step, length in enumerate([1, 250, 2, 129, 1]):
        requests = make_requests(slots[:length], slots[250:255])
        q = make_q(2, scene.shape, seed=step)
        out = graph.replay(requests, q, make_rows(2, scene.shape, seed=step))[0]
        scene.check(f"length {length}", out, requests, q)


@pytest.mark.parametrize(
    ("owner", "name", "lacks"),
    [
        ("FlashInferMLAIndicesUpdaterDecode", "call_begin_forward", "spec_info"),
        ("FlashInferMLAAttnBackend", "forward_decode", "q_rope"),
    ],
)
def test_a_changed_upstream_signature_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, owner: str, name: str, lacks: str
) -> None:
    """A supported SGLang whose method lost a parameter: said before anything is built."""
    import inspect

    from sglang.srt.layers.attention import flashinfer_mla_backend as stock

    from sglang_fp8mla import plugin
    from sglang_fp8mla.errors import IncompatibleEnvironment

    real = getattr(getattr(stock, owner), name)
    signature = inspect.signature(real)

    def changed(*args: Any, **kwargs: Any) -> None: ...

    changed.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[p for p in signature.parameters.values() if p.name != lacks]
    )
    monkeypatch.setattr(getattr(stock, owner), name, changed)
    with pytest.raises(IncompatibleEnvironment, match=rf"{owner}\.{name}: takes no {lacks}"):
        plugin.create_backend(object())


# the table is covered -------------------------------------------------------------------------


def numbers_in(file: Path) -> set[int]:
    """The numbers of every `@case(...)` in a test file."""
    found: set[int] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            for decorator in node.decorator_list:
                if isinstance(decorator, ast.Call) and getattr(decorator.func, "id", "") == "case":
                    found |= {a.value for a in decorator.args if isinstance(a, ast.Constant)}
    return found


def test_every_row_of_the_table_has_a_test() -> None:
    here = Path(__file__)
    on_cpu = numbers_in(here)
    on_gpu = numbers_in(here.parents[1] / "gpu" / "test_cases_gpu.py")
    assert on_cpu | on_gpu == set(range(1, 38))
    # only the time of a tiny batch cannot be shown here at all
    assert set(range(1, 38)) - on_cpu == {5}
