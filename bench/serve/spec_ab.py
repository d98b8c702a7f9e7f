"""Speculative and parallel servers beside stock's: whole answers, accepted length, ms per step.

    python -m bench.serve.make_nextn /tmp/nextn
    python -m bench.serve.spec_ab --tool ~/p/tools/serve_ab.py SET|NAME=WORDS ...

SET is a name of `arms.SETS`; the checkpoint is looked for in $NEXTN, /tmp/nextn by default.
Boots and takes turns as `bench.serve_overlap` does, arms as `serve_ab.py` reads them; measures
other things: every token of every request, drafts accepted per verify, and milliseconds per token
and per target forward. The first arm of each group is what the others of the group are compared
with; a group is the part of the name before a dot (`tp2.stock`, `tp2.exact`). Rows go to
$OUT/spec.json, and to $OUT/NAME.json as they are measured. Exit 1 when an arm is lost, or when one
whose name ends in `.exact` differs in a token where stock repeats its own; other arms say how many
tokens agree before the first that does not. A group of `arms.REFUSED` may
end with an error if all its arms end with the same.

Some flags of an arm ask for more than requests: with `--enable-memory-saver` the server sleeps and
wakes before each run, its weights and graphs too where `--enable-weights-cpu-backup` stands; with
`--hicache-ratio` other prompts push a run's own out of the device's pool first, and `cached` says
how many tokens came back from where; with `--lora-paths` every second request has the adapter, and
`without_adapter` says how many tokens are the same without; a decode server of
`--disaggregation-mode` gets names for its requests, since its first tokens are a hash of them.

Each workload runs twice on a server, and `repeats` says how many tokens came again. Without DP
attention SGLang 0.5.23 sends a batch of token ids to the scheduler as one message. With it the
requests go one by one, round robin, so which of them share a forward (and the GEMMs' shapes, and
the rounding) is a matter of microseconds: there only the workloads of one request are bound to
repeat.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from http.client import HTTPException
from typing import Any

from bench import serve_overlap
from bench.serve.arms import REFUSED, SETS, expand

# (requests, prompt tokens, new tokens)
WORKLOADS = ((1, 64, 96), (1, 4096, 32), (4, 1024, 64), (3, 4096, 32))


def in_out(name: str) -> str:
    return os.path.join(os.environ.get("OUT", "."), name)


def make_prompts(bs: int, length: int) -> list[list[int]]:
    """As serve_ab.py's, but of different lengths in one batch."""
    return [[(7 * i + 13 * j) % 31000 + 5 for i in range(length - 37 * j)] for j in range(bs)]


# more than the 16,384 tokens of a pool that is to lose what it holds
EVICTING = ((2, 8000), (2, 7900))
# SGLang's words of the process that fell, without rank and time
_ERROR = re.compile(r"^(?:\[rank\d+\]: )?([A-Z]\w*(?:Error|Exception): .+)", re.MULTILINE)


def generate(
    tool: Any, prompts: list[list[int]], new: int, **more: object
) -> tuple[float, list[dict[str, Any]]]:
    body = {
        "input_ids": prompts,
        "sampling_params": {"temperature": 0, "max_new_tokens": new, "ignore_eos": True},
        **more,
    }
    begin = time.perf_counter()
    # seconds, after a minute of compiling at worst: an arm that hangs holds the others up
    answers = json.loads(tool.call("/generate", body, timeout=100))
    return time.perf_counter() - begin, answers


def extras(words: list[str], bs: int, key: str) -> dict[str, object]:
    """What the flags of an arm ask of a request's body."""
    if "--lora-paths" in words:
        return {"lora_path": [None if j % 2 else "adapter" for j in range(bs)]}
    if "--disaggregation-mode" in words:
        # the address that SGLang's own warm-up gives: without one 0.5.23 falls
        rooms = list(range(bs))
        return {
            "rid": [f"{key}-{j}" for j in rooms],
            **{"bootstrap_host": "2.2.2.2", "bootstrap_room": rooms},
        }
    return {}


def disturb(tool: Any, words: list[str]) -> None:
    """What the flags of an arm ask for before a run, whose rows must survive it."""
    if "--enable-memory-saver" in words:
        all_of_it = "--enable-weights-cpu-backup" in words
        for call in ("release", "resume"):
            tags = {} if all_of_it else {"tags": ["kv_cache"]}
            tool.call(f"/{call}_memory_occupation", tags)
    if "--hicache-ratio" in words:
        for bs, length in EVICTING:
            others = [
                [(11 * i + 17 * j + length) % 31000 + 5 for i in range(length)] for j in range(bs)
            ]
            generate(tool, others, 1)


def find_error(name: str) -> str:
    """The last exception in an arm's log, or nothing."""
    try:
        with open(in_out(f"{name}.log"), errors="replace") as log:
            found = _ERROR.findall(log.read())
    except OSError:
        return ""
    return str(found[-1])[:400] if found else ""


def measure(tool: Any, name: str, words: list[str], options: Any) -> dict[str, Any]:
    """One arm: boot, warm up, measure, stop."""
    begin = time.time()
    server = tool.boot(name, words, options)
    row: dict[str, Any] = {"arm": name}
    try:
        if ended := serve_overlap.wait_healthy(tool, server, options.boot):
            why = find_error(name) if server.poll() is not None else ""
            return {**row, "error": ended, "why": why}
        row["boot_s"] = round(time.time() - begin, 1)
        for bs, length, new in WORKLOADS:
            key = f"{bs}x{length}"
            prompts, more = make_prompts(bs, length), extras(words, bs, key)
            generate(tool, prompts, new, **more)
            first, _ = generate(tool, prompts, 1, **more)
            disturb(tool, words)
            whole, answers = generate(tool, prompts, new, **more)
            disturb(tool, words)
            _, again = generate(tool, prompts, new, **more)
            info = [answer["meta_info"] for answer in answers]
            verifies = [i.get("spec_verify_ct") or 0 for i in info]
            forwards = max(verifies) or new - 1
            ids = [answer["output_ids"] for answer in answers]
            row[key] = {
                "ms_per_token": round((whole - first) / (new - 1) * 1e3, 3),
                "ms_per_step": round((whole - first) / forwards * 1e3, 3),
                "accept_length": round(sum((new - 1) / v for v in verifies if v) / bs, 3),
                "repeats": common_tokens(ids, [answer["output_ids"] for answer in again])[0],
                "cached": count_cached(info),
                "ids": ids,
            }
            if "lora_path" in more:
                _, plain = generate(tool, prompts, new)
                same = common_tokens(ids, [answer["output_ids"] for answer in plain])[0]
                row[key]["without_adapter"] = same
            # a run that is cut short keeps what it measured
            with open(in_out(f"{name}.json"), "w") as file:
                json.dump(row, file)
        return row
    except (OSError, HTTPException) as problem:  # it died, or will never answer
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(20)
        return {**row, "error": repr(problem)[:300], "why": find_error(name)}
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        time.sleep(2)


def count_cached(info: list[dict[str, Any]]) -> dict[str, int]:
    """Prompt tokens that were not computed, by where they lay."""
    counts: dict[str, int] = {}
    for one in info:
        for where, tokens in (one.get("cached_tokens_details") or {}).items():
            if isinstance(tokens, int):
                counts[where] = counts.get(where, 0) + tokens
    return counts


def common_tokens(mine: list[list[int]], theirs: list[list[int]]) -> tuple[int, int]:
    """How many tokens agree, each request counted up to its first difference; and of how many."""
    agreed = 0
    for a, b in zip(mine, theirs, strict=True):
        agreed += next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), len(a))
    return agreed, sum(map(len, mine))


def compare(rows: list[dict[str, Any]]) -> bool:
    """Print a line per arm and workload; whether all arms live and the exact ones are exact."""
    good = True
    single = next((row for row in rows if row["arm"] == "one.stock" and "error" not in row), None)
    for row in rows:
        group = row["arm"].partition(".")[0]
        base = next(r for r in rows if r["arm"].partition(".")[0] == group)
        if "error" in row:
            why = row.get("why", "")
            alike = bool(why) and all(
                r.get("why") == why for r in rows if r["arm"].partition(".")[0] == group
            )
            ended = "ended as all of its group: " if alike else f"{row['error']}: "
            print(f"{row['arm']:<16} {ended}{why}")
            good &= alike and group in REFUSED
            continue
        for bs, length, _ in WORKLOADS:
            key = f"{bs}x{length}"
            mine = row[key]
            agreed, total = common_tokens(mine["ids"], base[key]["ids"]) if key in base else (0, 1)
            alone = ""
            if single is not None:
                alone = f", {common_tokens(mine['ids'], single[key]['ids'])[0]} as one GPU"
            if any(mine["cached"].values()):
                alone += f", cached {mine['cached']}"
            if "without_adapter" in mine:
                alone += f", {mine['without_adapter']} without the adapter"
            # where stock differs from itself, nobody can be equal to it
            stable = key in base and base[key]["repeats"] == total
            if row["arm"].endswith(".exact"):
                good &= agreed == total or (key in base and not stable)
            print(
                f"{row['arm']:<16} {key:>7} {mine['ms_per_step']:>8.3f} ms/step "
                f"{mine['ms_per_token']:>8.3f} ms/token  accepted {mine['accept_length']:.3f}  "
                f"{agreed}/{total} tokens as {base['arm']}, {mine['repeats']} again" + alone
            )
    return good


def main() -> None:
    """Run serve_overlap with our measurement, then compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    # below the ephemeral ports, of which another arm's connection may hold any
    defaults = {"tool": None, "pool": "131072", "port": "12000", "out": "spec.json"}
    for option, default in {**defaults, "model": "", "boot": "300", "without": ""}.items():
        parser.add_argument(f"--{option}", default=default, required=default is None)
    parser.add_argument("arms", nargs="+", metavar="SET|NAME=WORDS", help=", ".join(SETS))
    options = vars(parser.parse_args())
    try:
        arms = expand(options.pop("arms"), os.environ.get("NEXTN", "/tmp/nextn"))
    except KeyError as unknown:
        parser.error(f"SET must be one of {', '.join(SETS)}, got {unknown}")
    sys.argv[1:] = [f"--{option}={value}" for option, value in options.items()] + arms

    load_tool = serve_overlap.load_tool

    def load(path: str, port: int) -> Any:
        tool = load_tool(path, port)
        tool.measure = lambda name, words, options: measure(tool, name, words, options)
        return tool

    serve_overlap.load_tool = load
    serve_overlap.main()
    with open(in_out(options["out"])) as result:
        rows = json.load(result)["rows"]
    sys.exit(0 if compare(rows) else 1)


if __name__ == "__main__":
    main()
