"""The factory and the backend on the CPU, over SGLang's pools and updaters and FlashInfer's Python.

Numbers are held against a float64 oracle that reads the pool's bytes; every slot that no request
references is NaN.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from contract.arms import OURS, STOCK, arm, forced
from contract.cpu_sglang import hopper
from contract.scene import (
    Request,
    Scene,
    Shape,
    make_q,
    make_requests,
    make_rows,
    make_runner,
    make_scene,
    ref_attention,
    replace,
    shuffled_slots,
)
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

E5M2 = torch.float8_e5m2


@pytest.fixture(params=["gather_cast", "native", "fused"])
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each decode path, forced: FlashInfer's kernel in torch, our Triton interpreted."""
    with hopper(), arm(request.param):
        yield request.param


@pytest.fixture(params=["gather_cast", "native"])
def extend_path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each path that has an extend phase."""
    with hopper(), arm(request.param):
        yield request.param


# the factory ----------------------------------------------------------------------------------


def test_a_runner_without_mla_gets_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    """An EAGLE3 draft is MHA and inherits the name."""
    from sglang_fp8mla import backend, plugin

    monkeypatch.setattr(backend, "create_flashinfer_backend", lambda runner: ("stock", runner))
    runner = SimpleNamespace(use_mla_backend=False)
    with forced():
        assert plugin.create_backend(runner) == ("stock", runner)


@pytest.mark.parametrize("split", [True, False], ids=["split", "joined"])
def test_a_bf16_pool_is_stocks_business(split: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Same updaters, same forwards, same bits, nothing allocated; one line says so."""
    from sglang.srt.layers.attention import flashinfer_mla_backend as stock

    with hopper(), forced(), caplog.at_level(logging.INFO, "sglang_fp8mla"):
        ours, slots = make_scene(20, kv_dtype=torch.bfloat16)
        theirs = Scene(STOCK, ours.shape)
        theirs.copy_pool(ours)
        requests, q = make_requests(slots[:7], slots[7:20]), make_q(2, ours.shape)
        new = make_rows(2, ours.shape)
        a = ours.run(requests, q, new, split=split)
        b = theirs.run(requests, q, new, split=split)
    assert torch.equal(a, b)
    assert type(ours.backend.indices_updater_decode) is stock.FlashInferMLAIndicesUpdaterDecode
    assert type(ours.backend.indices_updater_prefill) is stock.FlashInferMLAIndicesUpdaterPrefill
    assert not hasattr(ours.backend, "_workspace")
    assert "nothing to cast" in caplog.text


@pytest.mark.parametrize("dsa_dim", [656], ids=["656-byte rows"])
def test_a_dsa_pool_is_refused_with_both_ways_out(dsa_dim: int) -> None:
    """GLM-5 and DeepSeek-V3.2: the message gives the `dsa` backend and the dense recipe."""
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    from sglang_fp8mla import plugin
    from sglang_fp8mla.errors import IncompatibleEnvironment

    shape = Shape(slots=64)
    with hopper(), forced():
        runner = make_runner(OURS, shape, "cpu")
        runner.token_to_kv_pool = MLATokenToKVPool(
            size=64,
            page_size=1,
            dtype=torch.float8_e4m3fn,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            layer_num=1,
            device="cpu",
            enable_memory_saver=False,
            use_dsa=True,
            override_kv_cache_dim=dsa_dim,
        )
        with pytest.raises(IncompatibleEnvironment) as refused:
            plugin.create_backend(runner)
    message = str(refused.value)
    assert "--attention-backend dsa" in message
    assert (
        """--json-model-override-args '{"architectures": ["DeepseekV2ForCausalLM"]}'""" in message
    )


def test_unsupported_versions_are_refused_with_every_failed_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """cases.md 36: sglang 0.5.21 with flashinfer 0.6.12; nothing of the runner is touched."""
    from sglang_fp8mla import compat, plugin
    from sglang_fp8mla.errors import IncompatibleEnvironment

    found = {"sglang": "0.5.21", "flashinfer-python": "0.6.12"}
    monkeypatch.setattr(compat, "installed_version", found.get)
    with forced(), pytest.raises(IncompatibleEnvironment) as refused:
        plugin.create_backend(object())
    message = str(refused.value)
    for text in ("0.5.21", "0.6.12", "pip install sglang==0.5.23 flashinfer-python==0.7.2"):
        assert text in message
    assert "sglang-fp8mla doctor" in message


def test_a_missing_flashinfer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_fp8mla import compat, plugin
    from sglang_fp8mla.errors import IncompatibleEnvironment

    monkeypatch.setattr(compat, "installed_version", {"sglang": "0.5.23"}.get)
    with forced(), pytest.raises(IncompatibleEnvironment, match="flashinfer-python: not installed"):
        plugin.create_backend(object())


def test_a_typo_in_the_environment_is_an_error() -> None:
    from sglang_fp8mla import plugin
    from sglang_fp8mla.errors import InvalidArgument

    # `forced`'s own patch: undone later, a fixture's would put back what `forced` had set
    with forced() as environment:
        environment.setenv("SGLANG_FP8MLA_DECODE_PATH", "fast")
        with pytest.raises(InvalidArgument, match=r"SGLANG_FP8MLA_DECODE_PATH must be .*'fast'"):
            plugin.create_backend(object())
        environment.setenv("SGLANG_FP8MLA_DECODE_PATH", "auto")
        environment.setenv("SGLANG_FP8MLA_DECODEPATH", "native")
        with pytest.raises(InvalidArgument, match="did you mean SGLANG_FP8MLA_DECODE_PATH"):
            plugin.create_backend(object())


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        (Shape(kv_dtype=E5M2), "takes e4m3 only"),
        (Shape(dtype=torch.float16), "takes bfloat16 only"),
        (Shape(ckv=256), "takes ckv 512"),
    ],
    ids=["e5m2", "fp16", "ckv256"],
)
def test_a_forced_path_that_cannot_run_names_its_check(shape: Shape, reason: str) -> None:
    from sglang_fp8mla.errors import IncompatibleEnvironment

    with hopper(), forced("native"), pytest.raises(IncompatibleEnvironment) as refused:
        Scene(OURS, shape)
    assert "SGLANG_FP8MLA_DECODE_PATH=native cannot run here" in str(refused.value)
    assert reason in str(refused.value)


def test_one_log_line_a_phase_says_path_reason_and_bytes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also with two backends in the process: the draft's repeats nothing."""
    with hopper(), arm("gather_cast"), caplog.at_level(logging.INFO, "sglang_fp8mla"):
        make_scene(4)
        make_scene(4)
    for phase in ("decode", "extend"):
        lines = [r.message for r in caplog.records if r.message.startswith(f"{phase} path")]
        assert len(lines) == 1
        assert "gather_cast" in lines[0]
        assert "forced by" in lines[0]
        assert "GiB" in lines[0]


# forwards -------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", [True, False], ids=["split", "joined"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_decode(path: str, page_size: int, split: bool) -> None:
    """Three lengths around a page and a FlashInfer tile, the new row written and read."""
    lens = [1, 65, 130]
    scene, slots = make_scene(320, page_size=page_size, slots=640, max_context=256)
    # requests start on a page; 64 divides the starts at every page size here
    starts = [0, 64, 192]
    requests = make_requests(*(slots[s : s + n] for s, n in zip(starts, lens)))
    q, new = make_q(3, scene.shape), make_rows(3, scene.shape)
    out = scene.run(requests, q, new, split=split)
    torch.testing.assert_close(
        scene.rows([r.slots[-1] for r in requests]),
        new.bfloat16().to(torch.float8_e4m3fn).double(),
        rtol=0,
        atol=0,
    )
    scene.check("decode", out, requests, q)


@pytest.mark.parametrize("split", [True, False], ids=["split", "joined"])
@pytest.mark.parametrize("heads", [16, 12, 20, 128])
def test_extend(extend_path: str, heads: int, split: bool) -> None:
    """Paged extend over cached prefixes; head counts that do not divide a tile are padded."""
    scene, slots = make_scene(200, heads=heads)
    requests = make_requests(slots[:65], slots[65:70], slots[70:135], q_lens=[7, 5, 1])
    q, new = make_q(13, scene.shape), make_rows(13, scene.shape)
    out = scene.run(requests, q, new, "extend", split=split)
    scene.check("extend", out, requests, q, mode="extend")


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("mode", ["decode", "extend"])
def test_gather_cast_equals_stock_for_every_code(
    kv_dtype: torch.dtype, dtype: torch.dtype, mode: str
) -> None:
    """Rows of all 256 bytes but the NaN and infinity codes: the bits of stock's whole-pool cast."""
    scene_shape = Shape(kv_dtype=kv_dtype, dtype=dtype)
    with hopper(), arm("gather_cast"):
        ours = Scene(OURS, scene_shape)
        slots = shuffled_slots(24, scene_shape)
        generator = torch.Generator().manual_seed(7)
        codes = torch.randint(0, 256, (24, scene_shape.width), generator=generator)
        # beyond lie NaN (e4m3), infinity and NaN (e5m2)
        top = 0x7E if kv_dtype == torch.float8_e4m3fn else 0x7B
        codes = torch.where(codes % 128 > top, codes & 0xB0, codes).to(torch.uint8)
        ours.bytes_of(0)[slots] = codes
        ours.poison(slots)
        theirs = Scene(STOCK, scene_shape)
        theirs.copy_pool(ours)
        requests = make_requests(
            slots[:11], slots[11:24], q_lens=[3, 5] if mode == "extend" else None
        )
        q = make_q(8 if mode == "extend" else 2, scene_shape, scale=1e-3)
        a = ours.run(requests, q, mode=mode)
        b = theirs.run(requests, q, mode=mode)
    assert a.isfinite().all()
    assert torch.equal(a, b)


def test_nan_codes_in_a_live_row_are_nan_as_in_stock(path: str) -> None:
    """docs/numerics.md: all read NaN but FlashInfer's FP8 kernel, which reads 480."""
    scene, slots = make_scene(4)
    scene.bytes_of(0)[slots[1], 3] = 0x7F
    out = scene.run(make_requests(slots), make_q(1, scene.shape))
    assert bool(out.isnan().any()) is (path != "native")


@pytest.mark.parametrize("mode", ["decode", "extend"])
def test_an_idle_batch_gives_nothing(path: str, mode: str) -> None:
    """cases.md 19: bs 0, after a batch that left its plan behind."""
    scene, slots = make_scene(8)
    scene.run(make_requests(slots), make_q(1, scene.shape))
    batch = scene.batch([], mode)
    scene.plan(batch)
    out = scene.attend(batch, make_q(0, scene.shape))
    assert out.shape == (0, scene.shape.heads * scene.shape.ckv)


def test_idle_mode_gives_nothing(path: str) -> None:
    scene, _ = make_scene(8)
    batch = scene.batch([], "idle")
    scene.plan(batch)
    out = scene.attend(batch, make_q(0, scene.shape), make_rows(0, scene.shape))
    assert out.numel() == 0


def test_a_shared_prefix_is_read_by_all_its_requests(path: str) -> None:
    """cases.md 3: more indices than the pool has slots."""
    scene, slots = make_scene(58, slots=60)
    requests = [Request([*slots[:50], slots[50 + i]], i) for i in range(8)]
    q, new = make_q(8, scene.shape), make_rows(8, scene.shape)
    out = scene.run(requests, q, new)
    scene.check("shared prefix", out, requests, q)


def test_a_slot_freed_and_rewritten_is_read_anew(path: str) -> None:
    """cases.md 4, eager: request B gets a slot that A left, twice."""
    scene, slots = make_scene(12)
    a = make_requests(slots[:6])
    first = scene.run(a, make_q(1, scene.shape))
    scene.check("before", first, a, make_q(1, scene.shape))
    for seed in (50, 51):
        scene.write(slots[2:6], make_rows(4, scene.shape, seed=seed))
        b = make_requests([*slots[6:9], *slots[2:6]])
        q = make_q(1, scene.shape, seed=seed)
        scene.check("after", scene.run(b, q), b, q)


def test_layers_share_one_workspace_and_do_not_mix(path: str) -> None:
    """Three layers in one step over one list of live slots, and one workspace for two backends."""
    scene, slots = make_scene(20, layers=3)
    other = Scene(OURS, scene.shape)
    requests = make_requests(slots[:7], slots[7:20])
    batch = scene.batch(requests)
    scene.plan(batch)
    for layer in (0, 1, 2, 0):
        q = make_q(2, scene.shape, seed=layer)
        out = scene.attend(batch, q, make_rows(2, scene.shape, seed=layer), layer=layer)
        scene.check(f"layer {layer}", out.view(2, 16, 512), requests, q, layer)
    assert (scene.backend._workspace is None) is (path == "native")
    assert scene.backend._workspace is other.backend._workspace


def test_poison_everywhere_else(path: str) -> None:
    """0x7F, 0xFF and 0x80 bytes in all other slots, and a stale tail behind kv_indptr[-1]."""
    scene, slots = make_scene(20)
    requests, q = make_requests(slots[:7], slots[7:20]), make_q(2, scene.shape)
    graph = scene.capture(4)
    outs = []
    for byte in (0x7F, 0xFF, 0x80):
        scene.poison(slots, byte)
        # what a longer batch would have left behind: slots that hold poison now
        scene.backend.cuda_graph_kv_indices.fill_(scene.shape.slots)
        outs.append(graph.replay(requests, q, make_rows(2, scene.shape))[0])
        scene.check("replay", outs[-1], requests, q)
        scene.check("eager", scene.run(requests, q), requests, q)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


# graphs ---------------------------------------------------------------------------------------


def test_replays_with_new_lengths(path: str) -> None:
    """One captured batch of 8 lanes: lengths grow, shrink, end at one; lanes come and go."""
    scene, slots = make_scene(200, layers=2, slots=256)
    graph = scene.capture(8)
    plans = [[3, 1, 70], [64, 65, 1, 1, 2, 3, 4, 5], [1], [100, 90], [2, 2, 2, 2]]
    for step, lens in enumerate(plans):
        starts = [sum(lens[:i]) for i in range(len(lens))]
        requests = make_requests(*(slots[s : s + n] for s, n in zip(starts, lens)))
        q = make_q(len(lens), scene.shape, seed=step)
        outs = graph.replay(requests, q, make_rows(len(lens), scene.shape, seed=step))
        for layer, out in enumerate(outs):
            scene.check(f"step {step} layer {layer}", out, requests, q, layer)


def test_a_rewritten_slot_is_read_by_the_next_replay(path: str) -> None:
    """cases.md 4: freed, rewritten and read again between two replays of one graph."""
    scene, slots = make_scene(12)
    graph = scene.capture(2)
    for step in range(3):
        requests = make_requests(slots[:6], [*slots[6:9], slots[0]])
        q = make_q(2, scene.shape, seed=step)
        out = graph.replay(requests, q, make_rows(2, scene.shape, seed=step))[0]
        scene.check(f"step {step}", out, requests, q)
        scene.write(slots[1:5], make_rows(4, scene.shape, seed=60 + step))


def test_capture_leaves_no_rubbish(path: str) -> None:
    """cases.md 21: the capture's lanes read slot 0; a real decode does not, and stays clean."""
    scene, slots = make_scene(9)
    scene.poison(slots)
    scene.capture(4)
    scene.bytes_of(0)[0] = 0xFF
    requests, q = make_requests(slots), make_q(1, scene.shape)
    scene.check("eager", scene.run(requests, q), requests, q)


def test_graphs_of_several_sizes_take_turns(path: str) -> None:
    """Each graph keeps its own plan; the live list and the workspace are shared."""
    scene, slots = make_scene(60)
    graphs = {bs: scene.capture(bs) for bs in (8, 4, 1)}
    for step, (bs, lens) in enumerate([(4, [5, 9, 2]), (1, [33]), (8, [1, 2, 3, 4, 5]), (4, [20])]):
        starts = [sum(lens[:i]) for i in range(len(lens))]
        requests = make_requests(*(slots[s : s + n] for s, n in zip(starts, lens)))
        q = make_q(len(lens), scene.shape, seed=step)
        out = graphs[bs].replay(requests, q, make_rows(len(lens), scene.shape, seed=step))[0]
        scene.check(f"bs {bs}", out, requests, q)
        # an eager extend between two replays plans the same backend
        extend = make_requests(slots[:12], q_lens=[3])
        q = make_q(3, scene.shape, seed=step)
        scene.check("extend", scene.run(extend, q, mode="extend"), extend, q, mode="extend")


# what a layer may do --------------------------------------------------------------------------


class Allocations(TorchDispatchMode):
    """Bytes of every storage that torch makes inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
        result = func(*args, **kwargs or {})
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in given and storage.data_ptr() not in self._seen:
                self._seen.add(storage.data_ptr())
                self.sizes.append(storage.nbytes())
        return result


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in torch.utils._pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


class SilentWrapper:
    """Runs nothing: what is left in a layer is the backend's own doing."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def plan(self, *args: Any) -> None:
        self.planned = args

    def run(self, q_nope: Any, q_pe: Any, ckv: Any, kpe: Any, **kwargs: Any) -> Any:
        self.calls.append({"q_nope": q_nope, "ckv": ckv, "kpe": kpe, **kwargs})
        return kwargs["out"]


@contextlib.contextmanager
def silent_kernels(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> Iterator[SilentWrapper]:
    """FlashInfer and Triton silenced: only the backend's own torch calls remain."""
    from sglang_fp8mla import workspace

    wrapper = SilentWrapper()
    monkeypatch.setattr(scene.backend, "decode_wrapper", wrapper)
    monkeypatch.setattr(scene.backend, "prefill_wrapper_paged", wrapper)
    monkeypatch.setattr(workspace, "gather_cast", lambda *operands, **_: operands[-1])
    if getattr(scene.backend, "_fused", None) is not None:
        monkeypatch.setattr(scene.backend._fused, "run", lambda *args, **kwargs: None)
    yield wrapper


@pytest.mark.parametrize("mode", ["decode", "extend"])
def test_a_layer_allocates_its_output_and_no_more(
    path: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cases.md 2: nothing grows in a step. Stock allocates the pool in 16 bits here."""
    scene, slots = make_scene(20)
    requests, q = make_requests(slots[:7], slots[7:20], q_lens=[1, 1]), make_q(2, scene.shape)
    out_bytes = 2 * scene.shape.heads * scene.shape.ckv * 2
    with silent_kernels(scene, monkeypatch):
        batch = scene.batch(requests, mode)
        scene.plan(batch)
        with Allocations() as seen:
            scene.attend(batch, q.flatten(1).view_as(q), split=False)
    assert seen.sizes == [out_bytes]

    theirs = Scene(STOCK, scene.shape)
    with silent_kernels(theirs, monkeypatch):
        batch = theirs.batch(requests, mode)
        theirs.plan(batch)
        with Allocations() as seen:
            theirs.attend(batch, q, split=False)
    pool = theirs.pool.kv_buffer[0].numel() * 2
    assert sorted(seen.sizes) == sorted([pool, out_bytes]), "the oracle must see stock's cast"


def test_what_reaches_the_kernel(extend_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows and scales of each path: FP8 rows of the pool with 1.0, or 16-bit rows with none."""
    scene, slots = make_scene(20)
    requests = make_requests(slots[:7], slots[7:20])
    with silent_kernels(scene, monkeypatch) as wrapper:
        scene.run(requests, make_q(2, scene.shape))
    call = wrapper.calls[-1]
    kv_dtype = wrapper.planned[11]
    assert call["ckv"].dtype == call["kpe"].dtype == kv_dtype
    pool = scene.pool.kv_buffer[0]
    if extend_path == "native":
        assert kv_dtype == torch.float8_e4m3fn
        assert call["ckv"].untyped_storage().data_ptr() == pool.untyped_storage().data_ptr()
        assert (call["ckv_scale"], call["kpe_scale"]) == (1.0, 1.0)
    else:
        assert kv_dtype == torch.bfloat16
        assert call["ckv"].shape[0] == pool.shape[0]
        assert "ckv_scale" not in call
        assert "kpe_scale" not in call


def test_nothing_reads_a_device_value_in_a_layer(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No `.item()`, `.tolist()` or `.cpu()` in a layer: each would sync, and break a capture."""
    scene, slots = make_scene(20)
    requests = make_requests(slots[:7], slots[7:20])
    with silent_kernels(scene, monkeypatch):
        batch = scene.batch(requests)
        scene.plan(batch)

        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise AssertionError("a device value was read in a layer")

        q = make_q(2, scene.shape)
        with pytest.MonkeyPatch.context() as patch:
            for name in ("item", "tolist", "cpu", "__bool__", "__int__", "numpy"):
                patch.setattr(torch.Tensor, name, refuse)
            scene.attend(batch, q, split=False)


def test_padded_query_rows_keep_out_of_the_way(extend_path: str) -> None:
    """cases.md 18: q has 8 rows, the plan 5; the first five are right whatever the rest hold."""
    scene, slots = make_scene(40)
    requests = make_requests(slots[:20], slots[20:33], q_lens=[2, 3])
    batch = scene.batch(requests, "extend")
    scene.plan(batch)
    q = make_q(8, scene.shape)
    q[5:] = float("nan")
    out = scene.attend(batch, q, split=False).view(-1, 16, 512)
    scene.check("live rows", out[:5], requests, q[:5], mode="extend")


# DCP and drafts -------------------------------------------------------------------------------


def test_lse_of_two_dcp_ranks_merges_to_one(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """cases.md 26: each rank holds 3 of 6 rows; base-2 LSE merges them to the whole."""
    from sglang_fp8mla import backend

    scene, slots = make_scene(6)
    q = make_q(1, scene.shape)
    monkeypatch.setattr(backend, "get_parallel", lambda: SimpleNamespace(dcp_enabled=True))
    parts = []
    for rank in range(2):
        batch = scene.batch(make_requests(slots[rank::2]))
        scene.plan(batch)
        out, lse_log2 = scene.attend(batch, q)
        parts.append((out.view(16, 512).double(), lse_log2.view(16).double()))
        exact_lse = ref_attention(
            q, scene.rows(slots[rank::2]), ckv=512, sm_scale=scene.shape.sm_scale
        )[1]
        # fp32 holds it to 2**-23 relative
        torch.testing.assert_close(parts[-1][1], exact_lse[0], rtol=1e-6, atol=1e-6)
    weights = torch.softmax(
        torch.stack([lse for _, lse in parts]) * torch.log(torch.tensor(2.0)), 0
    )
    merged = sum(w[:, None] * out for w, (out, _) in zip(weights, parts))
    exact = scene.expected(make_requests(slots), q)[0]
    # each part was rounded to bf16 once
    torch.testing.assert_close(merged, exact, rtol=2**-7, atol=2**-8 * float(exact.abs().max()))


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "replay"])
def test_the_draft_steps_are_ours_and_see_one_token_more_each(path: str, graph: bool) -> None:
    """EAGLE/NextN: step i attends to the prefix and the draft tokens up to i."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from sglang_fp8mla import backend as module

    scene, slots = make_scene(60)
    steps, bs = 4, 2
    draft = module.FlashInferMLAFp8MultiStepDraftBackend(scene.runner, 1, steps)
    assert all(type(b) is module.FlashInferMLAFp8Backend for b in draft.attn_backends)
    assert len(draft.attn_backends) == steps - 1
    prefix = [7, 12]
    whole = make_requests(slots[: prefix[0] + steps], slots[20 : 20 + prefix[1] + steps])

    def make_batch(lens: list[int]) -> Any:
        batch = scene.batch(whole)  # fills req_to_token, drafts included
        batch.seq_lens = torch.tensor(lens, dtype=torch.int32)
        batch.seq_lens_cpu = batch.seq_lens.clone()
        batch.seq_lens_sum = sum(lens)
        batch.positions = torch.tensor(lens, dtype=torch.int64)
        batch.spec_info = SimpleNamespace(
            is_draft_input=lambda: True, kv_indptr=None, kv_indices=None
        )
        batch.forward_mode = ForwardMode.DECODE
        return batch

    with scene.context():
        if graph:
            draft.init_cuda_graph_state(4, 4)
            captured = make_batch([1, 1])
            draft.init_forward_metadata_out_graph(captured, in_capture=True)
            metadata = [b.forward_metadata for b in draft.attn_backends]
        for lens in ([5, 9], prefix):
            if graph:
                draft.init_forward_metadata_out_graph(make_batch(lens))
            else:
                draft.init_forward_metadata(make_batch(lens))
            for step, child in enumerate(draft.attn_backends):
                if graph:
                    child.forward_metadata = metadata[step]
                requests = [replace(r, slots=r.slots[: n + step + 1]) for r, n in zip(whole, lens)]
                q = make_q(bs, scene.shape, seed=step)
                out = child.forward_decode(
                    q.flatten(1), None, None, scene.layers[0], scene.batch(requests)
                )
                scene.batch(whole)
                scene.check(f"step {step}", out.view(bs, 16, 512), requests, q)


def test_draft_rows_are_written_where_their_ids_say(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft step's ids are a strided view; SGLang's CUDA write kernel takes ids as contiguous.

    (set_mla_kv_buffer.cuh of 0.5.23 checks `loc` for any stride and reads `loc[i]`. The CPU's write
    is torch indexing, so that the kernel's reading is put in its place here.)
    """
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    write = MLATokenToKVPool._write_mla_kv_buffer

    def write_as_on_cuda(self: Any, buffer: Any, loc: torch.Tensor, *rows: torch.Tensor) -> None:
        write(self, buffer, torch.as_strided(loc, loc.shape, (1,)), *rows)

    monkeypatch.setattr(MLATokenToKVPool, "_write_mla_kv_buffer", write_as_on_cuda)
    scene, slots = make_scene(24)
    requests = make_requests(slots[:5], slots[5:14], slots[14:24])
    batch = scene.batch(requests)
    # three requests by two steps, as per_step_draft_out_cache_loc lays them out
    steps = torch.stack([batch.out_cache_loc, torch.tensor([1, 2, 3])], dim=1)
    batch.out_cache_loc = steps.T[0]
    assert not batch.out_cache_loc.is_contiguous()
    scene.plan(batch)
    q = make_q(3, scene.shape)
    out = scene.attend(batch, q, make_rows(3, scene.shape, seed=9))
    scene.check("a draft step", out.view(3, 16, 512), requests, q)
    written = scene.rows([request.slots[-1] for request in requests])
    new = make_rows(3, scene.shape, seed=9).to(scene.shape.dtype)
    expected = new.to(scene.pool.dtype).double()
    assert torch.equal(written.cpu(), expected)
