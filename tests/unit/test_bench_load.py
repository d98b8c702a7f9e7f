"""`bench.load`: a lying, hanging or broken server is caught, and what may differ is bounded."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("psutil")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from aiohttp import web  # noqa: E402

from bench.load import faults, load, servers  # noqa: E402
from bench.load.answers import (  # noqa: E402
    KEEP,
    Answer,
    Ask,
    Tally,
    compare,
    make_catalogue,
    outside,
    parse,
    spoil,
)


class FakeServer:
    """/generate as SGLang answers it, from a thread; `mode` says how it misbehaves under load.

    Tokens and logprobs are a function of the prompt alone. Requests named `alone-*` are always
    answered truly. Modes: ok, lie (another token), drift (other logprobs), nan, short, hang, drop,
    leak (a KV slot stays in use), corrupt (after load, answers at rest are others).
    """

    def __init__(self, mode: str = "ok", token_s: float = 0.001) -> None:
        self.mode = mode
        self.token_s = token_s
        self.running: dict[str, asyncio.Event] = {}
        self.served = 0
        self.seen_prompts: set[tuple[int, ...]] = set()
        self.flushes = 0
        self.port = 0
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> FakeServer:
        self._thread.start()
        assert self._ready.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/abort_request", self.abort)
        app.router.add_get("/flush_cache", self.flush)
        app.router.add_get("/v1/loads", self.loads)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        self._loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        self._loop.run_until_complete(site.start())
        self.port = site._server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())

    async def flush(self, request: web.Request) -> web.Response:
        if self.running:
            return web.Response(status=400, text="pending requests")
        self.flushes += 1
        self.seen_prompts.clear()
        return web.Response(text="Cache flushed.")

    async def loads(self, request: web.Request) -> web.Response:
        used = 7 if self.mode == "leak" else 0
        counters = {"num_running_reqs": len(self.running), "num_waiting_reqs": 0}
        return web.json_response({"loads": [{**counters, "num_used_tokens": used}]})

    async def abort(self, request: web.Request) -> web.Response:
        rid = (await request.json())["rid"]
        if rid in self.running:
            self.running[rid].set()
        return web.Response()

    def _tokens(self, body: dict) -> tuple[list[int], list[float]]:
        ids, new = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        loaded = body["rid"].startswith("load")
        salt = sum(i * t for i, t in enumerate(ids, 1))
        if self.mode == "corrupt" and self.served > 30 and not loaded:
            salt += 1
        tokens = [(salt + 31 * i) % 32000 for i in range(new)]
        logprobs = [-((salt + 7 * i) % 97) / 97 for i in range(new)]
        wrong = loaded and self.served % 5 == 0
        if wrong and self.mode == "lie":
            tokens[new // 2] = (tokens[new // 2] + 1) % 32000
        if wrong and self.mode == "drift":
            logprobs = [value + 0.5 for value in logprobs]
        if wrong and self.mode == "nan":
            logprobs[0] = math.nan
        if wrong and self.mode == "short":
            del tokens[-1], logprobs[-1]
        return tokens, logprobs

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        rid = body.setdefault("rid", f"rid-{time.monotonic_ns()}")
        loaded = rid.startswith("load")
        self.served += loaded
        # by when it came: at its end a burst has one and the same `served`
        retractions = int(loaded and self.served % 11 == 0)
        if loaded and self.served % 9 == 0 and self.mode == "hang":
            await asyncio.sleep(3600)
        if loaded and self.served % 9 == 0 and self.mode == "drop":
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        tokens, logprobs = self._tokens(body)
        prompt = tuple(body["input_ids"])
        cached = len(prompt) - 1 if prompt in self.seen_prompts else 0
        self.seen_prompts.add(prompt)

        def piece(count: int, reason: dict | None) -> bytes:
            entries = [
                [None if math.isnan(p) else p, t, None]
                for p, t in zip(logprobs[:count], tokens[:count])
            ]
            info = {
                "finish_reason": reason,
                "output_token_logprobs": entries,
                "cached_tokens": cached,
                "num_retractions": retractions,
            }
            if body.get("top_logprobs_num"):
                info["output_top_logprobs"] = [
                    [[p, t, None], [(p or 0) - 1, t + 1, None]] for p, t, _ in entries
                ]
            return json.dumps({"output_ids": tokens[:count], "meta_info": info}).encode()

        stop = self.running[rid] = asyncio.Event()
        try:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            if body.get("stream"):
                await response.prepare(request)
            done, reason = 0, {"type": "length", "length": len(tokens)}
            while done < len(tokens):
                await asyncio.sleep(0 if rid.startswith("alone") else self.token_s)
                if stop.is_set():
                    reason = {"type": "abort", "message": "Aborted"}
                    break
                done += 1
                if body.get("stream") and done < len(tokens):
                    await response.write(b"data: " + piece(done, None) + b"\n\n")
            last = piece(done, reason)
        finally:
            del self.running[rid]
        if not body.get("stream"):
            return web.Response(body=last, content_type="application/json")
        await response.write(b"data: " + last + b"\n\ndata: [DONE]\n\n")
        return response


def run_load(monkeypatch, base, tmp_path, arm="auto", **constants):
    """The report of one arm against a fake server, and whether it passed."""
    quick = {
        "LEVELS": (40, 60, 90),
        "WARM": 0.2,
        "IDLE": 0.3,
        "SETTLE": 0,
        "PROGRESS": 0.3,
        "HANG": 4,
    }
    for name, value in {**quick, **constants}.items():
        monkeypatch.setattr(load, name, value)
    asks = [a for a in make_catalogue(1) if len(a.input_ids) <= 70 and a.max_new_tokens <= 64]
    facts = {"finished": False}
    path, exact = tmp_path / f"{arm}.json", load.ARMS[arm].exact
    driver = load.Driver(base, asks, path, facts, exact=exact)
    asyncio.run(driver.run(0.6, lambda: {"rss_mib": 1}))
    report = json.loads(path.read_text())
    assert bool(report["failures"]) is bool(report["failures_by_kind"])
    return report, report["finished"] and not report["failures"]


def test_one_seed_makes_one_catalogue():
    """Else the arms would not carry the same load, and a failure could not be repeated."""
    first, again, other = make_catalogue(1), make_catalogue(1), make_catalogue(2)
    assert first == again
    assert [ask.input_ids for ask in first] != [ask.input_ids for ask in other]
    assert len({ask.name for ask in first}) == len(first)
    assert 60 <= len(first) <= 100
    lengths = {len(ask.input_ids) for ask in first}
    assert {1, 2047, 2048, 2049, 8000} <= lengths


def test_documents_are_shared_prefixes():
    asks = {ask.name: ask.input_ids for ask in make_catalogue(1)}
    short, long = asks["document-2+1"], asks["document-2+150"]
    assert short[:3000] == long[:3000]
    assert short[3000:] != long[3000:3001]


def test_spoilt_prompt_has_the_same_length_and_other_tokens():
    ask = make_catalogue(1)[10]
    wrong = spoil(ask, 1)
    assert len(wrong.input_ids) == len(ask.input_ids)
    assert wrong.input_ids != ask.input_ids
    one = Ask("one", (5,), 4)
    assert spoil(one, 1).input_ids != one.input_ids


ALONE = Answer(
    (5, 6, 7, 8),
    (-0.1, -0.2, -0.3, -0.4),
    tuple(
        ((lp, t), (lp - 0.05, t + 100)) for t, lp in ((5, -0.1), (6, -0.2), (7, -0.3), (8, -0.4))
    ),
)


def test_equal_answers_have_the_same_bits():
    found = compare(ALONE, Answer(ALONE.tokens, ALONE.logprobs))
    assert found.same_bits
    assert found.needed is None
    assert found.shifts == (0, 0, 0, 0)


def test_cut_answer_is_compared_as_far_as_it_goes():
    assert compare(ALONE, Answer((5, 6), (-0.1, -0.2))).same_bits
    assert not compare(ALONE, Answer((5, 9), (-0.1, -0.2))).same_bits


def test_other_logprobs_are_other_bits():
    found = compare(ALONE, Answer(ALONE.tokens, (-0.1, -0.2, math.nextafter(-0.3, 0), -0.4)))
    assert not found.same_bits
    assert found.needed is None


@pytest.mark.parametrize(
    ("token", "logprob", "needed"),
    [
        (106, -0.15, 0.1),  # it lay 0.05 below the likeliest, and moved by 0.1
        (106, -0.25, 0.025),  # it did not move
        (999, -0.15, 0.025),  # not among the likeliest, so at least as low as these
        (106, math.nan, math.inf),
    ],
)
def test_another_token_needs_half_its_gap_and_its_shift(token, logprob, needed):
    found = compare(ALONE, Answer((5, token, 1, 1), (-0.1, logprob, 0, 0)))
    assert found.needed == pytest.approx(needed)
    assert len(found.shifts) == 1
    tally = Tally()
    tally.add("x", found)
    assert outside(tally.report(), 0.06) == (needed > 0.06)


def test_nan_is_within_no_bound():
    tally = Tally()
    tally.add("a", compare(ALONE, Answer(ALONE.tokens, (math.nan, -0.2, -0.3, -0.4))))
    tally.add("b", compare(ALONE, Answer((5, 106), (-0.1, math.nan))))
    assert outside(json.loads(json.dumps(tally.report())), 1e9) == 2


def test_tally_keeps_the_largest():
    tally = Tally()
    shifts = [i * 1.0 for i in range(KEEP + 3)]
    for shift in reversed(shifts):
        tally.add("x", compare(Answer((1,), (0.0,)), Answer((1,), (shift,))))
    assert tally.report()["largest_shifts"] == shifts[:2:-1]
    assert tally.report()["tokens_compared"] == KEEP + 3


def test_parse_reads_null_as_nan_and_a_running_stream_as_unfinished():
    info = {"finish_reason": None, "output_token_logprobs": [[None, 3, None]]}
    answer = parse({"output_ids": [3, 4], "meta_info": info})
    assert answer.tokens == (3,), "a token whose logprob was cut off"
    assert math.isnan(answer.logprobs[0])
    assert answer.finish == ""


def test_good_server_passes(monkeypatch, capsys, tmp_path):
    with FakeServer() as server:
        report, passed = run_load(monkeypatch, server.base, tmp_path, QUIET_EVERY=0.4)
    assert passed, report["failures"]
    counts = report["counts"]
    assert counts["completed"] > 20
    assert counts["max_in_flight"] >= 40
    assert counts["streamed"]
    assert counts["closed"] + counts["aborted"] > 0
    assert counts["retractions"] > 0
    assert counts["flushes"] > 0
    assert report["answers"]["answers_not_same_bits"] == 0
    assert report["control_spoilt_prompts"]["answers_with_another_token"] > 0
    assert report["memory_grown"] == {"rss_mib": 0}
    assert "load begins" in capsys.readouterr().out, "load.sh waits for it"


def test_exact_arm_passes_and_compares_to_the_bit(monkeypatch, tmp_path):
    with FakeServer() as server:
        report, passed = run_load(monkeypatch, server.base, tmp_path, "exact")
    assert passed, report["failures"]
    # one answer in eleven was retracted
    assert 0 < report["counts"]["other_prefix"] < report["answers"]["answers"] / 2


@pytest.mark.parametrize(
    ("arm", "mode", "kind"),
    [
        ("exact", "lie", "mismatch"),
        ("exact", "drift", "mismatch"),
        ("auto", "nan", "nan"),
        ("auto", "short", "length"),
        ("auto", "hang", "hang"),
        ("auto", "drop", "error"),
        ("auto", "leak", "leak"),
        ("exact", "corrupt", "changed at rest"),
    ],
)
def test_bad_server_is_caught(monkeypatch, tmp_path, arm, mode, kind):
    with FakeServer(mode) as server:
        constants = {"HANG": 1.0} if mode == "hang" else {}
        report, passed = run_load(monkeypatch, server.base, tmp_path, arm, **constants)
    assert not passed
    assert report["failures_by_kind"].get(kind), report["failures_by_kind"]
    assert report["finished"], "one bad answer must not end the run"
    if kind == "mismatch":
        compared, moved = map(sum, zip(*report["compared_and_not_same_by_request"].values()))
        assert compared > moved == report["failures_by_kind"][kind]
        assert sum(report["first_moved_logprob"].values()) == moved
        assert mode == "lie" or set(report["first_moved_logprob"]) == {"0"}


def test_server_that_dies_ends_the_run(monkeypatch, tmp_path):
    with FakeServer() as server:
        threading.Timer(1, server.__exit__).start()
        report, passed = run_load(monkeypatch, server.base, tmp_path, WARM=60, HANG=1)
    assert not passed
    assert not report["finished"]
    assert report["failures_by_kind"]["driver"] == 1


def judged(tmp_path: Path, **changes) -> dict:
    """The verdict over three made-up reports; changes are by arm."""
    for arm, moved in {"auto": 0.02, "stock": 0.02, "exact": 0.0}.items():
        tally, control = Tally(), Tally()
        tally.add("a", compare(Answer((1,), (0.0,)), Answer((1,), (moved,))))
        control.add("a", compare(Answer((1,), (0.0,)), Answer((1,), (1.0,))))
        report = {
            "counts": {**dict.fromkeys(load.COUNTS, 0), "completed": 1, "retractions": 3},
            "answers": tally.report(),
            "control_spoilt_prompts": control.report(),
            "alone_tokens": {"a": [1]},
            "failures_by_kind": {},
            "memory_before": {"gpu_mib": 1},
            "memory_grown": {"gpu_mib": 0, "rss_mib": 10, "open_files": 0, "processes": 0},
            "finished": True,
            "mode": "exact" if arm == "exact" else "within the bound",
        }
        for path, value in changes.get(arm, {}).items():
            *keys, last = path.split("__")
            inner = report
            for key in keys:
                inner = inner[key]
            inner[last] = value
        (tmp_path / f"{arm}.json").write_text(json.dumps(report))
    return load.judge(tmp_path)


def test_verdict_passes_what_stays_within_twice_stock(tmp_path):
    verdict = judged(tmp_path)
    assert verdict["passed"], verdict["failures"]
    assert verdict["arms"]["bound"]["shift"] == pytest.approx(0.04)
    assert verdict["arms"]["auto"]["alone_answers_as_stock"] == "1 of 1"


@pytest.mark.parametrize(
    ("arm", "change", "says"),
    [
        ("auto", {"answers__largest_shifts": [0.05]}, "outside the bound"),
        ("auto", {"answers__worst_differences": [[0.05, "x", 0]]}, "outside the bound"),
        ("auto", {"answers__nan_logprobs": 1}, "outside the bound"),
        ("auto", {"answers__shift_rms": 0.05}, "RMS"),
        ("auto", {"control_spoilt_prompts__largest_shifts": [0.01]}, "spoilt"),
        ("auto", {"counts__retractions": 0}, "no retraction"),
        ("auto", {"memory_grown__gpu_mib": 100}, "gpu_mib grew"),
        ("exact", {"memory_grown__rss_mib": 300}, "rss_mib grew"),
        ("exact", {"failures_by_kind": {"mismatch": 2}}, "mismatch x 2"),
        ("exact", {"counts__other_prefix": 1}, "prove nothing"),
        ("exact", {"memory_before": {"gpu_mib": 0}}, "does not say"),
        ("auto", {"failures_by_kind": {"hang": 1}}, "hang x 1"),
        ("stock", {"finished": False}, "did not finish"),
    ],
)
def test_verdict_fails(tmp_path, arm, change, says):
    verdict = judged(tmp_path, **{arm: change})
    assert not verdict["passed"]
    assert any(says in failure for failure in verdict["failures"]), verdict["failures"]


def test_verdict_without_a_report_fails(tmp_path):
    judged(tmp_path)
    (tmp_path / "stock.json").unlink()
    assert load.judge(tmp_path)["failures"] == ["stock: did not finish"]


def test_growth_in_stock_excuses_the_same_growth_in_ours(tmp_path):
    grown = {"memory_grown__rss_mib": 500}
    assert judged(tmp_path, stock=grown, auto=grown)["passed"]


def fake_probe(trusting: bool):
    """`probe_apart` over a cache of two entries of 100 bytes, as nvrtc.py keeps it."""

    def probe_apart(path, XDG_CACHE_HOME):
        directory = Path(XDG_CACHE_HOME, "sglang_fp8mla")
        compiled, logged, body = 0, [], bytes(range(100))
        for entry in (directory / "a.cubin", directory / "b.cubin"):
            if entry.is_file():
                blob = entry.read_bytes()
                right = len(blob) > 32 and hashlib.sha256(blob[32:]).digest() == blob[:32]
                if trusting or right:
                    continue
            compiled += 1
            try:
                directory.mkdir(parents=True, exist_ok=True)
                entry.write_bytes(hashlib.sha256(body).digest() + body)
            except OSError:
                logged = ["kernel cache is not writable"]
        found = {"level": "ok", "found": "right", "seconds": 0}
        return {**found, "compiled": compiled, "logged": logged}

    return probe_apart


@pytest.mark.parametrize("how", [faults.empty, faults.flip_a_bit])
def test_damage_to_the_kernel_cache_must_be_compiled_again(monkeypatch, tmp_path, how):
    monkeypatch.setattr(faults, "probe_apart", fake_probe(trusting=False))
    faults.prime(tmp_path)
    assert "2 compiled again" in faults.mend(tmp_path, how)
    monkeypatch.setattr(faults, "probe_apart", fake_probe(trusting=True))
    with pytest.raises(faults.Unexpected):
        faults.mend(tmp_path, how)


def test_unwritable_cache_must_be_told_and_a_forged_one_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(faults, "probe_apart", fake_probe(trusting=False))
    assert "not writable" in faults.unwritable(Path("/dev/null/cache"))
    with pytest.raises(faults.Unexpected):
        faults.unwritable(tmp_path)
    with pytest.raises(faults.Unexpected):
        faults.refuse_forged(tmp_path)


def test_a_probe_that_crashes_is_told():
    """There is no GPU here, or no such path."""
    with pytest.raises(faults.Unexpected, match="crashed with 1"):
        faults.probe_apart("no such path", CUDA_VISIBLE_DEVICES="")


def test_a_step_that_fails_is_a_verdict(tmp_path):
    def broken() -> str:
        raise faults.Unexpected("it hung")

    def lost() -> str:
        return {}["answers"]

    steps = faults.Steps(tmp_path / "f.json")
    assert [steps.run("s", "did", "expected", f) for f in (lambda: "so", broken, lost)] == [1, 0, 0]
    steps.write(finished=True)
    written = json.loads((tmp_path / "f.json").read_text())
    assert [v["passed"] for v in written["verdicts"]] == [True, False, False]
    assert written["verdicts"][1]["happened"] == "it hung"
    assert not written["passed"]


def launch_script(tmp_path: Path, text: str, name: str = "s") -> servers.Launched:
    """`servers.launch` of a script of ours in place of SGLang."""
    (tmp_path / f"{name}_module.py").write_text(text)
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    return servers.launch(tmp_path / f"{name}.log", 1, module=f"{name}_module", PYTHONPATH=path)


def test_orphans_are_seen_and_killed(tmp_path):
    """A scheduler's end must not hide a process in another session that lives on."""
    server = launch_script(
        tmp_path,
        "import subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'],"
        " start_new_session=True)\ntime.sleep(100)\n",
    )
    until = time.monotonic() + 20
    while len(server.processes()) < 2 and time.monotonic() < until:
        time.sleep(0.1)
    memory = servers.measure_memory(server)
    assert memory["processes"] == 2
    assert memory["rss_mib"] > 2
    (main,) = [process for process in server.processes() if process.children()]
    main.kill()
    assert server.exit_within(10) == -signal.SIGKILL
    assert len(server.processes()) == 1
    with pytest.raises(faults.Unexpected, match="after its end"):
        faults.wait_gone(server, 0.5)
    server.stop()
    assert faults.wait_gone(server, 10.0) < 10


def test_refusal_needs_its_message_and_an_exit_code(tmp_path):
    text = "import sys\nprint('workspace: must have 2 GiB', flush=True)\nsys.exit({})\n"
    good = launch_script(tmp_path, text.format(1), "good")
    silent = launch_script(tmp_path, "raise SystemExit(3)\n", "silent")
    calm = launch_script(tmp_path, text.format(0), "calm")
    assert "exit 1" in faults.refuses_to_start(good, "workspace: must have")
    for server in (silent, calm):
        with pytest.raises(faults.Unexpected, match=r"exit [03], "):
            faults.refuses_to_start(server, "workspace: must have")
    for server in (good, silent, calm):
        server.stop()


def test_clients_in_mid_stream_can_be_killed(monkeypatch, tmp_path):
    """The whole step: clients in processes of their own, killed, and nothing stays in use."""
    monkeypatch.setattr(faults, "IDLE", 2.0)
    steps = faults.ServerSteps(faults.Steps(tmp_path / "f.json"), tmp_path)
    with FakeServer(token_s=0.002) as fake:
        server = servers.Launched("fake", [], fake.port, tmp_path / "fake.log")
        steps.answers["fake"] = faults.ask_all(fake.base)
        assert "0 slots in use" in steps.kill_clients(server)
        fake.mode = "leak"
        with pytest.raises(faults.Unexpected, match="in use"):
            steps.kill_clients(server)


def test_interrupted_driver_ends_its_server(tmp_path):
    """SIGTERM to the driver (timeout, a closing machine) must not leave a server behind."""
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang/__init__.py").write_text("")
    (tmp_path / "sglang/launch_server.py").write_text(
        "import os, pathlib, time\n"
        f"pathlib.Path({str(tmp_path / 'up')!r}).write_text(str(os.getpid()))\ntime.sleep(100)\n"
    )
    command = [sys.executable, "-m", "bench.load.load", "--arm", "stock", "--model", "none"]
    command += ["--json", str(tmp_path / "stock.json")]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    driver = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 30
        while not (tmp_path / "up").exists() and time.monotonic() < until:
            time.sleep(0.1)
        pid = int((tmp_path / "up").read_text())
        driver.send_signal(signal.SIGTERM)
        driver.wait(30)
    finally:
        driver.kill()
        driver.wait()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.sglang
def test_arms_resolve_as_they_are_meant():
    """Radix cache on in every arm, deterministic where stock refuses it, and only there."""
    script = f"""
import json, sys
sys.path[:0] = [{str(ROOT / "tests/contract")!r}, {str(ROOT)!r}]
import launch_lines
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.runtime_context import override_platform
override_platform(**launch_lines.HOPPER).install()
from bench.load import load
from bench.load.deterministic import admit_flashinfer
from sglang_fp8mla.serving import write_model
import pathlib, tempfile
model = str(write_model(pathlib.Path(tempfile.mkdtemp()), 8))
def line(name):
    words = [*load.ARMS[name].command_line(model), "--device", "cuda"]
    return launch_lines.resolve(words, check=True)
refused = line("exact").get("error")
admit_flashinfer()
admit_flashinfer()
print(json.dumps([refused, *[line(name).get("fields") for name in ("auto", "stock", "exact")]]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=200, check=True
    )
    refused, *arms = json.loads(done.stdout.splitlines()[-1])
    assert "deterministic inference with absorbed-MLA" in refused
    for fields in arms:
        assert fields["disable_radix_cache"] == "False"
        assert fields["chunked_prefill_size"] == "2048"
        assert fields["kv_cache_dtype"] == "'fp8_e4m3'"
    names = [fields["attention_backend"] for fields in arms]
    assert names == ["'flashinfer_mla_fp8'", "'flashinfer'", "'flashinfer_mla_fp8'"]
    assert [f["enable_deterministic_inference"] for f in arms] == ["False", "False", "True"]
