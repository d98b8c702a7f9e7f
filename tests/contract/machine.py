"""A small model of a serving engine: requests, slots, pages, prefixes, and float64 rows.

Every operation runs the real backend over a `Scene` and compares each output with float64 attention
over the model's own rows. The model never reads the pool, and what it frees is poisoned at once, so
a row that is stale, missing, foreign or written to the wrong place shows at the step that does it.
Choices come from `pick`: hypothesis can shrink them, and a seeded generator can run thousands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from contract.scene import (
    Request,
    Scene,
    assert_within_budget,
    dequantise,
    ref_attention,
    torch_attention,
)

Pick = Callable[[int, int], int]
POISON = (0xFF, 0x7F, 0x7E)  # -NaN, NaN and 448 in e4m3
MAX_NEW = 20  # tokens of one extend: past a page of 16


@dataclass
class Live:
    """A running request: its row of the request pool and its slots in token order."""

    row: int
    slots: list[int] = field(default_factory=list)


class Machine:
    """The model and the backend, moved together.

    Args:
        scene: over a fresh pool; the machine poisons it.
        pick: `pick(low, high)` gives an integer of [low, high].
        graphs: batch sizes to capture for `replay`; none keeps decode eager.
    """

    def __init__(self, scene: Scene, pick: Pick, graphs: Sequence[int] = ()) -> None:
        self.scene, self.pick = scene, pick
        shape = scene.shape
        self.page = shape.page_size
        self.truth = torch.full(
            (shape.layers, shape.slots + self.page, shape.width),
            torch.nan,
            dtype=torch.float64,
            device=scene.device,
        )
        # page 0 holds the padding slot
        self.free_pages = list(range(1, shape.slots // self.page))
        self.references = dict.fromkeys(self.free_pages, 0)
        self.free_rows = list(range(shape.max_bs))
        self.live: list[Live] = []
        self.cached: list[list[int]] = []  # prefixes of whole pages that finished requests left
        self.steps = 0
        scene.poison([], POISON[0])
        self.graphs = {bs: scene.capture(bs) for bs in graphs}
        scene.poison([], POISON[0])

    # pages --------------------------------------------------------------------------------------

    def pages_of(self, slots: Sequence[int]) -> list[int]:
        return list(dict.fromkeys(slot // self.page for slot in slots))

    def room(self, live: Live | None, tokens: int) -> bool:
        """Whether `tokens` more fit into the pool and into a row of the request pool."""
        have = len(live.slots) if live else 0
        pages = -(-(have + tokens) // self.page) - -(-have // self.page)
        return pages <= len(self.free_pages) and have + tokens <= self.scene.shape.max_context

    def grow(self, live: Live, tokens: int) -> None:
        """Append slots, opening pages in the order that `pick` says."""
        for _ in range(tokens):
            if len(live.slots) % self.page == 0:
                page = self.free_pages.pop(self.pick(0, len(self.free_pages) - 1))
                self.references[page] += 1
                live.slots.append(page * self.page)
            else:
                live.slots.append(live.slots[-1] + 1)

    def release(self, slots: Sequence[int]) -> None:
        """Drop one reference to each page of `slots`; a page without any is poisoned and free."""
        for page in self.pages_of(slots):
            self.references[page] -= 1
            if self.references[page] == 0:
                self.free_pages.append(page)
                self.poison(range(page * self.page, (page + 1) * self.page))

    def poison(self, slots: Sequence[int] | range) -> None:
        index = torch.tensor(list(slots), device=self.scene.device)
        byte = POISON[self.steps % len(POISON)]
        for layer in range(self.scene.shape.layers):
            self.scene.bytes_of(layer)[index] = byte
            self.truth[layer, index] = torch.nan

    # forwards -----------------------------------------------------------------------------------

    def rand(self, *size: int) -> torch.Tensor:
        """Normal numbers that depend on the step alone, made where they are used."""
        generator = torch.Generator(self.scene.device).manual_seed(1000 + self.steps)
        return torch.randn(*size, generator=generator, device=self.scene.device)

    def forward(self, requests: list[Request], mode: str, graph: int = 0) -> None:
        """One step over all layers; the last `q_len` slots of each request are new."""
        scene, shape = self.scene, self.scene.shape
        n = sum(r.q_len for r in requests)
        new = self.rand(shape.layers, n, shape.width).to(shape.dtype)
        q = (self.rand(n, shape.heads, shape.width) * 2).to(shape.dtype)
        slots = torch.tensor(
            [s for r in requests for s in r.slots[len(r.slots) - r.q_len :]], device=scene.device
        )
        stored = dequantise(new.to(shape.kv_dtype))
        self.truth[:, slots] = stored.to(scene.device)
        if graph:
            outs = self.graphs[graph].replay(requests, q, new)
        else:
            batch = scene.batch(requests, mode)
            scene.plan(batch)
            outs = [
                scene.attend(batch, q, new[layer], layer=layer).view(n, shape.heads, shape.ckv)
                for layer in range(shape.layers)
            ]
        what = f"{mode}{f' graph {graph}' if graph else ''} {[len(r.slots) for r in requests]}"
        for layer, out in enumerate(outs):
            self.compare(f"step {self.steps} {what} layer {layer}", out, requests, q, layer)

    def compare(
        self, name: str, out: torch.Tensor, requests: list[Request], q: torch.Tensor, layer: int
    ) -> None:
        shape = self.scene.shape
        exact, plain, at = [], [], 0
        for request in requests:
            rows = self.truth[layer, torch.tensor(request.slots, device=self.scene.device)]
            part = q[at : at + request.q_len]
            kwargs = {"ckv": shape.ckv, "sm_scale": shape.sm_scale}
            exact.append(ref_attention(part, rows, **kwargs)[0])
            plain.append(torch_attention(part, rows, **kwargs))
            at += request.q_len
        assert torch.isfinite(out).all(), f"{name}: output is not finite"
        eps = torch.finfo(shape.dtype).eps
        assert_within_budget(name, out, torch.cat(exact), torch.cat(plain), eps=eps)

    # operations ---------------------------------------------------------------------------------

    def any_live(self) -> Live:
        return self.live[self.pick(0, len(self.live) - 1)]

    def begin(self, prefix: list[int], tokens: int) -> None:
        """A new request over a shared prefix of whole pages, prefilled in one extend."""
        live = Live(self.free_rows.pop(self.pick(0, len(self.free_rows) - 1)), list(prefix))
        for page in self.pages_of(prefix):
            self.references[page] += 1
        self.grow(live, tokens)
        self.live.append(live)
        self.forward([Request(live.slots, live.row, tokens)], "extend")

    def can_start(self) -> bool:
        return bool(self.free_rows) and self.room(None, MAX_NEW)

    def start(self) -> None:
        self.begin([], self.pick(1, MAX_NEW))

    def can_fork(self) -> bool:
        return self.can_start() and any(len(r.slots) >= self.page for r in self.live)

    def fork(self) -> None:
        """Share the whole pages of a running request."""
        donors = [r for r in self.live if len(r.slots) >= self.page]
        donor = donors[self.pick(0, len(donors) - 1)]
        pages = self.pick(1, len(donor.slots) // self.page)
        prefix = donor.slots[: pages * self.page]
        room = self.scene.shape.max_context - len(prefix)
        if room:
            self.begin(prefix, self.pick(1, min(MAX_NEW, room)))

    def can_reuse(self) -> bool:
        return self.can_start() and bool(self.cached)

    def reuse(self) -> None:
        """A radix-cache hit: a prefix that a finished request left."""
        prefix = self.cached[self.pick(0, len(self.cached) - 1)]
        room = self.scene.shape.max_context - len(prefix)
        if room:
            self.begin(prefix, self.pick(1, min(MAX_NEW, room)))

    def can_extend(self) -> bool:
        return any(self.room(r, 1) for r in self.live)

    def extend(self) -> None:
        """Chunked prefill: several requests over their cached prefixes in one batch."""
        chosen = []
        for live in self.live:
            tokens = self.pick(0, 7)
            if tokens and self.room(live, tokens):
                self.grow(live, tokens)
                chosen.append(Request(live.slots, live.row, tokens))
        if chosen:
            self.forward(chosen, "extend")

    def can_decode(self) -> bool:
        return any(self.room(r, 1) for r in self.live)

    def decoding(self, most: int) -> list[Request]:
        chosen: list[Request] = []
        for live in self.live:
            if len(chosen) < most and self.pick(0, 3) and self.room(live, 1):
                self.grow(live, 1)
                chosen.append(Request(live.slots, live.row, 1))
        return chosen

    def decode(self) -> None:
        chosen = self.decoding(len(self.live))
        if chosen:
            self.forward(chosen, "decode")

    def can_replay(self) -> bool:
        return bool(self.graphs) and self.can_decode()

    def replay(self) -> None:
        """Decode in the smallest captured graph that holds the batch; further lanes are padding."""
        chosen = self.decoding(max(self.graphs))
        if chosen:
            fits = min(bs for bs in self.graphs if bs >= len(chosen))
            self.forward(chosen, "decode", graph=fits)
            # the padded lanes wrote their row into slot 0
            self.truth[:, 0] = torch.nan

    def can_speculate(self) -> bool:
        return any(self.room(r, 4) for r in self.live)

    def speculate(self) -> None:
        """Four tokens at once, of which some are rejected and their slots written again later."""
        fitting = [r for r in self.live if self.room(r, 4)]
        live = fitting[self.pick(0, len(fitting) - 1)]
        before = len(live.slots)
        self.grow(live, 4)
        self.forward([Request(live.slots, live.row, 4)], "extend")
        keep = before + self.pick(1, 4)
        kept, dropped = live.slots[:keep], live.slots[keep:]
        gone = set(self.pages_of(dropped)) - set(self.pages_of(kept))
        self.release([s for s in dropped if s // self.page in gone])
        live.slots = kept

    def can_stop(self) -> bool:
        return bool(self.live)

    def finish(self) -> None:
        """Leave the whole pages to the cache."""
        live = self.any_live()
        whole = live.slots[: len(live.slots) // self.page * self.page]
        if whole:
            for page in self.pages_of(whole):
                self.references[page] += 1
            self.cached.append(whole)
        self.drop(live)

    def abort(self) -> None:
        """In mid-stream: nothing is kept."""
        self.drop(self.any_live())

    def drop(self, live: Live) -> None:
        self.live.remove(live)
        self.free_rows.append(live.row)
        self.release(live.slots)

    def can_evict(self) -> bool:
        return bool(self.cached)

    def evict(self) -> None:
        self.release(self.cached.pop(self.pick(0, len(self.cached) - 1)))

    def idle(self) -> None:
        """A step without requests, as an idle data-parallel rank runs it."""
        mode = ("idle", "decode", "extend")[self.pick(0, 2)]
        shape = self.scene.shape
        batch = self.scene.batch([], mode)
        self.scene.plan(batch)
        empty = torch.zeros(0, shape.heads, shape.width, dtype=shape.dtype)
        assert self.scene.attend(batch, empty).numel() == 0

    GUARDS = {  # noqa: RUF012  names of the methods above, never written to
        "start": "can_start",
        "fork": "can_fork",
        "reuse": "can_reuse",
        "extend": "can_extend",
        "decode": "can_decode",
        "replay": "can_replay",
        "speculate": "can_speculate",
        "finish": "can_stop",
        "abort": "can_stop",
        "evict": "can_evict",
        "idle": "",
    }

    def may(self, operation: str) -> bool:
        guard = self.GUARDS[operation]
        return not guard or getattr(self, guard)()

    def do(self, operation: str) -> None:
        """One operation, then the books."""
        self.steps += 1
        getattr(self, operation)()

    def check_pool(self) -> None:
        """Live rows hold what was written, freed rows their poison: nobody wrote elsewhere."""
        held = [s for r in self.live for s in r.slots] + [s for c in self.cached for s in c]
        index = torch.tensor(sorted(set(held)), dtype=torch.long, device=self.scene.device)
        dead = torch.tensor(
            [p * self.page + i for p in self.free_pages for i in range(self.page)],
            dtype=torch.long,
            device=self.scene.device,
        )
        poison = torch.tensor(POISON, dtype=torch.uint8, device=self.scene.device)
        for layer in range(self.scene.shape.layers):
            codes = self.scene.bytes_of(layer)
            rows = dequantise(codes[index].view(self.scene.pool.dtype))
            assert torch.equal(rows, self.truth[layer, index]), "a live row changed"
            assert torch.isin(codes[dead], poison).all(), "a free slot was written"
        references = dict.fromkeys(self.references, 0)
        for slots in [*(r.slots for r in self.live), *self.cached]:
            for page in self.pages_of(slots):
                references[page] += 1
        assert references == self.references, "the model lost a page"


# what a server does more often comes more often
WEIGHTS = {
    "start": 4,
    "fork": 3,
    "reuse": 3,
    "extend": 3,
    "decode": 6,
    "replay": 8,
    "speculate": 2,
    "finish": 2,
    "abort": 1,
    "evict": 1,
    "idle": 1,
}


def drive(machine: Machine, steps: int, check_every: int = 25) -> dict[str, int]:
    """Run `steps` operations chosen by the machine's own `pick`; how often each ran."""
    done = dict.fromkeys(WEIGHTS, 0)
    for step in range(steps):
        possible = [name for name in WEIGHTS for _ in range(WEIGHTS[name]) if machine.may(name)]
        name = possible[machine.pick(0, len(possible) - 1)]
        machine.do(name)
        done[name] += 1
        if step % check_every == 0:
            machine.check_pool()
    machine.check_pool()
    return done
