"""Runs one command and makes sure that nothing of it outlives whoever started it.

Started as `python -I supervisor.py CMD...` with a pipe on stdin that the starter holds open. The
pipe closes when the starter is done, or dies in any way, SIGKILL included; then every process of
the command is killed. Standard library only, and no import of this package: it runs isolated
(`-I`), since the package's directory on sys.path would hide the standard `profile` and `trace`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

# linux/prctl.h
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    """Call prctl where there is one; elsewhere the process group alone has to do."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def children(pid: int) -> list[int]:
    """Process ids whose parent is `pid`, from /proc; empty where there is no /proc."""
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                stat = file.read()
        except OSError:
            continue
        # the command name may hold spaces and parentheses; the fields start after the last one
        fields = stat.rpartition(")")[2].split()
        if len(fields) > 1 and int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(name))
    return found


def kill_all(group: int, patience: float = 10.0) -> None:
    """Kill the process group and every descendant, and wait until none is left."""
    until = time.monotonic() + patience
    while time.monotonic() < until:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
        # orphans come to us, the subreaper, so each round reaches one generation further
        for pid in children(os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not children(os.getpid()):
            return
        time.sleep(0.05)


def main(command: list[str]) -> int:
    """Run `command` until it ends or stdin closes; return its exit code, as a shell would."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)

    def in_child() -> None:
        os.setpgid(0, 0)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    # a single thread so far, so preexec_fn is safe
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=in_child)
    except OSError as error:
        sys.stderr.write(f"cannot start {command[0]}: {error}\n")
        return 127

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 4096):
                pass
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    # the starter ends us by closing the pipe; a stray TERM must not leave the command behind
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(process.pid, signal.SIGKILL))
    code = process.wait()
    kill_all(process.pid)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
