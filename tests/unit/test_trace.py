"""`trace`: finds the pool cast where it is and only there, and says clearly what it cannot read."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from data import make_trace

from sglang_fp8mla import cli
from sglang_fp8mla import trace as trace_module
from sglang_fp8mla.errors import IncompatibleEnvironment
from sglang_fp8mla.trace import CAST, GAP, analyse, category_of, elements_per_thread
from sglang_fp8mla.trace_file import InvalidTrace, Rank, iter_events, read_trace

POOL = 495_553
STOCK = make_trace.Case(layers=8, steps=3, pool=POOL)
OURS = replace(STOCK, cast=False, gather=True)


@pytest.fixture
def trace_of(tmp_path):
    """Writes a case and returns its path."""

    def build(case: make_trace.Case, name: str = "1790000000.5-TP-0-DECODE.trace.json.gz") -> Path:
        make_trace.write(case, tmp_path / name)
        return tmp_path / name

    return build


def only_stage(path: Path, mode: str = "DECODE", **options):
    (report,) = analyse(read_trace(path), **options)
    return report.stages[mode]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"graph": False},
        {"marks": False},
        {"cpu": False},
        {"cpu": False, "marks": False},
        {"detailed": False},
        {"prefill": True},
    ],
    ids=lambda change: "-".join(change) or "graph",
)
def test_finds_the_cast_in_stock_and_not_in_ours(trace_of, change):
    """A detector tied to one way of recording misses the cast, or sees it everywhere, elsewhere."""
    mode = "GRAPH" if change.get("marks") is False and change.get("graph", True) else "DECODE"
    stock = only_stage(trace_of(replace(STOCK, **change)), mode)
    assert stock.cast is not None
    assert stock.cast.per_step == STOCK.layers
    assert stock.cast.pool_rows == POOL
    assert stock.cast.us_per_layer == pytest.approx(STOCK.cast_us, abs=0.01)
    assert stock.cast.share == pytest.approx(8 * 830 / (stock.step_ms * 1e3), abs=1e-3)
    ours = only_stage(trace_of(replace(OURS, **change)), mode)
    assert ours.cast is None
    assert ours.categories["live-row cast"]["per_step"] == STOCK.layers
    assert stock.cast.step_ms_without == pytest.approx(stock.step_ms - 8 * 0.83, abs=1e-6)


def test_live_rows_come_from_the_step_name_or_the_caller(trace_of):
    path = trace_of(STOCK)
    cast = only_stage(path).cast
    assert cast.live_rows in (1100, 1101)
    assert cast.live_share == pytest.approx(1100 / POOL, rel=0.01)
    assert cast.step_ms_without < cast.step_ms_with_live_rows < cast.step_ms_without + 0.1
    assert only_stage(path, live_tokens=77).cast.live_rows == 77
    assert only_stage(trace_of(replace(STOCK, detailed=False))).cast.live_rows is None


def test_shares_add_up_to_the_step(trace_of):
    """Overlapping kernels counted twice would make the parts more than the whole."""
    stage = only_stage(trace_of(STOCK))
    assert sum(v["ms"] for v in stage.categories.values()) == pytest.approx(stage.step_ms)
    assert sum(v["share"] for v in stage.categories.values()) == pytest.approx(1.0)
    assert stage.layers == STOCK.layers
    assert stage.categories[GAP]["share"] > 0


def test_overlapping_kernels_are_counted_once():
    rank = Rank()
    for ts, dur in ((0.0, 10.0), (4.0, 10.0), (5.0, 2.0), (20.0, 1.0)):
        rank.ts.append(ts)
        rank.dur.append(dur)
    assert trace_module._exclusive(rank, range(4)) == [10.0, 4.0, 0.0, 1.0]


def test_a_small_pool_copy_is_no_pool_cast(trace_of):
    """1,024 rows per layer are activations of a prefill chunk, not a pool."""
    small = replace(STOCK, pool=1024, cast_us=2.0)
    assert only_stage(trace_of(small)).cast is None
    assert only_stage(trace_of(replace(small, graph=False))).cast is None


@pytest.mark.parametrize("graph", [True, False])
def test_a_cast_of_live_prefix_rows_is_no_pool_cast(trace_of, graph):
    """The chunked prefix path of stock and of ours casts the prefix, however long, and no more."""
    case = replace(STOCK, cast=False, prefix_rows=8192, graph=graph)
    assert only_stage(trace_of(case)).cast is None


def test_a_large_copy_once_per_step_is_no_pool_cast(trace_of, monkeypatch):
    """Logits of a large batch are copied by the very same kernel, once, after the last layer."""
    monkeypatch.setattr(make_trace, "COPY_FLOAT", make_trace.CAST)
    real = make_trace._gpu
    grown = lambda case, name, ts, dur, ext, corr, blocks: real(  # noqa: E731
        case, name, ts, dur, ext, corr, 500_000 if name == make_trace.CAST else blocks
    )
    monkeypatch.setattr(make_trace, "_gpu", grown)
    stage = only_stage(trace_of(OURS))
    assert any(kernel["name"] == make_trace.CAST for kernel in stage.kernels)
    assert stage.cast is None


def test_merged_ranks_are_told_apart(tmp_path):
    """Correlation ids repeat in every rank: mixed up, each would own the other's kernels."""
    path = tmp_path / "merged-1790000000.5.trace.json.gz"
    texts = []
    for label, case in (("[TP00]", STOCK), ("[TP01]", OURS)):
        texts += list(make_trace.events(replace(case, pid_prefix=label)))
    with gzip.open(path, "wt") as file:
        file.write('{"traceEvents": [' + ",\n".join(texts) + '], "deviceProperties": []}')
    first, second = analyse(read_trace(path))
    assert (first.rank, first.cast_found) == ("TP00", True)
    assert (second.rank, second.cast_found) == ("TP01", False)


def test_a_bare_list_of_events_is_a_trace(tmp_path):
    path = tmp_path / "t.json"
    path.write_text("[" + ",".join(make_trace.events(STOCK)) + "]")
    assert only_stage(path).cast is not None


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_events_survive_any_chunk_boundary(trace_of, monkeypatch, chunk):
    path = trace_of(replace(STOCK, layers=1, steps=1), "t.json")
    whole = json.loads(path.read_text())["traceEvents"]
    monkeypatch.setattr("sglang_fp8mla.trace_file._CHUNK", chunk)
    assert list(iter_events(path)) == whole


def test_a_cut_off_file_is_refused_and_read_on_request(trace_of, tmp_path):
    plain = trace_of(STOCK, "t.json").read_bytes()
    packed = trace_of(STOCK).read_bytes()
    for name, data in (("cut.json", plain), ("cut.json.gz", packed)):
        path = tmp_path / name
        path.write_bytes(data[: len(data) * 2 // 3])
        with pytest.raises(InvalidTrace, match=r"is cut off after \d+ events .*--partial"):
            read_trace(path)
        assert only_stage_partial(path).cast is not None


def only_stage_partial(path: Path):
    (report,) = analyse(read_trace(path, partial=True))
    return report.stages["DECODE"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"  \n ", "is empty"),
        (b"<html>", "is not a JSON trace: it starts with '<html>'"),
        (b'{"a": 1}', "holds no traceEvents"),
        (b'{"traceEvents": [', "is cut off after 0 events"),
        (b'{"traceEvents": [{"ph": "X"}, {"ph": oops}, ', "is cut off after 1 events"),
        (b"\x1f\x8b\x08garbage that is no gzip stream", "trace: "),
    ],
)
def test_what_is_no_trace_is_named(tmp_path, content, message):
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(InvalidTrace, match=message):
        read_trace(path)


def test_missing_file_and_folder_are_named(tmp_path):
    with pytest.raises(InvalidTrace, match=r"FILE must exist, got .*none\.json"):
        read_trace(tmp_path / "none.json")
    with pytest.raises(InvalidTrace, match="must be a trace file, got the folder"):
        read_trace(tmp_path)


def test_exit_code_says_whether_the_cast_is_there(trace_of, capsys, tmp_path):
    stock, ours = trace_of(STOCK, "a.json"), trace_of(OURS, "b.json")
    assert cli.main(["trace", str(stock)]) == 3
    assert "pool cast in DECODE" in capsys.readouterr().out
    assert cli.main(["trace", str(ours)]) == 0
    assert "No full-pool cast" in capsys.readouterr().out
    assert cli.main(["trace", "--json", str(ours), str(stock)]) == 3
    data = json.loads(capsys.readouterr().out)
    assert data["cast_found"] is True
    assert [t["cast_found"] for t in data["traces"]] == [False, True]
    assert data["traces"][1]["stages"]["DECODE"]["cast"]["pool_rows"] == POOL
    (tmp_path / "empty.json").touch()
    assert cli.main(["trace", str(tmp_path / "empty.json")]) == 2
    assert "is empty" in capsys.readouterr().err


def test_a_trace_without_gpu_events_says_how_to_record_one(tmp_path, capsys):
    path = tmp_path / "cpu.json"
    path.write_text('{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1}]}')
    assert cli.main(["trace", str(path)]) == 1
    assert "no GPU events: record with activities CPU and GPU" in capsys.readouterr().err


def test_plot_is_drawn(trace_of, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out = tmp_path / "step.png"
    assert cli.main(["trace", str(trace_of(STOCK)), "--plot", str(out)]) == 3
    assert out.read_bytes().startswith(b"\x89PNG")


def test_a_plot_that_cannot_be_written_is_refused_first(trace_of, capsys):
    assert cli.main(["trace", str(trace_of(STOCK)), "--plot", "/nonexistent/a.png"]) == 2
    assert "--plot must name a file in a folder that exists" in capsys.readouterr().err


def test_a_missing_matplotlib_is_named_before_hours_of_reading(trace_of, monkeypatch, capsys):
    args = cli.build_parser("trace").parse_args(["trace", "x.json", "--plot", "a.png"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(trace_module, "_read_all", lambda *a: pytest.fail("read first"))
    with pytest.raises(IncompatibleEnvironment, match=r"pip install 'sglang-fp8mla\[plot\]'"):
        args.func(args)


@pytest.mark.parametrize(
    ("kernel", "category"),
    [
        (make_trace.ATTENTION, "attention"),
        ("void flashinfer::mla::BatchMLAPagedAttentionKernel<KTraits>(Params)", "attention"),
        ("mla_decode", "attention"),
        ("mla_decode_merge", "attention"),
        ("mla_decode_plan", "index building"),
        ("_decode_kernel", "attention"),
        ("_fwd_grouped_kernel_stage1", "attention"),
        (make_trace.GATHER, "live-row cast"),
        ("_claim_slots_kernel", "live-row cast"),
        ("_count_slots_kernel", "live-row cast"),
        ("_find_rows_kernel", "live-row cast"),
        (make_trace.WRITE, "KV write"),
        (make_trace.GEMM, "GEMM"),
        ("void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90>>", "attention"),
        ("fused_moe_kernel", "MoE"),
        (make_trace.NORM, "norm"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
         "communication"),
        ("void sglang::cross_device_reduce_1stage<__nv_bfloat16, 8>(...)", "communication"),
        (make_trace.ROPE, "rope"),
        (make_trace.ACT, "activation"),
        (make_trace.ARGMAX, "sampling"),
        ("Memcpy DtoH (Device -> Pinned)", "memory copy"),
        ("create_flashinfer_kv_indices_triton", "index building"),
        (make_trace.CAST, "elementwise"),
        ("something_new", "other"),
    ],
)  # fmt: skip
def test_kernels_are_counted_as_what_they_are(kernel, category):
    assert category_of(kernel) == category


def test_elements_per_thread_is_read_from_the_template():
    assert elements_per_thread(make_trace.CAST) == 4
    assert elements_per_thread("void at::native::elementwise_kernel<128, 2, F>(int, F)") == 2
    assert elements_per_thread("void at::native::vectorized_elementwise_kernel<8, F, A>(int)") == 8


def test_memory_does_not_follow_the_size_of_the_file(trace_of):
    """A 500 MB trace is mostly Python frames; they must pass through, not pile up."""
    import tracemalloc

    path = trace_of(replace(STOCK, megabytes=16.0), "large.json")
    tracemalloc.start()
    read_trace(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # a few chunks of a megabyte: read, decoded, and joined to what was left of the last
    assert peak < 8 << 20 < path.stat().st_size


@pytest.mark.slow
def test_500_mb_in_under_a_minute_and_600_mb(tmp_path):
    """A traced minute of a busy server, with Python stacks, is this large."""
    path = tmp_path / "large.json"
    make_trace.write(replace(STOCK, steps=200, megabytes=500.0), path)
    code = (
        "import re, sys, time; from sglang_fp8mla import cli; begin = time.monotonic();"
        "code = cli.main(['trace', sys.argv[1]]);"
        # ru_maxrss would count the process that started this one
        "peak = int(re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1]) / 1e3;"
        "print(code, time.monotonic() - begin, peak)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], check=True, capture_output=True, text=True
    )
    path.unlink()
    code, seconds, megabytes = map(float, done.stdout.splitlines()[-1].split())
    assert code == 3
    assert seconds < 60
    assert 10 < megabytes < 600


def test_pool_cast_is_named_in_the_kernel_list(trace_of):
    stage = only_stage(trace_of(STOCK))
    assert stage.kernels[0]["category"] == CAST


RECORDED = Path(__file__).parents[1] / "data" / "traces"


@pytest.mark.parametrize(
    ("name", "cast"),
    [
        ("stock-decode", True),
        ("stock-extend", True),
        ("gather_cast-decode", False),
        ("gather_cast-extend", False),
        ("native-decode", False),
        ("fused-decode", False),
        ("bf16-decode", False),
        ("bf16-extend", False),
    ],
)
def test_recorded_on_the_h200_the_cast_is_in_stock_alone(name, cast, capsys):
    """Real servers, SGLang 0.5.23, torch 2.11: decode replays a graph, extend launches eagerly."""
    path = RECORDED / f"h200-61l-{name}.trace.json.gz"
    assert cli.main(["trace", str(path), "--json"]) == (3 if cast else 0)
    (report,) = json.loads(capsys.readouterr().out)["traces"]
    (stage,) = report["stages"].values()
    assert report["gpu"] == "NVIDIA H200"
    assert stage["layers"] == 61
    assert stage["categories"].get("other", {"share": 0.0})["share"] < 0.01
    if cast:
        assert stage["cast"]["per_step"] == 61
        assert stage["cast"]["pool_rows"] == 495_553
        assert ("aten::copy_" in stage["cast"]["evidence"]) == name.endswith("extend")


def test_recorded_share_agrees_with_the_measured_difference():
    """The same servers, timed without a profiler: 55.12 ms stock, 4.63 ms with gather_cast.

    What the cast takes is that difference and the live-row cast that replaced it.
    """
    stock = only_stage(RECORDED / "h200-61l-stock-decode.trace.json.gz")
    ours = only_stage(RECORDED / "h200-61l-gather_cast-decode.trace.json.gz")
    by_difference = (55.12 - 4.63 + ours.categories["live-row cast"]["ms"]) / 55.12
    assert stock.cast.share == pytest.approx(by_difference, abs=0.02)
    assert stock.cast.live_rows == 66
    assert stock.cast.step_ms_without == pytest.approx(4.63, rel=0.1)


def test_the_profilers_own_delays_are_not_averaged_in():
    """Recorded steps differ by their idle gaps alone; the fastest is nearest to the truth."""
    steps = [
        trace_module.Step("DECODE", "step[DECODE bs=1]", 0.0, end, whole=True)
        for end in (100.0, 101.0, 180.0)
    ]
    steps.append(trace_module.Step("DECODE", "step[DECODE bs=8]", 0.0, 50.0, whole=True))
    assert [s.end for s in trace_module.typical_steps(steps)] == [100.0, 101.0]
