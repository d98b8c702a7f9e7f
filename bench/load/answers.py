"""The requests that load draws from, and what makes an answer under load equal to one alone.

Standard library only. Greedy decoding picks the largest logit, and rounding depends on the batch:
where the server is not batch-invariant, a token may change where two logits lie close. What may
change, and by how much, is taken from stock SGLang under the same load, see `Bound`.
"""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class Ask:
    """One distinct request; `weight` is how often load draws it, relative to the others."""

    name: str
    input_ids: tuple[int, ...]
    max_new_tokens: int
    weight: float = 1.0


def make_catalogue(seed: int, limit: int | None = None) -> list[Ask]:
    """The distinct requests, in the order in which they are asked alone; one seed, one catalogue.

    Short prompts around powers of two, long ones around the prefill chunk, documents shared by
    random tails, and short prompts with long answers, which make a small pool overflow in decode.

    Args:
        seed: of the token ids and answer lengths.
        limit: tokens; longer prompts are left out (a small pool, a fake server).
    """
    rng = random.Random(seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(2, VOCAB) for _ in range(count))

    asks = [Ask(f"short-{n}", tokens(n), rng.choice(_NEW), 2.0) for n in _SHORT]
    for number, length in enumerate(_DOCUMENTS):
        document = tokens(length)
        asks += [
            Ask(f"document-{number}+{tail}", document + tokens(tail), rng.choice(_NEW), 1.0)
            for tail in _TAILS
        ]
    asks += [Ask(f"long-{n}", tokens(n), rng.choice(_NEW), 0.4) for n in _LONG]
    asks += [Ask(f"grow-{n}", tokens(n), 192, 1.5) for n in (4, 9, 20, 40, 70, 100)]
    return [ask for ask in asks if limit is None or len(ask.input_ids) <= limit]


def spoil(ask: Ask, seed: int) -> Ask:
    """`ask` with one prompt token in 16 (at least one) replaced: what wrong keys look like."""
    rng = random.Random(seed)
    ids = list(ask.input_ids)
    for place in rng.sample(range(len(ids)), max(1, len(ids) // 16)):
        ids[place] = (ids[place] + rng.randrange(1, VOCAB - 2)) % VOCAB
    return Ask(f"{ask.name}*", tuple(ids), ask.max_new_tokens, 0.0)


@dataclass(frozen=True)
class Answer:
    """What /generate returned: natural-log probabilities, one per token.

    `top` holds (logprob, token) of the likeliest tokens by position; empty when not asked for.
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
    reason = info.get("finish_reason") or {}
    return Answer(
        tokens=tuple(int(token) for token in body["output_ids"]),
        logprobs=tuple(_number(entry[0]) for entry in info.get("output_token_logprobs") or ()),
        top=tuple(
            tuple((_number(entry[0]), int(entry[1])) for entry in position)
            for position in info.get("output_top_logprobs") or ()
        ),
        cached_tokens=int(info.get("cached_tokens") or 0),
        retractions=int(info.get("num_retractions") or 0),
        finish=str(reason.get("type", "") if isinstance(reason, dict) else reason),
    )


@dataclass(frozen=True)
class Difference:
    """The first token that differs from the answer alone.

    Attributes:
        gap: how far the token given lay below the likeliest one, alone; a lower bound when it was
            not among `top`.
        shift: how much its own logprob moved; None when it was not among `top`.
    """

    position: int
    gap: float
    shift: float | None


@dataclass(frozen=True)
class Comparison:
    """`shifts`: |logprob under load - logprob alone| of each token up to the first difference."""

    shifts: tuple[float, ...]
    difference: Difference | None
    same_bits: bool


def compare(alone: Answer, got: Answer) -> Comparison:
    """`got`, whole or cut short by an abort, against the answer alone (with `top`).

    What follows the first difference continues another text and is not compared.
    """
    n = min(len(alone.tokens), len(got.tokens))
    same_bits = got.tokens == alone.tokens[: len(got.tokens)]
    same_bits = same_bits and got.logprobs == alone.logprobs[: len(got.logprobs)]
    # streams that were cut may hold a token without its logprob
    known = min(n, len(alone.logprobs), len(got.logprobs))
    shifts: list[float] = []
    for i in range(n):
        if alone.tokens[i] != got.tokens[i]:
            return Comparison(tuple(shifts), _difference(alone, got, i), False)
        if i < known:
            shifts.append(abs(alone.logprobs[i] - got.logprobs[i]))
    return Comparison(tuple(shifts), None, same_bits)


def _difference(alone: Answer, got: Answer, i: int) -> Difference:
    top = alone.top[i] if i < len(alone.top) else ()
    best = alone.logprobs[i] if i < len(alone.logprobs) else math.nan
    before = next((logprob for logprob, token in top if token == got.tokens[i]), None)
    if before is None:
        floor = min((logprob for logprob, _ in top), default=math.nan)
        return Difference(i, best - floor, None)
    after = got.logprobs[i] if i < len(got.logprobs) else math.nan
    return Difference(i, best - before, abs(after - before))


@dataclass(frozen=True)
class Bound:
    """How far an answer under load may lie from the answer alone, where nothing is invariant.

    `shift` is twice the largest shift of any token of stock SGLang under the same load: the house's
    budget, twice what the reference loses. Two logits that each move by at most `shift` change
    places only if they were at most `gap` = 2 * shift apart. A token of which `top` says nothing
    passes on its gap alone.
    """

    shift: float

    @property
    def gap(self) -> float:
        return 2 * self.shift

    def holds(self, difference: Difference) -> bool:
        """NaN never holds."""
        close = difference.gap <= self.gap
        return close and (difference.shift is None or difference.shift <= self.shift)


@dataclass
class Tally:
    """Sums over many comparisons, and the extremes that a bound is held against."""

    keep: int = 400
    answers: int = 0
    tokens: int = 0
    not_same_bits: int = 0
    nan: int = 0
    sum_of_squares: float = 0.0
    # the largest shifts, and the differences that need the largest bound
    shifts: list[float] = field(default_factory=list)
    differences: list[tuple[float, int, str, Difference]] = field(default_factory=list)
    num_differences: int = 0

    def add(self, name: str, found: Comparison) -> None:
        """Count one answer; `name` says which request, and how it was asked."""
        self.answers += 1
        self.not_same_bits += not found.same_bits
        for shift in found.shifts:
            self.tokens += 1
            if math.isnan(shift):
                self.nan += 1
                continue
            self.sum_of_squares += shift * shift
            self._push(self.shifts, shift)
        if found.difference is not None:
            self.num_differences += 1
            moved = found.difference.shift
            need = max(found.difference.gap / 2, 0.0 if moved is None else moved)
            if math.isnan(found.difference.gap) or (moved is not None and math.isnan(moved)):
                need = math.inf
            # the running number keeps the heap from comparing names
            self._push(self.differences, (need, self.num_differences, name, found.difference))

    def _push(self, heap: list[Any], item: Any) -> None:
        if len(heap) < self.keep:
            heapq.heappush(heap, item)
        else:
            heapq.heappushpop(heap, item)

    def report(self) -> dict[str, Any]:
        """JSON, largest first; `shift_needed` is the bound that would admit the difference."""
        shifts = sorted(self.shifts, reverse=True)
        worst = sorted(self.differences, reverse=True)
        return {
            "answers": self.answers,
            "tokens_compared": self.tokens,
            "answers_not_same_bits": self.not_same_bits,
            "answers_with_another_token": self.num_differences,
            "nan_logprobs": self.nan,
            "shift_rms": math.sqrt(self.sum_of_squares / max(self.tokens - self.nan, 1)),
            "shift_max": shifts[0] if shifts else 0.0,
            "largest_shifts": shifts,
            "shift_needed": [need for need, *_ in worst],
            "worst_differences": [
                {"request": name, "position": d.position, "gap": d.gap, "shift": d.shift}
                for _, _, name, d in worst[:40]
            ],
        }


def outside(report: dict[str, Any], bound: Bound) -> int:
    """Shifts and differences of a `Tally.report` that `bound` does not admit, NaN included."""
    beyond = [value for value in report["largest_shifts"] if not value <= bound.shift]
    needed = [value for value in report["shift_needed"] if not value <= bound.shift]
    return len(beyond) + len(needed) + int(report["nan_logprobs"])
