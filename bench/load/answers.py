"""The requests that load draws from, and how an answer under load is held against one alone.

Standard library only. Greedy decoding picks the largest logit, and rounding depends on the batch:
where the server is not batch-invariant, a token may change where two logits lie close.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from heapq import nlargest
from typing import Any

VOCAB = 32000
# tokens; a request with a chunked prefill size of 2048 crosses none, one, or several chunks
CHUNK = 2048
_EDGES = tuple(n for power in (16, 32, 64, 128, 256, 512) for n in (power - 1, power, power + 1))
_SHORT = (1, 2, 3, 5, 8, *_EDGES, 48, 90, 200, 300, 400, 640, 800)
_LONG = (1200, 1800, CHUNK - 1, CHUNK, CHUNK + 1, 3000, 2 * CHUNK, 6001, 8000)
_DOCUMENTS = (1000, 2000, 3000, 4000)
_TAILS = (1, 2, 7, 31, 64, 150)
_NEW = (8, 13, 16, 24, 32, 48, 64)
# how many of the largest shifts and of the worst differences are kept, and so counted as outside
KEEP = 400


@dataclass(frozen=True)
class Ask:
    """One distinct request; `weight` is how often load draws it, relative to the others."""

    name: str
    input_ids: tuple[int, ...]
    max_new_tokens: int
    weight: float = 1.0

    def body(self, **more: Any) -> dict[str, Any]:
        """For /generate: greedy, with the logprob of each token."""
        params = {"temperature": 0, "max_new_tokens": self.max_new_tokens, "ignore_eos": True}
        ids = list(self.input_ids)
        return {"input_ids": ids, "sampling_params": params, "return_logprob": True, **more}


def make_catalogue(seed: int) -> list[Ask]:
    """The distinct requests, in the order in which they are asked alone; one seed, one catalogue.

    Short prompts around powers of two, long ones around the prefill chunk, documents shared by
    random tails, and short prompts with long answers, which fill a small pool in decode.
    """
    rng = random.Random(seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(2, VOCAB) for _ in range(count))

    asks = [Ask(f"short-{n}", tokens(n), rng.choice(_NEW), 2.0) for n in _SHORT]
    for number, length in enumerate(_DOCUMENTS):
        document = tokens(length)
        asks += [
            Ask(f"document-{number}+{tail}", document + tokens(tail), rng.choice(_NEW))
            for tail in _TAILS
        ]
    asks += [Ask(f"long-{n}", tokens(n), rng.choice(_NEW), 0.4) for n in _LONG]
    return asks + [Ask(f"grow-{n}", tokens(n), 192, 1.5) for n in (4, 9, 20, 40, 70, 100)]


def spoil(ask: Ask, seed: int) -> Ask:
    """`ask` with one prompt token in 16 (at least one) replaced: what wrong keys look like."""
    rng = random.Random(seed)
    ids = list(ask.input_ids)
    for place in rng.sample(range(len(ids)), max(1, len(ids) // 16)):
        ids[place] = (ids[place] + rng.randrange(1, VOCAB - 2)) % VOCAB
    return Ask(f"{ask.name}*", tuple(ids), ask.max_new_tokens)


@dataclass(frozen=True)
class Answer:
    """What /generate returned: natural-log probabilities, one per token.

    `top` holds (logprob, token) of the likeliest tokens by position; empty when not asked for.
    `finish` is empty while a stream runs.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    top: tuple[tuple[tuple[float, int], ...], ...] = ()
    cached_tokens: int = 0
    retractions: int = 0
    finish: str = ""

    @property
    def bits(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """What must be equal where everything is batch-invariant."""
        return self.tokens, self.logprobs


def _number(value: Any) -> float:
    # JSON has no NaN: the server writes null for it
    return math.nan if value is None else float(value)


def parse(body: dict[str, Any]) -> Answer:
    """Read one object of /generate's answer, whole or the last of a stream.

    Raises:
        KeyError, TypeError, ValueError: it is not such an object.
    """
    info = body["meta_info"]
    logprobs = tuple(_number(entry[0]) for entry in info["output_token_logprobs"] or ())
    return Answer(
        # a stream that was cut may hold a token without its logprob
        tokens=tuple(int(token) for token in body["output_ids"][: len(logprobs)]),
        logprobs=logprobs[: len(body["output_ids"])],
        top=tuple(
            tuple((_number(entry[0]), int(entry[1])) for entry in position)
            for position in info.get("output_top_logprobs") or ()
        ),
        cached_tokens=int(info.get("cached_tokens") or 0),
        retractions=int(info.get("num_retractions") or 0),
        finish=str((info.get("finish_reason") or {}).get("type", "")),
    )


@dataclass(frozen=True)
class Comparison:
    """An answer against the same request's alone.

    Attributes:
        shifts: |logprob - logprob alone| of each token before the first that differs; what follows
            continues another text.
        needed: the bound that would admit that first token, NaN as infinity; None when none
            differs.
    """

    shifts: tuple[float, ...]
    needed: float | None
    same_bits: bool


def compare(alone: Answer, got: Answer) -> Comparison:
    """`got`, whole or cut short by an abort, against the answer alone (with `top`)."""
    shifts: list[float] = []
    for i, (before, after) in enumerate(zip(alone.tokens, got.tokens)):
        if before != after:
            return Comparison(tuple(shifts), _needed(alone, got, i), False)
        shifts.append(abs(alone.logprobs[i] - got.logprobs[i]))
    # NaN is not 0
    return Comparison(tuple(shifts), None, not any(shifts))


def _needed(alone: Answer, got: Answer, i: int) -> float:
    """The shift that explains another token at `i`.

    Two logits that each move by at most `shift` change places only if they lay within 2 * shift;
    and the one given moved by what its logprob says. One that was not among `top` lay at least as
    low as they, and may pass on that alone.
    """
    top = {token: logprob for logprob, token in alone.top[i]}
    before = top.get(got.tokens[i])
    lowest = min(top.values()) if before is None else before
    moved = 0.0 if before is None else abs(got.logprobs[i] - before)
    half_gap = (alone.logprobs[i] - lowest) / 2
    return math.inf if math.isnan(half_gap + moved) else max(half_gap, moved)


@dataclass
class Tally:
    """Sums over many comparisons, and the extremes that a bound is held against."""

    answers: int = 0
    tokens: int = 0
    not_same_bits: int = 0
    other_token: int = 0
    nan: int = 0
    sum_of_squares: float = 0.0
    largest_shifts: list[float] = field(default_factory=list)
    # needed shift, request, position
    worst_differences: list[tuple[float, str, int]] = field(default_factory=list)

    def add(self, name: str, found: Comparison) -> None:
        """Count one answer; `name` says which request, and how it was asked."""
        shifts = [shift for shift in found.shifts if not math.isnan(shift)]
        self.answers += 1
        self.tokens += len(found.shifts)
        self.not_same_bits += not found.same_bits
        self.nan += len(found.shifts) - len(shifts)
        self.sum_of_squares += sum(shift * shift for shift in shifts)
        self.largest_shifts = nlargest(KEEP, self.largest_shifts + shifts)
        if found.needed is not None:
            self.other_token += 1
            worst = (found.needed, name, len(found.shifts))
            self.worst_differences = nlargest(KEEP, [*self.worst_differences, worst])

    def report(self) -> dict[str, Any]:
        """JSON, largest first."""
        return {
            "answers": self.answers,
            "tokens_compared": self.tokens,
            "answers_not_same_bits": self.not_same_bits,
            "answers_with_another_token": self.other_token,
            "nan_logprobs": self.nan,
            "shift_rms": math.sqrt(self.sum_of_squares / max(self.tokens - self.nan, 1)),
            "shift_max": max(self.largest_shifts, default=0.0),
            "largest_shifts": self.largest_shifts,
            "worst_differences": self.worst_differences,
        }


def outside(report: dict[str, Any], bound: float) -> int:
    """Shifts and other tokens of a `Tally.report` that `bound` does not admit, NaN included."""
    needed: list[float] = [
        *report["largest_shifts"],
        *(worst[0] for worst in report["worst_differences"]),
    ]
    return sum(value > bound for value in needed) + int(report["nan_logprobs"])
