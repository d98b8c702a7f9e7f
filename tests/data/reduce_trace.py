"""Makes a recorded trace small enough to keep: what `trace` reads stays as it was recorded.

    python reduce_trace.py IN OUT

Dropped: flow arrows, metadata, operators but `aten::copy_`, runtime calls but launches, and all
header fields but the device's (host names, process groups).
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

from sglang_fp8mla.trace_file import iter_events

_GPU_ARGS = ("External id", "device", "stream", "correlation", "grid", "block")


def reduce(event: dict[str, Any]) -> dict[str, Any] | None:
    category, name = event.get("cat"), event.get("name", "")
    args = event.get("args", {})
    if category in ("kernel", "gpu_memcpy", "gpu_memset"):
        args = {key: args[key] for key in _GPU_ARGS if key in args}
    elif category == "cpu_op":
        if name != "aten::copy_":
            return None
        args = {
            key: args[key] for key in ("External id", "Input type", "Input Dims") if key in args
        }
    elif category in ("cuda_runtime", "cuda_driver"):
        if "aunch" not in name:
            return None
        args = {"correlation": args["correlation"]}
    elif category not in ("user_annotation", "gpu_user_annotation"):
        return None
    kept = {key: event[key] for key in ("ph", "cat", "name", "pid", "tid", "ts", "dur")}
    return {**kept, "args": args}


def main(source: Path, target: Path) -> None:
    header: dict[str, Any] = {}
    events = [event for event in map(reduce, iter_events(source, header=header)) if event]
    devices = [
        {key: device[key] for key in ("id", "name", "computeMajor", "computeMinor")}
        for device in header.get("deviceProperties", [])
    ]
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    text = f'{{"schemaVersion": 1, "deviceProperties": {json.dumps(devices)},\n"traceEvents": [\n'
    # mtime 0: the same input gives the same file
    with gzip.GzipFile(target, "wb", compresslevel=9, mtime=0) as file:
        file.write(f"{text}{lines}\n]}}\n".encode())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
