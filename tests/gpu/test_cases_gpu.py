"""Rows of the table of reported inputs that only a GPU shows whole: time, memory, real kernels.

The scene is `tests/contract`'s, on the device and with nothing faked: SGLang's pools and updaters,
FlashInfer's compiled kernels, real CUDA graphs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial

import pytest

torch = pytest.importorskip("torch")

from contract.arms import OURS, STOCK, arm, forced  # noqa: E402
from contract.cases import case  # noqa: E402
from contract.scene import (  # noqa: E402
    Request,
    Scene,
    check_run,
    make_q,
    make_requests,
    make_rows,
)
from contract.scene import make_scene as scene_on  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.sglang,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SM90 = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
NATIVE = pytest.param("native", marks=pytest.mark.sm90)
PATHS = ["gather_cast", NATIVE, "fused"]
EXTEND_PATHS = ["gather_cast", NATIVE]


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    with arm(request.param):
        yield request.param


@pytest.fixture(params=EXTEND_PATHS)
def extend_path(request: pytest.FixtureRequest) -> Iterator[str]:
    with arm(request.param):
        yield request.param


make_scene = partial(scene_on, device="cuda")


def microseconds(call: Callable[[], object], repeats: int = 200) -> tuple[float, float]:
    """Median of a call on the device, and the spread p80 - p20."""
    for _ in range(20):
        call()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000)
    steps = statistics.quantiles(times, n=10)
    return statistics.median(times), steps[7] - steps[1]


def layer_time(scene: Scene, slots: list[int]) -> tuple[float, float]:
    """One request of `slots`, one layer, in a CUDA graph, as the server runs it."""
    graph = scene.capture(1)
    graph.replay(make_requests(slots), make_q(1, scene.shape), make_rows(1, scene.shape))
    return microseconds(graph._graph.replay)


# cost and memory ------------------------------------------------------------------------------


@case(1)
def test_case01_time_follows_live_slots(path: str) -> None:
    """64 tokens, pool 131,072 and 1,048,576: the same time within noise, where stock takes 8x."""
    times = {}
    for slots in (131_072, 1_048_576):
        scene, live = make_scene(64, slots=slots)
        times[slots] = layer_time(scene, live)
        del scene
    (small, spread), (large, spread_large) = times.values()
    assert large <= small + max(spread, spread_large) + 0.1 * small, times


@case(2)
def test_case02_a_pool_of_16_5_million_slots(path: str) -> None:
    """9.5 GB of pool, 8 live tokens: a step grows by its output, not by 19 GB."""
    scene, live = make_scene(8, slots=16_500_000)
    requests, q = make_requests(live), make_q(1, scene.shape)
    scene.check("warm", scene.run(requests, q), requests, q)
    batch = scene.batch(requests)
    scene.plan(batch)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    scene.attend(batch, q)
    # q in two halves and the output, each rounded up to 512 bytes by the allocator
    assert torch.cuda.max_memory_allocated() - before <= 64 << 10


@case(5)
def test_case05_a_tiny_pool_is_no_slower_than_stock() -> None:
    """Pool 1,024, kv 16, path by `auto`: no slower than stock's cast of everything."""
    with forced():
        scene, live = make_scene(16, slots=1024)
        ours, spread = layer_time(scene, live)
    stock_scene = Scene(STOCK, scene.shape, "cuda")
    stock_scene.copy_pool(scene)
    stock, spread_stock = layer_time(stock_scene, live)
    assert ours <= stock + max(spread, spread_stock) + 0.1 * stock, (ours, stock)


def test_live_slots_past_two_to_the_31(path: str) -> None:
    """All live rows beyond 2**31 elements: slots from 3,728,271 on."""
    first = 2**31 // 576 + 1
    scene, _ = make_scene(0, slots=first + 4096, max_context=256)
    slots = [first + int(i) for i in torch.randperm(4096)[:200]]
    scene.write(slots, make_rows(200, scene.shape))
    check_run(scene, make_requests(slots[:70], slots[70:71], slots[71:200], q_lens=None))
    requests = make_requests(slots[:70], slots[70:200], q_lens=[7, 3])
    check_run(scene, requests, "extend")


# values ---------------------------------------------------------------------------------------


@case(6)
@pytest.mark.parametrize("value", [447.0, 448.0, 449.0, 464.0, 480.0, 1e4, -1e4, torch.inf])
def test_case06_overflow_on_this_torch(path: str, value: float) -> None:
    """What this torch stores is what is read, and no neighbour sees it."""
    scene, slots = make_scene(12)
    quiet, loud = slots[:6], slots[6:]
    q = make_q(2, scene.shape)
    alone = scene.run(make_requests(quiet, quiet), q[[0, 0]])[:1]
    rows = make_rows(6, scene.shape)
    rows[2, 5] = value
    scene.write(loud, rows)
    stored = float(torch.tensor(value).bfloat16().cuda().to(E4M3).float())
    found = scene.rows(loud)[2, 5].item()
    assert found == stored or (found != found and stored != stored)
    out = scene.run(make_requests(quiet, loud), q)
    assert torch.equal(out[:1], alone)
    if stored == stored:
        scene.check("stored value", out, make_requests(quiet, loud), q)
    else:
        assert out[1].isnan().any() or path == "native"


@pytest.mark.parametrize("byte", [0x7F, 0xFF, 0x80], ids=hex)
def test_values_nobody_references_reach_nothing(path: str, byte: int) -> None:
    scene, slots = make_scene(300, slots=1024, max_context=256)
    requests = make_requests(slots[:65], slots[65:66], slots[66:300])
    want = check_run(scene, requests)
    scene.poison(slots, byte)
    assert torch.equal(check_run(scene, requests), want)


@pytest.mark.parametrize("byte", [0x7F, 0x7E], ids=["nan", "448"])
def test_a_requests_bad_rows_stay_its_own(path: str, byte: int) -> None:
    scene, slots = make_scene(300, slots=1024, max_context=256)
    requests = make_requests(slots[:65], [*slots[:60], *slots[70:150]], slots[150:300])
    q = make_q(3, scene.shape)
    want = scene.run(requests, q)
    scene.bytes_of(0)[slots[100]] = byte
    out = scene.run(requests, q)
    assert torch.equal(out[[0, 2]], want[[0, 2]])
    assert not torch.equal(out[1], want[1])


@pytest.mark.parametrize("scale", [1e-5, 1e2, 1e4])
def test_extreme_but_finite_logits(path: str, scale: float) -> None:
    scene, slots = make_scene(700, slots=1024, max_context=1024)
    q = make_q(1, scene.shape, scale=scale)
    out = scene.run(make_requests(slots), q)
    assert out.isfinite().all()
    logits = (q.cuda().double() @ scene.rows(slots).T) * scene.shape.sm_scale
    top = logits.topk(2, dim=-1).values[0]
    sure = (top[:, 0] - top[:, 1]) > 40
    if scale == 1e4:
        assert sure.any()
        best = scene.rows(slots)[logits[0].argmax(-1)][:, :512].bfloat16()
        # one weight of 1, the others below 2**-50; a kernel may divide, hence one ulp of bf16
        torch.testing.assert_close(out[0][sure], best[sure], rtol=2**-7, atol=0)
    else:
        scene.check(f"scale {scale}", out, make_requests(slots), q)


@case(8)
def test_case08_checkpoint_scales_are_not_applied(path: str) -> None:
    scene, slots = make_scene(100, max_context=128)
    requests, q = make_requests(slots), make_q(1, scene.shape)
    plain = scene.run(requests, q)
    scene.layers[0].k_scale_float = 0.5
    scene.layers[0].k_scale = torch.tensor(0.5, device="cuda")
    assert torch.equal(scene.run(requests, q), plain)


# heads, shapes, pages -------------------------------------------------------------------------


@case(11, 12)
@pytest.mark.parametrize("heads", [10, 12, 20, 24, 40, 48, 80, 96])
def test_case11_case12_no_head_count_drops_a_key(extend_path: str, heads: int) -> None:
    """The oracle shows one dropped key: the last one carries all the weight here."""
    scene, slots = make_scene(700, heads=heads, slots=1024, max_context=1024)
    for kv_len, q_len in ((65, 7), (135, 7), (519, 7), (576, 512), (600, 512)):
        requests = make_requests(slots[:kv_len], q_lens=[q_len])
        check_run(scene, requests, "extend", seed=kv_len)


@case(12)
@pytest.mark.parametrize("heads", [12, 20, 96])
def test_case12_the_last_visible_key_counts(extend_path: str, heads: int) -> None:
    """Each query's own key dominates: one dropped is an error of the size of the output."""
    scene, slots = make_scene(72, heads=heads, max_context=128)
    rows = make_rows(72, scene.shape, seed=5)
    scene.write(slots, rows)
    stored = scene.rows(slots)
    requests = make_requests(slots, q_lens=[7])
    q = stored[-7:, None, :].expand(7, heads, 576).to(torch.bfloat16).contiguous()
    exact = scene.expected(requests, q, mode="extend")
    blind = scene.expected([Request(slots[:-1], 0, 6)], q[1:], mode="extend")
    assert (exact[1:] - blind).abs().max() > 0.5 * exact.abs().max(), (
        "the case must show the effect"
    )
    scene.check("last key", scene.run(requests, q, mode="extend"), requests, q, mode="extend")


@case(13)
@pytest.mark.parametrize("heads", [1, 4, 8, 12, 16, 20, 64, 128])
def test_case13_heads_by_batch_by_queries(path: str, heads: int) -> None:
    scene, slots = make_scene(1200, heads=heads, max_bs=17, slots=2048, max_context=128)
    for bs in (1, 2, 17):
        parts = [slots[i * 70 : i * 70 + 66 + i % 3] for i in range(bs)]
        check_run(scene, make_requests(*parts), seed=bs)
        if path == "fused":
            continue
        for q_len in (1, 2, 3, 4):
            requests = make_requests(*parts, q_lens=[q_len] * bs)
            check_run(scene, requests, "extend", seed=10 * bs + q_len)


@case(17)
def test_case17_page_size_changes_nothing(path: str) -> None:
    outs = []
    for page_size in (1, 16, 64):
        scene, slots = make_scene(65, page_size=page_size)
        outs.append(check_run(scene, make_requests(slots)))
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("mode", ["decode", "extend"])
@case(32)
def test_case32_gather_cast_is_stock_to_the_last_bit(kv_dtype: torch.dtype, mode: str) -> None:
    """Through SGLang, eager: the whole-pool cast and the live rows give the same bits."""
    with arm("gather_cast"):
        ours, slots = make_scene(800, slots=4096, kv_dtype=kv_dtype, max_context=512)
        stock = Scene(STOCK, ours.shape, "cuda")
        stock.copy_pool(ours)
        q_lens = [65, 3, 200] if mode == "extend" else None
        requests = make_requests(slots[:65], slots[65:400], slots[400:800], q_lens=q_lens)
        n = sum(q_lens) if q_lens else 3
        q, new = make_q(n, ours.shape), make_rows(n, ours.shape)
        a = ours.run(requests, q, new, mode)
        b = stock.run(requests, q, new, mode)
    assert torch.equal(a, b)


# graphs ---------------------------------------------------------------------------------------


@case(4, 21)
def test_case04_case21_replays_read_what_is_there(path: str) -> None:
    """Real replays: new lengths, rewritten slots, a poisoned slot 0, lanes that come and go."""
    scene, slots = make_scene(900, slots=2048, max_context=512, layers=2)
    graph = scene.capture(8)
    scene.bytes_of(0)[0] = 0xFF
    scene.bytes_of(1)[0] = 0xFF
    plans = [[3, 1, 300], [64, 65, 1, 1, 2, 3, 4, 5], [1], [400, 400], [2, 2, 2, 2], [500]]
    for step, lens in enumerate(plans):
        starts = [sum(lens[:i]) for i in range(len(lens))]
        requests = make_requests(*(slots[s : s + n] for s, n in zip(starts, lens)))
        if len(requests) < 8:
            # padded lanes read row 0 of the request pool, whose first slot is a live one
            scene.bytes_of(0)[0] = 0xFF
        q = make_q(len(lens), scene.shape, seed=step)
        new = make_rows(len(lens), scene.shape, seed=step)
        for layer, out in enumerate(graph.replay(requests, q, new)):
            scene.check(f"step {step} layer {layer}", out, requests, q, layer)
        scene.write(slots[5:40], make_rows(35, scene.shape, seed=200 + step), step % 2)


@case(32)
def test_case32_replays_are_stock_to_the_last_bit() -> None:
    """gather_cast and stock, the same captured batch, replayed with changing lengths."""
    with arm("gather_cast"):
        ours, slots = make_scene(900, slots=4096, max_context=512)
        stock = Scene(STOCK, ours.shape, "cuda")
        stock.copy_pool(ours)
        graphs = ours.capture(4), stock.capture(4)
        for step, lens in enumerate([[3, 300, 1], [64, 65, 128, 129], [500], [1, 1]]):
            starts = [sum(lens[:i]) for i in range(len(lens))]
            requests = make_requests(*(slots[s : s + n] for s, n in zip(starts, lens)))
            q = make_q(len(lens), ours.shape, seed=step)
            new = make_rows(len(lens), ours.shape, seed=step)
            a, b = (g.replay(requests, q, new)[0] for g in graphs)
            assert torch.equal(a, b), f"step {step}"


@case(19)
@pytest.mark.parametrize("mode", ["idle", "decode", "extend"])
def test_case19_idle_ranks(path: str, mode: str) -> None:
    scene, slots = make_scene(9)
    for _ in range(2):
        batch = scene.batch([], mode)
        scene.plan(batch)
        out = scene.attend(batch, make_q(0, scene.shape))
        assert out.shape == (0, scene.shape.heads * scene.shape.ckv)
        check_run(scene, make_requests(slots))


KIT_DIMS = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "dtype": torch.bfloat16,
    "device": "cuda",
}


def mend_draft_runner(kit, draft, monkeypatch) -> None:
    """Two things that the kit's draft runner needs on a GPU.

    Its module writes the drafts' rows itself, at a strided view of `out_cache_loc`, which SGLang's
    CUDA kernel reads as contiguous: all but the first request then attend to rows that nobody
    wrote, whatever the backend (stock over a bf16 pool fails the kit's own case by it). In a server
    the backend writes, and ours hands over contiguous ids
    (`test_backend_cpu::test_draft_rows_are_written_where_their_ids_say`); here the kit does so too.

    The kit draws its weights, compares the drafted tokens of an eager run (three requests) with
    those of a replay (padded to four), and asks for equal ones. On the CPU, in float64, they are
    (gaps of 0.008, 0.02 and 0.023 among six of a standard deviation of 0.35); on a GPU the batches
    are split otherwise, round otherwise, and such ties may fall either way. A drafted token may
    differ where the eager run's two best logits lie within the kit's own budget; what follows it
    is not compared.
    """
    write = kit.TinyDeepseekMLAAttention.write_kv_cache
    monkeypatch.setattr(
        kit.TinyDeepseekMLAAttention,
        "write_kv_cache",
        lambda self, loc, *rows: write(self, loc.contiguous(), *rows),
    )
    gaps = []  # per eager step, [num_requests]: gap less what the kit allows both logits to move
    forward = draft._MLAEagleDraftForward.__call__

    def recording(self, forward_batch):
        result = forward(self, forward_batch)
        if not torch.cuda.is_current_stream_capturing() and len(gaps) < 2:
            best = result.logits_output.next_token_logits.topk(2).values
            allowed = draft.MLA_ATOL + draft.MLA_RTOL * best.abs()
            gaps.append((best[:, 0] - best[:, 1] - allowed.sum(-1)).cpu())
        return result

    compare = torch.testing.assert_close

    def comparing(actual, expected, **options):
        # the runner has nothing to say of some outputs, and says None
        drafted = isinstance(actual, torch.Tensor) and not actual.is_floating_point()
        if not drafted or actual.shape[-1] != len(gaps) + 1:
            compare(actual, expected, **options)
            return
        # the first drafted token is given; step i chose token i + 1
        for request, (mine, theirs) in enumerate(zip(actual.tolist(), expected.tolist())):
            differs = next((i for i, (a, b) in enumerate(zip(mine, theirs)) if a != b), None)
            if differs is not None:
                assert differs > 0
                assert gaps[differs - 1][request] < 0, (request, mine, theirs, gaps)

    monkeypatch.setattr(draft._MLAEagleDraftForward, "__call__", recording)
    monkeypatch.setattr(torch.testing, "assert_close", comparing)


@case(22, 23, 31)
@pytest.mark.parametrize(
    "mode", ["breakable", "eagle-verify", "dflash-verify", "eagle-draft", "decode-graph"]
)
def test_case22_case23_case31_sglangs_runner_modes(
    path: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's kit over FP8: captured prefill, verify graphs, the production draft runner."""
    from contract.scene import single_rank

    single_rank()
    from dataclasses import replace

    from contract.test_kit_cpu import NoSkip, use_pool
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.test.kits.attention_unittest.attention_methods import mla_attention as kit
    from sglang.test.kits.attention_unittest.runner_modes import cuda_graph_decode_runner as decode
    from sglang.test.kits.attention_unittest.runner_modes import speculative_draft_runner as draft
    from sglang.test.kits.attention_unittest.runner_modes import (
        speculative_target_verify_runner as verify,
    )
    from sglang.test.kits.attention_unittest.runner_modes import split_op_runner as split

    use_pool(kit, monkeypatch, E4M3)
    base = replace(kit.make_mla_cases(OURS)[0], page_size=16, prefix_lens=(14, 15, 16))
    if mode == "breakable":
        item = replace(base, extend_lens=(3, 1, 2))
        split.run_mla_split_op_extend_case(
            NoSkip(), item, breakable=True, static_num_tokens=11, **KIT_DIMS
        )
    elif mode.endswith("verify"):
        item = replace(base, forward_mode=ForwardMode.TARGET_VERIFY, extend_lens=(3, 3, 3))
        kind = mode.split("-")[0]
        verify.run_mla_eagle_verify_case(NoSkip(), item, topk=1, spec_kind=kind, **KIT_DIMS)
        verify.run_mla_eagle_verify_cuda_graph_case(
            NoSkip(), item, topk=1, spec_kind=kind, **KIT_DIMS
        )
    elif mode == "eagle-draft":
        item = replace(base, forward_mode=ForwardMode.DECODE)
        mend_draft_runner(kit, draft, monkeypatch)
        draft.run_mla_eagle_draft_cuda_graph_runner_case(NoSkip(), item, **KIT_DIMS)
    else:
        item = replace(base, forward_mode=ForwardMode.DECODE)
        decode.run_mla_cuda_graph_decode_case(NoSkip(), item, **KIT_DIMS)
