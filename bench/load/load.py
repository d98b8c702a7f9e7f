"""Minutes of mixed load on a real server, every answer held against the same request's alone.

    python -m bench.serve.make_nextn /tmp/nextn8 --layers 8
    python -m bench.load.load --arm exact|auto|stock --seconds 420 --model /tmp/nextn8 --json F.json
    python -m bench.load.load --judge DIRECTORY      # holds exact.json, auto.json, stock.json

Load is a seeded mix: 1 to 480 requests at once, prompts of 1 to 8000 tokens, shared prefixes,
streaming and not, clients that close in mid-answer, `/abort_request`, `/flush_cache` at rest (must
work) and under load (SGLang refuses most; not the exact arm), bursts and lulls. The three arms:

`auto`: our backend as it chooses itself, radix cache, chunked prefill, a small pool, retractions.
Nothing is batch-invariant there, SGLang's GEMMs included, so logprobs may move within twice the
largest shift of the `stock` arm.
`stock`: the same load on stock `flashinfer`: the yardstick, and what "nothing is lost that stock
keeps" is held against.
`exact`: our fused decode with SGLANG_FP8MLA_BATCH_INVARIANT=1 over SGLang's batch-invariant GEMMs
(`bench.load.deterministic`). Tokens and logprobs must be equal to the last bit. FlashInfer's MLA
prefill is not batch-invariant, so prefill is kept still: one request a prefill batch, a pool that
never overflows, and prompts that are in the radix cache before the load starts, so that each
request computes its last prompt token and then decodes, alone or among hundreds. That token has two
rows of KV, the cache's and the request's own, which round differently; when a request moves to the
cache's depends on what else runs, so SGLang's overlap of scheduling is off (`bench.load.invariance`
shows it), and nothing is flushed under load, which would refill the cache in another order. An
answer that found another prefix, or was retracted, is counted, and not compared to the bit.

At the end: no request hangs, no KV slot is in use, the catalogue asked alone gives the bits it gave
at the start, and GPU memory, resident memory and open files are what they were after the warm-up.
Results are written as they come; exit 1 when something failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from bench.load import servers
from bench.load.answers import (
    Answer,
    Ask,
    Comparison,
    Tally,
    compare,
    make_catalogue,
    outside,
    parse,
    spoil,
)
from sglang_fp8mla.machine import machine, machine_line
from sglang_fp8mla.serving import Deadline, ServerFailed, call, ending_by_signal

SEED = 1
# requests in flight while a slot of the load lasts; bursts start all of them at once
LEVELS = (1, 4, 16, 64, 128, 256, 400, 480)
# seconds: a queue of 480 requests empties in well under a minute; allocators and compilers reach
# their size before memory is read; what a client closed is noticed at the server's next look
HANG, WARM, IDLE, SETTLE, PROGRESS = 150.0, 20.0, 40.0, 6.0, 10.0
# errors after which the load ends: nobody is there
MAX_ERRORS = 1000
# seconds of load between flushes at rest; the exact arm then asks its whole catalogue alone
QUIET_EVERY, QUIET_EVERY_EXACT = 45.0, 150.0
MANNERS = {"plain": 48, "stream": 40, "close stream": 4, "close plain": 3, "abort": 5}
COUNTS = (
    *("sent", "completed", "streamed", "closed", "aborted", "abort_too_late", "hangs", "errors"),
    *("tokens", "prompt_tokens", "cached_tokens", "retractions", "retracted_answers"),
    *("other_prefix", "flushes", "refused_flushes", "max_in_flight", "max_running"),
)
# growth beyond stock's: caches of Python and of the HTTP server breathe; a segment of torch's
# allocator that a live block holds is 20 MiB, and cuBLAS and Triton load lazily
SLACK = {"gpu_mib": 64, "rss_mib": 256, "open_files": 8, "processes": 0}

_LOADED = (
    *("--load-format", "auto", "--cuda-graph-max-bs-decode", "64"),
    *("--max-running-requests", "256", "--chunked-prefill-size", "2048"),
)
# the catalogue's prompts, shared prefixes once, take 47000 slots; almost nothing is set aside for
# answers. That alone retracted nothing in ten minutes on an H200: SGLang is made to, every so many
# forwards
_SMALL = ("--max-total-tokens", "40960", "--schedule-conservativeness", "0.05")
_RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "200"}


@dataclass(frozen=True)
class Arm:
    """How one server is started, and whether its answers must be equal to the bit."""

    port: int
    words: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    module: str = "sglang.launch_server"
    exact: bool = False

    def command_line(self, model: str) -> tuple[str, ...]:
        """All words of the server's, but for the port."""
        return ("--model-path", model, *servers.COMMON, *_LOADED, *self.words)


ARMS = {
    "auto": Arm(12000, (*servers.OURS, *_SMALL), _RETRACT),
    "stock": Arm(13000, (*servers.STOCK, *_SMALL), _RETRACT),
    "exact": Arm(
        14000,
        (
            *(*servers.OURS, "--max-total-tokens", "262144"),
            *("--enable-deterministic-inference", "--prefill-max-requests", "1"),
            "--disable-overlap-schedule",
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


class Driver:
    """Asks one server, alone and under load, keeps count, and writes its report to `path`."""

    def __init__(
        self, base: str, asks: list[Ask], path: Path, facts: dict[str, Any], *, exact: bool
    ) -> None:
        self.base = base
        self.asks = asks
        self.path = path
        self.facts = facts
        self.exact = exact
        self.rng = random.Random(SEED)
        self.counts = Counter(dict.fromkeys(COUNTS, 0))
        self.alone: dict[str, Answer] = {}
        self.cold: dict[str, Answer] = {}
        self.tally, self.warm_noise, self.control = Tally(), Tally(), Tally()
        # of the answers that must be equal to the bit: how many a request, how many were not, and
        # at which token the first logprob moved
        self.by_ask: dict[str, list[int]] = {}
        self.first_moved: Counter[int] = Counter()
        self.failures: list[str] = []
        self.failures_by_kind: Counter[str] = Counter()
        self.begin = time.monotonic()
        self._number = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._session: aiohttp.ClientSession

    def fail(self, kind: str, text: str) -> None:
        """Remember a failure; of each kind the first few in words, all in number."""
        self.failures_by_kind[kind] += 1
        if self.failures_by_kind[kind] <= 5:
            self.failures.append(f"{kind}: {text}")
            print(f"FAILED {kind}: {text}", flush=True)

    def say(self, what: str) -> None:
        """One line, and the report so far."""
        counts = ", ".join(f"{name} {count}" for name, count in self.counts.items() if count)
        seconds, failed = time.monotonic() - self.begin, self.failures_by_kind.total()
        print(f"{seconds:6.1f} s {what}: {counts}; failures {failed}", flush=True)
        report = {
            **self.facts,
            "catalogue": len(self.asks),
            "counts": self.counts,
            "answers": self.tally.report(),
            "compared_and_not_same_by_request": self.by_ask,
            "first_moved_logprob": dict(self.first_moved.most_common(12)),
            "alone_over_cached_prefixes": self.warm_noise.report(),
            "control_spoilt_prompts": self.control.report(),
            "alone_tokens": {name: answer.tokens for name, answer in self.cold.items()},
            "failures_by_kind": self.failures_by_kind,
            "failures": self.failures,
        }
        servers.write_json(self.path, report)

    # --- requests ------------------------------------------------------------------------------

    async def _post(self, body: dict[str, Any], chunks: float = math.inf) -> Answer:
        """One request; the client closes the connection after so many `chunks` of a stream.

        Raises:
            ServerFailed: an HTTP error, or something that is no answer.
            aiohttp.ClientError: the connection broke.
        """
        last, seen, done = b"", 0, False
        async with self._session.post(self.base + "/generate", json=body) as response:
            if response.status != 200:
                raise ServerFailed(f"HTTP {response.status} {(await response.text())[:200]}")
            if not body["stream"]:
                last, done = await response.read(), True
            while not done and seen < chunks:
                line = await response.content.readline()
                if not line:
                    raise ServerFailed("the stream broke off")
                done = line.startswith(b"data: [DONE]")
                if line.startswith(b"data:") and not done:
                    last, seen = line[5:], seen + 1
            if not done:
                response.close()
        try:
            return parse(json.loads(last))
        except (ValueError, TypeError, LookupError) as error:
            raise ServerFailed(f"no answer but {last[:200]!r} ({error!r})") from None

    async def flush(self) -> None:
        """Empty the radix cache at rest."""
        await asyncio.to_thread(servers.flush, self.base)
        self.counts["flushes"] += 1

    async def ask_alone(self, ask: Ask, *, cold: bool = False) -> Answer:
        """One request on a server at rest, with the likeliest tokens; `cold` flushes before.

        Raises:
            ServerFailed: no whole answer.
        """
        if cold:
            await self.flush()
        self._number += 1
        body = ask.body(stream=False, rid=f"alone-{self._number}", top_logprobs_num=5)
        async with asyncio.timeout(HANG):
            answer = await self._post(body)
        if len(answer.tokens) != ask.max_new_tokens:
            raise ServerFailed(f"{ask.name} alone: {answer}")
        return answer

    async def ask_all_alone(self, *, cold: bool) -> dict[str, Answer]:
        """The catalogue, one after another."""
        return {ask.name: await self.ask_alone(ask, cold=cold) for ask in self.asks}

    async def prepare(self) -> None:
        """Get the answers alone that load is held against, and show what wrong keys look like.

        Exact: the catalogue in order from an empty cache, then again with every prompt cached; that
        second pass is the reference. Else: each from an empty cache.
        """
        await self.flush()
        self.cold = self.alone = await self.ask_all_alone(cold=not self.exact)
        if self.exact:
            self.alone = await self.ask_all_alone(cold=False)
        else:
            # over cached prefixes: how far answers move without any load
            for ask in self.asks[::3]:
                await self.ask_alone(ask)
                again = await self.ask_alone(ask)
                self.warm_noise.add(ask.name, compare(self.alone[ask.name], again))
        for ask in self.asks[::6]:
            wrong = await self.ask_alone(spoil(ask, 1))
            self.control.add(ask.name, compare(self.alone[ask.name], wrong))

    async def ask_again(self, when: str) -> None:
        """From an empty cache, at rest, the catalogue must give the bits that it gave at first.

        Exact: over cached prompts too, which leaves them cached for the load that follows.
        """
        await self.flush()
        self._hold(when, self.cold, await self.ask_all_alone(cold=not self.exact))
        if self.exact:
            self._hold(f"{when}, cached", self.alone, await self.ask_all_alone(cold=False))

    def _hold(self, when: str, before: dict[str, Answer], after: dict[str, Answer]) -> None:
        for name, was in before.items():
            now = after[name]
            if was.bits != now.bits:
                self.fail(
                    "changed at rest",
                    f"{when}: {name}: {was.tokens[:8]} became {now.tokens[:8]}, "
                    f"cached {was.cached_tokens} and {now.cached_tokens}",
                )

    # --- load ----------------------------------------------------------------------------------

    def judge(self, ask: Ask, answer: Answer, how: str, *, whole: bool) -> None:
        """Hold one answer under load against the one alone."""
        counts = self.counts
        counts["tokens"] += len(answer.tokens)
        counts["retractions"] += answer.retractions
        counts["retracted_answers"] += answer.retractions > 0
        if whole:
            counts["prompt_tokens"] += len(ask.input_ids)
            counts["cached_tokens"] += answer.cached_tokens
            if len(answer.tokens) != ask.max_new_tokens:
                found = f"{len(answer.tokens)} tokens of {ask.max_new_tokens}, {answer.finish}"
                self.fail("length", f"{ask.name} {how}: {found}")
        if any(map(math.isnan, answer.logprobs)):
            self.fail("nan", f"{ask.name} {how}: logprobs {answer.logprobs[:8]}")
        alone = self.alone[ask.name]
        compared = compare(alone, answer)
        if self.exact and answer.tokens:
            if answer.retractions or answer.cached_tokens != alone.cached_tokens:
                counts["other_prefix"] += 1
            else:
                self._demand_bits(ask, compared, how)
        self.tally.add(f"{ask.name} {how}, {answer.retractions} retractions", compared)

    def _demand_bits(self, ask: Ask, found: Comparison, how: str) -> None:
        """Demand the same bits, and keep what tells where they were lost."""
        compared = self.by_ask.setdefault(ask.name, [0, 0])
        compared[0] += 1
        if found.same_bits:
            return
        compared[1] += 1
        shifts = found.shifts
        self.first_moved[next((i for i, s in enumerate(shifts) if s), len(shifts))] += 1
        place = "logprobs only" if found.needed is None else f"token {len(shifts)}"
        self.fail(
            "mismatch",
            f"{ask.name} {how}: differs from the answer alone at {place}, "
            f"largest shift before {max(shifts, default=0.0):.3g}",
        )

    async def _one(self, ask: Ask, how: str, rng: random.Random) -> None:
        """One request under load, in one of `MANNERS`."""
        counts = self.counts
        self._number += 1
        rid = f"load-{self._number}"
        stream = how in ("stream", "close stream") or (how == "abort" and rng.random() < 0.5)
        delay = rng.expovariate(2.0)
        chunks = rng.randint(1, 12) if how == "close stream" else math.inf

        async def abort() -> None:
            await asyncio.sleep(delay)
            async with self._session.post(self.base + "/abort_request", json={"rid": rid}):
                pass

        aborter = asyncio.create_task(abort()) if how == "abort" else None
        try:
            async with asyncio.timeout(delay if how == "close plain" else HANG):
                answer = await self._post(ask.body(stream=stream, rid=rid), chunks)
            if answer.finish == "abort" and how != "abort":
                raise ServerFailed("aborted by the server")
        except TimeoutError:
            if how == "close plain":
                counts["closed"] += 1
            else:
                counts["hangs"] += 1
                self.fail("hang", f"{ask.name} {how} ({rid}): no answer in {HANG:g} s")
            return
        except (ServerFailed, aiohttp.ClientError) as error:
            # SGLang may answer what was aborted with an HTTP error that says so
            if how == "abort" and "abort" in str(error).lower():
                counts["aborted"] += 1
            else:
                counts["errors"] += 1
                self.fail("error", f"{ask.name} {how} ({rid}): {type(error).__name__} {error}")
            return
        finally:
            if aborter is not None:
                aborter.cancel()
                await asyncio.gather(aborter, return_exceptions=True)
        aborted = answer.finish == "abort"
        closed = how == "close stream" and answer.finish == ""
        whole = not aborted and not closed
        counts["aborted"] += aborted
        counts["abort_too_late"] += how == "abort" and whole
        counts["closed"] += closed
        counts["completed"] += whole
        counts["streamed"] += whole and stream
        self.judge(ask, answer, "stream" if stream else "plain", whole=whole)

    def _spawn(self) -> None:
        """Start one request of the mix."""
        rng = random.Random(self.rng.random())
        (ask,) = rng.choices(self.asks, [ask.weight for ask in self.asks])
        (how,) = rng.choices(list(MANNERS), list(MANNERS.values()))
        task = asyncio.create_task(self._one(ask, how, rng))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        self.counts["sent"] += 1
        self.counts["max_in_flight"] = max(self.counts["max_in_flight"], len(self._tasks))

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.fail("driver", repr(task.exception()))

    async def load(self, seconds: float) -> None:
        """The mix, for `seconds`, and at its end until the last has its answer."""
        quiet_every = QUIET_EVERY_EXACT if self.exact else QUIET_EVERY
        now = time.monotonic()
        end, next_quiet, next_busy_flush = now + seconds, now + quiet_every, now + 5
        while now < end:
            if now >= next_quiet:
                await self._drain()
                await (self.ask_again("between loads") if self.exact else self.flush())
                next_quiet = time.monotonic() + quiet_every
            level = self.rng.choice(LEVELS)
            slot_end = min(end, now + self.rng.uniform(1.5, 8.0), next_quiet)
            while (now := time.monotonic()) < slot_end:
                # a burst starts within one turn of the loop, and the server sees all of it at once
                while len(self._tasks) < level:
                    self._spawn()
                if not self.exact and now > next_busy_flush and len(self._tasks) >= 64:
                    next_busy_flush = now + 15
                    await self._flush_under_load()
                await asyncio.sleep(0.02)
                if self.counts["errors"] >= MAX_ERRORS:
                    slot_end = end = now
        await self._drain()

    async def _drain(self) -> None:
        while self._tasks:  # each has its own ceiling
            await asyncio.wait(self._tasks)

    async def _flush_under_load(self) -> None:
        try:
            await asyncio.to_thread(call, self.base, "/flush_cache", timeout=HANG)
            self.counts["flushes"] += 1
        except ServerFailed as error:
            if "HTTP 400" not in str(error):
                raise
            self.counts["refused_flushes"] += 1

    async def rest(self, measure: Callable[[], dict[str, int]], when: str) -> dict[str, int]:
        """At rest: no slot is in use, a flush works; what `measure` says then."""
        counters = await asyncio.to_thread(servers.wait_idle, self.base, IDLE)
        self.facts[f"idle_{when}"] = counters
        if any(counters.values()):
            self.fail("leak", f"at rest for {IDLE:g} s: {counters}")
        await self.flush()
        await asyncio.sleep(SETTLE)
        self.facts[f"memory_{when}"] = memory = measure()
        return memory

    # --- the whole run -------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS)
            with contextlib.suppress(ServerFailed):  # the requests will tell
                loads = await asyncio.to_thread(servers.read_loads, self.base)
                running = max(self.counts["max_running"], loads["num_running_reqs"])
                self.counts["max_running"] = running
            self.say("running")

    async def run(self, seconds: float, measure: Callable[[], dict[str, int]]) -> None:
        """The whole run against one healthy server; one bad answer does not end it."""
        # a kept connection can be closed by the server just as a request goes out on it; one line
        # of a stream holds the whole answer so far
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None),
            read_bufsize=2**22,
        )
        watcher = asyncio.create_task(self._watch())
        try:
            await self.prepare()
            await self.load(WARM)
            before = await self.rest(measure, "before")
            if self.exact:
                await self.ask_again("after the warm-up")
            self.say("load begins")
            begin = time.monotonic()
            await self.load(seconds)
            self.facts["loaded_s"] = round(time.monotonic() - begin, 1)
            after = await self.rest(measure, "after")
            self.facts["memory_grown"] = {key: after[key] - before[key] for key in before}
            await self.ask_again("after the load")
            self.facts["finished"] = True
        except (ServerFailed, TimeoutError, aiohttp.ClientError) as error:
            self.fail("driver", f"{type(error).__name__} {error}")
        finally:
            for task in [watcher, *self._tasks]:
                task.cancel()
            await self._session.close()
            self.say("done")


def judge(directory: Path) -> dict[str, Any]:
    """The verdict over the arms' reports; `failures` is empty when the load passed."""
    failures, reports = [], {}
    for name in ARMS:
        path = directory / f"{name}.json"
        reports[name] = json.loads(path.read_text()) if path.exists() else {}
        if not reports[name].get("finished"):
            failures.append(f"{name}: did not finish")
            del reports[name]
    if "stock" not in reports:
        return {"arms": {}, "failures": failures, "passed": False}
    stock = reports["stock"]
    # the house's budget: twice what the reference loses
    bound = 2 * stock["answers"]["shift_max"]
    rows: dict[str, Any] = {"bound": {"shift": bound}}
    for name, arm in reports.items():
        counts, answers = arm["counts"], arm["answers"]
        row = rows[name] = {
            **{key: counts[key] for key in ("completed", "max_in_flight", "hangs", "errors")},
            **{key: answers[key] for key in ("answers_with_another_token", "shift_rms")},
            "shift_max": answers["shift_max"],
            "retractions": counts["retractions"],
            **{key: arm[key] for key in ("memory_grown", "failures_by_kind", "mode")},
        }
        # stock's own failures are the yardstick, not ours
        if name == "stock":
            continue
        found = [f"{kind} x {count}" for kind, count in arm["failures_by_kind"].items()]
        same = [arm["alone_tokens"][ask] == tokens for ask, tokens in stock["alone_tokens"].items()]
        row["alone_answers_as_stock"] = f"{sum(same)} of {len(same)}"
        if arm["mode"] == "exact":
            row["compared_to_the_bit"] = answers["answers"] - counts["other_prefix"]
            if row["compared_to_the_bit"] < counts["other_prefix"]:
                found.append("most answers found another prefix, and prove nothing")
        else:
            row["outside_bound"] = outside(answers, bound)
            row["control_outside_bound"] = outside(arm["control_spoilt_prompts"], bound)
            if row["outside_bound"]:
                found.append(f"{row['outside_bound']} tokens outside the bound")
            if not row["control_outside_bound"]:
                found.append("the bound would admit spoilt prompts too")
            if answers["shift_rms"] > 2 * stock["answers"]["shift_rms"]:
                found.append("RMS shift more than twice stock's")
            if not counts["retractions"]:
                found.append("no retraction was seen")
        if not arm["memory_before"]["gpu_mib"]:
            found.append("nvidia-smi does not say what GPU memory it holds")
        for key, slack in SLACK.items():
            ours, theirs = arm["memory_grown"][key], stock["memory_grown"][key]
            if ours > max(theirs, 0) + slack:
                found.append(f"{key} grew by {ours}, stock's by {theirs}")
        failures += [f"{name}: {text}" for text in found]
    return {"arms": rows, "failures": failures, "passed": not failures}


def run(name: str, seconds: float, model: str, path: Path) -> int:
    """One arm; returns the exit code."""
    arm = ARMS[name]
    words = arm.command_line(model)
    facts: dict[str, Any] = {
        **{"arm": name, "machine": machine(), "seed": SEED, "seconds": seconds},
        **{"finished": False, "words": words, "environment": arm.environment},
        "mode": "exact" if arm.exact else "within the bound",
    }
    print(machine_line(facts["machine"]), flush=True)
    log_path = path.with_suffix(".log")
    server = servers.launch(log_path, arm.port, *words, module=arm.module, **arm.environment)
    driver = Driver(server.base, make_catalogue(SEED), path, facts, exact=arm.exact)
    try:
        facts["boot_s"] = round(server.wait_healthy(servers.BOOT, Deadline()), 1)
        facts["paths"] = [line for line in server.read_log().splitlines() if " path: " in line]
        asyncio.run(driver.run(seconds, partial(servers.measure_memory, server)))
    except ServerFailed as error:
        driver.fail("driver", str(error))
        driver.say("not started")
    finally:
        server.stop()
    return 1 if driver.failures else 0


def main() -> None:
    """Parse arguments; run one arm, or judge three."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--judge", type=Path, metavar="DIRECTORY", help="verdict over the reports")
    what.add_argument("--arm", choices=ARMS)
    parser.add_argument("--seconds", type=float, default=60.0, help="of load, after the warm-up")
    parser.add_argument("--json", type=Path, default=Path("load.json"))
    parser.add_argument("--model", default="/tmp/nextn8")
    options = parser.parse_args()
    if options.judge:
        verdict = judge(options.judge)
        servers.write_json(options.judge / "load-verdict.json", verdict)
        print(json.dumps(verdict, indent=1))
        sys.exit(0 if verdict["passed"] else 1)
    with ending_by_signal():
        sys.exit(run(options.arm, options.seconds, options.model, options.json))


if __name__ == "__main__":
    main()
