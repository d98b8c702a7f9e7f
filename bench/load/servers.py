"""The servers under load: their command lines, their processes, the memory these hold."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from sglang_fp8mla.machine import output_of
from sglang_fp8mla.serving import Server, ServerFailed, call

STOCK = ("--attention-backend", "flashinfer")
OURS = ("--attention-backend", "flashinfer_mla_fp8")
# SGLang 0.5.23's radix tree in Rust dies with the GPU machine's torch (bench/h200/README.md)
_ENVIRONMENT = {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python"}
# what the GPU machine can run: no tokenizer, no FlashInfer module but MLA's
COMMON = (
    *("--skip-tokenizer-init", "--host", "127.0.0.1", "--sampling-backend", "pytorch"),
    *("--flashinfer-mla-disable-ragged", "--disable-prefill-cuda-graph", "--random-seed", "1"),
    *("--kv-cache-dtype", "fp8_e4m3", "--context-length", "16384"),
    # of the whole GPU; the rest, 14 GiB of an H200, stays free beside the pool
    *("--mem-fraction-static", "0.9"),
)
# seconds from start to /health; it takes 75 alone
BOOT = 280.0


@dataclass
class Launched(Server):
    """A `Server` with every process that it was seen to have.

    Below no supervisor: one that reaps orphans would hide what a killed scheduler leaves behind.
    """

    seen: set[psutil.Process] = field(default_factory=set)

    def start(self) -> None:
        """Start it in a session of its own."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log = self.log_path.open("wb")
        self.started = time.monotonic()
        self._process = subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **_ENVIRONMENT, **self.env},
        )

    def processes(self) -> list[psutil.Process]:
        """It and its descendants that live, zombies left out; also those that were orphaned."""
        if self._process is not None:
            with contextlib.suppress(psutil.Error):
                main = psutil.Process(self._process.pid)
                self.seen.update([main, *main.children(recursive=True)])
        return [process for process in self.seen if _lives(process)]

    def healthy(self) -> bool:
        """Whether it answers /health now; whoever waits for it sees its processes come."""
        self.processes()
        return super().healthy()

    def stop(self) -> None:
        """End all of it. May be called again."""
        for _ in range(2):  # the second time, what was started while we looked
            for process in self.processes():
                with contextlib.suppress(psutil.Error):
                    process.kill()
        self.exit_within(15)
        if self._log is not None:
            self._log.close()


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        # is_running compares start times, so a process id that was given out again is not ours
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def launch(
    log_path: Path, port: int, *words: str, module: str = "sglang.launch_server", **env: str
) -> Launched:
    """Start `python -m module words --port PORT`; above 32767 lie the ephemeral ports."""
    command = [sys.executable, "-m", module, *words, "--port", str(port)]
    server = Launched(log_path.stem, command, port, log_path, env)
    server.start()
    return server


def read_loads(base: str) -> dict[str, int]:
    """The scheduler's counters; slots of the radix cache do not count as used."""
    found = json.loads(call(base, "/v1/loads", timeout=20))["loads"]
    if not found:
        raise ServerFailed("/v1/loads: the scheduler has published nothing")
    keys = ("num_running_reqs", "num_waiting_reqs", "num_used_tokens")
    return {key: int(found[0][key]) for key in keys}


def wait_idle(base: str, seconds: float) -> dict[str, int]:
    """The counters once all are 0, or as they are after `seconds`.

    To be asked before a flush, which resets the allocator and would hide a slot that was lost.
    """
    until = time.monotonic() + seconds
    while any((counters := read_loads(base)).values()) and time.monotonic() < until:
        time.sleep(0.25)
    return counters


def flush(base: str, seconds: float = 40.0) -> None:
    """Empty the radix cache of a server at rest, which may still be ending what was closed."""
    until = time.monotonic() + seconds
    while True:
        try:
            call(base, "/flush_cache", timeout=20)
            return
        except ServerFailed as error:
            # SGLang refuses with 400 while anything runs
            if "HTTP 400" not in str(error) or time.monotonic() > until:
                raise
        time.sleep(0.25)


def gpu_mib_by_process() -> Counter[int]:
    """MiB of GPU memory by process id; empty where nvidia-smi does not say."""
    table = output_of(
        "nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"
    )
    found: Counter[int] = Counter()
    for line in table.splitlines():
        with contextlib.suppress(ValueError):  # "[N/A]"
            pid, mib = map(int, line.split(","))
            found[pid] += mib
    return found


def measure_memory(server: Launched) -> dict[str, int]:
    """What the server's processes hold now; `gpu_mib` is 0 where nobody can say."""
    by_process = gpu_mib_by_process()
    found = Counter(gpu_mib=0, rss_mib=0, open_files=0, threads=0, processes=0)
    for process in server.processes():
        with contextlib.suppress(psutil.NoSuchProcess), process.oneshot():
            found["gpu_mib"] += by_process[process.pid]
            found["rss_mib"] += process.memory_info().rss >> 20
            found["open_files"] += process.num_fds()
            found["threads"] += process.num_threads()
            found["processes"] += 1
    return dict(found)


def write_json(path: Path, value: object) -> None:
    """Whole or not at all: a run that is cut short keeps what it had."""
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(value, indent=1), encoding="utf-8")
    os.replace(temporary, path)
