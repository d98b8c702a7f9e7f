"""Times device work: captured in a CUDA graph as the server runs it, with a cold cache, in medians.

On the CPU it times the call itself, for tests of the machinery only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Times:
    """Microseconds of one call: median, 20th and 80th percentile."""

    p50: float
    p20: float
    p80: float

    @staticmethod
    def of(samples: list[float], per: int = 1) -> Times:
        ordered = sorted(samples)

        def at(q: float) -> float:
            return ordered[min(len(ordered) - 1, int(q * len(ordered)))] / per

        return Times(at(0.5), at(0.2), at(0.8))


class Timer:
    """Times functions on one device.

    Args:
        device: where the work runs.
        repeat: timed replays per function.
        warmup_ms: replays before, until the clocks have settled.
    """

    def __init__(self, device: torch.device, repeat: int = 20, warmup_ms: float = 20.0) -> None:
        self.device, self.repeat, self.warmup_ms = device, repeat, warmup_ms
        self._flush: torch.Tensor | None = None
        if device.type == "cuda":
            # several times the largest L2 (H100/H200: 50 MB, B200: 126 MB)
            self._flush = torch.empty(512 << 20, dtype=torch.uint8, device=device)

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """A replay of `function` as a CUDA graph; the function itself on the CPU."""
        if self.device.type != "cuda":
            return function
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        # what is compiled or allocated at first use must not fall into the capture
        with torch.cuda.stream(stream):
            for _ in range(2):
                function()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            function()
        return graph.replay

    def measure(self, replay: Callable[[], None], per: int = 1) -> Times:
        """Times of a replay, divided by `per` layers; the L2 cache is flushed before each."""
        if self._flush is None:
            samples = []
            for _ in range(self.repeat):
                begin = time.perf_counter()
                replay()
                samples.append((time.perf_counter() - begin) * 1e6)
            return Times.of(samples, per)
        begin = time.perf_counter()
        while (time.perf_counter() - begin) * 1e3 < self.warmup_ms:
            replay()
            torch.cuda.synchronize(self.device)
        events = []
        for _ in range(self.repeat):
            self._flush.fill_(0)
            start, end = _event(), _event()
            start.record()
            replay()
            end.record()
            events.append((start, end))
        torch.cuda.synchronize(self.device)
        return Times.of([start.elapsed_time(end) * 1e3 for start, end in events], per)


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def copy_bandwidth(timer: Timer) -> float:
    """Bytes per second, read plus written, of a plain copy: the best of two kernels."""
    on_gpu = timer.device.type == "cuda"
    source = torch.zeros((1 << 31) if on_gpu else (1 << 24), dtype=torch.uint8, device=timer.device)
    target = torch.empty_like(source)
    wide = source.view(torch.int32), target.view(torch.int32)

    def add() -> None:
        torch.add(wide[0], 1, out=wide[1])

    def copy() -> None:
        target.copy_(source)

    best = min(timer.measure(timer.capture(f)).p50 for f in (add, copy))
    return 2 * source.numel() / best * 1e6
