"""Does this kernel run here, and is it right? One `Check` per path and phase.

A capability is what a kernel did on this device with a right answer, not what a signature accepts:
each check runs the real kernel on a small random batch, among poisoned rows, against the float64
reference. A missing compiler, a failed JIT build or a wrong answer is a finding, not a crash. A
probe touches its own device only: no collective, nothing shared with other ranks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from .checks import Check

DECODE = "decode"
EXTEND = "extend"

# of ||out - ref|| / ||ref||: two roundings to bf16 (p and out, 2**-9 each) leave 0.003; a dropped
# key, a wrong row or a misread code leaves far more than this
_MAX_RELATIVE_RMS = 2.0**-6

# (kv lengths, query lengths of extend): past a tile of 64, one token, past two tiles; and a single
# request, for which our decode kernel has a shape of its own
_BATCHES = (([65, 1, 130], [7, 1, 3]), ([130], [3]))


@dataclass(frozen=True)
class Facts:
    """All that the choice of a path may depend on; plain values, so that all ranks agree."""

    device_name: str
    capability: tuple[int, int]
    num_heads: int  # on this rank, as decode sees them
    ckv_dim: int
    kpe_dim: int
    q_dtype: str  # "bfloat16", "float16"
    pool_dtype: str  # "float8_e4m3fn", "float8_e5m2"
    flashinfer: str = ""

    @property
    def sm(self) -> str:
        return f"SM{self.capability[0]}{self.capability[1]}"


def check_native_supported(facts: Facts) -> Check:
    """FlashInfer's FP8 kernel, by metadata alone (its own `plan` refuses the rest)."""
    name = "native"
    # flashinfer >= 0.6.14: _validate_generated_fa_plan takes FP8 KV under exactly these conditions
    if facts.capability[0] != 9:
        return Check(name, "fail", f"{facts.sm}; FlashInfer's FP8 MLA kernel is SM90 only")
    if facts.q_dtype != "bfloat16":
        return Check(name, "fail", f"q is {facts.q_dtype}; the kernel takes bfloat16 only")
    if facts.pool_dtype != "float8_e4m3fn":
        return Check(name, "fail", f"the pool is {facts.pool_dtype}; the kernel takes e4m3 only")
    if facts.ckv_dim != 512 or facts.kpe_dim not in (0, 64):
        found = f"ckv {facts.ckv_dim}, kpe {facts.kpe_dim}; the kernel takes ckv 512, kpe 0 or 64"
        return Check(name, "fail", found)
    return Check(name, "ok", f"{facts.sm}, bfloat16 q, e4m3 pool, ckv 512, kpe {facts.kpe_dim}")


def check_gather_cast_supported(facts: Facts) -> Check:
    """The fallback needs what FlashInfer's 16-bit kernel needs, and FP8 rows to cast."""
    name = "gather_cast"
    if facts.num_heads > 128:
        fix = "raise --tp-size: causal plans of more than 128 heads can lose keys in FlashInfer"
        return Check(name, "fail", f"{facts.num_heads} heads on one rank", fix)
    # flashinfer 0.7: _validate_generated_fa_plan
    if facts.ckv_dim % 128 or facts.kpe_dim % 64 or facts.capability < (8, 0):
        found = f"ckv {facts.ckv_dim}, kpe {facts.kpe_dim} on {facts.sm}"
        fix = "FlashInfer's MLA kernel takes ckv % 128 == 0 and kpe % 64 == 0 on SM80 or newer"
        return Check(name, "fail", found, fix)
    return Check(name, "ok", f"{facts.pool_dtype} rows, cast to {facts.q_dtype}")


def check_fused_supported(facts: Facts) -> Check:
    """Our decode kernel, by metadata alone."""
    from .kernels.mla_decode import supported

    return supported(
        facts.capability,
        facts.num_heads,
        facts.q_dtype,
        facts.pool_dtype,
        facts.ckv_dim,
        facts.kpe_dim,
    )


_SUPPORTED = {
    "native": check_native_supported,
    "gather_cast": check_gather_cast_supported,
    "fused": check_fused_supported,
}


def check_supported(path: str, facts: Facts) -> Check:
    """What metadata says of `path`; nothing is compiled or run."""
    return _SUPPORTED[path](facts)


@functools.cache
def run_probe(path: str, phase: str, facts: Facts, device: str) -> Check:
    """Run `path` on `device` on a small case and compare; the finding is kept for the process.

    Args:
        path: `native`, `fused` or `gather_cast`.
        phase: `decode` or `extend`.
        facts: what the served model needs.
        device: a torch device string.

    Returns:
        A `Check`: level `ok` when the kernel ran and was right, else `fail` with what happened.
    """
    verdict = check_supported(path, facts)
    if not verdict.ok:
        return verdict
    name = f"{path} {phase}"
    try:
        errors = [_relative_rms(path, phase, facts, device, *batch) for batch in _BATCHES]
    except Exception as problem:  # whatever a compiler, a driver or a kernel raises is the finding
        lines = str(problem).strip().splitlines() or [""]
        return Check(name, "fail", f"{type(problem).__name__}: {lines[0][:300]}", _fix_for(problem))
    found = f"relative RMS error {' and '.join(f'{e:.1e}' for e in errors)} against float64"
    if not all(error <= _MAX_RELATIVE_RMS for error in errors):  # NaN must fail
        return Check(name, "fail", f"{found}, allowed {_MAX_RELATIVE_RMS:.1e}", "report this")
    return Check(name, "ok", found)


def _fix_for(problem: Exception) -> str:
    text = f"{type(problem).__name__} {problem}".lower()
    if any(word in text for word in ("nvcc", "cuda_home", "ninja", "compil")):
        return (
            "FlashInfer builds this kernel at first use: install nvcc (cuda-toolkit, on PATH or in "
            "CUDA_HOME) and ninja, or delete ~/.cache/flashinfer after a broken build"
        )
    if "out of memory" in text:
        return "lower --mem-fraction-static"
    return "run `sglang-fp8mla doctor --self-test` and report its output"


def _relative_rms(
    path: str, phase: str, facts: Facts, device: str, kv_lens: list[int], q_lens: list[int]
) -> float:
    """||out - ref|| / ||ref|| of one small batch attended by `path`."""
    import torch

    from .reference import ref_mla

    q_dtype = getattr(torch, facts.q_dtype)
    pool_dtype = getattr(torch, facts.pool_dtype)
    dim = facts.ckv_dim + facts.kpe_dim
    if phase == DECODE:
        q_lens = [1] * len(kv_lens)
    num_slots = 512
    generator = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def indptr(lens: list[int]) -> torch.Tensor:
        ends = torch.tensor([0, *lens]).cumsum(0)
        return ends.to(torch.int32)

    kv_indptr, qo_indptr = indptr(kv_lens), indptr(q_lens)
    nnz = sum(kv_lens)
    kv_indices = (torch.randperm(num_slots - 1, generator=generator)[:nnz] + 1).to(torch.int32)
    codes = torch.full((num_slots, 1, dim), 0x7F, dtype=torch.uint8)  # NaN where nobody may read
    codes[kv_indices.long()] = rand(nnz, 1, dim).to(pool_dtype).view(torch.uint8)
    q = (rand(sum(q_lens), facts.num_heads, dim) * 0.3).to(q_dtype)
    sm_scale = dim**-0.5
    q_nope, q_pe = q[..., : facts.ckv_dim], q[..., facts.ckv_dim :]
    exact, _ = ref_mla(
        q_nope,
        q_pe,
        codes.view(pool_dtype),
        kv_indices,
        kv_indptr,
        sm_scale=sm_scale,
        qo_indptr=qo_indptr,
        causal=phase == EXTEND,
    )
    pool = codes.to(device).view(pool_dtype)
    q = q.to(device)
    out = _attend(
        path,
        q[..., : facts.ckv_dim],
        q[..., facts.ckv_dim :],
        pool,
        qo_indptr.to(device),
        kv_indptr.to(device),
        kv_indices.to(device),
        causal=phase == EXTEND,
        sm_scale=sm_scale,
    )
    difference = out.cpu().double() - exact
    return float(difference.norm() / exact.norm())


def _attend(
    path: str,
    q_nope: Any,
    q_pe: Any,
    pool: Any,
    qo_indptr: Any,
    kv_indptr: Any,
    kv_indices: Any,
    *,
    causal: bool,
    sm_scale: float,
) -> Any:
    """One call of the kernel behind `path`, on the probe's operands."""
    import torch

    out = torch.full_like(q_nope, float("nan"), memory_format=torch.contiguous_format)
    bs = kv_indptr.numel() - 1
    _, num_heads, ckv = q_nope.shape
    if path == "fused":
        from .kernels.mla_decode import mla_decode

        q_pe = q_pe if q_pe.shape[-1] else None
        out, _ = mla_decode(q_nope, q_pe, pool, kv_indices, kv_indptr, sm_scale=sm_scale)
        return out

    from flashinfer import BatchMLAPagedAttentionWrapper

    scales = {}
    if path == "native":
        scales = {"ckv_scale": 1.0, "kpe_scale": 1.0}
    else:
        from .workspace import LiveSlots, Workspace

        live = LiveSlots(pool.shape[0], pool.device)
        kv_indices = live.update(kv_indices, kv_indptr, bs)
        workspace = Workspace(pool.shape[0], pool.shape[-1], q_nope.dtype, pool.device)
        pool = workspace.fill(pool, live)
    heads = plan_heads(num_heads) if causal else num_heads
    if heads != num_heads:
        q_nope, q_pe = pad_heads(q_nope, heads), pad_heads(q_pe, heads)
        out = torch.empty_like(q_nope)
    scratch = torch.empty(128 << 20, dtype=torch.uint8, device=pool.device)
    wrapper = BatchMLAPagedAttentionWrapper(scratch, backend="auto")
    kpe = pool.shape[-1] - ckv
    lens = kv_indptr[1:] - kv_indptr[:-1]
    wrapper.plan(
        qo_indptr,
        kv_indptr,
        kv_indices,
        lens,
        heads,
        ckv,
        kpe,
        1,
        causal,
        sm_scale,
        q_nope.dtype,
        pool.dtype,
    )
    wrapper.run(q_nope, q_pe, pool[..., :ckv], pool[..., ckv:], out=out, **scales)
    return out[:, :num_heads]


def plan_heads(num_heads: int) -> int:
    """Heads to plan a causal batch with: the next power of two, which divides FlashInfer's tiles.

    FlashInfer packs queries and heads into tiles of 64 or 128 rows. Where a tile ends inside a
    query, its kernels lose that query's last key when the key starts a KV tile; 0.7.1 and newer
    refuse such plans, except the fast plans of a CUDA graph, which do not look.
    """
    return 1 << (num_heads - 1).bit_length()


def pad_heads(q: Any, heads: int) -> Any:
    """`q` [num_tokens, num_heads, d] with zero heads appended, `[num_tokens, heads, d]`."""
    import torch

    return torch.nn.functional.pad(q, (0, 0, 0, heads - q.shape[1]))
