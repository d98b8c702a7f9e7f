"""Minutes of mixed load on a real server, every answer held against the same request's alone.

    python -m bench.serve.make_nextn /tmp/nextn8 --layers 8
    python -m bench.load.load --arm exact|auto|stock --seconds 420 --model /tmp/nextn8 --json F.json
    python -m bench.load.load --judge DIRECTORY      # holds exact.json, auto.json, stock.json

Load is a seeded mix: 1 to 480 requests at once, prompts of 1 to 8000 tokens, shared prefixes,
streaming and not, clients that close in mid-answer, `/abort_request`, `/flush_cache` at rest (must
work) and under load (must be refused), bursts and lulls. The three arms:

`auto`: our backend as it chooses itself, radix cache, chunked prefill, a pool so small that decode
fills it and requests are retracted. Nothing is batch-invariant there, SGLang's GEMMs included, so
tokens may move within `answers.Bound`, which comes from the `stock` arm.
`stock`: the same load on stock `flashinfer`: the yardstick, and what "nothing is lost that stock
keeps" is held against.
`exact`: our fused decode with SGLANG_FP8MLA_BATCH_INVARIANT=1 over SGLang's batch-invariant GEMMs
(`bench.load.deterministic`). Tokens and logprobs must be equal to the last bit. FlashInfer's MLA
prefill is not batch-invariant, so prefill is kept still: one request a prefill batch, a pool that
never overflows, and prompts that are in the radix cache before the load starts, so that each
request computes its last prompt token and then decodes, alone or among hundreds. An answer that
found another prefix, or was retracted, is counted, and not compared to the bit. After each flush
the catalogue is asked alone again and must give the bits that it gave before.

At the end: no request hangs, no KV slot is in use after a flush, the catalogue asked alone gives
the bits it gave at the start, and GPU memory, resident memory and open files are what they were
after the warm-up. Results are written as they come; exit 1 when something failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import shlex
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from bench.load import servers
from bench.load.answers import (
    Answer,
    Ask,
    Bound,
    Comparison,
    Tally,
    compare,
    make_catalogue,
    outside,
    parse,
    spoil,
)
from sglang_fp8mla.machine import machine, machine_line
from sglang_fp8mla.serving import ServerFailed, ending_by_signal

# seconds; a queue of 480 requests empties in well under a minute
HANG = 150.0
MAX_IN_FLIGHT = 480
# seconds that the scheduler's counters get to come to rest
REST = 10.0
# seconds; what a client closed may be noticed only at the server's next look, every few seconds
SETTLE = 40.0
# requests in flight while a slot of the load lasts; bursts start all of them at once
LEVELS = (1, 4, 16, 64, 128, 256, 400, MAX_IN_FLIGHT)
TOP = 5

_LOADED = (
    *("--load-format", "auto", "--cuda-graph-max-bs-decode", "64"),
    *("--max-running-requests", "256", "--chunked-prefill-size", "2048"),
)
# the catalogue's prompts, shared prefixes once, take 47000 slots; almost nothing is set aside for
# answers, so that decode fills the pool
_SMALL = ("--max-total-tokens", "40960", "--schedule-conservativeness", "0.05")


@dataclass(frozen=True)
class Arm:
    """How one server is started, and whether its answers must be equal to the bit."""

    words: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    module: str = "sglang.launch_server"
    exact: bool = False


# a pool of this size was never full enough in ten minutes on an H200: SGLang is made to retract
_RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "200"}  # forwards

ARMS = {
    "auto": Arm((*servers.OURS, *_SMALL), _RETRACT),
    "stock": Arm((*servers.STOCK, *_SMALL), _RETRACT),
    "exact": Arm(
        (
            *(*servers.OURS, "--max-total-tokens", "262144"),
            *("--enable-deterministic-inference", "--prefill-max-requests", "1"),
        ),
        {
            "SGLANG_FP8MLA_BATCH_INVARIANT": "1",
            "SGLANG_FP8MLA_DECODE_PATH": "fused",
            "SGLANG_FP8MLA_EXTEND_PATH": "gather_cast",
            # not on the GPU machine; the Triton kernels of the same mode take over
            "SGLANG_ENABLE_JIT_DEEPGEMM": "0",
            "SGLANG_BATCH_INVARIANT_OPS_ENABLE_MM_DEEPGEMM": "0",
        },
        "bench.load.deterministic",
        exact=True,
    ),
}


class Lost(Exception):
    """The server answered with what no server should; the message says what."""


@dataclass
class Counts:
    """What happened to the requests."""

    sent: int = 0
    completed: int = 0
    streamed: int = 0
    closed: int = 0  # by the client, in mid-answer
    aborted: int = 0  # by /abort_request
    abort_too_late: int = 0
    hangs: int = 0
    errors: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    retractions: int = 0
    retracted_answers: int = 0
    other_prefix: int = 0
    flushes: int = 0
    refused_flushes: int = 0
    max_in_flight: int = 0
    max_running: int = 0


class Driver:
    """Asks one server, alone and under load, and keeps count."""

    def __init__(self, base: str, asks: list[Ask], *, exact: bool, seed: int, hang: float) -> None:
        self.base = base
        self.asks = asks
        self.exact = exact
        self.hang = hang
        self.rng = random.Random(seed)
        self.counts = Counts()
        self.alone: dict[str, Answer] = {}
        self.cold: dict[str, Answer] = {}
        self.tally = Tally()
        self.warm_noise = Tally()
        self.control = Tally()
        # of the answers that must be equal to the bit: how many a request, how many were not, and
        # at which token the first logprob moved
        self.by_ask: dict[str, list[int]] = {}
        self.first_moved: Counter[int] = Counter()
        self.failures: list[str] = []
        self.examples: Counter[str] = Counter()
        self.in_flight = 0
        self._number = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Driver:
        self._session = aiohttp.ClientSession(
            # a kept connection can be closed by the server just as a request goes out on it
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None),
            # one line of a stream holds the whole answer so far
            read_bufsize=2**22,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    def fail(self, kind: str, text: str) -> None:
        """Remember a failure; of each kind the first few in words, all in number."""
        self.examples[kind] += 1
        if self.examples[kind] <= 5:
            self.failures.append(f"{kind}: {text}")
            print(f"FAILED {kind}: {text}", flush=True)

    async def get(self, path: str, *, timeout: float = 20) -> tuple[int, str]:
        assert self._session is not None
        async with asyncio.timeout(timeout), self._session.get(self.base + path) as response:
            return response.status, await response.text()

    async def loads(self) -> dict[str, Any]:
        """The scheduler's counters: requests running and waiting, KV slots in use."""
        status, text = await self.get("/v1/loads")
        if status != 200:
            raise Lost(f"/v1/loads: HTTP {status} {text[:200]}")
        found = json.loads(text)["loads"]
        if not found:
            raise Lost("/v1/loads: the scheduler has published nothing")
        return dict(found[0])

    async def flush(self, seconds: float = 40.0) -> bool:
        """Empty the radix cache of a server at rest; it may still be ending what was closed."""
        until = time.monotonic() + seconds
        while True:
            status, text = await self.get("/flush_cache")
            if status == 200:
                self.counts.flushes += 1
                return True
            if time.monotonic() > until:
                self.fail("flush", f"refused for {seconds:g} s at rest: {text[:200]}")
                return False
            await asyncio.sleep(0.5)

    def _body(self, ask: Ask, *, stream: bool, rid: str, top: int) -> dict[str, Any]:
        return {
            "input_ids": list(ask.input_ids),
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": ask.max_new_tokens,
                "ignore_eos": True,
            },
            "return_logprob": True,
            "top_logprobs_num": top,
            "stream": stream,
            "rid": rid,
        }

    async def _post(
        self, ask: Ask, *, stream: bool, rid: str, top: int = 0, chunks: int | None = None
    ) -> Answer | None:
        """One request; `chunks` closes the connection after so many pieces of a stream.

        Returns None when the connection was closed before a token came.

        Raises:
            Lost: an HTTP error, or something that is no answer.
            aiohttp.ClientError: the connection broke.
        """
        assert self._session is not None
        body = self._body(ask, stream=stream, rid=rid, top=top)
        async with self._session.post(self.base + "/generate", json=body) as response:
            if response.status != 200:
                text = await response.text()
                raise Lost(f"HTTP {response.status} {text[:200]}")
            if not stream:
                last = await response.read()
            else:
                last, seen, done = b"", 0, False
                async for line in response.content:
                    if not line.startswith(b"data:"):
                        continue
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        done = True
                        break
                    last, seen = data, seen + 1
                    if chunks is not None and seen >= chunks:
                        response.close()
                        break
                if not done and (chunks is None or seen < chunks):
                    raise Lost("the stream broke off")
                if not last:
                    return None
        try:
            return parse(json.loads(last))
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise Lost(f"no answer but {last[:200]!r} ({error!r})") from None

    async def ask_alone(self, ask: Ask, *, cold: bool) -> Answer:
        """One request on a server at rest, with the likeliest tokens.

        Raises:
            Lost: no whole answer.
        """
        if cold:
            await self.flush()
        self._number += 1
        async with asyncio.timeout(self.hang):
            answer = await self._post(ask, stream=False, rid=f"alone-{self._number}", top=TOP)
        if answer is None or len(answer.tokens) != ask.max_new_tokens:
            raise Lost(f"{ask.name} alone: {answer}")
        return answer

    async def ask_all_alone(self, *, cold: bool) -> dict[str, Answer]:
        """The catalogue, one after another; `cold` empties the cache before each."""
        return {ask.name: await self.ask_alone(ask, cold=cold) for ask in self.asks}

    async def prepare(self) -> None:
        """Get the answers alone that load is held against, and show what wrong keys look like.

        Exact: the catalogue in order from an empty cache, then again with every prompt cached; that
        second pass is the reference, and a third must equal it. Else: each from an empty cache. Of
        what is asked a third time every third request is enough.
        """
        if self.exact:
            await self.flush()
            self.cold = await self.ask_all_alone(cold=False)
            self.alone = await self.ask_all_alone(cold=False)
            for ask in self.asks[::3]:
                again = await self.ask_alone(ask, cold=False)
                self._same("alone", {ask.name: self.alone[ask.name]}, {ask.name: again})
        else:
            self.cold = self.alone = await self.ask_all_alone(cold=True)
            # the same requests over cached prefixes: how far answers move without any load
            for ask in self.asks[::3]:
                for _ in range(2):
                    answer = await self.ask_alone(ask, cold=False)
                self.warm_noise.add(ask.name, compare(self.alone[ask.name], answer))
        for ask in self.asks[:: max(1, len(self.asks) // 10)]:
            wrong = await self.ask_alone(spoil(ask, 1), cold=False)
            self.control.add(ask.name, compare(self.alone[ask.name], wrong))

    def _same(self, when: str, before: dict[str, Answer], after: dict[str, Answer]) -> int:
        """Whether answers at rest have not changed in any bit."""
        changed = [name for name in before if before[name].bits != after[name].bits]
        for name in changed:
            self.fail(
                "changed at rest",
                f"{when}: {name}: {before[name].tokens[:8]} became {after[name].tokens[:8]}, "
                f"cached {before[name].cached_tokens} and {after[name].cached_tokens}",
            )
        return len(changed)

    async def at_rest_again(self, when: str) -> None:
        """From an empty cache, at rest, the catalogue must give the bits that it gave at first.

        Exact: over cached prompts too, which leaves them cached for the load that follows.
        """
        if self.exact:
            await self.flush()
        self._same(when, self.cold, await self.ask_all_alone(cold=not self.exact))
        if self.exact:
            again = await self.ask_all_alone(cold=False)
            self._same(f"{when}, cached", self.alone, again)

    def judge(self, ask: Ask, answer: Answer, how: str, *, whole: bool) -> None:
        """Hold one answer under load against the one alone."""
        counts = self.counts
        counts.tokens += len(answer.tokens)
        counts.retractions += answer.retractions
        counts.retracted_answers += answer.retractions > 0
        if whole:
            counts.prompt_tokens += len(ask.input_ids)
            counts.cached_tokens += answer.cached_tokens
            if len(answer.tokens) != ask.max_new_tokens:
                self.fail(
                    "length",
                    f"{ask.name} {how}: {len(answer.tokens)} tokens of {ask.max_new_tokens}, "
                    f"finish {answer.finish}",
                )
        if any(math.isnan(logprob) for logprob in answer.logprobs):
            self.fail("nan", f"{ask.name} {how}: logprobs {answer.logprobs[:8]}")
        alone = self.alone[ask.name]
        found = compare(alone, answer)
        if self.exact and answer.tokens:
            if answer.retractions or answer.cached_tokens != alone.cached_tokens:
                counts.other_prefix += 1
            else:
                self._exactly(ask, found, how)
        self.tally.add(f"{ask.name} {how}, {answer.retractions} retractions", found)

    def _exactly(self, ask: Ask, found: Comparison, how: str) -> None:
        """Demand the same bits, and keep what tells where they were lost."""
        compared = self.by_ask.setdefault(ask.name, [0, 0])
        compared[0] += 1
        if found.same_bits:
            return
        compared[1] += 1
        moved = (i for i, shift in enumerate(found.shifts) if shift)
        self.first_moved[next(moved, len(found.shifts))] += 1
        place = found.difference.position if found.difference else "logprobs only"
        self.fail(
            "mismatch",
            f"{ask.name} {how}: differs from the answer alone at {place}, "
            f"largest shift before {max(found.shifts, default=0.0):.3g}",
        )

    async def _one(self, ask: Ask, how: str, rng: random.Random) -> None:
        """One request under load, in one of five manners."""
        counts = self.counts
        counts.sent += 1
        self._number += 1
        rid = f"load-{self._number}"
        stream = how in ("stream", "close stream") or (how == "abort" and rng.random() < 0.5)
        delay = rng.expovariate(2.0)
        sent_abort = False

        async def abort_later() -> None:
            nonlocal sent_abort
            await asyncio.sleep(delay)
            sent_abort = True
            assert self._session is not None
            async with self._session.post(self.base + "/abort_request", json={"rid": rid}) as reply:
                await reply.read()

        aborter = asyncio.create_task(abort_later()) if how == "abort" else None
        try:
            async with asyncio.timeout(delay if how == "close plain" else self.hang):
                chunks = rng.randint(1, 12) if how == "close stream" else None
                answer = await self._post(ask, stream=stream, rid=rid, chunks=chunks)
        except TimeoutError:
            if how == "close plain":
                counts.closed += 1
            else:
                counts.hangs += 1
                self.fail("hang", f"{ask.name} {how} (rid {rid}): no answer in {self.hang:g} s")
            return
        except (Lost, aiohttp.ClientError) as error:
            if sent_abort and "abort" in str(error).lower():
                counts.aborted += 1
                return
            counts.errors += 1
            self.fail("error", f"{ask.name} {how} (rid {rid}): {type(error).__name__} {error}")
            return
        finally:
            if aborter is not None:
                aborter.cancel()
                await asyncio.gather(aborter, return_exceptions=True)
        if answer is None:
            counts.closed += 1
            return
        aborted = answer.finish == "abort"
        if aborted and how != "abort":
            counts.errors += 1
            self.fail("error", f"{ask.name} {how} (rid {rid}): aborted by the server")
            return
        closed = how == "close stream" and answer.finish == ""
        counts.abort_too_late += how == "abort" and not aborted
        counts.aborted += aborted
        counts.closed += closed
        whole = not aborted and not closed
        counts.completed += whole
        counts.streamed += whole and stream
        self.judge(ask, answer, "stream" if stream else "plain", whole=whole)

    def spawn(self) -> None:
        """Start one request of the mix."""
        rng = random.Random(self.rng.random())
        (ask,) = rng.choices(self.asks, [ask.weight for ask in self.asks])
        (how,) = rng.choices(
            ("plain", "stream", "close stream", "close plain", "abort"), (48, 40, 4, 3, 5)
        )
        task = asyncio.create_task(self._one(ask, how, rng))
        self._tasks.add(task)
        self.in_flight += 1
        self.counts.max_in_flight = max(self.counts.max_in_flight, self.in_flight)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self.in_flight -= 1
        if not task.cancelled() and task.exception() is not None:
            self.fail("driver", repr(task.exception()))

    async def drain(self) -> None:
        """Start nothing, and wait for what runs; each request has its own ceiling."""
        while self._tasks:
            await asyncio.sleep(0.05)

    async def load(self, seconds: float, *, quiet_every: float = 60.0) -> None:
        """The mix, for `seconds`; at rest, flush, every `quiet_every` seconds."""
        end = time.monotonic() + seconds
        next_quiet = time.monotonic() + quiet_every
        next_busy_flush = time.monotonic() + 5
        while (now := time.monotonic()) < end and not self.examples["driver"]:
            if now >= next_quiet:
                await self.drain()
                if self.exact:
                    await self.at_rest_again("between loads")
                else:
                    await self.flush()
                next_quiet = time.monotonic() + quiet_every
                continue
            level = self.rng.choice(LEVELS)
            slot_end = min(end, now + self.rng.uniform(1.5, 8.0), next_quiet)
            while time.monotonic() < slot_end:
                # a burst starts within one turn of the loop, and the server sees all of it at once
                while self.in_flight < level:
                    self.spawn()
                if time.monotonic() > next_busy_flush and self.in_flight >= 64:
                    next_busy_flush = time.monotonic() + 15
                    await self._flush_under_load()
                await asyncio.sleep(0.02)

    async def _flush_under_load(self) -> None:
        status, text = await self.get("/flush_cache", timeout=self.hang)
        if status == 200 and self.in_flight >= 64:
            # legal only if the scheduler had nothing at that instant
            self.counts.flushes += 1
            print(f"a flush under load was not refused: {text[:80]!r}", flush=True)
        else:
            self.counts.refused_flushes += status != 200

    async def wait_idle(self) -> dict[str, Any]:
        """At rest: the scheduler's counters before and after a flush; all must come to 0.

        Before it too: a flush resets the allocator, and would hide a slot that was lost. Slots of
        the radix cache do not count as used.
        """
        await self.drain()
        found = {"before_flush": await self._counters_at_rest(SETTLE)}
        await self.flush()
        return {**found, "after_flush": await self._counters_at_rest(REST)}

    async def _counters_at_rest(self, seconds: float) -> dict[str, Any]:
        """The counters once they are all 0, or after `seconds`, which is a failure."""
        until = time.monotonic() + seconds
        while True:
            loads = await self.loads()
            keys = ("num_running_reqs", "num_waiting_reqs", "num_used_tokens")
            counters = {key: loads.get(key) for key in keys}
            if not any(counters.values()):
                return counters
            if time.monotonic() > until:
                self.fail("leak", f"at rest for {seconds:g} s: {counters}")
                return counters
            await asyncio.sleep(0.5)


def report(driver: Driver, extra: dict[str, Any]) -> dict[str, Any]:
    """Everything so far, as JSON."""
    return {
        **extra,
        "catalogue": len(driver.asks),
        "counts": vars(driver.counts),
        "answers": driver.tally.report(),
        "compared_and_not_same_by_request": driver.by_ask,
        "first_moved_logprob": dict(driver.first_moved.most_common(12)),
        "alone_over_cached_prefixes": driver.warm_noise.report(),
        "control_spoilt_prompts": driver.control.report(),
        "alone_tokens": {name: answer.tokens for name, answer in driver.cold.items()},
        "failures_by_kind": dict(driver.examples),
        "failures": driver.failures,
    }


def write_json(path: Path, value: object) -> None:
    """Whole or not at all: a run that is cut short keeps what it had."""
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(value, indent=1), encoding="utf-8")
    os.replace(temporary, path)


def grown(before: dict[str, Any], after: dict[str, Any]) -> dict[str, int | None]:
    """By how much the server's memory, files and processes grew."""
    keys = ("gpu_mib", "rss_mib", "open_files", "threads", "processes")
    return {
        key: None if before[key] is None or after[key] is None else after[key] - before[key]
        for key in keys
    }


async def drive(
    driver: Driver,
    options: argparse.Namespace,
    server: servers.Launched | None,
    extra: dict[str, Any],
) -> None:
    """The whole run against one healthy server; fills `extra`, writes the report as it goes."""
    path = Path(options.json)
    begin = time.monotonic()

    def say(what: str) -> None:
        c = driver.counts
        print(
            f"[{options.arm}] {time.monotonic() - begin:6.1f} s {what}: in flight "
            f"{driver.in_flight}, sent {c.sent}, completed {c.completed}, closed {c.closed}, "
            f"aborted {c.aborted}, tokens {c.tokens}, retractions {c.retractions}, other bits "
            f"{driver.tally.not_same_bits}, other token {driver.tally.num_differences}, "
            f"failures {sum(driver.examples.values())}",
            flush=True,
        )

    async def watch(what: str) -> None:
        while True:
            await asyncio.sleep(options.progress)
            with contextlib.suppress(Lost, TimeoutError, aiohttp.ClientError, ValueError):
                loads = await driver.loads()
                driver.counts.max_running = max(
                    driver.counts.max_running, int(loads.get("num_running_reqs") or 0)
                )
            say(what)
            write_json(path, report(driver, extra))
            if server is not None and server.process.poll() is not None:
                driver.fail("driver", f"the server exited with {server.process.returncode}")

    watcher = asyncio.create_task(watch("running"))
    try:
        say("asking the catalogue alone")
        await driver.prepare()
        extra["alone_s"] = round(time.monotonic() - begin, 1)
        # allocators and compilers reach their size before memory is read
        await driver.load(options.warm, quiet_every=options.warm)
        extra["idle_before"] = await driver.wait_idle()
        if driver.exact:
            await driver.at_rest_again("after the warm-up")
        await asyncio.sleep(options.settle)
        if server is not None:
            extra["memory_before"] = servers.measure_memory(server)
        say("load begins")
        loaded = time.monotonic()
        await driver.load(options.seconds, quiet_every=150.0 if driver.exact else 45.0)
        extra["loaded_s"] = round(time.monotonic() - loaded, 1)
        say("load ends")
        extra["idle_after"] = await driver.wait_idle()
        await asyncio.sleep(options.settle)
        if server is not None:
            extra["memory_after"] = servers.measure_memory(server)
            extra["memory_grown"] = grown(extra["memory_before"], extra["memory_after"])
        await driver.at_rest_again("after the load")
        say("done")
        extra["finished"] = True
    except (Lost, TimeoutError, aiohttp.ClientError, ServerFailed) as error:
        driver.fail("driver", f"{type(error).__name__} {error}")
    finally:
        watcher.cancel()
        if watcher.done() and not watcher.cancelled() and watcher.exception() is not None:
            driver.fail("driver", repr(watcher.exception()))


# resident memory and files may breathe: caches of Python and of the HTTP server, not the load's
RSS_SLACK_MIB, FILES_SLACK = 256, 8
# a segment of torch's allocator that a live block holds is 20 MiB; cuBLAS and Triton load lazily
GPU_SLACK_MIB = 64


def judge(directory: Path) -> dict[str, Any]:
    """The verdict over the arms' reports; `failures` is empty when the load passed."""
    arms: dict[str, Any] = {}
    failures: list[str] = []
    for name in ARMS:
        try:
            arms[name] = json.loads((directory / f"{name}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            failures.append(f"{name}: no report ({error})")
    stock = arms.get("stock")
    rows: dict[str, Any] = {}
    if stock is not None:
        bound = Bound(2 * stock["answers"]["shift_max"])
        rows["bound"] = {
            "shift": bound.shift,
            "gap": bound.gap,
            "why": Bound.__doc__,
            "stock_shift_max": stock["answers"]["shift_max"],
        }
    for name, arm in arms.items():
        counts, answers = arm["counts"], arm["answers"]
        row: dict[str, Any] = {
            "completed": counts["completed"],
            "max_in_flight": counts["max_in_flight"],
            "hangs": counts["hangs"],
            "errors": counts["errors"],
            "retractions": counts["retractions"],
            "answers_with_another_token": answers["answers_with_another_token"],
            "share": answers["answers_with_another_token"] / max(answers["answers"], 1),
            "shift_rms": answers["shift_rms"],
            "shift_max": answers["shift_max"],
            "memory_grown": arm.get("memory_grown"),
            "failures_by_kind": arm["failures_by_kind"],
            "mode": arm.get("mode"),
        }
        rows[name] = row
        if not arm.get("finished"):
            failures.append(f"{name}: the run did not finish")
        # stock's own failures are the yardstick, not ours
        if name == "stock":
            continue
        for kind, n in arm["failures_by_kind"].items():
            # where stock's own answers at rest are not repeatable, ours need not be
            excused = 0
            if stock is not None and name != "exact" and kind == "changed at rest":
                excused = 2 * stock["failures_by_kind"].get(kind, 0)
            if n > excused:
                failures.append(f"{name}: {kind} x {n}")
        if arm.get("mode") == "exact":
            row["compared_to_the_bit"] = answers["answers"] - counts["other_prefix"]
            if row["compared_to_the_bit"] < counts["other_prefix"]:
                failures.append(f"{name}: most answers found another prefix, and prove nothing")
        elif name == "exact":
            failures.append(f"exact: not run batch-invariant: {arm.get('fallback')}")
        if stock is None:
            failures.append(f"{name}: no stock arm to hold it against")
            continue
        theirs = stock["alone_tokens"]
        same = [name for name, tokens in arm["alone_tokens"].items() if tokens == theirs.get(name)]
        row["alone_answers_as_stock"] = f"{len(same)} of {len(theirs)}"
        if arm.get("mode") != "exact":
            row["outside_bound"] = outside(answers, bound)
            row["control_outside_bound"] = outside(arm["control_spoilt_prompts"], bound)
            if row["outside_bound"]:
                failures.append(f"{name}: {row['outside_bound']} tokens outside the bound")
            if not row["control_outside_bound"]:
                failures.append(f"{name}: the bound would admit spoilt prompts too")
            if answers["shift_rms"] > 2 * stock["answers"]["shift_rms"]:
                failures.append(f"{name}: RMS shift more than twice stock's")
            if not counts["retractions"]:
                failures.append(f"{name}: no retraction was seen")
        ours, base = arm.get("memory_grown") or {}, stock.get("memory_grown") or {}
        for key, slack in (
            ("gpu_mib", GPU_SLACK_MIB),
            ("rss_mib", RSS_SLACK_MIB),
            ("open_files", FILES_SLACK),
            ("processes", 0),
        ):
            if ours.get(key) is None:
                row.setdefault("not_measured", []).append(key)
            elif ours[key] > max(base.get(key) or 0, 0) + slack:
                failures.append(f"{name}: {key} grew by {ours[key]}, stock's by {base.get(key)}")
    return {"arms": rows, "failures": failures, "passed": not failures}


def start(
    options: argparse.Namespace, directory: Path
) -> tuple[servers.Launched, bool, dict[str, Any]]:
    """A healthy server for the arm, whether it is exact, and how it came to be.

    Raises:
        ServerFailed: it did not start, nor did its fallback.
    """
    arm = ARMS[options.arm]
    words = ["--model-path", options.model, *servers.COMMON, *_LOADED, *arm.words]
    words += shlex.split(options.server_words)
    facts: dict[str, Any] = {
        "words": words,
        "environment": arm.environment,
        "mode": "exact" if arm.exact else "within the bound",
    }
    try:
        server = _boot(options, options.arm, words, directory, arm.environment, arm.module, facts)
        return server, arm.exact, facts
    except ServerFailed as error:
        if not arm.exact:
            raise
        facts["fallback"] = str(error)
    # without the batch-invariant GEMMs nothing is equal to the bit; the load itself still runs
    facts["mode"] = "within the bound"
    facts["words"] = words = [word for word in words if word != "--enable-deterministic-inference"]
    name, module = f"{options.arm}-2", "sglang.launch_server"
    return _boot(options, name, words, directory, arm.environment, module, facts), False, facts


def _boot(
    options: argparse.Namespace,
    name: str,
    words: list[str],
    directory: Path,
    environment: dict[str, str],
    module: str,
    facts: dict[str, Any],
) -> servers.Launched:
    """Start and wait; whatever comes in between, SIGTERM included, leaves no server."""
    server = servers.launch(name, words, directory, environment=environment, module=module)
    try:
        facts["boot_s"] = round(server.wait_healthy(options.boot), 1)
    except BaseException as error:
        tail = server.tail(15)
        print(f"[{name}] {error!r}", *tail, sep="\n", flush=True)
        server.kill()
        if isinstance(error, ServerFailed):
            raise ServerFailed(f"{error}: {tail[-1] if tail else 'an empty log'}") from None
        raise
    return server


async def run(options: argparse.Namespace) -> int:
    """One arm; returns the exit code."""
    path = Path(options.json)
    path.parent.mkdir(parents=True, exist_ok=True)
    extra: dict[str, Any] = {"arm": options.arm, "machine": machine(), "seed": options.seed}
    extra.update(seconds=options.seconds, finished=False)
    print(machine_line(extra["machine"]), flush=True)
    server: servers.Launched | None = None
    exact = ARMS[options.arm].exact
    base = options.base
    try:
        if base:
            extra["mode"] = "exact" if exact else "within the bound"
        else:
            server, exact, facts = start(options, path.parent)
            extra.update(facts)
            print(*server.lines(" path: "), sep="\n", flush=True)
            extra["paths"] = server.lines(" path: ")
            base = server.base
        asks = make_catalogue(options.seed, options.longest)
        async with Driver(base, asks, exact=exact, seed=options.seed, hang=options.hang) as driver:
            await drive(driver, options, server, extra)
            if server is not None:
                extra["retractions_logged"] = len(
                    server.lines("KV cache pool is full. Retract", limit=10**6)
                )
                extra["log_errors"] = server.lines("Traceback", "CUDA error", "Error:", limit=12)
            write_json(path, report(driver, extra))
            for line in driver.failures:
                print(line, flush=True)
            return 1 if driver.failures or not extra["finished"] else 0
    except ServerFailed as error:
        write_json(path, {**extra, "error": str(error)})
        print(f"[{options.arm}] {error}", flush=True)
        return 1
    finally:
        if server is not None:
            server.kill()


def main() -> None:
    """Parse arguments; run one arm, or judge three."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--judge", metavar="DIRECTORY", help="the verdict over arms' reports")
    parser.add_argument("--arm", choices=ARMS, default="auto")
    parser.add_argument("--seconds", type=float, default=60.0, help="of load, after the warm-up")
    parser.add_argument("--warm", type=float, default=20.0, help="seconds of load before it counts")
    parser.add_argument("--settle", type=float, default=6.0, help="seconds before memory is read")
    parser.add_argument("--progress", type=float, default=10.0, help="seconds between lines")
    parser.add_argument("--json", default="load.json")
    parser.add_argument("--model", default=os.environ.get("NEXTN", "/tmp/nextn8"))
    parser.add_argument("--base", default="", help="drive this server and start none")
    parser.add_argument("--boot", type=float, default=280.0, help="seconds")
    parser.add_argument("--hang", type=float, default=HANG, help="seconds until one has hung")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--longest", type=int, default=None, help="tokens of a prompt")
    parser.add_argument("--server-words", default="", help="more of the command line, one string")
    options = parser.parse_args()
    if options.judge:
        verdict = judge(Path(options.judge))
        write_json(Path(options.judge) / "load-verdict.json", verdict)
        print(json.dumps(verdict, indent=1))
        sys.exit(0 if verdict["passed"] else 1)
    with ending_by_signal():
        sys.exit(asyncio.run(run(options)))


if __name__ == "__main__":
    main()
