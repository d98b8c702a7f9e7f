"""`bench` and `calibrate`: a wrong kernel gets no time, numbers add up, and files are read."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from sglang_fp8mla import bench, calibrate, cli
from sglang_fp8mla.bench import report
from sglang_fp8mla.bench.cases import CASES, GROUPS, SWEEPS, Case, select, sweep
from sglang_fp8mla.errors import InvalidArgument

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sglang_fp8mla.bench import measure, operands, paths, timing  # noqa: E402

CPU = torch.device("cpu")
SMALL = Case("small", num_heads=3, bs=2, kv_len=128, pool=512)


def small_row(name, build, case=SMALL, stock=None):
    op = operands.make_operands(case, CPU, 2)
    timer = timing.Timer(CPU, repeat=1)
    return measure.run_path(
        op,
        name,
        build,
        timer,
        stock=stock,
        expected=measure.expect(op),
        floor_bytes_per_s=1e9,
    )


def test_import_and_help_need_no_torch():
    code = (
        "import sys; from sglang_fp8mla import bench, calibrate, cli; cli.build_parser();"
        "assert not {'torch', 'triton', 'matplotlib', 'rich'} & set(sys.modules), 'heavy import'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_parser_names_every_path():
    assert tuple(paths.BUILDERS) == bench.PATHS


def test_every_case_is_consistent():
    assert len(CASES) == len({case.name for case in CASES.values()})
    for names in GROUPS.values():
        assert set(names) <= set(CASES)
    for case in CASES.values():
        assert case.live <= case.nnz
        assert case.live + 64 <= case.pool
        assert case.about


@pytest.mark.parametrize(
    "change",
    [{"kv_len": 100}, {"bs": 0}, {"pool": 256}, {"shared": 192}, {"q_len": 0}],
    ids=str,
)
def test_an_impossible_case_is_refused(change):
    with pytest.raises(InvalidArgument, match="bench: case small must"):
        replace(SMALL, **change)


def test_bytes_are_those_of_design_md():
    """Pool 495,552, 32 x 4096: stock casts 285 MB to 571 MB, the live rows are 75 MB."""
    case = CASES["deepseek-v3-tp8-32x4096"]
    assert case.floor_bytes == 32 * 4096 * 576
    assert case.bytes_moved("stock") == 495_552 * 576 * 3 + 32 * 4096 * 576 * 2
    assert case.bytes_moved("gather_cast") == 32 * 4096 * (576 * 3 + 4 + 576 * 2)
    assert case.bytes_moved("fused") == case.floor_bytes
    shared = CASES["shared-32x8192"]
    assert shared.live == 7936 + 32 * 256
    assert shared.bytes_moved("gather_cast") < shared.bytes_moved("stock")


def test_selection_by_name_group_and_pattern():
    assert [c.name for c in select(["tiny-pool-1x64"])] == ["tiny-pool-1x64"]
    assert {c.num_heads for c in select(["deepseek-v3-dp*"])} == {128}
    assert len(select(["default", "default"])) == len(GROUPS["default"])
    with pytest.raises(InvalidArgument, match="did you mean tiny-pool-1x64"):
        select(["tiny-pool-1x63"])


@pytest.mark.parametrize("kind", SWEEPS)
def test_a_sweep_changes_one_size_alone(kind):
    cases = sweep(kind, num_heads=16, bs=1, kv_len=4096, pool=495_552)
    assert len(cases) > 4
    sizes = [(c.kv_len, c.bs, c.pool) for c in cases]
    axis = {"length": 0, "batch": 1, "pool": 2}[kind]
    assert [s[axis] for s in sizes] == sorted({s[axis] for s in sizes})
    for other in {0, 1, 2} - {axis}:
        assert len({s[other] for s in sizes}) == 1


@pytest.mark.parametrize(
    "case", [SMALL, replace(SMALL, shared=64), replace(SMALL, q_len=4)], ids=str
)
@pytest.mark.parametrize("name", ["stock", "gather_cast", "bf16", "fused"])
def test_paths_pass_their_gate_on_the_cpu(name, case):
    row, out = small_row(name, paths.BUILDERS[name], case)
    if name == "fused" and case.causal:
        assert row.check == "unavailable"
        assert "decode only" in row.detail
        return
    assert (row.check, row.detail) == ("ok", "")
    assert row.us > 0
    assert out.shape == (case.bs * case.q_len, 3, 512)
    assert (row.step_us is not None) == (name in ("gather_cast", "fused"))


def test_gather_cast_must_equal_stock_to_the_last_bit():
    _, stock = small_row("stock", paths.build_stock)
    assert small_row("gather_cast", paths.build_gather_cast, stock=stock)[0].check == "ok"
    nudged = stock.clone()
    nudged[0, 0, 0] += 2.0**-6
    row, out = small_row("gather_cast", paths.build_gather_cast, stock=nudged)
    assert (row.check, row.detail) == ("FAILED", "not bitwise equal to stock's output")
    assert out is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda op: op.kv_indices.__setitem__(slice(0, 3), 1),  # reads rows that nobody owns: NaN
        lambda op: op.q.mul_(1.5),
        lambda op: op.kv_indices.copy_(op.kv_indices.roll(64)),  # other requests' rows
    ],
    ids=["poison", "scale", "neighbour"],
)
def test_a_wrong_result_gets_no_time(damage):
    """The gate runs on the operands that are timed: damage after the reference must show."""

    def build(op):
        damage(op)
        return paths.build_stock(op)

    row, out = small_row("stock", build)
    assert row.check == "FAILED"
    assert row.detail.startswith("relative RMS error")
    assert (row.us, out) == (None, None)


def test_a_path_that_writes_nothing_fails():
    """A result left over from the path before would pass."""

    def build(op):
        return paths.Path("none", lambda i: None, lambda: op.out)

    row, _ = small_row("none", build)
    assert row.check == "FAILED"
    assert "nan" in row.detail


def test_a_path_that_cannot_be_built_is_a_row():
    def build(op):
        raise ImportError("No module named 'sgl_kernel'")

    row, _ = small_row("flashmla", build)
    assert (row.check, row.us) == ("unavailable", None)
    assert row.detail == "ImportError: No module named 'sgl_kernel'"


def test_dead_rows_are_poison_and_slot_0_is_nobodys():
    op = operands.make_operands(replace(SMALL, shared=64), CPU, 2)
    assert op.kv_indices.numel() == 256
    assert op.kv_indices.unique().numel() == 64 + 2 * 64
    assert op.kv_indices.min() >= 64
    dead = torch.ones(512, dtype=torch.bool)
    dead[op.kv_indices.long()] = False
    for pool in op.pools:
        assert (pool.view(torch.uint8)[dead] == 0x7F).all()
        assert not pool.float()[~dead].isnan().any()
    assert not torch.equal(op.pools[0].view(torch.uint8), op.pools[1].view(torch.uint8))


def test_times_are_percentiles_per_layer():
    times = timing.Times.of([float(i) for i in range(1, 11)], per=2)
    assert (times.p50, times.p20, times.p80) == (3.0, 1.5, 4.5)


@pytest.fixture
def results(tmp_path, capsys):
    """A real run on the CPU, as `--json` writes it."""
    out = tmp_path / "new.json"
    words = ["bench", "--device", "cpu", "--shape", "2x1x64", "--pool", "128", "--repeat", "1"]
    assert cli.main([*words, "--path", "stock,gather_cast", "--json", str(out)]) == 0
    capsys.readouterr()
    return out


def test_json_holds_machine_cases_and_rows(results):
    data = json.loads(results.read_text())
    assert data["machine"]["torch"] == torch.__version__.split("+")[0]
    assert [r["path"] for r in data["rows"]] == ["stock", "gather_cast"]
    stock, ours = data["rows"]
    assert ours["ratio"] == pytest.approx(stock["us"] / ours["us"])
    assert data["cases"]["shape-2x1x64"]["live"] == 64


def test_compare_shows_old_and_fails_on_request(results, tmp_path, capsys):
    data = json.loads(results.read_text())
    for row in data["rows"]:
        row["us"] /= 10
    old = tmp_path / "old.json"
    old.write_text(json.dumps(data))
    words = ["bench", "--load", str(results), "--compare", str(old)]
    assert cli.main(words) == 0
    assert "0.10x" in capsys.readouterr().err
    assert cli.main([*words, "--max-slowdown", "5"]) == 1
    assert "stock takes 10.00x as long as before" in capsys.readouterr().err
    assert cli.main(["bench", "--load", str(old), "--compare", str(results),
                     "--max-slowdown", "5"]) == 0  # fmt: skip


def test_plot_draws_the_sweeps_with_the_floor(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out, png = tmp_path / "sweep.json", tmp_path / "sweep.png"
    words = ["bench", "--device", "cpu", "--sweep", "length", "--heads", "2", "--pool", "192"]
    words += ["--path", "stock,bf16", "--repeat", "1", "--json", str(out), "--plot", str(png)]
    assert cli.main(words) == 0
    assert png.read_bytes().startswith(b"\x89PNG")
    (series,) = report.sweep_series(json.loads(out.read_text())).values()
    assert set(series) == {"stock", "bf16", "floor"}
    assert [size for size, _ in series["floor"]] == [64, 128]


def test_a_failed_check_is_exit_1(results, capsys):
    data = json.loads(results.read_text())
    data["rows"][1].update(check="FAILED", us=None, detail="relative RMS error 1")
    results.write_text(json.dumps(data))
    assert cli.main(["bench", "--load", str(results)]) == 1
    assert "wrong results" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["--case", "no-such-case"],
        ["--path", "stock,nativ"],
        ["--shape", "16x1"],
        ["--shape", "16x1x100"],
        ["--load", "/nonexistent.json"],
        ["--compare", "/nonexistent.json"],
        ["--repeat", "0"],
        ["--json", "/nonexistent/x.json"],
        ["--sweep", "length", "--plot", "/nonexistent/x.png"],
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_is_exit_2(words):
    assert cli.main(["bench", "--device", "cpu", *words]) == 2


def test_without_a_gpu_it_says_how_to_try_anyway(capsys):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert cli.main(["bench"]) == 1
    assert "no CUDA device here; --device cpu" in capsys.readouterr().err


def measured(heads, bs, **times):
    return Case(f"{heads}-{bs}", heads, bs, 1024), times


def test_rules_follow_the_measurements():
    rules = calibrate.choose_rules(
        [
            measured(16, 1, gather_cast=10.0, fused=6.0),
            measured(16, 4, gather_cast=10.0, fused=7.0),
            measured(16, 16, gather_cast=10.0, fused=20.0),
            measured(128, 1, gather_cast=10.0, fused=9.9),
        ]
    )
    assert rules == [
        {"max_heads": 16, "max_batch": 4, "path": "fused"},
        {"max_heads": 16, "max_batch": 1 << 30, "path": "gather_cast"},
        # a gain within the noise is not worth leaving the fallback for
        {"max_heads": 128, "max_batch": 1 << 30, "path": "gather_cast"},
    ]


def test_a_path_that_failed_somewhere_is_not_chosen_there():
    rows = [measured(16, 1, gather_cast=10.0, fused=1.0), measured(16, 1, gather_cast=10.0)]
    assert calibrate.choose_rules(rows)[0]["path"] == "gather_cast"
    mixed = [measured(8, 1, gather_cast=10.0, native=8.0), measured(8, 1, gather_cast=1, native=9)]
    assert calibrate.choose_rules(mixed)[0]["path"] == "gather_cast"


def test_the_table_is_one_that_the_policy_reads(tmp_path):
    from sglang_fp8mla.envs import Settings
    from sglang_fp8mla.policy import load_profile
    from sglang_fp8mla.probe import Facts

    rules = calibrate.choose_rules([measured(16, 1, gather_cast=10.0, fused=6.0)])
    path = tmp_path / "t.json"
    extend = [{"max_heads": 16, "max_batch": 1 << 30, "path": "native"}]
    path.write_text(json.dumps(calibrate.table_of("SM90", "a test", rules, extend)))
    facts = Facts("H200", (9, 0), 16, 512, 64, "bfloat16", "float8_e4m3fn")
    profile = load_profile(facts, Settings(profile=str(path)))
    assert profile.decode[0].path == "fused"
    assert profile.extend[0].path == "native"


def test_calibrate_runs_on_the_cpu(tmp_path, capsys):
    out = tmp_path / "t.json"
    words = ["calibrate", "--device", "cpu", "--heads", "2", "--batches", "1", "--lengths", "64"]
    assert cli.main([*words, "--pool", "128", "--repeat", "1", "--out", str(out)]) == 0
    entry = json.loads(out.read_text())["generations"]["CPU"]
    assert entry["decode"][0]["path"] in calibrate.DECODE_PATHS
    assert entry["extend"][0]["path"] == "gather_cast"
    assert f"SGLANG_FP8MLA_PROFILE={out}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [["--heads", "x"], ["--lengths", "100"], ["--out", "/nonexistent/t.json"], ["--batches", "0"]],
    ids=" ".join,
)
def test_calibrate_refuses_a_wrong_command_line(words):
    assert cli.main(["calibrate", "--device", "cpu", *words]) == 2
