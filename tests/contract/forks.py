"""Snippets in processes of their own, without paying SGLang's import for each.

A server process imports SGLang's argument parser once and forks for every snippet: registries that
live as long as a process are then fresh each time. Run as a script, this is that server.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Forks:
    """A server with one SGLang, `first` in front of its PYTHONPATH; closed with `close`."""

    def __init__(self, first: Sequence[str]) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=os.sep,  # the checkout as the current directory would count as installed
            env={**os.environ, "PYTHONPATH": os.pathsep.join(first), "PYTHONWARNINGS": "ignore"},
        )

    def run(self, code: str, path: str) -> str:
        """Run `code` with `path` (as PYTHONPATH) in front; its asserts are the test.

        Returns what it wrote to stdout and stderr.
        """
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(json.dumps({"code": code, "path": path}), file=self._server.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._server.stdout.readline())
        assert answer["status"] == 0, answer["output"][-3000:]
        return str(answer["output"])

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()


def _run_snippet(request: dict[str, str]) -> int:
    """In the fork: the snippet's exit status."""
    sys.path[:0] = request["path"].split(os.pathsep)
    importlib.invalidate_caches()
    try:
        exec(compile(request["code"], "<snippet>", "exec"), {"__name__": "__main__"})
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import sglang.srt.plugins
    import sglang.srt.server_args  # noqa: F401

    for line in sys.stdin:
        with tempfile.TemporaryFile() as output:
            child = os.fork()
            if child == 0:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                status = _run_snippet(json.loads(line))
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
            _, wait_status = os.waitpid(child, 0)
            output.seek(0)
            answer = {
                "status": os.waitstatus_to_exitcode(wait_status),
                "output": output.read().decode(errors="replace"),
            }
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).parent))
    _serve()
