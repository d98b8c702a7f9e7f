"""Faults on purpose, each a step with a verdict, on one GPU.

    python -m bench.load.faults --json FILE

In processes without a server: kernel caches (ours and Triton's) that are damaged or read-only. With
servers of 4 dummy layers: two of ours that start cold at the same time on one empty cache, clients
killed in mid-stream and the scheduler killed (ours and stock's), a damaged profile, and a workspace
that does not fit. A profile from another GPU, and every other kind of bad profile, is refused by
the same lines as the damaged one (tests/unit/test_policy.py). A verdict holds what was done, what
was expected and from where, what happened and how long it took. Verdicts are written as they come;
exit 1 unless all passed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import http.client
import json
import logging
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.synchronize import Semaphore
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from bench.load import servers
from bench.load.answers import Answer, Ask, parse
from bench.load.servers import Launched
from sglang_fp8mla.kernels import nvrtc
from sglang_fp8mla.machine import machine, machine_line
from sglang_fp8mla.serving import (
    Deadline,
    ServerFailed,
    call,
    ending_by_signal,
    make_prompts,
    write_model,
)

# seconds: for a process without a server, for what was killed to be gone, for slots to be free
CHILD, GONE, IDLE = 150.0, 60.0, 30.0
# nothing of this process, and no thread, is forked into a probe or a client
_SPAWN = multiprocessing.get_context("spawn")


class Unexpected(Exception):
    """A fault did not end as documented; the message says how it ended."""


def require(condition: object, text: object) -> None:
    if not condition:
        raise Unexpected(str(text))


class Steps:
    """Runs steps, and keeps their verdicts on disk as they come."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.verdicts: list[dict[str, Any]] = []
        self.machine = machine()

    @property
    def passed(self) -> bool:
        return all(verdict["passed"] for verdict in self.verdicts)

    def run(self, name: str, did: str, expected: str, step: Callable[[], str]) -> bool:
        """Run `step`, which says what happened, and record its verdict."""
        begin = time.monotonic()
        passed = False
        try:
            happened, passed = step(), True
        except Unexpected as error:
            happened = str(error)
        except (
            *(ServerFailed, OSError, subprocess.SubprocessError, psutil.Error),
            *(ValueError, LookupError),
        ) as error:
            happened = repr(error)
        seconds = round(time.monotonic() - begin, 1)
        verdict = {"step": name, "passed": passed, "seconds": seconds, "did": did}
        self.verdicts.append({**verdict, "expected": expected, "happened": happened})
        print(f"[{'passed' if passed else 'FAILED'}] {name} ({seconds} s): {happened}", flush=True)
        self.write(finished=False)
        return passed

    def write(self, *, finished: bool) -> None:
        report = {"machine": self.machine, "finished": finished, "passed": finished and self.passed}
        servers.write_json(self.path, {**report, "verdicts": self.verdicts})


# --- kernel caches: a process a case, no server ------------------------------------------------


def probe(answer: Connection, path: str, environment: dict[str, str]) -> None:
    """In a process of its own: probe `path` for decode; what was found, compiled and logged."""
    os.environ.update(environment)
    import torch

    from sglang_fp8mla.probe import DECODE, Facts, run_probe

    compiled, logged = [], []
    compile_cubin = nvrtc.compile_cubin

    def counting(source: str, *, arch: str, options: tuple[str, ...] = ()) -> bytes:
        compiled.append(arch)
        return compile_cubin(source, arch=arch, options=options)

    def keep(record: logging.LogRecord) -> bool:
        logged.append(record.getMessage())
        return True

    nvrtc.compile_cubin = counting
    nvrtc.logger.addFilter(keep)
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    facts = Facts(name, capability, 16, 512, 64, "bfloat16", "float8_e4m3fn")
    begin = time.monotonic()
    check = run_probe(path, DECODE, facts, "cuda")
    seconds = round(time.monotonic() - begin, 2)
    found = {"level": check.level, "found": check.found, "seconds": seconds}
    answer.send({**found, "compiled": len(compiled), "logged": logged})


def probe_apart(path: str, **environment: str) -> dict[str, Any]:
    """What `probe` found in a new process, which is ended when it hangs.

    Raises:
        Unexpected: it hung or crashed.
    """
    answer, theirs = _SPAWN.Pipe(duplex=False)
    process = _SPAWN.Process(target=probe, args=(theirs, path, environment))
    process.start()
    theirs.close()
    try:
        require(answer.poll(CHILD), f"the probe of {path} hung for {CHILD:g} s")
        return dict(answer.recv())
    except EOFError:
        process.join(GONE)
        raise Unexpected(f"the probe of {path} crashed with {process.exitcode}") from None
    finally:
        process.kill()
        process.join()


def damaged_entries(home: Path) -> list[str]:
    """Files of a kernel cache that are no whole entry (nvrtc.py), temporary ones included."""
    bad = []
    for path in sorted((home / "sglang_fp8mla").iterdir()):
        blob = path.read_bytes()
        whole = len(blob) > 32 and hashlib.sha256(blob[32:]).digest() == blob[:32]
        if not whole or path.suffix != ".cubin":
            bad.append(path.name)
    return bad


def empty(blob: bytes) -> bytes:
    return b""


def flip_a_bit(blob: bytes) -> bytes:
    middle = len(blob) // 2
    return blob[:middle] + bytes([blob[middle] ^ 1]) + blob[middle + 1 :]


def forge(blob: bytes) -> bytes:
    """Garbage under its own right digest."""
    body = hashlib.shake_256(b"garbage").digest(len(blob))
    return hashlib.sha256(body).digest() + body


def fused(home: Path, level: str = "ok") -> dict[str, Any]:
    """`probe_apart` of `fused` over the cache in `home`, which must find `level`."""
    found = probe_apart("fused", XDG_CACHE_HOME=str(home))
    require(found["level"] == level, found)
    return found


def prime(home: Path) -> str:
    """From nothing: compiles, is right, keeps whole entries; then compiles nothing."""
    cold, warm = fused(home), fused(home)
    require(cold["compiled"] and not warm["compiled"], f"cold {cold}, warm {warm}")
    require(not damaged_entries(home), f"damaged: {damaged_entries(home)}")
    return (
        f"cold: {cold['compiled']} compiled in {cold['seconds']} s, {cold['found']}; "
        f"warm: 0 compiled, {warm['seconds']} s"
    )


def damage(home: Path, how: Callable[[bytes], bytes]) -> int:
    """Rewrite every entry; how many there are."""
    entries = list((home / "sglang_fp8mla").iterdir())
    for path in entries:
        path.write_bytes(how(path.read_bytes()))
    return len(entries)


def mend(home: Path, how: Callable[[bytes], bytes]) -> str:
    """Every entry damaged: compiled again, right, and whole on disk afterwards."""
    count = damage(home, how)
    found = fused(home)
    require(found["compiled"] == count, found)
    require(not damaged_entries(home), f"left damaged: {damaged_entries(home)}")
    return f"{count} compiled again in {found['seconds']} s, {found['found']}"


def refuse_forged(home: Path) -> str:
    """The driver refuses every entry, and the probe says so."""
    damage(home, forge)
    found = fused(home, "fail")
    return f"the probe failed, so auto takes gather_cast: {found['found']}"


def unwritable(home: Path) -> str:
    """Nothing can be kept in `home`: compiled, right, and one warning."""
    found = fused(home)
    require(found["compiled"] and "not writable" in str(found["logged"]), found)
    return f"{found['compiled']} compiled in {found['seconds']} s; {found['logged'][0][:160]}"


def read_only(home: Path) -> str:
    """Root ignores file modes, so a mount it must be."""
    home.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", str(home)], check=True)
    try:
        return unwritable(home)
    finally:
        subprocess.run(["umount", str(home)], check=False)


def triton_cache(home: Path) -> str:
    """Triton's cache cut in half: works, or is a failed check; no crash, no hang."""
    first = probe_apart("gather_cast", TRITON_CACHE_DIR=str(home))
    files = [path for path in home.rglob("*") if path.suffix in (".cubin", ".json")]
    require(first["level"] == "ok" and files, f"before any damage: {first}, {files}")
    for path in files:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    found = probe_apart("gather_cast", TRITON_CACHE_DIR=str(home))
    return f"{len(files)} files cut in half: {found['level']}, {found['found']}"


def kernel_steps(steps: Steps, directory: Path) -> None:
    home = directory / "kernels"
    mended = "docs/kernels.md, nvrtc.py: a damaged entry is compiled again"
    steps.run(
        "kernel-cache-primed",
        "probed fused with an empty XDG_CACHE_HOME, then again",
        "compiled and right, then read from the cache",
        partial(prime, home),
    )
    steps.run("kernel-cache empty", "emptied every cubin", mended, partial(mend, home, empty))
    steps.run(
        "kernel-cache one bit flipped",
        "flipped one bit of every cubin",
        mended,
        partial(mend, home, flip_a_bit),
    )
    steps.run(
        "kernel-cache forged",
        "garbage under its own right SHA-256",
        "docs/fallback.md: a failed build is recorded, and gather_cast is taken",
        partial(refuse_forged, home),
    )
    steps.run(
        "cache on a read-only mount",
        "XDG_CACHE_HOME on a tmpfs mounted ro",
        "docs/configuration.md: a read-only one costs a few seconds at each start",
        partial(read_only, directory / "read-only"),
    )
    steps.run(
        "triton-cache",
        "cut every file of Triton's cache in half, probed gather_cast",
        "no crash and no hang: rebuilt, or a failed check that says what it was",
        partial(triton_cache, directory / "triton"),
    )


# --- servers -----------------------------------------------------------------------------------

_ASKS = tuple(Ask(str(n), tuple(make_prompts(1, n)[0]), 12) for n in (1, 17, 300, 2500))
_DUMMY = (
    *(*servers.COMMON, "--load-format", "dummy", "--cuda-graph-max-bs-decode", "8"),
    *("--max-running-requests", "32", "--max-total-tokens", "65536"),
)


def ask_all(base: str) -> list[Answer]:
    """A few requests, each from an empty cache."""
    answers = []
    for ask in _ASKS:
        servers.flush(base)
        answers.append(parse(json.loads(call(base, "/generate", ask.body(), timeout=60))))
    return answers


def read_stream(port: int, streaming: Semaphore) -> None:
    """A client, in a process of its own: reads a long stream, and says when it runs."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=200)
    body = json.dumps(Ask("client", tuple(make_prompts(1, 300)[0]), 6000).body(stream=True))
    with contextlib.suppress(OSError, http.client.HTTPException):  # the server is killed
        connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.readline().startswith(b"data:"):
            streaming.release()
        while response.readline():
            pass


@contextlib.contextmanager
def clients(port: int, count: int) -> Iterator[list[SpawnProcess]]:
    """So many clients in mid-stream; killed at the end if they still run.

    Raises:
        Unexpected: one of them never came so far.
    """
    streaming = _SPAWN.Semaphore(0)
    started = [_SPAWN.Process(target=read_stream, args=(port, streaming)) for _ in range(count)]
    try:
        for client in started:
            client.start()
        for _ in started:
            require(streaming.acquire(timeout=GONE), "a client did not get its stream")
        yield started
    finally:
        for client in started:
            client.kill()
            client.join()


def kill_scheduler(server: Launched) -> str:
    """kill -9 of the scheduler, with two clients in mid-stream."""
    with clients(server.port, 2) as waiting:
        processes = server.processes()
        # SGLang gives it the title sglang::scheduler
        (scheduler,) = [p for p in processes if "scheduler" in " ".join(p.cmdline())]
        held = servers.gpu_mib_by_process()
        begin = time.monotonic()
        scheduler.kill()
        code = server.exit_within(GONE)
        seconds = time.monotonic() - begin
        require(code is not None, f"the server lives {GONE:g} s after its scheduler")
        for client in waiting:
            client.join(GONE)
            require(client.exitcode == 0, f"a client's exit code is {client.exitcode}")
    left = wait_gone(server)
    return (
        f"server exit {code} after {seconds:.1f} s, clients ended, {len(processes)} processes gone "
        f"after {left:.1f} s; GPU memory given back: {sum(held[p.pid] for p in processes)} MiB"
    )


def wait_gone(server: Launched, patience: float = GONE) -> float:
    """Seconds until no process of the server is left, nor any GPU memory of one.

    Raises:
        Unexpected: something is left.
    """
    begin = time.monotonic()
    while True:
        alive = [process.pid for process in server.processes()]
        held = servers.gpu_mib_by_process().keys() & {process.pid for process in server.seen}
        seconds = time.monotonic() - begin
        if not alive and not held:
            return seconds
        require(seconds < patience, f"{patience:g} s after its end: {alive}, on the GPU {held}")
        time.sleep(0.5)


def refuses_to_start(server: Launched, mark: str) -> str:
    """The server ends by itself with `mark` in its log, and leaves nothing.

    Raises:
        Unexpected: it lives, or ends otherwise.
    """
    while server.exit_code() is None:
        require(not server.healthy(), "the server came up")
        require(time.monotonic() - server.started < servers.BOOT, f"lives: {server.tail(3)}")
        time.sleep(0.5)
    code = server.exit_code()
    require(code and mark in server.read_log(), f"exit {code}, {server.cause()}")
    wait_gone(server)
    return f"exit {code}, nothing left: {server.cause()}"


class ServerSteps:
    """The steps that need servers."""

    def __init__(self, steps: Steps, directory: Path) -> None:
        self.steps = steps
        self.directory = directory
        self.launched: list[Launched] = []
        self.answers: dict[str, list[Answer]] = {}

    def launch(self, name: str, *words: str, **env: str) -> Launched:
        model = write_model(self.directory / "model-4l", 4)
        # a port of its own for each: they start at the same time
        port = 17000 + 100 * len(self.launched)
        command = ("--model-path", str(model), *_DUMMY, *words)
        server = servers.launch(self.directory / f"{name}.log", port, *command, **env)
        self.launched.append(server)
        return server

    def run(self) -> None:
        run = self.steps.run
        home = self.directory / "cold"
        env = {"XDG_CACHE_HOME": str(home), "TRITON_CACHE_DIR": str(home / "triton")}
        pair = [self.launch(f"cold-{i}", *servers.OURS, **env) for i in range(2)]
        stock = self.launch("stock", *servers.STOCK)
        run(
            "two cold starts",
            "two of ours started at once, one empty XDG_CACHE_HOME and Triton cache for both",
            "both come up and answer alike; nvrtc.py: processes that start together see all or "
            "nothing of an entry",
            partial(self.cold, home, pair),
        )
        run("stock started", "started beside them", "it runs", partial(self.boot, stock))
        for suffix, server in (("", pair[0]), (", stock", stock)):
            run(
                f"client killed{suffix}",
                "kill -9 of eight clients in mid-stream, then a flush and the same requests again",
                "requests end, slots are free, answers as before (what stock keeps)",
                partial(self.kill_clients, server),
            )
            run(
                f"scheduler killed{suffix}",
                "kill -9 of the scheduler with two clients in mid-stream",
                f"the server ends by itself within {GONE:g} s, clients are told, no process is "
                "left, GPU memory is given back (what stock does)",
                partial(kill_scheduler, server),
            )
        run(
            "neighbour of a killed scheduler",
            "asked the other server on the same GPU",
            "it goes on",
            partial(self.ask_again, pair[1]),
        )
        self.stop()
        run(
            "server with a damaged profile",
            "started with SGLANG_FP8MLA_PROFILE cut in half",
            "docs/configuration.md: a bad value stops the server; exit code not 0, nothing left",
            self.damaged_profile,
        )
        run(
            "out of memory at start",
            "a pool so large that the workspace of gather_cast (forced) does not fit beside it",
            "docs/fallback.md: no room for the workspace: the server refuses to start and says "
            "what helps; exit code not 0, nothing left",
            self.out_of_memory,
        )

    def boot(self, server: Launched) -> str:
        seconds = server.wait_healthy(servers.BOOT, Deadline())
        self.answers[server.name] = ask_all(server.base)
        return f"healthy after {seconds:.0f} s"

    def ask_again(self, server: Launched) -> str:
        require(ask_all(server.base) == self.answers[server.name], "answers changed")
        return "the same answers to the bit"

    def cold(self, home: Path, pair: list[Launched]) -> str:
        healthy = [self.boot(server) for server in pair]
        require(self.answers["cold-0"] == self.answers["cold-1"], "the two answer differently")
        require(not damaged_entries(home), f"left in the cache: {damaged_entries(home)}")
        for server in pair:
            require("decode path: fused" in server.read_log(), f"{server.name}: not fused")
        return f"{', '.join(healthy)}; equal answers to the bit, whole cubins, no temporary file"

    def kill_clients(self, server: Launched) -> str:
        with clients(server.port, 8):
            running = servers.read_loads(server.base)
        require(running["num_running_reqs"], f"nothing ran when they were killed: {running}")
        begin = time.monotonic()
        idle = servers.wait_idle(server.base, IDLE)
        seconds = time.monotonic() - begin
        require(not any(idle.values()), f"still in use after {IDLE:g} s: {idle}")
        return (
            f"{running['num_running_reqs']} ran on {running['num_used_tokens']} slots when killed; "
            f"0 slots in use after {seconds:.1f} s, {self.ask_again(server)}"
        )

    def damaged_profile(self) -> str:
        path = self.directory / "cut.json"
        path.write_text('{"schema": 1, "generat')
        server = self.launch("profile", *servers.OURS, SGLANG_FP8MLA_PROFILE=str(path))
        return refuses_to_start(server, "must be a JSON table")

    def out_of_memory(self) -> str:
        """A pool of a third of the GPU, one layer: its 16-bit rows, twice that, do not fit."""
        gib = int(self.steps.machine["memory"].split()[0]) / 1024 / 3 + 1
        # one layer: 576 bytes a slot in the pool, 1152 in the workspace
        words = ("--max-total-tokens", str(int(gib * 2**30 / 576)), "--max-running-requests", "8")
        thin = ("--model-path", str(write_model(self.directory / "model-1l", 1)))
        env = {"SGLANG_FP8MLA_DECODE_PATH": "gather_cast"}
        # of a word that comes twice the last counts
        server = self.launch("oom", *servers.OURS, *words, *thin, **env)
        happened = refuses_to_start(server, "workspace: the gather_cast rows must have")
        return f"pool {gib:.1f} GiB: {happened}"

    def stop(self) -> None:
        for server in self.launched:
            server.stop()


def main() -> None:
    """Parse arguments and run every step."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, default=Path("faults.json"))
    options = parser.parse_args()
    steps = Steps(options.json)
    print(machine_line(steps.machine), flush=True)
    scratch = Path(tempfile.mkdtemp(prefix="fp8mla-faults-"))
    served = ServerSteps(steps, options.json.parent.resolve() / "faults-logs")
    with ending_by_signal():
        try:
            served.run()
            kernel_steps(steps, scratch)
        finally:
            served.stop()
            shutil.rmtree(scratch, ignore_errors=True)
    steps.write(finished=True)
    bad = [verdict["step"] for verdict in steps.verdicts if not verdict["passed"]]
    print(f"{len(steps.verdicts)} steps, not passed: {', '.join(bad) or 'none'}", flush=True)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
