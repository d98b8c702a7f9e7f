"""Resolve launch lines with the installed SGLang on a pretended GPU: a process for many lines.

    echo '{"platform": {...}, "lines": [["--model-path", ...], ...]}' | python launch_lines.py

Plugins load once, as `sglang.launch_server` loads them; each line then resolves in a fork of its
own. One JSON list comes back, a result a line: `fields` (every argument as the run time sees it,
also after pickling), or `error` and its type, or the `exit` status of argparse; and `log`.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import sys
import traceback
from collections import deque
from typing import Any

HOPPER = {
    "is_cuda": True,
    "is_sm90": True,
    "is_hopper_with_cuda_12_3": True,
    "has_flashinfer": True,
    "device_sm": 90,
    "device_capability": (9, 0),
}
SM120 = {
    "is_cuda": True,
    "is_sm120": True,
    "is_blackwell": True,
    "has_flashinfer": True,
    "device_sm": 120,
    "device_capability": (12, 0),
}


def read_fields(server_args: Any) -> dict[str, str]:
    """Every argument as resolved, as text."""
    from sglang.srt.arg_groups.arg_utils import record_fields
    from sglang.srt.arg_groups.overrides import resolving_view

    view = resolving_view(server_args)
    return {
        field.name: repr(getattr(view, field.name)) for field in record_fields(type(server_args))
    }


def resolve(argv: list[str], *, check: bool) -> dict[str, Any]:
    """One launch line, from the words of the command line to the end of the resolution.

    With `check`, also what the launcher asks afterwards (SGLang's `check_server_args`).
    """
    from sglang.srt.server_args import prepare_server_args

    result: dict[str, Any] = {}
    log = io.StringIO()
    try:
        with contextlib.redirect_stderr(log), contextlib.redirect_stdout(log):
            server_args = prepare_server_args(argv)
            server_args.resolve_once()
            if check:
                server_args.check_server_args()
            result["fields"] = read_fields(server_args)
            result["pickled"] = read_fields(pickle.loads(pickle.dumps(server_args)))
    except SystemExit as error:
        result["exit"] = error.code
    except Exception as error:
        result["error"] = str(error)
        result["type"] = type(error).__name__
        result["at"] = traceback.format_exc(limit=-3)
    result["log"] = log.getvalue()[-6000:]
    return result


def start(argv: list[str], *, check: bool) -> tuple[int, int]:
    """`resolve` in a child: what a resolution writes to the process does not reach the next.

    Returns its process id and the pipe that its result comes through.
    """
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        with os.fdopen(write_end, "w") as pipe:
            json.dump(resolve(argv, check=check), pipe)
        os._exit(0)
    os.close(write_end)
    return child, read_end


def finish(child: int, read_end: int) -> dict[str, Any]:
    with os.fdopen(read_end) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {"error": "the child died", "type": "Died", "log": ""}


def main() -> None:
    request = json.load(sys.stdin)
    from sglang.srt.plugins import load_plugins

    load_plugins()
    if request.get("without_hooks"):
        from sglang.srt.arg_groups import resolution_hooks

        resolution_hooks._HOOKS.clear()
    from sglang.srt.runtime_context import override_platform

    # the whole pipeline is imported before the forks, by a line of its own
    override_platform(**request["platform"]).install()
    import sglang.srt.arg_groups.pipeline
    import sglang.srt.server_args  # noqa: F401

    results = []
    running: deque[tuple[int, int]] = deque()
    for line in request["lines"]:
        if len(running) >= (os.cpu_count() or 1):
            results.append(finish(*running.popleft()))
        running.append(start(line, check=bool(request.get("check"))))
    results += [finish(*child) for child in running]
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
