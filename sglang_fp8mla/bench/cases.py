"""What is measured: frozen shapes named after real models and their split, each with its bytes.

Standard library only.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import InvalidArgument

CKV = 512
KPE = 64
DIM = CKV + KPE
# the pool of the report that started this project: GLM-5 on 8 GPUs
POOL = 495_552
# slots come in such runs, so that page-64 peers read the same rows; also the longest page we serve
PAGE = 64


@dataclass(frozen=True)
class Case:
    """One shape. `shared`: prefix tokens that all requests have in common, part of `kv_len`."""

    name: str
    num_heads: int
    bs: int
    kv_len: int
    pool: int = POOL
    q_len: int = 1
    shared: int = 0
    about: str = ""

    def __post_init__(self) -> None:
        whole = self.kv_len % PAGE == 0 and self.shared % PAGE == 0 and self.pool % PAGE == 0
        sane = min(self.num_heads, self.bs, self.kv_len, self.q_len) > 0
        if not whole or not sane or not 0 <= self.shared <= self.kv_len:
            raise InvalidArgument(
                f"bench: case {self.name} must have positive sizes, with kv_len, shared and pool "
                f"multiples of {PAGE}, got {self}"
            )
        if self.live + PAGE > self.pool:
            raise InvalidArgument(
                f"bench: case {self.name} must fit its pool of {self.pool:,} slots, got "
                f"{self.live:,} live rows and a page of padding"
            )

    @property
    def causal(self) -> bool:
        return self.q_len > 1

    @property
    def phase(self) -> str:
        return "extend" if self.causal else "decode"

    @property
    def nnz(self) -> int:
        """Rows that the batch references, shared ones as often as they are referenced."""
        return self.bs * self.kv_len

    @property
    def live(self) -> int:
        """Distinct rows that the batch references."""
        return self.shared + self.bs * (self.kv_len - self.shared)

    @property
    def floor_bytes(self) -> int:
        """What any FP8 decode must read: each live row once."""
        return self.live * DIM

    def bytes_moved(self, path: str) -> int:
        """KV traffic of one layer, in bytes: rows read and written, and the int32 slot list."""
        read_fp8, read_16, slot = self.nnz * DIM, self.nnz * DIM * 2, 4
        if path == "stock":
            return self.pool * DIM * 3 + read_16
        if path == "gather_cast":
            return self.live * (DIM * 3 + slot) + read_16
        if path == "bf16":
            return read_16
        return read_fp8


# (name, heads on one GPU, about)
_MODELS = (
    ("glm-5-tp8", 8, "GLM-5 and Kimi-K2 on 8 GPUs: 64 heads / 8"),
    ("deepseek-v3-tp8", 16, "DeepSeek-V3/R1 on 8 GPUs: 128 heads / 8"),
    ("deepseek-v3-dp", 128, "DeepSeek-V3/R1 with DP attention: all 128 heads on each GPU"),
)
_DECODE = ((1, 1024), (1, 4096), (1, 32_768), (1, 131_072), (8, 8192), (32, 4096), (128, 3072))


def _model_cases() -> list[Case]:
    cases = [
        Case(f"{model}-{bs}x{kv_len}", heads, bs, kv_len, about=about)
        for model, heads, about in _MODELS
        for bs, kv_len in _DECODE
    ]
    lite = "DeepSeek-V2-Lite on one GPU: 16 heads, a small pool"
    cases += [
        Case("v2-lite-tp1-1x1024", 16, 1, 1024, pool=65_536, about=lite),
        Case("v2-lite-tp1-16x2048", 16, 16, 2048, pool=65_536, about=lite),
        Case("kimi-k2-tp8-64x4096", 8, 64, 4096, about="Kimi-K2 on 8 GPUs: 64 heads / 8"),
    ]
    return cases


_EDGES = [
    # where casting live rows cannot win, or wins least: listed with the wins
    Case("tiny-pool-1x64", 16, 1, 64, pool=1024, about="a pool that stock casts in no time"),
    Case("dense-pool-120x4096", 16, 120, 4096, about="99 % of the pool is live"),
    # the same live rows in pools of different size: time must not follow the pool
    Case(
        "pool-131k-8x4096", 16, 8, 4096, pool=131_072, about="cost follows live rows, not the pool"
    ),
    Case("pool-2m-8x4096", 16, 8, 4096, pool=2_097_152, about="the same rows in a 16x larger pool"),
    Case("shared-32x8192", 16, 32, 8192, shared=7936, about="32 requests share a prefix"),
]

_EXTEND = [
    Case(
        f"{model}-extend-{bs}x{q_len}+{prefix}", heads, bs, prefix + q_len, q_len=q_len, about=about
    )
    for model, heads, about in _MODELS
    for bs, q_len, prefix in ((1, 64, 4096), (1, 2048, 6144), (8, 512, 4096), (8, 4, 4096))
    if (prefix + q_len) % PAGE == 0
] + [
    Case(
        f"{model}-verify-{bs}x4",
        heads,
        bs,
        4096,
        q_len=4,
        about="speculative verify, 4 tokens each",
    )
    for model, heads, about in _MODELS
    for bs in (1, 8, 32)
]

CASES = {case.name: case for case in (*_model_cases(), *_EDGES, *_EXTEND)}

GROUPS = {
    "default": (
        "glm-5-tp8-1x1024",
        "deepseek-v3-tp8-1x4096",
        "deepseek-v3-tp8-1x131072",
        "deepseek-v3-tp8-32x4096",
        "deepseek-v3-dp-32x4096",
        "kimi-k2-tp8-64x4096",
        "v2-lite-tp1-1x1024",
        "tiny-pool-1x64",
        "dense-pool-120x4096",
        "shared-32x8192",
    ),
    "models": tuple(case.name for case in _model_cases()),
    "edges": tuple(case.name for case in _EDGES),
    "extend": tuple(case.name for case in _EXTEND),
    "all": tuple(CASES),
}


def select(names: Sequence[str]) -> list[Case]:
    """The cases that names, groups and glob patterns stand for, each once, in that order.

    Raises:
        InvalidArgument: a name stands for none.
    """
    chosen: dict[str, Case] = {}
    for name in names:
        found = GROUPS.get(name) or fnmatch.filter(CASES, name)
        if not found:
            near = difflib.get_close_matches(name, [*CASES, *GROUPS], n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise InvalidArgument(
                f"bench: --case must be a case, a group ({', '.join(GROUPS)}) or a pattern, see "
                f"--list, got {name!r}{hint}"
            )
        chosen.update({found_name: CASES[found_name] for found_name in found})
    return list(chosen.values())


SWEEPS = ("length", "batch", "pool")


def sweep(kind: str, *, num_heads: int, bs: int, kv_len: int, pool: int) -> list[Case]:
    """Cases in which one size grows by powers of two and the others stay.

    Args:
        kind: `length` (64 tokens to the pool), `batch` (1 to the pool), `pool` (twice the live
            rows to 2 M slots).
    """
    cases = []
    for exponent in range(6, 22):
        size = 1 << exponent
        if kind == "length" and bs * size + PAGE <= pool and size <= 262_144:
            cases.append(Case(f"length-{bs}x{size}", num_heads, bs, size, pool=pool))
        elif kind == "batch" and (size >> 6) * kv_len + PAGE <= pool and size >> 6 <= 512:
            cases.append(
                Case(f"batch-{size >> 6}x{kv_len}", num_heads, size >> 6, kv_len, pool=pool)
            )
        elif kind == "pool" and size >= 2 * bs * kv_len:
            cases.append(Case(f"pool-{size}", num_heads, bs, kv_len, pool=size))
    if kind not in SWEEPS:
        raise InvalidArgument(f"bench: --sweep must be one of {', '.join(SWEEPS)}, got {kind!r}")
    return cases
