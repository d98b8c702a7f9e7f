"""`selftest` and `profile` against real processes that speak HTTP and misbehave on request."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from data import make_trace

from sglang_fp8mla import cli, serving
from sglang_fp8mla.errors import InvalidArgument
from sglang_fp8mla.selftest import (
    ARMS,
    Result,
    batches,
    choose_arms,
    first_difference,
    judge,
    memory_of,
    parse_arm,
    parse_workload,
)

DATA = Path(__file__).parents[1] / "data"

LAUNCHER = f"{sys.executable} {DATA / 'fake_server.py'}"
STEPS = "flashinfer=6,flashinfer_mla_fp8=2"


def selftest(tmp_path: Path, *words: str) -> tuple[int, dict]:
    args = ["selftest", "--launcher", LAUNCHER, "--out", str(tmp_path), "--workload", "2x16"]
    code = cli.main([*args, *words])
    return code, json.loads((tmp_path / "selftest.json").read_text())


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone_within(pid: int, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not alive(pid):
            return True
        time.sleep(0.05)
    return False


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    monkeypatch.setenv("FAKE_STEP_MS", STEPS)
    return monkeypatch.setenv


@pytest.mark.parametrize("overlap", [[], ["--overlap"]], ids=["in turn", "at once"])
def test_all_arms_pass(tmp_path, capsys, overlap):
    code, data = selftest(tmp_path, *overlap)
    assert code == 0
    assert [a["status"] for a in data["arms"]] == ["ok"] * 4
    stock, ours = data["arms"][:2]
    # 6 and 2 ms asleep per token, and what a busy machine adds
    assert 5 < stock["workloads"]["2x16"]["ms_per_step"] < 12
    assert 1 < ours["workloads"]["2x16"]["ms_per_step"] < 5
    assert data["verdict"]["ok"] is True
    text = capsys.readouterr().err
    assert "PASS: " in text
    assert "ms per step: 2x16 " in text
    assert data["arms"][2]["says"] == ["decode path: native, because it was asked for"]
    assert data["config"]["arms"]["native"]["env"]["SGLANG_FP8MLA_DECODE_PATH"] == "native"


def test_recorded_traces_are_read(tmp_path, fake, capsys):
    fake("FAKE_TRACE", str(DATA / "traces" / "h200-61l-stock-decode.trace.json.gz"))
    code, data = selftest(tmp_path, "--arms", "stock,auto", "--profile", "2")
    assert code == 0
    assert len(data["arms"][0]["traces"]) == 1
    err = capsys.readouterr().err
    assert "stock trace, DECODE: pool cast 52.28 ms (91.4%), GPU busy 56.88 ms a step" in err
    assert "auto: decode path: auto, because it was asked for" in err


def test_a_path_that_cannot_run_here_is_reported_and_passes(tmp_path, fake, capsys):
    fake("FAKE_MODE", "refuse@native")
    code, data = selftest(tmp_path, "--arms", "stock,gather_cast,native")
    assert code == 0
    assert data["arms"][2]["status"] == "refused"
    assert "native cannot run here: sglang_fp8mla.errors" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("mode", "status", "detail"),
    [
        ("exit@gather_cast", "failed", "the server exited with 3: OSError: no such model"),
        ("refuse@gather_cast", "refused", "needs SM90, found SM80"),
        ("die@gather_cast", "failed", "the server died: RuntimeError: CUDA error"),
        ("garbage@gather_cast", "failed", "expected answers with output_ids, got b'<html>"),
        ("hang@gather_cast", "failed", "no /health within 2 s"),
    ],
)
def test_a_server_that_misbehaves_fails_the_test_with_its_reason(
    tmp_path, fake, mode, status, detail
):
    fake("FAKE_MODE", mode)
    words = ["--arms", "stock,gather_cast", "--boot-timeout", "2"]
    code, data = selftest(tmp_path, *words)
    assert code == 1
    assert data["arms"][0]["status"] == "ok"
    assert data["arms"][1]["status"] == status
    assert detail in data["arms"][1]["detail"]
    assert data["verdict"]["ok"] is False


def test_other_tokens_fail(tmp_path, fake, capsys):
    fake("FAKE_MODE", "wrong@gather_cast")
    code, _ = selftest(tmp_path, "--arms", "stock,gather_cast")
    assert code == 1
    assert "gather_cast 2x16: tokens differ from stock's from token 0 on" in capsys.readouterr().err


def test_slower_than_stock_fails(tmp_path, fake, capsys):
    fake("FAKE_STEP_MS", "flashinfer=2,flashinfer_mla_fp8=6")
    code, _ = selftest(tmp_path, "--arms", "stock,gather_cast")
    assert code == 1
    assert "slower than stock" in capsys.readouterr().err


def test_the_deadline_stops_everything_and_reports(tmp_path, fake):
    fake("FAKE_STEP_MS", "flashinfer=1,flashinfer_mla_fp8=500")
    begin = time.monotonic()
    code, data = selftest(tmp_path, "--arms", "stock,gather_cast,native", "--deadline", "4")
    assert time.monotonic() - begin < 9
    assert code == 1
    assert [a["status"] for a in data["arms"]] == ["ok", "failed", "skipped"]
    assert "the deadline of 4 s passed" in data["arms"][1]["detail"]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_running(tmp_path, fake, signum):
    """A server's own child in a session of its own is what a process-group kill leaves behind."""
    fake("FAKE_STEP_MS", "flashinfer=300")
    fake("FAKE_CHILD", str(tmp_path / "child"))
    words = ["selftest", "--launcher", LAUNCHER, "--out", str(tmp_path), "--workload", "2x16"]
    log = (tmp_path / "log").open("w")
    with (
        log,
        subprocess.Popen(
            [sys.executable, "-m", "sglang_fp8mla.cli", *words],
            stderr=log,
            stdout=log,
            # a gate that runs in the background ignores SIGINT, and so would what it starts
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        ) as process,
    ):
        until = time.monotonic() + 20
        while "measuring" not in (tmp_path / "log").read_text() and time.monotonic() < until:
            time.sleep(0.1)
        child = int((tmp_path / "child").read_text())
        assert alive(child)
        process.send_signal(signum)
        code = process.wait(timeout=20)
    assert code == (-9 if signum == signal.SIGKILL else 130)
    assert gone_within(child, 10), (tmp_path / "log").read_text()
    if signum != signal.SIGKILL:
        (arm,) = json.loads((tmp_path / "selftest.json").read_text())["arms"]
        assert (arm["status"], arm["detail"]) == ("failed", "interrupted")


def test_a_server_stops_with_everything_it_started(tmp_path, fake):
    port = serving.free_port()
    command = [*LAUNCHER.split(), "--port", str(port)]
    env = {"FAKE_CHILD": str(tmp_path / "child")}
    server = serving.Server("one", command, port, tmp_path / "one.log", env)
    server.start()
    try:
        assert server.wait_healthy(20, serving.Deadline()) < 20
        child = int((tmp_path / "child").read_text())
        assert alive(child)
    finally:
        server.stop()
    assert not alive(child)
    server.stop()  # again: nothing to do, no error
    with pytest.raises(serving.ServerFailed, match="refused"):
        serving.call(server.base, "/health", timeout=2)


def test_profile_records_and_analyses(tmp_path, fake, capsys):
    source = tmp_path / "source.json.gz"
    make_trace.write(make_trace.Case(layers=4, steps=2), source)
    fake("FAKE_TRACE", str(source))
    fake("FAKE_AUTHORIZATION", "Bearer k")
    port = serving.free_port()
    command = [*LAUNCHER.split(), "--port", str(port)]
    server = serving.Server("one", command, port, tmp_path / "one.log")
    server.start()
    try:
        server.wait_healthy(20, serving.Deadline())
        words = ["profile", f"127.0.0.1:{port}", "--out", str(tmp_path / "t"), "--json"]
        words += ["--api-key", "k"]
        assert cli.main(words) == 3
        data = json.loads(capsys.readouterr().out)
        assert data["traces"][0]["stages"]["DECODE"]["cast"]["per_step"] == 4
        assert cli.main([*words[:2], "--out", str(tmp_path / "u")]) == 1
        assert "/start_profile: HTTP 401 Unauthorized" in capsys.readouterr().err
    finally:
        server.stop()


def test_profile_of_a_server_that_dies_or_is_not_there(tmp_path, fake, capsys):
    fake("FAKE_MODE", "die")
    port = serving.free_port()
    command = [*LAUNCHER.split(), "--port", str(port)]
    server = serving.Server("one", command, port, tmp_path / "one.log")
    server.start()
    try:
        server.wait_healthy(20, serving.Deadline())
        assert cli.main(["profile", server.base, "--out", str(tmp_path / "t")]) == 1
        assert "/generate: Remote end closed" in capsys.readouterr().err
    finally:
        server.stop()
    assert cli.main(["profile", server.base]) == 1
    assert "refused" in capsys.readouterr().err


def test_profile_of_a_server_elsewhere_says_where_the_file_is(tmp_path, monkeypatch):
    """A server in a container answers well, and its file never appears here."""
    from sglang_fp8mla import profile

    monkeypatch.setattr(profile, "call", lambda *a, **k: b"")
    monkeypatch.setattr(profile, "generate", lambda *a, **k: [[0]])
    with pytest.raises(serving.ServerFailed, match="copy it here and run `sglang-fp8mla trace"):
        profile.record("http://x", tmp_path, num_steps=1, prompts=[[1]], timeout=0.1)


@pytest.mark.parametrize("url", ["ftp://a", "http://", "http://a:b", "http://a/v1", ""])
def test_a_wrong_url_is_refused(url):
    assert cli.main(["profile", url]) == 2


@pytest.mark.parametrize(
    "words",
    [
        ["--arms", "stock,nativ"],
        ["--arms", "stock,stock"],
        ["--arm", "nonsense"],
        ["--workload", "8"],
        ["--workload", "0x8"],
        ["--repeat", "0"],
        ["--layers", "0"],
        ["--without", "no-such-flag"],
        ["--model", "/m", "--default-flags"],
        ["--model", "/m", "--overlap"],
        ["--json", "/nonexistent/x.json"],
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_starts_nothing(tmp_path, words):
    args = ["selftest", "--launcher", "false", "--out", str(tmp_path)]
    assert cli.main([*args, *words]) == 2
    assert not (tmp_path / "selftest.json").exists()


def test_own_model_gets_its_own_flags_and_none_of_ours(tmp_path):
    code, data = selftest(tmp_path, "--arms", "stock,auto", "--model", "/m", "--", "--tp-size", "8")
    assert code == 0
    assert data["config"]["command"][-4:] == ["--model-path", "/m", "--tp-size", "8"]


def test_without_a_gpu_it_says_so_before_starting(capsys, monkeypatch):
    monkeypatch.setattr(serving, "require_gpu", serving.require_gpu)
    if Path("/dev/nvidia0").exists():
        pytest.skip("this machine has a GPU")
    assert cli.main(["selftest"]) == 1
    err = capsys.readouterr().err
    assert "libcuda.so.1" in err or "is not installed" in err


def test_the_builtin_model_is_one_that_the_issue_names():
    """The numbers of the documentation hold for this very shape."""
    shape = serving.mla_config(61)
    reference = Path("/work/shared/gpu/tools/models/mla-61l/config.json")
    if not reference.exists():
        assert (shape["num_hidden_layers"], shape["num_attention_heads"]) == (61, 16)
    else:
        assert shape == json.loads(reference.read_text())


def test_arms_boot_together_as_far_as_the_gpu_has_room():
    """61 layers and 495,552 slots: 17 GB of FP8 pool and 5 GB of weights a server."""
    arms = choose_arms("stock,gather_cast,native,fused,bf16", [])
    each = {arm.name: memory_of(arm, 61, 16, 495_552) for arm in arms}
    assert 25e9 < each["stock"] < 30e9
    assert each["bf16"] - each["stock"] == 61 * 495_552 * 576

    def sizes(overlap, free):
        return [len(batch) for batch in batches(arms, overlap, each, free)]

    assert sizes(0, 150 << 30) == [4, 1]
    assert sizes(0, 40 << 30) == [1, 1, 1, 1, 1]
    assert sizes(0, None) == [5]
    assert sizes(2, 1) == [2, 2, 1]
    assert sizes(1, 1) == [1] * 5


def test_default_flags_drop_what_a_user_has_on():
    lean = serving.dummy_flags()
    default = serving.dummy_flags(["--disable-prefill-cuda-graph", "disable-radix-cache"])
    assert set(lean) - set(default) == {"--disable-prefill-cuda-graph", "--disable-radix-cache"}


def test_arms_are_parsed_with_their_environment():
    arm = parse_arm("tri=--attention-backend,triton,A_B:=1")
    assert (arm.name, arm.flags, arm.env) == (
        "tri",
        ("--attention-backend", "triton"),
        {"A_B": "1"},
    )
    assert [a.name for a in choose_arms("stock", ["x=--a"])] == ["stock", "x"]
    assert parse_workload("8x8192").name == "8x8192"
    with pytest.raises(InvalidArgument, match="must be BATCHxTOKENS, got 'x8'"):
        parse_workload("x8")


@pytest.mark.parametrize(
    ("ours", "theirs", "at"),
    [
        ([[1, 2, 3]], [[1, 2, 3]], None),
        ([[1, 2, 3]], [[1, 2, 4]], 2),
        ([[1, 2], [5, 6]], [[1, 2], [7, 6]], 0),
        ([[1, 2]], [[1, 2, 3]], 2),
        ([[1]], [[1], [1]], 0),
    ],
)
def test_first_difference(ours, theirs, at):
    assert first_difference(ours, theirs) == at


def result(arm: str, tokens: list[int], ms: float = 4.0, repeatable: bool = True) -> Result:
    row = {"ms_per_step": ms, "tokens": [tokens], "repeatable": repeatable}
    return Result(arm, "ok", workloads={"1x64": row})


def verdict(*results: Result):
    return judge(results, [ARMS[r.arm] for r in results])


def test_late_rounding_is_told_from_wrong_tokens():
    base = list(range(64))
    late, early = [*base[:20], 0, *base[21:]], [base[0], 9, *base[2:]]
    stock = result("stock", base, 40.0)
    assert verdict(stock, result("native", late)).ok
    assert not verdict(stock, result("native", early)).ok
    # gather_cast computes with stock's own numbers: nothing may differ
    assert not verdict(stock, result("gather_cast", late)).ok
    assert verdict(stock, result("gather_cast", base)).ok
    # a server that contradicts itself proves nothing about another
    shaky = result("stock", base, 40.0, repeatable=False)
    assert verdict(shaky, result("gather_cast", late)).ok


def test_no_baseline_is_no_verdict():
    lone = verdict(result("gather_cast", [1]))
    assert not lone.ok
    assert "no stock server" in lone.summary
    assert not verdict(result("stock", [1])).ok


def test_auto_decides_when_it_ran():
    """A path that a user does not get must not carry the verdict."""
    stock = result("stock", [1], 4.0)
    assert not verdict(stock, result("auto", [1], 8.0), result("gather_cast", [1], 1.0)).ok
    assert verdict(stock, result("auto", [1], 1.0), result("native", [1], 8.0)).ok


def test_own_environment_reaches_the_server_unchanged():
    assert all("SGLANG_FP8MLA_DECODE_PATH" in arm.env for arm in ARMS.values() if arm.ours)
    from sglang_fp8mla.envs import read

    for arm in ARMS.values():
        read(arm.env)
    assert replace(ARMS["native"], name="x").exact is False
    assert ARMS["gather_cast"].exact is True
    assert os.environ.get("SGLANG_FP8MLA_DECODE_PATH") is None
