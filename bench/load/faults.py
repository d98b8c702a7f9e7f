"""Faults on purpose, each an isolated step with a timeout and a verdict, on one GPU.

    python -m bench.load.faults --json FILE [--only STEP,STEP] [--deadline 480]

No server: damaged kernel caches (ours and Triton's), read-only cache directories, unusable
profiles. With servers of 4 dummy layers: two of ours that start cold at the same time on one empty
cache, a client killed in mid-stream, the scheduler killed (ours and stock's, side by side), a
damaged profile, and a workspace that does not fit. A verdict holds what was done, what was
expected and from where, what happened and how long it took; `passed` is null where the step could
not be run, with the reason. Verdicts are written as they come; exit 1 unless all passed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import http.client
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from bench.load import servers
from sglang_fp8mla.envs import Settings
from sglang_fp8mla.errors import InvalidArgument
from sglang_fp8mla.kernels import nvrtc
from sglang_fp8mla.machine import machine, machine_line, output_of
from sglang_fp8mla.policy import load_profile
from sglang_fp8mla.probe import Facts
from sglang_fp8mla.serving import ServerFailed, call, ending_by_signal, write_model

# seconds
BOOT, CHILD, GONE, REST = 280.0, 150.0, 60.0, 30.0
_DUMMY = (
    *("--load-format", "dummy", "--cuda-graph-max-bs-decode", "8"),
    *("--max-running-requests", "32", "--max-total-tokens", "65536"),
)


class Unexpected(Exception):
    """A fault did not end as documented; the message says how it ended."""


class NotRun(Exception):
    """A step cannot be run here; the message says why."""


def require(condition: object, text: str) -> None:
    if not condition:
        raise Unexpected(text)


class Steps:
    """Runs steps, and keeps their verdicts on disk as they come."""

    def __init__(self, path: Path, only: set[str]) -> None:
        self.path = path
        self.only = only
        self.verdicts: list[dict[str, Any]] = []
        self.machine = machine()
        self._lock = threading.Lock()

    def wanted(self, *names: str) -> bool:
        return not self.only or bool(self.only & set(names))

    def run(self, name: str, did: str, expected: str, step: Callable[[], str]) -> bool:
        """Run `step`, which says what happened, and record its verdict."""
        if not self.wanted(name):
            return True
        begin = time.monotonic()
        passed: bool | None = True
        try:
            happened = step()
        except NotRun as reason:
            passed, happened = None, f"not run: {reason}"
        except Unexpected as error:
            passed, happened = False, str(error)
        except (ServerFailed, OSError, subprocess.SubprocessError, ValueError) as error:
            passed, happened = False, f"{type(error).__name__}: {error}"
        self.record(name, did, expected, happened, passed, time.monotonic() - begin)
        return passed is True

    def record(
        self, name: str, did: str, expected: str, happened: str, passed: bool | None, seconds: float
    ) -> None:
        verdict = {
            "step": name,
            "passed": passed,
            "seconds": round(seconds, 1),
            "did": did,
            "expected": expected,
            "happened": happened,
        }
        with self._lock:
            self.verdicts.append(verdict)
            word = {True: "passed", False: "FAILED", None: "not run"}[passed]
            print(f"[{word}] {name} ({seconds:.1f} s): {happened}", flush=True)
            self._write(finished=False)

    def _write(self, *, finished: bool) -> None:
        good = all(verdict["passed"] for verdict in self.verdicts)
        report = {"machine": self.machine, "finished": finished, "passed": good and finished}
        text = json.dumps({**report, "verdicts": self.verdicts}, indent=1)
        temporary = self.path.with_suffix(".part")
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, self.path)

    def finish(self, *, finished: bool) -> int:
        with self._lock:
            self._write(finished=finished)
            bad = [v["step"] for v in self.verdicts if not v["passed"]]
        print(f"{len(self.verdicts)} steps, not passed: {', '.join(bad) or 'none'}", flush=True)
        return 0 if finished and not bad else 1


# --- profiles: no process, no GPU -------------------------------------------------------------

_FACTS = Facts("NVIDIA H200", (9, 0), 16, 512, 64, "bfloat16", "float8_e4m3fn", "0.7.2")


def bad_profiles() -> dict[str, bytes]:
    """Contents of SGLANG_FP8MLA_PROFILE that no server may start with."""
    rule = {"max_heads": 128, "max_batch": 1 << 20, "path": "gather_cast"}
    entry = {"source": "here", "decode": [rule], "extend": [rule]}
    whole = json.dumps({"schema": 1, "generations": {"SM90": entry}})

    def table(**changes: Any) -> bytes:
        return json.dumps({"schema": 1, "generations": {"SM90": {**entry, **changes}}}).encode()

    return {
        "empty": b"",
        "not JSON": b"max_heads: 128\n",
        "cut short": whole[: len(whole) // 2].encode(),
        "binary": bytes(range(256)),
        "a list": b"[]",
        "another schema": json.dumps({"schema": 2, "generations": {"SM90": entry}}).encode(),
        "no generations": b'{"schema": 1}',
        "another GPU's": json.dumps({"schema": 1, "generations": {"SM120": entry}}).encode(),
        "an unknown path": table(decode=[{**rule, "path": "fastest"}]),
        "a path that extend lacks": table(extend=[{**rule, "path": "fused"}]),
        "no rules": table(decode=[]),
        "rules that are numbers": table(decode=[1]),
        "heads that are words": table(decode=[{**rule, "max_heads": "many"}]),
        "an unknown key": table(decode=[{**rule, "max_tokens": 5}]),
        "a generation that is a list": b'{"schema": 1, "generations": {"SM90": []}}',
    }


def profile_files(directory: Path) -> str:
    """Each bad profile is refused by name, with what to do; a good one is read."""
    directory.mkdir(parents=True, exist_ok=True)
    wrong = []
    for number, (kind, content) in enumerate(bad_profiles().items()):
        path = directory / f"profile-{number}.json"
        path.write_bytes(content)
        wrong += _accepted(kind, path)
    wrong += _accepted("missing", directory / "nowhere.json")
    wrong += _accepted("a directory", directory)
    good = Path(nvrtc.__file__).parents[1] / "profile.json"
    require(load_profile(_FACTS, Settings(profile=str(good))), "the shipped table was not read")
    require(not wrong, "; ".join(wrong))
    return (
        f"{len(bad_profiles()) + 2} of them refused by InvalidArgument that names file and remedy"
    )


def _accepted(kind: str, path: Path) -> list[str]:
    """What is wrong with how the profile at `path` was treated; empty when it was refused well."""
    try:
        load_profile(_FACTS, Settings(profile=str(path)))
    except InvalidArgument as error:
        text = str(error)
        named = str(path) in text and "SGLANG_FP8MLA_PROFILE" in text and "calibrate" in text
        return [] if named else [f"{kind}: refused without file and remedy: {text}"]
    except Exception as error:  # any other type would reach the user as a traceback
        return [f"{kind}: {type(error).__name__}: {error}"]
    return [f"{kind}: accepted"]


# --- kernel caches: a process a case, no server ------------------------------------------------


def child_probe(path: str) -> None:
    """In a process of its own: probe `path` for decode, and print what was found as JSON."""
    import torch

    from sglang_fp8mla.probe import DECODE, run_probe

    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    compiled = 0
    compile_cubin = nvrtc.compile_cubin

    def counting(*args: Any, **kwargs: Any) -> bytes:
        nonlocal compiled
        compiled += 1
        return compile_cubin(*args, **kwargs)

    nvrtc.compile_cubin = counting
    on_gpu = torch.cuda.is_available()
    name = torch.cuda.get_device_name() if on_gpu else "cpu"
    capability = torch.cuda.get_device_capability() if on_gpu else (9, 0)
    facts = Facts(name, capability, 16, 512, 64, "bfloat16", "float8_e4m3fn")
    begin = time.monotonic()
    check = run_probe(path, DECODE, facts, "cuda" if on_gpu else "cpu")
    found = {"level": check.level, "found": check.found, "fix": check.fix, "compiled": compiled}
    print(json.dumps({**found, "seconds": round(time.monotonic() - begin, 2)}))


def run_child(words: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """`python -m bench.load.faults --child ...`, its last line read as JSON.

    Raises:
        Unexpected: it hung, crashed, or printed no JSON.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", "bench.load.faults", "--child", *words],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=CHILD,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Unexpected(f"{words}: hung for {CHILD:g} s") from None
    lines = done.stdout.strip().splitlines()
    with contextlib.suppress(ValueError, IndexError):
        found = dict(json.loads(lines[-1]))
        found["logged"] = [line for line in done.stderr.splitlines() if "not writable" in line][:1]
        return found
    raise Unexpected(f"{words}: exit {done.returncode}, {(done.stderr or done.stdout)[-400:]}")


def cubins(directory: Path) -> list[Path]:
    return sorted((directory / "sglang_fp8mla").glob("*.cubin"))


def damaged_blob(blob: bytes) -> bool:
    """Whether a cache file is anything but a digest and what it is the digest of (nvrtc.py)."""
    return hashlib.sha256(blob[32:]).digest() != blob[:32] or len(blob) <= 32


def damaged_entries(directory: Path) -> list[str]:
    """Files of a kernel cache that are no whole entry, temporary ones included."""
    bad = []
    for path in sorted((directory / "sglang_fp8mla").iterdir()):
        blob = path.read_bytes() if path.is_file() else b""
        if path.suffix != ".cubin" or damaged_blob(blob):
            bad.append(path.name)
    return bad


def _half(blob: bytes) -> bytes:
    return blob[: len(blob) // 2]


def _flip(blob: bytes) -> bytes:
    middle = len(blob) // 2
    return blob[:middle] + bytes([blob[middle] ^ 1]) + blob[middle + 1 :]


def _garbage(blob: bytes) -> bytes:
    return hashlib.shake_256(b"garbage").digest(len(blob))


def _garbage_with_digest(blob: bytes) -> bytes:
    body = _garbage(blob)[32:]
    return hashlib.sha256(body).digest() + body


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda blob: b"",
    "cut within the digest": lambda blob: blob[:20],
    "cut in half": _half,
    "one bit flipped": _flip,
    "garbage": _garbage,
}


class KernelCache:
    """Cases over a primed `$XDG_CACHE_HOME`, each on a copy of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.primed = directory / "primed"
        self.compiled = 0

    def prime(self) -> str:
        """From nothing: compiles, is right, keeps whole entries; then compiles nothing."""
        first = self._probe(self.primed)
        self.compiled = int(first["compiled"])
        require(first["level"] == "ok", f"cold: {first}")
        require(self.compiled > 0, f"cold: nothing was compiled: {first}")
        require(len(cubins(self.primed)) == self.compiled, f"kept {cubins(self.primed)}")
        require(not damaged_entries(self.primed), str(damaged_entries(self.primed)))
        second = self._probe(self.primed)
        require(second["level"] == "ok", f"warm: {second}")
        require(second["compiled"] == 0, f"warm: compiled again: {second}")
        return (
            f"cold: {self.compiled} compiled in {first['seconds']} s, {first['found']}; "
            f"warm: 0 compiled, {second['seconds']} s"
        )

    def _probe(self, home: Path | str) -> dict[str, Any]:
        return run_child(["probe", "fused"], {"XDG_CACHE_HOME": str(home)})

    def _copy(self, name: str) -> Path:
        home = self.directory / name.replace(" ", "-")
        shutil.copytree(self.primed, home)
        return home

    def damage(self, kind: str) -> str:
        """Every entry damaged: compiled again, right, and whole on disk afterwards."""
        home = self._copy(kind)
        for path in cubins(home):
            path.write_bytes(DAMAGE[kind](path.read_bytes()))
        found = self._probe(home)
        require(found["level"] == "ok", str(found))
        require(found["compiled"] == self.compiled, f"compiled {found['compiled']}: {found}")
        require(not damaged_entries(home), f"left damaged: {damaged_entries(home)}")
        return f"{found['compiled']} compiled again in {found['seconds']} s, {found['found']}"

    def directories(self) -> str:
        """A directory at each entry's place: nothing can be kept, the answer is right."""
        home = self._copy("directories")
        for path in cubins(home):
            path.unlink()
            path.mkdir()
        found = self._probe(home)
        require(found["level"] == "ok", str(found))
        return f"{found['compiled']} compiled in {found['seconds']} s, logged {found['logged']}"

    def forged(self) -> str:
        """Garbage under its own right digest: the driver refuses it, the probe says so."""
        home = self._copy("forged")
        for path in cubins(home):
            path.write_bytes(_garbage_with_digest(path.read_bytes()))
        found = self._probe(home)
        require(found["level"] == "fail", f"the probe passed with garbage: {found}")
        return f"the probe failed, so auto takes gather_cast: {found['found']}"

    def unwritable(self, home: str) -> str:
        found = self._probe(home)
        require(found["level"] == "ok", str(found))
        require(found["compiled"] == self.compiled, str(found))
        require(found["logged"], f"no line says that the cache is not writable: {found}")
        return f"{found['compiled']} compiled in {found['seconds']} s; {found['logged'][0][:160]}"

    def read_only_mount(self) -> str:
        home = self.directory / "mounted"
        home.mkdir()
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", str(home)],
            capture_output=True,
            text=True,
            check=False,
        )
        if mounted.returncode:
            raise NotRun(f"mount: {mounted.stderr.strip()}")
        try:
            return self.unwritable(str(home))
        finally:
            subprocess.run(["umount", str(home)], check=False)


def triton_cache(directory: Path) -> str:
    """Triton's cache cut in half: works, or is a failed check; no crash, no hang."""
    home = directory / "triton"
    environment = {"TRITON_CACHE_DIR": str(home)}
    first = run_child(["probe", "gather_cast"], environment)
    require(first["level"] == "ok", f"before any damage: {first}")
    files = [path for path in home.rglob("*") if path.suffix in (".cubin", ".json")]
    require(files, f"nothing was cached in {home}")
    for path in files:
        path.write_bytes(_half(path.read_bytes()))
    found = run_child(["probe", "gather_cast"], environment)
    return f"{len(files)} files cut in half: {found['level']}, {found['found']} {found['fix']}"


def kernel_steps(steps: Steps, directory: Path) -> None:
    """Every step over kernel caches, three at a time: each is one process on the GPU."""
    directory.mkdir(parents=True, exist_ok=True)
    cache = KernelCache(directory)
    damage = "docs/kernels.md, nvrtc.py: a damaged entry is compiled again"
    read_only = "docs/configuration.md: a read-only one costs a few seconds at each start"
    with ThreadPoolExecutor(3) as pool:
        futures = [
            pool.submit(
                steps.run,
                "triton-cache",
                "cut every file of Triton's cache in half, probed gather_cast",
                "no crash and no hang: rebuilt, or a failed check that says what it was",
                lambda: triton_cache(directory),
            )
        ]
        primed = steps.run(
            "kernel-cache-primed",
            "probed fused with an empty XDG_CACHE_HOME, then again",
            "compiled and right, then read from the cache",
            cache.prime,
        )
        if not primed or not cache.compiled:
            return
        for kind in DAMAGE:
            futures.append(
                pool.submit(
                    steps.run,
                    f"kernel-cache {kind}",
                    f"every cubin {kind}, probed fused",
                    damage,
                    partial(cache.damage, kind),
                )
            )
        others: tuple[tuple[str, str, str, Callable[[], str]], ...] = (
            ("kernel-cache directories", "a directory at each cubin's place", damage,
             cache.directories),
            ("kernel-cache forged", "garbage under its own right SHA-256",
             "docs/fallback.md: a failed build is recorded, and gather_cast is taken",
             cache.forged),
            ("cache below a file", "XDG_CACHE_HOME=/dev/null/cache (root ignores file modes)",
             read_only, lambda: cache.unwritable("/dev/null/cache")),
            ("cache in /proc", "XDG_CACHE_HOME=/proc/cache", read_only,
             lambda: cache.unwritable("/proc/cache")),
            ("cache on a read-only mount", "XDG_CACHE_HOME on a tmpfs mounted ro", read_only,
             cache.read_only_mount),
        )  # fmt: skip
        futures += [pool.submit(steps.run, *other) for other in others]
        for future in futures:
            future.result()


# --- servers -----------------------------------------------------------------------------------

_PROMPTS = tuple([(7 * i + 13 * n) % 31000 + 5 for i in range(n)] for n in (1, 17, 300, 2500))


def ask(base: str, prompt: list[int], new: int = 12, timeout: float = 60) -> tuple[Any, ...]:
    """Greedy tokens and logprobs of one request, from an empty cache."""
    flush(base)
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": new, "ignore_eos": True},
        "return_logprob": True,
    }
    answer = json.loads(call(base, "/generate", body, timeout=timeout))
    logprobs = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    require(len(answer["output_ids"]) == new, f"{len(answer['output_ids'])} tokens of {new}")
    return tuple(answer["output_ids"]), tuple(logprobs)


def ask_all(base: str) -> list[tuple[Any, ...]]:
    return [ask(base, prompt) for prompt in _PROMPTS]


def loads(base: str) -> dict[str, Any]:
    found = dict(json.loads(call(base, "/v1/loads", timeout=10))["loads"][0])
    return {key: found[key] for key in ("num_running_reqs", "num_waiting_reqs", "num_used_tokens")}


def flush(base: str, seconds: float = 30.0) -> float:
    """Empty the cache; seconds until the server was at rest and took it."""
    begin = time.monotonic()
    while True:
        try:
            call(base, "/flush_cache", timeout=10)
            return time.monotonic() - begin
        except ServerFailed as error:
            if time.monotonic() - begin > seconds:
                raise Unexpected(f"no flush within {seconds:g} s: {error}") from None
            time.sleep(0.25)


def child_client(port: str) -> None:
    """In a process of its own: read a long stream, saying when it runs and when it ended."""
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=200)
    params = {"temperature": 0, "max_new_tokens": 6000, "ignore_eos": True}
    body = json.dumps({"input_ids": _PROMPTS[2], "sampling_params": params, "stream": True})
    connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    pieces = 0
    while line := response.readline():
        pieces += line.startswith(b"data:")
        if pieces == 3 and line.startswith(b"data:"):
            print("streaming", flush=True)
    print(f"ended after {pieces} pieces", flush=True)


def start_clients(server: servers.Launched, count: int) -> list[subprocess.Popen[str]]:
    """Clients in mid-stream.

    Raises:
        Unexpected: one of them never came so far.
    """
    clients = [
        subprocess.Popen(
            [sys.executable, "-m", "bench.load.faults", "--child", "client", str(server.port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for _ in range(count)
    ]
    for client in clients:
        assert client.stdout is not None
        # a client has its own ceiling of 200 s, so this line comes or the pipe closes
        line = client.stdout.readline().strip()
        if line != "streaming":
            stop_clients(clients)
            raise Unexpected(f"a client did not get its stream: {line!r}")
    return clients


def stop_clients(clients: list[subprocess.Popen[str]]) -> None:
    for client in clients:
        with contextlib.suppress(ProcessLookupError):
            client.send_signal(signal.SIGKILL)
        client.wait()


def client_kill(server: servers.Launched, before: list[tuple[Any, ...]]) -> str:
    """kill -9 of eight clients in mid-stream."""
    clients = start_clients(server, 8)
    running = loads(server.base)
    stop_clients(clients)
    require(running["num_running_reqs"] >= 1, f"nothing ran when they were killed: {running}")
    # before any flush, which would reset the allocator and hide a lost slot
    begin = time.monotonic()
    while any((rest := loads(server.base)).values()):
        require(time.monotonic() - begin < REST, f"still in use after {REST:g} s: {rest}")
        time.sleep(0.25)
    seconds = time.monotonic() - begin
    flush(server.base)
    require(ask_all(server.base) == before, "answers changed")
    return (
        f"{running['num_running_reqs']} ran on {running['num_used_tokens']} slots when killed; "
        f"0 slots in use after {seconds:.1f} s, the same answers to the bit"
    )


def scheduler_kill(server: servers.Launched) -> str:
    """kill -9 of the scheduler, with two clients in mid-stream."""
    clients = start_clients(server, 2)
    try:
        scheduler = server.scheduler()
        require(scheduler is not None, "no scheduler process was found")
        assert scheduler is not None
        held = servers.gpu_mib_by_process()
        pids = [process.pid for process in server.processes()]
        begin = time.monotonic()
        scheduler.send_signal(signal.SIGKILL)
        try:
            code = server.process.wait(timeout=GONE)
        except subprocess.TimeoutExpired:
            raise Unexpected(f"the server lives {GONE:g} s after its scheduler") from None
        seconds = time.monotonic() - begin
        for client in clients:
            try:
                client.wait(timeout=GONE)
            except subprocess.TimeoutExpired:
                raise Unexpected(f"a client waits {GONE:g} s after the scheduler's end") from None
        left = wait_gone(server)
        return (
            f"scheduler {scheduler.pid} killed; server exit {code} after {seconds:.1f} s, clients "
            f"ended, {len(pids)} processes gone after {left:.1f} s; GPU memory given back: "
            f"{sum(held.get(pid, 0) for pid in pids)} MiB"
        )
    finally:
        stop_clients(clients)


def wait_gone(server: servers.Launched, seconds: float = GONE) -> float:
    """Seconds until no process of the server is left, nor any GPU memory of one.

    Raises:
        Unexpected: something is left.
    """
    begin = time.monotonic()
    while True:
        alive = [process.pid for process in server.processes()]
        held = {pid: mib for pid, mib in servers.gpu_mib_by_process().items() if pid in server.seen}
        if not alive and not held:
            return time.monotonic() - begin
        if time.monotonic() - begin > seconds:
            raise Unexpected(f"{seconds:g} s after its end: processes {alive}, MiB {held}")
        time.sleep(0.5)


def refuses_to_start(server: servers.Launched, mark: str) -> str:
    """The server ends by itself with `mark` in its log, and leaves nothing.

    Raises:
        Unexpected: it lives, or ends otherwise.
    """
    begin = time.monotonic()
    while server.process.poll() is None:
        server.processes()
        if time.monotonic() - begin > BOOT:
            raise Unexpected(f"neither refused nor ended in {BOOT:g} s: {server.tail(3)}")
        with contextlib.suppress(ServerFailed):
            call(server.base, "/health", timeout=2)
            raise Unexpected("the server came up")
        time.sleep(0.5)
    code, seconds = server.process.returncode, time.monotonic() - begin
    found = server.lines(mark, limit=3)
    require(found, f"exit {code} without {mark!r}: {server.tail(4)}")
    require(code != 0, f"exit 0 after: {found[0]}")
    wait_gone(server)
    return f"exit {code} after {seconds:.1f} s, nothing left: {found[-1].strip()}"


class ServerSteps:
    """The steps that need servers."""

    def __init__(self, steps: Steps, directory: Path, oom_gib: float) -> None:
        self.steps = steps
        self.directory = directory
        self.oom_gib = oom_gib
        self.model = str(write_model(directory / "model-4l", 4))
        self.thin = str(write_model(directory / "model-1l", 1))
        self.launched: list[servers.Launched] = []

    def launch(
        self, name: str, backend: tuple[str, ...], *words: str, **environment: str
    ) -> servers.Launched:
        """Later words win over `_DUMMY`'s."""
        command = ["--model-path", self.model, *servers.COMMON, *_DUMMY, *backend, *words]
        # a port of its own for each: they start at the same time
        port = servers.free_port(17000 + 40 * len(self.launched))
        server = servers.launch(name, command, self.directory, environment=environment, port=port)
        self.launched.append(server)
        return server

    def close(self) -> None:
        for server in self.launched:
            server.kill()

    def damaged_profile(self) -> None:
        def step() -> str:
            path = self.directory / "cut.json"
            path.write_bytes(bad_profiles()["cut short"])
            server = self.launch("profile", servers.OURS, SGLANG_FP8MLA_PROFILE=str(path))
            try:
                return refuses_to_start(server, "must be a JSON table")
            finally:
                server.kill()

        self.steps.run(
            "server with a damaged profile",
            "started with SGLANG_FP8MLA_PROFILE cut in half",
            "docs/configuration.md: a bad value stops the server; exit code not 0, nothing left",
            step,
        )

    def pair(self) -> None:
        """Two of ours cold at once; then a client, then a scheduler killed, the other goes on."""
        if not self.steps.wanted("two cold starts", "client killed", "scheduler killed"):
            return
        # the other steps need its servers
        if self.steps.only:
            self.steps.only.add("two cold starts")
        home = self.directory / "cold"
        environment = {"XDG_CACHE_HOME": str(home), "TRITON_CACHE_DIR": str(home / "triton")}
        pair = [self.launch(f"cold-{i}", servers.OURS, **environment) for i in range(2)]
        answers: list[list[tuple[Any, ...]]] = []

        def cold() -> str:
            boots = [server.wait_healthy(BOOT) for server in pair]
            answers.extend(ask_all(server.base) for server in pair)
            require(answers[0] == answers[1], "the two answer differently")
            bad = damaged_entries(home)
            require(not bad, f"left in the cache: {bad}")
            paths = [server.lines("decode path: ", limit=1) for server in pair]
            require(
                all(line and "decode path: fused" in line[0] for line in paths),
                f"expected fused in both: {paths}",
            )
            return (
                f"healthy after {boots[0]:.0f} and {boots[1]:.0f} s, equal answers to the bit, "
                f"{len(cubins(home))} whole cubins, no temporary file"
            )

        try:
            self.steps.run(
                "two cold starts",
                "two of ours started at once, one empty XDG_CACHE_HOME and Triton cache for both",
                "both come up and answer alike; nvrtc.py: processes that start together see all or "
                "nothing of an entry",
                cold,
            )
            if len(answers) < 2:
                return
            first, second = pair
            self._client_kill("client killed", first, answers[0])
            self._scheduler_kill("scheduler killed", first)

            def neighbour() -> str:
                require(ask_all(second.base) == answers[1], "its answers changed")
                return "the same answers to the bit"

            self.steps.run(
                "neighbour of a killed scheduler",
                "asked the other server on the same GPU",
                "it goes on",
                neighbour,
            )
        finally:
            for server in pair:
                server.kill()

    def _client_kill(
        self, name: str, server: servers.Launched, before: list[tuple[Any, ...]]
    ) -> None:
        self.steps.run(
            name,
            "kill -9 of eight clients in mid-stream, then a flush and the same requests again",
            "requests end, slots are free, answers as before (what stock keeps)",
            lambda: client_kill(server, before),
        )

    def _scheduler_kill(self, name: str, server: servers.Launched) -> None:
        self.steps.run(
            name,
            "kill -9 of the scheduler with two clients in mid-stream",
            f"the server ends by itself within {GONE:g} s, clients are told, no process is left, "
            "GPU memory is given back (what stock does)",
            lambda: scheduler_kill(server),
        )

    def stock(self) -> None:
        """The same two kills on stock `flashinfer`: the yardstick."""
        if not self.steps.wanted("client killed, stock", "scheduler killed, stock"):
            return
        server = self.launch("stock", servers.STOCK)
        try:
            server.wait_healthy(BOOT)
            self._client_kill("client killed, stock", server, ask_all(server.base))
            self._scheduler_kill("scheduler killed, stock", server)
        except (ServerFailed, Unexpected) as error:
            self.steps.record("stock's kills", "started stock", "it runs", str(error), False, 0.0)
        finally:
            server.kill()

    def out_of_memory(self) -> None:
        """A pool of a third of what is free, one layer: its 16-bit rows, twice that, do not fit."""

        def step() -> str:
            free = servers.gpu_free_mib()
            if free is None:
                raise NotRun("nvidia-smi does not say how much is free")
            # one layer: 576 bytes a slot in the pool, 1152 in the workspace
            pool_gib = free / 1024 / 3 + 2
            if pool_gib > self.oom_gib:
                raise NotRun(f"it takes {pool_gib:.0f} GiB, --oom-gib allows {self.oom_gib:g}")
            if free / 1024 < 36:
                raise NotRun(f"{free} MiB are free: the pool itself would be refused")
            slots = int(pool_gib * 2**30 / 576)
            words = ("--model-path", self.thin, "--max-total-tokens", str(slots))
            server = self.launch(
                "oom",
                servers.OURS,
                *words,
                "--max-running-requests",
                "8",
                SGLANG_FP8MLA_DECODE_PATH="gather_cast",
            )
            try:
                happened = refuses_to_start(server, "workspace: the gather_cast rows must have")
            finally:
                server.kill()
            return f"{free / 1024:.1f} GiB were free, pool {pool_gib:.1f} GiB: {happened}"

        self.steps.run(
            "out of memory at start",
            "a pool so large that the workspace of gather_cast (forced) does not fit beside it",
            "docs/fallback.md: no room for the workspace: the server refuses to start and says "
            "what helps; exit code not 0, nothing left",
            step,
        )

    def run_all(self) -> None:
        """Side by side, but for the last, which wants most of the GPU's memory."""
        threads = [
            threading.Thread(target=_guarded, args=(self.steps, part), daemon=True)
            for part in (self.damaged_profile, self.pair, self.stock)
        ]
        for thread in threads:
            thread.start()
            time.sleep(0.2)
        for thread in threads:
            thread.join()
        self.out_of_memory()


def run(options: argparse.Namespace) -> int:
    """Every step; returns the exit code."""
    path = Path(options.json)
    path.parent.mkdir(parents=True, exist_ok=True)
    steps = Steps(path, {name for name in options.only.split(",") if name})
    print(machine_line(steps.machine), flush=True)
    scratch = Path(tempfile.mkdtemp(prefix="fp8mla-faults-"))
    served = ServerSteps(steps, path.parent / "faults-logs", options.oom_gib)

    def profiles() -> None:
        steps.run(
            "profile files",
            f"SGLANG_FP8MLA_PROFILE: {', '.join(bad_profiles())}, missing, a directory",
            "docs/configuration.md: refused, by file and with the remedy",
            lambda: profile_files(scratch / "profiles"),
        )

    parts: list[Callable[[], None]] = [profiles]
    if options.gpu:
        parts += [lambda: kernel_steps(steps, scratch / "kernels"), served.run_all]
    threads = [threading.Thread(target=_guarded, args=(steps, part), daemon=True) for part in parts]
    until = time.monotonic() + options.deadline
    finished = True
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            finished = False
            text = f"{options.deadline:g} s were over before every step had ended"
            steps.record("deadline", "waited for all steps", "all end", text, False, 0.0)
    finally:
        served.close()
        shutil.rmtree(scratch, ignore_errors=True)
    return steps.finish(finished=finished)


def _guarded(steps: Steps, part: Callable[[], None]) -> None:
    """A bug of this driver is a failed step, not a thread that nobody misses."""
    try:
        part()
    except Exception as error:
        steps.record("driver", "ran a group of steps", "no bug", repr(error), False, 0.0)
        raise


def main() -> None:
    """Parse arguments and run; `--child` is how this module starts itself."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", default="faults.json")
    parser.add_argument("--only", default="", help="steps by name, comma-separated")
    parser.add_argument("--deadline", type=float, default=480.0, help="seconds for everything")
    parser.add_argument("--oom-gib", type=float, default=48.0, help="largest pool to allocate")
    parser.add_argument("--gpu", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--child", nargs=2, metavar=("WHAT", "ARGUMENT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        what, argument = options.child
        {"probe": child_probe, "client": child_client}[what](argument)
        return
    if options.gpu is None:
        options.gpu = bool(output_of("nvidia-smi", "-L"))
    with ending_by_signal():
        code = run(options)
    sys.stdout.flush()
    # a step that hung must not keep the process: its thread is a daemon, its servers are ended
    os._exit(code)


if __name__ == "__main__":
    main()
