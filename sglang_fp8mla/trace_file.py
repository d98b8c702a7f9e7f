"""Reads PyTorch profiler traces event by event, and keeps what the analysis of GPU time needs.

Memory grows with the GPU events of a trace (about 50 bytes each), not with its size: a 500 MB trace
is mostly Python frames and operators, which are parsed and dropped. Standard library only.
"""

from __future__ import annotations

import codecs
import io
import json
import re
import zlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import InvalidArgument

_CHUNK = 1 << 20
_GZIP_MAGIC = b"\x1f\x8b"
# zlib: a gzip header, the largest window
_GZIP_WINDOW = 16 + zlib.MAX_WBITS
# everything before the events: device properties and settings, a few kilobytes per GPU
_MAX_HEADER = 16 << 20
# a few hundred bytes each; a recorded stack or list of shapes makes it some kilobytes
_MAX_EVENT = 8 << 20


class InvalidTrace(InvalidArgument):
    """The file is missing, empty, cut off, or no PyTorch profiler trace; the message says which."""


def _chunks(file: io.BufferedReader, tick: Callable[[int], None]) -> Iterator[str]:
    """The text of a plain or gzip file, in pieces of about a megabyte; a cut-off one just ends."""
    # a name that was cut in the middle of a character must not end the analysis
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    packed = file.peek(2)[:2] == _GZIP_MAGIC
    inflate = zlib.decompressobj(_GZIP_WINDOW)
    while data := file.read(_CHUNK // 16 if packed else _CHUNK):
        tick(len(data))
        if not packed:
            yield decoder.decode(data)
            continue
        while data:
            yield decoder.decode(inflate.decompress(data))
            # a file may hold several compressed members, one after another
            data = inflate.unused_data
            if data:
                inflate = zlib.decompressobj(_GZIP_WINDOW)


def iter_events(
    path: Path,
    *,
    header: dict[str, Any] | None = None,
    partial: bool = False,
    tick: Callable[[int], None] = lambda count: None,
) -> Iterator[dict[str, Any]]:
    """Yield the trace's events in file order, holding about a megabyte of text at a time.

    Args:
        path: `.json` or `.json.gz` (told apart by content), an object with `traceEvents` or a
            bare list.
        header: if given, receives the fields that stand before `traceEvents`.
        partial: yield what a cut-off file holds instead of raising at its end.
        tick: called with the bytes read from disk since the last call.

    Raises:
        InvalidTrace: see there.
    """
    try:
        with path.open("rb") as file:
            yield from _events_of(_chunks(file, tick), path, header, partial)
    except FileNotFoundError:
        raise InvalidTrace(f"trace: FILE must exist, got {path}") from None
    except IsADirectoryError:
        raise InvalidTrace(f"trace: FILE must be a trace file, got the folder {path}") from None
    except zlib.error as error:
        raise InvalidTrace(f"trace: {path} is damaged: {error}") from None
    except OSError as error:
        raise InvalidTrace(f"trace: cannot read {path}: {error.strerror or error}") from None


def _next(chunks: Iterator[str]) -> str:
    """The next piece that is not empty, empty at the end."""
    return next(filter(None, chunks), "")


def _events_of(
    chunks: Iterator[str], path: Path, header: dict[str, Any] | None, partial: bool
) -> Iterator[dict[str, Any]]:
    buffer = ""
    while not buffer and (chunk := _next(chunks)):
        buffer = chunk.lstrip()
    if not buffer:
        raise InvalidTrace(f"trace: {path} is empty")
    if buffer[0] == "[":
        position = 1
    elif buffer[0] == "{":
        opening = re.compile(r'"traceEvents"\s*:\s*\[')
        while (match := opening.search(buffer)) is None:
            chunk = _next(chunks)
            if not chunk or len(buffer) > _MAX_HEADER:
                raise InvalidTrace(
                    f"trace: {path} holds no traceEvents: record it with torch.profiler, or with "
                    "`sglang-fp8mla profile URL`"
                )
            buffer += chunk
        position = match.end()
        if header is not None:
            header.update(_parse_header(buffer[: match.start()]))
    else:
        raise InvalidTrace(f"trace: {path} is not a JSON trace: it starts with {buffer[:20]!r}")

    decode = json.JSONDecoder().raw_decode
    separators = re.compile(r"[\s,]*")
    count = 0
    while True:
        found = separators.match(buffer, position)
        assert found is not None  # it matches the empty string
        position = found.end()
        damage = ""
        if position < len(buffer):
            if buffer[position] == "]":
                return
            try:
                event, position = decode(buffer, position)
            except json.JSONDecodeError as error:
                damage = error.msg
            else:
                count += 1
                if isinstance(event, dict):
                    yield event
                continue
        # an event goes on in the next chunk; one that fills the buffer is no event but damage
        chunk = _next(chunks) if len(buffer) - position < _MAX_EVENT else ""
        if not chunk:
            if partial:
                return
            if len(buffer) - position >= _MAX_EVENT:
                raise InvalidTrace(f"trace: {path} is damaged after {count} events: {damage}")
            raise InvalidTrace(
                f"trace: {path} is cut off after {count} events (an unfinished copy, or the server "
                "died while writing it); record it again, or add --partial to analyse what is there"
            )
        buffer = buffer[position:] + chunk
        position = 0


def _parse_header(text: str) -> dict[str, Any]:
    """The fields before `traceEvents`; empty when they are not JSON, they only decorate."""
    try:
        fields = json.loads(text.rstrip().rstrip(",") + "}")
    except json.JSONDecodeError:
        return {}
    return dict(fields) if isinstance(fields, dict) else {}


@dataclass(frozen=True)
class Copy:
    """Operands of one recorded `aten::copy_`: `out[dims] = in[dims]`."""

    dims: tuple[int, ...]
    out_type: str
    in_type: str


@dataclass
class Rank:
    """GPU work and step marks of one process (one rank) of a trace. Times in microseconds.

    Parallel arrays, one entry per kernel, copy or fill on the GPU: `ts`, `dur`, `name` (index into
    `names`), `correlation` (launch that caused it), `external` (operator that caused it, 0: none),
    `threads` (launched, grid x block), `stream`.
    """

    names: list[str] = field(default_factory=list)
    ts: array[float] = field(default_factory=lambda: array("d"))
    dur: array[float] = field(default_factory=lambda: array("d"))
    name: array[int] = field(default_factory=lambda: array("l"))
    correlation: array[int] = field(default_factory=lambda: array("q"))
    external: array[int] = field(default_factory=lambda: array("q"))
    threads: array[int] = field(default_factory=lambda: array("q"))
    stream: array[int] = field(default_factory=lambda: array("l"))
    # launches on the CPU: time and correlation
    launch_ts: array[float] = field(default_factory=lambda: array("d"))
    launch_correlation: array[int] = field(default_factory=lambda: array("q"))
    # (ts, dur, name) of SGLang's `step[...]` marks on the CPU and on the GPU
    cpu_steps: list[tuple[float, float, str]] = field(default_factory=list)
    gpu_steps: list[tuple[float, float, str]] = field(default_factory=list)
    copies: dict[int, Copy] = field(default_factory=dict)
    device: str = ""
    _ids: dict[str, int] = field(default_factory=dict, repr=False)

    def name_id(self, name: str) -> int:
        found = self._ids.get(name)
        if found is None:
            found = self._ids[name] = len(self.names)
            self.names.append(name)
        return found


@dataclass
class Trace:
    """One trace file: its ranks by label, `""` for the only one of an unmerged file."""

    path: Path
    ranks: dict[str, Rank]
    num_events: int
    header: dict[str, Any]


_GPU_WORK = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_LAUNCHES = frozenset({"cuda_runtime", "cuda_driver", "runtime", "driver"})
_MERGED = re.compile(r"\[([A-Z]+\d+(?:-[A-Z]+\d+)*)\]")
# smaller ones cannot be a KV pool, and each kept one costs memory
_MIN_COPY = 1 << 18


def _product(numbers: Any) -> int:
    result = 1
    for number in numbers:
        result *= int(number)
    return result


def _copy_of(args: dict[str, Any]) -> Copy | None:
    """The operands of an `aten::copy_`, when recorded and large."""
    dims = args.get("Input Dims") or args.get("Input dims")
    types = args.get("Input type") or args.get("Input types") or ["", ""]
    if not dims or len(dims) < 2 or len(types) < 2 or not dims[1]:
        return None
    if dims[1] != dims[0] or _product(dims[1]) < _MIN_COPY:
        return None
    return Copy(tuple(int(d) for d in dims[1]), str(types[0]), str(types[1]))


def read_trace(
    path: Path, *, partial: bool = False, tick: Callable[[int], None] = lambda count: None
) -> Trace:
    """Read one file. See `iter_events` for arguments and errors."""
    header: dict[str, Any] = {}
    ranks: dict[str, Rank] = {}
    count = 0
    only = Rank()
    for event in iter_events(path, header=header, partial=partial, tick=tick):
        count += 1
        category = event.get("cat")
        if event.get("ph") != "X" or category == "python_function" or category is None:
            continue
        pid = event.get("pid")
        rank = only
        if type(pid) is str and (match := _MERGED.match(pid)):
            rank = ranks.setdefault(match[1], Rank())
        category = str(category).lower()
        if category in _GPU_WORK:
            args = event.get("args") or {}
            rank.ts.append(float(event["ts"]))
            rank.dur.append(float(event.get("dur", 0.0)))
            rank.name.append(rank.name_id(str(event.get("name", ""))))
            rank.correlation.append(int(args.get("correlation", 0)))
            rank.external.append(int(args.get("External id", args.get("external id", 0)) or 0))
            grid, block = args.get("grid"), args.get("block")
            rank.threads.append(_product(grid) * _product(block) if grid and block else 0)
            rank.stream.append(int(args.get("stream", 0) or 0))
            if not rank.device and "device" in args:
                rank.device = str(args["device"])
        elif category in _LAUNCHES:
            args = event.get("args") or {}
            if "correlation" in args and "aunch" in event.get("name", ""):
                rank.launch_ts.append(float(event["ts"]))
                rank.launch_correlation.append(int(args["correlation"]))
        elif category == "cpu_op":
            if event.get("name") == "aten::copy_":
                args = event.get("args") or {}
                copy = _copy_of(args)
                if copy is not None:
                    rank.copies[int(args.get("External id", 0) or 0)] = copy
        elif category in ("user_annotation", "gpu_user_annotation"):
            name = str(event.get("name", ""))
            if name.startswith("step["):
                marks = rank.gpu_steps if category.startswith("gpu") else rank.cpu_steps
                marks.append((float(event["ts"]), float(event.get("dur", 0.0)), name))
    if not ranks or only.ts:
        ranks[""] = only
    return Trace(path, ranks, count, header)
