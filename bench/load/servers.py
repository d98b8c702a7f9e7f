"""The servers under load: their command lines, their processes, and the memory these hold.

A server starts in a session of its own, below no supervisor: one that reaped orphans would hide
what a killed scheduler leaves behind. `Launched.kill` ends it and all that it ever started.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil  # type: ignore[import-untyped]

from sglang_fp8mla.machine import output_of
from sglang_fp8mla.serving import ServerFailed, call

STOCK = ("--attention-backend", "flashinfer")
OURS = ("--attention-backend", "flashinfer_mla_fp8")
# SGLang 0.5.23's radix tree in Rust dies with the GPU machine's torch (bench/h200/README.md)
ENVIRONMENT = {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python"}
# what the GPU machine can run: no tokenizer, no FlashInfer module but MLA's
COMMON = (
    *("--skip-tokenizer-init", "--host", "127.0.0.1", "--sampling-backend", "pytorch"),
    *("--flashinfer-mla-disable-ragged", "--disable-prefill-cuda-graph", "--random-seed", "1"),
    *("--kv-cache-dtype", "fp8_e4m3", "--context-length", "16384"),
    # of the whole GPU; the rest, 14 GiB of an H200, stays free beside the pool
    *("--mem-fraction-static", "0.9"),
)


def free_port(first: int = 12000) -> int:
    """A port of the loopback interface below 32768: above lie the ephemeral ones."""
    # started at the same time, two callers must not find the same one
    start = first + (os.getpid() * 17) % 4000
    for port in range(start, 32768):
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port
    raise RuntimeError(f"free_port: a port from {start} to 32767 must be free")


@dataclass
class Launched:
    """One running `python -m MODULE ...`, its log, and every process that it was seen to have."""

    name: str
    port: int
    log_path: Path
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    seen: dict[int, psutil.Process] = field(default_factory=dict)
    begun: float = field(default_factory=time.monotonic)

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def processes(self) -> list[psutil.Process]:
        """It and its descendants that live, zombies left out; also those that were orphaned."""
        with contextlib.suppress(psutil.Error):
            main = psutil.Process(self.process.pid)
            for process in [main, *main.children(recursive=True)]:
                self.seen.setdefault(process.pid, process)
        return [process for process in self.seen.values() if _lives(process)]

    def scheduler(self) -> psutil.Process | None:
        """The process that holds the GPU: by its title, or else the largest below the first."""
        below = [process for process in self.processes() if process.pid != self.process.pid]
        for process in below:
            with contextlib.suppress(psutil.Error):
                if "scheduler" in " ".join(process.cmdline()):
                    return process
        sizes = {}
        for process in below:
            with contextlib.suppress(psutil.Error):
                sizes[process] = process.memory_info().rss
        return max(sizes, key=lambda process: sizes[process], default=None)

    def wait_healthy(self, seconds: float) -> float:
        """Seconds from its start until it answered.

        Raises:
            ServerFailed: it ended, or did not answer in time.
        """
        while time.monotonic() - self.begun < seconds:
            if self.process.poll() is not None:
                raise ServerFailed(f"{self.name}: exited with {self.process.returncode}")
            with contextlib.suppress(ServerFailed):
                call(self.base, "/health", timeout=5)
                self.processes()
                return time.monotonic() - self.begun
            self.processes()
            time.sleep(0.5)
        raise ServerFailed(f"{self.name}: no /health within {seconds:g} s")

    def read_log(self) -> str:
        with contextlib.suppress(OSError):
            return self.log_path.read_text(encoding="utf-8", errors="replace")
        return ""

    def lines(self, *marks: str, limit: int = 6) -> list[str]:
        """The log's first lines that hold one of `marks`."""
        found = [line for line in self.read_log().splitlines() if any(m in line for m in marks)]
        return [line[:400] for line in found[:limit]]

    def tail(self, count: int = 12) -> list[str]:
        return [line[:300] for line in self.read_log().splitlines() if line.strip()][-count:]

    def kill(self) -> None:
        """End all of it, by process id. May be called again."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=15)
        # what was started while we looked
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        self.log.close()
        self.log_path.with_suffix(".pid").unlink(missing_ok=True)


def _lives(process: psutil.Process) -> bool:
    try:
        # is_running compares start times, so a process id that was given out again is not ours
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def launch(
    name: str,
    words: list[str],
    directory: Path,
    *,
    environment: dict[str, str] | None = None,
    module: str = "sglang.launch_server",
    port: int | None = None,
) -> Launched:
    """Start `python -m module words --port PORT`, its log in `directory/name.log`."""
    port = free_port() if port is None else port
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.log"
    log = path.open("wb")
    process = subprocess.Popen(
        [sys.executable, "-m", module, *words, "--port", str(port)],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env={**os.environ, **ENVIRONMENT, **(environment or {})},
    )
    # for whoever must clean up after a driver that was killed itself
    path.with_suffix(".pid").write_text(str(process.pid), encoding="utf-8")
    return Launched(name, port, path, process, log)


def gpu_mib_by_process() -> dict[int, int]:
    """MiB of GPU memory by process id; empty where nvidia-smi does not say."""
    found: dict[int, int] = {}
    table = output_of(
        "nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"
    )
    for line in table.splitlines():
        pid, _, mib = line.partition(",")
        with contextlib.suppress(ValueError):
            found[int(pid)] = found.get(int(pid), 0) + int(mib)
    return found


def gpu_free_mib() -> int | None:
    """Free MiB of the first visible GPU; None where nvidia-smi does not say."""
    index = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    query = ("--query-gpu=memory.free", "--format=csv,noheader,nounits")
    text = output_of("nvidia-smi", "-i", index, *query)
    return int(text) if text.isdigit() else None


def measure_memory(server: Launched) -> dict[str, Any]:
    """What the server's processes hold now; `gpu_mib` is None where nobody can say."""
    processes = server.processes()
    by_process = gpu_mib_by_process()
    gpu = [by_process[process.pid] for process in processes if process.pid in by_process]
    rss, fds, threads = {}, 0, 0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            title = " ".join(process.cmdline())[:60] or process.name()
            rss[f"{process.pid} {title}"] = round(process.memory_info().rss / 2**20)
            fds += process.num_fds()
            threads += process.num_threads()
    return {
        "gpu_mib": sum(gpu) if gpu else None,
        "rss_mib": sum(rss.values()),
        "rss_mib_by_process": rss,
        "open_files": fds,
        "threads": threads,
        "processes": len(processes),
    }
