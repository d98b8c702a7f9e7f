"""Counters for SGLang's `/metrics`: steps, resident tokens and bytes, by phase and path.

SGLang runs prometheus_client in multiprocess mode, which exports every counter of its processes; so
a counter made here needs nothing else. Off unless the server runs with `--enable-metrics`. All
figures are host values that the step has anyway: nothing is read from the device.
"""

from __future__ import annotations

import functools
from typing import Any

# bytes per token, layer and value: FP8 read; cast also writes 2 and reads them again
_BYTES = {"native": 1, "fused": 1, "gather_cast": 1 + 2 + 2}


@functools.cache
def _counters() -> tuple[Any, Any, Any]:
    """(steps, tokens, bytes), once per process: prometheus_client refuses a name twice."""
    from prometheus_client import Counter

    labels = ["phase", "path"]
    return (
        Counter(
            "sglang_fp8mla:steps", "Attention plans, one per step and attention backend", labels
        ),
        Counter("sglang_fp8mla:kv_tokens", "KV tokens of the planned batches", labels),
        Counter(
            "sglang_fp8mla:kv_bytes",
            "KV bytes that the planned batches move, all layers; shared prefixes count per request",
            labels,
        ),
    )


class StepCounters:
    """Counts the steps of one attention backend.

    Args:
        values_per_token: KV values of a token over all layers, num_layers * (ckv + kpe).
    """

    def __init__(self, values_per_token: int) -> None:
        self._values_per_token = values_per_token
        self._steps, self._tokens, self._bytes = _counters()

    def count(self, phase: str, path: str, tokens: int) -> None:
        """One planned step over `tokens` KV tokens, shared prefixes counted per request."""
        self._steps.labels(phase, path).inc()
        self._tokens.labels(phase, path).inc(tokens)
        self._bytes.labels(phase, path).inc(tokens * self._values_per_token * _BYTES[path])
