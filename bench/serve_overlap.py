"""../shared/gpu/tools/serve_ab.py, its arms booted at the same time and measured one at a time.

    python -m bench.serve_overlap --tool ~/p/tools/serve_ab.py [--pool N] NAME=WORDS ...

The boots take most of a machine's time and no GPU to speak of; the measurements get the GPU alone,
since an idle server launches no kernels. Each arm runs in its own copy of the tool's module, on a
port of its own; requests, formula and rows are the tool's, untouched. `@DIR` at the front of an
arm's words is a model of its own, and `!FLAG` drops one of the tool's fixed flags for that arm.
Rows also go to $OUT/serve.json, with the machine line.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import threading
import time
from http.client import HTTPException
from typing import Any

from sglang_fp8mla.machine import machine

_servers: list[subprocess.Popen[bytes]] = []


def stop_servers(signum: int, _frame: object) -> None:
    """End with no server left: each has a session of its own, which `timeout` does not reach."""
    for server in _servers:
        if server.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
    os._exit(128 + signum)


def load_tool(path: str, port: int) -> Any:
    """A copy of serve_ab.py that talks to `port`."""
    spec = importlib.util.spec_from_file_location(f"serve_ab_{port}", path)
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    tool.FIXED = [str(port) if word == str(tool.PORT) else word for word in tool.FIXED]
    tool.PORT = port
    boot = tool.boot

    def boot_and_note(*args: Any) -> Any:
        server = boot(*args)
        _servers.append(server)
        return server

    tool.boot = boot_and_note
    return tool


def wait_healthy(tool: Any, process: Any, seconds: float) -> str:
    """Wait until the server of `process` answers /health; "" then, else what ended the wait."""
    until = time.monotonic() + seconds
    while process.poll() is None:
        if time.monotonic() > until:
            return f"no /health within {seconds:.0f} s"
        try:
            tool.call("/health", timeout=5)
            return ""
        except (OSError, HTTPException):
            time.sleep(1)
    return f"the server exited with {process.returncode}"


class Turns:
    """Nobody measures before all arms are up (or lost); then one arm at a time."""

    def __init__(self, arms: int) -> None:
        self._waiting = arms
        self._all_up = threading.Condition()
        self._gpu = threading.Lock()

    def arrived(self) -> None:
        with self._all_up:
            self._waiting -= 1
            self._all_up.notify_all()

    def take(self) -> None:
        with self._all_up:
            self._all_up.wait_for(lambda: self._waiting <= 0)
        self._gpu.acquire()

    def release(self) -> None:
        self._gpu.release()


def run_arm(tool: Any, name: str, words: list[str], options: Any, turns: Turns, rows: list) -> None:  # type: ignore[type-arg]
    """Boot, wait for the turn, measure by the tool's own code, stop."""
    call, state = tool.call, {"up": False, "turn": False}

    def call_in_turn(path: str, *args: Any, **kwargs: Any) -> Any:
        if path != "/health" and not state["turn"]:
            state["up"] = True
            turns.arrived()
            turns.take()
            state["turn"] = True
        return call(path, *args, **kwargs)

    tool.call = call_in_turn
    options = argparse.Namespace(**vars(options))
    if words and words[0].startswith("@"):
        options.model = words.pop(0)[1:]
    dropped = [word[1:] for word in words if word.startswith("!")]
    words = [word for word in words if not word.startswith("!")]
    options.without = ",".join([*options.without.split(","), *dropped])
    try:
        row = tool.measure(name, words, options)
    except (OSError, ValueError, LookupError, HTTPException) as problem:  # the other arms go on
        row = {"arm": name, "error": repr(problem)[:500]}
    finally:
        if state["turn"]:
            turns.release()
        if not state["up"]:
            turns.arrived()
    rows.append(row)
    print(json.dumps(row), flush=True)


def main() -> None:
    """Parse serve_ab.py's arguments and run all arms."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tool", required=True, help="path of serve_ab.py")
    parser.add_argument("--pool", type=int, default=495552)
    parser.add_argument("--model", default="")
    parser.add_argument("--boot", type=float, default=300)
    parser.add_argument("--without", default="")
    # below the ephemeral ports: a client can connect to itself on one of those
    parser.add_argument("--port", type=int, default=12000, help="port of the first arm")
    parser.add_argument("--out", default="serve.json", help="file name under $OUT")
    parser.add_argument("arms", nargs="+", metavar="NAME=WORDS")
    options = parser.parse_args()
    tool = os.path.expanduser(options.tool)
    options.model = options.model or os.path.join(os.path.dirname(tool), "models/mla-61l")
    signal.signal(signal.SIGTERM, stop_servers)
    turns, rows = Turns(len(options.arms)), []  # type: ignore[var-annotated]
    threads = []
    for number, arm in enumerate(options.arms):
        name, _, words = arm.partition("=")
        split = [word for word in words.split(",") if word]
        # arms share no port; SGLang takes more ports above the one that it is given
        copy = load_tool(tool, options.port + 400 * number)
        threads.append(
            threading.Thread(target=run_arm, args=(copy, name, split, options, turns, rows))
        )
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    order = [arm.partition("=")[0] for arm in options.arms]
    rows.sort(key=lambda row: order.index(row["arm"]))
    result = {"machine": machine(), "pool": options.pool, "model": options.model, "rows": rows}
    with open(os.path.join(os.environ.get("OUT", "."), options.out), "w") as file:
        json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
